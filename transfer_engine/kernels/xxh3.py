"""XXH3 (64 and 128 bits) in numba: ranges of memory, copies that hash, key lists, block chains.

Why not the `xxhash` package everywhere: one call per key or block costs 50-100 ns of interpreter
before a byte is read, it cannot hash while it copies, and a chain of blocks needs a Python loop.
These kernels take a whole batch per call and release the GIL. Results equal `xxh3_64_intdigest`
and `xxh3_128_intdigest` of that package bit for bit, for every length and seed (XXH3 as frozen in
xxHash 0.8, default secret).

How it is built
- Memory is named by address (int64), not by array: it belongs to registered segments. The typed
  wrappers in `transfer_engine.checksum` and `mooncake_store.ids` produce and check addresses;
  nothing here checks anything.
- A few primitives touch raw memory or need a machine instruction (`primitives`); all else
  is ordinary code over them, so every kernel also runs through `.py_func`, on the same addresses,
  without JIT (numpy warns of the intended uint64 overflow there).

What it does not do: streaming (update/digest), custom secrets, big-endian machines.
Complexity: O(bytes) each, O(1) extra memory (a chain needs one block of scratch).
"""

import numpy as np
from numba.extending import register_jitable

from kernel_cache import njit
from transfer_engine.kernels.primitives import (
    LINE_BYTES,
    P32_1,
    STREAM_ALIGNMENT,
    STRIPE_BYTES,
    STRIPES_PER_BLOCK,
    U64,
    accumulate,
    accumulate_streaming,
    copy,
    find_zero,
    finish_streaming,
    load8,
    load32,
    load64,
    multiply128,
    prefetch,
)

SHORT_BYTES_MAX = 240
STREAM_BYTES_MIN = 4096
AHEAD_LINES = 16

P32_2, P32_3 = U64(0x85EBCA77), U64(0xC2B2AE3D)
P64_1, P64_2 = U64(0x9E3779B185EBCA87), U64(0xC2B2AE3D27D4EB4F)
P64_3, P64_4 = U64(0x165667B19E3779F9), U64(0x85EBCA77C2B2AE63)
P64_5 = U64(0x27D4EB2F165667C5)
MIX_1, MIX_2 = U64(0x165667919E3779F9), U64(0x9FB21C651E98DF25)
FIRST_LANES = np.array([P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1])
LOW_32 = U64(0xFFFFFFFF)
ZERO = U64(0)

SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
        "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
        "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
        "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
        "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    dtype=np.uint8,
)

# --- Mixing steps shared by all lengths ---------------------------------------------------------


# Without forced inlining every hash pays three indirect calls and store-forwarding stalls on the
# returned pairs: 16 ns for a short key instead of 5.
_inlined = register_jitable(forceinline=True)


@_inlined
def _secret(offset):
    return load64(SECRET.ctypes.data + offset)


@_inlined
def _swap32(x):
    return (
        ((x & U64(0xFF)) << U64(24))
        | ((x & U64(0xFF00)) << U64(8))
        | ((x >> U64(8)) & U64(0xFF00))
        | ((x >> U64(24)) & U64(0xFF))
    )


@_inlined
def _swap64(x):
    return (_swap32(x & LOW_32) << U64(32)) | _swap32(x >> U64(32))


@_inlined
def _avalanche(h):
    h = (h ^ (h >> U64(37))) * MIX_1
    return h ^ (h >> U64(32))


@_inlined
def _avalanche_xxh64(h):
    h = (h ^ (h >> U64(33))) * P64_2
    h = (h ^ (h >> U64(29))) * P64_3
    return h ^ (h >> U64(32))


@_inlined
def _fold(a, b):
    low, high = multiply128(a, b)
    return low ^ high


@_inlined
def _mix16(address, offset, seed):
    low = load64(address) ^ (_secret(offset) + seed)
    high = load64(address + 8) ^ (_secret(offset + 8) - seed)
    return _fold(low, high)


@_inlined
def _mix32(low, high, first, second, offset, seed):
    low = (low + _mix16(first, offset, seed)) ^ (load64(second) + load64(second + 8))
    high = (high + _mix16(second, offset + 16, seed)) ^ (load64(first) + load64(first + 8))
    return low, high


@_inlined
def _combine_1_to_3(address, length):
    first = load8(address)
    middle = load8(address + (length >> 1))
    last = load8(address + length - 1)
    return (first << U64(16)) | (middle << U64(24)) | last | (U64(length) << U64(8))


# --- Inputs of up to 240 bytes ------------------------------------------------------------------


