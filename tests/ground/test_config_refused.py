"""Settings that are wrong: each is one sentence that names setting, place and remedy."""

import pytest

from mooncake_store.config.settings import (
    ClientConfig,
    MasterConfig,
    WorkerConfig,
    load,
    load_client,
)
from mooncake_store.errors import ConfigError
from mooncake_store.units import SECOND_NS

DURATION = "a duration above 0 and up to 365d, with its unit, such as '10s' or '500ms'"


def refusal(program, **sources):
    sources.setdefault("environ", {})
    with pytest.raises(ConfigError) as refused:
        load(program, **sources)
    text = str(refused.value)
    assert "\n" not in text
    return text


@pytest.fixture
def refuse_file(tmp_path):
    """Return a function: the refusal of a file with the given text, PATH standing for its path."""

    def refuse(text, program=MasterConfig):
        path = tmp_path / "m.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return refusal(program, file=path).replace(str(path), "PATH")

    return refuse


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[master]\nprot = 1", "unknown setting 'prot' in [master] of PATH; did you mean 'port'?"),
        # A misspelt name is found in the tables of other programs too.
        (
            "[worker]\nsegment = 1",
            "unknown setting 'segment' in [worker] of PATH; did you mean 'segments'?",
        ),
        ("[mastr]\nport = 1", "unknown table 'mastr' in PATH; did you mean 'master'?"),
        ("port = 1", "unknown setting 'port' in PATH; known: client, credentials, data_networks, "),
        ("master = 1", "'master' in PATH must be a table, begun by the line [master]"),
        ("[[master]]\nport = 1", "'master' in PATH must be a table, begun by the line [master]"),
        ("[log]\nlevl = 1", "unknown setting 'levl' in [log] of PATH; did you mean 'level'?"),
        (
            "[log]\nlevel = 'loud'",
            "level in [log] of PATH must be one of debug, info, warning, error, not 'loud'",
        ),
        (
            "[master]\nport = '50051'",
            "port in [master] of PATH must be a whole number from 0 to 65535, not '50051'",
        ),
        (
            "[master]\nport = 70000",
            "port in [master] of PATH must be a whole number from 0 to 65535, not 70000",
        ),
        ("[master]\nport = true", "must be a whole number from 0 to 65535, not True"),
        ("[master]\nport = 1.5", "must be a whole number from 0 to 65535, not 1.5"),
        ("[master]\nport = {a = 1}", "must be a whole number from 0 to 65535, not {'a': 1}"),
        ("[master]\ninsecure = 'yes'", "must be true or false, not 'yes'"),
        ("[master]\nhost = 1", "host in [master] of PATH must be text, not 1"),
        ("[master]\nhigh_watermark = nan", "must be a number above 0 and up to 1, not nan"),
        ("[master]\nhigh_watermark = 90", "must be a number above 0 and up to 1, not 90"),
        ("[master]\nhard_pin_share = -0.1", "must be a number from 0 to 1, not -0.1"),
        ("[master]\nsuspect_after_pings = 0", "must be a whole number of at least 1, not 0"),
        ("[master]\nput_discard = 30", f"must be {DURATION}, not 30"),
        ("[master]\nput_discard = '0s'", f"must be {DURATION}, not '0s'"),
        ("[master]\nput_discard = '9000d'", f"must be {DURATION}, not '9000d'"),
        ("[master]\nallocator = 'slap'", "must be one of slab, offset, composite, not 'slap'"),
        ("[worker]\nsegments = '4GiB'", "must be a list, each item a size from 1MiB to "),
        ("[worker]\nsegments = ['16']", "'1.5g' or '4096', not ['16']"),
        (
            "[worker]\ntransports = ['rmda']",
            "must be a list, each item one of shm, rdma, tcp, not ",
        ),
    ],
)
def test_a_wrong_file_is_refused_where_it_is_wrong(refuse_file, text, said):
    program = WorkerConfig if text.startswith("[worker]") else MasterConfig
    assert said in refuse_file(text, program)


def test_invalid_toml_is_refused_with_the_line(refuse_file):
    said = refuse_file("[master]\nport = 1\nhost =\n")
    assert said.startswith("the configuration file PATH is not valid TOML: ")
    assert "line 3" in said


@pytest.mark.parametrize("text", [b"\xff\xfe", b"[master]\nport = " + b"9" * 5000])
def test_a_file_that_is_no_text_or_absurd_is_refused_like_invalid_toml(refuse_file, text):
    assert refuse_file(text).startswith("the configuration file PATH is not valid TOML: ")


