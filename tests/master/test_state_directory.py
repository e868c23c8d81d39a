"""What a master keeps between its runs: the same again, one master at a time, nothing guessed."""

import json
import os
import signal
import stat
import threading

import pytest

from mooncake_store import Client
from mooncake_store.clock import SystemClock
from mooncake_store.config.settings import MasterConfig, load
from mooncake_store.errors import ConfigError
from mooncake_store.local_state import LocalState
from mooncake_store.master import building
from mooncake_store.master.site import ShardPlace
from mooncake_store.master.state_directory import StateDirectory
from tests.master.test_programs import MASTER, ready


def opened(path, **settings):
    config = load(MasterConfig, environ={}, overrides={"state": str(path), **settings}).value
    return StateDirectory.of(config)


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


def test_the_next_run_finds_what_was_kept(state):
    first = opened(state)
    first.close()
    second = opened(state)
    assert second.kept == first.kept
    second.close()
    other = opened(f"{state}-other")
    assert other.kept.secret != first.kept.secret
    assert other.kept.cluster != first.kept.cluster
    other.close()


def test_only_the_user_of_the_master_can_read_or_replace_it(state):
    opened(state).close()
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in state.iterdir()} == {0o600}
    state.chmod(0o755)
    opened(state).close()
    for mode in (0o775, 0o1777):
        state.chmod(mode)
        with pytest.raises(ConfigError, match=f"other users can write to .*{state}"):
            opened(state)


def test_two_masters_do_not_share_one(state):
    first = opened(state)
    with pytest.raises(ConfigError, match=f"in use by another master, process {os.getpid()}"):
        opened(state)
    first.close()
    opened(state).close()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "damaged"),
        (b"\0" * 100, "damaged"),
        (b"[" * 5000, "damaged"),
        (b'{"version": 1, "cluster": "c"}', "damaged"),
        (b'{"version": 1, "cluster": "c", "secret": "abcd"}', "damaged"),
        (b'{"version": 1, "cluster": "c", "secret": "no hexadecimal"}', "damaged"),
        (b'{"version": 7, "anything": "else"}', "is of version 7"),
    ],
)
def test_what_is_not_understood_is_refused_and_stays(state, content, complaint):
    opened(state).close()
    (state / "identity.json").write_bytes(content)
    with pytest.raises(ConfigError, match=complaint) as caught:
        opened(state)
    assert str(state) in str(caught.value)
    assert (state / "identity.json").read_bytes() == content
    # Nor is it held after that.
    os.unlink(state / "identity.json")
    opened(state).close()


def test_a_write_that_was_cut_off_is_begun_again(state):
    opened(state).close()
    os.unlink(state / "identity.json")
    (state / "identity.json.new").write_bytes(b'{"version": 1, "clu')
    first = opened(state)
    first.close()
    second = opened(state)
    assert second.kept == first.kept
    second.close()


@pytest.mark.parametrize("use", [opened, LocalState.hold], ids=["master", "pool"])
def test_a_home_that_is_not_known_is_one_sentence(use):
    with pytest.raises(ConfigError, match="the home that ~nobody-of-this-name/state begins with"):
        use("~nobody-of-this-name/state")


def test_a_path_that_is_no_directory_is_one_sentence(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "below"):
        with pytest.raises(ConfigError, match=str(path)) as caught:
            opened(path)
        assert "--state" in str(caught.value)


def test_by_itself_it_is_one_per_port_in_the_home_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    opened("auto", port=50052).close()
    assert (tmp_path / "mooncake" / "master-50052" / "identity.json").exists()
    one, two = opened("auto", port=0), opened("none", port=50053)
    assert one.kept.secret != two.kept.secret
    assert os.listdir(tmp_path / "mooncake") == ["master-50052"]


def test_without_a_home_nothing_is_kept_and_that_is_said(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    first, second = opened("auto", port=50054), opened("auto", port=50054)
    assert first.kept.secret != second.kept.secret
    assert "nothing is kept for the next run" in caplog.text
    assert "--state" in caplog.text


def test_a_master_names_keys_as_the_run_before_it_did(start_program, state, free_port):
    options = *MASTER, "--port", free_port, "--state", state, "--json"
    named = []
    for _ in range(2):
        master = start_program(*options)
        facts = ready(master)
        with Client(f"mooncake://{facts['address']}/default") as client:
            named.append(client.identity.digests(["a", "b"]).tolist())
        master.signal(signal.SIGKILL)
        master.wait()
    assert named[0] == named[1]
    text = (state / "identity.json").read_text()
    assert json.loads(text)["secret"] not in json.dumps(facts)


def test_a_second_master_on_one_directory_is_one_sentence(start_program, state):
    ready(start_program(*MASTER, "--port", 0, "--state", state, "--json"))
    second = start_program(*MASTER, "--port", 0, "--state", state)
    line = second.wait_for_line("in use by another master")
    assert str(state) in line
    assert second.wait() not in (0, None)
    assert "Traceback" not in line


@pytest.mark.asyncio
async def test_a_shard_that_could_not_be_built_is_in_nobodys_way(tmp_path, monkeypatch):
    given = {"objects_max": 4096, "journal": "written"}
    config = load(MasterConfig, environ={}, overrides=given).value
    opening = config, ShardPlace(), SystemClock(), tmp_path, "c" * 16

    def fails(*_):
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(building, "ShardService", fails)
        with pytest.raises(RuntimeError, match="injected"):
            await building.open_service(*opening)
    assert not [t for t in threading.enumerate() if t.name.startswith("mooncake-journal")]
    service, loading = await building.open_service(*opening)
    await loading
    assert service.site.kept
    service.close()
