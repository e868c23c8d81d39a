"""The chaos soak, a little of it: processes are killed, hosts are lost, and nothing is."""

import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.soak.ledger import CALL, PUT, READ
from tests.soak.trial import Findings, longest_s
from tests.sources import ROOT

RUN_S = 540
SECOND = 10**9

pytestmark = pytest.mark.timeout(RUN_S + 30)


def run(*options, before=()):
    """What the soak prints; without minutes it ends when each kind of fault came once."""
    command = [*before, sys.executable, "-m", "tests.soak.chaos", "--minutes", "0", *options]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if "are left out: no etcd" in done.stdout:
        pytest.skip("no etcd is installed")
    return done.stdout


def faults(said):
    """How often each kind of fault came, by the table."""
    return dict(re.findall(r"^([a-z ]+?) +(\d+) +[\d.]+ +[\d.]+ +[\d.]+ ", said, re.MULTILINE))


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_whichever_process_is_killed_or_stopped():
    said = run("--seed", "1", "--part", "one")
    assert len(faults(said)) == 10
    assert "lost 0, wrong bytes 0" in said


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_when_the_host_of_an_elected_leader_is_cut_off():
    said = run("--seed", "2", "--part", "elected", "--only", "leader cut off")
    if "partitions are left out" in said:
        pytest.skip("this machine makes no hosts for tests")
    assert faults(said) == {"leader cut off": "1"}
    assert "lost 0, wrong bytes 0" in said


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="nothing here takes rights away")
def test_without_hosts_partitions_are_left_out_and_that_is_said():
    # Whoever runs this has the right to begin with, or has not and keeps what little that is.
    takes = subprocess.run(["setpriv", "--bounding-set=-sys_admin", "true"], check=False)
    before = () if takes.returncode else ("setpriv", "--bounding-set=-sys_admin")
    said = run("--seed", "2", "--part", "elected", "--only", "leader", before=before)
    assert "partitions are left out: this machine makes no hosts for tests" in said
    assert faults(said) == {"leader killed": "1", "leader lost": "1", "leader stopped": "1"}


def test_the_longest_time_without_a_call_is_between_those_of_its_kind_that_succeeded():
    rows = [
        (READ, 0, 3 * SECOND, 16, 0), (PUT, 0, 4 * SECOND, 1, 0), (READ, 0, 6 * SECOND, 16, 1),
        (PUT, 0, 5 * SECOND, 1, 1), (READ, 0, 9 * SECOND, 16, 0), (READ, 0, 30 * SECOND, 16, 0),
    ]  # fmt: skip
    calls = np.array(rows, CALL)
    assert longest_s(calls, READ, 2 * SECOND, 10 * SECOND) == 6
    assert longest_s(calls, PUT, 2 * SECOND, 10 * SECOND) == 6
    assert longest_s(calls, READ, 10 * SECOND, 12 * SECOND) == 2


def test_a_trial_with_a_complaint_ends_with_it(capsys):
    found = Findings()
    assert found.print() == 0
    found.complaints.append("seed 1: something is lost")
    assert found.print() == 1
    assert "FAILED: seed 1: something is lost" in capsys.readouterr().out
