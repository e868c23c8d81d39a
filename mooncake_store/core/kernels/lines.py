"""Eight entries of a hash table, one cache line, compared at once.

numba makes a loop over eight entries eight comparisons in a row, and where it ends early the
processor guesses wrong about once a key. `first_equal` is no function but a piece of generated
code: a vector load, a comparison and a count of zero bits, whatever the processor has for them.
`ask_for` is another such piece: a prefetch.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LINE = 8
_PREFETCH = ir.FunctionType(
    ir.VoidType(), [ir.IntType(8).as_pointer(), ir.IntType(32), ir.IntType(32), ir.IntType(32)]
)


@intrinsic
def first_equal(typing_context, table, at, value, shift):
    """First of the eight entries from `at` on with `entry >> shift == value`; LINE if none. O(1).

    The shift is one of an unsigned number. `at` must be a place with eight entries after it.
    """
    found = types.int64

    def build(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        kind, small = ir.VectorType(ir.IntType(64), LINE), ir.IntType(LINE)

        def eight_times(word):
            first = builder.insert_element(kind(ir.Undefined), word, ir.IntType(32)(0))
            places = ir.Constant(ir.VectorType(ir.IntType(32), LINE), [0] * LINE)
            return builder.shuffle_vector(first, kind(ir.Undefined), places)

        where = builder.bitcast(builder.gep(data, [arguments[1]]), kind.as_pointer())
        entries = builder.load(where, align=8)
        shifted = builder.lshr(entries, eight_times(arguments[3]))
        equal = builder.icmp_unsigned("==", shifted, eight_times(arguments[2]))
        bits = builder.zext(builder.bitcast(equal, small), ir.IntType(64))
        return builder.cttz(builder.or_(bits, ir.IntType(64)(1 << LINE)), ir.IntType(1)(1))

    return found(table, types.int64, types.int64, types.int64), build


@intrinsic
def ask_for(typing_context, table, at):
    """Have the line of `table[at]` fetched, without waiting for it. O(1)."""

    def build(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        word = ir.IntType(32)
        where = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        function = builder.module.declare_intrinsic("llvm.prefetch", [where.type], _PREFETCH)
        builder.call(function, [where, word(0), word(3), word(1)])  # to read, keep it, data
        return context.get_dummy_value()

    return types.void(table, types.int64), build


def warmup() -> None:
    """Nothing to compile: all of it becomes part of the kernels that use it."""
