"""`mooncake journal`: the history of a key and the health of what a master keeps."""

from __future__ import annotations

import functools
import json
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mooncake_store.cli.shared.tree import run
from mooncake_store.client.blocking import Client
from mooncake_store.core.ring import HEAD, WRITTEN
from mooncake_store.journal.origin import Origin
from mooncake_store.journal.ring_file import remove_rings, rings_of
from mooncake_store.local_cluster import LocalCluster
from mooncake_store.master import kept_journals
from mooncake_store.master.kept_journals import KeptJournals
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Command = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.slow


@pytest.fixture
def journal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Command:
    """Run `mooncake journal` on the state directory of `pool`."""

    def call(*words: str, state: Path = tmp_path) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run(["journal", *words, "--state", str(state)])
        out, err = capfd.readouterr()
        return int(code), out, err

    return call


def pool(folder: Path, shards: int = 1, **master: object) -> LocalCluster:
    """A pool that keeps what its master knows in a folder."""
    settings = {"state": str(folder), "journal": "written", **master}
    return LocalCluster(1, "32MiB", shards, master=settings)


def live_through(client: Client, key: str) -> None:
    """Put an object, replace it and remove it."""
    client.put(key, b"x" * 100)
    client.put(key, b"y" * 300, upsert=True)
    client.put(f"{key}/other", b"z" * 500)
    client.remove(key)


def assert_told(told: list[str]) -> None:
    """These lines tell of what `live_through` did, in its order, and of nothing else."""
    wanted = iter(
        ("being written, generation 1, 100", "complete", "being written", "300", "gone", "gone")
    )
    looked_for: str | None = next(wanted)
    for line in told:
        assert "500 bytes" not in line
        while looked_for is not None and looked_for in line:
            looked_for = next(wanted, None)
    assert looked_for is None, (looked_for, told)


def test_a_key_has_a_history_while_its_master_runs_and_afterwards(
    tmp_path: Path, journal: Command
) -> None:
    with pool(tmp_path) as cluster:
        with Client(cluster.url) as client:
            live_through(client, "key")
        code, out, _ = journal("show", "key")
        assert code == 0
        assert_told(out.splitlines()[1:])
        cluster.kill_master()
        # That the client left may have been written down meanwhile: the first line counts words.
        assert journal("show", "key")[1].splitlines()[1:] == out.splitlines()[1:]
        cluster.restart_master()
        code, again, _ = journal("show", "key", "--json")
    told = json.loads(again)
    assert [line["what"] for line in told["lines"]] == [
        line.split("  ")[-1] for line in out.splitlines()[1:]
    ]
    positions = [line["position"] for line in told["lines"]]
    assert positions == sorted(positions)
    assert told["begin"] <= positions[0] < positions[-1] < told["end"]


@pytest.mark.parametrize("identity", ["keyed", "xxh3"])
def test_a_key_is_found_in_its_namespace_and_shard(
    tmp_path: Path, journal: Command, identity: str
) -> None:
    keys = [f"key/{number}" for number in range(50)]
    with pool(tmp_path, 2, identity=identity) as cluster:
        other = cluster.url.rpartition("/")[0] + "/other"
        with Client(other) as client:
            client.put_many(keys, [b"x"] * len(keys)).check()
        shards = set()
        for key in keys:
            words = ("show", key, "--namespace", "other", "--identity", identity, "--json")
            code, out, _ = journal(*words)
            assert code == 0
            shards.add(json.loads(out)["shard"])
            if len(shards) == 2:  # by a secret of this pool, a key lies on either
                break
        assert shards == {0, 1}
        code, _, err = journal("show", "key/0", "--identity", identity)
        assert code == 5
        assert "key/0" in err


def test_what_is_whole_is_called_so_and_not_touched(tmp_path: Path, journal: Command) -> None:
    with pool(tmp_path, 2) as cluster:
        with Client(cluster.url) as client:
            live_through(client, "key")
        code, out, _ = journal("verify")
        assert code == 0
        assert out.count("and memory of this boot, whole") == 2
        cluster.kill_master()
        assert journal("verify")[0] == 0
        cluster.restart_master()

    def content() -> dict[str, tuple[int, bytes]]:
        found = [path for path in tmp_path.rglob("*") if path.is_file()]
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in found}

    before = content()
    code, out, _ = journal("verify")
    assert code == 0
    assert out.count("whole\n") == out.count("  a master started now keeps all\n") == 2
    value = json.loads(journal("verify", "--json")[1])
    assert value["whole"]
    assert [shard["damages"] for shard in value["shards"]] == [[], []]
    assert content() == before


