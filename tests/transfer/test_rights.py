"""Guarded segments: who shows good rights reads and writes, nobody else who has to show them."""

import select
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_cache import njit
from tests.certificates import Authority, tls
from tests.transfer.rights import KEY, POOL, Ring, granted, known_as, receipts, stamps_of
from tests.waiting import until
from transfer_engine import FileSegment, Segment, TransferEngine, TransferServer
from transfer_engine.base import BAD_RANGE, REFUSED, Operation
from transfer_engine.errors import InvalidArgumentError, PeerLostError
from transfer_engine.kernels import rights, used_rights
from transfer_engine.kernels.siphash import sip128_one
from transfer_engine.testing import content
from transfer_engine.transports.dialing import dial
from transfer_engine.transports.stream import (
    READ_SHOWN,
    REPLY,
    REQUEST,
    REQUEST_BODY_BYTES,
    WRITE,
    WRITE_SHOWN,
)
from transfer_engine.wire.frame import MAGIC, VERSION

HERE = "127.0.0.1"
SIZE = 4 << 20
READ, WRITING = rights.READ, rights.WRITE


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


class Place:
    """A segment of this process, and who may reach it."""

    def __init__(self, server, segment, seal):
        self.server, self.segment, self.seal = server, segment, seal
        self._engines = []
        self.descriptor = None

    def publish(self, **guard):
        self.descriptor = self.server.publish(self.segment, **{"key": KEY, **guard})

    def by(self, principal):
        """Somebody who has an engine, memory, and the segment open."""
        engine = TransferEngine(secret=known_as(principal, self.seal))
        self._engines.append(engine)
        return Peer(engine, engine.open(self.descriptor, require="tcp"))

    def bytes(self):
        if isinstance(self.segment, Segment):
            return np.frombuffer(self.segment.buffer, np.uint8).copy()
        owner = self.by("")
        assert owner.read([0], [SIZE]).ok
        return owner.memory

    def close(self):
        for engine in self._engines:
            engine.close()


class Peer:
    def __init__(self, engine, target):
        self.engine, self.target = engine, target
        self.memory = np.zeros(SIZE, np.uint8)
        self._region = engine.register(self.memory)

    def read(self, offsets, lengths, shown=None, **options):
        return self._move(self.engine.read_batch, offsets, lengths, shown, options)

    def write(self, offsets, lengths, shown=None, **options):
        return self._move(self.engine.write_batch, offsets, lengths, shown, options)

    def _move(self, move, offsets, lengths, shown, options):
        addresses = self.address + np.array(offsets)
        return move(self.target, offsets, lengths, addresses, rights=shown, **options)

    @property
    def address(self):
        return self._region.address


KINDS = ("memory", "asked twice", "sealed", "file")


@pytest.fixture(params=KINDS)
def place(request, authority, tmp_path):
    """Guarded memory that the compiled loop serves, and what takes the way through Python."""
    sealed = request.param == "sealed"
    secret = Ring(POOL, tls=tls(authority.signs(HERE)) if sealed else None)
    hook = (lambda access: True) if request.param == "asked twice" else None
    path = str(tmp_path / "file")
    file = request.param == "file"
    with (
        TransferServer(secret=secret, authorize=hook, patience_s=20) as server,
        FileSegment.create(path, size=SIZE) if file else Segment.create(SIZE) as segment,
    ):
        place = Place(server, segment, tls(authority=authority) if sealed else None)
        place.publish()
        place.by("").engine.write_from(place.by("").target, 0, content(9, SIZE).tobytes())
        yield place
        place.close()


RANGES = ([8, 4096, 70_000], [100, 60_000, 1 << 20])
ONE = ([4096], [65_536])


@pytest.mark.parametrize("ranges", [ONE, RANGES])
@pytest.mark.parametrize("checksums", [False, True])
def test_who_shows_good_rights_reads_and_writes(place, ranges, checksums):
    peer, expected = place.by("writer"), place.bytes()
    assert peer.read(*ranges, granted(READ, *ranges), checksums=checksums).ok
    for offset, length in zip(*ranges, strict=True):
        assert np.array_equal(peer.memory[offset:][:length], expected[offset:][:length])
    peer.memory[:] = content(10, SIZE)
    shown = granted(WRITING, *ranges)
    done = peer.write(*ranges, shown, checksums=checksums)
    assert done.ok
    assert np.array_equal(done.receipts, receipts(*ranges, shown))
    for offset, length in zip(*ranges, strict=True):
        expected[offset : offset + length] = peer.memory[offset : offset + length]
    assert np.array_equal(place.bytes(), expected)


