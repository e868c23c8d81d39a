"""The commands as people meet them: at a terminal of their own, through real processes."""

import json
import signal
import subprocess
import sys

import pytest

from mooncake_store import LocalCluster
from tests.terminal import Terminal
from tests.waiting import until

EVIL = "evil\x1b]0;owned\x07\x9b31m\u202e\nname"
SHOWN = r"evil\x1b]0;owned\x07\x9b31m\u202e\nname"


def mooncake(*words):
    return subprocess.run(
        [sys.executable, "-m", "mooncake_store", *words],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip


def test_names_from_a_pool_do_not_steer_the_terminal(url, store):
    store.put(EVIL, b"x" * 2000)
    for words in (["ls"], ["ls", "-l"], ["stat", EVIL], ["exists", EVIL], ["put", EVIL, "-"]):
        with Terminal(*words, "--url", url, columns=150) as terminal:
            if words[0] == "put":
                terminal.type("value\n\x04")
            assert terminal.wait() == 0, terminal.shown
            assert SHOWN in terminal.text.replace("\n", ""), words
            for raw in ("\x1b]", "\x07", "\x9b", "\u202e"):
                assert raw not in terminal.shown, words


def test_programs_get_names_as_they_are(url, store):
    store.put(EVIL, b"x")
    assert json.loads(mooncake("ls", "--json", "--url", url).stdout)["objects"][0]["key"] == EVIL


@pytest.mark.parametrize(("typed", "code", "left"), [("n\n", 1, 1), ("\n", 1, 1), ("y\n", 0, 0)])
def test_rm_all_asks_at_a_terminal(url, store, typed, code, left):
    store.put("key", b"value")
    with Terminal("rm", "--all", "--url", url, columns=200) as terminal:
        terminal.wait_for("remove all 1 objects (5B) of " + url + "? [y/N] ")
        terminal.type(typed)
        assert terminal.wait() == code
    assert len(store.list()) == left


def test_status_says_whether_the_pool_is_ready_and_can_wait_for_it(url, tmp_path, start_program):
    with LocalCluster(workers=0) as empty:
        done = mooncake("status", "--master", empty.address)
        assert done.returncode == 4
        assert "not ready" in done.stdout
        done = mooncake("status", "--wait", "300ms", "--url", empty.url, "--json")
        assert done.returncode == 4
        assert json.loads(done.stdout)["ready"] is False
        waiting = start_program("-m", "mooncake_store", "status", "--wait", "--url", empty.url)
        worker = start_program(
            "-m", "mooncake_store", "worker", "--segment", "16MiB", "--url", empty.url
        )
        assert waiting.wait() == 0
        assert waiting.output.startswith("ready; version")
        worker.signal(15)
        worker.wait()
    assert mooncake("status", "--url", url).returncode == 0


def test_status_waits_for_a_master_that_is_not_there_yet(free_port, start_program):
    address = f"127.0.0.1:{free_port}"
    done = mooncake("status", "--wait", "10ms", "--master", address)
    assert done.returncode == 4
    assert "nothing listens there" in done.stderr
    waiting = start_program("-m", "mooncake_store", "status", "--wait", "--master", address)
    start_program("-m", "mooncake_store", "master", "--port", free_port)
    start_program("-m", "mooncake_store", "worker", "--segment", "16MiB", "--master", address)
    assert waiting.wait() == 0


def test_a_duration_without_wait_is_refused():
    assert mooncake("status", "10s").returncode == 2


def test_top_fits_fifty_columns_and_ends_with_q(url, store):
    store.put("key", bytes(1 << 20))
    with Terminal("top", "--interval", "0.1", "--url", url, columns=50) as terminal:
        before = terminal.modes()
        shown = terminal.wait_for("namespace")
        assert url in shown
        for title in ("req/s", "keys/s", "hits", "GB/s", "full"):
            assert title in shown
        assert max(map(len, shown.splitlines())) <= 50
        terminal.type("q")
        assert terminal.wait() == 0
        assert terminal.modes() == before
        assert "\x1b[?25h" in terminal.shown  # the cursor is back


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_top_leaves_the_terminal_as_it_was_when_it_is_told_to_end(url, number, code):
    with Terminal("top", "--interval", "0.1", "--url", url) as terminal:
        before = terminal.modes()
        terminal.wait_for("namespace")
        assert terminal.modes() != before  # keys come one by one
        terminal.process.send_signal(number)
        assert terminal.wait() == code
        assert terminal.modes() == before


def test_top_tells_hits_and_bytes(url, connect):
    store = connect(url, lease_cache=False)
    before = store.store_stats()  # other tests use this pool as well
    store.put("key", bytes(1 << 20))
    with Terminal("top", "--interval", "0.1", "--url", url, columns=100) as terminal:

        def seen():
            store.get_many(["key", "key", "nothing"])
            terminal.look()
            return "67%" in terminal.text

        until(seen)
        assert "evict/s" in terminal.text
        terminal.type("q")
        assert terminal.wait() == 0
    after = store.store_stats()

    def counted(name):
        return sum(getattr(shard, name) for shard in after) - sum(
            getattr(shard, name) for shard in before
        )

    assert counted("hits") >= 2 * counted("misses") > 0
    assert counted("read_bytes") >= 2 << 20
    assert counted("written_bytes") >= 1 << 20
