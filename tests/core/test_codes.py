"""The plain numbers of the kernels are those of the enumerations users see."""

import pytest

from mooncake_store.core import _codes, names, records

INTERNAL = {"RETRY", "SWAP"}


@pytest.mark.parametrize("kind", [records.State, records.Flag, records.Status, records.EventKind])
def test_numbers_with_a_name_in_both_are_equal(kind):
    shared = [member for member in kind if hasattr(_codes, member.name)]
    assert shared
    for member in shared:
        assert getattr(_codes, member.name) == member, member


def test_limits_are_equal():
    assert _codes.SIZE_MAX == records.SIZE_MAX
    assert records.ROW["hits"].itemsize * 8 >= _codes.HITS_BITS
    assert _codes.HITS_MASK + (_codes.HITS_WINDOWS << _codes.HITS_BITS) < 1 << 16
    lengths = names.Names.of([b"x" * _codes.NAME_BYTES_MAX]).lengths
    assert lengths[0] == _codes.NAME_BYTES_MAX


def test_internal_statuses_are_no_status():
    numbers = {int(status) for status in records.Status}
    assert not numbers & {getattr(_codes, name) for name in INTERNAL}
