"""SipHash-2-4 with 128 bits in numba: names, and chains of blocks of tokens, under a secret key.

Who writes a prompt chooses the bytes that name its blocks. Under XXH3 two prompts can be written
whose names meet, and one then reads the other's blocks. Under SipHash that takes the key, which
writers do not have, and it stays so for those who see digests. Results equal the reference
implementation by Aumasson and Bernstein byte for byte, for every key and length.

How it is built
- A key, and a digest, is two words (low, high): 16 bytes as two little-endian numbers. Both words
  of a key have to arrive as uint64: numba takes a plain integer for a signed one.
- One message is a chain of additions, each of which waits for the one before, so most of a
  processor idles. Eight messages of one length go side by side, one in each lane of four vectors of
  8 x 64 bits, and take less time than three alone. The vectors are written as LLVM, because numba
  leaves LLVM's SLP vectoriser off and its loop vectoriser does not see 8 parallel lanes.
- So strings are put into groups of one length: neighbours that are alike already, as the names of a
  batch mostly are, or else all of them, sorted by length by counting. A group of fewer than eight
  repeats its last string in the lanes that are left; one of fewer than three is hashed one by one.
- A chain has two levels. Blocks do not depend on each other, so their digests are made in lanes;
  what has to wait for the key before it is half of one message of 32 bytes a block.
- Memory is read by address through `primitives`, so every kernel also runs through `.py_func`.

What it does not do: check anything, stream, digests of 64 bits, big-endian machines.
Complexity: O(bytes) each; strings take O(n + longest) extra memory, a chain O(1).
"""

import ctypes

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
    U64,
    _at,
    _splat,
    load8,
    load32,
    load64,
)

LANES = 8
LANES_MIN = 3
"""Groups of fewer strings are hashed one by one: eight lanes of 200 bytes take 2.3 times as long as
one such string."""
RUN_MIN = 4
"""Where runs of strings of one length are shorter on average, all are sorted by length first."""

ROUNDS, LAST_ROUNDS = 2, 4
START_0, START_1 = U64(0x736F6D6570736575), U64(0x646F72616E646F6D)
START_2, START_3 = U64(0x6C7967656E657261), U64(0x7465646279746573)
WIDE = U64(0xEE)
HIGH = U64(0xDD)
TOP = U64(56)
LINK_LAST = U64(32) << TOP
"""The last word of a message of 32 bytes."""

# --- One message --------------------------------------------------------------------------------

_inlined = register_jitable(forceinline=True)


@_inlined
def _rotated(x, bits):
    return (x << U64(bits)) | (x >> U64(64 - bits))


@_inlined
def _round(v0, v1, v2, v3):
    v0 = v0 + v1
    v1 = _rotated(v1, 13) ^ v0
    v0 = _rotated(v0, 32)
    v2 = v2 + v3
    v3 = _rotated(v3, 16) ^ v2
    v0 = v0 + v3
    v3 = _rotated(v3, 21) ^ v0
    v2 = v2 + v1
    v1 = _rotated(v1, 17) ^ v2
    v2 = _rotated(v2, 32)
    return v0, v1, v2, v3


@_inlined
def _begun(key_low, key_high):
    return START_0 ^ key_low, START_1 ^ key_high ^ WIDE, START_2 ^ key_low, START_3 ^ key_high


@_inlined
def _absorbed(v0, v1, v2, v3, word):
    v3 = v3 ^ word
    for _ in range(ROUNDS):
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0 ^ word, v1, v2, v3


@_inlined
def _ended_low(v0, v1, v2, v3):
    """The low word of a digest alone, in half the rounds."""
    v2 = v2 ^ WIDE
    for _ in range(LAST_ROUNDS):
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0 ^ v1 ^ v2 ^ v3


@_inlined
def _ended(v0, v1, v2, v3):
    v2 = v2 ^ WIDE
    for _ in range(LAST_ROUNDS):
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    low = v0 ^ v1 ^ v2 ^ v3
    v1 = v1 ^ HIGH
    for _ in range(LAST_ROUNDS):
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return low, v0 ^ v1 ^ v2 ^ v3


