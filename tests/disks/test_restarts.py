"""Workers that start while their disk fails, or after it did: refused for a reason, or as ever."""

import contextlib
import os
import signal

import pytest

from mooncake_store import Client, DiskError
from mooncake_store.errors import StoreError
from tests.disks.site import ANEW, MEMORY, value_of

pytestmark = pytest.mark.slow

KEYS = ["one", "two", "three"]


def found(client):
    """Which objects are there; fails for bytes that are not the object's."""
    there = []
    for key in KEYS:
        with contextlib.suppress(StoreError):
            assert client.get(key) == value_of(key), f"{key} has other bytes"
            there.append(key)
    return there


def refused(program):
    """What a program says that does not start."""
    assert program.wait() not in (0, -signal.SIGKILL, -signal.SIGBUS)
    assert "Traceback" not in program.output
    return program.output


def test_a_worker_does_not_start_on_a_disk_that_fails_and_has_all_once_it_works(own_site):
    site = own_site
    site.put_on_disk(*KEYS)
    site.kill_worker()
    for error, words in (("EIO", "Input/output error"), ("ENOTCONN", "not connected")):
        site.disk.fail(open=(error, "pool"))
        told = refused(site.worker_program())
        assert "pool" in told
        assert words in told
    site.disk.fail(fallocate="ENOSPC")
    told = refused(site.worker_program(name="other", pool="more"))
    assert "more" in told
    assert "No space left" in told
    assert not (site.disk.below / "more").exists()
    site.disk.work()
    site.start_worker()
    assert found(site.client) == KEYS
    site.is_used_again()


def test_a_file_that_was_cut_while_its_worker_was_away_is_lent_anew(own_site):
    site = own_site
    site.put_on_disk(*KEYS)
    site.put("in memory")
    site.kill_worker()
    os.truncate(site.below, 1 << 20)
    told = refused(site.worker_program())
    assert "pool" in told
    site.below.unlink()
    site.start_worker()
    assert found(site.client) == []
    assert site.client.get("in memory") == value_of("in memory")
    site.is_used_again()


def test_a_mount_that_vanishes(own_site):
    """What was open there stays lost: the worker has to be started again once it is back."""
    site = own_site
    site.put_on_disk(*KEYS)
    site.put("in memory")
    site.disk.vanish()
    with Client(site.url, transports=["tcp"]) as far:
        for client in (site.client, far):
            with pytest.raises(DiskError, match="'one'"):
                client.get("one")
    site.demote("in memory")
    site.until_faulty("not connected")
    assert site.readable("in memory") == {MEMORY}
    site.goes_on()
    site.disk.leave()
    site.disk.mount()
    site.kill_worker()
    site.start_worker()
    assert set(found(site.client)) in (set(KEYS), set())
    assert site.client.get("in memory") == value_of("in memory")
    site.is_used_again()


def test_the_record_that_is_read_after_a_start_of_the_host(own_site):
    site = own_site
    site.put_on_disk(*KEYS)
    site.kill_worker()
    for path in site.memory.iterdir():
        path.unlink()
    for operation, words in (("open", "Input/output error"), ("read", "Input/output error")):
        site.disk.fail(**{operation: ("EIO", ".worker")})
        told = refused(site.worker_program(ANEW))
        assert ".worker" in told
        assert words in told
    site.disk.work()
    site.start_worker(ANEW)
    assert found(site.client) == KEYS


def test_a_record_that_cannot_be_written_is_told_and_costs_nothing_while_the_host_runs(own_site):
    site = own_site
    site.kill_worker()
    site.disk.fail(write=("EIO", ".worker"))
    site.start_worker()
    site.worker.wait_for_line("cannot be written (Input/output error)")
    site.put_on_disk(*KEYS)
    assert found(site.client) == KEYS
    site.disk.work()
    site.kill_worker()
    site.start_worker()
    assert found(site.client) == KEYS
