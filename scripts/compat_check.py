"""Compare the drop-in with the original, call by call; and run an engine's own code on the drop-in.

    python scripts/compat_check.py

The original is installed from PyPI into an environment of its own in the cache directory, the
engine's wheel is unpacked there; nothing of them is kept in the repository. What cannot be had is
skipped, with the reason. Exits with 1 when an answer differs that docs/reference/compat.md does not
speak of, or the engine's code fails.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import venv
import zipfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mooncake-store/compat"
ORIGINAL = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
ENGINES = {"lmcache": "lmcache==0.5.6"}
# Answers that are meant to differ; docs/reference/compat.md says why.
KNOWN = {
    "('batch_get_into_multi_buffers', ['m1'], [[100, 200]], [[5, 6]])",
    "('batch_get_into_multi_buffers', ['m1'], [[100]], [[5, 5]])",
}
INSTALL_S = 600
RUN_S = 300


class Skipped(Exception):
    """Something cannot be had here."""


class Failed(Exception):
    """A program on the drop-in failed."""


def say(text: str) -> None:
    """Write a line."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run(
    *command: str | Path, timeout_s: float, error: type[Exception] = Skipped, **environment: str
) -> str:
    """Run a program; return its output, or raise with the end of what it said."""
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=os.environ | environment,
    )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise error(" / ".join(said[-3:]) or f"exit code {done.returncode}")
    return done.stdout


def the_original() -> Path:
    """The interpreter of an environment with the original in it."""
    home = CACHE / ORIGINAL.partition("==")[2]
    python = home / "bin/python"
    if not (home / "ready").exists():
        venv.create(home, with_pip=True)
        run(python, "-m", "pip", "install", "-q", ORIGINAL, timeout_s=INSTALL_S)
        run(python, "-c", "import mooncake.store", timeout_s=RUN_S)
        (home / "ready").touch()
    return python


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def original_master(python: Path) -> Iterator[str]:
    """The original's master; its address."""
    folder = run(
        python, "-c", "import mooncake, sys; sys.stdout.write(mooncake.__path__[0])",
        timeout_s=RUN_S,
    )  # fmt: skip
    program = Path(folder) / "mooncake_master"
    program.chmod(0o755)
    port, admin = free_port(), free_port()
    process = subprocess.Popen(
        [
            str(program), f"--port={port}", f"--metrics_port={admin}",
            "--enable_metric_reporting=false",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise Skipped("the original's master does not start") from None
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def answers(text: str) -> dict[int, tuple[str, Any]]:
    """What calls.py printed, by line."""
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("[")]
    return {at: (call, answer) for at, (call, answer) in enumerate(lines)}


def ours(script: Path, *arguments: str, **environment: str) -> str:
    """Run a program on the drop-in."""
    path = os.pathsep.join([str(ROOT / "compat"), str(ROOT), environment.pop("PYTHONPATH", "")])
    return run(sys.executable, script, *arguments, timeout_s=RUN_S, PYTHONPATH=path, **environment)


def compare(address: str) -> int:
    """Run the same calls in both worlds; return how many answers differ unexpectedly."""
    script = ROOT / "tests/compat/calls.py"
    python = the_original()
    with original_master(python) as master:
        theirs = answers(run(python, script, master, timeout_s=RUN_S))
    mine = answers(ours(script, address))
    wrong = 0
    for at, (call, answer) in theirs.items():
        found = mine.get(at, (call, "no answer"))[1]
        if found == answer:
            continue
        meant = call in KNOWN
        wrong += not meant
        say(f"{'meant' if meant else 'DIFFERS'}: {call}: {answer!r} there, {found!r} here")
    say(f"{len(theirs)} calls, {wrong} answers differ that should not")
    return wrong


def engine(name: str, address: str) -> None:
    """Run an engine's own code on the drop-in."""
    wheel = ENGINES[name]
    home = CACHE / wheel.replace("==", "-")
    if not (home / "ready").exists():
        home.mkdir(parents=True, exist_ok=True)
        run(
            sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", home, wheel,
            timeout_s=INSTALL_S,
        )  # fmt: skip
        for found in home.glob("*.whl"):
            with zipfile.ZipFile(found) as archive:
                archive.extractall(home)
        (home / "ready").touch()
    script = ROOT / f"tests/compat/engine_{name}.py"
    # Its keys are hashes of Python's, which have to be the same everywhere.
    say(ours(script, address, PYTHONPATH=str(home), PYTHONHASHSEED="0").strip().splitlines()[-1])


def main() -> int:
    """Everything that can be had."""
    sys.path.insert(0, str(ROOT))
    from mooncake_store import LocalCluster

    failures = 0
    with LocalCluster(workers=0) as cluster:
        try:
            failures += compare(cluster.address)
        except (Failed, subprocess.TimeoutExpired) as reason:
            failures += 1
            say(f"FAILED: {reason}")
        except (Skipped, OSError) as reason:
            say(f"skipped the comparison with the original: {reason}")
        for name in ENGINES:
            try:
                engine(name, cluster.address)
            except (Skipped, OSError) as reason:
                say(f"skipped {name}: {reason}")
            except (Failed, subprocess.TimeoutExpired) as reason:
                failures += 1
                say(f"FAILED {name}: {reason}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
