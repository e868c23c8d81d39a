"""What is said of a disk that fails, and of one that works again: once each."""

import logging

from transfer_engine.segments import health
from transfer_engine.segments.health import DiskHealth


def test_a_use_that_fails_and_works_again_is_told_of_once_each(caplog):
    caplog.set_level(logging.INFO, logger=health.__name__)
    disk = DiskHealth("/mnt/disk")
    disk.tell("reading")  # as well as ever
    for _ in range(3):
        disk.tell("reading", "Input/output error", "segment a")
    assert disk.fails("reading")
    assert not disk.fails("writing")
    assert disk.fault == "reading: Input/output error"
    for _ in range(3):
        disk.tell("reading", whom="segment a")
    assert disk.fault == ""
    disk.tell("writing")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "reading of /mnt/disk (segment a) failed: Input/output error"),
        ("INFO", "reading of /mnt/disk (segment a) works again"),
    ]


def test_all_that_is_wrong_is_told_in_few_words(monkeypatch):
    monkeypatch.setattr(health, "default_timeout_s", lambda nbytes: -1.0)
    disk = DiskHealth("/mnt/disk")
    disk.tell("writing", "x" * 1000)
    disk.tell("reading", "Input/output error")
    with disk.attempt(1):
        assert disk.fault.startswith("it does not answer; reading: Input/output error; writing: x")
        assert len(disk.fault) == health.FAULT_CHARACTERS
    assert disk.fault.startswith("reading: Input/output error; writing: x")
