"""Settings on the command line: an option for each, `config show` and `config init`."""

import json
import os
import re
import tomllib

import pytest

from mooncake_store import LocalCluster
from mooncake_store.cli.main import main
from mooncake_store.cli.shared.program_options import begin
from mooncake_store.config.settings import PROGRAMS, MasterConfig, WorkerConfig, load, settings_of
from mooncake_store.endpoint import split_masters
from tests.cli.test_cli import LEAVES

COMMANDS = {" ".join(path): command for path, command in LEAVES}


def options(command):
    return {option for each in command.params for option in (*each.opts, *each.secondary_opts)}


@pytest.mark.parametrize("program", [MasterConfig, WorkerConfig])
def test_every_setting_of_a_program_is_an_option_of_its_command(program):
    command = COMMANDS[f"mooncake {program.table}"]
    for setting in settings_of(program):
        assert setting.option in options(command)
    assert "--no-insecure" in options(command)


def test_every_command_of_a_store_takes_file_profile_and_settings():
    # Programs, which have settings of their own, and what looks at a pool without being its client.
    others = ("worker", "serve", "standby", "standbys", "shard serve", "doctor")
    own = {f"mooncake {name}" for name in others}
    found = [command for name, command in COMMANDS.items() if name not in own]
    found = [command for command in found if "--secret-file" in options(command)]
    found = [command for command in found if "--url" in options(command)]
    assert len(found) >= 8
    for command in found:
        assert options(command) >= {"--config", "--profile", "--setting"}, command.name


@pytest.fixture
def started(monkeypatch):
    """Run `mooncake master` or `worker` up to where it would start; return its settings."""
    seen = []

    for place in ("master.running.run_master", "worker.program.run_worker"):
        monkeypatch.setattr(
            f"mooncake_store.{place}", lambda settings, *_, **__: seen.append(settings)
        )

    def run(*arguments, code=0):
        assert main([str(one) for one in arguments]) == code
        return seen.pop() if seen else None

    return run


# What fits the other settings at their defaults, and is no default.
TYPED = {
    "host": "127.0.0.2", "master": "127.0.0.1:7", "rails": "127.0.0.2:7", "quotas": "x=2MiB",
    "data_networks": "10.0.0.0/8", "reached_as": "10.96.0.1:50051",
    "namespace_offloads": "x=write", "namespace": "team-a",
    "lease_ttl_max": "7m", "put_release": "20m", "soft_pin_ttl_max": "2d", "client_ttl": "20s",
    "ping_interval": "500ms", "suspect_after_pings": "4", "eviction_policy": "sieve",
}  # fmt: skip
BESIDE = {
    "cold_url": {"name": "w"},
    "cold_keys": {"name": "w", "cold_url": "memory://x"},
    "credentials": {"secret_file": "/x"},
    "tls_key": {"tls_certificate": "/x"},
    "tls_authority": {"tls_certificate": "/x"},
    "tls_name": {"tls_certificate": "/x"},
}
"""What a setting does not go without."""


def typed(setting):
    """The words of a command line that change a setting, and the value they mean."""
    kind = setting.kind
    if kind.base is bool:
        no = f"--no-{setting.option.removeprefix('--')}"
        return [no if setting.default else setting.option], not setting.default
    text = TYPED.get(setting.name)
    if text is None and kind.choices:
        text = next(each for each in kind.choices if each != setting.default)
    elif text is None and kind.unit:
        text = "2MiB" if kind.unit == "bytes" else "7s"
    elif text is None:
        text = {int: "3", float: "0.25", str: "/x"}[kind.base]
    return [setting.option, text], text


@pytest.mark.parametrize(
    ("program", "setting"),
    [
        pytest.param(program, setting, id=f"{program.table}.{setting.name}")
        for program in (MasterConfig, WorkerConfig)
        for setting in settings_of(program)
    ],
)
def test_an_option_reaches_its_setting(started, monkeypatch, program, setting):
    monkeypatch.setattr("mooncake_store.credentials.read_secret", lambda _: b"x" * 16)
    monkeypatch.setattr("mooncake_store.credentials.sealing", lambda _, secret: secret)
    words, meant = typed(setting)
    beside = BESIDE.get(setting.name, {})
    for name, value in beside.items():
        words += [f"--{name.replace('_', '-')}", value]
    settings = started(program.table, *words)
    assert getattr(settings, setting.attribute) != setting.default
    overrides = {setting.name: meant, **beside}
    assert settings == load(program, environ={}, overrides=overrides).value


def test_lists_take_an_option_for_each_item_or_commas(started):
    settings = started("master", "--quota", "a=1GB,b=2GB", "--quota", "c=3GB")
    assert settings.quotas == ("a=1GB", "b=2GB", "c=3GB")
    settings = started("worker", "--segment", "1GiB,2GiB", "--segment", "file:/a,b,1GiB")
    assert settings.segments_bytes == (1 << 30, 2 << 30)
    assert settings.files == ("/a,b:1GiB",)


def test_a_worker_is_told_several_masters_as_addresses_or_a_url(started, monkeypatch, capsys):
    masters = "10.0.0.5:50051,[::1]:7"
    assert started("worker", "--master", masters).master == masters
    named = started("worker", "--url", "mooncake://10.0.0.5,[::1]:7/ns").master
    assert split_masters(named) == split_masters(masters)
    named = started("worker", "--url", "mooncake+etcd://10.0.0.9/prod").master
    assert split_masters(named) == ((("10.0.0.9", 2379),), "prod")
    monkeypatch.setenv("MOONCAKE_WORKER_MASTER", masters)
    assert started("worker").master == masters
    started("worker", "--master", "10.0.0.5:1,10.0.0.5:1", code=3)
    assert "worker.master: '10.0.0.5:1,10.0.0.5:1' names 10.0.0.5:1 more" in capsys.readouterr().err


