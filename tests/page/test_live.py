"""What the page of a master is told: figures, history, events, keys, and what watching costs."""

import asyncio
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from mooncake_store import Client, LocalCluster
from mooncake_store.client.extension import events_in
from mooncake_store.compat.control import Control
from mooncake_store.core.records import EVENT, EventKind, SegmentState
from mooncake_store.errors import UnavailableError
from mooncake_store.page import api, objects, sampling, server
from mooncake_store.page.assets import paths_of
from mooncake_store.page.events import Events
from mooncake_store.page.figures import figures
from mooncake_store.page.history import COUNTERS, SPANS_MAX, History
from mooncake_store.wire.cluster import ClusterStatus, SegmentEntry, WorkerEntry
from mooncake_store.wire.standby import StandbyEntry
from tests.waiting import PATIENCE_S, until, until_async


@pytest.fixture(scope="module")
def place():
    with (
        LocalCluster(workers=1, segment="32MB") as cluster,
        Client(cluster.url) as client,
        Control("127.0.0.1", 0) as control,
    ):
        control.serve(cluster.address)
        yield SimpleNamespace(url=control.url, client=client, control=control)


def ask(url, path, **headers):
    """The status, headers and body of an answer."""
    request = urllib.request.Request(url + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def told(url, path, **fields):
    return json.loads(ask(url, f"{path}?{urllib.parse.urlencode(fields)}")[2])


def segment(name, state=SegmentState.OK, **more):
    return SegmentEntry(0, b"", name, "host", 100, state, b"", 40, "worker", **more)


def status(*, ready=True, workers=(), segments=(), standbys=()):
    return ClusterStatus(
        ready, "1", 1, 1000, ("a:1",), tuple(workers), tuple(segments), tuple(standbys),
        "" if ready else "no standby follows",
    )  # fmt: skip


# -- files


def test_its_files_are_those_of_its_folder_and_are_sent_again_only_when_they_changed(place):
    folder = Path(api.__file__).with_name("master")
    assert set(api.OWN) == {each.name for each in folder.iterdir()}
    for path in paths_of(api.OWN):
        code, headers, body = ask(place.url, path)
        assert (code, len(body) > 0) == (200, True)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        known = {"If-None-Match": headers["ETag"]}
        assert ask(place.url, path, **known)[::2] == (304, b"")


# -- watching


class Pool:
    """A client of a pool that there is not, which counts how often it is asked."""

    shards = 0

    def __init__(self):
        self.asked = 0
        self.failing = False

    async def status(self):
        self.asked += 1
        if self.failing:
            raise UnavailableError("the master does not answer")
        return status(workers=[WorkerEntry(f"w{self.asked}", "host", "alive", 0, ())])

    async def store_stats(self):
        return []


class Watcher:
    """What one who watches was told."""

    def __init__(self, sampler):
        self.stream = sampler.live()
        self.figures = []
        self.events = []

    async def hear(self):
        """The next piece."""
        async with asyncio.timeout(PATIENCE_S):
            piece = await anext(self.stream)
        for line in piece.decode().split("\n\n"):
            kind, _, data = line.partition("\ndata: ")
            if kind == "event: figures":
                self.figures.append(json.loads(data))
            elif kind == "event: events":
                self.events += json.loads(data)


def sampled(body, monkeypatch):
    """Run `body(sampler, pool)` beside a sampler that looks quickly."""
    monkeypatch.setattr(sampling, "WATCHED_S", 0.001)

    async def main():
        pool = Pool()

        async def connected():
            return pool

        sampler = sampling.Sampler(connected)
        running = asyncio.ensure_future(sampler.run())
        try:
            await body(sampler, pool)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())


def test_watchers_share_looks_and_who_is_slow_gets_the_newest(monkeypatch):
    async def body(sampler, pool):
        quick = [Watcher(sampler) for _ in range(4)]
        slow = Watcher(sampler)
        await slow.hear()
        for _ in range(20):
            await asyncio.gather(*(each.hear() for each in quick))
        looks = len({each["workers"][0]["name"] for each in quick[0].figures})
        assert looks == 20
        assert pool.asked <= looks + 5  # and not once for each of them
        await slow.hear()
        assert len(slow.figures) == 2
        latest = int(slow.figures[-1]["workers"][0]["name"][1:])
        assert latest >= 20
        # Of what happened it misses nothing.
        names = [each["what"] for each in slow.events]
        assert [f"w{at} alive" in names for at in range(2, 20)] == [True] * 18

    sampled(body, monkeypatch)


def test_a_pool_that_does_not_answer_is_told_with_what_was_known(monkeypatch):
    async def body(sampler, pool):
        watcher = Watcher(sampler)
        await watcher.hear()
        pool.failing = True
        await watcher.hear()
        while not watcher.figures[-1]["failed"]:
            await watcher.hear()
        assert "does not answer" in watcher.figures[-1]["failed"]
        assert watcher.figures[-1]["ready"] is True
        pool.failing = False
        while watcher.figures[-1]["failed"]:
            await watcher.hear()

    sampled(body, monkeypatch)


