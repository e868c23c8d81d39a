"""Every command, given names that would steer a terminal: what it prints steers none."""

import json
import secrets
import subprocess
import sys

import pytest

from mooncake_store import LocalCluster
from mooncake_store.cli.shared import app
from tests.cli.test_cli import LEAVES
from tests.client.test_cli_terminal import EVIL
from tests.master.wires import ClusterWire

NAME = EVIL + "\x7f\x85\u200b\u2028\ue000"
FILE = NAME.replace("/", "")

# Where each command meets such a name: as a key, a path, an address, or in the pool it looks at.
# {file} is a path, {there} one of a folder that holds files of such names, {to} one of nothing.
MEETING = {
    "config show": ["--config", "{toml}", "--program", "worker"],
    "config init": ["{to}"],
    "worker": ["--memory", NAME],
    "standby": ["--of", "{bad}", "--state", "{to}"],
    "promote": ["{bad}"],
    "standbys": [NAME],
    "member": ["--etcd", "{bad}", "--state", "{to}"],
    "shard serve": ["--of", "{bad}", "--state", "{to}"],
    "shard move": ["0", NAME],
    "shard split": [NAME],
    "shard merge": [NAME],
    "status": [],
    "top": ["--once", "--interval", "0.1", "--url", "mooncake://{at}/{name}"],
    "put": [NAME, "{file}"],
    "get": [NAME, "{to}"],
    "sync": ["{there}", "pool:{name}"],
    "ls": ["-l"],
    "stat": [NAME],
    "exists": [NAME],
    "copy": [NAME, "--to", NAME],
    "move": [NAME, "--from", NAME, "--to", NAME],
    "drain": [NAME],
    "jobs": [NAME],
    "events": ["--url", "mooncake://{bad}/a"],
    "tenant list": ["--url", "mooncake://{at}/{name}"],
    "tenant quota": [NAME, "1GiB"],
    "hint": ["pin", NAME],
    "rm": [NAME + "/"],
    "mount": ["mooncake://127.0.0.1:1/{name}", "{to}"],
    "umount": ["{to}"],
    "serve": ["--model", NAME],
    "chat": ["--url", "http://127.0.0.1:1/{name}", "--message", "x"],
    "simulate scenario": ["{file}"],
    "simulate run": ["{file}"],
    "simulate ablation": ["{file}"],
    "simulate paper": ["{file}"],
    "simulate fit": ["{file}", "{to}"],
    "trace describe": ["{to}"],
    "trace generate": ["{to}/x"],
    "trace speed": ["{file}", "{to}", "--by", "2"],
    "trace spread": ["{file}", "{to}"],
    "trace split": ["{file}", "{to}", "{to}2", "--at", "1"],
    "advise": ["{file}"],
    "doctor": ["--peer", "{bad}"],
    "journal show": [NAME, "--state", "{to}"],
    "journal verify": ["--state", "{to}"],
    "journal replay": ["--state", "{to}"],
    "state export": ["{to}", "--state", "{to}"],
    "state import": ["{file}", "--state", "{to}"],
    "secret reader": ["{file}"],
    "secret make": ["{to}", NAME],
    "secret list": ["{to}"],
    "secret rotate": ["{to}", NAME],
    "secret revoke": ["{to}", NAME],
    "secret limit": ["{to}", NAME, "clients=1"],
    "secret key": ["{file}", "a"],
    "secret destroy": ["{to}", NAME],
    "master": ["--host", NAME],
}
NOTHING = {"version", "topology", "warmup", "shard list", "completion"}
"""Those that show what no name is in."""
COMMANDS = [
    name for path, _ in LEAVES if not (name := " ".join(path[1:])).startswith("bench ")
]  # what is measured has no names


@pytest.fixture(scope="module")
def pool():
    """A pool in which everything is called so."""
    with LocalCluster(workers=1, segment="16MiB") as cluster:
        wire = ClusterWire(cluster.address)
        wire.mount((secrets.token_bytes(16), NAME[:128], 1 << 20), name=NAME[:128], host=NAME)
        yield cluster
        wire.close()


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("name", sorted(set(COMMANDS) - NOTHING))
def test_what_a_command_prints_steers_no_terminal(name, as_json, pool, connect, mooncake, tmp_path):
    assert name in MEETING, f"{name}: say here how it meets a name of somebody else"
    url = f"mooncake://{pool.address}/test"
    connect(url).put(NAME, b"x")
    folder = tmp_path / "folder"
    folder.mkdir()
    file = folder / FILE
    file.write_text(f'{{"{NAME}": 1}}\n')
    toml = tmp_path / "settings.toml"
    toml.write_text(f"[worker]\nname = {json.dumps(NAME)}\n")
    places = {
        "name": NAME, "file": file, "there": folder, "to": tmp_path / f"to {FILE}", "toml": toml,
        "bad": f"{NAME}:1", "at": pool.address,
    }  # fmt: skip
    words = [word.format(**places) for word in MEETING[name]]
    _, out, err = mooncake(*name.split(), *words, *(["--json"] if as_json else []), url=url)
    printed = out + err
    assert "evil" in printed
    assert "internal error" not in printed
    assert {letter for letter in printed if not letter.isprintable()} <= {"\n"}
    if as_json:
        assert printed.isascii()


@pytest.mark.parametrize("shown", [f"a {NAME}", ("a", NAME)], ids=["text", "drawing"])
def test_what_a_command_draws_steers_no_terminal(shown, capsys):
    """Whoever draws need not think of it."""
    from rich.console import Group
    from rich.text import Text

    drawn = shown if isinstance(shown, str) else Group(*map(Text, shown), NAME)
    app.emit({}, as_json=False, human=lambda: drawn)
    with app.progress(NAME) as tell:
        tell(NAME)
    app.console().print(NAME, Text(NAME))
    printed = "".join(capsys.readouterr())
    assert "evil" in printed
    assert {letter for letter in printed if not letter.isprintable()} <= {"\n"}


def test_what_is_logged_while_a_command_runs_steers_no_terminal():
    """By the library, which no handler of a command's own listens to."""
    program = (
        "import logging, sys\n"
        "from mooncake_store.cli import version\n"
        "from mooncake_store.cli.main import main\n"
        "def told():\n"
        "    try:\n"
        "        raise ValueError(sys.argv[1])\n"
        "    except ValueError:\n"
        "        logging.getLogger('transfer_engine').exception('peer %s', sys.argv[1])\n"
        "version.emit = lambda *_, **__: told()\n"
        "sys.exit(main(['version']))"
    )
    words = [sys.executable, "-c", program, NAME]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    first, *trace = done.stderr.split("\n")
    assert first.startswith("peer evil")
    assert all(line.startswith("  ") for line in trace[:-1])
    assert {letter for letter in done.stderr if not letter.isprintable()} <= {"\n"}
