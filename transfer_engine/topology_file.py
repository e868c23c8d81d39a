"""Cells of the topology matrix from a JSON file, for machines whose firmware says it wrong.

    {"cpu:0": {"rdma": [["mlx5_0"], ["mlx5_1"]], "disk": [["nvme0n1"], []]},
     "cuda:0": [["mlx5_0"], ["mlx5_1"]]}

A cell is two lists, preferred and secondary; a row that is a cell itself is its `rdma` cell, which
is how the original writes the file. What `mooncake topology --json` prints is accepted whole: its
"matrix" is read. Locations and cells that are left out stay as they were found.

Every name is checked against the machine, and the nearest right one is suggested: a misspelt card
would otherwise be a card that is silently never used.
Cost: O(size of the file), which is bounded.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transfer_engine.errors import ConfigError
from transfer_engine.topology import KINDS, Preference

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from transfer_engine.topology import Topology

__all__ = ["FILE_BYTES_MAX", "load_overrides"]

FILE_BYTES_MAX = 1 << 20


def load_overrides(found: Topology, path: str | os.PathLike[str]) -> Topology:
    """Return the topology with the cells of a file; raises ConfigError naming what is wrong."""
    place = Path(path)
    try:
        with place.open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the topology file {place}: {error.strerror}") from error
    if len(text) > FILE_BYTES_MAX:
        raise ConfigError(f"the topology file {place} is larger than {FILE_BYTES_MAX} bytes")
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the topology file {place} is not JSON: {error}") from error
    if isinstance(plain, dict) and "matrix" in plain:
        plain = plain["matrix"]
    reader = _Reader(found, str(place))
    return found.with_overrides(reader.rows(plain), str(place))


class _Reader:
    """Checks one file against one machine."""

    def __init__(self, found: Topology, source: str) -> None:
        self._found = found
        self._source = source

    def rows(self, plain: Any) -> dict[str, dict[str, Preference]]:
        """Return the cells of the file by location and kind."""
        if not isinstance(plain, dict) or not plain:
            raise self._wrong("must hold an object of locations")
        rows = {}
        for location, row in plain.items():
            self._known(location, self._found.locations, "a location")
            cells = {"rdma": row} if isinstance(row, list) else row
            if not isinstance(cells, dict):
                raise self._wrong(f"{location}: must be an object of cells, or one cell")
            rows[location] = {
                self._known(kind, KINDS, f"{location}: a kind of device"): self._cell(
                    f"{location}: {kind}", kind, cell
                )
                for kind, cell in cells.items()
            }
        return rows

    def _cell(self, where: str, kind: str, cell: Any) -> Preference:
        lists = isinstance(cell, list) and len(cell) == 2
        if not lists or not all(isinstance(part, list) for part in cell):
            raise self._wrong(f"{where}: must be two lists, preferred and secondary devices")
        names = [device.name for device in self._found.of_kind(kind)]
        seen: set[str] = set()
        for name in (*cell[0], *cell[1]):
            self._known(name, names, f"{where}: a device")
            if name in seen:
                raise self._wrong(f"{where}: {name!r} is listed twice")
            seen.add(name)
        return Preference(tuple(cell[0]), tuple(cell[1]))

    def _known(self, name: object, names: Iterable[str], what: str) -> str:
        names = list(names)
        if isinstance(name, str) and name in names:
            return name
        near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.4)
        there = ", ".join(names) if names else "none"
        advice = f"did you mean {near[0]!r}?" if near else f"this machine has {there}"
        raise self._wrong(f"{what} is named {name!r}, which this machine does not have", advice)

    def _wrong(self, what: str, advice: str = "see `mooncake topology --json`") -> ConfigError:
        return ConfigError(f"topology file {self._source}: {what}", advice=advice)