def test_a_batch_of_many_is_shown_whole(place):
    offsets = np.arange(900) * 4000
    lengths = np.full(900, 1234)
    peer = place.by("writer")
    shown = granted(WRITING, offsets, lengths)
    assert np.array_equal(peer.write(offsets, lengths, shown).receipts,
                          receipts(offsets, lengths, shown))  # fmt: skip
    assert peer.read(offsets, lengths, granted(READ, offsets, lengths)).ok


def without(kind, ranges):
    return None


def forged(kind, ranges):
    shown = granted(kind, *ranges)
    shown[:, 0] ^= 1
    return shown


def of_another_key(kind, ranges):
    return granted(kind, *ranges, key=KEY[::-1])


def ended(kind, ranges):
    return granted(kind, *ranges, seconds=-0.1)


def put_off(kind, ranges):
    shown = granted(kind, *ranges, seconds=-0.1)
    shown[:, 1] = stamps_of(len(shown))
    return shown


def shifted(kind, ranges):
    return granted(kind, [offset + 8 for offset in ranges[0]], ranges[1])


def for_more(kind, ranges):
    return granted(kind, ranges[0], [length + 8 for length in ranges[1]])


def for_the_other_way(kind, ranges):
    return granted(WRITING if kind == READ else READ, *ranges)


def receipts_instead(kind, ranges):
    shown = granted(kind, *ranges)
    shown[:, 0] = receipts(*ranges, shown)
    return shown


def nothing(kind, ranges):
    return np.zeros((len(ranges[0]), 2), np.int64)


BAD = (without, forged, of_another_key, ended, put_off, shifted, for_more, for_the_other_way,
       receipts_instead, nothing)  # fmt: skip


@pytest.mark.parametrize("ranges", [ONE, RANGES])
@pytest.mark.parametrize("bad", BAD)
def test_any_other_right_moves_nothing(place, ranges, bad):
    before, peer = place.bytes(), place.by("writer")
    assert (peer.read(*ranges, bad(READ, ranges)).statuses == REFUSED).all()
    assert not peer.memory.any()
    done = peer.write(*ranges, bad(WRITING, ranges))
    assert (done.statuses == REFUSED).all()
    assert done.receipts is None or not done.receipts.any()
    assert np.array_equal(place.bytes(), before)


def test_one_bad_right_among_good_ones_is_refused_alone(place):
    peer, before = place.by("writer"), place.bytes()
    peer.memory[:] = 0x77
    shown = granted(WRITING, *RANGES)
    shown[1, 0] += 1
    done = peer.write(*RANGES, shown)
    assert done.statuses.tolist() == [0, REFUSED, 0]
    assert done.receipts.tolist() == [*receipts(*RANGES, shown)[:1], 0, receipts(*RANGES, shown)[2]]
    for at in (0, 2):
        before[RANGES[0][at] :][: RANGES[1][at]] = 0x77
    assert np.array_equal(place.bytes(), before)


def test_a_range_that_is_none_stays_so_whatever_is_shown(place):
    peer = place.by("writer")
    offsets, lengths = [0, SIZE - 4], [8, 8]
    shown = granted(WRITING, offsets, lengths)
    done = peer.write(offsets, lengths, shown)
    assert done.statuses.tolist() == [0, BAD_RANGE]
    assert done.receipts.tolist() == [receipts(offsets, lengths, shown)[0], 0]


@pytest.mark.parametrize("ranges", [ONE, RANGES])
def test_a_right_to_write_is_good_once_and_one_to_read_until_it_ends(place, ranges):
    peer, other = place.by("writer"), place.by("tenant")
    shown = granted(WRITING, *ranges)
    assert peer.write(*ranges, shown).ok
    before = place.bytes()
    for again in (peer, other):
        again.memory[:] = 0xEE
        done = again.write(*ranges, shown)
        assert (done.statuses == REFUSED).all()
        assert not done.receipts.any()
    assert np.array_equal(place.bytes(), before)
    to_read = granted(READ, *ranges)
    assert all(each.read(*ranges, to_read).ok for each in (peer, other, peer))


