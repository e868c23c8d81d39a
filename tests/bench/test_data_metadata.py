"""The benches `data` and `metadata`: rows, child processes, and what they refuse to count."""

import itertools
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from mooncake_store.bench import data, metadata
from mooncake_store.bench.harness import Report
from mooncake_store.bench.parts import upstream
from mooncake_store.bench.parts.driver import Session, make_keys
from mooncake_store.bench.parts.environment import READY
from mooncake_store.bench.parts.process import (
    Child,
    Driver,
    accepts,
    cpu_seconds,
    descendants,
    free_ports,
    rss_bytes,
    wait_for,
)
from mooncake_store.bench.sides.measuring import add_row, measure
from mooncake_store.errors import StoreError, UnavailableError
from mooncake_store.journal.ring_file import rings_of
from mooncake_store.units import KIB, MIB
from tests.bench.rounds import one_round
from tests.waiting import until

SIZES = {"4KiB": 4 * KIB, "64KiB": 64 * KIB, "256KiB": 256 * KIB, "1MiB": MIB, "4MiB": 4 * MIB}
WAYS = ("tcp", "shm", "local")
SHOWN = {
    f"rights/{operation}/{shape}"
    for operation in ("get", "put")
    for shape in ("4KiB/b128", "64KiB/b1", "64KiB/b16", "1MiB/b1")
}
TINY = data.Plan(
    sizes=tuple(SIZES.values()),
    buffer_bytes=8 * MIB,
    objects_bytes_max=MIB,
    budget_s=0.001,
    repeats=1,
    total_s=0.0,
    latency_calls=20,
    too_large="a batch does not fit",
)


# The rows.


@pytest.fixture(scope="module")
def data_rows():
    report = Report("data", quick=True)
    with one_round():
        data.measure_all(report, TINY, ("raw",))
    return {row.name: row for row in report.rows}


def test_data_reports_every_row(data_rows):
    throughput = itertools.product(("get", "put"), WAYS, SIZES, ("b1", "b32", "b128"))
    expected = {"/".join(name) for name in throughput}
    expected |= {f"p50_us/get/{way}/64KiB" for way in WAYS}
    expected |= {"p50_us/get_leased/shm/64KiB", "pressure/300x1MiB"} | SHOWN
    assert set(data_rows) == expected


def test_data_measures_both_sides_of_what_fits_and_says_why_of_the_rest(data_rows):
    for name, row in data_rows.items():
        if name == "pressure/300x1MiB" or name in SHOWN:
            continue
        size, batch = name.split("/")[2], name.rpartition("/b")[2]
        fits = name.startswith("p50") or SIZES[size] * int(batch) <= 8 * MIB
        assert (row.value is not None) == fits, name
        assert row.why == (None if fits else "a batch does not fit")
        assert set(row.vs) == {"raw"}
        assert (row.vs["raw"].ratio is not None) == fits


def test_data_measures_what_rights_to_memory_cost(data_rows):
    for name in SHOWN:
        assert data_rows[name].value > 0
        assert data_rows[name].vs["off"].ratio > 0


def test_a_full_pool_accepts_every_put(data_rows):
    assert data_rows["pressure/300x1MiB"].value == 300


def test_metadata_reports_every_row():
    report = Report("metadata", quick=True)
    plan = metadata.Plan(
        objects=2_000,
        large=5_000,
        fresh=256,
        budget_s=0.01,
        repeats=1,
        deadline_s=0.0,
        starts=1,
        patient=False,
    )
    with one_round():
        metadata.measure_all(report, plan, ())
    rows = {row.name: row.value for row in report.rows}
    assert set(rows) == {
        "exists/b1",
        "exists/b128",
        "exists/b1024",
        "exists/b128/1M",
        "exists/b1024/1M",
        "query/b128",
        "query/b1024",
        "put/b128",
        "remove/b128",
        "cpu_us_per_key/exists/b128",
        "cpu_us_per_key/exists/b1024",
        "rss_bytes_per_object/1M",
        "shards2/exists",
        "shards2/cpu_us_per_key",
        "shards2/cores_busy",
        "start_s/master",
        "connect_ms/client",
        "wrong_address_s",
    }
    missing = {row.name: row.why for row in report.rows if row.value is None}
    assert not missing
    assert rows["exists/b1024"] > rows["exists/b1"]
    assert rows["wrong_address_s"] < 5