def test_nobody_watches_and_the_pool_is_left_alone(monkeypatch):
    monkeypatch.setattr(sampling, "SPAN_S", 3600.0)

    async def body(sampler, pool):
        await until_async(lambda: pool.asked == 1)
        watcher = Watcher(sampler)
        await watcher.hear()
        await watcher.hear()
        await watcher.stream.aclose()
        asked = pool.asked
        for _ in range(50):
            await asyncio.sleep(0)
        assert (sampler.watchers, pool.asked - asked <= 1) == (0, True)

    sampled(body, monkeypatch)


def watch(place):
    """A connection on which figures come, and the answer."""
    connection = http.client.HTTPConnection(place.control.address, timeout=PATIENCE_S)
    connection.request("GET", "/page/live")
    return connection, connection.getresponse()


def test_who_left_costs_nothing_and_there_are_not_too_many(place, monkeypatch):
    sampler = place.control._page._sampler
    until(lambda: sampler.watchers == 0)
    monkeypatch.setattr(server, "WATCHERS_MAX", 1)
    connection, answer = watch(place)
    assert answer.headers["Content-Type"] == "text/event-stream"
    while not answer.fp.readline().startswith(b"event: figures"):
        pass
    further, refused = watch(place)
    assert refused.status == 503
    assert "watch already" in refused.read().decode()
    answer.close()
    connection.close()
    until(lambda: sampler.watchers == 0)
    further.close()


def test_before_there_is_a_master_nothing_is_told():
    with Control("127.0.0.1", 0) as control:
        for path in ("/page/live", "/page/objects", "/page/object?key=a", "/page/heat"):
            code, _, body = ask(control.url, path)
            assert code == 503, path
            assert json.loads(body)["error"]["message"]


# -- history


def test_an_hour_is_kept_and_a_shard_that_began_anew_takes_nothing_away():
    history, counters = History(), dict.fromkeys(COUNTERS, 0)
    for at in range(SPANS_MAX + 50):
        history.take(5.0 * at, counters | {"keys": 10 * at}, 7, [])
    assert len(history.spans) == SPANS_MAX
    assert [len(history.since(each)) for each in (0, history.ended - 3, history.ended)] == [
        SPANS_MAX, 3, 0,
    ]  # fmt: skip
    keys = 2 + COUNTERS.index("keys")
    assert {span[keys] for span in history.spans} == {10}
    history.take(5.0 * (SPANS_MAX + 50), counters | {"keys": 4}, 7, [])
    assert history.spans[-1][keys] == 0


# -- what is wrong


def test_what_is_wrong_is_told_the_worst_first():
    well = status(
        workers=[WorkerEntry("w", "host", "alive", 0, ())], segments=[segment("s")],
        standbys=[StandbyEntry(1, "a:2", True, True, True, 0, 0, 0)],
    )  # fmt: skip
    assert figures(well, [])["problems"] == []
    ill = status(
        ready=False,
        workers=[WorkerEntry("w", "host", "suspect", 3000, ())],
        segments=[segment("s", SegmentState.DRAINING), segment("t", tier=1, fault="is full")],
        standbys=[StandbyEntry(1, "a:2", True, False, False, 9, 5000, 0)],
    )
    found = figures(ill, [])["problems"]
    assert [each["grave"] for each in found] == ["bad", "bad", "bad", "warn", "warn"]
    assert [each["view"] for each in found[:3]] == ["overview", "segments", "journal"]
    wholly = " ".join(each["what"] for each in found)
    for what in ("no standby follows", "disk of t", "is full", "is draining", "is suspect"):
        assert what in wholly
    # Those in trouble come first, so that none is left out where there are many.
    assert [each["name"] for each in figures(ill, [])["segments"]] == ["s", "t"]
    assert figures(well, [])["segments"][0]["used"] == 40


def test_changes_of_the_pool_are_events():
    events = Events()
    worker = WorkerEntry("w", "host", "alive", 0, ())
    events.compare(status(workers=[worker], segments=[segment("s")]))
    assert events.since(0) == []
    suspect = msgspec.structs.replace(worker, state="suspect")
    events.compare(status(workers=[suspect], segments=[segment("s")]))
    events.compare(status(ready=False, segments=[segment("s", SegmentState.GONE)]))
    assert [(each["kind"], each["what"]) for each in events.since(0)] == [
        ("worker", "w suspect"),
        ("worker", "w is gone"),
        ("segment", "s gone"),
        ("pool", "not ready: no standby follows"),
    ]


# -- objects


def history_of(place, key):
    return [each["kind"] for each in told(place.url, "/page/object", key=key)["events"]]