def test_the_refusal_of_an_option_names_every_way_to_set_it(started, capsys):
    started("master", "--put-discard", "30", code=3)
    said = capsys.readouterr().err
    assert said.startswith("error: put_discard on the command line must be a duration")
    assert "set by --put-discard, MOONCAKE_MASTER_PUT_DISCARD, or put_discard in [master]" in said


def test_a_program_starts_beside_variables_of_others(started, monkeypatch, capsys):
    monkeypatch.setattr("mooncake_store.config.loading._told", set())
    monkeypatch.setenv("MOONCAKE_MASTER_PORT", "tcp://10.96.0.1:50051")
    monkeypatch.setenv("MOONCAKE_MASTER_CONTROL_BASE", "/x")
    assert started("master", "--log-json").port == 50051
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert len([line for line in lines if "CONTROL_BASE" in line["message"]]) == 1
    started("master", "--strict", code=3)
    assert "unknown variables in the environment: MOONCAKE_MASTER_CON" in capsys.readouterr().err


def test_show_names_what_means_nothing(monkeypatch, capsys):
    monkeypatch.setenv("MOONCAKE_MASTER_PORT", "tcp://10.96.0.1:50051")
    monkeypatch.setenv("MOONCAKE_MASTER_PROT", "1")
    assert main(["config", "show"]) == 0
    said = capsys.readouterr().err
    assert "note: unknown variable, ignored: MOONCAKE_MASTER_PROT (did you mean MOONCAKE_MA" in said
    assert "note: passed over, because they describe a service: MOONCAKE_MASTER_PORT" in said
    assert main(["config", "show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["unknown"] == {"MOONCAKE_MASTER_PROT": "MOONCAKE_MASTER_PORT"}
    assert shown["links"] == ["MOONCAKE_MASTER_PORT"]


def test_show_reads_a_profile(tmp_path, capsys):
    path = tmp_path / "m.toml"
    path.write_text('[profile.test]\nurl = "mooncake://test:1/a"\n')
    words = ["config", "show", "--config", str(path), "--profile", "test", "--json"]
    assert main([*words, "--program", "client"]) == 0
    shown = json.loads(capsys.readouterr().out)["settings"]["client.url"]
    assert shown["value"] == "mooncake://test:1/a"
    assert shown["origin"] == f"file {path} [profile.test]"
    assert main(words) == 3
    assert "add --program client" in capsys.readouterr().err


def test_init_writes_a_file_that_changes_nothing_and_names_everything(tmp_path, capsys):
    path = tmp_path / "m.toml"
    assert main(["config", "init", str(path)]) == 0
    assert f"{path} written" in capsys.readouterr().out
    text = path.read_text()
    for program in PROGRAMS:
        assert load(program, file=path, environ={}).value == program()
    # With every line uncommented it still says the defaults, and no setting is left out.
    plain = re.sub(r"^# (?=[a-z_]+ = |\[)", "", text, flags=re.MULTILINE)
    path.write_text(plain)
    for program in PROGRAMS:
        loaded = load(program, file=path, environ={})
        assert loaded.value == program()
        assert set(loaded.origins.values()) == {f"file {path}"}
    assert tomllib.loads(plain)["profile"]["test"]["url"].startswith("mooncake://")


def test_init_leaves_a_file_that_exists(tmp_path, capsys):
    path = tmp_path / "m.toml"
    path.write_text("mine")
    assert main(["config", "init", str(path)]) == 3
    assert "exists and is left as it is" in capsys.readouterr().err
    assert path.read_text() == "mine"


def test_a_command_talks_to_the_store_of_its_profile(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MOONCAKE_CLIENT_URL", "mooncake://127.0.0.1:1/nowhere")
    with LocalCluster(segment="16MiB", in_process=True) as cluster:
        path = tmp_path / "m.toml"
        path.write_text(f'[profile.test]\nurl = "{cluster.url}"\n')
        words = ["--config", str(path), "--profile", "test", "--setting", "deadline=20s"]
        source = tmp_path / "source"
        source.write_bytes(b"x")
        assert main(["put", "a", str(source), *words]) == 0
        assert main(["ls", *words]) == 0
        assert "a" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("deadline", "--setting 'deadline' is not NAME=VALUE"),
        ("deadlin=5s", "unknown setting 'deadlin' given to the client; did you mean 'deadline'?"),
        ("deadline=5", "deadline given to the client must be a duration"),
    ],
)
def test_a_wrong_setting_of_a_command_is_refused(capsys, given, said):
    assert main(["ls", "--setting", given]) == 3
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("own", [True, False])
def test_what_a_killed_run_said_of_itself_is_gone_once_its_number_starts(
    tmp_path, monkeypatch, own
):
    monkeypatch.setattr("mooncake_store.program.logs.configure", lambda *_, **__: None)
    monkeypatch.setattr("mooncake_store.program.descriptors.raise_limit", lambda: None)
    left = tmp_path / "ready.json"
    left.write_text(json.dumps({"pid": os.getpid() + (0 if own else 1)}), encoding="utf-8")
    begin(MasterConfig, None, {"port_file": str(left)})
    assert left.exists() is not own
