"""Tensors and arrays in and out of the store, as steps; their format is in `tensors.py`.

A put is a session of two ranges, header and elements, so that the elements are not copied first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mooncake_store.client import tensors
from mooncake_store.client._core import PutOptions, check_options
from mooncake_store.client._keys import KeyBatch
from mooncake_store.client._sessions import Session
from mooncake_store.client.results import PutResult
from mooncake_store.errors import AlreadyExistsError, StoreError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.client._core import Core, ReadOptions
    from mooncake_store.client._keys import Key
    from mooncake_store.client._operations import Operations
    from mooncake_store.client._steps import Steps

__all__ = ["get_array", "get_tensor", "put_array", "put_tensor"]


def put_array(core: Core, key: Key, array: NDArray[Any], options: PutOptions) -> Steps[PutResult]:
    """Store a numpy array."""
    header, elements = tensors.describe_array(array)
    return (yield from _put(core, key, header, elements, elements.nbytes, options))


def put_tensor(core: Core, key: Key, tensor: Any, options: PutOptions) -> Steps[PutResult]:
    """Store a torch tensor."""
    header, elements = tensors.describe_tensor(tensor)
    nbytes = elements.numel() * elements.element_size()
    return (yield from _put(core, key, header, elements, nbytes, options))


def _put(
    core: Core, key: Key, header: bytes, elements: Any, nbytes: int, options: PutOptions
) -> Steps[PutResult]:
    check_options(options, PutOptions)
    until = core.until(options)
    keys = KeyBatch.single(key, core.namespace)
    session = Session(core, keys, len(header) + nbytes, options)
    try:
        yield from session.begin()
    except AlreadyExistsError:
        return PutResult("already_present")
    try:
        yield from session.write(0, header, until)
        if nbytes:
            yield from session.write(len(header), elements, until)
        return (yield from session.commit(until))
    except StoreError:
        yield from session.revoke()
        raise


def get_array(operations: Operations, key: Key, options: ReadOptions) -> Steps[NDArray[Any]]:
    """Read a numpy array."""
    data = yield from operations.get_memory(key, options)
    return tensors.decode_array(data)


def get_tensor(operations: Operations, key: Key, options: ReadOptions) -> Steps[Any]:
    """Read a torch tensor."""
    data = yield from operations.get_memory(key, options)
    return tensors.decode_tensor(data)
