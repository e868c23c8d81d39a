"""Tags of content: what nobody without the key can keep while he changes bytes, however he does it.

A checksum withstands accidents. A tag is a keyed function of the bytes in two steps:

    each block of BLOCK_BYTES   NH, twice: two sums of 64 bits
    sums of all blocks, length  SipHash-2-4, the lower half of its 128 bits

NH (Black, Halevi, Krawczyk, Krovetz, Rogaway: UMAC, 1999) adds to each pair of 32-bit words two
words of the key, multiplies one by the other, and sums the products:

    sum of (m[2i] + k[2i] mod 2^32) * (m[2i+1] + k[2i+1] mod 2^32)  mod 2^64

Whatever two blocks of one length are, so long as they differ somewhere, at most one key in 2^32
gives them the same sum; that is a theorem, not an estimate. The second sum uses the same key from
16 words further on, and the theorem holds for both together (Toeplitz): at most one key in 2^64.
The last block is filled up with zeros to whole stripes; that the length is hashed as well keeps
apart what differs by zeros at the end. SipHash is taken for a pseudo-random function, as it is for
names; it sees the same words for two objects only where all sums meet. Changed bytes have their old
tag with a probability of at most 2^-64 for the sums and 2^-64 for SipHash, each try anew.

How it is built
- A schedule is uint64[SCHEDULE_WORDS]: the key of NH, then the two words of SipHash's. It has to
  look random to whoever changes bytes; a schedule is as good as the secret it is made of.
- The loop of NH is LLVM vectors of 8 x 64 bits, as that of XXH3 (`primitives`), and needs about as
  many instructions. SipHash waits for itself, while the processor goes on with the next block.
- Bytes that fill no block wait in `state`, so an object may come in pieces, of any lengths.
- Memory is read by address through `primitives`, so every kernel also runs through `.py_func`.

A tag is never 0, which stands for none. Nothing is checked. Complexity: O(bytes) each, O(1) memory.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload, register_jitable

from kernel_cache import njit
from transfer_engine.kernels.primitives import (
    _I32,
    _I64,
    _LANES,
    _POINTER,
    STRIPE_BYTES,
    U64,
    _at,
    _splat,
    copy,
    load32,
)
from transfer_engine.kernels.siphash import TOP, _absorbed, _begun, _ended

BLOCK_BYTES = 4096
KEY_WORDS = (BLOCK_BYTES + STRIPE_BYTES) // 8
SCHEDULE_WORDS = KEY_WORDS + 2
_STRIPES = BLOCK_BYTES // STRIPE_BYTES
_UNROLLED = 8

# What a state holds before the bytes that fill no block.
_LENGTH, _FILLED, _SIP, _BUFFER = 0, 1, 2, 8
STATE_WORDS = _BUFFER + BLOCK_BYTES // 8

_WORD = 0xFFFFFFFF
_ZEROS = np.zeros(STRIPE_BYTES, np.uint8)

_inlined = register_jitable(forceinline=True)

# --- NH -----------------------------------------------------------------------------------------


def sums_of(source, key, stripes):
    """The two sums of `stripes` x 64 bytes at `source`; the key lies at `key`, 64 bytes more."""
    sums = [0, 0]
    for at in range(0, STRIPE_BYTES * stripes, 8):
        for nth in range(2):
            keys = key + at + STRIPE_BYTES * nth
            low = int(load32(source + at)) + int(load32(keys)) & _WORD
            high = int(load32(source + at + 4)) + int(load32(keys + 4)) & _WORD
            sums[nth] = sums[nth] + low * high & 0xFFFFFFFFFFFFFFFF
    return U64(sums[0]), U64(sums[1])


_HALVES = ir.VectorType(_I32, 16)


def _emit_products(builder, data, key, sums):
    keyed = builder.add(data, builder.load(key, align=1, typ=_HALVES))
    pairs = builder.bitcast(keyed, _LANES)
    low = builder.and_(pairs, _splat(_WORD))
    return builder.add(sums, builder.mul(low, builder.lshr(pairs, _splat(32))))


def _emit_sum(builder, lanes):
    name = "llvm.vector.reduce.add.v8i64"
    function = builder.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(_I64, [_LANES])
        function = ir.Function(builder.module, kind, name)
    return builder.call(function, [lanes])


def _emit_sums(builder, source, key, stripes):
    """A loop over groups of unrolled stripes, then one over the rest: head -> body -> head."""
    source, key = builder.inttoptr(source, _POINTER), builder.inttoptr(key, _POINTER)
    index, sums = _I64(0), [_splat(0), _splat(0)]
    grouped = builder.and_(stripes, _I64(-_UNROLLED))
    for step, bound in ((_UNROLLED, grouped), (1, stripes)):
        entry = builder.block
        head, body, after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
        builder.branch(head)
        builder.position_at_end(head)
        phi_index, phi_sums = builder.phi(_I64), [builder.phi(_LANES) for _ in sums]
        phi_index.add_incoming(index, entry)
        for phi, value in zip(phi_sums, sums, strict=True):
            phi.add_incoming(value, entry)
        builder.cbranch(builder.icmp_signed("<", phi_index, bound), body, after)
        builder.position_at_end(body)
        sums = list(phi_sums)
        for unrolled in range(step):
            offset = builder.mul(builder.add(phi_index, _I64(unrolled)), _I64(STRIPE_BYTES))
            data = builder.load(_at(builder, source, offset), align=1, typ=_HALVES)
            for nth in range(2):
                keys = _at(builder, key, builder.add(offset, _I64(STRIPE_BYTES * nth)))
                sums[nth] = _emit_products(builder, data, keys, sums[nth])
        phi_index.add_incoming(builder.add(phi_index, _I64(step)), body)
        for phi, value in zip(phi_sums, sums, strict=True):
            phi.add_incoming(value, body)
        builder.branch(head)
        builder.position_at_end(after)
        index, sums = phi_index, phi_sums
    return [_emit_sum(builder, lanes) for lanes in sums]


@intrinsic
def _sums_of(_typing, source, key, stripes):
    def codegen(context, builder, signature, arguments):
        sums = _emit_sums(builder, *arguments)
        return context.make_tuple(builder, signature.return_type, sums)

    return types.UniTuple(types.uint64, 2)(types.int64, types.int64, types.int64), codegen


@overload(sums_of)
def _compiled_sums_of(source, key, stripes):
    return lambda source, key, stripes: _sums_of(source, key, stripes)


# --- Blocks into SipHash ------------------------------------------------------------------------


@_inlined
def _sip_of(schedule):
    return _begun(schedule[KEY_WORDS], schedule[KEY_WORDS + 1])


@_inlined
def _blocks(address, count, key, v0, v1, v2, v3):
    for at in range(count):
        first, second = sums_of(address + BLOCK_BYTES * at, key, _STRIPES)
        v0, v1, v2, v3 = _absorbed(v0, v1, v2, v3, first)
        v0, v1, v2, v3 = _absorbed(v0, v1, v2, v3, second)
    return v0, v1, v2, v3


@_inlined
def _rest(buffer, length, key, v0, v1, v2, v3):
    """Hash what fills no block, at an address where there is room for zeros behind it."""
    if length == 0:
        return v0, v1, v2, v3
    stripes = (length + STRIPE_BYTES - 1) // STRIPE_BYTES
    copy(buffer + length, _ZEROS.ctypes.data, STRIPE_BYTES * stripes - length)
    first, second = sums_of(buffer, key, stripes)
    v0, v1, v2, v3 = _absorbed(v0, v1, v2, v3, first)
    return _absorbed(v0, v1, v2, v3, second)


@_inlined
def _tag(length, v0, v1, v2, v3):
    """The tag of what was hashed: of the words of its blocks, and its length as one more."""
    words = 2 * ((length + BLOCK_BYTES - 1) // BLOCK_BYTES) + 1
    v0, v1, v2, v3 = _absorbed(v0, v1, v2, v3, U64(length))
    v0, v1, v2, v3 = _absorbed(v0, v1, v2, v3, U64(8 * words) << TOP)
    low, _ = _ended(v0, v1, v2, v3)
    return low if low != U64(0) else U64(1)


# --- Kernels ------------------------------------------------------------------------------------


@_inlined
def _tag_range(address, length, schedule, buffer):
    """The tag of one range; `buffer` is the address of a block of scratch."""
    key = np.int64(schedule.ctypes.data)
    count = length // BLOCK_BYTES
    rest = length - BLOCK_BYTES * count
    v0, v1, v2, v3 = _sip_of(schedule)
    v0, v1, v2, v3 = _blocks(address, count, key, v0, v1, v2, v3)
    copy(buffer, address + BLOCK_BYTES * count, rest)
    v0, v1, v2, v3 = _rest(buffer, rest, key, v0, v1, v2, v3)
    return _tag(length, v0, v1, v2, v3)


@njit(cache=True, nogil=True)
def tag_one(address, length, schedule):
    """The tag of one range. O(length)."""
    owner = np.empty(BLOCK_BYTES // 8, dtype=np.uint64)
    found = _tag_range(address, length, schedule, np.int64(owner.ctypes.data))
    owner[0] = U64(0)
    return found


@njit(cache=True, nogil=True)
def tags_of_ranges(addresses, lengths, schedule, out):
    """out[i] = the tag of `lengths[i]` bytes at `addresses[i]`. O(sum of lengths).

    addresses, lengths: int64[n]; schedule: uint64[SCHEDULE_WORDS]; out: uint64[n].
    """
    owner = np.empty(BLOCK_BYTES // 8, dtype=np.uint64)
    buffer = np.int64(owner.ctypes.data)
    for i in range(addresses.shape[0]):
        out[i] = _tag_range(addresses[i], lengths[i], schedule, buffer)
    owner[0] = U64(0)


@njit(cache=True, nogil=True)
def begin(schedule, state):
    """Make a state that of an object of which nothing has come. O(1).

    schedule: uint64[SCHEDULE_WORDS]; state: uint64[STATE_WORDS].
    """
    state[_LENGTH], state[_FILLED] = U64(0), U64(0)
    state[_SIP], state[_SIP + 1], state[_SIP + 2], state[_SIP + 3] = _sip_of(schedule)


@njit(cache=True, nogil=True)
def absorb(schedule, state, address, length):
    """Take the next `length` bytes of an object, at an address. O(length)."""
    key = np.int64(schedule.ctypes.data)
    buffer = np.int64(state.ctypes.data) + 8 * _BUFFER
    v0, v1, v2, v3 = state[_SIP], state[_SIP + 1], state[_SIP + 2], state[_SIP + 3]
    state[_LENGTH] += U64(length)
    filled = np.int64(state[_FILLED])
    if filled > 0:
        taken = min(length, BLOCK_BYTES - filled)
        copy(buffer + filled, address, taken)
        address, length, filled = address + taken, length - taken, filled + taken
        if filled == BLOCK_BYTES:
            v0, v1, v2, v3 = _blocks(buffer, 1, key, v0, v1, v2, v3)
            filled = np.int64(0)
    if filled == 0:
        count = length // BLOCK_BYTES
        v0, v1, v2, v3 = _blocks(address, count, key, v0, v1, v2, v3)
        filled = length - BLOCK_BYTES * count
        copy(buffer, address + BLOCK_BYTES * count, filled)
    state[_FILLED] = U64(filled)
    state[_SIP], state[_SIP + 1], state[_SIP + 2], state[_SIP + 3] = v0, v1, v2, v3


@njit(cache=True, nogil=True)
def tag_of(schedule, state):
    """The tag of all that came so far; more may follow. O(bytes that fill no block)."""
    key = np.int64(schedule.ctypes.data)
    buffer = np.int64(state.ctypes.data) + 8 * _BUFFER
    v0, v1, v2, v3 = state[_SIP], state[_SIP + 1], state[_SIP + 2], state[_SIP + 3]
    v0, v1, v2, v3 = _rest(buffer, np.int64(state[_FILLED]), key, v0, v1, v2, v3)
    return _tag(np.int64(state[_LENGTH]), v0, v1, v2, v3)


@njit(cache=True, nogil=True)
def tags_of_pieces(addresses, lengths, starts, schedule, out):
    """out[i] = the tag of the pieces `starts[i]` up to `starts[i + 1]`, as of one buffer. O(bytes).

    addresses, lengths: int64[pieces]; starts: int64[n + 1]; schedule: uint64[SCHEDULE_WORDS];
    out: uint64[n].
    """
    state = np.empty(STATE_WORDS, dtype=np.uint64)
    for i in range(out.shape[0]):
        begin(schedule, state)
        for piece in range(starts[i], starts[i + 1]):
            absorb(schedule, state, addresses[piece], lengths[piece])
        out[i] = tag_of(schedule, state)


def warmup() -> None:
    """Compile every kernel for the argument types used in production."""
    schedule = np.zeros(SCHEDULE_WORDS, dtype=np.uint64)
    state = np.zeros(STATE_WORDS, dtype=np.uint64)
    addresses = np.full(1, schedule.ctypes.data, dtype=np.int64)
    lengths, starts = np.full(1, 100, dtype=np.int64), np.arange(2)
    out = np.empty(1, dtype=np.uint64)
    tag_one(int(addresses[0]), 100, schedule)
    tags_of_ranges(addresses, lengths, schedule, out)
    tags_of_pieces(addresses, lengths, starts, schedule, out)
    begin(schedule, state)
    absorb(schedule, state, int(addresses[0]), 100)
    tag_of(schedule, state)
