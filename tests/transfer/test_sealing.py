"""What is sealed opens with its key at its place, or not at all; and a segment that seals."""

import itertools
import re
import sys

import fsspec
import pytest
from xxhash import xxh3_64_intdigest

from tests.transfer.test_cold import MIB, bf16, data, files, opened, read, write
from transfer_engine.base import DISK_FAILED, FAILED
from transfer_engine.errors import AuthError, ChecksumMismatchError, ConfigError
from transfer_engine.segments import cold
from transfer_engine.segments.extents import found_in
from transfer_engine.segments.forms import Forms
from transfer_engine.segments.sealing import SEAL_BYTES, KeyRing, keys_of

DAMAGED = ChecksumMismatchError.code
A, B, C = "a1" * 32, "b2" * 32, "c3" * 32
numbers = itertools.count()


def ring(**keys):
    others = keys.pop("others", None)
    keys |= {} if others is None else {"*": others}
    lines = [f'"{name}" = {given!r}'.replace("'", '"') for name, given in keys.items()]
    return KeyRing.parse("\n".join(lines), "keys.toml")


@pytest.fixture
def url():
    return f"memory://sealed{next(numbers)}"


def stored(url):
    """The names and bytes of all files."""
    fs = fsspec.core.url_to_fs(url)[0]
    return {name: fs.cat_file(name) for name in files(url)}


# -- keys


@pytest.mark.parametrize("nbytes", [0, 1, 1000, MIB])
def test_what_is_sealed_is_opened_by_its_key_for_its_place_only(nbytes):
    keys, plain = ring(one=A, two=B), data(nbytes)
    key = keys.of("one")
    sealed = key.seal(b"here", plain)
    assert len(sealed) == nbytes + SEAL_BYTES
    assert keys.by_id(key.id).open(b"here", sealed) == plain
    assert key.open(b"there", sealed) is None
    assert keys.of("two").open(b"here", sealed) is None
    for at in {0, 15, 16, len(sealed) - 1}:
        other = bytearray(sealed)
        other[at] ^= 1
        assert key.open(b"here", bytes(other)) is None
    assert key.open(b"here", sealed[:-1]) is None
    assert key.open(b"here", sealed[:10]) is None


def test_the_same_bytes_are_never_sealed_the_same_way():
    key = ring(one=A).of("one")
    sealed = {key.seal(b"here", b"the same" * 10) for _ in range(100)}
    assert len(sealed) == 100
    assert len({each[:16] for each in sealed}) == 100
    assert len({each[16:32] for each in sealed}) == 100


def test_the_first_key_of_a_namespace_seals_and_all_open():
    old, new = ring(one=A), ring(one=[B, A], others=C)
    sealed = old.of("one").seal(b"here", b"since long")
    assert new.of("one").id == ring(x=B).of("x").id != old.of("one").id
    assert new.by_id(old.of("one").id).open(b"here", sealed) == b"since long"
    assert new.of("other").id == ring(x=C).of("x").id
    assert old.of("other") is None
    assert old.lacking([new.of("one").id, old.of("one").id]) == [new.of("one").id]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "no keys"),
        ("one = ", "no TOML"),
        (f'one = "{A[1:]}"', "the key of 'one'"),
        (f'one = "{A[1:]}g"', "the key of 'one'"),
        (f'one = "{A}\\n"', "the key of 'one'"),
        ("one = 5", "the key of 'one'"),
        ("one = []", "the key of 'one'"),
        (f'one = ["{A}", 1]', "the key of 'one'"),
        (f'[one]\nkey = "{A}"', "the key of 'one'"),
    ],
)
def test_what_is_no_key_is_refused_and_not_shown(text, wrong):
    with pytest.raises(ConfigError, match=re.escape(wrong)) as caught:
        KeyRing.parse(text, "keys.toml")
    assert "keys.toml" in caught.value.what
    assert A[1:] not in str(caught.value)


def test_without_the_package_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(ConfigError, match="needs the package cryptography"):
        ring(one=A)


# -- segments


@pytest.mark.parametrize("smaller", [False, True])
def test_a_store_elsewhere_sees_neither_bytes_nor_their_checksums(url, smaller):
    values, other = bf16(5 * MIB), b"a secret of somebody " * 1000
    with opened(url, smaller=smaller, keys=ring(others=A)) as segment:
        assert write(segment, (0, values), (16 * MIB, other)) == [0, 0]
        assert read(segment, (0, len(values)), (16 * MIB, len(other))) == [(0, values), (0, other)]
        at = 4 * MIB - 7
        assert read(segment, (at, MIB), (16 * MIB + 5, 50)) == [
            (0, values[at : at + MIB]),
            (0, other[5:55]),
        ]
        found = stored(url)
        assert not any(b"secret" in each for each in found.values())
        total = f"{xxh3_64_intdigest(other):016x}"
        assert not [name for name in found if total in name]
        assert (sum(map(len, found.values())) < 0.8 * len(values)) == smaller
    with opened(f"{url}/open") as unsealed:
        write(unsealed, (0, other))
        assert total in files(f"{url}/open")[0]
    with opened(url, uuid=segment.uuid, keys=ring(others=A)) as again:
        assert again.extents == 2
        assert read(again, (0, len(values)), (16 * MIB, len(other))) == [(0, values), (0, other)]


