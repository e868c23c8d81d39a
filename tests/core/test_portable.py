"""Objects as columns, and in words: nothing that does not fit is taken, and nothing is lacking."""

from __future__ import annotations

import numpy as np
import pytest

from mooncake_store.core.cell_text import About
from mooncake_store.core.portable import Objects, cells_of, objects_of, readable_rows
from tests.core.lab import digests_of
from tests.core.test_journal import Life


def some_objects() -> Objects:
    """Two plain objects, one of two replicas, one of a group with a pin."""
    life = Life()
    life.put([1, 2])
    life.put([3], replicas=2, tagged=True)
    life.put([4], hard_pin=True, groups=("g",))
    (rows,) = readable_rows(life.shard)
    return objects_of(life.shard, rows)


FLAT = {"digests", "segments", "offsets", "names"}
"""Columns that have an entry for something else."""


@pytest.mark.parametrize("name", [name for name in Objects._fields if name != "group_names"])
def test_columns_of_another_length_are_refused(name: str) -> None:
    objects = some_objects()
    objects.check()
    column = getattr(objects, name)
    why = f"^{'checksums' if name == 'sizes' else name} has . entries, not ."
    for wrong in (column[:-1], column + column[:1] if name == "names" else _longer(column)):
        with pytest.raises(ValueError, match="another" if name in FLAT else why):
            objects._replace(**{name: wrong}).check()


def _longer(column: np.ndarray) -> np.ndarray:
    return np.concatenate([column, column[:1]])


def test_an_object_is_told_of_with_its_name_and_all_its_places() -> None:
    objects = some_objects()
    words = np.concatenate(list(cells_of(objects, 0)))
    told = {}
    for key in (1, 3, 4):
        ((_, told[key]),) = About(digests_of([key])[0]).read(words)
    at = np.cumsum(objects.replicas) - objects.replicas
    third = int(np.flatnonzero(objects.replicas == 2)[0])
    places = ", ".join(
        f"{segment}+{offset}"
        for segment, offset in zip(
            objects.segments[at[third] : at[third] + 2],
            objects.offsets[at[third] : at[third] + 2],
            strict=True,
        )
    )
    assert f"at {places}, " in told[3]
    for key, text in told.items():
        assert text.endswith(f"named {b'name/' + str(key).encode()!r}".replace("b'", "'"))
    assert "hard_pin" in told[4]
    assert "hard_pin" not in told[1]
