"""The small types behave as the original's: defaults, checks, numbers, text."""

import json

import pytest

from mooncake_store.compat.config import MooncakeConfig, parse_flag, parse_size
from mooncake_store.compat.values import (
    ObjectDataType,
    ParallelAxis,
    QueryTaskResponse,
    ReadTarget,
    ReplicateConfig,
    SoftPinAction,
    TaskStatus,
    TaskType,
)


def test_a_configuration_has_the_originals_defaults_and_text():
    config = ReplicateConfig()
    assert str(config) == (
        "ReplicateConfig: { replica_num: 1, nof_replica_num: 0, dfs_replica_num: 0, "
        "soft_pin_action: PRESERVE, soft_pin_ttl_ms: default, with_hard_pin: 0, "
        "preferred_segments: [], preferred_nof_segments: [], prefer_alloc_in_same_node: 0, "
        "data_type: UNKNOWN }"
    )
    assert (config.preferred_segment, config.group_ids) == ("", None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("soft_pin_ttl_ms", -1),
        ("soft_pin_ttl_ms", 1 << 64),
        ("replica_num", "2"),
        ("soft_pin_action", 1),
        ("preferred_segments", "one"),
        ("with_hard_pin", 1),
        ("group_ids", [1]),
    ],
)
def test_a_value_of_a_wrong_type_is_a_type_error(name, value):
    with pytest.raises(TypeError, match=name):
        setattr(ReplicateConfig(), name, value)


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError):
        ReplicateConfig().with_soft_pin = True
    assert hasattr(ReplicateConfig(), "group_ids")
    assert not hasattr(ReplicateConfig(), "session_ids")


def test_enumerations_have_the_originals_numbers():
    assert int(SoftPinAction.ENABLE) == 1
    assert SoftPinAction.ENABLE != 1
    assert str(SoftPinAction.ENABLE) == "SoftPinAction.ENABLE"
    assert (int(TaskStatus.FAILED), int(TaskStatus.SUCCESS)) == (2, 3)
    assert ObjectDataType(9) is ObjectDataType.GENERAL


def test_defaults_of_the_others():
    assert ReadTarget().mode == "as_stored"
    assert (ParallelAxis().size, ParallelAxis().split_dim) == (1, None)
    assert QueryTaskResponse().type is TaskType.REPLICA_COPY


@pytest.mark.parametrize(
    ("text", "size"),
    [("16MB", 16 << 20), ("16 MB", 16 << 20), ("1.5GB", 3 << 29), ("2k", 2048), (7, 7), ("8", 8)],
)
def test_sizes_have_binary_units(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["50%", "", "MB", "many", "inf", float("inf"), None, True])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="Invalid segment size"):
        parse_size(text)


def test_flags():
    assert parse_flag("Yes")
    assert not parse_flag("false")
    assert not parse_flag(None)
    with pytest.raises(ValueError, match="maybe"):
        parse_flag("maybe")


def test_a_configuration_file_and_variables_say_the_same(tmp_path, monkeypatch):
    path = tmp_path / "mooncake.json"
    path.write_text(
        json.dumps(
            {
                "local_hostname": "localhost",
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": "10.0.0.1:50051",
                "global_segment_size": "1GB",
                "protocol": "TCP",
                "something_newer": 1,
            }
        )
    )
    for name, value in {
        "MOONCAKE_MASTER": "10.0.0.1:50051",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "1GB",
        "MOONCAKE_PROTOCOL": "tcp",
    }.items():
        monkeypatch.setenv(name, value)
    from_variables = MooncakeConfig.load_from_env()
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))
    assert MooncakeConfig.load_from_env() == from_variables
    assert from_variables.global_segment_size == 1 << 30


def test_a_configuration_that_names_no_master_is_refused(monkeypatch, tmp_path):
    monkeypatch.delenv("MOONCAKE_MASTER", raising=False)
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    with pytest.raises(ValueError, match="MOONCAKE_CONFIG_PATH"):
        MooncakeConfig.load_from_env()
    path = tmp_path / "empty.json"
    path.write_text('{"local_hostname": "a", "metadata_server": "b"}')
    with pytest.raises(ValueError, match="master_server_address"):
        MooncakeConfig.from_file(str(path))


def test_an_unknown_protocol_is_passed_on_with_a_warning(caplog):
    made = MooncakeConfig("a", "b", 0, 0, "Pigeon", "", "c")
    assert made.protocol == "pigeon"
    assert "pigeon" in caplog.text
    with pytest.raises(ValueError, match="protocol"):
        MooncakeConfig("a", "b", 0, 0, " ", "", "c")
    with pytest.raises(ValueError, match="negative"):
        MooncakeConfig("a", "b", -1, 0, "tcp", "", "c")
