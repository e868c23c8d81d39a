"""Whatever is passed to a client, its answer is a result or an error of the store.

Every argument of every public operation of both clients gets every odd value in turn.
"""

import asyncio
import inspect
import itertools
import re

import numpy as np
import pytest

from mooncake_store import AsyncClient, Client
from mooncake_store.client import core
from mooncake_store.errors import InvalidArgumentError, StoreError

ODD = [
    None, True, 0, -1, 3.5, float("nan"), float("inf"), 1 << 70, -1 << 70, "", "x", "\ud800",
    "a" * 100_000, b"", b"x", bytearray(b"y"), memoryview(b"x"), [], [None], ["a", None], [b"a", 1],
    (), {}, {"a": None}, {"a": b"x"}, set(), range(3), iter([]), slice(1), object(), print,
    np.zeros(3), np.array([1]), np.array(["a"]),
]  # fmt: skip
PLAIN = {
    "keys": ["k", "l"], "data": b"v", "value": b"v", "items": {"k": b"v"}, "values": [b"v", b"w"],
    "array": np.arange(3), "buffers": [bytearray(1)] * 2, "buffer": bytearray(1), "size": 1,
    "offset": 0, "soft": True, "target": "m", "targets": ["m", "n"], "action": "retain",
}  # fmt: skip
"""What an argument gets that must be there while another one is odd; "k" where none is here."""

APART = {"close", "aclose", "connect", "follow"}
"""What ends or begins a client, and what has no end."""


def calls(client):
    """(operation, the odd argument, its value, all arguments) for everything that can be called."""
    for name, function in inspect.getmembers(client, callable):
        if name.startswith("_") or name in APART:
            continue
        parameters = inspect.signature(function).parameters.values()
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        named = [parameter for parameter in parameters if parameter.kind not in kinds]
        options = [re.search(r"Unpack\[(\w+)\]", str(each.annotation)) for each in parameters]
        needed = {
            parameter.name: PLAIN.get(parameter.name, "k")
            for parameter in named
            if parameter.default is parameter.empty
        }
        names = [parameter.name for parameter in named]
        for kind in filter(None, options):
            names += getattr(core, kind[1]).__annotations__
        for argument, value in itertools.product(names, ODD):
            yield function, argument, value, needed | {argument: value}


def complaint(function, argument, value, error):
    if isinstance(error, StoreError):
        return []
    return [f"{function.__qualname__}({argument}={value!r:.60}): {error!r:.200}"]


def outcome(function, arguments):
    result = function(**arguments)
    if hasattr(result, "__enter__"):
        with result:
            pass
    elif inspect.isgenerator(result):
        next(result, None)


async def outcome_too(function, arguments):
    result = function(**arguments)
    if inspect.isawaitable(result):
        result = await result
    if hasattr(result, "__aenter__"):
        async with result:
            pass
    elif inspect.isasyncgen(result):
        await anext(result, None)


def test_the_blocking_client_answers_odd_arguments_with_errors_of_its_own(store):
    complaints, count = [], 0
    for function, argument, value, arguments in calls(store):
        count += 1
        try:
            outcome(function, arguments)
        except Exception as error:
            complaints += complaint(function, argument, value, error)
    assert count > 1000
    assert not complaints, "\n".join(complaints)
    assert store.put("still", b"there").outcome == "stored"


def test_so_do_writers(store):
    complaints, count = [], 0
    for function, argument, value, arguments in calls(store.writer("w", 4, upsert=True)):
        count += 1
        with store.writer("w", 4, upsert=True) as writer:
            try:
                outcome(getattr(writer, function.__name__), arguments)
            except Exception as error:
                complaints += complaint(function, argument, value, error)
            writer.revoke()
    assert count > len(ODD)
    assert not complaints, "\n".join(complaints)


def test_so_does_the_one_of_asyncio(url):
    async def walk():
        complaints, count = [], 0
        async with AsyncClient(url) as client:
            for function, argument, value, arguments in calls(client):
                count += 1
                try:
                    await outcome_too(function, arguments)
                except Exception as error:
                    complaints += complaint(function, argument, value, error)
            assert (await client.put("still", b"there")).outcome == "stored"
        return complaints, count

    complaints, count = asyncio.run(walk())
    assert count > 1000
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("shard", [-1, 1, 99, None, "0", 0.5, np.zeros(2)])
def test_a_shard_that_is_none_is_not_followed(url, shard):
    with Client(url) as client, pytest.raises(InvalidArgumentError, match="shard"):
        next(client.follow(shard))

    async def follow():
        async with AsyncClient(url) as client:
            await anext(client.follow(shard))

    with pytest.raises(InvalidArgumentError, match="shard"):
        asyncio.run(follow())
