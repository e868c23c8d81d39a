"""`mooncake journal replay`: a shard made of what it wrote down, for a person or a program."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import pytest

from mooncake_store.cli.shared.tree import run
from mooncake_store.client.blocking import Client
from mooncake_store.config.settings import MasterConfig
from mooncake_store.core import codes, integrity
from mooncake_store.errors import InvalidArgumentError
from mooncake_store.local_cluster import LocalCluster
from mooncake_store.master import replaying
from mooncake_store.master.kept_journals import KeptJournals
from mooncake_store.master.replaying import replay

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Command = Callable[..., tuple[int, str, str]]

MIB = 1 << 20


@pytest.fixture
def command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Command:
    """Run `mooncake journal` on the state directory of `pool`."""

    def call(*words: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run(["journal", *map(str, words), "--state", str(tmp_path / "state")])
        out, err = capfd.readouterr()
        return int(code), out, err

    return call


def pool(folder: Path, shards: int = 1, **master: object) -> LocalCluster:
    """A pool that outlives this program."""
    return LocalCluster(
        1, "32MiB", shards, in_process=shards == 1, state=folder / "state", master=master
    )


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


def test_what_a_running_master_knows_is_told(tmp_path: Path, command: Command) -> None:
    with pool(tmp_path, quotas=["team-a=16MiB"]) as cluster:
        other = cluster.url.rpartition("/")[0] + "/team-a"
        with Client(cluster.url) as client, Client(other) as team:
            client.put_many(["one", "two", "three"], [bytes(1000)] * 3).check()
            client.remove("three")
            team.put("one", bytes(500))
            code, out, _ = command("replay", "--json")
    assert code == 0
    (shard,) = json.loads(out)["shards"]
    assert json.loads(out)["sound"] is True
    assert (shard["objects"], shard["bytes"], shard["dropped"]) == (3, 2500, 0)
    names = {each["name"]: each for each in shard["namespaces"]}
    assert (names["default"]["objects"], names["default"]["bytes"]) == (2, 2000)
    assert (names["team-a"]["objects"], names["team-a"]["quota_bytes"]) == (1, 16 * MIB)
    (segment,) = shard["segments"]
    assert (segment["name"], segment["bytes"], segment["state"]) == ("worker-0", 32 * MIB, "ok")
    assert 0 < shard["free_bytes"] == segment["free_bytes"] < 32 * MIB
    before = content(tmp_path)
    code, out, _ = command("replay")
    assert code == 0
    assert "3 objects, 0 unfinished" in out
    assert ", sound\n" in out
    assert content(tmp_path) == before, "something was changed"


def test_a_shard_is_shown_as_it_was_at_each_position(tmp_path: Path, command: Command) -> None:
    with pool(tmp_path) as cluster, Client(cluster.url) as client:
        ends = []
        journals = KeptJournals.of(tmp_path / "state")
        for number in range(5):
            client.put(f"key/{number}", bytes(100 * (number + 1)))
            ends.append(journals.look(0).contents.end)
        client.remove("key/0")
    for number, end in enumerate(ends):
        replayed = replay(journals, 0, end)
        assert replayed.restored.objects == number + 1
        assert not replayed.broken()
        there = [replayed.stat(f"key/{each}") for each in range(5)]
        assert [each is not None for each in there] == [each <= number for each in range(5)]
        assert there[number] is not None
        assert there[number].size == 100 * (number + 1)
        assert there[number].name == f"key/{number}".encode()
        assert replayed.stat(f"key/{number}", "another") is None
    assert replay(journals, 0).restored.objects == 4
    shown = json.loads(command("show", "key/3", "--json")[1])["lines"]
    (complete,) = [line["position"] for line in shown if "complete, checksum" in line["what"]]
    assert replay(journals, 0, complete).restored.unfinished == 1
    assert replay(journals, 0, complete + 1).restored.unfinished == 0


def test_a_shard_of_more_objects_than_the_default_allows_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a master's settings allow, nobody but that knows."""
    with pool(tmp_path) as cluster, Client(cluster.url) as client:
        client.put_many([f"key/{number}" for number in range(5)], [bytes(100)] * 5).check()
    journals = KeptJournals.of(tmp_path / "state")
    monkeypatch.setattr(replaying, "MasterConfig", lambda: MasterConfig(objects_max=2))
    replayed = replay(journals, 0)
    assert replayed.restored.objects == 5
    assert not replayed.broken()


