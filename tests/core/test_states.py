"""Section 1 of the semantics: every operation in every state of an object, with its code.

`STATES` builds an object in each state; `TABLE` is the table itself. Time in these tests is the
lab's clock: deadlines are 30 s (discard) and 600 s (release), leases 10 s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mooncake_store.core import codes as c
from mooncake_store.core import space
from mooncake_store.core.records import Status
from tests.core.lab import Lab, digests_of

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = 5
OK = Status.OK
S = Status


@dataclass
class Scene:
    """One object in a known state, its owner, and somebody else."""

    lab: Lab
    owner: int
    stranger: int
    generation: int = 0
    """Of the newest write: what its owner would end or revoke."""
    old: int = 0
    """Of the readable value, where there is one."""


def scene() -> Scene:
    lab = Lab(segments=3)
    return Scene(lab, lab.open(10), lab.open(11))


def missing() -> Scene:
    return scene()


def writing() -> Scene:
    made = scene()
    rows, _ = made.lab.start([KEY], client=made.owner, names=["a/x"])
    made.generation = int(rows["generation"][0])
    made.lab.sleep(29)
    return made


def late() -> Scene:
    made = writing()
    made.lab.sleep(2)
    return made


def readable() -> Scene:
    made = scene()
    made.generation = int(made.lab.put([KEY], client=made.owner, names=["a/x"])[0])
    made.old = made.generation
    made.lab.sleep(1)
    return made


def leased() -> Scene:
    made = readable()
    assert made.lab.get_status(KEY, ttl=10) == OK
    made.lab.sleep(9)
    return made


def lapsed() -> Scene:
    made = leased()
    made.lab.sleep(2)
    return made


def copying() -> Scene:
    made = readable()
    lab = made.lab
    source = int(lab.get([KEY])[1]["segment"][0])
    target = next(index for index in lab.segments if index != source)
    assert lab.begin(KEY, [target], source)[0] == OK
    return made


def moving() -> Scene:
    made = readable()
    lab = made.lab
    source = int(lab.get([KEY])[1]["segment"][0])
    target = next(index for index in lab.segments if index != source)
    assert lab.begin(KEY, [target], source, move=True)[0] == OK
    return made


def upserting() -> Scene:
    made = readable()
    rows, _ = made.lab.start([KEY], 8192, client=made.owner, upsert=True)
    assert rows["status"][0] == OK
    made.generation = int(rows["generation"][0])
    assert made.generation != made.old
    made.lab.sleep(1)
    return made


def absent() -> Scene:
    made = readable()
    source = int(made.lab.get([KEY])[1]["segment"][0])
    made.lab.shard.set_absent(made.lab.now, source, True)
    return made


STATES: dict[str, Callable[[], Scene]] = {
    "missing": missing,
    "writing": writing,
    "late": late,
    "readable": readable,
    "leased": leased,
    "lapsed": lapsed,
    "copying": copying,
    "moving": moving,
    "upserting": upserting,
    "absent": absent,
}


def exists(made: Scene) -> int:
    return int(made.lab.exists([KEY])[0])


def get(made: Scene) -> int:
    return made.lab.get_status(KEY, ttl=10)


def query(made: Scene) -> int:
    return made.lab.get_status(KEY)


def put_start(made: Scene) -> int:
    return int(made.lab.start([KEY], client=made.stranger)[0]["status"][0])


def put_end(made: Scene) -> int:
    return made.lab.end([KEY], [made.generation], client=made.owner)[0]


def put_end_by_another(made: Scene) -> int:
    return made.lab.end([KEY], [made.generation], client=made.stranger)[0]


def put_revoke(made: Scene) -> int:
    return made.lab.revoke([KEY], [made.generation], client=made.owner)[0]


def put_revoke_by_another(made: Scene) -> int:
    return made.lab.revoke([KEY], [made.generation], client=made.stranger)[0]


def upsert_start(made: Scene) -> int:
    return int(made.lab.start([KEY], 777, client=made.stranger, upsert=True)[0]["status"][0])


def remove(made: Scene) -> int:
    return made.lab.remove([KEY])[0]


def force_remove(made: Scene) -> int:
    return made.lab.remove([KEY], force=True)[0]


def remove_all(made: Scene) -> int:
    return made.lab.remove_matching("", "all")


def remove_by_prefix(made: Scene) -> int:
    return made.lab.remove_matching("a/", "prefix")


def force_remove_all(made: Scene) -> int:
    return made.lab.remove_matching("", "all", force=True)


def evict(made: Scene) -> int:
    made.lab.evict(1.0)
    return int(made.lab.stat(KEY) is None)


def free_target(lab: Lab) -> int:
    """The last segment without a replica."""
    found = lab.stat(KEY)
    held = {segment for segment, _, _ in found.replicas} if found else set()
    return [index for index in lab.segments if index not in held][-1]


def copy(made: Scene) -> int:
    return int(made.lab.begin(KEY, [free_target(made.lab)])[0])


def move(made: Scene) -> int:
    return int(made.lab.begin(KEY, [free_target(made.lab)], move=True)[0])


COLUMNS = tuple(STATES)
ILLEGAL, EXISTS = S.ILLEGAL_CLIENT, S.ALREADY_EXISTS
# One line per operation, one answer per state, in the order of STATES. For exists the answer is
# 0 or 1, for evict whether the object left, for remove_all and its like how many were taken.
TABLE: dict[Callable[[Scene], int], tuple[int, ...]] = {
    exists: (0, 0, 0, 1, 1, 1, 1, 1, 1, 0),
    get: (S.NOT_FOUND, S.NOT_READY, S.NOT_READY, OK, OK, OK, OK, OK, OK, S.ABSENT),
    query: (S.NOT_FOUND, S.NOT_READY, S.NOT_READY, OK, OK, OK, OK, OK, OK, S.ABSENT),
    put_start: (OK, EXISTS, OK, EXISTS, EXISTS, EXISTS, EXISTS, EXISTS, EXISTS, OK),
    put_end: (S.NOT_FOUND, OK, OK, OK, OK, OK, OK, OK, OK, OK),
    put_end_by_another: (S.NOT_FOUND, *[ILLEGAL] * 9),
    put_revoke: (S.NOT_FOUND, OK, OK, *[S.INVALID_WRITE] * 5, OK, S.INVALID_WRITE),
    put_revoke_by_another: (S.NOT_FOUND, *[ILLEGAL] * 9),
    upsert_start: (OK, OK, OK, OK, OK, OK, S.BUSY, S.BUSY, OK, OK),
    remove: (
        S.NOT_FOUND,
        S.NOT_READY,
        OK,
        OK,
        S.HAS_LEASE,
        OK,
        S.BUSY,
        S.BUSY,
        S.NOT_READY,
        OK,
    ),
    force_remove: (S.NOT_FOUND, OK, OK, OK, OK, OK, S.BUSY, S.BUSY, OK, OK),
    remove_all: (0, 0, 1, 1, 0, 1, 0, 0, 0, 1),
    remove_by_prefix: (0, 0, 1, 1, 0, 1, 0, 0, 0, 1),
    force_remove_all: (0, 0, 1, 1, 1, 1, 0, 0, 0, 1),
    evict: (1, 0, 1, 1, 0, 1, 0, 0, 0, 0),
    copy: (
        S.NOT_FOUND,
        S.REPLICA_NOT_FOUND,
        S.REPLICA_NOT_FOUND,
        OK,
        OK,
        OK,
        S.BUSY,
        S.BUSY,
        S.BUSY,
        S.NOT_FOUND,
    ),
    move: (
        S.NOT_FOUND,
        S.REPLICA_NOT_FOUND,
        S.REPLICA_NOT_FOUND,
        OK,
        OK,
        OK,
        S.BUSY,
        S.BUSY,
        S.BUSY,
        S.NOT_FOUND,
    ),
}


@pytest.mark.parametrize("state", COLUMNS)
@pytest.mark.parametrize("operation", TABLE, ids=lambda operation: operation.__name__)
def test_table(operation: Callable[[Scene], int], state: str) -> None:
    made = STATES[state]()
    assert operation(made) == TABLE[operation][COLUMNS.index(state)]
    made.lab.check()


@pytest.mark.parametrize("state", COLUMNS)
def test_a_refused_operation_changes_nothing(state: str) -> None:
    refused = [
        operation
        for operation, answers in TABLE.items()
        if answers[COLUMNS.index(state)] < 0 and operation not in (get, query)
    ]
    for operation in refused:
        made = STATES[state]()
        before, stats = made.lab.stat(KEY), made.lab.shard.stats()
        assert operation(made) < 0
        assert made.lab.stat(KEY) == before, operation.__name__
        assert made.lab.shard.stats() == stats, operation.__name__


def test_late_writer_finishes_unless_pre_empted() -> None:
    made = late()
    lab = made.lab
    rows, _ = lab.start([KEY], client=made.stranger)
    assert rows["status"][0] == OK
    assert lab.end([KEY], [made.generation], client=made.owner) == [S.SUPERSEDED]
    assert lab.get_status(KEY) == S.NOT_READY
    assert lab.end([KEY], rows["generation"], client=made.stranger) == [OK]


def test_a_writer_pre_empted_by_itself_is_told_so() -> None:
    made = late()
    rows, _ = made.lab.start([KEY], client=made.owner)
    assert made.lab.end([KEY], [made.generation], client=made.owner) == [S.SUPERSEDED]
    assert made.lab.revoke([KEY], [made.generation], client=made.owner) == [S.INVALID_WRITE]
    assert made.lab.end([KEY], rows["generation"], client=made.owner) == [OK]


def places(lab: Lab) -> list[tuple[int, int]]:
    return [(int(r["segment"]), int(r["offset"])) for r in lab.get([KEY])[1]]


def test_upsert_shows_the_old_value_until_it_ends() -> None:
    made = upserting()
    lab = made.lab
    row = lab.get([KEY])[0][0]
    assert (row["generation"], row["size"]) == (made.old, 4096)
    before = places(lab)
    assert lab.end([KEY], [made.generation], client=made.owner, checksum=99) == [OK]
    row = lab.get([KEY])[0][0]
    assert (row["generation"], row["size"], row["checksum"]) == (made.generation, 8192, 99)
    assert places(lab) != before


def test_upsert_revoked_leaves_the_old_value() -> None:
    made = upserting()
    before, used = places(made.lab), made.lab.shard.stats().bytes_used
    assert made.lab.revoke([KEY], [made.generation], client=made.owner) == [OK]
    assert places(made.lab) == before
    assert made.lab.shard.stats().bytes_used < used
    assert made.lab.remove([KEY]) == [OK]
    assert made.lab.shard.stats().bytes_used == 0


def test_upsert_over_a_running_upsert_pre_empts_it() -> None:
    made = upserting()
    lab = made.lab
    rows, _ = lab.start([KEY], client=made.stranger, upsert=True)
    assert rows["status"][0] == OK
    assert lab.end([KEY], [made.generation], client=made.owner) == [S.SUPERSEDED]
    assert int(lab.get([KEY])[0]["generation"][0]) == made.old
    assert lab.end([KEY], rows["generation"], client=made.stranger) == [OK]
    assert lab.get([KEY])[0]["generation"][0] == rows["generation"][0]
    assert lab.end([KEY], [made.generation], client=made.owner) == [S.SUPERSEDED]


def test_the_end_of_an_older_generation_stays_a_repetition_while_an_upsert_runs() -> None:
    made = upserting()
    assert made.lab.end([KEY], [made.old], client=made.owner) == [OK]
    assert made.lab.end([KEY], [made.old], client=made.stranger) == [ILLEGAL]


def test_generations_are_told_older_from_newer_when_their_count_begins_anew() -> None:
    lab = Lab()
    lab.shard.tally[c.GENERATION] = 0xFFFFFFFE
    first, _ = lab.start([KEY], upsert=True)
    second, _ = lab.start([KEY], upsert=True)
    assert (first["generation"][0], second["generation"][0]) == (0xFFFFFFFF, 0)
    assert lab.end([KEY], first["generation"]) == [S.SUPERSEDED]
    assert lab.end([KEY], second["generation"]) == [OK]


@pytest.mark.parametrize("size", [4096, 100, 100_000])
def test_upsert_same_and_other_size(size: int) -> None:
    lab = Lab()
    lab.put([KEY], 4096)
    lab.put([KEY], size, upsert=True)
    assert int(lab.get([KEY])[0]["size"][0]) == size
    assert lab.shard.stats().objects == 1


def test_upsert_of_a_missing_key_is_a_put() -> None:
    lab = Lab()
    rows, _ = lab.start([KEY], upsert=True)
    assert lab.get_status(KEY) == S.NOT_READY
    assert lab.end([KEY], rows["generation"]) == [OK]
    assert lab.get_status(KEY) == OK


def test_upsert_is_forgotten_when_its_writer_is_gone_for_good() -> None:
    made = upserting()
    made.lab.sleep(700)
    made.lab.tick()
    assert made.lab.remove([KEY]) == [OK]
    assert made.lab.shard.stats().bytes_used == 0


def test_force_remove_during_an_upsert_takes_both_generations() -> None:
    made = upserting()
    lab = made.lab
    assert lab.remove([KEY], force=True) == [OK]
    assert lab.get_status(KEY) == S.NOT_FOUND
    assert lab.shard.stats().quarantined_bytes >= 8192
    assert lab.end([KEY], [made.generation], client=made.owner) == [S.NOT_FOUND]
    assert lab.shard.stats().quarantined_bytes == 0


def test_a_writer_whose_upsert_was_given_up_is_told_so_whoever_put_what_is_still_there() -> None:
    made = upserting()
    before = made.lab.get([KEY])[0]["generation"][0]
    made.lab.shard.close_client(made.lab.now, made.owner)
    again = made.lab.open(11)
    assert made.lab.end([KEY], [made.generation], client=again) == [S.NOT_FOUND]
    assert made.lab.end([KEY], [made.generation], client=made.stranger) == [S.NOT_FOUND]
    assert made.lab.get([KEY])[0]["generation"][0] == before


def overtaken() -> Scene:
    """The owner's upsert lost its place to the stranger's, which is complete."""
    made = upserting()
    rows, _ = made.lab.start([KEY], client=made.stranger, upsert=True)
    assert made.lab.shard.stats().quarantined_bytes == 8192
    assert made.lab.end([KEY], rows["generation"], client=made.stranger) == [OK]
    return made


@pytest.mark.parametrize(
    ("says", "answer"), [(put_end, S.SUPERSEDED), (put_revoke, S.ILLEGAL_CLIENT)]
)
def test_the_space_of_a_put_that_was_overtaken_returns_when_its_writer_is_done(
    says: Callable[[Scene], int], answer: Status
) -> None:
    made = overtaken()
    assert says(made) == answer
    stats = made.lab.shard.stats()
    assert (stats.quarantined_bytes, stats.bytes_allocated) == (0, 4096)


def test_only_the_writers_own_word_returns_the_space_of_a_put_that_was_overtaken() -> None:
    made = overtaken()
    lab, owner, stranger = made.lab, made.owner, made.stranger
    lab.end([KEY], [made.generation], client=stranger)
    lab.revoke([KEY], [made.generation], client=stranger)
    lab.revoke([KEY], [made.generation + 7], client=owner)
    lab.revoke([KEY], [made.generation], client=owner, late=True)
    assert lab.shard.stats().quarantined_bytes == 8192
    lab.shard.close_client(lab.now, owner)
    assert lab.end([KEY], [made.generation], client=owner) == [S.CLIENT_NOT_FOUND]
    assert lab.shard.stats().quarantined_bytes == 8192
    lab.sleep(600)
    lab.tick()
    assert lab.shard.stats().quarantined_bytes == 0


def test_a_put_that_was_overtaken_is_told_so_after_the_key_was_removed() -> None:
    made = overtaken()
    assert made.lab.remove([KEY]) == [OK]
    assert made.lab.end([KEY], [made.generation], client=made.owner) == [S.SUPERSEDED]
    assert made.lab.end([KEY], [made.generation], client=made.owner) == [S.NOT_FOUND]


def test_every_replica_of_a_put_that_was_overtaken_returns() -> None:
    lab = Lab(segments=3)
    owner = lab.open(10)
    first, _ = lab.start([KEY, KEY + 1], client=owner, upsert=True, replicas=2)
    lab.put([KEY, KEY + 1], upsert=True)
    assert lab.shard.stats().quarantined_bytes == 4 * 4096
    assert lab.end([KEY], first["generation"][:1], client=owner) == [S.SUPERSEDED]
    assert lab.shard.stats().quarantined_bytes == 2 * 4096
    assert lab.end([KEY + 1], first["generation"][1:], client=owner) == [S.SUPERSEDED]
    assert lab.shard.stats().quarantined_bytes == 0


def test_writers_that_never_come_are_known_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "LATE_KEPT", 3)
    lab = Lab()
    owner = lab.open(10)
    begun = [lab.start([KEY], client=owner, upsert=True)[0]["generation"][0] for _ in range(6)]
    assert len(lab.shard.space.late) == 3
    for generation in begun[:-1]:
        assert lab.end([KEY], [generation], client=owner) == [S.SUPERSEDED]
    assert lab.shard.stats().quarantined_bytes == 2 * 4096  # of the two longest overtaken
    lab.sleep(600)
    lab.tick()
    assert lab.shard.stats().quarantined_bytes == 0
    assert not lab.shard.space.late


def test_put_end_twice_in_one_batch_is_ok() -> None:
    lab = Lab()
    rows, _ = lab.start([KEY])
    generation = rows["generation"][0]
    assert lab.end([KEY, KEY], [generation, generation]) == [OK, OK]
    assert lab.shard.stats().objects == 1


def test_revoke_twice_in_one_batch() -> None:
    lab = Lab()
    rows, _ = lab.start([KEY])
    generation = rows["generation"][0]
    assert lab.revoke([KEY, KEY], [generation, generation]) == [OK, S.NOT_FOUND]
    assert lab.shard.stats().bytes_used == 0


def test_revoke_an_upsert_twice_in_one_batch() -> None:
    made = upserting()
    out = made.lab.revoke([KEY, KEY], [made.generation] * 2, client=made.owner)
    assert out[0] == OK
    assert out[1] in (S.INVALID_WRITE, S.NOT_FOUND)
    assert int(made.lab.get([KEY])[0]["generation"][0]) == made.old


def test_ending_an_upsert_twice_in_one_batch_keeps_the_first_checksum() -> None:
    made = upserting()
    lab = made.lab
    out = lab.shard.put_end(
        lab.now,
        made.owner,
        digests_of([KEY, KEY]),
        np.full(2, made.generation, np.uint32),
        np.array([11, 22], np.uint64),
    )
    assert out.tolist() == [OK, OK]
    lab.check()
    assert int(lab.get([KEY])[0]["checksum"][0]) == 11


def test_an_upsert_outlives_the_old_value_whose_segment_goes() -> None:
    """Losing the readable value must not cost a writer the one it is writing elsewhere."""
    lab = Lab(segments=2)
    lab.put([KEY], preferred=("segment0",))
    rows, replicas = lab.start([KEY], 100, upsert=True, preferred=("segment1",))
    assert int(replicas["segment"][0]) == lab.segments[1]
    assert lab.shard.unmount(lab.now, lab.client, lab.uuid(0)) == OK
    lab.check()
    assert lab.get_status(KEY) in (S.NOT_READY, S.NOT_FOUND)
    assert lab.end([KEY], rows["generation"]) == [OK]
    assert lab.get([KEY])[0]["generation"].tolist() == rows["generation"].tolist()


def test_remove_twice_in_one_batch() -> None:
    lab = Lab()
    lab.put([KEY])
    assert lab.remove([KEY, KEY]) == [OK, S.NOT_FOUND]


def test_generation_is_new_after_remove_and_put() -> None:
    lab = Lab()
    seen: set[Any] = set()
    for _ in range(20):
        (generation,) = lab.put([KEY])
        assert generation not in seen
        seen.add(generation)
        assert lab.remove([KEY]) == [OK]
