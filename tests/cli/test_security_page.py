"""The page for operators about security: what it has one type works, what it names is there."""

import os
import re
import shlex
import signal
import subprocess
import sys

import pytest

from tests.sources import ROOT
from tests.test_docs import FENCE
from tests.waiting import until

PAGE = (ROOT / "docs/operating/security.md").read_text(encoding="utf-8")
SHOWN = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
MOONCAKE = f'mooncake() {{ {shlex.quote(sys.executable)} -m mooncake_store "$@"; }}; '


def section(title):
    """The text under a heading."""
    _, found, rest = PAGE.partition(f"\n## {title}\n")
    assert found, f"the page has no section {title!r}"
    return rest.partition("\n## ")[0]


def steps(text):
    """Each command of the console blocks, and the lines that the page shows as what it says."""
    found = []
    for block in FENCE.finditer(text):
        if block["info"].strip() == "console":
            for line in block["body"].replace("\\\n", " ").splitlines():
                if line.startswith("$ "):
                    found.append((line.removeprefix("$ "), []))
                else:
                    found[-1][1].append(line)
    return found


def test_every_advisory_names_a_test_and_every_test_is_there():
    rows = [
        row
        for row in section("Published advisories, and why they do not apply").splitlines()
        if row.startswith("| ") and not row.startswith("| advisory")
    ]
    assert len(rows) > 10
    for row in rows:
        named = SHOWN.findall(row)
        assert named, f"no test shows it: {row}"
        for file, test in named:
            source = (ROOT / file).read_text(encoding="utf-8")
            assert re.search(rf"def {test}\(", source), f"{file} has no {test}"


def test_each_advisory_stands_there_once_for_what_it_is():
    """Those that are two things stand in two rows."""
    rows = section("Published advisories, and why they do not apply").splitlines()
    first_cells = [set(re.findall(r"CVE-[\d-]+", row.split("|")[1])) for row in rows if "|" in row]
    for cell in first_cells:
        assert first_cells.count(cell) == 1 or not cell


@pytest.mark.timeout(300)
def test_two_tenants_step_by_step(start_program, free_port, tmp_path):
    """As typed, in a folder of one's own; the port alone is another, as others have that one."""
    port = str(free_port)
    home = {"HOME": str(tmp_path / "home"), "XDG_STATE_HOME": str(tmp_path / "state")}
    folder = tmp_path / "typed"
    folder.mkdir()
    programs = []

    def said(command):
        done = subprocess.run(
            ["bash", "-c", MOONCAKE + command],
            cwd=folder, env=os.environ | home | {"PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def as_shown(command, shown):
        code, text = said(command)
        refused = any(line.startswith("error: ") for line in shown)
        return (code != 0) == refused and all(line in text for line in shown), code, text

    for typed, shown in [
        *steps(section("Two tenants, step by step")),
        *steps(section("Rotating and revoking")),
    ]:
        command = typed.replace("50051", port)
        words = shlex.split(command)
        if words[1] in ("master", "worker"):
            files = [str(folder / word) if (folder / word).exists() else word for word in words[1:]]
            more = ["--port", port] if words[1] == "master" else []
            program = start_program("-m", "mooncake_store", *files, *more, **home)
            program.wait_for_line("master is ready" if more else "lends 64MiB", 100)
            programs.append(program)
        else:
            # What was changed in the directory is seen within a second.
            last = []

            def works(command=command, shown=shown, last=last):
                last[:] = as_shown(command, shown)
                return last[0]

            until(works, what=f"{typed} says {shown}")
    for program in reversed(programs):
        program.signal(signal.SIGTERM)
        assert program.wait() == 0
