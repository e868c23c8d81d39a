"""The shared fixtures: a program is watched, and ends with its test."""

import asyncio
import mmap
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared_memory import SharedMemory
from tests.sources import ROOT
from tests.waiting import PATIENCE_S, until, until_async


def test_a_program_is_read_line_by_line_and_ends_with_its_code(start_program):
    program = start_program("-c", "print('ready'); raise SystemExit(7)")
    assert program.wait_for_line("ready") == "ready\n"
    assert program.wait() == 7
    assert program.output == "ready\n"


def test_a_program_that_never_says_the_line_fails_with_what_it_said(start_program):
    program = start_program("-c", "print('something else')")
    with pytest.raises(pytest.fail.Exception, match="something else"):
        program.wait_for_line("ready")


def test_a_program_gets_the_environment_it_is_given(start_program):
    program = start_program("-c", "import os; print(os.environ['COLOUR'])", COLOUR="teal")
    program.wait_for_line("teal")


def test_a_kill_takes_the_children_along(start_program):
    child = "import signal; print('child up', flush=True); signal.pause()"
    parent = (
        "import subprocess, sys;"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}]);"
        "print('pid', child.pid, flush=True); child.wait()"
    )
    program = start_program("-c", parent)
    pid = int(program.wait_for_line("pid").split()[1])
    program.wait_for_line("child up")
    program.kill()
    assert program.wait() == -signal.SIGKILL
    until(lambda: ended(pid), what="the end of the child")


def ended(pid):
    """Whether a process is gone, or a zombie that waits to be collected."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state in "ZX"


def test_a_free_port_can_be_bound(free_port):
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port))


def test_until_returns_what_it_waited_for_and_fails_at_its_deadline():
    seen = iter([0, None, "ready"])
    assert until(lambda: next(seen)) == "ready"
    with pytest.raises(AssertionError, match=r"the door to open not within 0\.01 s"):
        until(lambda: False, timeout_s=0.01, what="the door to open")


def test_until_async_lets_other_tasks_run_and_fails_at_its_deadline():
    async def scenario():
        loop = asyncio.get_running_loop()
        ready = []
        loop.call_soon(ready.append, 1)
        assert await until_async(lambda: ready) == [1]
        with pytest.raises(AssertionError, match="the door"):
            await until_async(lambda: False, timeout_s=0.01, what="the door")

    asyncio.run(scenario())


LEAVING = """
import os, pathlib, pytest

@pytest.fixture
def memory():
    yield
    pathlib.Path(os.environ["LEFT"]).write_bytes(b"left")

def test_before(): pass
def test_that_leaves(memory): pass
def test_after(): pass
"""


@pytest.mark.slow
def test_a_test_that_leaves_memory_fails_the_run_by_its_name(tmp_path):
    folder, lock = tmp_path / "shm", tmp_path / "lock"
    folder.mkdir()
    left, where = folder / "mooncake-test.ring", {"FOLDER": str(folder), "LOCK": str(lock)}
    (tmp_path / "conftest.py").write_text(
        "import os, pathlib\n"
        "from tests.shared_memory import SharedMemory\n"
        "folder, lock = (pathlib.Path(os.environ[name]) for name in ('FOLDER', 'LOCK'))\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(SharedMemory(folder, lock))\n"
    )
    (tmp_path / "test_leaving.py").write_text(LEAVING)
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "-p", "no:cacheprovider"]

    def run(path):
        return subprocess.run(
            [*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
            env=os.environ | where | {"LEFT": str(path), "PYTHONPATH": str(ROOT)}, check=False,
        )  # fmt: skip

    try:
        done = run(left)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "3 passed" in done.stdout
        (line,) = [line for line in done.stdout.splitlines() if str(left) in line]
        assert "test_that_leaves" in line
        assert "test_before" not in line
        # What was there before is nobody's fault.
        assert run(left).returncode == 0
        left.unlink()
        # Nor is it certain whose it is where another run goes on.
        other = SharedMemory(tmp_path, lock)
        done = run(left)
        assert done.returncode == 0
        assert str(left) in done.stdout
        other.close()
    finally:
        left.unlink()


KEEPING = """
import os, pathlib, signal, pytest
from mooncake_store.journal.origin import Origin
from mooncake_store.journal.ring_file import RingFile

@pytest.fixture(scope="module")
def state(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "state" / "shard-0"
    folder.mkdir(parents=True)
    ring = RingFile.create(folder, Origin("0123456789abcdef", 0, 1), events=1, cells=1024)
    pathlib.Path(os.environ["LEFT"]).write_text(str(ring.path))
    assert os.environ["WHAT"] != "fail"
    yield
    pathlib.Path(os.environ["LEFT"]).with_suffix(".ended").touch()

def test_with_a_master(state):
    print("waiting", flush=True)
    signal.pause()
"""


@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.parametrize("what", ["fail", "end", "end twice"])
def test_memory_of_fixtures_that_fail_or_are_told_to_end_is_not_left(tmp_path, start_program, what):
    (tmp_path / "test_keeping.py").write_text(KEEPING)
    left = tmp_path / "left"
    run = start_program(
        "-m", "pytest", "-q", "-s", "-c", "/dev/null", "-p", "no:cacheprovider",
        "-p", "tests.conftest", "--basetemp", tmp_path / "base", tmp_path / "test_keeping.py",
        LEFT=str(left), WHAT=what, PYTHONPATH=str(ROOT),
    )  # fmt: skip
    if what != "fail":
        run.wait_for_line("waiting")
        run.signal(signal.SIGTERM)
    if what == "end twice":
        run.signal(signal.SIGTERM)
    code = run.wait()
    path = Path(left.read_text())
    try:
        assert code == (pytest.ExitCode.TESTS_FAILED if what == "fail" else 2), run.output
        assert not path.exists(), run.output
        assert left.with_suffix(".ended").exists() == (what != "fail")
    finally:
        path.unlink(missing_ok=True)


def test_memory_that_a_process_uses_is_not_left(tmp_path):
    watch = SharedMemory(tmp_path, tmp_path / "lock")
    path = tmp_path / "mooncake-used.ring"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert watch.left() == []
    (told,) = watch.left()
    watch.close()
    assert told.startswith(f"{path}: left by no test")
