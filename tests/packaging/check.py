"""Build what is published, and use it where nothing else is installed.

    python -m tests.packaging.check

Builds the sdist and the wheel of the store and of the drop-in, compares what they hold with what
git tracks, has `twine check --strict` read them, installs the wheels into a new environment, and
runs `installed.py` there. Needs git and a package index, and leaves its environments in
`build/packaging`. Takes two minutes, half of them for the kernels; exits with 1 at the first fault.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from tests.sources import PACKAGES, ROOT

WORK = ROOT / "build" / "packaging"
DISTRIBUTIONS = {ROOT: PACKAGES, ROOT / "compat": ("mooncake",)}
# Of no use outside of a checkout.
NOT_PUBLISHED = (".ci/", ".gitignore")


class FaultError(Exception):
    """Something that would be published is wrong."""


def run(*words, **options):
    """Run a program that has to succeed, and show it."""
    print("$", *words, flush=True)
    subprocess.run([str(word) for word in words], check=True, **options)


def environment(name, *wanted):
    """The interpreter of a new environment that has `wanted` and what they need."""
    home = WORK / name
    run(sys.executable, "-m", "venv", "--clear", home)
    python = home / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted)
    return python


def tracked(project):
    """The files that git has of a project, by their path in it."""
    listed = subprocess.run(
        ["git", "-C", str(project), "ls-files", "-z"], capture_output=True, text=True, check=True
    )
    return {name for name in listed.stdout.split("\0") if name and (project / name).is_file()}


def in_wheel(path):
    """The content of each file, less those that say how the wheel was built."""
    with zipfile.ZipFile(path) as wheel:
        return {
            name: hashlib.sha256(wheel.read(name)).hexdigest()
            for name in wheel.namelist()
            if ".dist-info/" not in name
        }


def in_sdist(path):
    """The files, without the folder they are all in and what hatchling adds."""
    with tarfile.open(path) as sdist:
        names = {member.name.partition("/")[2] for member in sdist if member.isfile()}
        return names - {"PKG-INFO", ".gitignore"}


def same(what, found, wanted):
    """Complain of what one has and the other has not."""
    if lacking := sorted(wanted - found):
        raise FaultError(f"{what} lacks {', '.join(lacking[:10])}")
    if more := sorted(found - wanted):
        raise FaultError(f"{what} should not have {', '.join(more[:10])}")


def built(python, project, packages):
    """Build a project; return its sdist and its wheel, which hold what they have to."""
    out = WORK / "dist" / project.name
    # The wheel is made from the sdist, as whoever packages it for a distribution does.
    run(python, "-m", "build", "--no-isolation", "--outdir", out, project)
    run(python, "-m", "build", "--no-isolation", "--wheel", "--outdir", out / "direct", project)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    (direct,) = (out / "direct").glob("*.whl")
    if in_wheel(wheel) != in_wheel(direct):
        raise FaultError(f"{wheel.name}: from the sdist another one than from the checkout")
    own = {name for name in tracked(project) if not name.startswith(NOT_PUBLISHED)}
    same(sdist.name, in_sdist(sdist), own)
    same(wheel.name, set(in_wheel(wheel)), {n for n in own if n.partition("/")[0] in packages})
    return sdist, wheel


def main():
    """Build, compare, install, use."""
    shutil.rmtree(WORK, ignore_errors=True)
    tools = environment("tools", "build", "hatchling", "twine")
    wheels = []
    for project, packages in DISTRIBUTIONS.items():
        sdist, wheel = built(tools, project, packages)
        run(tools, "-m", "twine", "check", "--strict", sdist, wheel)
        wheels.append(wheel)
    clean = environment("clean", *wheels)
    run(clean, "-m", "pip", "check")
    # Elsewhere, and without this checkout on the path: only what was installed is found.
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script = Path(__file__).with_name("installed.py")
    elsewhere = WORK / "elsewhere"
    elsewhere.mkdir()
    run(clean, "-P", script, *sum(DISTRIBUTIONS.values(), ()), cwd=elsewhere, env=alone)
    print("ok:", *(wheel.name for wheel in wheels))


if __name__ == "__main__":
    try:
        main()
    except (FaultError, subprocess.CalledProcessError) as error:
        sys.exit(f"package-check: {error}")
