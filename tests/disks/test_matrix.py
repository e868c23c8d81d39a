"""Faults of a disk, each at each moment: right bytes or a reason, in time, and the pool goes on.

A range of an object on a disk that lies about its content is left out: checksums are those of
whole objects, so what a range reads there is not compared (docs/operating/durability.md).
"""

import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from mooncake_store import (
    ChecksumMismatchError,
    Client,
    DiskError,
    NotFoundError,
    TransferTimeoutError,
    TruncatedError,
)
from mooncake_store.compat.metrics import metrics
from tests.disks.site import BESIDE, DISK, MEMORY, NBYTES, value_of
from tests.waiting import long_before, until

FAILED, ENDED, DIFFERS = (
    "the disk or store under the segment failed",
    "ended before",
    "checksum differs",
)
READS = {
    "EIO": (DiskError, FAILED),
    "ENOTCONN": (DiskError, FAILED),
    "cut": (TruncatedError, ENDED),
    # Whoever asks again may hear that the pool found it damaged as well, and has it no more.
    "flip": ((ChecksumMismatchError, NotFoundError), DIFFERS),
    "short": (None, ""),
}
numbers = itertools.count()


def names(count):
    """Keys that no other test has."""
    return [f"key-{next(numbers)}" for _ in range(count)]


@pytest.fixture(params=["file", "tcp"])
def client(request, site):
    """One that reads the disk itself, and one that has its worker read it."""
    with (
        Client(site.url, transports=["shm", "file", "tcp"]) as near,
        Client(site.url, transports=["tcp"]) as far,
    ):
        yield near if request.param == "file" else far


def whole(client, key, **options):
    return client.get(key, **options) == value_of(key)


def in_part(client, key, **options):
    return client.get_range(key, 1000, 5000, **options) == value_of(key)[1000:6000]


def shown(client, key, **options):
    with client.view(key, **options) as view:
        return bytes(view.data) == value_of(key)


def begin(site, fault, operation="read"):
    """Have a fault from now on."""
    if fault == "cut":
        os.truncate(site.below, 0)
    else:
        site.disk.fail(**{operation: fault})


def end(site, fault):
    """Have the disk work again."""
    if fault == "cut":
        os.truncate(site.below, 32 << 20)
    site.disk.work()


@pytest.mark.parametrize("fault", READS)
def test_while_a_client_reads(site, client, fault):
    kind, cause = READS[fault]
    ways = (whole, shown) if fault == "flip" else (whole, in_part, shown)
    keys = names(len(ways))
    site.put_on_disk(*keys)
    begin(site, fault)
    for way, key in zip(ways, keys, strict=True):
        if kind is None:
            assert way(client, key)
            continue
        with pytest.raises(kind) as caught:
            way(client, key)
        told = str(caught.value)
        assert repr(key) in told
        assert DISK in told
        assert cause in told
    site.goes_on()
    end(site, fault)
    site.is_used_again()


def test_while_a_client_reads_and_the_disk_hangs(site, client):
    """Its deadline holds, whatever it reads, and what it gave up touches its memory no more."""
    first, second, third = keys = names(3)
    site.put_on_disk(*keys)
    memory = np.zeros(NBYTES, np.uint8)
    site.disk.fail(read="block")
    with long_before(60):
        for read in (
            lambda: client.get(first, deadline=1.0),
            lambda: client.get_range(second, 10, 50, deadline=1.0),
            lambda: client.get_into(third, memory, deadline=1.0),
        ):
            with pytest.raises(TransferTimeoutError) as caught:
                read()
            assert DISK in str(caught.value)
        site.goes_on()
    site.disk.work()
    assert whole(client, first)
    assert not memory.any()
    site.is_used_again()


def test_a_disk_that_hangs_is_named(site):
    (key,) = names(1)
    site.put_on_disk(key)
    site.disk.fail(read="block")
    assert site.client.hint([key], "prefetch").ok
    site.disk.wait_blocked()
    site.until_faulty("does not answer")
    site.goes_on()
    site.disk.work()
    until(lambda: MEMORY in site.readable(key), what="it was brought to memory after all")
    site.until_well()
    assert whole(site.client, key)


