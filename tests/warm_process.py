"""The warm process that `tests.warm` forks programs from; not to be run by hand.

    python -m tests.warm_process 3        # 3: a socket, over which programs are asked for
    python -m tests.warm_process 3 serve  # programs that serve models

It imports what the programs of a pool import, loads their kernels, and then waits. A request names
a module, its arguments, environment and descriptors; the answer is the number of a new process,
which goes on as `python -m MODULE` would. That process is a child of who asked, not of this one
(CLONE_PARENT): so it is waited for, signalled and counted as any other child, and what it leaves
behind when it is killed is adopted as usual.

It has one thread, so no lock can be held by another where it forks. It ends when the socket does.

A program that ends in order runs what was registered for its end, and is gone: the interpreter is
not taken apart, for which all that a program shares with the others would be copied first.

A program that may start others is forked once more before it begins. The copy is the warm process
of that program: it has nothing of what the program was given, and its forks are children of the
program.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib.util
import itertools
import json
import os
import platform
import resource
import runpy
import signal
import socket
import sys
import threading

import typer

from tests import warm
from tests.processes import WAITING
from tests.warm import FDS_MAX, REQUEST_BYTES_MAX

# By the machine: the number of the system call `clone`, whose other arguments are zero here.
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE_PARENT = 0x8000

MODULES = (
    "email.parser",
    "encodings.idna",
    "mooncake_store.cli.main",
    "mooncake_store.cli.shared.client",
    "mooncake_store.cli.shared.tree",
    "mooncake_store.cli.shared.program_options",
    "mooncake_store.client.blocking",
    "mooncake_store.client.setup",
    "mooncake_store.core.warmup",
    "mooncake_store.local_cluster",
    "mooncake_store.master.running",
    "mooncake_store.program.children",
    "mooncake_store.program.descriptors",
    "mooncake_store.program.fence",
    "mooncake_store.worker.program",
    "transfer_engine.transports.file",
    "transfer_engine.transports.lending",
    "transfer_engine.transports.local",
    "transfer_engine.transports.shm",
    "uvloop",
)


def warm_up(*, serves):
    """Do once what every program does at its start."""
    for module in MODULES:
        importlib.import_module(module)
    if serves and importlib.util.find_spec("torch"):
        importlib.import_module("serving.workers.worker")
    from mooncake_store.client import setup
    from mooncake_store.config.settings import MasterConfig, load
    from mooncake_store.core.warmup import warmup
    from transfer_engine.segments import mapping

    load(MasterConfig, environ={}, overrides={})
    command_once()
    warmup()
    mapping.load_kernels()
    setup.load_kernels()
    # Collections in a program leave alone what all programs share.
    gc.collect()
    gc.freeze()
    tasks = os.listdir("/proc/self/task")
    assert len(tasks) == 1, f"a fork needs a process of one thread, and there are {len(tasks)}"


def command_once():
    """Run a command, with which typer loads more than when it is imported."""
    app = typer.Typer()

    @app.command()
    def nothing(number: int = 0):
        pass

    app(["--number", "1"], standalone_mode=False)


def sibling():
    """As `os.fork`, but the new process is a child of this one's parent."""
    python, system = ctypes.pythonapi, ctypes.PyDLL(None, use_errno=True)
    python.PyOS_BeforeFork()
    pid = system.syscall(CLONE[platform.machine()], CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return pid


def call_oneself(name):
    with open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write(name)


def close_all_but(kept):
    # `os.closerange(0, 0)` closes all there are.
    edges = [-1, *sorted(kept), os.sysconf("SC_OPEN_MAX")]
    for below, above in itertools.pairwise(edges):
        if above - below > 1:
            os.closerange(below + 1, above)


def become(request, given):
    """Take on what a process started with `request` and the descriptors `given` has."""
    targets = request["fds"]
    above = max(targets) + 1  # so that none is where another one is to go
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in given]
    for fd, target in zip(moved, targets, strict=True):
        os.dup2(fd, target)
    close_all_but(targets)
    if request["files"]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (request["files"], request["files"]))
    if request["session"]:
        os.setsid()
    call_oneself(os.path.basename(sys.executable))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.orig_argv = request["args"]
    sys.argv = request["args"][2:]


def asked(channel):
    """Serve requests; return, in a new process, the module that it is to run, or None at the end.

    That process leaves all of this behind, so that it ends as one that began with the module.
    """
    while True:
        data, fds, _, _ = socket.recv_fds(channel, REQUEST_BYTES_MAX, FDS_MAX)
        if not data:
            return None
        request = json.loads(data)
        pid = sibling()
        if pid == 0:
            channel.detach()
            become(request, fds)
            return request["args"][2]
        for fd in fds:
            os.close(fd)
        channel.send(str(pid).encode())


def keep_a_copy():
    """Fork a warm process for what this program starts; there, return as `asked` does."""
    starter = warm.stand_in()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        starter.use(ours)
        return False, None
    kept = fcntl.fcntl(theirs.detach(), fcntl.F_DUPFD, 3)
    close_all_but([kept])
    os.open(os.devnull, os.O_RDWR)
    os.dup(0)
    os.dup(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    call_oneself(WAITING)
    return True, asked(socket.socket(fileno=kept))


def main():
    # Ctrl-C is for the programs; this process ends with the tests.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=int(sys.argv[1]))
    warm_up(serves=sys.argv[2:] == ["serve"])
    channel.send(b"warm")
    program = asked(channel)
    if program in warm.PARENTS:
        copied, below = keep_a_copy()
        if copied and below is None:
            os._exit(0)  # the program ended, and what it left is its own
        program = below or program
    return program


def run(program):
    """Be the program until it ends, in any way but an error."""
    code = None
    try:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        code = ended.code
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(code)  # what nobody reads any more is told of as ever
    os._exit(code or 0)


if __name__ == "__main__":
    program = main()
    if program is not None:
        run(program)