def test_a_master_that_is_started_to_be_timed_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    made, make = [], tempfile.TemporaryDirectory

    def recording(**options):
        made.append(make(dir=tmp_path, **options))
        return made[-1]

    monkeypatch.setattr(tempfile, "TemporaryDirectory", recording)
    assert metadata._start_master() > 0
    assert list(tmp_path.iterdir()) == []
    assert [rings_of(Path(each.name) / "shard-0") for each in made] == [[]]


def test_a_child_that_does_not_end_in_order_is_told(tmp_path):
    ready = tmp_path / "ready"
    program = (
        "import pathlib, signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "pathlib.Path(sys.argv[1]).touch(); signal.pause()"
    )
    with Child("stubborn", [sys.executable, "-c", program, str(ready)]) as child:
        until(ready.exists)
        with pytest.raises(StoreError, match="stubborn did not end"):
            child.end(0.01)
        assert child.running
    assert not child.running


def test_the_shapes_of_both_plans(monkeypatch):
    """The public entry points measure five sizes and a million objects."""
    plans = []
    monkeypatch.setattr(data, "measure_all", lambda report, plan, vs: plans.append(plan))
    monkeypatch.setattr(metadata, "measure_all", lambda report, plan, vs: plans.append(plan))
    for quick in (True, False):
        data.run(Report("data"), quick=quick, vs=())
        metadata.run(Report("metadata"), quick=quick, vs=())
    assert [plan.sizes for plan in plans[::2]] == [tuple(SIZES.values())] * 2
    assert all(plan.large == 1_000_000 and plan.objects == 20_000 for plan in plans[1::2])
    assert plans[2].repeats >= 5
    assert plans[3].repeats >= 5


# A side that fails, a side that is not there.


def test_a_side_that_fails_costs_its_own_row_only():
    def broken():
        raise StoreError("the disk is on fire")

    samples = measure({"ours": broken, "raw": lambda: 2.0}, repeats=2, deadline_s=10)
    report = Report("demo")
    add_row(report, "get", "GB/s", samples, "ours", {"raw": "raw"})
    add_row(report, "raw", "GB/s", samples, "raw", {"other": "ours", "absent": "nobody"})
    mine, theirs = report.rows
    assert (mine.value, mine.why, mine.vs["raw"].value) == (None, "the disk is on fire", 2)
    assert (theirs.value, theirs.vs["other"].ratio, theirs.vs["absent"].value) == (2, None, None)


def test_a_mistake_of_the_bench_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        measure({"ours": lambda: 1 / 0}, repeats=1, deadline_s=1)