@_inlined
def _short_64_to_16(address, length, seed):
    if length > 8:
        low = load64(address) ^ ((_secret(24) ^ _secret(32)) + seed)
        high = load64(address + length - 8) ^ ((_secret(40) ^ _secret(48)) - seed)
        return _avalanche(U64(length) + _swap64(low) + high + _fold(low, high))
    if length >= 4:
        seed = seed ^ (_swap32(seed & LOW_32) << U64(32))
        words = load32(address + length - 4) + (load32(address) << U64(32))
        h = words ^ ((_secret(8) ^ _secret(16)) - seed)
        h ^= ((h << U64(49)) | (h >> U64(15))) ^ ((h << U64(24)) | (h >> U64(40)))
        h *= MIX_2
        h ^= (h >> U64(35)) + U64(length)
        h *= MIX_2
        return h ^ (h >> U64(28))
    if length > 0:
        flip = ((_secret(0) & LOW_32) ^ (_secret(0) >> U64(32))) + seed
        return _avalanche_xxh64(_combine_1_to_3(address, length) ^ flip)
    return _avalanche_xxh64(seed ^ _secret(56) ^ _secret(64))


@_inlined
def _short_64(address, length, seed):
    if length <= 16:
        return _short_64_to_16(address, length, seed)
    end = address + length
    h = U64(length) * P64_1
    if length <= 128:
        # Pairs from both ends towards the middle; short inputs let them overlap.
        for pair in range((length - 1) >> 5, -1, -1):
            h += _mix16(address + 16 * pair, 32 * pair, seed)
            h += _mix16(end - 16 * (pair + 1), 32 * pair + 16, seed)
        return _avalanche(h)
    for chunk in range(8):
        h += _mix16(address + 16 * chunk, 16 * chunk, seed)
    h = _avalanche(h)
    for chunk in range(8, length >> 4):
        h += _mix16(address + 16 * chunk, 16 * (chunk - 8) + 3, seed)
    h += _mix16(end - 16, 119, seed)
    return _avalanche(h)


@_inlined
def _short_128_to_16(address, length, seed):
    if length > 8:
        low = load64(address)
        high = load64(address + length - 8)
        flipped = low ^ high ^ ((_secret(32) ^ _secret(40)) - seed)
        high ^= (_secret(48) ^ _secret(56)) + seed
        product_low, product_high = multiply128(flipped, P64_1)
        product_low += U64(length - 1) << U64(54)
        product_high += high + (high & LOW_32) * (P32_2 - U64(1))
        product_low ^= _swap64(product_high)
        h_low, h_high = multiply128(product_low, P64_2)
        return _avalanche(h_low), _avalanche(h_high + product_high * P64_2)
    if length >= 4:
        seed = seed ^ (_swap32(seed & LOW_32) << U64(32))
        words = load32(address) + (load32(address + length - 4) << U64(32))
        keyed = words ^ ((_secret(16) ^ _secret(24)) + seed)
        low, high = multiply128(keyed, P64_1 + (U64(length) << U64(2)))
        high += low << U64(1)
        low ^= high >> U64(3)
        low = (low ^ (low >> U64(35))) * MIX_2
        return low ^ (low >> U64(28)), _avalanche(high)
    if length > 0:
        low = _combine_1_to_3(address, length)
        swapped = _swap32(low)
        high = ((swapped << U64(13)) | (swapped >> U64(19))) & LOW_32
        low ^= ((_secret(0) & LOW_32) ^ (_secret(0) >> U64(32))) + seed
        high ^= ((_secret(8) & LOW_32) ^ (_secret(8) >> U64(32))) - seed
        return _avalanche_xxh64(low), _avalanche_xxh64(high)
    low = _avalanche_xxh64(seed ^ _secret(64) ^ _secret(72))
    return low, _avalanche_xxh64(seed ^ _secret(80) ^ _secret(88))


@_inlined
def _short_128(address, length, seed):
    if length <= 16:
        return _short_128_to_16(address, length, seed)
    end = address + length
    low = U64(length) * P64_1
    high = ZERO
    if length <= 128:
        for pair in range((length - 1) >> 5, -1, -1):
            first = address + 16 * pair
            low, high = _mix32(low, high, first, end - 16 * (pair + 1), 32 * pair, seed)
    else:
        for chunk in range(4):
            first = address + 32 * chunk
            low, high = _mix32(low, high, first, first + 16, 32 * chunk, seed)
        low, high = _avalanche(low), _avalanche(high)
        for chunk in range(4, length >> 5):
            first = address + 32 * chunk
            low, high = _mix32(low, high, first, first + 16, 32 * (chunk - 4) + 3, seed)
        low, high = _mix32(low, high, end - 16, end - 32, 103, ZERO - seed)
    h_high = low * P64_1 + high * P64_4 + (U64(length) - seed) * P64_2
    return _avalanche(low + high), ZERO - _avalanche(h_high)