def test_an_object_has_a_history_also_when_it_is_gone(place):
    place.client.put("kept/then/gone", b"value")
    until(lambda: history_of(place, "kept/then/gone") == ["stored"], poll_s=0.05)
    assert told(place.url, "/page/object", key="kept/then/gone")["object"]["size"] == 5
    place.client.remove("kept/then/gone")
    until(lambda: history_of(place, "kept/then/gone") == ["removed", "stored"], poll_s=0.05)
    assert told(place.url, "/page/object", key="kept/then/gone")["object"] is None
    named = place.control._page._sampler.events.since(0)
    assert [each["what"] for each in named if each["kind"] == "removed"] == ["kept/then/gone"]


def test_of_many_changes_some_are_told_and_the_rest_is_counted(place):
    names = [f"many/{at}" for at in range(2000)]
    assert place.client.put_many(names, [b"x"] * 2000).ok
    events = place.control._page._sampler.events

    def passed_over():
        found = [each["what"] for each in events.since(0) if each["kind"] == "objects"]
        return sum(int(each.split()[0].replace(",", "")) for each in found)

    until(lambda: passed_over() >= 1000, poll_s=0.05)
    assert len(events.since(0)) <= 500


def test_events_of_other_namespaces_are_not_told(place):
    with Client(f"{place.client.config.url.rpartition('/')[0]}/other") as other:
        other.put("not/for/everybody", b"value")
    place.client.put("for/everybody", b"value")
    until(lambda: history_of(place, "for/everybody") == ["stored"], poll_s=0.05)
    told_of = json.dumps(place.control._page._sampler.events.since(0))
    assert "for/everybody" in told_of
    assert "not/for/everybody" not in told_of


def test_of_a_number_without_an_event_nothing_is_told(place):
    """As those are that a shard gave out before it was made anew, of others."""
    reply = SimpleNamespace(first=7, events=np.zeros(3, EVENT))
    reply.events["kind"] = [0, EventKind.STORED, EventKind.STORED]
    reply.events["tenant"] = [0, 0, 1]
    reply.events = reply.events.view(np.uint64).reshape(3, -1)
    for of_default, numbers in ((False, [8, 9]), (True, [8])):
        found, rows, after = events_in(reply, of_default=of_default)
        assert (found.tolist(), after) == (numbers, 10)
        assert rows["kind"].tolist() == [EventKind.STORED] * len(numbers)


def test_objects_are_listed_by_how_their_keys_begin(place):
    names = {f"page/{at:03}" for at in range(120)}
    assert place.client.put_many(sorted(names), [b"x"] * 120).ok
    place.client.put(b"page/\xff\xfe", b"x")
    found, after = [], ""
    while True:
        page = told(place.url, "/page/objects", prefix="page/", after=after)
        assert len(page["objects"]) <= objects.LISTED
        found += page["objects"]
        after = page["after"]
        if not after:
            break
    assert {each["key"] for each in found} == names | {"page/\\xff\\xfe"}
    assert len(found) == 121
    assert [each["key"] for each in found if not each["plain"]] == ["page/\\xff\\xfe"]
    code, _, body = ask(place.url, "/page/objects?after=nowhere")
    assert (code, "nowhere" in json.loads(body)["error"]["message"]) == (400, True)
    assert ask(place.url, "/page/object?key=")[0] == 400


class Read:
    """Objects of which some are read, and a clock."""

    def __init__(self):
        self.reads = {"a/cold": 0, "a/hot": 90, "b/hot": 50, "b/was": 60}

    async def list_page(self, *, after, limit):
        assert limit == objects.SAMPLED
        return [SimpleNamespace(key=key) for key in self.reads], ""

    async def stat(self, key):
        return SimpleNamespace(size=1, hits=self.reads[key])


def test_what_is_read_no_more_is_not_watched_for_long(monkeypatch):
    client, heat, now = Read(), objects.Heat(), [0.0]
    monkeypatch.setattr(objects, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def looks():
        assert (await heat.look(client))["objects"] == []  # a number alone may be an old one
        for each in client.reads:
            client.reads[each] += each != "a/cold"
        assert (await heat.look(client))["objects"] == []  # within a second it is the same look
        now[0] += 2
        found = await heat.look(client)
        assert [each["key"] for each in found["objects"]] == ["a/hot", "b/was", "b/hot"]
        assert [(each["prefix"], each["reads"]) for each in found["prefixes"]] == [
            ("b/", 112), ("a/", 91),
        ]  # fmt: skip
        for _ in range(20):
            now[0] += 2
            client.reads["a/hot"] += 1
            client.reads["b/hot"] += 1
            found = await heat.look(client)
            told = [each["key"] for each in found["objects"]]
            assert told == ["a/hot", "b/was", "b/hot"][:: 1 if now[0] <= 14 else 2]

    asyncio.run(looks())
