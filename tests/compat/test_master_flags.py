"""Start scripts of the original's master need one word changed."""

import json

import pytest

from mooncake_store.compat.master_flags import translate
from mooncake_store.config.settings import MasterConfig, load
from mooncake_store.errors import ConfigError, InvalidArgumentError


def test_flags_become_settings_in_every_form():
    settings, notes, *ports = translate(
        [
            "--rpc_port=50077",
            "--default-kv-lease-ttl",
            "5000",
            "--eviction_high_watermark_ratio=0.8",
            "-eviction_ratio=0.2",
            "--client_ttl=20",
            "--noallow_evict_soft_pinned_objects",
            "--memory_allocator=cachelib",
            "--allocation_strategy=free_ratio_first",
            "--put_start_discard_timeout_sec=10",
            "--max_kv_soft_pin_ttl=1h",
        ]
    )
    config = load(MasterConfig, environ={}, overrides=settings).value
    assert (config.port, config.default_lease_ttl_ns) == (50077, 5 * 10**9)
    assert (config.high_watermark, config.eviction_ratio) == (0.8, 0.2)
    assert config.client_ttl_ns == 20 * 10**9
    assert not config.evict_soft_pinned
    assert (config.allocator, config.placement) == ("slab", "free_ratio")
    assert config.put_discard_ns == 10 * 10**9
    assert config.soft_pin_ttl_max_ns == 3600 * 10**9
    assert (notes, ports) == ([], [None, None])  # nothing is opened unasked


def test_what_has_no_effect_is_told():
    settings, notes, *_ = translate(["--enable_ha=true", "--pod_name", "x", "--logtostderr"])
    assert settings == {}
    assert [text.partition(" ")[0] for text in notes] == [
        "--enable_ha",
        "--pod_name",
        "--logtostderr",
    ]


@pytest.mark.parametrize(
    ("arguments", "control", "metadata"),
    [
        (["--metrics_port=9005"], ("127.0.0.1", 9005), None),
        (["--metrics_host=0.0.0.0"], ("0.0.0.0", 9003), None),
        (["--enable_http_metadata_server"], None, ("127.0.0.1", 8080)),
        (
            [
                "--enable_http_metadata_server=true",
                "--http_metadata_server_port=1",
                "--http_metadata_server_host=10.0.0.5",
            ],
            None,
            ("10.0.0.5", 1),
        ),
        (["--enable_http_metadata_server=false", "--http_metadata_server_port=1"], None, None),
    ],
)
def test_flags_of_http_ports(arguments, control, metadata):
    found = translate(arguments)
    assert (found.settings, found.control, found.metadata) == ({}, control, metadata)


@pytest.mark.parametrize(
    ("arguments", "offload", "hits"),
    [
        ([], "evict", 2),
        (["--enable_offload=true"], "write", 2),
        (["--enable_offload", "--offload_on_evict=true"], "evict", 2),
        (["--enable_offload=false", "--offload_on_evict=true"], "none", 2),
        (["--noenable_offload"], "none", 2),
        (["--promotion_on_hit=true"], "evict", 2),
        (["--promotion_on_hit", "--promotion_admission_threshold=5"], "evict", 5),
        (["--promotion_on_hit", "--promotion_admission_threshold=0"], "evict", 1),
        (["--promotion_on_hit", "--promotion_admission_threshold=900"], "evict", 255),
        (["--promotion_on_hit=false", "--promotion_admission_threshold=5"], "evict", 0),
    ],
)
def test_flags_of_offload_and_promotion(arguments, offload, hits):
    settings, notes, *_ = translate(arguments)
    config = load(MasterConfig, environ={}, overrides=settings).value
    assert (config.offload, config.promotion_hits, notes) == (offload, hits, [])


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--offload_on_evict=true", "without --enable_offload"),
        ("--promotion_admission_threshold=3", "without --promotion_on_hit"),
        ("--root_fs_dir=/shared", "file:PATH,SIZE"),
        ("--quota_bytes=5", "how much of a disk"),
        ("--offloading_queue_limit=5", "bounds of its own"),
    ],
)
def test_a_flag_of_disks_that_has_no_effect_says_what_has(argument, said):
    settings, (note,), *_ = translate([argument])
    assert settings == {}
    assert said in note


def test_a_port_without_its_server_is_told():
    (note,) = translate(["--http_metadata_server_port=1"]).notes
    assert "--enable_http_metadata_server" in note


def test_flags_of_quotas_lead_to_the_option_that_sets_them():
    settings, notes, *_ = translate(
        ["--tenant_quota_connector_type=file", "--enable_multi_tenants"]
    )
    assert settings == {}
    assert "--quota" in notes[0]
    assert "--quota" not in notes[1]


def test_a_switch_takes_its_value_in_both_ways():
    assert translate(["--allow_evict_soft_pinned_objects", "false", "--port=1"]).settings == {
        "evict_soft_pinned": "false",
        "port": "1",
    }
    assert translate(["--allow_evict_soft_pinned_objects", "--port=1"]).settings == {
        "evict_soft_pinned": "true",
        "port": "1",
    }
    assert translate(["--port=7", "--rpc_port=0"]).settings == {"port": "7"}


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        (["--rpc_prot=5"], InvalidArgumentError, "--rpc_port"),
        (["stray"], InvalidArgumentError, "stray"),
        (["--port"], InvalidArgumentError, "needs a value"),
        (["--memory_allocator=jemalloc"], ConfigError, "offset, cachelib"),
        (["--config_path=/no/such/file"], ConfigError, "/no/such/file"),
        (["--metrics_port=http"], ConfigError, "--metrics_port"),
        (["--promotion_admission_threshold=x"], ConfigError, "promotion_admission_threshold"),
        (["--metrics_prt=1"], InvalidArgumentError, "--metrics_port"),
    ],
)
def test_nonsense_is_an_error_that_names_it(arguments, kind, said):
    with pytest.raises(kind, match=said):
        translate(arguments)


def test_a_file_of_flags_yields_to_the_command_line(tmp_path):
    path = tmp_path / "master.json"
    path.write_text(json.dumps({"rpc_port": 1, "allow_evict_soft_pinned_objects": False}))
    settings, *_ = translate([f"--config_path={path}", "--rpc_port=2"])
    assert settings == {"port": "2", "evict_soft_pinned": "false"}


def test_a_file_of_flags_holds_one_object(tmp_path):
    path = tmp_path / "master.json"
    path.write_text(json.dumps({"config_path": "another", "port": 3}))
    assert translate([f"--config_path={path}"]).settings == {"port": "3"}
    path.write_text(json.dumps(["--port=3"]))
    with pytest.raises(ConfigError, match="one JSON object"):
        translate([f"--config_path={path}"])


def test_the_command_takes_them(start_program, tmp_path):
    port_file = tmp_path / "master.json"
    program = start_program(
        "-m", "mooncake_store", "master", "--port=0", f"--port-file={port_file}",
        "--default_kv_lease_ttl=3s", "--enable-ha=false",
    )  # fmt: skip
    program.wait_for_line("--enable_ha has no effect")
    program.wait_for_line("is ready")
    wrong = start_program("-m", "mooncake_store", "master", "--evict_ratio=0.1")
    assert wrong.wait() == 2
    assert "--eviction_ratio" in wrong.output
