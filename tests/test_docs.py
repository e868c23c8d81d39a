"""The documents: links lead somewhere, code blocks run, commands shown exist and succeed.

A block that cannot run here says why, in its opening line:

    ```python no-run: needs a GPU

Blocks of one page share one namespace, from top to bottom, as a reader would type them. Of a
`console` block, every `$ mooncake ...` line is run when it opens with `console run`; the others
are parsed, so that no page shows a command or an option that does not exist.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.cli_reference import page
from tests.command_lines import parse
from tests.sources import ROOT, files, text

PAGES = files(".md")
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)|!\[[^\]]*\]\((?P<image>[^)\s]+)\)")
NO_RUN = re.compile(r"no-run: \S.*")


def blocks(path, language):
    """(line, rest of the opening line, body) of every fenced block in a language."""
    for match in FENCE.finditer(text(path)):
        first, _, rest = match["info"].strip().partition(" ")
        if first == language:
            yield text(path).count("\n", 0, match.start()) + 1, rest, match["body"]


def anchors(path):
    """The anchors that headings get, as code hosts make them."""
    found = set()
    for line in FENCE.sub("", text(path)).splitlines():
        if match := re.match(r"#{1,6} (.+)", line):
            title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match[1]).strip().lower()
            slug = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
            found.add(slug if slug not in found else f"{slug}-1")
    return found


def commands(body):
    """The `mooncake` command lines of a console block, continuation lines joined."""
    for line in body.replace("\\\n", " ").splitlines():
        if line.startswith("$ mooncake"):
            yield shlex.split(line.removeprefix("$ "), comments=True)


PYTHON_PAGES = [path for path in PAGES if any(blocks(path, "python"))]
CONSOLE = [(path, *block) for path in PAGES for block in blocks(path, "console")]


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_links_lead_somewhere(path):
    for match in LINK.finditer(FENCE.sub("", text(path))):
        target, _, anchor = (match["target"] or match["image"]).partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        goal = Path(os.path.normpath(path.parent / target)) if target else path
        assert (ROOT / goal).exists(), f"{path} links to {goal}, which does not exist"
        if anchor:
            assert anchor in anchors(goal), f"{path} links to #{anchor}, not a heading of {goal}"


@pytest.mark.parametrize("path", PYTHON_PAGES, ids=str)
def test_python_blocks_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for line, info, body in blocks(path, "python"):
        if info:
            assert NO_RUN.fullmatch(info), f"{path}:{line}: say `no-run: <reason>`, not {info!r}"
            continue
        # The block keeps its line numbers, so that a traceback points into the page.
        exec(compile("\n" * line + body, str(path), "exec"), namespace)


@pytest.mark.parametrize(
    ("path", "line", "info", "body"), CONSOLE, ids=[f"{path}:{line}" for path, line, *_ in CONSOLE]
)
def test_console_blocks_show_commands_that_exist(path, line, info, body, tmp_path):
    assert info in ("", "run"), f"{path}:{line}: a console block is plain or `run`"
    for words in commands(body):
        if info == "run":
            done = subprocess.run(
                [sys.executable, "-m", "mooncake_store", *words[1:]],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=100,
            )
            assert done.returncode == 0, f"{path}:{line}: {shlex.join(words)}: {done.stderr}"
            continue
        parse(words)


def test_the_command_reference_is_up_to_date():
    assert text(Path("docs/reference/cli.md")) == page(), "run python scripts/cli_reference.py"