@_inlined
def _hash(address, words, last, v0, v1, v2, v3):
    """The digest of `words` words at an address and a last one; v0 to v3 hold the key."""
    for at in range(words):
        v0, v1, v2, v3 = _absorbed(v0, v1, v2, v3, load64(address + 8 * at))
    v0, v1, v2, v3 = _absorbed(v0, v1, v2, v3, last)
    return _ended(v0, v1, v2, v3)


@_inlined
def _last_word(address, length):
    """The last word of a string: the bytes that fill no word, and the length in the highest."""
    word = U64(length) << TOP
    rest = length & 7
    if rest == 0:
        return word
    if length > 8:
        # Reaches back over bytes of the word before, and shifts them out.
        return word | (load64(address + length - 8) >> U64(64 - 8 * rest))
    if rest >= 4:
        return word | load32(address) | (load32(address + rest - 4) << U64(8 * (rest - 4)))
    middle, end = rest >> 1, rest - 1
    word |= load8(address) | (load8(address + middle) << U64(8 * middle))
    return word | (load8(address + end) << U64(8 * end))


# --- Eight messages -----------------------------------------------------------------------------


def digest_lanes(state, words, v0, v1, v2, v3):
    """Hash eight messages of `words` words of 8 bytes each, and a last word.

    state: address of uint64[16], eight addresses and eight last words, which become the eight low
    and the eight high words of the digests. v0 to v3: what the key begins with.
    """
    lanes = (ctypes.c_uint64 * (2 * LANES)).from_address(int(state))
    for lane in range(LANES):
        address, last = int(lanes[lane]), U64(lanes[LANES + lane])
        low, high = _hash(address, words, last, v0, v1, v2, v3)
        lanes[lane], lanes[LANES + lane] = int(low), int(high)


def _spread(builder, value):
    first = builder.insert_element(_splat(0), value, _I32(0))
    everywhere = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, first, everywhere)


def _emit_rotated(builder, lanes, bits):
    left = builder.shl(lanes, _splat(bits))
    return builder.or_(left, builder.lshr(lanes, _splat(64 - bits)))


def _emit_rounds(builder, v0, v1, v2, v3, rounds):
    for _ in range(rounds):
        v0 = builder.add(v0, v1)
        v1 = builder.xor(_emit_rotated(builder, v1, 13), v0)
        v0 = _emit_rotated(builder, v0, 32)
        v2 = builder.add(v2, v3)
        v3 = builder.xor(_emit_rotated(builder, v3, 16), v2)
        v0 = builder.add(v0, v3)
        v3 = builder.xor(_emit_rotated(builder, v3, 21), v0)
        v2 = builder.add(v2, v1)
        v1 = builder.xor(_emit_rotated(builder, v1, 17), v2)
        v2 = _emit_rotated(builder, v2, 32)
    return v0, v1, v2, v3


def _emit_absorbed(builder, v0, v1, v2, v3, word):
    v3 = builder.xor(v3, word)
    v0, v1, v2, v3 = _emit_rounds(builder, v0, v1, v2, v3, ROUNDS)
    return builder.xor(v0, word), v1, v2, v3


def _emit_ended_low(builder, v0, v1, v2, v3):
    v2 = builder.xor(v2, _splat(int(WIDE)))
    v0, v1, v2, v3 = _emit_rounds(builder, v0, v1, v2, v3, LAST_ROUNDS)
    return builder.xor(builder.xor(v0, v1), builder.xor(v2, v3))


def _emit_ended(builder, v0, v1, v2, v3):
    v2 = builder.xor(v2, _splat(int(WIDE)))
    v0, v1, v2, v3 = _emit_rounds(builder, v0, v1, v2, v3, LAST_ROUNDS)
    low = builder.xor(builder.xor(v0, v1), builder.xor(v2, v3))
    v1 = builder.xor(v1, _splat(int(HIGH)))
    v0, v1, v2, v3 = _emit_rounds(builder, v0, v1, v2, v3, LAST_ROUNDS)
    return low, builder.xor(builder.xor(v0, v1), builder.xor(v2, v3))


def _emit_gathered(builder, addresses, offset):
    """A vector of the words at one offset from each address."""
    lanes = _splat(0)
    for lane, address in enumerate(addresses):
        word = builder.load(_at(builder, address, offset), align=1, typ=_I64)
        lanes = builder.insert_element(lanes, word, _I32(lane))
    return lanes