def stand_in(folder, stderr, code):
    """An environment whose interpreter says what a broken installation says."""
    python = folder / "mooncake" / "bench" / f"upstream-{upstream.VERSION}" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho '{stderr}' >&2\nexit {code}\n")
    python.chmod(0o755)
    (python.parents[1] / READY).touch()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "ImportError: libibverbs.so.1: cannot open shared object file: No such file",
            "needs libibverbs.so.1: install its system libraries, on Debian and Ubuntu: "
            f"apt install {upstream.SYSTEM_PACKAGES}",
        ),
        ("ModuleNotFoundError: No module named mooncake", "to have it installed again"),
    ],
)
def test_an_original_that_does_not_import_is_one_row_with_the_remedy(
    tmp_path, monkeypatch, said, told
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stand_in(tmp_path, said, 1)
    report = Report("data")
    assert upstream.wanted(report, ("raw", "upstream")) is None
    (row,) = report.rows
    assert (row.name, row.value) == ("upstream", None)
    assert told in row.why


def test_the_original_is_left_alone_when_nobody_asks(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    report = Report("data")
    assert upstream.wanted(report, ("raw",)) is None
    assert report.rows == []
    assert list(tmp_path.iterdir()) == []


def test_a_cache_folder_that_cannot_be_made_is_told(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(upstream.Missing, match="set XDG_CACHE_HOME"):
        upstream.environment()


class FakeDriver:
    def __init__(self, failure=""):
        self.failure = failure

    def ask(self, command, **options):
        if self.failure:
            raise StoreError(self.failure)


def test_an_original_that_fails_halfway_costs_its_own_columns_only():
    report = Report("data")
    with ExitStack() as stack:
        bench = data._Bench(report, TINY, (), stack)
        bench._drivers = {"shm": FakeDriver(), "upstream": FakeDriver("put_from returned -200")}
        bench._owners("fill")
        assert set(bench._drivers) == {"shm"}
        assert [(row.name, row.why) for row in report.rows] == [
            ("upstream", "put_from returned -200")
        ]
        bench._drivers["shm"].failure = "ours is broken"
        with pytest.raises(StoreError, match="ours is broken"):
            bench._owners("fill")


def installed():
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (cache / "mooncake" / "bench" / f"upstream-{upstream.VERSION}" / "ready").exists()


@pytest.mark.slow
@pytest.mark.skipif(
    not installed(), reason="needs the original: run `mooncake bench metadata --vs upstream` once"
)
def test_the_original_does_what_the_workloads_ask():
    try:
        environment = upstream.environment()
    except upstream.Missing as missing:
        pytest.skip(str(missing))
    with upstream.pool(environment) as pool:
        assert 0 < pool.start_s < 30
        pool.worker(64 * MIB)
        client = pool.client(MIB)
        objects = {"prefix": "x", "count": 64, "size": 4 * KIB}
        client.ask("fill", **objects)
        for batch in (1, 8):
            assert client.ask("get", **objects, batch=batch, budget_s=0.01) > 0
            assert client.ask("put", count=64, size=4 * KIB, batch=batch, budget_s=0.01) > 0
            for command in ("exists", "query"):
                keys, _ = client.ask(command, prefix="x", count=64, batch=batch, budget_s=0.01)
                assert keys >= batch
        client.ask("drop", prefix="x", count=64)
        with pytest.raises(StoreError, match="were not found"):
            client.ask("exists", prefix="x", count=64, batch=8, budget_s=0.01)
        assert min(client.ask("put_remove", count=64, batch=8)) > 0
        assert client.ask("reconnect", address=pool.address) > 0
        assert cpu_seconds(pool.pids) > 0


# The driver: what is counted was really moved.


class FakeSide:
    """A dict of blocks that can be told to cheat."""

    def __init__(self):
        self.blocks = {}
        self.lazy = False

    def register(self, memory):
        self.memory = memory

    def prepare(self, keys, rows):
        return keys, rows

    def get(self, call):
        if not self.lazy:
            for key, row in zip(*call, strict=True):
                row[:] = self.blocks[key]

    def put(self, call):
        self.blocks |= {key: row.copy() for key, row in zip(*call, strict=True)}

    def put_values(self, keys, values):
        self.blocks |= dict(zip(keys, values, strict=True))

    def exists(self, keys):
        return sum(key in self.blocks for key in keys)

    query = exists

    def remove(self, keys):
        for key in keys:
            del self.blocks[key]


@pytest.fixture
def session():
    made = Session(FakeSide())
    made.buffer(64 * KIB)
    return made


def test_reads_that_move_nothing_are_noticed(session):
    objects = {"prefix": "x", "count": 16, "size": 4 * KIB}
    session.fill(**objects)
    assert session.get(**objects, batch=4, budget_s=0.001) > 0
    assert session.latency(**objects, calls=40) > 0
    session._side.lazy = True
    with pytest.raises(RuntimeError, match="blocks are not those that were put"):
        session.get(**objects, batch=4, budget_s=0.001)


def test_keys_that_are_not_there_are_noticed(session):
    session.populate("m", 100)
    keys, seconds = session.exists("m", 100, 8, 0.001)
    assert keys >= 8
    assert seconds > 0
    session._side.blocks.popitem()
    with pytest.raises(RuntimeError, match="were not found"):
        session.exists("m", 100, 64, 0.01)


def test_what_was_put_to_be_measured_is_removed_again(session):
    assert session.put(count=16, size=4 * KIB, batch=4, budget_s=1.0) > 0
    assert all(rate > 0 for rate in session.put_remove(count=20, batch=8))
    assert session._side.blocks == {}
    session.fill("x", 16, 4 * KIB)
    session.drop("x", 16)
    assert session._side.blocks == {}


def test_keys_are_distinct_and_of_one_length():
    keys = make_keys("small", 1000)
    assert len(set(keys)) == 1000
    assert {len(key) for key in keys} == {40}
    assert make_keys("small", 10) == keys[:10]


# The bare sides move what they say.


@pytest.mark.parametrize("side", ["sockets", "memcpy"])
def test_the_bare_sides_move_blocks_there_and_back(side):
    with Driver("bare", side) as driver:
        driver.ask("open", nbytes=MIB)
        driver.ask("buffer", nbytes=MIB)
        objects = {"prefix": "x", "count": 256, "size": 4 * KIB}
        driver.ask("fill", **objects)
        # The driver checks every block it reads.
        for batch in (1, 32):
            assert driver.ask("get", **objects, batch=batch, budget_s=0.001) > 0
        for batch in (1, 32):
            assert driver.ask("put", count=256, size=4 * KIB, batch=batch, budget_s=0.001) > 0


# Processes.


def test_a_failed_command_is_told_and_the_driver_goes_on():
    with Driver("bare", "memcpy") as driver:
        with pytest.raises(StoreError, match="bare: exists: NotImplementedError"):
            driver.ask("exists", prefix="x", count=1, batch=1, budget_s=1)
        driver.ask("open", nbytes=MIB)


def test_a_driver_that_does_not_answer_is_ended():
    with Driver("bare", "memcpy") as driver:
        os.kill(driver.pid, signal.SIGSTOP)
        with pytest.raises(StoreError, match=r"did not answer within 0\.05 s"):
            driver.ask("open", nbytes=MIB, timeout_s=0.05)
        until(lambda: not driver.running)
        with pytest.raises(UnavailableError, match="ended in the middle"):
            driver.ask("open", nbytes=MIB)


def test_the_last_words_of_a_program_reach_the_error():
    command = ["/bin/sh", "-c", "echo no such flag >&2; exit 3"]
    with (
        Child("the program", command) as child,
        pytest.raises(UnavailableError, match="start: the program ended; no such flag"),
    ):
        wait_for("start", lambda: None, child)


def test_waiting_ends_in_time():
    with pytest.raises(UnavailableError, match=r"never: not within 0\.01 s"):
        wait_for("never", lambda: None, None, timeout_s=0.01)


def test_children_die_with_the_bench_whatever_it_dies_of():
    program = (
        "import sys; from mooncake_store.bench.parts.process import Child, Driver\n"
        "driver = Driver('d', 'sockets'); driver.ask('open', nbytes=4096)\n"
        "other = Child('c', ['/bin/sleep', '60'])\n"
        "sys.stdout.write(f'{driver.pid} {other.pid}\\n'); sys.stdout.flush()\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as bench:
        pids = list(map(int, bench.stdout.readline().split()))
        pids += descendants(pids[0])  # the process that serves the bare sockets
        assert len(pids) == 3
        assert all(map(alive, pids))
        bench.kill()
    until(lambda: not any(map(alive, pids)))


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


GROWING = f"""
import mmap, time
print(time.process_time(), flush=True)
input()
assert sum(range(2_000_000)) > 0
memory = mmap.mmap(-1, {32 * MIB})
memory.write(b"1" * {32 * MIB})
print(time.process_time(), flush=True)
input()
"""


def test_processor_time_and_memory_of_a_process():
    # Another process than this one, whose memory shrinks when it likes.
    command = [sys.executable, "-c", GROWING]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        mine = float(child.stdout.readline())
        used, resident = cpu_seconds([child.pid]), rss_bytes([child.pid])
        print(file=child.stdin, flush=True)
        mine = float(child.stdout.readline()) - mine
        used, resident = cpu_seconds([child.pid]) - used, rss_bytes([child.pid]) - resident
        child.kill()
    assert used == pytest.approx(mine, rel=0.2, abs=0.03)  # telling costs some as well
    assert 31 * MIB < resident < 80 * MIB


def test_free_ports_are_free_and_different():
    ports = free_ports(3)
    assert len(set(ports)) == 3
    assert not any(map(accepts, ports))