def test_the_same_right_twice_in_a_batch_writes_once(place):
    shown = granted(WRITING, *ONE).repeat(2, axis=0)
    done = place.by("writer").write(*(column * 2 for column in ONE), shown)
    assert sorted(done.statuses.tolist()) == [REFUSED, 0]


def test_of_many_who_write_by_one_right_at_once_one_does(place):
    peers = [place.by("writer") for _ in range(4)]
    for _ in range(10):
        shown, barrier, found = granted(WRITING, *ONE), threading.Barrier(4), []

        def write(peer, shown=shown, barrier=barrier, found=found):
            barrier.wait()
            found.append(int(peer.write(*ONE, shown).statuses[0]))

        threads = [threading.Thread(target=write, args=(peer,)) for peer in peers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == [REFUSED] * 3 + [0]


def test_who_has_the_pools_secret_or_is_a_worker_shows_nothing(place):
    for principal in ("", "worker"):
        peer = place.by(principal)
        assert peer.read(*RANGES).ok
        assert peer.write(*RANGES).ok
        assert peer.write(*ONE).receipts is None


def test_a_reader_reads_by_rights_and_writes_by_none(place):
    peer = place.by("reader")
    assert peer.read(*RANGES, granted(READ, *RANGES)).ok
    shown = granted(WRITING, *RANGES)
    assert (peer.write(*RANGES, shown).statuses == REFUSED).all()
    assert place.by("writer").write(*RANGES, shown).ok, "what was refused has used no right"


def test_a_segment_of_a_namespace_asks_nothing_of_its_own(place):
    place.publish(namespace="tenants")
    tenant, looker = place.by("tenant"), place.by("looker")
    assert tenant.write(*RANGES).ok
    assert tenant.read(*ONE).ok
    assert tenant.write(*ONE, nothing(WRITING, ONE)).receipts.tolist() == [0]
    assert looker.read(*RANGES).ok
    assert (looker.write(*RANGES).statuses == REFUSED).all()
    for stranger in (place.by("writer"), place.by("reader")):
        assert (stranger.read(*RANGES).statuses == REFUSED).all()
        assert stranger.read(*RANGES, granted(READ, *RANGES)).ok
    place.publish(namespace="a third")
    assert (place.by("tenant").read(*RANGES).statuses == REFUSED).all()


def test_a_segment_without_a_key_asks_nobody(place):
    place.publish(key=b"")
    peer = place.by("writer")
    assert peer.write(*RANGES).ok
    assert peer.write(*ONE, nothing(WRITING, ONE)).ok
    assert place.by("reader").read(*RANGES).ok


def test_rights_end_by_the_clock_of_the_pool(place):
    peer = place.by("writer")
    place.server.clock_offset_ms = 3_600_000
    assert (peer.read(*ONE, granted(READ, *ONE)).statuses == REFUSED).all()
    assert peer.read(*ONE, granted(READ, *ONE, seconds=3660)).ok
    place.server.clock_offset_ms = -3_600_000
    assert peer.read(*ONE, granted(READ, *ONE, seconds=-60)).ok


def asking(place, opcode, ranges, shown, columns=None):
    """A connection of a writer that has sent the head of one message."""
    descriptor = place.descriptor
    link, _ = dial(
        (descriptor.tcp_host, descriptor.tcp_port), descriptor.instance,
        secret=known_as("writer", place.seal), deadline=time.monotonic() + 60,
    )  # fmt: skip
    link.deadline = time.monotonic() + 60
    count = len(ranges[0])
    told = 4 if columns is None else columns
    head = REQUEST.pack(
        MAGIC, VERSION, 0, opcode, REQUEST_BODY_BYTES + 8 * told * count, 0, 1, descriptor.uuid, 0,
        count,
    )  # fmt: skip
    link.send(head + np.array(ranges, np.int64).tobytes() + shown.T.tobytes())
    return link


def test_a_write_that_fails_gives_its_right_back(place):
    ranges = [0], [SIZE // 2]
    shown = granted(WRITING, *ranges)
    link = asking(place, WRITE_SHOWN, ranges, shown)
    link.send(b"\x11" * 1000)
    peer = place.by("writer")
    until(lambda: place.server.tables.latest.used.any())
    until(lambda: (peer.write(*ranges, shown).statuses == REFUSED).all())
    link.abort()
    link.close()
    until(lambda: peer.write(*ranges, shown).ok)
    assert np.array_equal(place.bytes()[: SIZE // 2], peer.memory[: SIZE // 2])


def send_slowly(link, nbytes):
    """Send more than an owner's patience lasts for, until the connection has ended."""
    for _ in range(nbytes // 4096):
        link.send(b"\x22" * 4096)
        if select.select([link.sock], [], [], 0.05)[0]:
            link.receive(memoryview(bytearray(1)))


def test_a_write_under_way_is_cut_when_its_right_ends(place):
    ranges = [0], [SIZE // 2]
    shown = granted(WRITING, *ranges, seconds=1.5)
    end = time.monotonic() + 1.5
    link = asking(place, WRITE_SHOWN, ranges, shown)
    with pytest.raises(PeerLostError):
        send_slowly(link, SIZE // 2)
    assert time.monotonic() - end < 10, "long before the patience of the owner ends"
    link.close()


HOSTILE = {
    "two columns": lambda place: asking(place, WRITE_SHOWN, ONE, np.zeros((0, 2), np.int64), 2),
    "three columns": lambda place: asking(place, READ_SHOWN, ONE, np.zeros((1, 1), np.int64), 3),
    "too many columns": lambda place: asking(place, READ_SHOWN, ONE, np.zeros((1, 3), np.int64), 5),
    "columns on a plain one": lambda place: asking(place, WRITE, ONE, nothing(WRITING, ONE)),
    "another opcode": lambda place: asking(place, 0x24, ONE, nothing(WRITING, ONE)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_messages_end_their_own_connection(place, name):
    peer, before = place.by("writer"), place.bytes()
    link = HOSTILE[name](place)
    link.receive(link.view[: REPLY.size])
    assert REPLY.unpack_from(link.view)[2] == 3  # a reply that is an error
    with pytest.raises(PeerLostError):
        link.receive(memoryview(bytearray(1 << 20)))
    link.close()
    assert peer.read(*ONE, granted(READ, *ONE)).ok
    assert np.array_equal(place.bytes(), before)


def test_a_batch_in_the_background_has_its_receipts(place):
    peer = place.by("writer")
    shown = granted(WRITING, *RANGES)
    under_way = peer.engine.submit(
        Operation.WRITE, peer.target, RANGES[0], RANGES[1], peer.address + np.array(RANGES[0]),
        rights=shown,
    )  # fmt: skip
    assert not under_way.result().any()
    assert np.array_equal(under_way.receipts, receipts(*RANGES, shown))


def test_requests_that_are_cut_for_several_ways_stay_whole():
    with (
        TransferServer(secret=Ring(POOL), rails=["127.0.0.2:0"]) as server,
        Segment.create(32 << 20) as segment,
        TransferEngine(secret=known_as("writer")) as engine,
    ):
        target = engine.open(server.publish(segment, key=KEY), require="tcp")
        memory = content(4, 32 << 20)
        region = engine.register(memory)
        offsets = np.array([0, 5 << 20, 20 << 20])
        lengths = np.array([5 << 20, 15 << 20, 1 << 20])
        shown = granted(WRITING, offsets, lengths)
        done = engine.write_batch(target, offsets, lengths, region.address + offsets, rights=shown)
        assert done.ok
        assert np.array_equal(done.receipts, receipts(offsets, lengths, shown))
        assert np.array_equal(np.frombuffer(segment.buffer, np.uint8)[: 21 << 20],
                              memory[: 21 << 20])  # fmt: skip


@pytest.mark.parametrize("shape", [(1, 2), (3, 1), (3,), (3, 3)])
def test_rights_of_another_shape_are_refused_here(place, shape):
    with pytest.raises(InvalidArgumentError, match="rights of shape"):
        place.by("writer").write(*RANGES, np.zeros(shape, np.int64))


def test_a_key_of_another_length_guards_nothing():
    with Segment.create(4096) as segment, TransferServer(secret=Ring(POOL)) as server:
        for guard in ({"key": b"short"}, {"namespace": "tenants"}):
            with pytest.raises(InvalidArgumentError, match="a key of 16 bytes"):
                server.publish(segment, **guard)
        assert not server.described()


# The kernels.

word = st.integers(-(1 << 63), (1 << 63) - 1)
place_of = st.integers(0, (1 << 56) - 1)


@settings(deadline=None)
@given(
    st.binary(min_size=16, max_size=16),
    st.lists(st.tuples(place_of, place_of, word), max_size=40),
    st.sampled_from([READ, WRITING, rights.WRITTEN]),
)
@np.errstate(over="ignore")
def test_tags_are_those_of_siphash_whatever_group_they_are_made_in(key, rows, kind):
    low, high = np.frombuffer(key, np.int64)
    columns = [np.array([row[at] for row in rows], np.int64) for at in range(3)]
    found = np.zeros(len(rows), np.int64)
    rights.tags_of(low, high, columns[0], columns[1], kind, columns[2], found)
    slowly = np.zeros(len(rows), np.int64)
    rights.tags_of.py_func(low, high, columns[0], columns[1], kind, columns[2], slowly)
    assert found.tolist() == slowly.tolist()
    for (offset, length, stamp), tag in zip(rows, found.tolist(), strict=True):
        text = np.array([offset, length | kind << 56, stamp], np.int64).tobytes()
        assert tag == np.uint64(sip128(key, text)).astype(np.int64)
        assert tag == rights.tag_of(low, high, offset, length, kind, stamp)


@pytest.mark.parametrize("kernel", [rights.all_right, rights.all_right.py_func])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 13, 16])
@np.errstate(over="ignore")
def test_one_tag_that_is_wrong_is_found_among_others(kernel, count):
    random = np.random.default_rng(count)
    offsets, lengths, stamps = random.integers(0, 1 << 40, (3, count))
    shown = np.zeros(count, np.int64)
    rights.tags_of(1, 2, offsets, lengths, WRITING, stamps, shown)
    assert kernel(1, 2, offsets, lengths, WRITING, stamps, shown) == (True, stamps.min())
    for at in range(count):
        for bit in (0, 63):
            shown[at] ^= np.int64(-1 << bit) if bit else 1
            assert not kernel(1, 2, offsets, lengths, WRITING, stamps, shown)[0]
            shown[at] ^= np.int64(-1 << bit) if bit else 1


@pytest.mark.parametrize("kernel", [rights.all_taken, rights.all_taken.py_func])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 13, 16])
@np.errstate(over="ignore")
def test_rights_to_write_are_judged_and_answered_in_one(kernel, count):
    random = np.random.default_rng(count)
    offsets, lengths, stamps = random.integers(0, 1 << 40, (3, count))
    shown, wanted, found = np.zeros((3, count), np.int64)
    for kind, out in ((WRITING, shown), (rights.WRITTEN, wanted)):
        rights.tags_of(1, 2, offsets, lengths, kind, stamps, out)
    assert kernel(1, 2, offsets, lengths, stamps, shown, found) == (True, stamps.min())
    assert found.tolist() == wanted.tolist()
    for at in range(count):
        shown[at] ^= 1
        assert not kernel(1, 2, offsets, lengths, stamps, shown, found)[0]
        shown[at] ^= 1


@njit(cache=False)
def in_line(address, tag, past):
    return used_rights.in_line(address, tag, past)


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.sampled_from([0, 1, 9, 10, 11])), min_size=4, max_size=4
    ),
    st.integers(1, 5),
)
def test_what_a_line_says_is_the_same_in_vectors(pairs, tag):
    words = np.array(pairs, np.int64).ravel()
    address = words.ctypes.data
    assert in_line(address, tag, 10) == used_rights.in_line(address, tag, 10)


def sip128(key, text):
    """The lower half of the digest of one string."""
    data = np.frombuffer(text, np.uint8).copy()
    low, _ = sip128_one(data.ctypes.data, data.size, *np.frombuffer(key, np.uint64))
    return low


@given(st.integers(0, (1 << 43) - 1), st.integers(0, 1 << 40))
def test_a_stamp_tells_its_end_and_never_a_later_one(end_ms, generation):
    told = int(rights.end_of(rights.stamp_of(end_ms, generation)))
    assert end_ms - rights.TICK_MS < told <= end_ms


def stamps_to(end_ms, generations):
    return int(rights.stamp_of(end_ms, 0)) | generations & rights.GENERATION_MASK


def claim(table, numbers, end_ms, now_ms=500):
    """Claim rights whose tags are these numbers, as are their generations."""
    statuses, tags = np.zeros(len(numbers), np.int32), np.array(numbers, np.int64)
    refused = used_rights.claim(table, tags, stamps_to(end_ms, tags), now_ms, statuses)
    assert refused == np.count_nonzero(statuses)
    return statuses.tolist()


def test_a_table_that_is_full_refuses_until_rights_have_ended():
    table = used_rights.make(64)
    taken = [claim(table, [number * 7919], 1000) for number in range(100)]
    kept = taken.count([0])
    assert 32 < kept < 64
    assert taken == [[0]] * kept + [[REFUSED]] * (100 - kept)
    assert claim(table, [0], 2000, 990) == [REFUSED]
    assert claim(table, list(range(1, 21)), 5000, 1300) == [0] * 20, "those before have ended"
    assert claim(table, list(range(1, 21)), 5000, 1300) == [REFUSED] * 20


@pytest.mark.parametrize("collide", [False, True])
def test_a_table_grows_with_what_is_in_it_and_forgets_nothing_that_holds(collide):
    table = used_rights.make(1 << 15)
    rng = np.random.default_rng(5)
    numbers = rng.integers(-(1 << 62), 1 << 62, 20_000)
    if collide:
        numbers &= ~rights.GENERATION_MASK
    numbers = np.unique(numbers)[: 60 if collide else None]
    for part in np.array_split(numbers, 50):
        assert claim(table, part, 10_000) == [0] * part.size
    assert claim(table, numbers, 10_000) == [REFUSED] * numbers.size
    back = numbers[::3].copy()
    stamps = stamps_to(10_000, back)
    used_rights.give_back(table, back, stamps, np.zeros(back.size, np.int32))
    assert claim(table, back, 10_000) == [0] * back.size
    assert claim(table, numbers, 20_000, 10_000) == [0] * numbers.size, "all had ended"


def test_claims_of_many_threads_are_told_apart():
    table = used_rights.make(1 << 14)
    numbers = np.random.default_rng(6).integers(-(1 << 62), 1 << 62, 6000)
    found, barrier = [], threading.Barrier(4)

    def run():
        barrier.wait()
        found.append(sum(claim(table, part, 10_000).count(0)
                         for part in np.array_split(numbers, 600)))  # fmt: skip

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(found) == numbers.size


@pytest.mark.parametrize("kernel", [rights.lacking, rights.lacking.py_func], ids=["fast", "python"])
@pytest.mark.parametrize("count", [1, 3, 20])
def test_places_without_a_receipt_are_found(kernel, count):
    """Of puts with two places each, one after the other; their rights ended up to 2 ticks off."""
    keys = np.arange(1, 7, dtype=np.int64).reshape(3, 2)
    random = np.random.default_rng(count)
    columns = np.zeros((5, count), np.int64)
    columns[0] = np.sort(random.integers(0, 3, count))
    columns[1], columns[2] = random.integers(0, 1 << 40, (2, count))
    columns[3], columns[4] = 10**12 + 1000 * np.arange(count), random.integers(0, 1 << 32, count)
    whose, told = np.arange(count) // 2, []
    for at in range(count):
        which, offset, length, end, generation = columns[:, at].tolist()
        stamp = rights.stamp_of(end + rights.TICK_MS * (at % 3), generation)
        told.append(rights.tag_of(*keys[which], offset, length, rights.WRITTEN, stamp))
    for drift, missing in ((2, ()), (2, (0,)), (2, (0, count - 1)), (1, ()), (0, range(count))):
        shown = np.sort(np.array([tag for at, tag in enumerate(told) if at not in missing], int))
        far = {at for at in range(count) if at % 3 > drift} | set(missing)
        out = np.zeros(count, np.bool_)
        assert kernel(keys, columns.copy(), count, drift, shown, whose, out) == len(far)
        assert set(np.flatnonzero(out).tolist()) == {at // 2 for at in far}
