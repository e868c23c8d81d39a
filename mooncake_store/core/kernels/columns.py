"""The one place where an address becomes an array again (see `context.py` for why).

`column(words, place, kind)` compiles to two loads. What makes it safe: only `Context.bind` writes
addresses, it keeps the columns alive, and columns never move. What it cannot check: that `kind` is
the type the column was bound with; each place has one type, named at its definition.

It is no function but a piece of generated code, because numba lets no function without reference
counting return an array.
"""

from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array


@intrinsic
def column(typing_context, words, place, kind):
    """View the column bound at `place` as an array of `kind`. O(1)."""
    found = types.Array(kind.dtype, 1, "C")

    def build(context, builder, signature, arguments):
        item = context.get_data_type(kind.dtype)
        size = context.get_constant(types.intp, context.get_abi_sizeof(item))
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        after = builder.add(arguments[1], context.get_constant(types.intp, 1))
        address = builder.load(builder.gep(data, [arguments[1]]))
        count = builder.load(builder.gep(data, [after]))
        out = context.make_array(found)(context, builder)
        populate_array(
            out,
            data=builder.inttoptr(address, item.as_pointer()),
            shape=[count],
            strides=[size],
            itemsize=size,
            meminfo=None,
        )
        return out._getvalue()

    return found(words, types.intp, kind), build


def warmup() -> None:
    """Nothing to compile: `column` becomes part of the kernels that use it."""
