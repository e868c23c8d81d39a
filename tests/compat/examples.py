"""Run the Python examples of pages of documentation, as they stand and in their order.

    python examples.py MASTER PAGE...

Writes one line of JSON for each example: its place, and what came of it: "ran", "sketch" (no
program: a signature, or names that the page does not give), or what was raised. Each has the names
of those before it, and a `store` that is set up; what it prints is thrown away. `mooncake` is
whichever package comes first on the path; modules of the original that are only Python are taken
from the directory that MOONCAKE_ORIGINAL_PACKAGE names.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
MIB = 1 << 20


def outcome(source: str, names: dict[str, Any]) -> str:
    """Run one example; what came of it."""
    given = names["store"]
    made: dict[str, Any] = {}
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            file = Path(folder) / "example.py"
            file.write_text(source, "utf-8")
            made = runpy.run_path(str(file), names, "__main__")
    except SyntaxError:
        return "sketch"
    except NameError as error:
        return f"sketch: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    own = made.pop("store", given)
    if own is not given:
        own.close()
    names.update((name, value) for name, value in made.items() if not name.startswith("__"))
    return "ran"


def opened(master: str) -> Any:
    """A store that is set up."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    number = store.setup("localhost", "P2PHANDSHAKE", 128 * MIB, 16 * MIB, "tcp", "", master)
    if number != 0:
        raise SystemExit(f"setup answered {number}")
    return store


def page(path: Path, master: str) -> None:
    """Run the examples of one page."""
    import mooncake

    mooncake.__path__.append(os.environ["MOONCAKE_ORIGINAL_PACKAGE"])
    # What pages take for granted.
    names: dict[str, Any] = {
        "mooncake": mooncake,
        "rank": 0,
        "local_hostname": "localhost",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": 64 * MIB,
        "local_buffer_size": 16 * MIB,
        "protocol": "tcp",
        "rdma_devices": "",
        "master_server_addr": master,
        "store": opened(master),
    }
    text = path.read_text("utf-8")
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        said = outcome(textwrap.dedent(found[2]), names)
        sys.stdout.write(json.dumps([f"{path.name}:{line}", said]) + "\n")
        sys.stdout.flush()
        if names["store"].health_check() != 0:  # the example closed it
            names["store"] = opened(master)
    names["store"].close()


if __name__ == "__main__":
    for each in sys.argv[2:]:
        page(Path(each), sys.argv[1])
