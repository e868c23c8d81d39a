"""What the XXH3 kernels are built from: raw memory and the machine instructions numba lacks.

Load, copy, find, 64x64->128 multiply, accumulate. Each is a plain Python function on addresses
(int64) with an `@overload` that emits LLVM, so every kernel over them also runs through
`.py_func`. Nothing here checks anything.

The loop of long inputs is written as LLVM vectors of 8 x 64 bits, because numba leaves LLVM's SLP
vectoriser off and its loop vectoriser does not see 8 parallel lanes. LLVM lowers it to what the
machine has. It can store each stripe it loaded, which is how a copy is hashed in the same pass:
what is hashed is exactly what was stored, even if the source changes meanwhile.

Copies of much memory should *stream*: store past the caches. A plain store first reads the line it
overwrites, a third of all traffic, and what is written pushes out what is used. Streaming moves
1.4 times as much as memcpy from 256 KiB on (9.4 and 6.6 GB/s on the machine it was tried on). Two
other ways were tried and lost to it: memcpy in pieces of 4 to 64 KiB that are hashed while they
are in the cache (5.5), and prefetching lines for writing (7.1).

Complexity: O(bytes) each.
"""

import ctypes

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

U64 = np.uint64
STRIPE_BYTES = 64
STRIPES_PER_BLOCK = 16
P32_1 = U64(0x9E3779B1)
STREAM_ALIGNMENT = 16
"""Streamed stores go to addresses that are multiples of this, the narrowest vector there is."""
LINE_BYTES = 64
_PREFETCH_BYTES = 1024
_UNROLLED_LINES = 4

_I32, _I64, _I128 = ir.IntType(32), ir.IntType(64), ir.IntType(128)
_POINTER = ir.PointerType()
_LANES = ir.VectorType(_I64, 8)
# Partners of a 128-bit pair trade places: lane i receives the plain data of lane i ^ 1.
_SWAP_PAIRS = ir.Constant(ir.VectorType(_I32, 8), [1, 0, 3, 2, 5, 4, 7, 6])


def _load(address, nbytes):
    return U64(int.from_bytes(ctypes.string_at(int(address), nbytes), "little"))


def load8(address):
    """The byte at an address, as an unsigned number."""
    return _load(address, 1)


def load32(address):
    """The four bytes at an address, as an unsigned number."""
    return _load(address, 4)


def load64(address):
    """The eight bytes at an address, as an unsigned number."""
    return _load(address, 8)


def _compile_load(python_function, bits):
    @intrinsic
    def load(_typing, address):
        def codegen(_context, builder, _signature, arguments):
            pointer = builder.inttoptr(arguments[0], _POINTER)
            value = builder.load(pointer, align=1, typ=ir.IntType(bits))
            return value if bits == 64 else builder.zext(value, _I64)

        return types.uint64(types.int64), codegen

    @overload(python_function)
    def compiled(address):
        return lambda address: load(address)


for _python_function, _bits in ((load8, 8), (load32, 32), (load64, 64)):
    _compile_load(_python_function, _bits)


def multiply128(a, b):
    """The 128-bit product of two unsigned numbers as (low, high)."""
    product = int(a) * int(b)
    return U64(product & 0xFFFFFFFFFFFFFFFF), U64(product >> 64)


@intrinsic
def _multiply128_llvm(_typing, a, b):
    def codegen(context, builder, signature, arguments):
        wide = [builder.zext(argument, _I128) for argument in arguments]
        product = builder.mul(*wide)
        low = builder.trunc(product, _I64)
        high = builder.trunc(builder.lshr(product, _I128(64)), _I64)
        return context.make_tuple(builder, signature.return_type, (low, high))

    return types.UniTuple(types.uint64, 2)(types.uint64, types.uint64), codegen


@overload(multiply128)
def _multiply128_compiled(a, b):
    return lambda a, b: _multiply128_llvm(a, b)


_memcpy = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.uintp))
_memchr = types.ExternalFunction("memchr", types.intp(types.intp, types.int32, types.uintp))


def copy(target, source, nbytes):
    """Copy bytes from one address to another; they must not overlap."""
    ctypes.memmove(int(target), int(source), int(nbytes))


@overload(copy)
def _copy_compiled(target, source, nbytes):
    return lambda target, source, nbytes: _memcpy(target, source, types.uintp(nbytes))


def find_zero(address, nbytes):
    """Address of the first zero byte, or 0."""
    index = ctypes.string_at(int(address), int(nbytes)).find(b"\0")
    return 0 if index < 0 else int(address) + index


@overload(find_zero)
def _find_zero_compiled(address, nbytes):
    return lambda address, nbytes: _memchr(address, types.int32(0), types.uintp(nbytes))


