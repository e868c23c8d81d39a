"""The copy of one shard: positions, boundaries, times, and what a next run makes of it."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from mooncake_store.core import ring as words
from mooncake_store.core.options import ShardConfig
from mooncake_store.core.records import Status
from mooncake_store.journal.origin import Origin
from mooncake_store.journal.reading import read_journal
from mooncake_store.journal.ring_file import RingFile, remove_rings
from mooncake_store.master.keeping import Keeper
from mooncake_store.standby.mirror import ShardMirror, call_lacking, is_exact
from tests.core.lab import digests_of
from tests.waiting import until
from transfer_engine.errors import ConfigError, RemoteProtocolError

ORIGIN = Origin("0123456789abcdef", 0, 1)
SECOND = 1_000_000_000
LIMITS = ShardConfig(objects_max=1000, segments_max=8, events_kept=16)


class Leader:
    """A shard that keeps a journal, and answers as a leader does; its clock moves when told to."""

    def __init__(self, folder, now):
        self.keeper = Keeper.open(LIMITS, ORIGIN, folder, "written", now)
        self.shard = self.keeper.shard
        self.now = now
        self.client = self.shard.open_client(now, b"c" * 16, 1, "host")
        self.shard.mount(now, self.client, b"s" * 16, "segment", 1 << 20)
        assert self.keeper.state.startswith("kept")

    def start(self, *keys):
        """Begin objects; return the digests and generations."""
        digests, sizes = digests_of(keys), np.full(len(keys), 64)
        rows, _ = self.shard.put_start(self.now, self.client, 0, digests, sizes)
        assert not rows["status"].any()
        return digests, rows["generation"]

    def put(self, *keys, tags=None):
        """Begin and complete objects."""
        digests, generations = self.start(*keys)
        given = self.client, digests, generations, np.full(len(keys), 7, np.uint64)
        statuses = self.shard.put_end(self.now, *given, tags=tags)
        assert not statuses.any()

    def reply(self, mirror, *, most=1 << 17, exact=False):
        """The next words for a mirror; the first of all begin with the newest snapshot."""
        runs, snapshot = self.keeper.read()
        position = mirror.position or snapshot
        words = np.concatenate([run for _, run in runs])[position - runs[0][0] :]
        return SimpleNamespace(
            history=self.keeper.stream, position=position, words=words[:most],
            whole=len(words) <= most, exact=exact, era=0, **self.keeper.facts(self.now),
        )  # fmt: skip


@pytest.fixture
def leader(tmp_path):
    made = Leader(tmp_path / "leader", 5 * SECOND)
    yield made
    made.keeper.close()


@pytest.fixture
def make(tmp_path):
    """Make the mirror, and make it anew."""
    made = []

    def mirror():
        made.append(ShardMirror(tmp_path / "copy", ORIGIN, level="written", events=16))
        return made[-1]

    yield mirror
    for each in made:
        each.close()
    remove_rings(tmp_path / "copy")


def ring_of(tmp_path):
    ring, why = RingFile.find(tmp_path / "copy", ORIGIN)
    assert ring is not None, why
    return ring.ring


def test_words_stand_where_they_stand_at_the_leader(leader, make, tmp_path):
    mirror = make()
    leader.put(*range(100))
    mirror.take(leader.reply(mirror), 0)
    until(lambda: mirror.state == "following")
    leader.put(*range(100, 200))
    mirror.take(leader.reply(mirror), 0)
    assert mirror.position == mirror.head == leader.keeper.head == mirror.held
    runs, snapshot = leader.keeper.read()
    assert mirror.close()
    copied = read_journal(tmp_path / "copy", ORIGIN, ring_of(tmp_path))
    assert not copied.missing
    assert copied.positions[0] == snapshot
    theirs = np.concatenate([run for _, run in runs])[snapshot - runs[0][0] :]
    assert np.array_equal(np.concatenate(copied.runs), theirs)


def test_nothing_counts_before_a_boundary(leader, make):
    mirror = make()
    mirror.take(leader.reply(mirror), 0)
    leader.put(*range(50))
    counted, parts = mirror.held, 0
    while mirror.held != leader.keeper.head:
        assert mirror.held == counted
        mirror.take(leader.reply(mirror, most=7), 0)
        parts += 1
    assert parts > 10


@pytest.mark.parametrize("other_s", [-1000, 0, 1000])
@pytest.mark.parametrize("exact", [False, True])
def test_time_goes_on_whatever_the_clock_of_the_host_says(leader, make, tmp_path, other_s, exact):
    """What waits for a time of the leader's clock waits as long on that of another host."""
    mirror, here = make(), leader.now + other_s * SECOND
    leader.put(1)
    leader.start(2)
    mirror.take(leader.reply(mirror, exact=exact), here)
    until(lambda: mirror.state == "following")
    mirror.close()
    passed = 30 * SECOND
    led = Keeper.open(LIMITS, ORIGIN, tmp_path / "copy", "written", here + passed)
    try:
        assert led.kept
        assert led.ahead_ns == leader.now - here
        assert led.shard.now == leader.now + passed
        assert led.shard.exists(led.shard.now, digests_of([1, 2])).tolist() == [True, False]
        # Space that words which never came may have given out is nobody's until writers are gone.
        assert refused(led.shard, led.shard.now) == (not exact)
        writers = LIMITS.put_release_ns + LIMITS.task_timeout_ns
        assert not refused(led.shard, led.shard.now + writers + 1)
    finally:
        led.close()


