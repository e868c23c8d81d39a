"""What a command says while it compiles kernels: on a terminal, in a log, and with --json."""

import os
import pty
import subprocess
import sys

import pytest

# Stands for any command: it does what `njit` does when a kernel is not on disk.
PROGRAM = """
import sys
from kernel_cache import telling
from mooncake_store.cli.shared.app import progress
from mooncake_store.cli.shared.compiling import compilation_shown

def compile_all():
    for module in ("one._kernels", "two._kernels"):
        telling.imported(module)
    for module in ("one._kernels", "one._kernels", "two._kernels"):
        telling.begun(module)
        if "wait" in sys.argv:
            sys.stdin.readline()
        telling.ended()

with compilation_shown(silent="--json" in sys.argv):
    if "spinner" in sys.argv:
        with progress("working"):
            compile_all()
    else:
        compile_all()
print("result")
"""
LINES = [
    "compiling kernels, once per machine: 1 of 2 modules (one._kernels)",
    "compiling kernels, once per machine: 2 of 2 modules (two._kernels)",
]


def run(*options):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *options], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "result\n"), done.stderr
    return done.stderr.splitlines()


@pytest.mark.parametrize("options", [(), ("spinner",)])
def test_a_log_gets_a_line_for_each_module(options):
    assert run(*options) == LINES


def test_standard_error_of_json_stays_empty():
    assert run("--json") == []


@pytest.fixture
def terminal():
    """Run a program on a terminal; give a function that reads until some text was shown."""
    ours, theirs = pty.openpty()
    running = []

    def start(*options):
        running.append(
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *options],
                stdin=subprocess.PIPE,
                stdout=theirs,
                stderr=theirs,
                env=os.environ | {"TERM": "xterm", "COLUMNS": "120"},
            )
        )
        return running[-1]

    def read(text):
        shown = ""
        while text not in shown:
            shown += os.read(ours, 4096).decode()
        return shown

    yield start, read
    for program in running:
        program.kill()
        program.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)


def test_a_terminal_shows_one_line_that_moves_and_goes(terminal):
    start, read = terminal
    program = start("wait")
    read(LINES[0])
    read(LINES[0])  # drawn again, with the seconds, while nothing else happens
    program.stdin.write(b"\n\n")
    program.stdin.flush()
    read(LINES[1])
    program.stdin.write(b"\n")
    program.stdin.flush()
    last = read("result").partition("result")[0]
    assert last.endswith("\r\x1b[K")
    assert "\n" not in last


def test_a_spinner_that_is_there_says_it_instead(terminal):
    start, read = terminal
    program = start("wait", "spinner")
    read(LINES[0])
    program.stdin.write(b"\n\n")
    program.stdin.flush()
    read(LINES[1])
    program.stdin.write(b"\n")
    program.stdin.flush()
    read("result")
