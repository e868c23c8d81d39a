"""Calls that fail leave nothing to the garbage collector: what they held is free when they end."""

import pytest

from mooncake_store.errors import StoreError
from mooncake_store.fs import MooncakeFileSystem
from mooncake_store.units import MIB

LARGE = bytes(2 * MIB)


def failing(fs):
    """Calls of every kind, none of which can succeed."""
    return [
        lambda: fs.cat_file("missing"),
        lambda: fs.cat_file("missing", start=1, end=2),
        lambda: fs.cat_file("broken"),
        lambda: fs.cat_file("broken", start=1, end=20_000),
        lambda: fs.cat(["there", "missing"]),
        lambda: fs.cat_ranges(["missing"], 0, 10, on_error="raise"),
        lambda: fs.pipe_file("there", LARGE, mode="create"),
        lambda: fs.pipe({"there": b"one", "other": LARGE}, mode="create"),
        lambda: fs.mv("missing", "new"),
        lambda: fs.cp_file("broken", "new"),
        lambda: fs.rm_file("missing"),
        lambda: fs.open("missing", "rb"),
    ]


def fail_all(calls):
    """Make calls none of which may succeed."""
    for call in calls:
        try:
            call()
        except (OSError, StoreError):
            continue
        pytest.fail("the call succeeded")


def test_failures_leave_nothing(url, leftovers):
    fs = MooncakeFileSystem(url, part_size="4KiB", skip_instance_cache=True)
    fs.pipe_file("there", b"content")
    fs.pipe_file("broken", bytes(20_000))
    part = next(fs.client.scan("\0"))
    fs.client.remove(part.key, force=True)
    calls = failing(fs)
    fail_all(calls)  # the first call of a kind may make what stays
    leftovers()
    fail_all(calls)
    assert leftovers() == set()
    fs.close()


def test_a_read_of_many_parts_that_fails_leaves_nothing(url, leftovers, monkeypatch):
    fs = MooncakeFileSystem(url, part_size="4KiB", skip_instance_cache=True)
    fs.pipe_file("file", bytes(20_000))
    refused = PermissionError(13, "refused")

    def read():
        with fs.open("file", "rb") as file:
            monkeypatch.setattr("mooncake_store.fs.files.Gather.fetch", refuse)
            try:
                file.read()
            except PermissionError:
                pass
            else:
                pytest.fail("the read succeeded")
            finally:
                monkeypatch.undo()

    def refuse(gather):
        yield from ()
        gather.failures["part"] = refused

    read()
    leftovers()
    read()
    assert not leftovers() & {"PermissionError", "frame", "traceback"}
    fs.close()