def refused(shard, now):
    """Whether an object finds no space."""
    rows, _ = shard.put_start(now, 1, 0, digests_of([99]), np.full(1, 64))
    if rows["status"][0] == 0:
        shard.put_revoke(now, 1, digests_of([99]), rows["generation"])
    return bool(rows["status"][0])


def test_a_copy_that_ended_in_good_order_before_its_host_did_may_lack_words(leader, make, tmp_path):
    """After a start of the host its ring is gone, and its files say that they were ended well."""
    mirror = make()
    leader.put(1)
    mirror.take(leader.reply(mirror), leader.now)
    until(lambda: mirror.state == "following")
    mirror.close()
    remove_rings(tmp_path / "copy")
    another_boot = dataclasses.replace(ORIGIN, boot=(1, 2))
    led = Keeper.open(LIMITS, another_boot, tmp_path / "copy", "written", leader.now)
    try:
        assert refused(led.shard, led.shard.now)
        assert not (tmp_path / "copy" / "COPY").exists()
    finally:
        led.close()


def test_leases_of_which_no_word_tells_keep_objects_after_a_promotion(leader, make, tmp_path):
    mirror = make()
    leader.put(1)
    mirror.take(leader.reply(mirror, exact=True), leader.now)
    until(lambda: mirror.state == "following")
    # The leader grants a lease, and is gone before a standby hears of it.
    leader.shard.get(leader.now, leader.client, digests_of([1]), LIMITS.lease_ttl_max_ns)
    mirror.close()
    led = Keeper.open(LIMITS, ORIGIN, tmp_path / "copy", "written", leader.now)
    try:
        ends = leader.now + LIMITS.lease_ttl_max_ns
        assert led.shard.remove(ends - 1, digests_of([1]), False, 0)[0] == Status.HAS_LEASE
        assert led.shard.remove(ends + 1, digests_of([1]), False, 0)[0] == Status.OK
    finally:
        led.close()


def test_who_is_promoted_has_the_tags_of_content(leader, make, tmp_path):
    mirror = make()
    leader.put(1, 2, tags=np.array([77, 1 << 63], np.uint64))
    mirror.take(leader.reply(mirror, exact=True), leader.now)
    until(lambda: mirror.state == "following")
    leader.put(3)
    leader.put(4, tags=np.array([99], np.uint64))
    mirror.take(leader.reply(mirror, exact=True), leader.now)
    mirror.close()
    led = Keeper.open(LIMITS, ORIGIN, tmp_path / "copy", "written", leader.now)
    try:
        keys = digests_of([1, 2, 3, 4])
        rows, _ = led.shard.get(leader.now, leader.client, keys, 0)
        told = led.shard.tell_tags(leader.now, keys, rows).view(np.uint64)
        assert told[:, 0].tolist() == [77, 1 << 63, 0, 99]
    finally:
        led.close()


