"""Programs that tests start are forked from a process that has loaded what they need.

Each program of a pool spends a second of processor time before it serves: the interpreter, numpy,
numba, this project's modules, the kernels from disk. The suite starts some hundreds, so most of its
time went there. `python -m MODULE` of `PROGRAMS`, started by whatever in a process that runs tests,
is instead forked from a warm process (`tests.warm_process`), of which each of these has one, and
another one for programs that serve models: what torch brings along makes each fork twice as dear.
The same below `prlimit --nofile=N`, by which a test gives a program few descriptors.

What is tested stays the same: a process of its own, with its own memory, descriptors, environment,
arguments, process group and exit code, that talks over real sockets, and is a child of who started
it. What differs is how it began, and that the interpreter is not taken apart at its end. So a start
goes the usual way where that could matter:

- in tests with the mark `cold`: those about starts, first uses, imports, memory, command lines;
- where the environment differs in more than settings of this project, or limits differ;
- on a terminal, in another directory, or with anything else that is not plain;
- all of them with MOONCAKE_TEST_COLD=1.

Programs that were forked start their own, shards and workers, from a warm process of their own: one
that was forked from them before they began, so that these are their children.
"""

import json
import os
import platform
import resource
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = frozenset({
    "mooncake_store",
    "mooncake_store.master.shard_process",
    "mooncake_store.program.local_program",
    "serving.workers.program",
    "tests.hosts.enter",
    "tests.soak.chaos",
})  # fmt: skip
PARENTS = PROGRAMS - {
    "mooncake_store.master.shard_process",
    "serving.workers.program",
    "tests.hosts.enter",  # what it would start from here would be on no host
}
"""Those that may start others."""
# What may differ from the environment of the warm process, beside all MOONCAKE_*: nothing reads
# these before it runs.
VARIABLES = frozenset({"NO_COLOR", "PYTEST_CURRENT_TEST", "PYTHONUNBUFFERED", "XDG_STATE_HOME"})
REQUEST_BYTES_MAX = 100_000
FDS_MAX = 64
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


class Call(NamedTuple):
    """The arguments of `subprocess._fork_exec`, as far as they are looked at."""

    args: list
    executables: list
    close_fds: bool
    pass_fds: tuple
    cwd: object
    env: list | None
    p2cread: int
    p2cwrite: int
    c2pread: int
    c2pwrite: int
    errread: int
    errwrite: int
    errpipe_read: int
    errpipe_write: int
    restore_signals: bool
    start_new_session: bool
    process_group: int
    gid: object
    gids: object
    uid: object
    umask: int
    preexec: object


def surroundings():
    """What a forked program has from the warm process and an executed one from who starts it."""
    limits = [resource.getrlimit(limit) for limit in LIMITS]
    return limits, os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0), os.getpgrp()


class Warm(NamedTuple):
    """A process that programs are forked from, and what it had when it began."""

    channel: socket.socket
    env: dict
    surroundings: tuple
    process: subprocess.Popen | None = None


def decoded(arguments):
    return [os.fsdecode(argument) for argument in arguments]


def limited(args):
    """The command below `prlimit --nofile=N`, and N; any other as it is, and None."""
    program, _, files = "".join(args[:2]).partition("--nofile=")
    return (args[2:], int(files)) if program == "prlimit" and files.isdecimal() else (args, None)


def serves(args):
    """Whether a program serves models, or is part of one that does."""
    return args[2] == "serving.workers.program" or args[2:4] == ["mooncake_store", "serve"]


