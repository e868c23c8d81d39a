"""The units of systemd: systemd accepts them, and their command lines and settings are ours."""

import shlex
import shutil
import subprocess
from collections import defaultdict

import pytest

from mooncake_store.config import PROGRAMS
from mooncake_store.config.loading import load_settings
from mooncake_store.config.settings import ClientConfig, MasterConfig, WorkerConfig
from tests.command_lines import parse
from tests.sources import ROOT

DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
PROGRAM = "/opt/mooncake/bin/mooncake"


def entries(unit):
    """Every entry of the section [Service], with all that is said of it."""
    text = unit.read_text(encoding="utf-8").replace("\\\n", " ")
    _, _, service = text.partition("[Service]\n")
    found = defaultdict(list)
    for line in service.partition("\n[")[0].splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found[name].append(value)
    return found


def ids(unit):
    return unit.stem


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_them(tmp_path):
    for unit in UNITS:
        text = unit.read_text(encoding="utf-8")
        # It looks for the program, which is not installed there.
        (tmp_path / unit.name).write_text(text.replace(PROGRAM, "/bin/true"), encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *sorted(tmp_path.iterdir())],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=ids)
def test_commands_are_ours(unit):
    (line,) = entries(unit)["ExecStart"]
    words = shlex.split(line)
    assert words[0] == PROGRAM
    # What the environment may add, and an instance, stand for a word.
    parse(["mooncake", *(word for word in words[1:] if word != "$DRAIN")])


@pytest.mark.parametrize("unit", UNITS, ids=ids)
def test_who_hangs_is_restarted_and_who_is_asked_to_end_may(unit):
    found = entries(unit)
    assert found["Type"] == ["notify"]
    assert found["WatchdogSec"] == ["60s"]
    assert found["Restart"] == ["on-failure"]  # a master that handed over ends with 0, for good
    assert found["LimitMEMLOCK"] == ["infinity"]
    assert "DynamicUser" not in found  # with its end memory of its user would be removed
    assert found["LoadCredential"] == ["secret:/etc/mooncake/secret"]
    assert found["NoNewPrivileges"] == ["yes"]


def test_devices_can_be_lent():
    """Either of these closes all devices but some, memory of cards and disks included."""
    worker = next(unit for unit in UNITS if unit.stem == "mooncake-worker@")
    assert not {"PrivateDevices", "ProtectClock", "DevicePolicy"} & entries(worker).keys()


@pytest.mark.parametrize("program", [MasterConfig, WorkerConfig, ClientConfig])
def test_the_settings_are_ours(program):
    loaded = load_settings(program, PROGRAMS, file=DEPLOY / "mooncake.toml", environ={})
    assert loaded.value.secret_file == "/etc/mooncake/secret"