def test_a_leader_that_rests_may_go_on_without_a_copy_that_did_not_count(leader, make, tmp_path):
    mirror = make()
    leader.put(1)
    mirror.take(leader.reply(mirror, exact=words.HANDED_OVER), leader.now)
    until(lambda: mirror.state == "following")
    assert (mirror.all_there, mirror.exact) == (True, False)
    mirror.take(leader.reply(mirror, exact=words.EXACT), leader.now)
    assert (mirror.all_there, mirror.exact) == (False, True)
    mirror.take(leader.reply(mirror, exact=words.HANDED_OVER), leader.now)
    assert (mirror.all_there, mirror.exact) == (True, True)


def test_what_comes_back_from_a_host_is_lacking_until_its_leader_says_otherwise(
    leader, make, tmp_path
):
    """Another host led it meanwhile, so what its leader of before said of the copy is over."""
    mirror, folder = make(), tmp_path / "copy"
    leader.put(1)
    mirror.take(leader.reply(mirror, exact=words.EXACT), leader.now)
    until(lambda: mirror.state == "following")
    assert is_exact(folder, ORIGIN, 0)
    call_lacking(folder, ORIGIN)  # while it is in use
    assert not mirror.exact
    assert not is_exact(folder, ORIGIN, 0)
    mirror.take(leader.reply(mirror, exact=words.EXACT), leader.now)
    assert is_exact(folder, ORIGIN, 0)
    mirror.close()
    call_lacking(folder, ORIGIN)
    assert not is_exact(folder, ORIGIN, 0)
    call_lacking(tmp_path / "none", ORIGIN)


def test_a_next_run_goes_on_with_what_it_has(leader, make):
    mirror = make()
    leader.put(*range(20))
    mirror.take(leader.reply(mirror), 0)
    until(lambda: mirror.state == "following")
    position = mirror.position
    assert mirror.close()
    leader.put(*range(20, 40))
    again = make()
    assert (again.position, again.history) == (position, leader.keeper.stream)
    assert again.state == "following"
    again.take(leader.reply(again), 0)
    assert again.held == leader.keeper.head


def test_another_history_begins_the_copy_anew(leader, make, tmp_path):
    mirror = make()
    leader.put(*range(20))
    mirror.take(leader.reply(mirror), 0)
    until(lambda: mirror.state == "following")
    other = Leader(tmp_path / "other", leader.now)
    try:
        other.put(*range(100, 130))
        reply = other.reply(SimpleNamespace(position=0))
        mirror.take(reply, 0)
        until(lambda: mirror.state == "following")
        assert mirror.history == other.keeper.stream
        mirror.close()
        led = Keeper.open(LIMITS, ORIGIN, tmp_path / "copy", "written", leader.now)
        found = led.shard.exists(leader.now, digests_of(range(130)))
        led.close()
        assert found.tolist() == [False] * 100 + [True] * 30
    finally:
        other.keeper.close()


def test_one_standby_at_a_time_has_a_folder(make, monkeypatch):
    monkeypatch.setattr("mooncake_store.master.keeping.LOCK_S", 0.0)
    make()
    with pytest.raises(ConfigError, match="has not ended"):
        make()


def test_words_without_end_are_refused(leader, make):
    mirror = make()
    mirror.take(leader.reply(mirror), 0)
    endless = leader.reply(mirror)
    endless.words, endless.whole = np.zeros(1 << 23, np.int64), False
    with pytest.raises(RemoteProtocolError, match="without a boundary"):
        mirror.take(endless, 0)
