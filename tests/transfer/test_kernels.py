"""Every kernel, compiled and as plain Python, against what it must compute."""

import itertools
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xxhash

from tests.waiting import long_before
from transfer_engine.kernels import content_tags, moving, stream
from transfer_engine.kernels.xxh3 import set_secret
from transfer_engine.tagging import Tagging

INT64_MAX = (1 << 63) - 1
TAGGING = Tagging(b"a key of sixteen")


def column(*values):
    return np.array(values, dtype=np.int64)


def statuses(count, value=99):
    return np.full(count, value, dtype=np.int32)


def test_check_batch_judges_ranges_and_addresses(kernels):
    starts, ends = column(1000, 3000), column(2000, 3100)
    offsets = column(0, 90, 91, -1, 0, INT64_MAX, 100, 5)
    lengths = column(100, 10, 10, 1, -1, 1, 0, INT64_MAX)
    addresses = column(1000, 1990, 0, 0, 0, 0, 7, 1000)
    verdicts = statuses(8)
    result = kernels.check_batch(offsets, lengths, addresses, 100, starts, ends, verdicts)
    assert tuple(map(int, result)) == (110, 5, -1)
    assert verdicts.tolist() == [0, 0, -600, -600, -600, -600, 0, -600]


@pytest.mark.parametrize("address", [999, 1951, 2000, 2500, 3051, 3100, -5, INT64_MAX, 0])
def test_check_batch_names_the_first_stray_address(kernels, address):
    starts, ends = column(1000, 3000), column(2000, 3100)
    result = kernels.check_batch(
        column(0, 0), column(50, 50), column(3000, address), 100, starts, ends, statuses(2)
    )
    assert int(result[2]) == 1
    none = column()
    result = kernels.check_batch(column(0), column(1), column(1000), 9, none, none, statuses(1))
    assert int(result[2]) == 0


def test_check_ranges_cannot_overflow(kernels):
    verdicts = statuses(4)
    named, bad = kernels.check_ranges(column(0, 8, 9, INT64_MAX), column(9, 1, 1, 9), 9, verdicts)
    assert (int(named), int(bad)) == (20, 2)
    assert verdicts.tolist() == [0, 0, -600, -600]
    for lengths in (column(1 << 62, 1), column(INT64_MAX, INT64_MAX), column(1, -1)):
        named, _ = kernels.check_ranges(column(0, 0), lengths, 9, statuses(2))
        assert int(named) == -1


