"""Runs the code of a notebook as Jupyter does: cell by cell, one namespace, inside an event loop.

    python -m tests.packaging.cells NOTEBOOK

Needs no Jupyter. A line that begins with ! is a command line; `mooncake` is that of the interpreter
which runs this.
"""

import asyncio
import json
import shlex
import subprocess
import sys
from pathlib import Path


def run(source, name, namespace):
    """Run one cell."""
    if not source.startswith("!"):
        exec(compile(source, name, "exec"), namespace)
        return
    for line in source.splitlines():
        command, *words = shlex.split(line.removeprefix("!"))
        assert command == "mooncake", line
        subprocess.run([sys.executable, "-m", "mooncake_store", *words], check=True)


async def main(path):
    """Run all cells; a cell that fails ends it."""
    namespace = {"__name__": "__main__"}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            run("".join(cell["source"]), cell["id"], namespace)
            print("ran", cell["id"], flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
