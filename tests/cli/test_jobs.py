"""Commands that move what a pool holds, and say how that goes."""

import json
import threading

import pytest

from mooncake_store import Client, LocalCluster
from mooncake_store.admin import pool
from mooncake_store.admin.jobs import Job
from mooncake_store.cli import status
from mooncake_store.cli.shared.jobs import told
from mooncake_store.cli.shared.tree import run
from mooncake_store.wire.cluster import ClusterStatus, SegmentEntry, WorkerEntry
from tests.cli.test_standbys import drawn


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(in_process=True, workers=2, segment="16MB") as running:
        yield running


@pytest.fixture
def store(cluster):
    with Client(cluster.url) as client:
        yield client
        client.clear(force=True)


@pytest.fixture
def mooncake(cluster, capfd):
    """Run a command; returns its exit code, and what it says as JSON or in words."""

    def call(*words, name="--master"):
        capfd.readouterr()
        code = run([*words, name, cluster.address])
        out, err = capfd.readouterr()
        if "--json" not in words:
            return int(code), out + err
        said = [json.loads(line) for line in (out or err).splitlines()]
        return int(code), said[0] if len(said) == 1 else said

    return call


@pytest.fixture
def sides(store):
    """An object, where it lies, and where it does not."""
    store.put("object", bytes(100_000))
    here = store.query("object").replicas[0].segment
    names = [each.name for each in store.status().segments]
    return here, next(name for name in names if name != here)


def lies_at(store):
    return sorted(each.segment for each in store.query("object").replicas)


def test_an_object_is_copied_and_moved(mooncake, store, sides):
    here, there = sides
    code, said = mooncake("copy", "object", "--to", there, "--json")
    assert (code, said["job"]["state"], said["job"]["to"]) == (0, "done", [there])
    assert lies_at(store) == sorted(sides)
    store.put("object", bytes(1000), upsert=True)
    (here,) = lies_at(store)
    there = next(name for name in sides if name != here)
    code, said = mooncake("move", "object", "--from", here, "--to", there, name="--url")
    assert (code, said) == (0, f"move of object to {there}: done\n")
    assert lies_at(store) == [there]
    code, said = mooncake("jobs", "--json")
    assert [each["kind"] for each in said["jobs"]][:2] == ["move", "copy"]
    code, said = mooncake("jobs")
    assert "object in default" in said
    code, said = mooncake("copy", "none", "--to", there, "--json")
    assert (code, said["error"]["type"]) == (5, "NotFoundError")
    code, said = mooncake("copy", "object", "--to", "none", "--json")
    assert code == 5


def test_namespaces_are_listed_and_bounded(mooncake, store):
    store.put("object", bytes(100_000))
    assert mooncake("tenant", "quota", "team-a", "2MB")[1] == "team-a may have 1.91MiB\n"
    _, said = mooncake("tenant", "list", "--json")
    found = {each["name"]: each for each in said["namespaces"]}
    assert (found["default"]["objects"], found["default"]["quota"]) == (1, None)
    assert found["team-a"] == {"name": "team-a", "objects": 0, "bytes": 0, "quota": 2_000_000}
    assert mooncake("tenant", "quota", "team-a", "none")[0] == 0
    _, said = mooncake("tenant", "list")
    assert [line.split() for line in said.splitlines() if "team-a" in line] == [
        ["team-a", "0", "0B", "-", "-"]
    ]
    assert mooncake("tenant", "quota", "team-a", "much")[0] == 2


def test_events_are_told_as_they_happen(mooncake, cluster, store, monkeypatch):
    began, first = threading.Event(), pool.events_after

    def after(core, place, **more):
        if place:
            began.set()
        return first(core, place, **more)

    monkeypatch.setattr(pool, "events_after", after)

    def change():
        began.wait(60)
        store.put("one", b"x")
        store.put("two", b"x")

    changing = threading.Thread(target=change)
    changing.start()
    code, said = mooncake("events", "--count", "2", "--json")
    changing.join()
    assert code == 0
    assert [(each["kind"], each["key"]) for each in said] == [("stored", "one"), ("stored", "two")]


def test_what_is_wrong_comes_first():
    worker = WorkerEntry("w-1", "10.0.0.6", "absent", 90_000, (0,))
    segment = SegmentEntry(0, b"", "w-1/0", "10.0.0.6", 1 << 20, 5, b"", worker="w-1")
    found = ClusterStatus(True, "1.0", 1, 0, ("a",), (worker,), (segment,))
    lines = drawn(status._drawn("10.0.0.5:1", found)).splitlines()
    assert lines[0] == "worker w-1 on 10.0.0.6 is absent: silent for 90s"
    assert lines[1].startswith("ready; version 1.0")
    found = ClusterStatus(False, "1.0", 1, 0, ("a",), (), ())
    lines = drawn(status._drawn("10.0.0.5:1", found)).splitlines()
    assert lines[0] == "not ready: no worker lends memory"
    assert lines[1].startswith("version 1.0")


def test_a_job_says_how_far_it_is():
    job = Job("drain-1", "drain", "running", "w/0", [], moved_objects=1200, left_bytes=3 << 20)
    assert told(job) == "drain of w/0: running: 1,200 objects moved, 3MiB left"
    job = Job("shard-1", "shard", "running", "shard 1", [], behind_words=5000, message="copying")
    assert told(job) == "move of shard 1: running: 5,000 words behind, copying"


# Last: a segment that was drained takes nothing more.
def test_a_segment_is_drained(mooncake, store, sides):
    here, there = sides
    code, said = mooncake("drain", here)
    assert (code, said) == (0, f"drain of {here}: done: 1 object moved\n")
    assert lies_at(store) == [there]
    code, said = mooncake("jobs", "--wait", "--json")
    assert [each["about"] for each in said["jobs"] if each["kind"] == "drain"] == [here]
    code, said = mooncake("drain", there, "--json")  # there is nowhere to go
    assert (code, said["job"]["state"]) == (1, "failed")
    assert mooncake("drain", "none", "--json")[0] == 5