def _emit_digest_lanes(builder, state, words, *key):
    """The loop over words, head (phis, test) -> body -> head; then the last word and the end."""
    state = builder.inttoptr(state, _POINTER)
    lasts = _at(builder, state, _I64(8 * LANES))
    addresses = []
    for lane in range(LANES):
        address = builder.load(_at(builder, state, _I64(8 * lane)), align=8, typ=_I64)
        addresses.append(builder.inttoptr(address, _POINTER))
    start = [_spread(builder, each) for each in key]

    entry = builder.block
    head, body, after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(_I64)
    index.add_incoming(_I64(0), entry)
    lanes = [builder.phi(_LANES) for _ in start]
    for phi, value in zip(lanes, start, strict=True):
        phi.add_incoming(value, entry)
    builder.cbranch(builder.icmp_signed("<", index, words), body, after)

    builder.position_at_end(body)
    word = _emit_gathered(builder, addresses, builder.mul(index, _I64(8)))
    for phi, value in zip(lanes, _emit_absorbed(builder, *lanes, word), strict=True):
        phi.add_incoming(value, body)
    index.add_incoming(builder.add(index, _I64(1)), body)
    builder.branch(head)

    builder.position_at_end(after)
    last = builder.load(lasts, align=8, typ=_LANES)
    low, high = _emit_ended(builder, *_emit_absorbed(builder, *lanes, last))
    builder.store(low, state, align=8)
    builder.store(high, lasts, align=8)


@intrinsic
def _digest_lanes(_typing, state, words, v0, v1, v2, v3):
    def codegen(context, builder, _signature, arguments):
        _emit_digest_lanes(builder, *arguments)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, *[types.uint64] * 4), codegen


@overload(digest_lanes)
def _compiled_digest_lanes(state, words, v0, v1, v2, v3):
    return lambda state, words, v0, v1, v2, v3: _digest_lanes(state, words, v0, v1, v2, v3)


# --- Kernels ------------------------------------------------------------------------------------


@register_jitable
def _by_length(offsets, count, longest):
    """The numbers of n strings, those of one length beside each other. O(n + longest)."""
    starts = np.zeros(longest + 2, dtype=np.int64)
    for i in range(count):
        starts[offsets[i + 1] - offsets[i]] += 1
    at = 0
    for step in range(starts.shape[0]):
        alike = starts[step]
        starts[step] = at
        at += alike
    rows = np.empty(count, dtype=np.int64)
    for i in range(count):
        step = offsets[i + 1] - offsets[i]
        rows[starts[step]] = i
        starts[step] += 1
    return rows


@njit(cache=True, nogil=True)
def sip128_one(address, length, key_low, key_high):
    """The digest of one string, which may be empty, as (low, high). O(bytes).

    address, length: of its bytes; key_low, key_high: uint64.
    """
    v0, v1, v2, v3 = _begun(key_low, key_high)
    return _hash(address, length >> 3, _last_word(address, length), v0, v1, v2, v3)


@njit(cache=True, nogil=True)
def sip128_strings(key_low, key_high, blob, offsets, length_max, out):
    """out[i] = the digest of string i of a blob joined by single separator bytes. O(bytes).

    key_low, key_high: uint64; blob: uint8[...]; offsets: int64[n + 1], string i is
    blob[offsets[i] : offsets[i + 1] - 1]; out: uint64[n, 2] as (low, high). Returns -1, or the
    index of the first string that is empty or longer than `length_max`; then nothing is hashed.
    """
    count = out.shape[0]
    longest, before, changes = 0, 0, 0
    for i in range(count):
        length = offsets[i + 1] - 1 - offsets[i]
        if length < 1 or length > length_max:
            return i
        longest = max(longest, length)
        if length != before:
            changes += 1
        before = length
    if count >= LANES and changes * RUN_MIN > count:
        rows = _by_length(offsets, count, longest)
    else:
        rows = np.arange(count)
    start = np.int64(blob.ctypes.data)
    lanes = np.empty(2 * LANES, dtype=np.uint64)
    state = np.int64(lanes.ctypes.data)
    v0, v1, v2, v3 = _begun(key_low, key_high)
    at = 0
    while at < count:
        row = rows[at]
        address = start + offsets[row]
        length = offsets[row + 1] - 1 - offsets[row]
        group = 1
        while group < LANES and at + group < count:
            other = rows[at + group]
            if offsets[other + 1] - 1 - offsets[other] != length:
                break
            group += 1
        if group < LANES_MIN:
            group = 1
            last = _last_word(address, length)
            out[row, 0], out[row, 1] = _hash(address, length >> 3, last, v0, v1, v2, v3)
        else:
            for lane in range(LANES):
                address = start + offsets[rows[at + min(lane, group - 1)]]
                lanes[lane] = U64(address)
                lanes[LANES + lane] = _last_word(address, length)
            digest_lanes(state, length >> 3, v0, v1, v2, v3)
            for lane in range(group):
                row = rows[at + lane]
                out[row, 0], out[row, 1] = lanes[lane], lanes[LANES + lane]
        at += group
    return -1


