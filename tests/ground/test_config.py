"""Settings that are right: precedence, origins, units, lists, and what a program can show."""

import subprocess
import sys
from typing import Annotated

import pytest
from msgspec import Meta

from mooncake_store.config.settings import (
    PROGRAMS,
    ClientConfig,
    MasterConfig,
    Row,
    Settings,
    WorkerConfig,
    load,
    rows,
    settings_of,
)
from mooncake_store.units import GIB, MIB, SECOND_NS


@pytest.fixture
def toml(tmp_path):
    """Return a function that writes a configuration file and returns its path."""

    def write(text):
        path = tmp_path / "mooncake.toml"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_default_is_valid_explained_and_called_a_default(program):
    loaded = load(program, environ={})
    assert loaded.value == program()
    assert {row.origin for row in rows(loaded)} == {"default"}
    assert all(setting.text.endswith((".", "none.")) for setting in settings_of(program))


def test_the_command_line_beats_the_environment_beats_the_file_beats_the_default(toml):
    path = toml('[master]\nport = 1\nshards = 2\nhost = "127.0.0.2"\n')
    environ = {"MOONCAKE_MASTER_PORT": "3", "MOONCAKE_MASTER_SHARDS": "4"}
    loaded = load(MasterConfig, file=path, environ=environ, overrides={"port": 5, "shards": None})
    value = loaded.value
    assert (value.port, value.shards, value.host, value.placement) == (5, 4, "127.0.0.2", "random")
    assert loaded.origins["port"] == "command line"
    assert loaded.origins["shards"] == "environment MOONCAKE_MASTER_SHARDS"
    assert loaded.origins["host"] == f"file {path}"
    assert loaded.origins["placement"] == "default"


def test_the_environment_can_name_the_file(toml):
    path = toml("[master]\nport = 7\n")
    loaded = load(MasterConfig, environ={"MOONCAKE_CONFIG": path})
    assert (loaded.value.port, loaded.origins["port"]) == (7, f"file {path}")


def test_a_file_on_the_command_line_replaces_the_one_of_the_environment(toml):
    path = toml("[master]\nport = 7\n")
    environ = {"MOONCAKE_CONFIG": "/does/not/exist.toml"}
    assert load(MasterConfig, file=path, environ=environ).value.port == 7


def test_general_settings_reach_every_program_and_its_own_place_wins(toml, tmp_path):
    path = toml(
        'secret_file = "/s/general"\n[log]\nlevel = "debug"\njson = true\n'
        '[worker]\nsecret_file = "/s/worker"\nlog_level = "error"\n'
    )
    master = load(MasterConfig, file=path, environ={}).value
    worker = load(WorkerConfig, file=path, environ={}).value
    assert (master.secret_file, master.log_level, master.log_json) == ("/s/general", "debug", True)
    assert (worker.secret_file, worker.log_level) == ("/s/worker", "error")


def test_a_general_variable_beats_the_own_table_of_the_file_but_not_the_own_variable(toml):
    path = toml('[client]\nsecret_file = "/file"\n')
    environ = {"MOONCAKE_SECRET_FILE": "/general"}
    assert load(ClientConfig, file=path, environ=environ).value.secret_file == "/general"
    environ["MOONCAKE_CLIENT_SECRET_FILE"] = "/own"
    loaded = load(ClientConfig, file=path, environ=environ)
    assert loaded.value.secret_file == "/own"
    assert loaded.origins["secret_file"] == "environment MOONCAKE_CLIENT_SECRET_FILE"


def test_sizes_and_durations_take_units_from_every_source(toml):
    path = toml('[master]\nping_interval = "250ms"\n[worker]\nsegments = [1048576]\n')
    environ = {"MOONCAKE_MASTER_PUT_DISCARD": "1m"}
    overrides = {"lease_ttl_max": "1h", "client_ttl": 2.5}
    value = load(MasterConfig, file=path, environ=environ, overrides=overrides).value
    assert value.ping_interval_ns == SECOND_NS // 4
    assert load(WorkerConfig, file=path, environ={}).value.segments_bytes == (MIB,)
    assert value.put_discard_ns == 60 * SECOND_NS
    assert value.lease_ttl_max_ns == 3600 * SECOND_NS
    assert value.client_ttl_ns == 2_500_000_000


def test_lists_are_toml_lists_in_a_file_and_comma_separated_elsewhere(toml):
    path = toml('[worker]\nsegments = ["1GiB", 2097152]\ntransports = ["TCP"]\n')
    value = load(WorkerConfig, file=path, environ={}).value
    assert value.segments_bytes == (GIB, 2 * MIB)
    assert value.transports == ("tcp",)
    environ = {"MOONCAKE_WORKER_SEGMENTS": "4GiB, 1g", "MOONCAKE_WORKER_TRANSPORTS": "tcp,shm"}
    value = load(WorkerConfig, file=path, environ=environ).value
    assert value.segments_bytes == (4 * GIB, GIB)
    assert value.transports == ("tcp", "shm")


