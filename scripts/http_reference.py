"""Writes docs/reference/http/*.json: what each HTTP port says of itself, by OpenAPI 3.1.

    python scripts/http_reference.py

They are what the ports serve at /openapi.json where a token is asked for; a test compares the files
with what this module returns. O(operations).
"""

from __future__ import annotations

import json
from pathlib import Path

from mooncake_store.admin import api as admin_api
from mooncake_store.compat import control_api, rest_api
from mooncake_store.program.shell import Shell, described
from serving.front import api, engines_api

__all__ = ["FOLDER", "PAGES", "text"]

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference" / "http"
_SHELL = Shell(token="a token")
PAGES = {
    "rest.json": lambda: described(rest_api.API, _SHELL, rest_api.KEYS),
    "control.json": control_api.description,
    "admin.json": admin_api.description,
    "front.json": lambda: described(api.API, _SHELL),
    "engines.json": lambda: described(engines_api.API, _SHELL),
}
"""Each file of docs/reference/http, and what returns what is in it."""


def text(name: str) -> str:
    """Return a file."""
    return json.dumps(PAGES[name](), indent=2) + "\n"


def main() -> None:
    """Write the files into the docs/reference/http of this source tree."""
    FOLDER.mkdir(exist_ok=True)
    for name in PAGES:
        (FOLDER / name).write_text(text(name), encoding="utf-8")


if __name__ == "__main__":
    main()
