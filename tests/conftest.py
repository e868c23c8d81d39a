"""Fixtures and settings that many tests share.

Hypothesis runs few examples by default, so that the default suite stays quick; set
HYPOTHESIS_PROFILE=thorough to search for longer. Neither has a deadline: the first call of a
kernel may compile it.
"""

import contextlib
import gc
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from mooncake_store.journal.ring_file import remove_rings
from mooncake_store.program import kernels, logs
from tests import warm
from tests.shared_memory import SharedMemory
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
STARTER = pytest.StashKey[warm.Starter | None]()
# numpy makes a thread for each processor whenever it is imported, and hundreds of programs do so.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

settings.register_profile(
    "default",
    max_examples=30,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "thorough",
    max_examples=1000,
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config):
    """Drop kernel caches that an edit made stale, once, before any worker imports a kernel."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Started in the background of a script: programs under test would inherit this.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    end_in_order_on_sigterm()
    config.stash[STARTER] = warm.install()
    if not hasattr(config, "workerinput"):
        kernels.forget_stale_caches()
        config.pluginmanager.register(SharedMemory(), "mooncake-shared-memory")


def end_in_order_on_sigterm():
    """Have SIGTERM, as `timeout` sends it, end fixtures as Ctrl-C does, with all that they started.

    It comes twice, to a process and to its group: the second must not end what the first began.
    """
    own = os.getpid()

    def end(number, frame):
        signal.signal(number, signal.SIG_IGN if os.getpid() == own else signal.SIG_DFL)
        if os.getpid() != own:  # a child that was forked, for which this is no test
            os.kill(os.getpid(), number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)


def pytest_unconfigure(config):
    """Let the warm process of this one end."""
    starter = config.stash.get(STARTER, None)
    if starter is not None:
        starter.close()


def pytest_xdist_auto_num_workers(config):
    """Two workers for each processor: tests wait for other processes half of the time."""
    return len(os.sched_getaffinity(0)) * 2


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect no garbage while tests are collected, and leave them alone in later collections.

    They and what they import are a million objects that live as long as the process; to walk them
    again and again took a third of the time.
    """
    gc.disable()
    outcome = yield
    gc.freeze()
    gc.enable()
    return outcome


def pytest_collection_modifyitems(items):
    """Shuffle modules, and the tests of each, by the number in MOONCAKE_TEST_SHUFFLE."""
    seed = os.environ.get("MOONCAKE_TEST_SHUFFLE")
    if seed:
        chance = random.Random(seed)
        chance.shuffle(items)
        modules = {item.path: chance.random() for item in items}
        items.sort(key=lambda item: modules[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Have a test with the mark `cold`, and fixtures made for it, start programs the usual way."""
    starter = item.config.stash[STARTER]
    if starter is not None:
        starter.cold = item.get_closest_marker("cold") is not None


@pytest.fixture(autouse=True)
def logs_as_before():
    """Undo what a command that ran in this process did with its logs: others read theirs."""
    loggers = [logging.getLogger(name) for name in (None, *logs.PACKAGES)]
    levels, handlers = [each.level for each in loggers], set(loggers[0].handlers)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    for handler in set(loggers[0].handlers) - handlers:
        if type(handler).__module__ == logs.__name__:
            loggers[0].removeHandler(handler)


@pytest.fixture
def free_port():
    """A TCP port on the loopback that nobody used a moment ago.

    Nothing can reserve it, so prefer to bind port 0 and ask; this is for programs that are told.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Program:
    """A running program whose output is kept, line by line, and that ends with the test."""

    def __init__(self, arguments, env):
        self.arguments = arguments
        self.process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            cwd=ROOT,
            # Its own process group, so that its children end with it.
            start_new_session=True,
        )
        self._lines = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            with self._news:
                self._lines.append(line)
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    @property
    def output(self):
        """Everything written so far, standard error included."""
        with self._news:
            return "".join(self._lines)

    def wait_for_line(self, text, timeout_s=PATIENCE_S):
        """The first line that contains `text`; fails with all output when none comes in time."""
        deadline = time.monotonic() + timeout_s
        seen = 0
        with self._news:
            while True:
                for line in self._lines[seen:]:
                    if text in line:
                        return line
                seen = len(self._lines)
                left = deadline - time.monotonic()
                if left <= 0 or not self._reader.is_alive():
                    break
                self._news.wait(min(left, 0.5))
        pytest.fail(f"{self.arguments} never wrote {text!r}; it wrote:\n{''.join(self._lines)}")

    def wait(self, timeout_s=PATIENCE_S):
        """The exit code; fails when the program does not end in time."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.arguments} did not end; it wrote:\n{self.output}")
        self._reader.join(timeout_s)
        return code

    def signal(self, number):
        """Send a signal to the program itself, not to its children."""
        self.process.send_signal(number)

    def kill(self):
        """End the program and its children at once; harmless when they have ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        self.process.stdout.close()


def programs():
    """Yield a function that starts programs; they are killed when the generator goes on.

    They keep their state in a folder of their own, of which nothing is left.
    """
    running = []
    with tempfile.TemporaryDirectory(prefix="mooncake-state-") as state:
        usual = {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1", "XDG_STATE_HOME": state}

        def start(*arguments, **environment):
            if arguments[0] in ("-m", "-c"):
                arguments = (sys.executable, *arguments)
            env = os.environ | usual | environment
            running.append(Program([str(argument) for argument in arguments], env))
            return running[-1]

        yield start
        for program in running:
            program.kill()
        # Not before all have ended: one that is starting has yet to make its own.
        for shard in shards_below(Path(state)):
            remove_rings(shard)


def shards_below(folder):
    """The folders that shards keep their state in, at most three levels down."""
    return [path for depth in range(4) for path in folder.glob("*/" * depth + "shard-*")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    """Remove, with the folder of a test, the memory that belongs to what lay there.

    A master that was killed leaves it to the next one, which there will not be. What there is is
    noted before fixtures end: the folder may go before a master that uses it.
    """
    folder = item.funcargs.get("tmp_path") if hasattr(item, "funcargs") else None
    shards = [] if folder is None else shards_below(folder)
    outcome = yield
    for shard in shards:
        remove_rings(shard)
    return outcome


@pytest.fixture(scope="session", autouse=True)
def memory_of_folders(tmp_path_factory):
    """Remove, at the end, the memory that belongs to what lay in the folders of fixtures.

    They do so themselves, except one that failed before it came to that.
    """
    yield
    for shard in shards_below(tmp_path_factory.getbasetemp()):
        remove_rings(shard)


@pytest.fixture
def start_program():
    """Start programs that are killed when the test ends, whatever happens.

    Call it with the arguments (`sys.executable` is put before a leading "-m" or "-c") and
    environment variables to add; it returns a `Program`.
    """
    yield from programs()


@pytest.fixture
def leftovers():
    """A function that frees what only the garbage collector can free, and returns the types."""
    gc.disable()

    def found():
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        types = {type(thing).__name__ for thing in gc.garbage}
        gc.set_debug(0)
        gc.garbage.clear()
        gc.collect()
        return types

    yield found
    gc.enable()
