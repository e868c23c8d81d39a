"""ARCHITECTURE's "A key's way" names every file that a put and a get go through, in that order."""

import itertools
import re
import sys
import threading
import time

import pytest

from mooncake_store import Client, LocalCluster
from tests.sources import ROOT, text
from tests.waiting import PATIENCE_S

SIZE = 4096
COUNT = 128
AWAKE = "transfer_engine/rpc/spinning.py"
ARCHITECTURE = text(ROOT / "docs" / "ARCHITECTURE.md")


def told(heading):
    """The files that a table of the page links to, in order."""
    page = ARCHITECTURE.partition("\n## A key's way\n")[2].partition("\n## ")[0]
    table = page.partition(f"\n### {heading}\n")[2].partition("\n### ")[0]
    return re.findall(r"\]\(\.\./([\w/]+\.py)\)", table)


class Trace:
    """The files of ours that each thread enters, in the order of their first use, while `on`."""

    def __init__(self):
        self.on = False
        self.files = {}

    def note(self, frame, event, _):
        if self.on and event == "call":
            path = frame.f_code.co_filename
            if path.startswith(f"{ROOT}/") and "/tests/" not in path and "/.venv/" not in path:
                files = self.files.setdefault(threading.current_thread().name, {})
                files[path.removeprefix(f"{ROOT}/")] = None

    def of(self, call):
        """What the calling thread and the master's went through."""
        self.files = {}
        sys.setprofile(self.note)
        self.on = True
        try:
            call()
        finally:
            self.on = False
            sys.setprofile(None)
        return [list(self.files.get(name, ())) for name in ("MainThread", "mooncake-master")]


@pytest.fixture(scope="module")
def ways():
    """A function that traces a put and a get of many objects, everything warm."""
    trace = Trace()
    threading.setprofile(trace.note)
    try:
        cluster = LocalCluster(1, "64MiB", in_process=True).start()
    finally:
        threading.setprofile(None)
    with cluster, Client(cluster.url) as writer, Client(cluster.url) as reader:
        turns = itertools.count()

        def go():
            turn = next(turns)
            keys = [f"{turn}/{at}" for at in range(COUNT)]
            ways = trace.of(lambda: writer.put_many(keys, [bytes(SIZE)] * COUNT))
            return ways + trace.of(lambda: reader.get_many(keys))

        for _ in range(5):
            go()
        yield go


def asleep(way):
    return [file for file in way if file != AWAKE]


def test_a_put_and_a_get_go_the_way_that_is_told(ways):
    """Once at least: the master also does other work in between, and a new slab takes more.

    Whether anybody stays awake for what comes next is up to the machine.
    """
    told_of = {
        heading: told(heading)
        for heading in ("A put, at the client", "A put, at the master",
                        "A get, at the client", "A get, at the master")
    }  # fmt: skip
    assert all(told_of.values())
    seen, wrong, until = {}, dict(told_of), time.monotonic() + PATIENCE_S
    while wrong and time.monotonic() < until:
        seen = dict(zip(told_of, ways(), strict=True))
        wrong = {h: way for h, way in wrong.items() if asleep(seen[h]) != asleep(way)}
    assert {heading: seen[heading] for heading in wrong} == wrong
