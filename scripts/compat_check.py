"""Compare the drop-in with the original, call by call; and run the original's own tests on it.

    python scripts/compat_check.py

The original is installed from PyPI into an environment of its own in the cache directory, and its
tests are fetched there (MOONCAKE_ORIGINAL_SOURCE names a repository that is here already); nothing
of them is kept in the repository. What cannot be had is skipped, with the reason. Exits with 1 when
an answer differs or a test fails that docs/reference/compat.md does not speak of.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import venv
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mooncake-store/compat"
ORIGINAL = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
SOURCE = "https://github.com/kvcache-ai/Mooncake"
COMMIT = "3b5a594133958449a1feaf1c9e0fc1b553e34a28"
# The original's own tests that need neither its other programs nor its devices.
TESTS = (
    "mooncake-wheel/tests/test_distributed_object_store.py",
    "mooncake-wheel/tests/test_replicated_distributed_object_store.py",
    "mooncake-wheel/tests/test_batch_replica_clear.py",
    "mooncake-wheel/tests/test_put_get_tensor.py",
    "mooncake-wheel/tests/test_safetensor_functions.py",
    "mooncake-wheel/tests/test_mooncake_config.py",
    "mooncake-wheel/tests/test_import_structure.py",
    "mooncake-wheel/tests/test_buffer_pool_native.py",
    "scripts/test_async_store.py",
    "scripts/test_copy_move_api.py",
    "scripts/test_tensor_api.py",
    "scripts/test_upsert_api.py",
)
# Tests that are meant to fail; docs/reference/compat.md says why.
MEANT = {
    "test_zero_local_buffer_size",  # nothing is staged, so no put needs a local buffer
    "test_clear_with_active_lease",  # a put leases nothing
    "test_clear_mixed_expired_and_active",
    "test_copy_to_exist_segments",  # refused, not begun
    "TestBatchReplicaClearReplication",  # names one port twice
}
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
    return run(
        sys.executable, script, *arguments,
        timeout_s=RUN_S, error=Failed, PYTHONPATH=path, **environment,
    )  # fmt: skip


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


def fetch_tests() -> Path:
    """The original's tests at a commit, as files."""
    home = CACHE / f"source-{COMMIT[:9]}"
    if (home / "ready").exists():
        return home
    home.mkdir(parents=True, exist_ok=True)
    here = os.environ.get("MOONCAKE_ORIGINAL_SOURCE")

    def git(*words: str) -> None:
        run("git", "-C", home, *words, timeout_s=INSTALL_S)

    git("init", "-q")
    git("fetch", "-q", "--depth=1", "--filter=blob:none", here or SOURCE, COMMIT)
    folders = {name.rpartition("/")[0] for name in TESTS} | {"mooncake-wheel/mooncake"}
    git("checkout", "-q", "FETCH_HEAD", "--", *sorted(folders))
    (home / "ready").touch()
    return home


def own_tests(source: Path, name: str) -> int:
    """Run one file of the original's tests on the drop-in; how many fail that should not."""
    from mooncake_store import LocalCluster

    # One of them knows no other port.
    settings: dict[str, Any] = {"port": 50051} if "buffer_pool" in name else {}
    with LocalCluster(workers=0, master=settings) as cluster:
        done = subprocess.run(
            [
                sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "-W",
                "ignore", "-c", os.devnull, "--rootdir", str(source), "--import-mode=importlib",
                str(source / name),
            ],
            capture_output=True, text=True, timeout=RUN_S, cwd=source,
            env=os.environ | {
                "PYTHONPATH": os.pathsep.join([str(ROOT / "compat"), str(ROOT)]),
                "MASTER_SERVER": cluster.address, "MOONCAKE_MASTER": cluster.address,
                "MC_METADATA_SERVER": "P2PHANDSHAKE", "PROTOCOL": "tcp", "DEVICE_NAME": "",
                # As long as leases are here, as those tests want it to be.
                "DEFAULT_KV_LEASE_TTL": "10500",
                "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE", "LOCAL_HOSTNAME": "localhost",
            },
        )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR ", "SUBFAILED"))]
    wrong = [line for line in failed if not any(each in line for each in MEANT)]
    for line in wrong:
        say(f"  {line}")
    if not failed and done.returncode not in (0, 5):
        wrong.append("")
        say(f"  {' / '.join(lines[-3:])}")
    say(f"{name}: {lines[-1].strip('= ') if lines else 'nothing'}")
    return len(wrong)


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
    try:
        source = fetch_tests()
        for name in TESTS:
            failures += own_tests(source, name)
    except subprocess.TimeoutExpired as reason:
        failures += 1
        say(f"FAILED: {reason}")
    except (Skipped, OSError) as reason:
        say(f"skipped the original's own tests: {reason}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
