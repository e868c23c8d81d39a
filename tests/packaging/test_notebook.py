"""The notebook of the first hour: it is the page, and it runs."""

import json
import os
import subprocess
import sys

import pytest

from scripts.notebook import TARGET, text
from tests.sources import ROOT

CODE = [cell["id"] for cell in json.loads(text())["cells"] if cell["cell_type"] == "code"]


def test_it_is_what_the_page_says():
    assert TARGET.read_text(encoding="utf-8") == text(), "run python scripts/notebook.py"
    assert len(CODE) >= 5


@pytest.mark.cold
def test_its_cells_run_in_order_in_one_process(tmp_path):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.packaging.cells", TARGET],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert [line[4:] for line in done.stdout.splitlines() if line.startswith("ran ")] == CODE


def test_it_is_a_notebook_to_jupyter():
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    nbformat.validate(nbformat.read(TARGET, as_version=4))
