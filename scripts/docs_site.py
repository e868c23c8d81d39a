"""Builds the documents as a site, beside those of other versions, and checks every link in it.

    python -m scripts.docs_site [FOLDER]        build/site by default

Writes FOLDER/VERSION, anew each time, and in FOLDER the list of versions that pages offer, with a
page that leads to the newest. A site of several versions is made by doing so in a checkout of each,
with the same FOLDER, which any web server can then serve as it is. The usual tool for this, mike,
commits what was built to a branch of the repository instead; a folder needs neither a branch nor
rights to push. Exits with 1 where a link is wrong.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from mooncake_store import __version__
from scripts.site_links import complaints

__all__ = ["list_versions"]

ROOT = Path(__file__).resolve().parents[1]
LEADS_TO = """<!doctype html>
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={0}/index.html">
<title>Mooncake store</title>
<p><a href="{0}/index.html">Version {0}</a></p>
"""


def list_versions(folder: Path) -> list[str]:
    """Write what leads to the versions that lie in a folder, and return them, newest first."""
    found = [path.parent.name for path in folder.glob("*/index.html")]
    found.sort(key=lambda name: [int(part) for part in name.split(".")], reverse=True)
    listed = [{"version": name, "title": name, "aliases": []} for name in found]
    (folder / "versions.json").write_text(json.dumps(listed), encoding="utf-8")
    (folder / "index.html").write_text(LEADS_TO.format(found[0]), encoding="utf-8")
    return found


def main(folder: Path) -> int:
    """Build this version into `folder`; return what to exit with."""
    built = folder / __version__
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    # An announcement of what comes after this version, which constraints.txt pins.
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    where = ["--site-dir", str(built.absolute())]
    subprocess.run([*command, *where], cwd=ROOT, env=quiet, check=True)
    versions = list_versions(folder)
    wrong = complaints(built)
    sys.stdout.write("".join(f"{line}\n" for line in wrong))
    sys.stdout.write(f"{built}: {len(wrong)} faults; versions {', '.join(versions)}\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "site"))
