"""What shells are told, in a real bash; and the pages of man, as groff reads them."""

import os
import shutil
import subprocess
import sys

import pytest

from mooncake_store.cli.shared.tree import COMMANDS, run
from scripts import man_pages

# It starts programs the usual way.
pytestmark = pytest.mark.cold


def completed(script, folder, *words):
    """What bash offers for the last of these words."""
    program = folder / "mooncake"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m mooncake_store "$@"\n')
    program.chmod(0o700)
    line = " ".join(f"'{word}'" for word in ("mooncake", *words))
    asked = (
        f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}; _mooncake_completion mooncake\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", asked],
        capture_output=True, text=True, timeout=60, check=True, env=os.environ | {"PATH": path},
    )  # fmt: skip
    return done.stdout.split()


def test_bash_completes_commands_and_options(capfd, tmp_path):
    assert run(["completion", "bash"]) == 0
    script = capfd.readouterr().out
    assert completed(script, tmp_path, "dr") == ["drain"]
    assert completed(script, tmp_path, "tenant", "") == ["list", "quota"]
    assert completed(script, tmp_path, "drain", "--ma") == ["--master"]


@pytest.mark.parametrize(("shell", "begins"), [("zsh", "#compdef mooncake"), ("fish", "complete ")])
def test_other_shells_are_told_how_to_ask(capfd, shell, begins):
    assert run(["completion", shell]) == 0
    said = capfd.readouterr().out
    assert said.startswith(begins)
    assert f"_MOONCAKE_COMPLETE=complete_{shell}" in said
    assert run(["completion", "sh"]) == 2


def test_groff_reads_every_page_without_a_complaint():
    groff = shutil.which("groff")
    if groff is None:
        pytest.skip("there is no groff here")
    pages = man_pages.pages()
    assert set(pages) == {"mooncake.1", *(f"mooncake-{name}.1" for name in COMMANDS)}
    done = subprocess.run(
        [groff, "-man", "-ww", "-Tutf8", "-z"],
        input="".join(pages.values()).encode(), capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.decode()) == (0, "")


def test_a_page_has_what_the_help_has():
    page = man_pages.pages()["mooncake-drain.1"]
    for text in (r"\-\-cancel", r"\-\-master", "SEGMENT", ".SH EXAMPLES", "interrupted"):
        assert text in page
