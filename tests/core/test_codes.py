"""The plain numbers of the kernels are those of the enumerations users see."""

import pytest

from mooncake_store.core import codes, names, records

INTERNAL = {"RETRY", "SWAP"}


@pytest.mark.parametrize(
    "kind", [records.State, records.Flag, records.Status, records.EventKind, records.Tier]
)
def test_numbers_with_a_name_in_both_are_equal(kind):
    shared = [member for member in kind if hasattr(codes, member.name)]
    assert shared
    for member in shared:
        assert getattr(codes, member.name) == member, member


def test_limits_are_equal():
    assert codes.SIZE_MAX == records.SIZE_MAX
    assert records.ROW["hits"].itemsize * 8 >= codes.HITS_BITS
    assert codes.HITS_MASK + (codes.HITS_WINDOWS << codes.HITS_BITS) < 1 << 16
    lengths = names.Names.of([b"x" * codes.NAME_BYTES_MAX]).lengths
    assert lengths[0] == codes.NAME_BYTES_MAX


def test_internal_statuses_are_no_status():
    numbers = {int(status) for status in records.Status}
    assert not numbers & {getattr(codes, name) for name in INTERNAL}