def test_after_a_start_of_the_host_it_says_what_a_master_goes_on_with(
    tmp_path: Path, journal: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pool(tmp_path) as cluster:
        with Client(cluster.url) as client:
            live_through(client, "key")
        cluster.kill_master()
        remove_rings(tmp_path / "shard-0")
        monkeypatch.setattr(kept_journals, "Origin", functools.partial(Origin, boot=(1, 2)))
        code, out, _ = journal("verify")
        assert code == 0
        assert "keeps all, as it was when the disk had it last" in out
        assert json.loads(journal("verify", "--json")[1])["shards"][0]["cut"]


def test_a_busy_shard_looks_whole(tmp_path: Path, journal: Command) -> None:
    with pool(tmp_path) as cluster, Client(cluster.url) as client:
        keys = [f"key/{number}" for number in range(256)]
        ended = threading.Event()

        def load() -> None:
            while not ended.is_set():
                client.put_many(keys, [b"x"] * len(keys)).check()
                client.remove_many(keys).check()

        thread = threading.Thread(target=load)
        thread.start()
        try:
            ends = []
            for _ in range(30):
                contents = KeptJournals.of(tmp_path).look(0).contents
                assert contents.complete, (contents.damages, contents.void)
                assert contents.torn is None
                ends.append(contents.end)
        finally:
            ended.set()
            thread.join()
    assert ends == sorted(ends)
    assert ends[0] < ends[-1]


def flip(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


def test_a_damage_is_told_with_what_it_costs(tmp_path: Path, journal: Command) -> None:
    with pool(tmp_path) as cluster, Client(cluster.url) as client:
        live_through(client, "key")
    file = min((tmp_path / "shard-0").glob("journal-*.log"))
    (tmp_path / "shard-0" / "journal.ended").unlink()
    flip(file, 4096 + 128 + 8)  # in the words of the first block
    code, out, _ = journal("verify")
    assert code == 1
    first, damage, kept = out.splitlines()
    assert first.endswith("not whole")
    assert f"{file.name} at byte 4096: the words of a block are damaged" in damage
    assert "are lost" in damage
    assert kept.startswith("  a master started now begins with nothing because the journal is not")
    value = json.loads(journal("verify", "--json")[1])
    assert not value["whole"]
    (told,) = value["shards"][0]["damages"]
    assert (told["file"], told["offset"], told["first"]) == (file.name, 4096, 1)
    with pool(tmp_path) as cluster, Client(cluster.url) as client:
        assert not client.exists("key/other")  # as it was told


def all_in_files(folder: Path) -> bool:
    """Whether nothing waits to be written, in a journal that somebody writes."""
    (ring,) = (path for path in rings_of(folder) if path.suffix == ".ring")
    with ring.open("rb") as file:
        words = np.frombuffer(file.read(8 * 3), np.int64)
    return bool(words[HEAD] == words[WRITTEN])


def test_what_a_damage_took_is_counted_where_that_is_known(
    tmp_path: Path, journal: Command
) -> None:
    with pool(tmp_path) as cluster, Client(cluster.url) as client:
        (file,) = (tmp_path / "shard-0").glob("journal-*.log")
        client.put("before", b"x")
        until(lambda: all_in_files(tmp_path / "shard-0"))
        client.put_many([f"key/{number}" for number in range(5)], [b"x"] * 5).check()
        # Until then the memory beside the files has it as well, and nothing would be lost.
        until(lambda: all_in_files(tmp_path / "shard-0"))
        cluster.kill_master()
        flip(file, file.read_bytes().rindex(b"key/4"))
        code, out, _ = journal("verify")
        assert code == 1
        assert out.splitlines()[-1] == "  a master started now keeps all but 5 objects"
        (shard,) = json.loads(journal("verify", "--json")[1])["shards"]
        assert (shard["kept"], shard["lost"], shard["whole"]) == (True, 5, False)
        cluster.restart_master()
        assert client.get("before") == b"x"  # as it was told
        assert not any(client.exists_many([f"key/{number}" for number in range(5)]))


def test_a_tail_that_is_cut_off_is_no_damage(tmp_path: Path, journal: Command) -> None:
    with pool(tmp_path) as cluster, Client(cluster.url) as client:
        live_through(client, "key")
    file = max((tmp_path / "shard-0").glob("journal-*.log"))
    with file.open("ab") as last:
        last.write(b"cut off")
    assert journal("verify")[0] == 0, "how far it must reach is known"
    (tmp_path / "shard-0" / "journal.ended").unlink()
    out = journal("verify")[1]
    assert "torn tail, no damage" in out
    assert "damaged: " not in out


def test_where_no_journal_is_one_sentence_says_so(tmp_path: Path, journal: Command) -> None:
    missing = tmp_path / "missing"
    for words in (["verify"], ["show", "key"]):
        code, out, err = journal(*words, state=missing)
        assert (code, out) == (3, "")
        assert err.startswith(f"error: there is no state directory {missing}")
        assert err.count("\n") == 1
        code, _, err = journal(*words)
        assert code == 3
        assert "has no journal" in err
        assert journal(*words, "--port", "1")[0] == 3


def test_the_usual_directory_is_that_of_the_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pool(tmp_path / "mooncake" / "master-7") as cluster, Client(cluster.url) as client:
        client.put("key", b"x")
    assert run(["journal", "verify", "--port", "7"]) == 0
    assert run(["journal", "verify"]) == 3
    assert "master-50051" in capfd.readouterr().err