def test_each_namespace_is_sealed_by_its_own_key_and_none_without(url):
    keys = ring(one=A, two=B)
    with opened(url, keys=keys) as segment:
        parts = [(n * MIB, data(1000, n)) for n in range(4)]
        assert write(segment, *parts, of=["one", "two", "three", "one"]) == [
            0,
            0,
            AuthError.code,
            0,
        ]
        assert "there is no key for 'three'" in segment.health.fault
        ids = [found_in(name.rpartition("/")[2]).extent.key for name in files(url)]
        assert sorted(ids) == sorted([keys.of("one").id] * 2 + [keys.of("two").id])
        assert read(segment, (0, 1000), (3 * MIB, 1000)) == [(0, parts[0][1]), (0, parts[3][1])]
    with opened(url, uuid=segment.uuid, keys=ring(one=A)) as again:  # the key of two was destroyed
        assert "1 extents are sealed by keys that are not here" in again.health.fault
        assert keys.of("two").id in again.health.fault
        found = read(again, (0, 1000), (MIB, 1000))
        assert found[0] == (0, parts[0][1])
        assert found[1][0] == DISK_FAILED
    with opened(url, uuid=segment.uuid) as again:  # no key at all, and what is new is not sealed
        assert "3 extents are sealed" in again.health.fault
        assert read(again, (0, 1000))[0][0] == DISK_FAILED
        assert write(again, (0, b"open")) == [0]
        assert read(again, (0, 4)) == [(0, b"open")]


def test_keys_come_and_go_while_a_segment_is_used(url, monkeypatch):
    monkeypatch.setattr(cold, "TOLD_S", 0.0)
    keys = ring(one=A)
    with opened(url, keys=keys) as segment:
        parts = [(n * MIB, data(1000, n)) for n in range(3)]
        assert write(segment, *parts[:2], of=["one", "two"]) == [0, AuthError.code]
        assert "there is no key for 'two'" in segment.health.fault
        keys.hold({"one": keys_of([bytes.fromhex(A)]), "two": keys_of([bytes.fromhex(B)])})
        segment.tend()
        assert not segment.health.fault
        assert write(segment, *parts[1:], of=["two", "two"]) == [0, 0]
        keys.hold({"two": keys_of([bytes.fromhex(B)])})  # the key of one was destroyed
        segment.tend()
        assert "1 extents are sealed by keys that are not here" in segment.health.fault
        found = read(segment, *((start, 1000) for start, _ in parts))
        assert found[0][0] == DISK_FAILED
        assert found[1:] == [(0, parts[1][1]), (0, parts[2][1])]
        segment.forget(segment.after(0, 1))
        segment.tend()
        assert not segment.health.fault


def test_what_loses_its_key_on_its_way_is_not_written(url, monkeypatch):
    keys, began = ring(one=A), []
    stored = Forms.stored

    def taken_away(*given):
        began.append(keys.hold({"other": keys_of([bytes.fromhex(B)])}))
        return stored(*given)

    monkeypatch.setattr(Forms, "stored", taken_away)
    with opened(url, keys=keys) as segment:
        assert write(segment, (0, data(1000)), of=["one"]) == [FAILED]
        assert began
        assert not segment.health.fault  # the store did nothing
        assert not files(url)
        assert segment.extents == 0


def test_a_key_that_was_replaced_opens_what_it_sealed(url):
    with opened(url, keys=ring(others=A)) as segment:
        write(segment, (0, b"old"), (MIB, b"older"))
    with opened(url, uuid=segment.uuid, keys=ring(others=[B, A])) as again:
        assert not again.health.fault
        assert write(again, (0, b"new")) == [0]
        assert read(again, (0, 3), (MIB, 5)) == [(0, b"new"), (0, b"older")]
        again.tend()
        assert len({name[-16:] for name in files(url)}) == 2


@pytest.mark.parametrize("harm", ["changed", "cut", "another's place", "of another segment"])
def test_what_is_not_what_was_sealed_here_is_never_given(url, harm):
    keys = ring(others=A)
    fs = fsspec.core.url_to_fs(url)[0]
    with opened(url, keys=keys) as segment, opened(url, keys=keys) as other:
        for each, seed in ((segment, 1), (other, 5)):
            each._number = 7  # as where a clock went back
            assert write(each, (0, data(1000, seed)), (MIB, data(1000, seed + 1))) == [0, 0]
        first, second = (name for name in files(url) if segment.uuid.hex() in name)
        theirs = first.replace(segment.uuid.hex(), other.uuid.hex())
        good = fs.cat_file(first)
        fs.pipe_file(
            first,
            {
                "changed": good[:500] + bytes([good[500] ^ 1]) + good[501:],
                "cut": good[:-1],
                "another's place": fs.cat_file(second),
                "of another segment": fs.cat_file(theirs),
            }[harm],
        )
        assert read(segment, (0, 1000))[0][0] == DAMAGED
        assert "not what was written" in segment.health.fault
        assert read(segment, (MIB, 1000)) == [(0, data(1000, 2))]
        fs.pipe_file(first, good)
        assert read(segment, (0, 1000)) == [(0, data(1000, 1))]
