"""Records of TLS 1.3 between memory and a socket, sealed and opened without Python.

One direction of a connection has a key, a number that counts its records, and a room where sealed
bytes lie: what is to leave, or what came. The cipher is OpenSSL's, called at the addresses of four
functions of libcrypto; what a record is, RFC 8446 says (5.2). Bytes are sealed from where they lie
into the room. What came is opened in the room and then copied: nothing of a record reaches
anybody's memory before all of it was found to be what the other end has sealed.

Arrays are one-dimensional C-contiguous int64; iovecs and states are those of `moving`. words: WORDS
words of a direction; room: its ROOM_BYTES, uint8; calls: addresses, at INIT.. below. Numba does not
check bounds: what a record says of its length is compared with the room before it is used.
Cost: the cipher, and a copy within the second-level cache; half a microsecond a record.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.types import ExternalFunction
from numba.extending import intrinsic

from kernel_cache import njit
from transfer_engine.kernels.moving import MOVED_ALL, MOVED_PART, PEER_CLOSED, UNEXPECTED
from transfer_engine.kernels.system import last_errno, now_ns

_memmove = ExternalFunction("memmove", types.intp(types.intp, types.intp, types.uintp))
_send = ExternalFunction("send", types.intp(types.int32, types.intp, types.uintp, types.int32))
_recv = ExternalFunction("recv", types.intp(types.int32, types.intp, types.uintp, types.int32))
_sched_yield = ExternalFunction("sched_yield", types.int32())

_MSG_DONTWAIT = 0x40
_MSG_NOSIGNAL = 0x4000

# Words of a direction. IV: the last eight bytes of its iv as a number. BEGIN and END: of the sealed
# bytes in the room; PLAIN and PLAIN_END: of opened ones. SAID: what kind a record was that carries
# no message (-1: it is not what was sealed); its bytes are the opened ones. NONCE: two words, the
# iv of a record, of which the first four bytes stay.
CIPHER, RECORDS, IV, BEGIN, END, PLAIN, PLAIN_END, SAID, NONCE = range(9)
_COUNT = 10
WORDS = 11

INIT, UPDATE, FINAL, CONTROL = range(4)
CALLS = 4

RECORD_BYTES = 16320
"""What a record carries here. One could carry 16384, but four of those are some bytes more than a
segment of the loopback takes: these went alone, and took an eighth of the rate."""
_HEAD_BYTES = 5
_TAG_BYTES = 16
_SPARE_BYTES = _HEAD_BYTES + 1 + _TAG_BYTES
_SEALED_MAX = 16384 + 256
_WINDOW_BYTES = 4 * (RECORD_BYTES + _SPARE_BYTES)
ROOM_BYTES = 2 * _WINDOW_BYTES
"""Large beside a system call, small beside a second-level cache. Half of it is sealed at a time, so
that the other end opens that while more is sealed."""
_TURN_NS = 10_000_000
_SPIN_NS_MAX = 1_000_000
_LOOKS_PER_CLOCK = 8

_MESSAGE = 23
_LEGACY = 3
_GET_TAG, _SET_TAG = 0x10, 0x11  # EVP_CTRL_AEAD_*
_SAME = -1

_POINTER, _INT, _LONG = ir.PointerType(), ir.IntType(32), ir.IntType(64)


def _call(builder, arguments, kinds):
    """Emit a call of the function at the first argument; all are int64, as is what it returns."""
    function = ir.FunctionType(_INT, kinds)
    where = builder.inttoptr(arguments[0], function.as_pointer())
    given = [
        builder.inttoptr(value, _POINTER) if kind is _POINTER else builder.trunc(value, kind)
        for value, kind in zip(arguments[1:], kinds, strict=True)
    ]
    return builder.sext(builder.call(where, given), _LONG)


@intrinsic
def _init(_typing, at, cipher, kind, engine, key, iv, sealing):
    """EVP_CipherInit_ex."""

    def codegen(_context, builder, _signature, arguments):
        return _call(builder, arguments, (*[_POINTER] * 5, _INT))

    return types.int64(*[types.int64] * 7), codegen


@intrinsic
def _update(_typing, at, cipher, target, count, source, nbytes):
    """EVP_CipherUpdate."""

    def codegen(_context, builder, _signature, arguments):
        return _call(builder, arguments, (*[_POINTER] * 4, _INT))

    return types.int64(*[types.int64] * 6), codegen


@intrinsic
def _final(_typing, at, cipher, target, count):
    """EVP_CipherFinal_ex."""

    def codegen(_context, builder, _signature, arguments):
        return _call(builder, arguments, (_POINTER, _POINTER, _POINTER))

    return types.int64(*[types.int64] * 4), codegen


@intrinsic
def _control(_typing, at, cipher, what, nbytes, target):
    """EVP_CIPHER_CTX_ctrl."""

    def codegen(_context, builder, _signature, arguments):
        return _call(builder, arguments, (_POINTER, _INT, _INT, _POINTER))

    return types.int64(*[types.int64] * 5), codegen


@njit(cache=True, nogil=True)
def _begin(words, calls, head):
    """Begin the next record, whose head lies at an address; 1 unless the cipher fails. O(1)."""
    number = np.uint64(words[RECORDS]) ^ np.uint64(words[IV])
    nonce = words[NONCE : NONCE + 2].view(np.uint8)
    for at in range(8):
        nonce[4 + at] = (number >> np.uint64(56 - 8 * at)) & np.uint64(0xFF)
    words[RECORDS] += 1
    cipher, count = words[CIPHER], words.ctypes.data + 8 * _COUNT
    if _init(calls[INIT], cipher, 0, 0, 0, nonce.ctypes.data, _SAME) != 1:
        return np.int64(0)
    return _update(calls[UPDATE], cipher, 0, count, head, _HEAD_BYTES)


@njit(cache=True, nogil=True)
def _seal(words, calls, room, iov, state):
    """Seal one record of the iovecs state[0]..state[1] to the end of what is sealed.

    Returns 1 unless the cipher fails. O(bytes).
    """
    size, at = np.int64(0), state[0]
    while at < state[1] and size < RECORD_BYTES:
        size += iov[2 * at + 1]
        at += 1
    size = min(size, RECORD_BYTES)
    head = words[END]
    rest = size + 1 + _TAG_BYTES
    room[head] = _MESSAGE
    room[head + 1] = _LEGACY
    room[head + 2] = _LEGACY
    room[head + 3] = rest >> 8
    room[head + 4] = rest & 0xFF
    cipher, count, base = words[CIPHER], words.ctypes.data + 8 * _COUNT, room.ctypes.data
    good = _begin(words, calls, base + head)
    target, left = base + head + _HEAD_BYTES, size
    while left > 0:
        at = 2 * state[0]
        piece = min(iov[at + 1], left)
        if piece > 0:
            good &= _update(calls[UPDATE], cipher, target, count, iov[at], piece)
        target += piece
        left -= piece
        iov[at] += piece
        iov[at + 1] -= piece
        if iov[at + 1] == 0:
            state[0] += 1
    room[head + _HEAD_BYTES + size] = _MESSAGE
    good &= _update(calls[UPDATE], cipher, target, count, target, 1)
    good &= _final(calls[FINAL], cipher, target + 1, count)
    good &= _control(calls[CONTROL], cipher, _GET_TAG, _TAG_BYTES, target + 1)
    words[END] = head + _HEAD_BYTES + rest
    return good


@njit(cache=True, nogil=True)
def seal(iov, words, calls, room, state):
    """Seal the iovecs state[0]..state[1] until half of the room is full; MOVED_ALL or UNEXPECTED.

    state and iov advance in place. O(bytes).
    """
    while state[0] < state[1]:
        if iov[2 * state[0] + 1] == 0:
            state[0] += 1
            continue
        if words[END] + RECORD_BYTES + _SPARE_BYTES > _WINDOW_BYTES:
            break
        if _seal(words, calls, room, iov, state) != 1:
            return np.int64(UNEXPECTED)
    return np.int64(MOVED_ALL)


@njit(cache=True, nogil=True)
def send_sealed(fd, iov, words, calls, room, state):
    """Seal the iovecs state[0]..state[1], and send what is sealed, through a blocking socket.

    Returns as `move_iov`; UNEXPECTED where the cipher fails; MOVED_PART now and then, because a
    peer that takes some each time would keep a deadline from being looked at. O(bytes).
    """
    clock = np.empty(2, dtype=np.int64)
    until = now_ns(clock) + _TURN_NS
    while True:
        if words[BEGIN] == words[END]:
            words[BEGIN] = 0
            words[END] = 0
            code = seal(iov, words, calls, room, state)
            if code != MOVED_ALL:
                return code
            if words[END] == 0:
                return code
        begin = words[BEGIN]
        moved = _send(fd, room.ctypes.data + begin, words[END] - begin, _MSG_NOSIGNAL)
        if moved < 0:
            return last_errno()
        words[BEGIN] += moved
        if words[BEGIN] < words[END] or now_ns(clock) >= until:
            return np.int64(MOVED_PART)


@njit(cache=True, nogil=True)
def _needed(words, room):
    """Return how many bytes the record at BEGIN has, as far as that came; 0 for what is none."""
    begin = words[BEGIN]
    if words[END] - begin < _HEAD_BYTES:
        return np.int64(_HEAD_BYTES)
    rest = (np.int64(room[begin + 3]) << 8) | np.int64(room[begin + 4])
    if rest <= _TAG_BYTES or rest > _SEALED_MAX or room[begin] != _MESSAGE:
        return np.int64(0)
    return _HEAD_BYTES + rest


@njit(cache=True, nogil=True)
def _open(words, calls, room, needed):
    """Open the record at BEGIN where it lies. Returns MOVED_ALL, or UNEXPECTED with SAID set."""
    begin = words[BEGIN]
    base = room.ctypes.data
    cipher, count = words[CIPHER], words.ctypes.data + 8 * _COUNT
    first, size = begin + _HEAD_BYTES, needed - _HEAD_BYTES - _TAG_BYTES
    good = _begin(words, calls, base + begin)
    good &= _update(calls[UPDATE], cipher, base + first, count, base + first, size)
    good &= _control(calls[CONTROL], cipher, _SET_TAG, _TAG_BYTES, base + first + size)
    good &= np.int64(_final(calls[FINAL], cipher, base + first + size, count) > 0)
    words[BEGIN] = begin + needed
    words[SAID] = -1
    if good != 1:
        return np.int64(UNEXPECTED)
    last = first + size - 1
    while last > first and room[last] == 0:  # it may be padded
        last -= 1
    words[PLAIN], words[PLAIN_END] = first, last
    if room[last] == _MESSAGE:
        return np.int64(MOVED_ALL)
    words[SAID] = room[last]
    return np.int64(UNEXPECTED)


@njit(cache=True, nogil=True)
def unseal(iov, words, calls, room, state):
    """Fill the iovecs state[0]..state[1] from records that came; state and iov advance in place.

    Returns MOVED_ALL; MOVED_PART where more has to come, with room for it behind END; or
    UNEXPECTED with SAID set. O(bytes).
    """
    while True:
        while state[0] < state[1]:
            at = 2 * state[0]
            piece = min(iov[at + 1], words[PLAIN_END] - words[PLAIN])
            if piece > 0:
                _memmove(iov[at], room.ctypes.data + words[PLAIN], piece)
                words[PLAIN] += piece
                iov[at] += piece
                iov[at + 1] -= piece
                state[2] += piece
            if iov[at + 1] > 0:
                break
            state[0] += 1
        if state[0] == state[1]:
            return np.int64(MOVED_ALL)
        needed = _needed(words, room)
        if needed == 0:
            words[SAID] = -1
            return np.int64(UNEXPECTED)
        came = words[END] - words[BEGIN]
        if needed > _HEAD_BYTES and came >= needed:
            code = _open(words, calls, room, needed)
            if code != MOVED_ALL:
                return code
            continue
        if words[BEGIN] > 0:
            _memmove(room.ctypes.data, room.ctypes.data + words[BEGIN], came)
            words[BEGIN], words[END] = 0, came
            words[PLAIN], words[PLAIN_END] = 0, 0
        return np.int64(MOVED_PART)


@njit(cache=True, nogil=True)
def _look(fd, into, free, spins):
    """Receive what comes while looking `spins` times; below 0 where that is nothing.

    Leaves the processor to others in between, and ends after _SPIN_NS_MAX, as on a busy machine
    that may take milliseconds each time.
    """
    until = np.int64(0)
    for look in range(1, spins + 1):
        moved = _recv(fd, into, free, _MSG_DONTWAIT)
        if moved >= 0:
            return moved
        if look % _LOOKS_PER_CLOCK == 0:
            now = now_ns(np.empty(2, dtype=np.int64))
            if until == 0:
                until = now + _SPIN_NS_MAX
            elif now >= until:
                break
        _sched_yield()
    return np.int64(-1)


@njit(cache=True, nogil=True)
def receive_sealed(fd, iov, words, calls, room, spins, state):
    """Receive records through a blocking socket until the iovecs state[0]..state[1] are full.

    Looks `spins` times before it sleeps, until that once was not enough: state[4] is 0 then, and 1
    if it was. Returns as `send_sealed`, UNEXPECTED as `unseal`. O(bytes).
    """
    state[4] = np.int64(spins > 0)
    clock = np.empty(2, dtype=np.int64)
    until = now_ns(clock) + _TURN_NS
    while True:
        code = unseal(iov, words, calls, room, state)
        if code != MOVED_PART:
            return code
        into, free = room.ctypes.data + words[END], ROOM_BYTES - words[END]
        moved = _look(fd, into, free, spins)
        if moved < 0:
            spins, state[4] = 0, 0
            moved = _recv(fd, into, free, 0)
        if moved < 0:
            return last_errno()
        if moved == 0:
            return np.int64(PEER_CLOSED)
        words[END] += moved
        if now_ns(clock) >= until:
            return unseal(iov, words, calls, room, state)


def warmup() -> None:
    """Call every kernel once with the argument types of production."""
    import socket

    words = np.zeros(WORDS, dtype=np.int64)
    calls = np.zeros(CALLS, dtype=np.int64)
    room = np.zeros(ROOM_BYTES, dtype=np.uint8)
    iov = np.zeros(2, dtype=np.int64)
    one, other = socket.socketpair()
    with one, other:
        send_sealed(one.fileno(), iov, words, calls, room, np.zeros(6, dtype=np.int64))
        receive_sealed(other.fileno(), iov, words, calls, room, 0, np.zeros(6, dtype=np.int64))
    seal(iov, words, calls, room, np.zeros(6, dtype=np.int64))
    unseal(iov, words, calls, room, np.zeros(6, dtype=np.int64))