def test_a_position_without_a_whole_snapshot_before_it_is_one_sentence(
    tmp_path: Path, command: Command
) -> None:
    with pool(tmp_path) as cluster, Client(cluster.url) as client:
        client.put("key", b"value")
    code, out, err = command("replay", "--until", 1)
    assert (code, out) == (1, "")
    assert "at position 1" in err
    assert "whole snapshot" in err
    assert err.count("\n") == 1
    least = int(err.split("--until: ")[1].split()[0])
    assert command("replay", "--until", least)[0] == 0
    with pytest.raises(InvalidArgumentError, match="ends at position"):
        replay(KeptJournals.of(tmp_path / "state"), 0, 1 << 40)


@pytest.mark.slow
def test_one_of_several_shards_can_be_named(tmp_path: Path, command: Command) -> None:
    with pool(tmp_path, 2) as cluster, Client(cluster.url) as client:
        client.put_many([f"key/{n}" for n in range(64)], [b"x" * 100] * 64).check()
    both = json.loads(command("replay", "--json")[1])["shards"]
    assert [each["shard"] for each in both] == [0, 1]
    assert sum(each["objects"] for each in both) == 64
    (one,) = json.loads(command("replay", "--shard", 1, "--json")[1])["shards"]
    assert one == both[1]
    code, _, err = command("replay", "--until", 100)
    assert code == 2
    assert "--shard" in err
    assert command("replay", "--shard", 2)[0] == 2


def test_a_shard_that_contradicts_itself_ends_with_1(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pool(tmp_path) as cluster, Client(cluster.url) as client:
        client.put("key", b"value")
    plain = integrity.check

    def wrong(state: object) -> None:
        state.tally[codes.OBJECTS] += 1  # type: ignore[attr-defined]
        plain(state)  # type: ignore[arg-type]

    monkeypatch.setattr(integrity, "check", wrong)
    code, out, _ = command("replay")
    assert code == 1
    assert "contradicts itself" in out
    assert json.loads(command("replay", "--json")[1])["sound"] is False


def test_what_a_damage_has_cost_is_not_guessed(tmp_path: Path, command: Command) -> None:
    state = tmp_path / "state"
    with pool(tmp_path) as cluster, Client(cluster.url) as client:
        for number in range(20):
            client.put(f"key/{number}", b"value")
            KeptJournals.of(state).look(0)
    file = max((state / "shard-0").glob("journal-*.log"))
    data = bytearray(file.read_bytes())
    data[len(data.rstrip(b"\0")) - 1200] ^= 1  # in one of the last blocks
    file.write_bytes(data)
    (found,) = json.loads(command("replay", "--json")[1])["shards"]
    assert found["lost"] > 0
    assert found["objects"] + found["lost"] >= 20
    assert found["sound"]
    assert f"{found['lost']} lost with what is damaged" in command("replay")[1]
    end = KeptJournals.of(state).look(0).contents.end
    code, out, err = command("replay", "--until", str(end - 1))
    assert (code, out) == (1, "")
    assert err.count("\n") == 1


def test_a_person_can_look_into_the_shard(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pool(tmp_path) as cluster, Client(cluster.url) as client:
        client.put("key", bytes(1234))
    typed = "print('size', stat('key').size)\nprint(shard.objects, stat('other'))\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    code, out, _ = command("replay", "--interactive")
    assert code == 0
    assert "1 objects" in out
    assert "size 1234" in out
    assert "1 None" in out
    monkeypatch.setattr("sys.stdin", io.StringIO("exit()\n"))
    assert command("replay", "--interactive")[0] == 0
    assert command("replay", "--interactive", "--json")[0] == 2