class Starter:
    """Stands in for `subprocess._fork_exec`, so that all else of `subprocess` is as ever."""

    def __init__(self):
        self.plain = subprocess._fork_exec
        self.cold = False
        """Whether programs start the usual way at the moment."""
        self._lock = threading.Lock()
        self._warm = {}  # by whether they serve models

    def __call__(self, *arguments):
        call = Call(*arguments[: len(Call._fields)])
        if not self.cold and self._is_plain(call):
            kind = serves(limited(decoded(call.args))[0])
            with self._lock:
                warm = self._warm.get(kind) or self._warm_up(kind)
                request = self._request(call, warm)
                if request is not None:
                    return self._ask(warm.channel, *request)
        return self.plain(*arguments)

    def _is_plain(self, call):
        args, files = limited(decoded(call.args))
        return (
            args[:2] == [sys.executable, "-m"]
            and len(args) > 2
            and args[2] in PROGRAMS
            and (files or os.fsdecode(call.executables[0]) == sys.executable)
            and call.close_fds
            and Path(os.fsdecode(call.cwd or ".")).resolve() == ROOT == Path.cwd()
            and call.process_group == -1
            and call.umask == -1
            and (call.gid, call.gids, call.uid, call.preexec) == (None, None, None, None)
            and not any(os.isatty(fd) for fd in _standard(call))
        )

    def _request(self, call, warm):
        """The message and the descriptors to send; None where the start has to be the usual one."""
        if call.env is None:
            env = dict(os.environ)
        else:
            pairs = [os.fsdecode(pair).partition("=") for pair in call.env]
            env = {name: value for name, _, value in pairs}
        differing = {name for name, _ in env.items() ^ warm.env.items()} - VARIABLES
        if any(not name.startswith("MOONCAKE_") for name in differing):
            return None
        if surroundings() != warm.surroundings:
            return None
        kept = [fd for fd in call.pass_fds if fd != call.errpipe_write]
        fds = [*_standard(call), *kept]
        args, files = limited(decoded(call.args))
        request = {
            "args": args,
            "files": files,
            "env": env,
            "fds": [0, 1, 2, *kept],
            "session": bool(call.start_new_session),
        }
        data = json.dumps(request).encode()
        return None if len(data) > REQUEST_BYTES_MAX or len(fds) > FDS_MAX else (data, fds)

    def _ask(self, channel, data, fds):
        socket.send_fds(channel, [data], fds)
        pid = channel.recv(64)
        assert pid, "the warm process ended; see what it wrote"
        return int(pid)

    def _warm_up(self, kind):
        """Start a warm process, and wait until it is warm."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(PATIENCE_S)
        env, around = dict(os.environ), surroundings()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm_process", str(theirs.fileno()), *["serve"] * kind],
            stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], cwd=ROOT,
            # One thread; what is written is seen at once.
            env=env | {"OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        theirs.close()
        try:
            assert ours.recv(64) == b"warm", "the warm process ended; see what it wrote"
        except BaseException:
            ours.close()
            process.kill()
            process.wait(PATIENCE_S)
            raise
        self._warm[kind] = Warm(ours, env, around, process)
        return self._warm[kind]

    def use(self, channel):
        """Have programs start from a warm process that was forked from this one."""
        channel.settimeout(PATIENCE_S)
        self._warm = dict.fromkeys((False, True), Warm(channel, dict(os.environ), surroundings()))

    def renew(self):
        """Let the warm processes end; the next ones have what this process has by then."""
        with self._lock:
            for warm in self._warm.values():
                warm.channel.close()
                warm.process.wait(PATIENCE_S)
            self._warm.clear()

    def close(self):
        """Let the warm processes end, and have programs start the usual way from now on."""
        subprocess._fork_exec = self.plain
        self.renew()


def _standard(call):
    """What the program has as standard input, output and error."""
    given = (call.p2cread, call.c2pwrite, call.errwrite)
    return [own if fd == -1 else fd for own, fd in enumerate(given)]


def stand_in():
    """Have programs start as a new `Starter` does it."""
    subprocess._fork_exec = starter = Starter()
    return starter


def install():
    """Have programs start warm in this process; None where that cannot be, or is not wanted."""
    if isinstance(subprocess._fork_exec, Starter):  # this one was forked from a warm process
        return subprocess._fork_exec
    if os.environ.get("MOONCAKE_TEST_COLD") or platform.machine() not in ("x86_64", "aarch64"):
        return None
    return stand_in()