@_inlined
def _digest_blocks(address, count, block_tokens, key_low, key_high, out):
    """out[i] = the digest of block i alone."""
    blocks = min(out.shape[0], count // block_tokens)
    block_bytes = 8 * block_tokens
    lanes = np.empty(2 * LANES, dtype=np.uint64)
    state = np.int64(lanes.ctypes.data)
    v0, v1, v2, v3 = _begun(key_low, key_high)
    at = 0
    while blocks - at >= LANES_MIN:
        group = min(LANES, blocks - at)
        for lane in range(LANES):
            lanes[lane] = U64(address + block_bytes * (at + min(lane, group - 1)))
            lanes[LANES + lane] = U64(block_bytes) << TOP
        digest_lanes(state, block_tokens, v0, v1, v2, v3)
        for lane in range(group):
            out[at + lane, 0], out[at + lane, 1] = lanes[lane], lanes[LANES + lane]
        at += group
    for i in range(at, out.shape[0]):
        tokens = min(block_tokens, count - i * block_tokens)
        last = U64(8 * tokens) << TOP
        begin = address + block_bytes * i
        out[i, 0], out[i, 1] = _hash(begin, tokens, last, v0, v1, v2, v3)


@njit(cache=True, nogil=True)
def sip128_chain(
    address, count, block_tokens, parent_low, parent_high,
    link_low, link_high, block_low, block_high, out,
):  # fmt: skip
    """out[i] = the digest, by the key of links, of the digest of block i || out[i - 1]. O(count).

    The digest of a block is by the key of blocks. address, count: int64, where contiguous tokens
    (int64) lie and how many; block_tokens: int64, the last block may be shorter;
    parent_low, parent_high: uint64, what stands for out[-1]; link_low, link_high, block_low,
    block_high: uint64, the two keys; out: uint64[m, 2] as (low, high).
    """
    _digest_blocks(address, count, block_tokens, block_low, block_high, out)
    s0, s1, s2, s3 = _begun(link_low, link_high)
    low, high = parent_low, parent_high
    for i in range(out.shape[0]):
        # The block first: the next one's need not wait for the key of this one.
        v0, v1, v2, v3 = _absorbed(s0, s1, s2, s3, out[i, 0])
        v0, v1, v2, v3 = _absorbed(v0, v1, v2, v3, out[i, 1])
        v0, v1, v2, v3 = _absorbed(v0, v1, v2, v3, low)
        v0, v1, v2, v3 = _absorbed(v0, v1, v2, v3, high)
        v0, v1, v2, v3 = _absorbed(v0, v1, v2, v3, LINK_LAST)
        low, high = _ended(v0, v1, v2, v3)
        out[i, 0], out[i, 1] = low, high


def warmup() -> None:
    """Compile every kernel for the argument types used in production."""
    key = U64(0), U64(1)
    blob = np.frombuffer(b"key", dtype=np.uint8)
    offsets = np.array([0, 4], dtype=np.int64)
    tokens = np.zeros(4, dtype=np.int64)
    out = np.empty((1, 2), dtype=np.uint64)
    sip128_one(blob.ctypes.data, 3, *key)
    sip128_strings(*key, blob, offsets, 64, out)
    sip128_chain(tokens.ctypes.data, 4, 4, *key, *key, *key, out)
