"""Shards that become one: what was split is as it was, and what several knew is known to one."""

import errno
import os
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from mooncake_store.core import codes as c
from mooncake_store.core.records import SegmentState
from mooncake_store.core.segment import NEVER
from mooncake_store.journal.ring_file import remove_rings
from mooncake_store.master import resharding
from mooncake_store.master.counting import Counted, count_standby, counting_standby
from mooncake_store.master.keeping import Keeper
from mooncake_store.master.registers import write_registers
from mooncake_store.master.resharding import READY, UNFINISHED, finish_resharding
from tests.core.lab import MIB, SECOND, digests_of
from tests.master.resharded import CLIENTS, State
from tests.sweeps import sweep
from transfer_engine.errors import ConfigError, InvalidArgumentError, StoreError

HOUR_NS = 3600 * SECOND
KINDS = [
    {},
    {"tenant": "red"},
    {"tenant": "green", "client": 2},
    {"hard_pin": True},
    {"replicas": 2},
]


@pytest.fixture
def made(tmp_path):
    """Makes a state; nothing of it is left in memory."""
    path = tmp_path / "state"
    yield lambda shards, *sizes: State(path, shards, sizes or (4 * MIB, 6 * MIB))
    for folder in path.glob("shard-*"):
        remove_rings(folder)


def fill(state, rng, first=0, count=400):
    """Put objects of all kinds and sizes."""
    keys = list(range(first, first + count))
    rng.shuffle(keys)
    for at in range(0, count, 20):
        size = rng.randrange(1, 30_000)
        state.put(keys[at : at + 16], size, **rng.choice(KINDS))
        for key in keys[at + 16 : at + 20]:
            state.put([key], size, groups=(f"g{key % 3}",))


def key_of(shard, shards, first=0):
    """A key that belongs to a shard."""
    from mooncake_store.ids import shard_of

    return next(k for k in range(first, 10**6) if shard_of(digests_of([k]), shards)[0] == shard)


def places(shard):
    """Where in each segment waits what somebody may still use that is no object any more."""
    waits = shard.waiting_extents()
    return {tuple(extent[:3]) for extent in waits.tolist() if extent[4] < NEVER}


