"""Calls of libc for kernels that are run as plain Python."""

import ctypes

_LIBC = ctypes.CDLL(None, use_errno=True)


def bare(name, result, *arguments):
    """A function that takes numbers of any kind, as kernels have them."""
    function = getattr(_LIBC, name)
    function.restype, function.argtypes = result, arguments
    return lambda *values: function(*map(int, values))
