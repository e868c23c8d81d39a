"""Kernels do the same compiled and as plain Python, byte for byte of their state."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from alloc import Allocator, create_allocator
from alloc.kernels import extents, rebuild, slabs
from alloc.testing import ints

if TYPE_CHECKING:
    from types import ModuleType

MODULES = (extents, slabs, rebuild)


def trace(allocator: Allocator) -> list[int]:
    """A course of calls that finds, opens, empties and dissolves slabs, and splits hash buckets."""
    rng = random.Random(11)
    table = np.array([at for at in range(0, 1 << 16, 64) if rng.random() < 0.7])
    table.flags.writeable = False
    seen = allocator.reserve(table, np.full(table.size, 64)).tolist()
    live: list[int] = table.tolist()
    for step in range(60):
        size = rng.choice([15, 64, 700, 3000])
        sizes = [size] * 30 + [rng.randrange(1, 30_000) for _ in range(3)]
        got = allocator.allocate(ints(*sizes)).tolist()
        seen += got
        live += [offset for offset in got if offset >= 0]
        rng.shuffle(live)
        gone = live[: len(live) // (2 if step % 9 else 1)]
        live = live[len(gone) :]
        seen += allocator.free(ints(*gone, 3, -5)).tolist()
        seen += allocator.reserve(ints(rng.randrange(1 << 18)), ints(40)).tolist()
    return [int(value) for value in seen]


def in_python(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Replace every kernel of a module by the function it was compiled from."""
    for name, value in list(vars(module).items()):
        if hasattr(value, "py_func"):
            monkeypatch.setattr(module, name, value.py_func)


def states(allocator: Any) -> list[np.ndarray[Any, Any]]:
    """Every array of an allocator, and of the extents below its slabs."""
    below = getattr(allocator, "_extents", None)
    return [*allocator._state, *(below._state if below else ())]


@pytest.mark.parametrize("kind", ["offset", "slab", "composite"])
def test_compiled_and_interpreted_kernels_agree(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = create_allocator(kind, 1 << 18)
    expected = trace(compiled)
    for module in MODULES:
        in_python(monkeypatch, module)
    interpreted = create_allocator(kind, 1 << 18)
    assert trace(interpreted) == expected
    for one, two in zip(states(compiled), states(interpreted), strict=True):
        assert np.array_equal(one, two)


@pytest.mark.parametrize("kind", ["offset", "composite"])
def test_the_warm_up_compiles_all_that_an_allocator_calls(kind: str) -> None:
    for module in MODULES:
        module.warmup()
    before = signatures()
    trace(create_allocator(kind, 1 << 18))
    assert signatures() == before


def signatures() -> dict[str, list[object]]:
    """The argument types each kernel is compiled for."""
    return {
        f"{module.__name__}.{name}": list(value.signatures)
        for module in MODULES
        for name, value in vars(module).items()
        if hasattr(value, "py_func")
    }


def test_bits() -> None:
    for bit in range(62):
        assert extents.log2_floor(1 << bit) == bit
        assert extents.log2_floor((1 << (bit + 1)) - 1) == bit
        if bit < 32:
            assert extents.low_bit(1 << bit) == bit
            assert extents.low_bit((0xFFFFFFFF << bit) & 0xFFFFFFFF) == bit


def test_bins_are_ordered_and_narrow() -> None:
    sizes = sorted({*range(1, 3000), *(int(1.1**power) for power in range(1, 300))})
    bins = [extents.bin_of(units) for units in sizes if units < 1 << 40]
    assert bins == sorted(bins)
    assert max(bins) < extents.LEVELS * extents.BINS
    first: dict[int, int] = {}
    for units, index in zip(sizes, bins, strict=False):
        assert units < first.setdefault(index, units) * 33 / 32 + 1