def live_on(state, rng, there, first):
    """Let some time pass in which clients put, read and remove."""
    with state.run():
        gone = rng.sample(there, len(there) // 3)
        state.lease(gone[::2], rng.randrange(1, 20) * SECOND)
        state.remove(gone)
        fill(state, rng, first, 100)
        begun = state.begin(range(first + 100, first + 120), 5000)
        state.end(dict(list(begun.items())[:5]))
        state.pass_time(rng.choice([0, SECOND, 30 * SECOND]))
        state.go_round()


@sweep("seed", [3, 2, 1, 0], usual=2)
def test_whatever_becomes_of_shards_no_object_changes_and_no_place_is_given_out_twice(made, seed):
    rng = random.Random(seed)
    sizes = [rng.randrange(1, 9) * MIB + rng.randrange(3) * 12_345 for _ in range(3)]
    state = made(rng.choice([1, 2, 4]), *sizes)
    with state.run():
        fill(state, rng)
    for step in range(1, 5):
        before, count = state.objects(), state.count
        factors = [factor for factor in (2, 3, 4) if count % factor == 0]
        if factors and (count > 6 or rng.random() < 0.6):
            state.merge(rng.choice(factors))
        else:
            state.split(rng.choice([2, 3]))
        assert state.objects() == before
        state.check_space()
        there = [int(each[0].removeprefix(b"name/")) for each in before.values()]
        live_on(state, rng, there, 1000 * step)
        state.check_space()
    if state.count > 1:
        state.merge(state.count)
    with state.run():
        (shard,) = state.shards
        state.remove([1000 * step + number for step in range(5) for number in range(400)])
        state.pass_time(HOUR_NS)
        assert state.go_round() == 0
        assert [(s.used, s.part, s.longest) for s in shard.segments()] == [
            (0, (), nbytes) for nbytes in sizes
        ]


def test_what_was_split_and_merged_gives_out_what_it_did_before(made):
    state = made(2)
    with state.run():
        fill(state, random.Random(1))
        longest = [s.longest for s in state.shards[0].segments()]
    before, free = state.objects(), state.check_space()
    state.split(4)
    assert max(s.longest for s in state.look()[0].segments()) < max(longest) // 4
    state.merge(4)
    assert state.objects() == before
    assert [s.longest for s in state.look()[0].segments()] == longest
    assert abs(state.check_space() - free) < 100_000  # small holes may be other ones
    assert not any(len(shard.guests()) for shard in state.look())


def test_slices_that_end_at_other_places_are_joined_as_well(made):
    # Large slices have another unit than small ones.
    state = made(8, 255 * MIB + 12_345)
    with state.run():
        for first in range(0, 1000, 50):
            state.put(range(first, first + 50), 500_000)
    before, free = state.objects(), state.given_out()
    state.merge(4)
    assert state.objects() == before
    assert state.given_out() == free
    with state.run():
        for at in range(2):
            for known in state.registers.segments:
                state.mount(at, known)
    state.merge(2)
    assert state.objects() == before
    assert state.look()[0].segments()[0].part == ()


def test_guests_of_shards_beyond_those_that_are_merged_stay_until_they_are_gone(made):
    state = made(1)
    with state.run():
        state.put(range(300), 20_000)
    state.split(4)
    guests = sum(len(shard.guests()) for shard in state.look())
    state.merge(2)
    left = sum(len(shard.guests()) for shard in state.look())
    assert 0 < left < guests
    with state.run():
        assert state.go_round() == left
        state.remove(range(300))
        state.pass_time(HOUR_NS)
        assert state.go_round() == 0
        assert not any(s.used for shard in state.shards for s in shard.segments())


def test_each_client_and_namespace_is_known_by_one_number(made):
    state = made(2)
    with state.run():
        one, other = state.shards
        assert one.clients[CLIENTS[1]].handle != other.clients[CLIENTS[1]].handle
        assert one.tenants["red"].number != other.tenants["red"].number
        begun = state.begin(range(40), 1000, tenant="red")
        state.end(begun)
        other.open_client(state.now(1), CLIENTS[2], 2)
    state.merge(2)
    with state.run():
        (shard,) = state.shards
        assert {uuid: client.epoch for uuid, client in shard.clients.items()} == {
            CLIENTS[0]: 1, CLIENTS[1]: 1, CLIENTS[2]: 2,
        }  # fmt: skip
        assert shard.tenant_quota(shard.tenants["red"].number) == 3 * MIB
        assert shard.tenant_objects(shard.tenants["red"].number) == 40
        # Who has no answer to the end of a put asks once more.
        assert not any(state.end(begun))
        assert {s.owner for s in shard.segments()} == {shard.clients[CLIENTS[0]].handle}


def test_nobody_ends_the_put_of_another_shard_that_had_the_same_number(made):
    state = made(2)
    late, done = key_of(0, 2), key_of(1, 2)
    with state.run():
        begun, other = state.begin([late], 100_000), state.begin([done], 1000)
        assert begun[late] == other[done]
        state.end(other)
    state.merge(2)
    with state.run():
        (shard,) = state.shards
        waiting = places(shard)
        assert [size for _, _, size in waiting] == [100_000]
        state.remove([done])
        assert any(state.end(other))  # once more, after it was removed
        assert waiting <= places(shard)
        assert any(state.end(begun))
        assert waiting <= places(shard)
        state.pass_time(HOUR_NS)
        assert not places(shard)


def test_generations_go_on_behind_those_of_all(made):
    for numbers, following in (([7, 900], 901), ([(1 << 32) - 3, 100], 101)):
        state = made(2)
        with state.run():
            for shard, number in zip(state.shards, numbers, strict=True):
                shard.tally[c.GENERATION] = number - 1
            for at in range(2):
                state.put([key_of(at, 2)], 100)
        state.merge(2)
        with state.run():
            key = key_of(0, 1, 500)
            assert state.begin([key], 100)[key] == following
        for name in os.listdir(state.path):
            if name.startswith("shard-"):
                remove_rings(state.path / name)
        os.rename(state.path, state.path.with_name(f"before-{following}"))


@pytest.mark.parametrize("behind", [0, 1])
def test_what_readers_use_waits_as_long_as_on_the_clock_of_its_shard(made, behind):
    state = made(2)
    keys = [key_of(at, 2) for at in range(2)]
    with state.run():
        pass
    state.ahead = {1 - behind: 5000 * SECOND}
    with state.run():
        state.put(keys, 10_000)
        state.put([key_of(behind, 2, 5000)], 500)
        state.lease(keys, 10 * SECOND)
        state.remove(keys)
    state.merge(2)
    with state.run():
        (shard,) = state.shards
        assert len(places(shard)) == 2
        (kept,) = np.flatnonzero(shard.rows["state"][: shard.table.rows_high] == 2)
        age_s = state.now(0) // SECOND - int(shard.cold["created_s"][kept])
        assert age_s <= 2
        state.pass_time(9 * SECOND)
        assert len(places(shard)) == 2
        state.pass_time(60 * SECOND)
        assert not places(shard)


def test_what_readers_use_where_another_shard_gives_out_space_is_known_after_a_split(made):
    state = made(1)
    with state.run():
        state.put(range(200), 20_000)
    state.split(2)
    with state.run():
        state.lease(range(200), 15 * SECOND)
        state.remove(range(200))
        waiting = sum(len(places(shard)) for shard in state.shards)
        assert waiting == 200
    state.split(2)
    with state.run():
        state.go_round()
    assert sum(size for shard in state.look() for _, _, size in places(shard)) >= 200 * 20_000
    free = state.check_space()
    state.merge(4)
    assert state.check_space() - free < 100_000


def test_a_segment_that_not_all_have_is_gone_and_one_that_drains_goes_on_draining(made):
    state = made(2, 4 * MIB, 4 * MIB, 4 * MIB)
    with state.run():
        for number in range(3):
            state.put(range(100 * number, 100 * number + 100), 2000, preferred=(f"s{number}",))
        one, other = state.shards
        one.unmount(state.now(0), 0, bytes([1]) * 16, force=True)
        state.pass_time(HOUR_NS)
        assert one.space.get(0) is None
        other.drain(state.now(1), 2)
    state.merge(2)
    with state.run():
        (shard,) = state.shards
        states = {s.index: s.state for s in shard.segments() if s.state != SegmentState.GONE}
        assert states == {1: SegmentState.OK, 2: SegmentState.DRAINING}
        state.pass_time(HOUR_NS)
        assert {s.index for s in shard.segments()} == {1, 2}
    lies = {replica[0] for each in state.objects().values() for replica in each[-1]}
    assert lies == {1, 2}
    state.check_space()


def test_changes_wait_for_the_same_standby_as_before(made):
    """Also where one of the shards had not heard yet for whom."""
    state, counted = made(2), Counted(0x77, 5)
    count_standby(state.path / "shard-0", counted)
    count_standby(state.path / "shard-1", Counted(0, 5))
    state.merge(2)
    assert counting_standby(state.path / "shard-0") == counted


def unchanged(state, before):
    """Whether a state is what it was, and nothing is left beside it."""
    assert not list(state.path.glob("split.*"))
    return state.count == 4 and state.objects() == before


@pytest.mark.parametrize("what", ["folder", "shard", "second shard", "registers", "decision"])
def test_a_full_disk_changes_nothing_and_is_named(made, monkeypatch, what):
    state = made(4)
    with state.run():
        fill(state, random.Random(2), count=100)
    before = state.objects()

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write, written, rename = Keeper.write, [], os.rename

    def second(*arguments, **how):
        written.append(1)
        return full() if len(written) == 2 else write(*arguments, **how)

    with monkeypatch.context() as patch:
        if what == "folder":
            patch.setattr(Path, "mkdir", full)
        elif what == "registers":
            patch.setattr(resharding, "write_registers", full)
        elif what == "decision":
            patch.setattr(
                resharding.os,
                "rename",
                lambda *names: full() if names[0].name == UNFINISHED else rename(*names),
            )
        else:
            patch.setattr(Keeper, "write", full if what == "shard" else second)
        with pytest.raises(StoreError, match="No space left"):
            state.merge(2)
    assert unchanged(state, before)
    state.merge(2)
    assert (state.count, state.objects()) == (2, before)


@pytest.mark.parametrize("renames", [*range(4), None])
def test_a_merge_that_is_killed_was_none_or_is_finished(made, monkeypatch, renames):
    state = made(4)
    with state.run():
        fill(state, random.Random(3), count=100)
    before = state.objects()

    class Killed(BaseException):
        pass

    rename, done = os.rename, []

    def until_killed(source, target):
        if Path(source).name == UNFINISHED or Path(source).parent.name == READY:
            if renames == len(done):
                raise Killed
            done.append(source)
        rename(source, target)

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(resharding.os, "rename", until_killed)
        if not renames:
            patch.setattr(resharding, "_remove", killed)  # nothing is tidied up by who is killed
        if renames is None:
            patch.setattr(resharding.os, "rename", rename)
            patch.setattr(Path, "rmdir", killed)
        with pytest.raises(Killed):
            state.merge(2)
    assert (state.path / (UNFINISHED if renames == 0 else READY)).exists()
    finish_resharding(state.path)
    assert not list(state.path.glob("split.*"))
    assert sorted(path.name for path in state.path.glob("shard-*")) == [
        f"shard-{at}" for at in range(4 if renames == 0 else 2)
    ]
    assert state.objects() == before
    state.check_space()


def test_what_cannot_be_merged_stays_as_it_was(made):
    state = made(4)
    with state.run():
        fill(state, random.Random(4), count=100)
    before = state.objects()
    for factor in (0, 1, 3, 8):
        with pytest.raises(InvalidArgumentError, match=f"4 shards cannot .* every {factor}"):
            state.merge(factor)
    with pytest.raises(InvalidArgumentError, match=f"would have {len(before)} objects, and may"):
        state.merge(4, objects_max=len(before) - 1)
    assert unchanged(state, before)
    registers = state.registers
    write_registers(
        state.path / "cluster.json", msgspec.structs.replace(registers, hosts=(0, 0, 7, 0))
    )
    with pytest.raises(ConfigError, match="lead on other hosts"):
        state.merge(2)
    write_registers(state.path / "cluster.json", registers)
    assert unchanged(state, before)
    state.merge(4, objects_max=len(before))
    assert (state.count, state.objects()) == (1, before)
