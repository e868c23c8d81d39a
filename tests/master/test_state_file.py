"""What is exported and imported again is the same shard, whatever it has lived through."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from mooncake_store.config.settings import MasterConfig, load
from mooncake_store.core import codes as c
from mooncake_store.core import ring as header
from mooncake_store.core.options import ShardConfig, SoftPin
from mooncake_store.core.reads import extents_of
from mooncake_store.core.records import Flag, State
from mooncake_store.core.restore import StreamEnd, restore
from mooncake_store.core.tasks import TaskKind
from mooncake_store.errors import ConfigError, InvalidArgumentError, StoreError
from mooncake_store.journal.origin import Origin
from mooncake_store.master import importing, keeping
from mooncake_store.master.exporting import export_state
from mooncake_store.master.importing import import_state
from mooncake_store.master.keeping import Keeper
from mooncake_store.master.registers import (
    VERSION,
    KeptSegment,
    KeptWorker,
    RegisterFile,
    Registers,
    write_registers,
)
from mooncake_store.master.state_directory import StateDirectory, read_kept
from mooncake_store.master.state_file import (
    ClientEntry,
    MemoryEntry,
    NamespaceEntry,
    SegmentEntry,
    ShardRecord,
    StateFile,
    writing,
)
from tests.clocks import ManualClock
from tests.core.keeping import Kept, clients_of, objects_of, resting_of, segments_of, tenants_of
from tests.core.lab import MIB, SECOND, digests_of
from tests.core.rules import Rules
from tests.core.test_journal import TTL, Life

if TYPE_CHECKING:
    from mooncake_store.core.shard import Shard

RELEASE_NS = ShardConfig().put_release_ns
WORKER = KeptWorker(b"w" * 16, 3, "wörker", "host", True)
SEGMENT = KeptSegment(4, b"s" * 16, 'a "segment"', 1 << 40, b"\0\xff", WORKER.uuid)
SEGMENT_OF_NOBODY = b"n" * 16, "n", "host", 1 << 20, 1, "gone", "ok", 0, 0, 0
REGISTERS = Registers(VERSION, (1 << 64) - 1, 7, (WORKER,), (SEGMENT,), (1, (1 << 64) - 1), "here")


def state_of(path: Path, kept: Kept, now: int) -> Path:
    """Make the state directory of a master whose only shard this is."""
    config = load(MasterConfig, environ={}, overrides={"state": str(path)}).value
    state = StateDirectory.of(config)
    write_registers(path / "cluster.json", REGISTERS)
    facts = [int(word) for word in kept.ring.header[: header.SNAPSHOT + 1]]
    end = StreamEnd(
        now=facts[header.NOW],
        horizon=facts[header.HORIZON],
        events_next=facts[header.EVENTS_NEXT],
        generation=facts[header.GENERATION],
        snapshot=facts[header.SNAPSHOT],
    )
    words = kept.sink.take()
    Keeper.write(
        kept.shard.config,
        Origin(state.kept.cluster, 0, 1),
        path / "shard-0",
        lambda shard: restore(shard, words, end, now),
        60.0,
    )
    state.close()
    return path


def opened(path: Path, config: ShardConfig, now: int) -> tuple[Shard, int]:
    """Return the shard that a master finds in a state directory, and when its leases end."""
    kept = read_kept(path)
    assert kept is not None
    keeper = Keeper.open(config, Origin(kept.cluster, 0, 1), path / "shard-0", "written", now)
    assert keeper.kept
    horizon = int(keeper._ring.ring.header[header.HORIZON])
    keeper.close()
    return keeper.shard, horizon


def again(path: Path, clock: ManualClock) -> Path:
    """Export a state and import it elsewhere; returns where."""
    exported = export_state(path, path.parent / "file", clock, RELEASE_NS)
    imported = import_state(path.parent / "file", path.parent / "other", clock)
    assert (exported.shards, exported.objects) == (imported.shards, imported.objects)
    return path.parent / "other"


def portable(shard: Shard) -> dict[Any, Any]:
    """All of the objects that can be read, but that they are being replaced or copied."""
    passing = ~(Flag.TASK | Flag.UPSERT)
    found = {}
    for key, values in objects_of(shard).items():
        # Levels of pins are not exported.
        life, size, checksum, flags, *where, _, name, group, pinned_until, _, _ = values
        if life == State.READABLE:
            until = pinned_until if flags & Flag.SOFT_PIN else 0
            found[key] = (size, checksum, flags & passing, where, name, group, until)
    return found


def unfinished(shard: Shard) -> set[tuple[int, int]]:
    """Where puts that are under way may write."""
    state = shard.rows["state"][: shard.table.rows_high]
    _, segment, offset = extents_of(shard, np.flatnonzero(state == State.WRITING))
    return set(zip(segment.tolist(), offset.tolist(), strict=True))


def assert_portable(before: Shard, after: Shard) -> None:
    """Compare a shard with what came of it by way of a file."""
    after.check_integrity()
    assert portable(after) == portable(before)
    assert len(objects_of(after)) == len(portable(after))
    assert clients_of(after) == clients_of(before)
    assert segments_of(after) == segments_of(before)
    assert tenants_of(after) == tenants_of(before)
    assert after.events.next_number == before.events.next_number
    assert after.tally[c.GENERATION] == before.tally[c.GENERATION]
    resting = resting_of(after, after.now)
    assert not resting_of(before, after.now) - resting
    assert unfinished(before) <= {entry[:2] for entry in resting}


def lived() -> Life:
    """A shard with every kind of thing in it."""
    life = Life()
    shard = life.shard
    shard.tenant("team", 5 * MIB)
    life.put([1, 2, 3])
    life.put([4, 5], replicas=2, tagged=True)
    life.put([6], soft_pin=SoftPin.ENABLE, soft_pin_ttl_ns=TTL)
    life.put([7], hard_pin=True, soft_pin=SoftPin.ENABLE)
    life.put([8, 9, 10], groups=("g", "", "h"))
    life.begin([11, 12], 3 * MIB)
    shard.upsert_start(life.now, life.client, 0, digests_of([2]), np.array([500], np.int64))
    digest = np.array([(1 << 64) - 1, 1 << 63], np.uint64).reshape(1, 2)
    rows, _ = shard.put_start(life.now, life.client, 1, digest, np.array([1], np.int64))
    stamps, sums = np.ascontiguousarray(rows["generation"]), np.array([(1 << 64) - 1], np.uint64)
    assert not shard.put_end(life.now, life.client, digest, stamps, sums).any()
    found = shard.stat(life.now, digests_of([1])[0])
    assert found is not None
    target = 1 - found.replicas[0][0]
    shard.submit_task(life.now, TaskKind.COPY, digests_of([1]), [target])
    assert shard.fetch_tasks(life.now, life.client)
    shard.set_absent(life.now, 0, True)
    shard.drain(life.now, 0)
    life.now += SECOND
    shard.get(life.now, life.client, digests_of([3, 4]), TTL)
    shard.remove(life.now, digests_of([5]))
    return life


def test_every_kind_of_thing_comes_back(tmp_path: Path) -> None:
    life = lived()
    path = state_of(tmp_path / "state", life.kept, life.now)
    clock = ManualClock(life.now)
    before, horizon = opened(path, life.shard.config, life.now)
    other = again(path, clock)
    after, again_horizon = opened(other, life.shard.config, life.now)
    assert_portable(before, after)
    assert portable(after).keys() <= portable(life.shard).keys()
    assert horizon == again_horizon == life.now + TTL
    assert read_kept(other) == read_kept(path)
    registers = RegisterFile(other).read()
    assert registers is not None
    assert registers.runs[:-1] == REGISTERS.runs
    assert registers.runs[-1] not in REGISTERS.runs
    assert msgspec.structs.replace(registers, runs=REGISTERS.runs, place="here") == REGISTERS
    assert registers.place == ""


@pytest.mark.parametrize("seed", range(4))
def test_any_life_comes_back(tmp_path: Path, seed: int) -> None:
    rules = Rules(random.Random(seed))
    for _ in range(400):
        rules.step()
    kept, now = rules.checked.keeping, rules.checked.now
    path = state_of(tmp_path / "state", kept, now)
    before, horizon = opened(path, kept.shard.config, now)
    after, again_horizon = opened(again(path, ManualClock(now)), kept.shard.config, now)
    assert_portable(before, after)
    assert again_horizon == horizon


def test_an_exported_state_that_is_imported_is_exported_as_the_same(tmp_path: Path) -> None:
    life = lived()
    path = state_of(tmp_path / "state", life.kept, life.now)
    clock = ManualClock(life.now)
    again(path, clock)
    export_state(tmp_path / "other", tmp_path / "second", clock, RELEASE_NS)
    first = list(StateFile(tmp_path / "file").records())
    second = list(StateFile(tmp_path / "second").records())
    kinds = [type(record).__name__ for record in first]
    assert kinds == ["RegistersRecord", "ShardRecord", "HeldRecord", "ObjectsRecord"]
    assert second[1] == first[1]
    assert second[3] == first[3]


def test_what_is_written_is_read_by_a_program_that_knows_only_the_frame(tmp_path: Path) -> None:
    life = lived()
    path = state_of(tmp_path / "state", life.kept, life.now)
    export_state(path, tmp_path / "file", ManualClock(life.now), RELEASE_NS)
    found: dict[str, list[dict[str, Any]]] = {}
    with open(tmp_path / "file", "rb") as file:
        while prefix := file.read(5):
            assert prefix[0] == 0xCE
            record = msgspec.msgpack.decode(file.read(int.from_bytes(prefix[1:], "big")))
            found.setdefault(record["kind"], []).append(record)
    assert list(found) == ["state", "registers", "shard", "held", "objects", "end"]
    (objects,), (shard,) = found["objects"], found["shard"]
    sizes = np.frombuffer(objects["sizes"], "<i8")
    assert len(sizes) == shard["objects"] == len(objects["digests"]) // 16
    assert int(sizes.sum()) > 0
    assert b"name/3" in objects["names"]
    assert set(objects["group_names"]) == {"g", "h"}
    assert [each["name"] for each in shard["segments"]] == ["a", "b"]
    assert {each["state"] for each in shard["segments"]} == {"absent", "ok"}
    assert len(np.frombuffer(found["held"][0]["sizes"], "<i8")) >= 3


def test_on_another_host_what_waits_waits_as_long_and_dates_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life()
    life.put([1], soft_pin=SoftPin.ENABLE, soft_pin_ttl_ns=50 * SECOND)
    life.begin([2])
    life.shard.get(life.now, life.client, digests_of([1]), TTL)
    path = state_of(tmp_path / "state", life.kept, life.now)
    here = ManualClock(life.now)
    export_state(path, tmp_path / "file", here, RELEASE_NS)
    # It runs for longer, and took the file ten minutes later.
    there = ManualClock(life.now + 5000 * SECOND, here.wall_ns() + 600 * SECOND)
    monkeypatch.setattr(importing, "this_boot", lambda: (1, 2))
    import_state(tmp_path / "file", tmp_path / "other", there)
    after, horizon = opened(tmp_path / "other", life.shard.config, there.now_ns())
    assert horizon == there.now_ns() + TTL
    found = after.stat(there.now_ns(), digests_of([1])[0])
    assert found is not None
    assert found.soft_pin_ns == 50 * SECOND
    date_ns = there.wall_ns() - there.now_ns() + found.created_ns
    put_ns = here.wall_ns()
    assert abs(date_ns - put_ns) <= SECOND
    ends = {entry[-1] for entry in after.space.quarantine.timed().tolist()}
    assert ends == {there.now_ns() + RELEASE_NS}


def test_on_another_host_objects_leave_in_the_order_in_which_they_were_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life()
    life.put([1])
    life.now += 100 * SECOND
    life.put([2])
    path = state_of(tmp_path / "state", life.kept, life.now)
    here = ManualClock(life.now)
    export_state(path, tmp_path / "file", here, RELEASE_NS)
    (objects,) = list(StateFile(tmp_path / "file").records())[3 - 1 :]
    used = np.frombuffer(objects.used_ns, "<i8").copy()
    created = np.frombuffer(objects.created_s, "<i8")
    first = int(created.argmin())
    used[first] = SECOND * (int(created[first]) + 50)  # before the other one was put
    used[1 - first] = 0
    there = ManualClock(life.now + 5000 * SECOND, here.wall_ns() + 600 * SECOND)
    monkeypatch.setattr(importing, "this_boot", lambda: (1, 2))
    _import_with(tmp_path, there, msgspec.structs.replace(objects, used_ns=used.tobytes()))
    after, _ = opened(tmp_path / "other", life.shard.config, there.now_ns())
    rows = np.flatnonzero(after.rows["state"][: after.table.rows_high])
    assert len(rows) == 2
    put_ns = after.cold["created_s"][rows].astype(np.int64) * SECOND
    ended_ns = after.rows["lease_end"][rows]
    assert (ended_ns[put_ns.argmin()] - put_ns.min()) // SECOND == 50
    assert max(ended_ns) < put_ns.max()


def test_an_import_that_was_killed_while_it_took_its_place_is_begun_anew(tmp_path: Path) -> None:
    life = lived()
    path = state_of(tmp_path / "state", life.kept, life.now)
    clock = ManualClock(life.now)
    other = again(path, clock)
    place = other / importing.UNFINISHED
    place.mkdir()
    (other / "identity.json").rename(place / "identity.json")
    import_state(tmp_path / "file", other, clock)
    assert sorted(path.name for path in other.iterdir()) == [
        "cluster.json", "identity.json", "lock", "shard-0",
    ]  # fmt: skip
    before, _ = opened(path, life.shard.config, life.now)
    assert_portable(before, opened(other, life.shard.config, life.now)[0])


def test_what_an_import_did_not_make_is_left_where_one_was_killed(tmp_path: Path) -> None:
    life = lived()
    path = state_of(tmp_path / "state", life.kept, life.now)
    clock = ManualClock(life.now)
    other = again(path, clock)
    (other / importing.UNFINISHED).mkdir()
    names = {path.name for path in other.iterdir()}
    with pytest.raises(InvalidArgumentError, match=r"something already: cluster\.json"):
        import_state(tmp_path / "file", other, clock)
    assert {path.name for path in other.iterdir()} == names
    (other / "identity.json").rename(other / "notes")
    names = {path.name for path in other.iterdir()}
    with pytest.raises(InvalidArgumentError, match="holds something already: notes"):
        import_state(tmp_path / "file", other, clock)
    assert {path.name for path in other.iterdir()} == names


@pytest.mark.parametrize("failing", ["cluster.json", "shard-0", "identity.json"])
def test_an_import_that_cannot_take_its_place_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    life = lived()
    path = state_of(tmp_path / "state", life.kept, life.now)
    clock = ManualClock(life.now)
    export_state(path, tmp_path / "file", clock, RELEASE_NS)
    rename = os.rename

    def broken(old: Path, new: Path) -> None:
        if new == tmp_path / "other" / failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(old, new)

    with monkeypatch.context() as patched:
        patched.setattr("os.rename", broken)
        with pytest.raises(ConfigError, match="Input/output error"):
            import_state(tmp_path / "file", tmp_path / "other", clock)
    assert not (tmp_path / "other").exists()


def test_an_import_waits_for_the_end_of_each_shard_as_long_as_for_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = lived()
    path = state_of(tmp_path / "state", life.kept, life.now)
    monkeypatch.setattr(keeping, "STOP_S", 0.0)
    other = again(path, ManualClock(life.now))
    assert (other / "shard-0" / "journal.ended").exists()


def test_a_file_of_another_program_is_no_exported_state(tmp_path: Path) -> None:
    record = msgspec.msgpack.encode({"format": "xx"}).replace(b"xx", b"\xff\xfe")
    (tmp_path / "file").write_bytes(b"\xce" + len(record).to_bytes(4, "big") + record)
    with pytest.raises(StoreError, match="is no exported state"):
        StateFile(tmp_path / "file")


@pytest.mark.parametrize("number", [-2, 1 << 31, (1 << 63) - 1])
@pytest.mark.parametrize("what", ["objects", "namespaces", "clients", "segments", "memories"])
def test_numbers_that_a_shard_has_no_place_for_are_refused(
    tmp_path: Path, what: str, number: int
) -> None:
    life = lived()
    path = state_of(tmp_path / "state", life.kept, life.now)
    clock = ManualClock(life.now)
    export_state(path, tmp_path / "file", clock, RELEASE_NS)
    file = StateFile(tmp_path / "file")
    wrong: dict[str, Any] = {
        "objects": number,
        "namespaces": (NamespaceEntry(number, "team-b", None),),
        "clients": (ClientEntry(number, b"d" * 16, 1, "host"),),
        "segments": (SegmentEntry(number, *SEGMENT_OF_NOBODY),),
        "memories": (MemoryEntry(number, b"m" * 16, 0, 0),),
    }
    with writing(tmp_path / "wrong") as out:
        for record in (file.head, *file.records()):
            if isinstance(record, ShardRecord):
                others = () if what == "objects" else getattr(record, what)
                told = number if what == "objects" else (*others, *wrong[what])
                out.add(msgspec.structs.replace(record, **{what: told}))
            else:
                out.add(record)
    with pytest.raises(StoreError, match=f"is damaged: .* {number}"):
        import_state(tmp_path / "wrong", tmp_path / "other", clock)
    assert not (tmp_path / "other").exists()


def test_a_device_or_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    for name in ("pipe", "link"):
        with (
            pytest.raises(FileExistsError, match="no plain file"),
            writing(tmp_path / name),
        ):
            pass
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()


def test_what_names_no_file_cannot_be_written(tmp_path: Path) -> None:
    for name in (".", "/", ".."):
        with pytest.raises(OSError, match=r"directory|busy|empty"), writing(Path(name)):
            pass


def test_columns_that_cannot_be_are_refused(tmp_path: Path) -> None:
    life = lived()
    path = state_of(tmp_path / "state", life.kept, life.now)
    clock = ManualClock(life.now)
    export_state(path, tmp_path / "file", clock, RELEASE_NS)
    (objects,) = list(StateFile(tmp_path / "file").records())[3:]
    count = len(objects.pins)
    wrong = {
        "sizes": (objects.sizes[:-8], "has"),
        "digests": (objects.digests[:-8], "middle of an entry"),
        "offsets": (objects.offsets + bytes(8), "another number"),
        "names": (objects.names + b"x", "another length"),
        "replicas": (bytes(count), "another number"),
        "pins": (b"\xff" * count, "cannot be"),
        "groups": (b"\xff" * 4 * count, "no name"),
        "segments": (b"\xff" * len(objects.segments), "nothing can lie"),
        "namespaces": (b"\x77" * 2 * count, "can be"),
    }
    for name, (column, said) in wrong.items():
        with pytest.raises(ValueError, match=said):
            _import_with(tmp_path, clock, msgspec.structs.replace(objects, **{name: column}))
        assert not (tmp_path / "other").exists(), name


def _import_with(folder: Path, clock: ManualClock, objects: Any) -> None:
    """Import the exported file with other objects, as if they had been written like that."""
    from mooncake_store.master.state_file import StateFile as Whole

    class Changed(Whole):
        def records(self) -> Any:
            *others, _ = super().records()
            yield from [*others, objects]

        def damaged(self, reason: object) -> Any:
            return ValueError(str(reason))

    patched = pytest.MonkeyPatch()
    with patched.context() as context:
        context.setattr(importing, "StateFile", Changed)
        import_state(folder / "file", folder / "other", clock)
