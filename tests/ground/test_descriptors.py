"""What programs make of the limit of open files."""

import json
import resource
import subprocess
import sys

import pytest

from mooncake_store.config import MasterConfig
from mooncake_store.program import descriptors

PROGRAM = """
import json, resource, sys
from mooncake_store import config
from mooncake_store.program.descriptors import fitted, raise_limit

raise_limit()
overrides = {"connections_max": int(sys.argv[1])}
given = config.load(config.MasterConfig, environ={}, overrides=overrides)
fits = fitted(given.value).connections_max
print(json.dumps([resource.getrlimit(resource.RLIMIT_NOFILE), fits]))
"""


def program(connections_max, soft, hard):
    """The limits of a program, the connections that it serves, and what it logged."""
    ran = subprocess.run(
        ["prlimit", f"--nofile={soft}:{hard}", sys.executable, "-c", PROGRAM, str(connections_max)],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return *json.loads(ran.stdout), ran.stderr


def test_a_program_has_as_many_as_it_may_and_serves_no_more_than_fit():
    limits, fits, said = program(1000, 128, 512)
    assert limits == [512, 512]
    assert 300 < fits < 512
    assert said.count("\n") == 1
    assert f"{fits} connections are served at once, not 1000" in said


def test_what_fits_is_left_as_it_is_and_not_talked_about():
    assert program(100, 128, 512) == ([512, 512], 100, "")


@pytest.mark.parametrize("limit", [resource.RLIM_INFINITY, 1 << 20])
def test_a_limit_that_is_none_lowers_nothing(monkeypatch, limit):
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: (limit, limit))
    settings = MasterConfig()
    assert descriptors.fitted(settings) is settings


@pytest.mark.parametrize(
    ("limit", "shards", "lent"),
    [(1024, 1, 42), (1024, 4, 28), (20_000, 1, 256), (8, 1, 0), (resource.RLIM_INFINITY, 1, 256)],
)
def test_segments_take_half_of_what_a_process_may_open(monkeypatch, limit, shards, lent):
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: (limit, limit))
    assert descriptors.lendable(shards) == lent
