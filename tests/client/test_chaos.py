"""A round of the chaos soak: all processes of a store that keeps its objects are killed once."""

import subprocess
import sys

import pytest

from tests.sources import ROOT

RUN_S = 540


@pytest.mark.slow
@pytest.mark.timeout(RUN_S + 30)
def test_nothing_acknowledged_is_lost_whichever_process_is_killed_or_stopped():
    # No minutes: it ends when each kind of fault came once.
    command = [sys.executable, "-m", "tests.soak.chaos", "--minutes", "0", "--seed", "1"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