# --- Longer inputs: 8 lanes of state, a secret derived from the seed ----------------------------
#
# `state` is the address of one uint64[32] per kernel call: 8 lanes, then the 24 words of the seeded
# secret. The kernel owns the array and stores to it once more after its loop: numba frees an array
# after the last use of its variable, and using its address does not count. (Passing the array
# down instead costs atomic reference counts, more than the hash of a short key.)


@_inlined
def _new_state(seed):
    state = np.empty(32, dtype=np.uint64)
    for pair in range(12):
        state[8 + 2 * pair] = _secret(16 * pair) + seed
        state[9 + 2 * pair] = _secret(16 * pair + 8) - seed
    return state


@_inlined
def set_secret(state):
    """Make memory the state of a hash with seed 0; state: uint64[32]."""
    for word in range(24):
        state[8 + word] = _secret(8 * word)


@_inlined
def _absorb(state, source, target, length):
    stripes = (length - 1) // STRIPE_BYTES
    last = source + length - STRIPE_BYTES
    copy(state, FIRST_LANES.ctypes.data, 64)
    accumulate(state, source, target, state + 64, stripes)
    if target is not None:
        copied = STRIPE_BYTES * stripes
        copy(target + copied, source + copied, length - copied)
        # The last stripe reaches back over bytes already copied: hash what the target holds.
        last = target + length - STRIPE_BYTES
    accumulate(state, last, None, state + 64 + 121, 1)


@_inlined
def _absorb_streaming(state, source, target, length):
    """As `_absorb`; all but the last blocks, which are read once more, pass by the caches."""
    blocks = (length - 1) // STRIPE_BYTES - 1
    streamed = blocks - blocks % STRIPES_PER_BLOCK
    copy(state, FIRST_LANES.ctypes.data, 64)
    accumulate_streaming(state, source, target, state + 64, streamed)
    done = STRIPE_BYTES * streamed
    stripes = (length - 1) // STRIPE_BYTES - streamed
    accumulate(state, source + done, target + done, state + 64, stripes)
    done += STRIPE_BYTES * stripes
    copy(target + done, source + done, length - done)
    accumulate(state, target + length - STRIPE_BYTES, None, state + 64 + 121, 1)


@_inlined
def _merge(state, secret_offset, start):
    key = state + 64 + secret_offset
    h = start
    for pair in range(0, 64, 16):
        low = load64(state + pair) ^ load64(key + pair)
        h += _fold(low, load64(state + pair + 8) ^ load64(key + pair + 8))
    return _avalanche(h)


@_inlined
def _hash_64(address, length, seed, state):
    if length <= SHORT_BYTES_MAX:
        return _short_64(address, length, seed)
    _absorb(state, address, None, length)
    return _merge(state, 11, U64(length) * P64_1)


@_inlined
def _hash_128(address, length, seed, state):
    if length <= SHORT_BYTES_MAX:
        return _short_128(address, length, seed)
    _absorb(state, address, None, length)
    low = _merge(state, 11, U64(length) * P64_1)
    return low, _merge(state, 117, ~(U64(length) * P64_2))


# --- Kernels ------------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def xxh3_64_ranges(addresses, lengths, seed, out):
    """out[i] = XXH3_64 of `lengths[i]` bytes at `addresses[i]`. O(sum of lengths).

    addresses, lengths: int64[n]; seed: uint64; out: uint64[n].
    """
    owner = _new_state(seed)
    state = owner.ctypes.data
    for i in range(addresses.shape[0]):
        out[i] = _hash_64(addresses[i], lengths[i], seed, state)
    owner[0] = ZERO


@_inlined
def _copy_hashed(source, target, length, streaming, state):
    """Copy one range and return the XXH3_64 of the bytes stored."""
    if length <= SHORT_BYTES_MAX:
        copy(target, source, length)
        return _short_64(target, length, ZERO)
    if streaming != 0 and target % STREAM_ALIGNMENT == 0 and length >= STREAM_BYTES_MIN:
        _absorb_streaming(state, source, target, length)
    else:
        _absorb(state, source, target, length)
    return _merge(state, 11, U64(length) * P64_1)


@njit(cache=True, nogil=True)
def copy_one_xxh3_64(source, target, length, streaming):
    """Copy one range as `copy_xxh3_64` does and return its hash. O(length)."""
    owner = _new_state(ZERO)
    found = _copy_hashed(source, target, length, streaming, owner.ctypes.data)
    if streaming != 0:
        finish_streaming()
    owner[0] = ZERO
    return found


@njit(cache=True, nogil=True)
def xxh3_64_one(address, length):
    """The XXH3_64 of one range. O(length)."""
    owner = _new_state(ZERO)
    found = _hash_64(address, length, ZERO, owner.ctypes.data)
    owner[0] = ZERO
    return found


