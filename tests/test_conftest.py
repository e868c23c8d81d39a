"""The shared fixtures: a program is watched, and ends with its test."""

import asyncio
import signal
import socket
from pathlib import Path

import pytest

from tests.waiting import until, until_async


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