def test_copy_batch_copies_any_window_of_a_batch(kernels):
    rng = np.random.default_rng(3)
    segment = rng.integers(0, 256, 5000, dtype=np.uint8)
    lengths = rng.integers(0, 90, 40)
    offsets = rng.integers(0, 4900, 40)
    verdicts = statuses(40, 0)
    verdicts[::7] = -600
    good = verdicts == 0
    total = int(lengths[good].sum())
    expected = np.concatenate(
        [segment[o : o + n] for o, n in zip(offsets[good], lengths[good], strict=True)]
    )
    local = np.zeros(total, np.uint8)
    ends = np.cumsum(np.where(good, lengths, 0))
    addresses = local.ctypes.data + ends - np.where(good, lengths, 0)
    cancel = column(0)
    base = segment.ctypes.data
    cuts = [0, 1, 100, 101, total // 2, total]
    for begin, end in itertools.pairwise(cuts):
        args = (base, offsets, lengths, addresses, verdicts, begin, end)
        assert kernels.copy_batch(*args, 0, 0, cancel) == 0
        assert np.array_equal(local[:end], expected[:end])
        assert not local[end:].any()
    assert (
        kernels.copy_batch(
            base,
            column(7),
            column(50),
            column(local.ctypes.data),
            statuses(1, 0),
            0,
            50,
            1,
            0,
            cancel,
        )
        == 0
    )
    assert np.array_equal(segment[7:57], local[:50])
    cancel[0] = 1
    assert kernels.copy_batch(*args, 0, 0, cancel) == 1


@pytest.mark.parametrize("into_segment", [0, 1])
def test_copy_batch_streams_at_every_alignment(kernels, into_segment):
    rng = np.random.default_rng(5)
    lengths = np.array([0, 1, 63, 4095, 4096, 4097, 4351, 4352, 5000, 8192, 16_383] * 6)
    gaps = rng.integers(1, 200, lengths.size)
    offsets = np.cumsum(lengths + gaps) - lengths
    addresses = np.cumsum(lengths + rng.permutation(gaps)) - lengths
    here, there = (np.full(int(offsets[-1]) + 20_000, 255, np.uint8) for _ in range(2))
    source, target = (here, there) if into_segment else (there, here)
    source[:] = rng.integers(0, 255, source.size, dtype=np.uint8)
    expected = np.full_like(target, 255)
    near, far = (offsets, addresses) if into_segment else (addresses, offsets)
    for length, to, at in zip(lengths, near, far, strict=True):
        expected[to : to + length] = source[at : at + length]
    columns = (there.ctypes.data, offsets, lengths, addresses + here.ctypes.data)
    whole = (statuses(lengths.size, 0), 0, int(lengths.sum()), into_segment, 1, column(0))
    assert kernels.copy_batch(*columns, *whole) == 0
    assert np.array_equal(target, expected)


@pytest.mark.parametrize("shift", [-4000, -64, -1, 0, 1, 64, 4000, 20_000])
def test_copy_batch_streams_nothing_over_itself(kernels, shift):
    memory = np.random.default_rng(6).integers(0, 256, 70_000, dtype=np.uint8)
    expected = memory.copy()
    expected[25_000:45_000] = memory[25_000 + shift : 45_000 + shift]
    address = memory.ctypes.data
    one = (column(25_000 + shift), column(20_000), column(address + 25_000), statuses(1, 0))
    assert kernels.copy_batch(address, *one, 0, 20_000, 0, 1, column(0)) == 0
    assert np.array_equal(memory, expected)


def test_build_iov_merges_neighbours_and_drains_refusals(kernels):
    positions, lengths = column(0, 10, 30, 40, 50, 90), column(10, 20, 5, 0, 7, 1)
    verdicts = np.array([0, 0, 0, 0, -600, 0], np.int32)
    iov = np.zeros(20, np.int64)
    count, total = kernels.build_iov(1000, positions, lengths, verdicts, iov, 0, 0)
    assert (int(count), int(total)) == (2, 36)
    assert iov[:4].tolist() == [1000, 35, 1090, 1]
    count, total = kernels.build_iov(1000, positions, lengths, verdicts, iov, 5, 3)
    assert (int(count), int(total)) == (5, 43)
    assert iov[:10].tolist() == [1000, 35, 5, 3, 5, 3, 5, 1, 1090, 1]
    count, _ = kernels.build_iov(1000, positions, lengths, verdicts, iov[:4], 5, 3)
    assert int(count) == -5


def test_move_iov_resumes_where_it_was_interrupted(kernels):
    rng = np.random.default_rng(4)
    source = rng.integers(0, 256, 400_000, dtype=np.uint8)
    target = np.zeros_like(source)
    lengths = np.full(4000, 100)  # several system calls of 1024 entries
    gaps = np.arange(4000) * 100
    order = rng.permutation(4000)
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        other.setblocking(False)
        sides = []
        for memory, end, receive in ((source, one, 0), (target, other, 1)):
            iov = np.zeros(8000, np.int64)
            count, _ = kernels.build_iov(
                memory.ctypes.data, gaps[order], lengths, statuses(4000, 0), iov, 0, 0
            )
            sides.append((end.fileno(), iov, receive, column(0, count, 0, 0, 0)))
        codes = [1, 1]
        for _ in range(10_000):
            codes = [int(kernels.move_iov(*side)) for side in sides]
            if codes == [0, 0]:
                break
        assert codes == [0, 0]
        assert np.array_equal(source, target)
        one.close()
        side = (other.fileno(), iov, 1, column(0, 1, 0, 0, 0))
        assert int(kernels.move_iov(*side)) == kernels.PEER_CLOSED


def alone_room():
    """What `exchange_one` works in, with the fixed words of a protocol."""
    room = np.zeros(moving.ALONE_WORDS, np.int64)
    room[moving.ALONE_FIXED] = column(11, 12, 21, 22, 16, 40, 1 << 30)
    return room


def test_a_request_that_comes_alone_makes_its_own_header(kernels):
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        local = np.zeros(8, np.uint8)
        room = alone_room()
        for writing, number, told in ((0, 5, 21), (1, 6, 22)):
            state = column(0, 0, 0, 0, 0, 0)
            place = (100, 8, local.ctypes.data)
            args = (one.fileno(), room, 7, 8, number, 9, *place, 0, 0, writing, 2, state)
            assert int(kernels.exchange_one(*args)) == 11  # EAGAIN: nobody has answered
            sent = 8 * (moving.REQUEST_WORDS + 2)
            asked = np.frombuffer(other.recv(sent), np.int64)
            assert asked.tolist() == [11 + writing, 40 + 16, number, 7, 8, 9, 1, 100, 8]
            if writing:
                assert other.recv(100) == local.tobytes()
            data = b"" if writing else b"8 bytes!"
            other.send(column(told, 16, number, len(data), 0).tobytes() + data)
            assert int(kernels.exchange_one(*args)) == kernels.MOVED_ALL
            assert local.tobytes() == b"8 bytes!"
        other.send(column(21, 99, 6, 8, 1).tobytes())
        state[:] = 0
        assert int(kernels.exchange_one(*args)) == kernels.UNEXPECTED
        assert room[: moving.REPLY_WORDS].tolist() == [21, 99, 6, 8, 1]


def test_looking_for_an_answer_ends_soon_however_often_it_may_be_looked(kernels):
    """Beside busy programs each look may take as long as a turn of theirs."""
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        local = np.zeros(8, np.uint8)
        room = alone_room()
        state = column(0, 0, 0, 0, 0, 0)
        place = (100, 8, local.ctypes.data)
        args = (one.fileno(), room, 7, 8, 1, 9, *place, 0, 0, 0)
        assert int(kernels.exchange_one(*args, 1, state)) == 11  # compiled, if it had to be
        with long_before(60):
            assert int(kernels.exchange_one(*args, 1_000_000_000, state)) == 11
        assert state[4] == 0


def test_exchange_and_take_request_are_two_ends_of_one_message(kernels):
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        other.setblocking(False)
        local = np.zeros(64, np.uint8)
        columns = (column(5, 9), column(30, 4), column(0, 40) + local.ctypes.data)
        message = np.zeros(moving.COLUMNS_AT + 4, np.int64)
        message[moving.REPLY_WORDS + 1] = 16 * 2
        message[moving.COLUMNS_AT - 1] = 2
        expected = column(11, 22, 33)
        state = column(0, 0, 0, 0, 0, 0)
        none, iov = np.zeros((0, 2), np.int64), np.zeros(6, np.int64)
        args = (one.fileno(), *columns, statuses(2, 0), none, column(), message, iov, expected)
        assert (
            int(kernels.exchange(*args, 0, 0, 2, state)) == 11
        )  # EAGAIN: the reply is not there yet
        heard, fixed = np.zeros_like(message), np.zeros(moving.FIXED_WORDS, np.int64)
        assert int(kernels.take_request(other.fileno(), heard, fixed, column(0, 0, 0, 0, 0))) == 0
        assert heard[moving.COLUMNS_AT :].tolist() == [5, 9, 30, 4]
        data = np.arange(34, dtype=np.uint8)
        other.send(column(11, 22, 33, 34, 0).tobytes() + data[:10].tobytes())
        assert int(kernels.exchange(*args, 0, 0, 2, state)) == kernels.MOVED_PART
        other.send(data[10:].tobytes())
        assert int(kernels.exchange(*args, 0, 0, 2, state)) == kernels.MOVED_ALL
        assert np.array_equal(np.concatenate([local[:30], local[40:44]]), data)
        assert state[4] == 1  # the reply was there: it was not slept for
        # A reply that is not the expected one stops the exchange before its data.
        state[:] = 0
        other.send(column(11, 22, 34, 34, 0).tobytes() + b"rest")
        assert int(kernels.exchange(*args, 0, 0, 2, state)) == kernels.UNEXPECTED
        assert message[:5].tolist() == [11, 22, 34, 34, 0]
        assert one.recv(100) == b"rest"
        # A count that the body length contradicts is not believed.
        one.send(column(0, 16, 0, 0, 0, 0, 1 << 40).tobytes())
        other.recv(88)
        code = kernels.take_request(other.fileno(), heard, fixed, column(0, 0, 0, 0, 0))
        assert int(code) == kernels.UNEXPECTED


def test_warmup_compiles_every_kernel():
    moving.warmup()
    for name in ("check_batch", "check_ranges", "copy_batch", "build_iov", "move_iov", "exchange",
                 "take_request"):  # fmt: skip
        assert len(getattr(moving, name).signatures) >= 1


def drive(sock, columns, receiving, tries=20_000):
    """Call until all is moved; give the hashes and the tags."""
    addresses, lengths, verdicts = columns
    sums, tags = np.zeros((2, lengths.size), np.uint64)
    known = TAGGING.schedule, np.zeros(content_tags.STATE_WORDS, np.uint64)
    work, state = np.zeros(stream.WORK_WORDS, np.int64), column(0, 0, 0, 0, 0)
    owner, iov = np.zeros(stream.HASH_WORDS, np.uint64), np.zeros(32, np.int64)
    for _ in range(tries):
        wanted = sums, tags, iov, work, owner, *known
        args = (addresses, lengths, verdicts, *wanted, receiving, state)
        code = int(stream.move_hashed(sock.fileno(), *args))
        if code == moving.MOVED_ALL:
            return sums, tags
        assert code in (moving.MOVED_PART, 11), code
        os.sched_yield()
    raise AssertionError("the transfer never ended")


def test_data_is_hashed_as_it_passes_in_pieces_of_any_size():
    """Ranges below, at and far above a window, empty and refused ones, through a slow socket."""
    window = stream.WINDOW_BYTES
    lengths = column(0, 5, 100, 4096, 0, 1024, window - 7, window, 1, 3 * window + 1025, 240, 0)
    verdicts = statuses(lengths.size, 0)
    verdicts[[2, 8]] = -600
    rng = np.random.default_rng(6)
    source = rng.integers(0, 256, int(lengths.sum()), dtype=np.uint8)
    target = np.zeros_like(source)
    starts = np.cumsum(lengths) - lengths
    starts[3], starts[5] = starts[3] + 1024, starts[3]  # neighbours that are not in order
    one, other = socket.socketpair()
    with one, other, ThreadPoolExecutor(1) as pool:
        one.setblocking(False)
        other.setblocking(False)
        sending = pool.submit(drive, one, (source.ctypes.data + starts, lengths, verdicts), 0)
        came, tags_came = drive(other, (target.ctypes.data + starts, lengths, verdicts), 1)
        left, tags_left = sending.result(timeout=30)
    for at, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        there = target[start : start + length]
        if verdicts[at]:
            assert not there.any()
            continue
        assert np.array_equal(there, source[start : start + length])
        expected = xxhash.xxh3_64_intdigest(there.tobytes())
        assert [int(left[at]), int(came[at])] == [expected] * 2
        expected = TAGGING.one(there.ctypes.data, length)
        assert [int(tags_left[at]), int(tags_came[at])] == [expected] * 2


def test_a_peer_that_keeps_up_does_not_keep_the_deadline_from_being_looked_at():
    nbytes = 2 * stream.WINDOWS_MAX * stream.WINDOW_BYTES + 1
    source = np.arange(nbytes, dtype=np.uint32).view(np.uint8)[:nbytes]
    target = np.zeros_like(source)
    one, other = socket.socketpair()

    def receive():
        view = memoryview(target)
        while view:
            view = view[other.recv_into(view) :]

    with one, other, ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(receive)
        work, state = np.zeros(stream.WORK_WORDS, np.int64), column(0, 0, 0, 0, 0)
        owner, iov = np.zeros(stream.HASH_WORDS, np.uint64), np.zeros(32, np.int64)
        sums, verdicts, none = np.zeros(1, np.uint64), statuses(1, 0), np.zeros(0, np.uint64)
        memory = column(source.ctypes.data), column(nbytes), verdicts
        wanted = sums, none, iov, work, owner, none, none
        codes = [
            int(stream.move_hashed(one.fileno(), *memory, *wanted, 0, state)) for _ in range(3)
        ]
        receiving.result(timeout=30)
    assert codes == [moving.MOVED_PART, moving.MOVED_PART, moving.MOVED_ALL]
    assert np.array_equal(source, target)
    assert int(sums[0]) == xxhash.xxh3_64_intdigest(source)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_pieces_hash_like_the_whole_also_as_plain_python():
    data = np.random.default_rng(7).integers(0, 256, 5000, dtype=np.uint8)
    address = int(data.ctypes.data)
    for kernel in (stream._hash_piece, stream._hash_piece.py_func):
        for length in (241, 1025, 2048, 4999):
            owner = np.zeros(stream.HASH_WORDS, np.uint64)
            set_secret(owner)
            cuts = [*range(0, length, 1024), length]
            for begin, end in itertools.pairwise(cuts):
                found = kernel(address, length, begin, end, int(owner.ctypes.data))
            assert int(found) == xxhash.xxh3_64_intdigest(data[:length].tobytes())
