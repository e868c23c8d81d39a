"""Programs that begin in a warm process are what they are when they begin as users start them."""

import contextlib
import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import STARTER
from tests.processes import children, every_child, gone
from tests.sources import ROOT
from tests.waiting import PATIENCE_S, until

MASTER = ("-m", "mooncake_store", "master", "--port", "0", "--json")


@pytest.fixture(scope="module")
def renewed(request):
    """What starts programs here; other tests may have changed what this process has."""
    found = request.config.stash[STARTER]
    if found is not None:
        found.renew()
    return found


@pytest.fixture
def starter(renewed):
    if renewed is None:
        pytest.skip("all programs start cold here")
    yield renewed
    renewed.cold = False


@pytest.fixture(params=["warm", "cold"])
def begun(request, starter):
    """How programs begin."""
    starter.cold = request.param == "cold"
    return request.param


def is_warm(pid):
    return b"tests.warm_process" in Path(f"/proc/{pid}/cmdline").read_bytes()


def run(*arguments, **options):
    command = [sys.executable, "-m", "mooncake_store", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, **options)


def test_a_program_is_a_child_with_a_session_and_descriptors_of_its_own(start_program, begun):
    program = start_program(*MASTER)
    pid = json.loads(program.wait_for_line("ready"))["pid"]
    assert pid == program.process.pid
    assert is_warm(pid) == (begun == "warm")
    assert os.getsid(pid) == pid
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    assert int(fields[1]) == os.getpid()
    places = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (0, 1, 2)}
    assert "/dev/null" in places
    assert len(places) == 2
    # Sockets of this process, or of the warm one, are not among its own.
    assert not sockets(pid) & sockets(os.getpid())
    program.signal(signal.SIGTERM)
    assert program.wait() == 0


def sockets(pid):
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed by now
            found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return {text for text in found if text.startswith("socket:")}


def test_a_program_that_is_killed_says_so_by_its_code(start_program, begun):
    program = start_program(*MASTER)
    program.wait_for_line("ready")
    program.kill()
    assert program.wait() == -signal.SIGKILL


def test_a_program_has_each_descriptor_under_the_number_that_it_was_given(begun):
    """Also under high ones: late in a run the process of the tests holds some hundreds."""
    with contextlib.ExitStack() as stack:
        ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
        given = []
        for number in range(204, 208):
            fd = stack.enter_context(socket.socket()).fileno()
            given.append(fcntl.fcntl(fd, fcntl.F_DUPFD, number))
            stack.callback(os.close, given[-1])
        command = [sys.executable, "-m", "mooncake_store.master.shard_process"]
        with subprocess.Popen(command, stdin=theirs, pass_fds=given) as shard:
            theirs.close()
            places = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in given}

            def seen():
                with contextlib.suppress(FileNotFoundError):
                    return {fd: os.readlink(f"/proc/{shard.pid}/fd/{fd}") for fd in given}

            until(lambda: seen() == places, what="the shard has what it was given")
            ours.close()  # a shard without a master ends
            assert shard.wait(PATIENCE_S) == 1


def test_arguments_output_and_code_are_those_of_the_program(begun):
    done = run("version", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)
    done = run("nonsense")
    assert (done.returncode, done.stdout) == (2, "")
    assert "nonsense" in done.stderr


def test_settings_in_the_environment_are_seen_and_not_by_the_next_program(begun):
    with_setting = run(
        "config", "show", env=os.environ | {"MOONCAKE_MASTER_OBJECTS_MAX": "7654321"}
    )
    assert "7654321" in with_setting.stdout
    assert "7654321" not in run("config", "show").stdout


def test_a_program_and_its_shards_have_the_descriptors_that_they_are_limited_to(
    start_program, begun
):
    limited = start_program("prlimit", "--nofile=200", sys.executable, *MASTER, "--shards", "2")
    pid = json.loads(limited.wait_for_line("ready"))["pid"]
    for each in (pid, *children(pid)):
        assert is_warm(each) == (begun == "warm")
        assert resource.prlimit(each, resource.RLIMIT_NOFILE) == (200, 200)


@pytest.mark.parametrize("what", ["variable", "limit", "folder", "module"])
def test_what_is_not_plain_starts_the_usual_way(starter, monkeypatch, tmp_path, what):
    usual, calls = starter.plain, []
    run("version")  # the warm process is there
    monkeypatch.setattr(starter, "plain", lambda *args: calls.append(args) or usual(*args))
    assert run("version").returncode == 0
    assert not calls
    if what == "variable":
        assert run("version", env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}).returncode == 0
    elif what == "limit":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        try:
            assert run("version").returncode == 0
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    elif what == "folder":
        assert run("version", cwd=ROOT / "tests").returncode == 0
    else:
        subprocess.run([sys.executable, "-m", "platform"], stdout=subprocess.DEVNULL, check=True)
    assert len(calls) == 1


def test_shards_are_children_of_their_master_and_have_nothing_of_it(start_program, begun):
    program = start_program(*MASTER, "--shards", "2")
    master = json.loads(program.wait_for_line("ready"))["pid"]
    shards = children(master)
    assert len(shards) == 2
    for shard in shards:
        assert is_warm(shard) == (begun == "warm")
        assert os.getsid(shard) == master
    waiting = set(every_child(master)) - set(shards)
    assert len(waiting) == (begun == "warm")
    for pid in waiting:
        # Nothing that the master was given stays open because of it.
        assert {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (0, 1, 2)} == {"/dev/null"}
        assert len(sockets(pid)) == 1
    program.signal(signal.SIGKILL)
    until(lambda: all(map(gone, {*shards, *waiting})), what="all have ended")


@pytest.mark.cold
def test_a_test_with_the_mark_starts_them_the_usual_way(start_program):
    program = start_program(*MASTER)
    program.wait_for_line("ready")
    assert not is_warm(program.process.pid)