def accumulate(state, source, target, secret, stripes):
    """Mix `stripes` x 64 bytes at `source` into the 8 lanes at `state`; scramble after every 16.

    Unless `target` is None, every stripe read is also stored there.
    """
    if target is not None:
        copy(target, source, STRIPE_BYTES * stripes)
    lanes = (ctypes.c_uint64 * 8).from_address(int(state))
    mask = 0xFFFFFFFFFFFFFFFF
    for stripe in range(stripes):
        offset = 8 * (stripe % STRIPES_PER_BLOCK)
        for lane in range(8):
            data = int(load64(source + STRIPE_BYTES * stripe + 8 * lane))
            keyed = data ^ int(load64(secret + offset + 8 * lane))
            lanes[lane ^ 1] = (lanes[lane ^ 1] + data) & mask
            lanes[lane] = (lanes[lane] + (keyed & 0xFFFFFFFF) * (keyed >> 32)) & mask
        if stripe % STRIPES_PER_BLOCK == STRIPES_PER_BLOCK - 1:
            for lane in range(8):
                value = lanes[lane] ^ (lanes[lane] >> 47) ^ int(load64(secret + 128 + 8 * lane))
                lanes[lane] = (value * int(P32_1)) & mask


def _splat(value):
    return ir.Constant(_LANES, [value] * 8)


def _at(builder, base, offset):
    return builder.gep(base, [offset], source_etype=ir.IntType(8))


def _emit_prefetch(builder, address):
    """Ask for the line at an address; one that is not mapped is ignored."""
    name = "llvm.prefetch.p0"
    function = builder.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(ir.VoidType(), [_POINTER, _I32, _I32, _I32])
        function = ir.Function(builder.module, kind, name)
    reading, keep, data = _I32(0), _I32(3), _I32(1)
    builder.call(function, [address, reading, keep, data])


def _store_streaming(builder, value, address, align):
    store = builder.store(value, address, align=align)
    store.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))


def _emit_stripe(builder, lanes, source, target, key, index, streaming):
    """One stripe: load (and store, when copying), key, multiply halves, add."""
    offset = builder.mul(index, _I64(STRIPE_BYTES))
    if streaming:
        _emit_prefetch(builder, _at(builder, source, builder.add(offset, _I64(_PREFETCH_BYTES))))
    data = builder.load(_at(builder, source, offset), align=1, typ=_LANES)
    if target is not None:
        there = _at(builder, target, offset)
        if streaming:
            _store_streaming(builder, data, there, STREAM_ALIGNMENT)
        else:
            builder.store(data, there, align=1)
    keyed = builder.xor(data, builder.load(key, align=1, typ=_LANES))
    low = builder.and_(keyed, _splat(0xFFFFFFFF))
    product = builder.mul(low, builder.lshr(keyed, _splat(32)))
    return builder.add(builder.add(lanes, builder.shuffle_vector(data, data, _SWAP_PAIRS)), product)


def _emit_scramble(builder, lanes, key):
    mixed = builder.xor(lanes, builder.lshr(lanes, _splat(47)))
    mixed = builder.xor(mixed, builder.load(key, align=1, typ=_LANES))
    return builder.mul(mixed, _splat(int(P32_1)))


def _emit_accumulate(builder, state, source, target, secret, stripes, streaming=False):
    """The loop over blocks of 16 unrolled stripes, then one over the rest; lanes stay in registers.

    Each loop is head (phi index, phi lanes, test) -> body -> head.
    """
    state, source, secret = (builder.inttoptr(a, _POINTER) for a in (state, source, secret))
    target = None if target is None else builder.inttoptr(target, _POINTER)
    lanes = builder.load(state, align=8, typ=_LANES)
    index = _I64(0)
    in_full_blocks = builder.and_(stripes, _I64(-STRIPES_PER_BLOCK))
    for step, bound in ((STRIPES_PER_BLOCK, in_full_blocks), (1, stripes)):
        entry = builder.block
        head, body, after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
        builder.branch(head)
        builder.position_at_end(head)
        phi_index, phi_lanes = builder.phi(_I64), builder.phi(_LANES)
        phi_index.add_incoming(index, entry)
        phi_lanes.add_incoming(lanes, entry)
        builder.cbranch(builder.icmp_signed("<", phi_index, bound), body, after)
        builder.position_at_end(body)
        lanes = phi_lanes
        for unrolled in range(step):
            index = builder.add(phi_index, _I64(unrolled))
            in_block = builder.and_(index, _I64(STRIPES_PER_BLOCK - 1))
            key = _at(builder, secret, builder.mul(in_block, _I64(8)))
            lanes = _emit_stripe(builder, lanes, source, target, key, index, streaming)
        if step == STRIPES_PER_BLOCK:
            lanes = _emit_scramble(builder, lanes, _at(builder, secret, _I64(128)))
        phi_index.add_incoming(builder.add(phi_index, _I64(step)), body)
        phi_lanes.add_incoming(lanes, body)
        builder.branch(head)
        builder.position_at_end(after)
        index, lanes = phi_index, phi_lanes
    builder.store(lanes, state, align=8)


@intrinsic
def _accumulate_llvm(_typing, state, source, target, secret, stripes):
    def codegen(context, builder, signature, arguments):
        state, source, target, secret, stripes = arguments
        if signature.args[2] == types.none:
            target = None
        _emit_accumulate(builder, state, source, target, secret, stripes)
        return context.get_dummy_value()

    target_type = types.none if target == types.none else types.int64
    return types.void(types.int64, types.int64, target_type, types.int64, types.int64), codegen


