"""How long a prefix of a request the store holds: one round trip, no lease, nothing changed.

A prefix of `n` tokens can be restored when every group's blocks that attention would still read
after those tokens are there, on all ranks. With full attention that is every block, and the store
itself counts the leading run (`find_prefix`). With sliding windows only the window's tail is
needed, so presence is asked of all blocks and the longest good prefix is searched from the end.

Cost: one key per block, group and distinct rank; O(keys).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mooncake_store import Client, ReadCosts
    from serving.connectors.vllm.layout import Group, Layout

__all__ = ["block_names", "longest_prefix", "present_prefix"]


def block_names(layout: Layout, group: Group, hashes: Sequence[bytes], suffix: str) -> list[str]:
    """The keys that tell whether blocks are there: all ranks of the first block, of the next..."""
    parts = layout.parts(group)
    return [f"{part}{each.hex()}{suffix}" for each in hashes for part in parts]


def present_prefix(
    layout: Layout,
    hashes: list[bytes],
    start: int,
    suffix: str,
    trusted: Callable[[int, bytes], bool],
    token_s: float = 0.0,
) -> Callable[[Client, float], int]:
    """Prepare a lookup: how many tokens from `start` on can be restored.

    `start` is a multiple of every group's block. Hashes that `trusted` refuses end the prefix.
    With `token_s`, the seconds in which a token is computed, it is no longer than loads in the time
    in which it would be computed; of several groups the whole of it, or nothing. What would do so
    only if a slow segment had become quick again is tried with little.
    """
    wanted: list[tuple[Group, list[bytes]]] = []
    for group in layout.groups:
        first = start // group.block_tokens
        count = len(hashes) // group.hashes_per_block
        wanted.append(
            (group, [layout.block_hash(group, hashes, block) for block in range(first, count)])
        )
    if len(wanted) == 1 and not wanted[0][0].window:
        group, blocks = wanted[0]
        good = next(
            (at for at, each in enumerate(blocks) if not trusted(group.number, each)), len(blocks)
        )
        names = block_names(layout, group, blocks[:good], suffix)
        shards = len(layout.parts(group))

        def leading(client: Client, deadline: float) -> int:
            if not names:
                return 0
            if token_s:
                each_s = token_s * group.block_tokens / shards
                costs = client.read_cost(names, deadline=deadline)
                found = costs.fitting(each=each_s, step=shards)
            else:
                found = client.find_prefix(names, deadline=deadline)
            return found // shards * group.block_tokens

        return leading

    def matching(client: Client, deadline: float) -> int:
        names = [
            name for group, blocks in wanted for name in block_names(layout, group, blocks, suffix)
        ]
        if not names:
            return 0
        costs = client.read_cost(names, deadline=deadline) if token_s else None
        if costs is not None:
            found = (costs.statuses == 0).tolist()
        else:
            found = client.exists_many(names, deadline=deadline).tolist()
        present: list[list[bool]] = []
        at = 0
        for group, blocks in wanted:
            shards = len(layout.parts(group))
            column = []
            for each in blocks:
                column.append(all(found[at : at + shards]) and trusted(group.number, each))
                at += shards
            present.append(column)
        tokens = longest_prefix(layout, present, start)
        if costs is None:
            return tokens - start
        return _worthwhile(layout, wanted, present, costs, start, tokens, token_s)

    return matching


def _worthwhile(
    layout: Layout,
    wanted: list[tuple[Group, list[bytes]]],
    present: list[list[bool]],
    costs: ReadCosts,
    start: int,
    tokens: int,
    token_s: float,
) -> int:
    """How many tokens of a prefix to load: all, none, or some to find out."""

    def seconds(tokens: int, *, measured: bool) -> float:
        needed = _needed(layout, wanted, start, tokens)
        return costs.together(needed, measured=measured)

    worth = (tokens - start) * token_s
    if seconds(tokens, measured=True) <= worth:
        return tokens - start
    if seconds(tokens, measured=False) > worth:
        return 0
    # As much as is restored at once: should it be as slow as before, little is lost.
    few = layout.step_tokens
    first = [
        column[: few // group.block_tokens]
        for (group, _), column in zip(wanted, present, strict=True)
    ]
    return longest_prefix(layout, first, start) - start


def _needed(
    layout: Layout, wanted: list[tuple[Group, list[bytes]]], start: int, tokens: int
) -> list[int]:
    """Which of the names of all groups are loaded for a prefix of so many tokens."""
    needed: list[int] = []
    at = 0
    for group, blocks in wanted:
        before, shards = start // group.block_tokens, len(layout.parts(group))
        first = max(before, group.first_needed(tokens)) - before
        end = tokens // group.block_tokens - before
        needed += range(at + first * shards, at + end * shards)
        at += len(blocks) * shards
    return needed


def longest_prefix(layout: Layout, present: list[list[bool]], start: int) -> int:
    """The most tokens that all groups can restore; `present[g]` begins with the block at `start`.

    Blocks before `start` are in the engine's own memory. O(blocks) a step of the search.
    """
    step = layout.step_tokens
    most = min(
        start + len(column) * group.block_tokens
        for group, column in zip(layout.groups, present, strict=True)
    )
    runs = [_run_ends(column) for column in present]
    for tokens in range(most // step * step, start, -step):
        if all(
            _restorable(group, run, start, tokens)
            for group, run in zip(layout.groups, runs, strict=True)
        ):
            return tokens
    return start


def _run_ends(column: list[bool]) -> list[int]:
    """For each position, where the run of present blocks that ends before it begins."""
    begins = [0]
    for at, there in enumerate(column):
        begins.append(begins[-1] if there else at + 1)
    return begins


def _restorable(group: Group, run: list[int], start: int, tokens: int) -> bool:
    first = start // group.block_tokens
    needed = max(group.first_needed(tokens) - first, 0)
    return run[tokens // group.block_tokens - first] <= needed
