"""The checksums that the store keeps of files, as a plan: content is compared without being read.

An object's checksum is that of its bytes; a file in parts has one for each part. So a file is
described by its spans, and who has another copy computes the same spans of it. Two requests for
a batch of any size, one more where a file is in parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mooncake_store.fs.paths import key_of
from mooncake_store.fs.plan import Call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_store.fs.plan import Plan
    from mooncake_store.fs.plans import Plans

__all__ = ["Span", "sums"]


class Span(NamedTuple):
    """Bytes [first, last) of a file, and their XXH3-64."""

    first: int
    last: int
    checksum: int


def sums(plans: Plans, paths: Sequence[str]) -> Plan[list[list[Span] | None]]:
    """The spans of each file, in order and without gaps; None where any of it is missing."""
    keys = [key_of(path) for path in paths]
    found = yield Call("query_many", (keys,))
    infos = list(found.infos)
    cut = yield from plans.decode(keys, [info.size if info else 0 for info in infos])
    parts = [key for manifest in cut.values() for key in manifest.all_keys()]
    of_parts = iter((yield Call("query_many", (parts,))).infos if parts else ())
    out: list[list[Span] | None] = []
    for at, info in enumerate(infos):
        if at in cut:
            spans = [cut[at].span(number) for number in range(cut[at].count)]
            pieces = [next(of_parts) for _ in spans]
        else:
            spans, pieces = [(0, info.size if info else 0)], [info]
        whole = all(piece is not None for piece in pieces)
        out.append(
            [Span(*span, piece.checksum) for span, piece in zip(spans, pieces, strict=True)]
            if whole
            else None
        )
    return out