@njit(cache=True, nogil=True)
def copy_xxh3_64(sources, targets, lengths, out, streaming):
    """Copy each range and put the XXH3_64 (seed 0) of the bytes stored into out[i], in one pass.

    sources, targets, lengths: int64[n], no target overlapping any source or other target;
    out: uint64[n]. streaming: 1 writes past the caches, for batches that do not fit into them.
    O(sum of lengths); every byte is read once and written once.
    """
    owner = _new_state(ZERO)
    state = owner.ctypes.data
    last = sources.shape[0] - 1
    for i in range(last + 1):
        if streaming != 0 and i < last:
            # The processor does not guess where the next one begins.
            for line in range(AHEAD_LINES):
                prefetch(sources[i + 1] + line * LINE_BYTES)
        out[i] = _copy_hashed(sources[i], targets[i], lengths[i], streaming, state)
    if streaming != 0:
        finish_streaming()
    owner[0] = ZERO


@njit(cache=True, nogil=True)
def split_at_zero(blob, offsets):
    """Find the starts of n strings joined by single zero bytes; False if that is not n strings.

    blob: uint8[...]; offsets: int64[n + 1], filled so that string i is
    blob[offsets[i] : offsets[i + 1] - 1], the shape `xxh3_128_strings` takes. O(bytes).
    """
    start = blob.ctypes.data
    end = start + blob.shape[0]
    count = offsets.shape[0] - 1
    offsets[0] = 0
    address = start
    for i in range(1, count):
        address = find_zero(address, end - address) + 1
        if address == 1:
            return False
        offsets[i] = address - start
    offsets[count] = blob.shape[0] + 1
    return find_zero(address, end - address) == 0


@njit(cache=True, nogil=True)
def xxh3_128_strings(seed, blob, offsets, length_max, out):
    """out[i] = XXH3_128 of string i of a blob joined by single separator bytes. O(bytes).

    seed: uint64; blob: uint8[...]; offsets: int64[n + 1], string i is
    blob[offsets[i] : offsets[i + 1] - 1]; out: uint64[n, 2] as (low, high). Returns -1, or the
    index of the first string that is empty or longer than `length_max`, where it stops.
    """
    owner = _new_state(seed)
    state = owner.ctypes.data
    start = blob.ctypes.data
    refused = -1
    for i in range(out.shape[0]):
        length = offsets[i + 1] - 1 - offsets[i]
        if length < 1 or length > length_max:
            refused = i
            break
        out[i, 0], out[i, 1] = _hash_128(start + offsets[i], length, seed, state)
    owner[0] = ZERO
    return refused


@njit(cache=True, nogil=True)
def xxh3_128_chain(address, nbytes, block_bytes, parent_low, parent_high, seed, out):
    """out[i] = XXH3_128(out[i - 1] as 16 little-endian bytes || block i). O(nbytes).

    address, nbytes, block_bytes: int64, contiguous blocks, the last may be shorter;
    parent_low, parent_high: uint64, what stands for out[-1]; seed: uint64; out: uint64[m, 2] as
    (low, high). One block of scratch puts the parent in front of the block.
    """
    owner = _new_state(seed)
    state = owner.ctypes.data
    scratch_owner = np.empty(2 + (block_bytes + 7) // 8, dtype=np.uint64)
    scratch = scratch_owner.ctypes.data
    low, high = parent_low, parent_high
    for i in range(out.shape[0]):
        begin = i * block_bytes
        length = min(block_bytes, nbytes - begin)
        scratch_owner[0], scratch_owner[1] = low, high
        copy(scratch + 16, address + begin, length)
        low, high = _hash_128(scratch, 16 + length, seed, state)
        out[i, 0], out[i, 1] = low, high
    owner[0] = ZERO
    scratch_owner[0] = ZERO


def warmup() -> None:
    """Compile every kernel for the argument types used in production."""
    data = np.zeros(512, dtype=np.uint8)
    addresses = np.full(1, data.ctypes.data, dtype=np.int64)
    targets = addresses + 256
    lengths = np.full(1, 250, dtype=np.int64)
    hashes = np.empty(1, dtype=np.uint64)
    keys = np.empty((1, 2), dtype=np.uint64)
    blob = np.frombuffer(b"key", dtype=np.uint8)
    offsets = np.empty(2, dtype=np.int64)
    xxh3_64_ranges(addresses, lengths, ZERO, hashes)
    copy_xxh3_64(addresses, targets, lengths, hashes, 0)
    copy_one_xxh3_64(int(addresses[0]), int(targets[0]), 250, 0)
    xxh3_64_one(int(addresses[0]), 250)
    split_at_zero(blob, offsets)
    xxh3_128_strings(ZERO, blob, offsets, 64, keys)
    xxh3_128_chain(data.ctypes.data, 128, 128, ZERO, ZERO, ZERO, keys)
