"""Writes docs/guide/first-hour.ipynb from the page beside it: `python scripts/notebook.py`.

The page is the one source: it is read where there is no Jupyter, and shows what a change of it
changes. Its Python blocks and the commands that can run anywhere become cells, all else the text
between them. There are no outputs, so the file is the same wherever it is made; a test compares it
with what this makes, and another runs it. In the format 4.5 of notebooks. O(bytes of the page).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

__all__ = ["TARGET", "text"]

TARGET = Path(__file__).resolve().parents[1] / "docs" / "guide" / "first-hour.ipynb"
# Other blocks, such as commands that need a terminal of their own, stay text.
BLOCK = re.compile(r"^```(python|console run)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def text() -> str:
    """Return the notebook."""
    page = TARGET.with_suffix(".md").read_text(encoding="utf-8")
    cells: list[dict[str, Any]] = []
    end = 0
    for block in BLOCK.finditer(page):
        _add(cells, "markdown", page[end : block.start()])
        # A command of a shell begins with ! in a notebook.
        _add(cells, "code", re.sub(r"^\$ ", "!", block[2], flags=re.MULTILINE))
        end = block.end()
    _add(cells, "markdown", page[end:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    notebook = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _add(cells: list[dict[str, Any]], kind: str, source: str) -> None:
    lines = source.strip("\n").splitlines(keepends=True)
    if lines:
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{len(cells) + 1}", "metadata": {}}
        run = {"execution_count": None, "outputs": []} if kind == "code" else {}
        cells.append({**cell, **run, "source": lines})


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