def test_a_disk_that_hangs_holds_up_no_other_of_its_worker(site_of_two):
    """What goes to the other one and comes back from there does so meanwhile."""
    site = site_of_two
    hangs, here, there, *more = names(5)
    site.put(hangs, *more, segment=DISK)  # so the other one has more room
    site.put(there, segment=BESIDE)
    site.put(here)
    site.disk.fail(read="block")
    assert site.client.hint([hangs], "prefetch").ok
    site.disk.wait_blocked()
    site.demote(here)
    until(lambda: site.where(here) == {BESIDE}, what="it went to the other disk")
    assert site.client.hint([there], "prefetch").ok
    until(lambda: MEMORY in site.readable(there), what="it came back from the other disk")
    assert whole(site.client, here)
    assert MEMORY not in site.readable(hangs)
    site.disk.work()
    until(lambda: MEMORY in site.readable(hangs), what="it was brought to memory after all")
    assert whole(site.client, hangs)


@pytest.mark.parametrize(
    ("operation", "fault", "words"),
    [
        ("write", "EIO", ("write", "Input/output error")),
        ("write", "ENOSPC", ("write", "No space left")),
        ("write", "ENOTCONN", ("write", "not connected")),
        ("write", "cut", ()),
        ("sync", "EIO", ("sync", "Input/output error")),
        ("write", "short", ()),
        ("write", "block", ()),
        ("sync", "block", ()),
    ],
)
def test_while_a_demotion_writes(site, operation, fault, words):
    """An object is where it was until the disk has it."""
    (key,) = names(1)
    site.put(key)
    begin(site, fault, operation)
    site.demote(key)
    if fault == "block":
        site.disk.wait_blocked()
    if words:
        site.until_faulty(*words)
    if fault not in ("short", "cut"):
        assert site.readable(key) == {MEMORY}
        assert whole(site.client, key)
    site.goes_on()
    end(site, fault)
    site.demote(key)
    until(lambda: site.where(key) == {DISK}, what="it is on the disk")
    assert whole(site.client, key)
    site.is_used_again()


@pytest.mark.parametrize("fault", ["lost", "cut and grown", "flip"])
def test_between_a_demotion_and_the_first_read(site, client, fault):
    (key,) = names(1)
    site.put(key)
    if fault == "lost":
        site.disk.fail(write="lost")
    site.demote(key)
    until(lambda: site.where(key) == {DISK}, what="it is on the disk, or so it says")
    site.disk.work()
    if fault == "cut and grown":
        os.truncate(site.below, 0)
        os.truncate(site.below, 32 << 20)
    elif fault == "flip":
        content = site.below.read_bytes()
        at = content.index(value_of(key)) + NBYTES // 2
        with site.below.open("r+b") as file:
            file.seek(at)
            file.write(bytes([content[at] ^ 1]))
    with pytest.raises((ChecksumMismatchError, NotFoundError), match=DIFFERS) as caught:
        client.get(key)
    assert repr(key) in str(caught.value)
    site.goes_on()
    site.is_used_again()


@pytest.mark.parametrize("fault", ["EIO", "flip", "cut"])
def test_while_a_promotion_reads(site, fault):
    (key,) = names(1)
    site.put_on_disk(key)
    begin(site, fault)
    assert site.client.hint([key], "prefetch").ok
    site.until_faulty("content" if fault == "flip" else "read")
    site.goes_on()
    end(site, fault)
    if fault == "EIO":
        assert whole(site.client, key)
    else:
        with pytest.raises((NotFoundError, ChecksumMismatchError)):
            site.client.get(key)
    site.is_used_again()
    other = names(1)
    site.put_on_disk(*other)
    assert site.client.hint(other, "prefetch").ok
    site.until_well()


def test_a_file_that_is_unlinked_under_its_worker_is_used_on(site, client):
    """The worker has it open; only its next run finds none."""
    kept, moved = names(2)
    site.put_on_disk(kept)
    site.below.rename(site.below.with_name("away"))
    try:
        assert whole(client, kept)
        site.put_on_disk(moved)
        assert whole(client, moved)
        assert not site.fault
    finally:
        site.below.with_name("away").rename(site.below)


def status(site, *options):
    """What the command says."""
    command = [sys.executable, "-m", "mooncake_store", "status", "--url", site.url, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_status_and_metrics_name_the_disk(site):
    (key,) = names(1)
    site.put(key)
    site.disk.fail(write="ENOSPC")
    site.demote(key)
    site.until_faulty("No space left")
    faults = {s["name"]: s["fault"] for s in json.loads(status(site, "--json"))["segments"]}
    assert "No space left" in faults[DISK]
    assert faults[MEMORY] == ""
    assert f"disk of {DISK}, worker w: write: No space left" in status(site)
    line = f'segment_disk_failing{{segment="{DISK}"}} '
    assert line + "1" in metrics(site.client.store_stats(), site.client.status()).splitlines()
    site.disk.work()
    site.is_used_again()
    assert line + "0" in metrics(site.client.store_stats(), site.client.status()).splitlines()