def test_a_missing_file_is_refused_with_who_named_it(tmp_path):
    path = str(tmp_path / "none.toml")
    said = refusal(MasterConfig, file=path)
    assert said == f"cannot read the configuration file {path}: No such file or directory"
    said = refusal(MasterConfig, environ={"MOONCAKE_CONFIG": path})
    assert f"{path} (named by MOONCAKE_CONFIG): No such file" in said


def test_a_directory_instead_of_a_file_is_refused(tmp_path):
    assert "Is a directory" in refusal(MasterConfig, file=str(tmp_path))


@pytest.mark.parametrize(
    ("variable", "value", "said", "key"),
    [
        (
            "MOONCAKE_MASTER_PORT",
            "fifty",
            "MOONCAKE_MASTER_PORT in the environment must be a whole number from 0 to 65535, "
            "not 'fifty'",
            "port",
        ),
        (
            "MOONCAKE_MASTER_PING_INTERVAL",
            "1000",
            f"MOONCAKE_MASTER_PING_INTERVAL in the environment must be {DURATION}, not '1000'",
            "ping_interval",
        ),
        (
            "MOONCAKE_MASTER_INSECURE",
            "maybe",
            "MOONCAKE_MASTER_INSECURE in the environment must be true or false, not 'maybe'",
            "insecure",
        ),
        (
            "MOONCAKE_LOG_LEVEL",
            "loud",
            "MOONCAKE_LOG_LEVEL in the environment must be one of debug, info, warning, error, "
            "not 'loud'",
            "log_level",
        ),
    ],
)
def test_a_wrong_variable_is_refused_by_name_with_every_way_to_set_it(variable, value, said, key):
    assert refusal(MasterConfig, environ={variable: value}) == said + "; " + ways("master", key)


def ways(table, key, option=None):
    option = option or f"--{key.replace('_', '-')}"
    variable = f"MOONCAKE_{table}_{key}".upper()
    return f"{table}.{key} is set by {option}, {variable}, or {key} in [{table}] of a file"


def test_a_wrong_override_is_refused():
    said = refusal(MasterConfig, overrides={"prot": 1})
    assert said == "unknown setting 'prot' on the command line; did you mean 'port'?"
    said = refusal(MasterConfig, overrides={"port": "x"})
    wrong = "port on the command line must be a whole number from 0 to 65535, not 'x'"
    assert said == f"{wrong}; {ways('master', 'port')}"
    said = refusal(WorkerConfig, overrides={"segments": "x"})
    assert said.endswith(ways("worker", "segments", "--segment"))
    said = refusal(ClientConfig, overrides={"deadline": "x"})
    assert said.endswith(ways("client", "deadline", "--setting deadline=VALUE"))


def test_arguments_of_a_client_are_not_called_a_command_line():
    with pytest.raises(ConfigError) as refused:
        load_client(None, {"replicsa": 1})
    said = "unknown setting 'replicsa' given to the client; did you mean 'replicas'?"
    assert str(refused.value) == said
    with pytest.raises(ConfigError, match="replicas given to the client must be a whole number"):
        load_client(None, {"replicas": 0})


def test_a_long_wrong_value_is_cut_short():
    said = refusal(MasterConfig, overrides={"port": "x" * 10_000})
    assert len(said) < 300
    assert "xxx...; master.port is set by " in said


def test_settings_that_exclude_each_other_are_refused_with_their_origins(tmp_path):
    path = tmp_path / "m.toml"
    path.write_text("[master]\nput_discard = '20m'\n")
    assert refusal(MasterConfig, file=path) == (
        "master.put_release (10m) must be longer than put_discard (20m): a late write must not "
        f"land in reused space (put_discard: file {path}, put_release: default); "
        f"{ways('master', 'put_discard')}; {ways('master', 'put_release')}"
    )