@overload(accumulate)
def _accumulate_compiled(state, source, target, secret, stripes):
    return lambda state, source, target, secret, stripes: _accumulate_llvm(
        state, source, target, secret, stripes
    )


def accumulate_streaming(state, source, target, secret, stripes):
    """The same, storing past the caches; `target` is aligned to STREAM_ALIGNMENT.

    The stores are ordered before later ones only by `finish_streaming`.
    """
    accumulate(state, source, target, secret, stripes)


@intrinsic
def _accumulate_streaming_llvm(_typing, state, source, target, secret, stripes):
    def codegen(context, builder, signature, arguments):
        _emit_accumulate(builder, *arguments, streaming=True)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@overload(accumulate_streaming)
def _accumulate_streaming_compiled(state, source, target, secret, stripes):
    return lambda state, source, target, secret, stripes: _accumulate_streaming_llvm(
        state, source, target, secret, stripes
    )


def prefetch(address):
    """Ask for the line at an address, which need not be mapped."""


@intrinsic
def _prefetch_llvm(_typing, address):
    def codegen(context, builder, signature, arguments):
        _emit_prefetch(builder, builder.inttoptr(arguments[0], _POINTER))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@overload(prefetch)
def _prefetch_compiled(address):
    return lambda address: _prefetch_llvm(address)


def copy_streaming(target, source, nbytes):
    """Copy bytes as `copy` does, storing past the caches; ordered only by `finish_streaming`."""
    copy(target, source, nbytes)


def _emit_copy_streaming(builder, target, source, nbytes):
    """Copy whole groups of lines to an address that is the first of a line.

    Without prefetching: the processor finds the next lines itself, and asking for them so that
    they pass by the second cache took away most of what streaming brings.
    """
    target, source = (builder.inttoptr(address, _POINTER) for address in (target, source))
    entry = builder.block
    head, body, after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(_I64)
    index.add_incoming(_I64(0), entry)
    builder.cbranch(builder.icmp_signed("<", index, nbytes), body, after)
    builder.position_at_end(body)
    offsets = [builder.add(index, _I64(LINE_BYTES * line)) for line in range(_UNROLLED_LINES)]
    lines = []
    for offset in offsets:
        lines.append(builder.load(_at(builder, source, offset), align=1, typ=_LANES))
    for offset, line in zip(offsets, lines, strict=True):
        _store_streaming(builder, line, _at(builder, target, offset), LINE_BYTES)
    index.add_incoming(builder.add(index, _I64(LINE_BYTES * _UNROLLED_LINES)), body)
    builder.branch(head)
    builder.position_at_end(after)


@intrinsic
def _copy_streaming_llvm(_typing, target, source, nbytes):
    def codegen(context, builder, _signature, arguments):
        _emit_copy_streaming(builder, *arguments)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@overload(copy_streaming)
def _copy_streaming_compiled(target, source, nbytes):
    def compiled(target, source, nbytes):
        # Up to the first line of the target, the lines, and what is left.
        head = min(-target & (LINE_BYTES - 1), nbytes)
        copy(target, source, head)
        lines = (nbytes - head) & -(LINE_BYTES * _UNROLLED_LINES)
        _copy_streaming_llvm(target + head, source + head, lines)
        done = head + lines
        copy(target + done, source + done, nbytes - done)

    return compiled


def finish_streaming():
    """Order what was streamed before every store that follows."""


@intrinsic
def _fence_llvm(_typing):
    def codegen(context, builder, signature, arguments):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@overload(finish_streaming)
def _finish_streaming_compiled():
    return lambda: _fence_llvm()


def take_word(address):
    """Make the word at an address 1 if it is 0; whether it was. A lock, with `leave_word`."""
    word = ctypes.c_int64.from_address(int(address))
    free = word.value == 0
    if free:
        word.value = 1
    return free


@intrinsic
def _take_word_llvm(_typing, address):
    def codegen(_context, builder, _signature, arguments):
        pointer = builder.inttoptr(arguments[0], _POINTER)
        taken = builder.cmpxchg(pointer, _I64(0), _I64(1), "acquire", "monotonic")
        return builder.extract_value(taken, 1)

    return types.boolean(types.int64), codegen


@overload(take_word)
def _take_word_compiled(address):
    return lambda address: _take_word_llvm(address)


def leave_word(address):
    """Make the word at an address 0 again, after all that was stored before."""
    ctypes.c_int64.from_address(int(address)).value = 0


@intrinsic
def _leave_word_llvm(_typing, address):
    def codegen(context, builder, _signature, arguments):
        pointer = builder.inttoptr(arguments[0], _POINTER)
        builder.atomic_rmw("xchg", pointer, _I64(0), "release")
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@overload(leave_word)
def _leave_word_compiled(address):
    return lambda address: _leave_word_llvm(address)


def warmup() -> None:
    """Nothing to call: all of it is compiled into the kernels that use it."""
