"""Builds of Python without a global interpreter lock are refused, in one sentence."""

import subprocess
import sys

import pytest

from mooncake_store.cli.main import main
from mooncake_store.cli.shared.app import ExitCode

SAID = "runs without a global interpreter lock, which is not supported; run it with an ordinary"


def test_a_command_says_so_before_anything_else(monkeypatch, capsys):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert main(["version"]) == ExitCode.CONFIG
    error = capsys.readouterr().err
    assert SAID in error
    assert error.count("\n") == 1


@pytest.mark.cold
def test_a_program_that_uses_the_library_is_told_with_its_first_client():
    code = "import sys; sys._is_gil_enabled = lambda: False; import mooncake_store as store; "
    command = [sys.executable, "-c", code + "store.Client('mooncake://local')"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: Python 3.")
    assert SAID in done.stderr


@pytest.mark.parametrize("with_a_lock", [True, None])
def test_a_build_with_the_lock_is_told_nothing(monkeypatch, capsys, with_a_lock):
    if with_a_lock is None:  # a Python that knows of no builds without
        monkeypatch.delattr(sys, "_is_gil_enabled", raising=False)
    else:
        monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    assert main(["version"]) == ExitCode.OK
    assert capsys.readouterr().err == ""
