"""Shards that are split while a standby copies them, and leaders that are lost on the way."""

import threading

import pytest

from mooncake_store.errors import StoreError, UnavailableError
from mooncake_store.wire.hosts import MERGE, SPLIT, Merge, Split
from tests.standby import asking
from tests.standby.members import assert_there, put
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

QUICK = ("--ping-interval", "200ms")
KEYS = [f"key-{number:04d}" for number in range(300)]


def split(start_program, master, factor=2, how="split"):
    """Split or merge all shards of a master as people do."""
    command = "-m", "mooncake_store", "shard", how, factor, "--master", master
    program = start_program(*command)
    assert program.wait() == 0, program.output


@pytest.mark.parametrize("journal", ["written", "replicated"])
def test_a_standby_copies_all_shards_anew_by_itself(pool, start_program, journal):
    """Its copy of the first would be taken for all there is."""
    options = (*QUICK, "--journal", journal)
    pool.lead(*options)
    pool.follow(*options)
    pool.lend()
    pool.until_copied()
    client = pool.client(deadline=PATIENCE_S)
    put(client, KEYS)
    split(start_program, pool.named())
    put(client, ["after"])
    until(lambda: len(pool.status().shards) == 2)
    pool.until_copied()
    assert not list(pool.state("standby").glob("split.*"))
    put(client, ["last"])
    led = pool.take_over()
    assert len(led.store_stats()) == 2
    # At written what came last may be lacking.
    assert_there(led, KEYS + (["after", "last"] if journal == "replicated" else []))


def test_what_came_of_a_merge_is_copied_anew_as_well(pool, start_program):
    options = (*QUICK, "--journal", "replicated", "--shards", "4")
    pool.lead(*options)
    pool.follow(*options)
    pool.lend()
    pool.until_copied()
    put(pool.client(), KEYS)
    split(start_program, pool.named(), 4, "merge")
    put(pool.client(deadline=PATIENCE_S), ["after"])
    until(lambda: len(pool.status().shards) == 1)
    led = pool.take_over()
    assert len(led.store_stats()) == 1
    assert_there(led, [*KEYS, "after"])


KILLED_AT = "tests.standby.killed_at"
REPLICATED = (*QUICK, "--journal", "replicated")


class Writer:
    """Puts objects one by one for as long as that goes, and knows which were answered."""

    def __init__(self, client):
        self._client = client
        self.answered = []
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def _write(self):
        for number in range(100_000):
            try:
                put(self._client, [f"written-{number:06d}"])
            except (StoreError, AssertionError):
                return
            self.answered.append(f"written-{number:06d}")

    def end(self):
        self._client.close()
        self._thread.join()


def begin(pool, shards=1, **how):
    """A leader of one shard or more, a standby that counts, and somebody who puts."""
    pool.lead(*REPLICATED, "--shards", shards, version=how.get("leader", ("mooncake_store",)))
    pool.follow(*REPLICATED, version=how.get("standby", ("mooncake_store",)))
    pool.lend()
    pool.until_copied()
    put(pool.client(), KEYS)
    writer = Writer(pool.client(deadline="3s"))
    until(lambda: len(writer.answered) > 20)
    return writer


def ask_to_split(pool, operation=SPLIT, request=Split):
    """Ask the leader, which may be lost before it answers."""
    try:
        asking.ask(pool.addresses["leader"], operation, request(2))
    except StoreError as error:
        return error
    return None


@pytest.mark.parametrize(
    "moment", ["resting", "made", "decided", "half", "split", "started", "mounted"]
)
def test_a_leader_that_is_lost_while_it_splits_its_shards_has_split_none(pool, moment):
    writer = begin(pool, leader=(KILLED_AT, moment))
    ask_to_split(pool)
    assert pool.programs["leader"].wait() != 0
    led = pool.take_over()
    writer.end()
    assert_there(led, [*KEYS, *writer.answered])
    # By the last of these moments the standby may have copied the new ones.
    assert len(led.store_stats()) == 1 or moment == "mounted"


@pytest.mark.parametrize("moment", ["made", "decided", "started"])
def test_a_leader_that_is_lost_while_it_merges_its_shards_has_merged_none(pool, moment):
    writer = begin(pool, shards=2, leader=(KILLED_AT, moment))
    ask_to_split(pool, MERGE, Merge)
    assert pool.programs["leader"].wait() != 0
    led = pool.take_over()
    writer.end()
    assert_there(led, [*KEYS, *writer.answered])
    assert len(led.store_stats()) == 2


def test_while_not_all_is_copied_that_was_split_the_copies_of_before_may_lead(pool):
    """Nothing is answered without the standby, so they lack nothing."""
    writer = begin(pool, standby=(KILLED_AT, "copying"))
    assert ask_to_split(pool) is None
    until(lambda: len(pool.status().shards) == 2)
    until(lambda: all(shard.objects for shard in pool.status().shards))
    assert {shard.state for shard in pool.status().shards} == {"copying"}
    with pytest.raises(UnavailableError, match="does not follow"):
        pool.client().put("one", b"value", deadline="15s")
    led = pool.take_over()
    writer.end()
    assert_there(led, [*KEYS, *writer.answered])
    assert len(led.store_stats()) == 1


@pytest.mark.parametrize("moment", ["copied", "copies decided"])
def test_a_standby_that_is_killed_while_it_copies_anew_goes_on_when_it_is_started(pool, moment):
    writer = begin(pool, standby=(KILLED_AT, moment))
    assert ask_to_split(pool) is None
    assert pool.programs["standby"].wait() != 0
    pool.follow(*REPLICATED)
    pool.until_copied()
    put(pool.client(), ["after"])
    led = pool.take_over()
    writer.end()
    assert_there(led, [*KEYS, *writer.answered, "after"])
    assert len(led.store_stats()) == 2