@pytest.mark.parametrize(
    ("program", "overrides", "said"),
    [
        (MasterConfig, {"put_release": "30s"}, "put_release (30s) must be longer than put_discard"),
        (
            MasterConfig,
            {"default_lease_ttl": "6m"},
            "master.lease_ttl_max (5m) must be at least as long as default_lease_ttl (6m)",
        ),
        (MasterConfig, {"soft_pin_ttl": "2d"}, "soft_pin_ttl_max (1d) must be at least as long"),
        (MasterConfig, {"client_ttl": "3s"}, "master.client_ttl must be longer than suspect_after"),
        (
            MasterConfig,
            {"data_networks": "10.0.0.0/8,10.0.0.1/8"},
            "master.data_networks: '10.0.0.1/8' is not a network: 10.0.0.1/8 has host bits set",
        ),
        (WorkerConfig, {"data_networks": "pool"}, "worker.data_networks: 'pool' is not a network"),
        (ClientConfig, {"data_networks": "pool"}, "client.data_networks: 'pool' is not a network"),
        (MasterConfig, {"quotas": "a=1GB,b"}, "master.quotas: 'b' is not a quota; write "),
        (MasterConfig, {"quotas": "a=1GB,b=0"}, "master.quotas: 'b=0' is less than 1MiB"),
        (MasterConfig, {"quotas": "a=1GB,a=2GB"}, "master.quotas names a more than once"),
        (
            MasterConfig,
            {"quotas": "a=3MiB", "shards": 4},
            "master.quotas: 'a=3MiB' is less than 1MiB for each of 4 shards",
        ),
        (
            MasterConfig,
            {"quotas": [f"n{number}=1GB" for number in range(65)]},
            "master.quotas names 65 namespaces, and 64 is the most",
        ),
        (
            MasterConfig,
            {"namespace_offloads": "a=write,b=later"},
            "master.namespace_offloads: 'b=later' is none of namespace=POLICY with POLICY one of "
            "none, evict, write",
        ),
        (
            MasterConfig,
            {"namespace_offloads": "/a=write"},
            "master.namespace_offloads: '/a=write' names '/a', which cannot be the namespace",
        ),
        (
            MasterConfig,
            {"namespace_offloads": "a=write,a=none"},
            "master.namespace_offloads names a more than once",
        ),
        (
            MasterConfig,
            {"eviction_ratio": 0.95},
            "master.eviction_ratio (0.95) must be below high_watermark (0.9)",
        ),
        (
            MasterConfig,
            {"host": "0.0.0.0"},
            "master.host '0.0.0.0' can be reached from other machines, so set secret_file",
        ),
        (WorkerConfig, {"host": "::"}, "worker.host '::' can be reached from other machines"),
        (WorkerConfig, {"host": "node7"}, "worker.host 'node7' can be reached"),
        (
            MasterConfig,
            {"insecure": True, "secret_file": "/s"},
            "master.insecure and master.secret_file exclude each other",
        ),
        (WorkerConfig, {"master": "node7"}, "worker.master: 'node7' is not an address; write host"),
        (WorkerConfig, {"segments": ""}, "worker.segments must name at least one"),
        (
            WorkerConfig,
            {"memory": "shm"},
            "worker.memory must be auto, anonymous or the whole",
        ),
        (WorkerConfig, {"transports": "shm,tcp,tcp"}, "worker.transports names tcp more than once"),
        (ClientConfig, {"url": "http://x"}, "client.url: 'http://x' is not a store URL; write "),
        (ClientConfig, {"segment": 16}, "client.segment must be 0 or at least 1MiB"),
        (
            ClientConfig,
            {"connect_timeout": "1m"},
            "client.deadline (30s) must be at least as long as connect_timeout (1m)",
        ),
    ],
)
def test_contradictions_are_refused(program, overrides, said):
    text = refusal(program, overrides=overrides)
    assert said in text
    assert text.endswith(" of a file")  # the ways to set them


def test_credentials_in_a_url_are_refused_and_not_repeated():
    said = refusal(ClientConfig, overrides={"url": "mooncake://me:hunter2@host:1/ns"})
    assert "secret_file" in said
    assert "hunter2" not in said


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]"])
def test_loopback_needs_no_secret(host):
    assert load(MasterConfig, environ={}, overrides={"host": host}).value.host == host


@pytest.mark.parametrize("remedy", [{"insecure": True}, {"secret_file": "/s"}])
def test_a_reachable_host_is_accepted_with_a_secret_or_on_demand(remedy):
    overrides = {"host": "0.0.0.0", **remedy}
    assert load(WorkerConfig, environ={}, overrides=overrides).value.host == "0.0.0.0"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"port": 70_000}, "master.port must be a whole number from 0 to 65535"),
        ({"port": True}, "master.port must be a whole number"),
        ({"ping_interval_ns": 0.5}, "master.ping_interval_ns must be a duration"),
        ({"eviction_policy": "LRU"}, "master.eviction_policy: unknown eviction policy"),
        ({"put_release_ns": SECOND_NS}, "master.put_release (1s) must be longer than put_discard"),
    ],
)
def test_settings_made_by_hand_are_checked_too(wrong, said):
    with pytest.raises(ConfigError) as refused:
        MasterConfig(**wrong)
    assert said in str(refused.value)
