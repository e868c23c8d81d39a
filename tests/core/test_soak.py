"""Runs of the soak (`make soak`): the shard against its model, with batches of all sizes."""

from __future__ import annotations

import pytest

from tests.soak.core import soak
from tests.sweeps import sweep


# Nothing but computing: a busy machine takes many times as long.
@pytest.mark.timeout(900)
@sweep(("seed", "first"), [(1, 10_000), (2, 66_000), (3, 86_000), (5, 82_000)], usual=1)
def test_a_chunk_of_the_soak_agrees_with_the_model(seed: int, first: int) -> None:
    assert soak(seed, steps=first + 2_000, only=first, check_every=10)


@pytest.mark.timeout(900)
def test_a_foreign_writer_who_knows_all_digests_changes_nothing_of_others() -> None:
    assert soak(1, steps=2_000, only=0, check_every=10, among="foreign")
