"""The contract of directories: derive a test class, give it a fixture `directory`.

    class TestMine(DirectoryContract):
        @pytest.fixture
        def directory(self): ...          # an empty Directory
        @pytest.fixture
        def other(self, directory): ...   # another client of the same names

Entries of these tests are named below a prefix of their own, so that a server may be shared.
"""

from __future__ import annotations

import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from transfer_engine.directory.base import NAME_BYTES_MAX, VALUE_BYTES_MAX
from transfer_engine.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    StoreError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from transfer_engine.directory.base import Directory

__all__ = ["DirectoryContract"]

_EXPIRY_S = 15.0


def _raised(kind: type[StoreError], call: Callable[[], object]) -> StoreError:
    try:
        got = call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected, not {got!r}")


class DirectoryContract:
    """What every directory must do. Derived classes provide `directory` and `other`."""

    def test_what_is_published_is_found_by_others(
        self, directory: Directory, other: Directory
    ) -> None:
        """Every byte value survives, up to the limit."""
        prefix = secrets.token_hex(4)
        for at, value in enumerate((b"\0", bytes(range(256)), b"x" * VALUE_BYTES_MAX)):
            address = directory.publish(f"{prefix}/{at}", value)
            assert other.lookup(address) == value
            assert directory.lookup(address) == value

    def test_a_name_nobody_published_is_not_found(self, directory: Directory) -> None:
        """The error names what was looked for, and where."""
        missing = directory.address_of(secrets.token_hex(8))
        error = _raised(NotFoundError, lambda: directory.lookup(missing))
        assert missing in str(error)

    def test_a_name_is_not_taken_from_another(self, directory: Directory) -> None:
        """A second value is refused, the first one stays; asked to, it is replaced."""
        name = secrets.token_hex(8)
        address = directory.publish(name, b"first")
        error = _raised(AlreadyExistsError, lambda: directory.publish(name, b"second"))
        assert name in str(error)
        assert directory.lookup(address) == b"first"
        assert directory.publish(name, b"first") == address
        directory.publish(name, b"second", replace=True)
        assert directory.lookup(address) == b"second"

    def test_of_many_at_once_one_gets_the_name(self, directory: Directory) -> None:
        """Publishing is atomic."""
        name = secrets.token_hex(8)
        barrier = threading.Barrier(8)

        def claim(number: int) -> bool:
            barrier.wait(10)
            try:
                directory.publish(name, b"%d" % number)
            except AlreadyExistsError:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(claim, range(8)))
        assert won.count(True) == 1
        assert directory.lookup(directory.address_of(name)) == b"%d" % won.index(True)

    def test_a_withdrawn_name_is_free_again(self, directory: Directory) -> None:
        """Withdrawing tells whether there was something."""
        name = secrets.token_hex(8)
        address = directory.publish(name, b"here")
        assert directory.withdraw(name)
        assert not directory.withdraw(name)
        _raised(NotFoundError, lambda: directory.lookup(address))
        assert directory.publish(name, b"there") == address
        assert directory.lookup(address) == b"there"

    def test_names_are_listed_by_prefix(self, directory: Directory) -> None:
        """Sorted; a prefix is text, not a pattern."""
        prefix = secrets.token_hex(4)
        for tail in ("a/1", "a/2", "ab", "b"):
            directory.publish(f"{prefix}/{tail}", b"x")
        assert directory.names(f"{prefix}/a/") == [f"{prefix}/a/1", f"{prefix}/a/2"]
        assert directory.names(f"{prefix}/a") == [
            f"{prefix}/{tail}" for tail in ("a/1", "a/2", "ab")
        ]
        assert directory.names(f"{prefix}/none") == []
        assert set(directory.names()) >= {f"{prefix}/b"}

    def test_an_entry_ends_unless_it_is_renewed(self, directory: Directory) -> None:
        """The one that is not renewed ends first, by itself."""
        kept, left = secrets.token_hex(8), secrets.token_hex(8)
        directory.publish(left, b"y", ttl_s=1)
        directory.publish(kept, b"x", ttl_s=1)
        directory.publish(kept, b"x", ttl_s=600)
        address = directory.address_of(left)
        ended = threading.Event()
        for _ in range(int(_EXPIRY_S / 0.2)):
            try:
                directory.lookup(address)
            except NotFoundError:
                ended.set()
                break
            ended.wait(0.2)
        assert ended.is_set()
        assert directory.lookup(directory.address_of(kept)) == b"x"
        # The name is free for others.
        directory.publish(left, b"z")

    def test_names_and_values_out_of_bounds_are_refused(self, directory: Directory) -> None:
        """Before anything is asked of anybody."""
        for name in ("", " ", "a b", "../x\n", "*", "a\0b", "x" * (NAME_BYTES_MAX + 1), "é"):
            _raised(InvalidArgumentError, partial(directory.publish, name, b"x"))
            _raised(InvalidArgumentError, partial(directory.withdraw, name))
        for value in (b"", b"x" * (VALUE_BYTES_MAX + 1)):
            _raised(InvalidArgumentError, partial(directory.publish, "a", value))
        for ttl_s in (0.0, -1.0, float("nan"), float("inf")):
            _raised(InvalidArgumentError, partial(directory.publish, "a", b"x", ttl_s=ttl_s))

    def test_threads_share_one(self, directory: Directory) -> None:
        """Every thread finds what it published."""
        prefix = secrets.token_hex(4)

        def work(number: int) -> None:
            for at in range(20):
                value = b"%d-%d" % (number, at)
                address = directory.publish(f"{prefix}/{number}/{at}", value)
                assert directory.lookup(address) == value

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(6)))
        assert len(directory.names(f"{prefix}/")) == 120

    def test_closing_twice_is_harmless(self, directory: Directory, other: Directory) -> None:
        """What was published stays."""
        address = directory.publish(secrets.token_hex(8), b"x")
        other.close()
        other.close()
        assert directory.lookup(address) == b"x"