@pytest.mark.parametrize(("text", "value"), [("TRUE", True), ("1", True), ("off", False)])
def test_a_boolean_variable_has_the_usual_spellings(text, value):
    environ = {"MOONCAKE_CLIENT_VERIFY": text}
    assert load(ClientConfig, environ=environ).value.verify is value


def test_an_empty_variable_counts_as_absent():
    environ = {"MOONCAKE_MASTER_PORT": "", "MOONCAKE_CONFIG": "", "MOONCAKE_MASTER_TYPO": ""}
    assert load(MasterConfig, environ=environ).origins["port"] == "default"


def test_variables_that_inference_engines_read_are_not_settings():
    environ = {
        "MOONCAKE_CONFIG_PATH": "/etc/mooncake.json",
        "MOONCAKE_MASTER": "10.0.0.1:50051",
        "MOONCAKE_MASTER_METRICS_PORT": "9003",
        "MOONCAKE_CLIENT": "unix:/run/mooncake",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "4gb",
        "MOONCAKE_PROTOCOL": "rdma",
    }
    assert load(ClientConfig, environ=environ).value == ClientConfig()


def test_tables_and_variables_of_serving_and_of_other_programs_are_left_alone(toml):
    path = toml("[serving]\nanything = 1\n[serving.more]\nx = 2\n[client]\nreplicas = 2\n")
    environ = {"MOONCAKE_SERVING_X": "1", "MOONCAKE_PROTOCOL": "tcp", "PATH": "/bin"}
    assert load(MasterConfig, file=path, environ=environ).value == MasterConfig()


class ServingConfig(Settings, frozen=True, kw_only=True):
    """Settings of a package that this one does not know."""

    table = "serving"

    patience_s: Annotated[float, Meta(extra={"unit": "s"}, description="How long.")] = 1.0


def test_a_program_of_another_package_brings_its_own_table_and_shares_the_file(toml):
    path = toml('[serving]\npatience = "2s"\n[master]\nport = 1\n')
    assert load(ServingConfig, file=path, environ={}).value.patience_s == 2.0
    environ = {"MOONCAKE_SERVING_PATIENCE": "3s"}
    loaded = load(ServingConfig, file=path, environ=environ)
    assert rows(loaded) == [
        Row(
            "serving.patience",
            "3s",
            "environment MOONCAKE_SERVING_PATIENCE",
            "MOONCAKE_SERVING_PATIENCE",
        )
    ]
    loaded = load(ServingConfig, environ={"MOONCAKE_SERVING_PATIENT": "3s"})
    assert loaded.unknown == {"MOONCAKE_SERVING_PATIENT": "MOONCAKE_SERVING_PATIENCE"}


def test_a_setting_without_an_explanation_or_of_a_strange_type_is_our_bug():
    class Unexplained(Settings, frozen=True, kw_only=True):
        table = "x"
        port: int = 1

    class Strange(Settings, frozen=True, kw_only=True):
        table = "x"
        raw: Annotated[bytes, Meta(description="Bytes.")] = b""

    with pytest.raises(TypeError, match=r"x\.port has no description"):
        load(Unexplained, environ={})
    with pytest.raises(TypeError, match="a setting cannot be of type <class 'bytes'>"):
        load(Strange, environ={})


def test_rows_show_each_value_as_a_variable_would_hold_it():
    loaded = load(WorkerConfig, environ={}, overrides={"segments": "1536MiB,2000001,4GiB"})
    shown = {row.name: row for row in rows(loaded)}
    # A size that no unit expresses exactly is shown in bytes, so nothing is lost.
    assert shown["worker.segments"].value == "1.5GiB,2000001,4GiB"
    assert shown["worker.transports"].value == "shm,rdma,tcp"
    assert shown["worker.segments"].origin == "command line"
    assert shown["worker.segments"].variable == "MOONCAKE_WORKER_SEGMENTS"


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_rows_show_can_be_loaded_back(program):
    loaded = load(program, environ={})
    environ = {row.variable: row.value for row in rows(loaded)}
    assert load(program, environ=environ).value == loaded.value


def test_a_setting_survives_as_a_value():
    config = MasterConfig(port=1)
    assert config == MasterConfig(port=1)
    with pytest.raises(AttributeError):
        config.port = 2


def test_the_ground_floor_imports_neither_numpy_nor_numba():
    code = (
        "import sys, mooncake_store.clock\n"
        "import mooncake_store.config.settings, mooncake_store.program.kernels\n"
        "heavy = {'numpy', 'numba', 'asyncio', 'tomllib', 'difflib'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
