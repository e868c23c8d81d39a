"""Compare the drop-in with the original, call by call; run the original's tests and examples on it.

    python scripts/compat_check.py

The original is installed from PyPI into an environment of its own in the cache directory, the one
of `mooncake bench --vs upstream`, and its source is fetched there (MOONCAKE_ORIGINAL_SOURCE names a
repository that is here already); nothing of it is kept in the repository. Its tests, the examples
of its documentation and its small programs run as they stand, the tests on a master that its flags
start. What cannot be had is skipped, with the reason. Exits with 1 when an answer differs, or
something fails, that is not listed here with its reason.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mooncake-store/compat"
SOURCE = "https://github.com/kvcache-ai/Mooncake"
COMMIT = "3b5a594133958449a1feaf1c9e0fc1b553e34a28"
# The original's own tests: files of these folders that need no devices.
FOLDERS = ("mooncake-wheel/tests", "scripts", "mooncake-store/benchmarks")
TESTS = (
    "mooncake-wheel/tests/test_distributed_object_store.py",
    "mooncake-wheel/tests/test_replicated_distributed_object_store.py",
    "mooncake-wheel/tests/test_batch_replica_clear.py",
    "mooncake-wheel/tests/test_put_get_tensor.py",
    "mooncake-wheel/tests/test_safetensor_functions.py",
    "mooncake-wheel/tests/test_mooncake_config.py",
    "mooncake-wheel/tests/test_import_structure.py",
    "mooncake-wheel/tests/test_buffer_pool_native.py",
    "mooncake-wheel/tests/test_dummy_client.py",
    "mooncake-wheel/tests/test_mooncake_store_service_api.py",
    "mooncake-wheel/tests/test_structured_object_store.py",
    "mooncake-wheel/tests/test_offload_on_eviction.py",
    "mooncake-wheel/tests/test_promotion_on_hit.py",
    "mooncake-wheel/tests/test_ssd_offload_in_evict.py",
    "mooncake-wheel/tests/test_dataproto_catalog.py",
    "scripts/test_async_store.py",
    "scripts/test_copy_move_api.py",
    "scripts/test_tensor_api.py",
    "scripts/test_upsert_api.py",
)
# What the original's own script of tests starts the master with; {folder} is one of the test's own.
_SHARED = "--root_fs_dir={folder}"
_TIERED = (_SHARED, "--enable_offload=true", "--offload_on_evict=true")
MASTER_FLAGS = {
    "mooncake-wheel/tests/test_offload_on_eviction.py": _TIERED,
    "mooncake-wheel/tests/test_promotion_on_hit.py": (
        *_TIERED, "--promotion_on_hit=true", "--promotion_admission_threshold=1",
    ),
    "mooncake-wheel/tests/test_ssd_offload_in_evict.py": (_SHARED,),
}  # fmt: skip
# What a worker lends beside tests that do not lend it themselves. `--root_fs_dir` has no effect, no
# file of each object is kept in a folder that all clients share: instead a worker lends a disk.
LENT = {
    "mooncake-wheel/tests/test_dummy_client.py": "1GiB",
    "mooncake-wheel/tests/test_ssd_offload_in_evict.py": "file:{folder}/pool,2GiB",
}
# Files that run as programs, below.
PROGRAMS = (
    "mooncake-wheel/tests/test_multi_dummy_clients.py",
    "scripts/test_drain_http_api.py",
)
NOT_RUN = {
    "mooncake-store/benchmarks/test_report_oplog_batch.py": "reports of the original's log in etcd",
    "mooncake-store/benchmarks/test_run_oplog_batch_sweep.py": "the same",
    "mooncake-store/benchmarks/test_store_kv_bench.py": "tests a program on a store it makes up",
    "mooncake-wheel/tests/test_cli.py": "looks for the original's programs on the path",
    "mooncake-wheel/tests/test_distributed_object_store_cxl.py": "needs CXL memory",
    "mooncake-wheel/tests/test_fast_copy.py": "tests a C extension of the original's",
    "mooncake-wheel/tests/test_http_metadata_server.py": "tests a server that it brings along",
    "mooncake-wheel/tests/test_meta_server.py": "a load without a check",
    "mooncake-wheel/tests/test_mooncake_ep.py": "needs CUDA",
    "mooncake-wheel/tests/test_regmr_overhead.py": "needs CUDA",
    "mooncake-wheel/tests/test_release_wheel_tags.py": "tests how the original is released",
    "mooncake-wheel/tests/test_spdk_tgt_create.py": "needs NVMe-oF targets",
    "mooncake-wheel/tests/test_transfer_on_cuda.py": "needs CUDA",
    "mooncake-wheel/tests/test_transfer_on_hip.py": "needs HIP",
    "scripts/test_engram_store.py": "tables of embeddings are not part of this store",
    "scripts/test_hicache_hugepage_requirements.py": "tests a script of the original's for SGLang",
}
# Tests that would fail, and why. They do not run: what one leaves behind in its process when it
# fails, a store that lends memory, changes what others see.
_FAILS_THERE = "fails on the original, too, at this version: "
MEANT = {
    "test_clear_with_active_lease": _FAILS_THERE + "a put leases nothing",
    "test_clear_mixed_expired_and_active": _FAILS_THERE + "a put leases nothing",
    "test_structured_object_direct_torch_tensor_materialize_into_uses_real_store": (
        "reads into memory that was not registered"
    ),
    "test_dataproto_helper_reads_rows_with_real_store_ranges": (
        _FAILS_THERE + "a class lacks its decorator"
    ),
    "test_handle_put_missing_value": _FAILS_THERE + "a missing value is answered with 400",
    "test_shutdown_during_setup_is_observed_before_success": (
        _FAILS_THERE + "its configuration lacks settings"
    ),
    "test_reconfigure_decode_remount_unmounts_previous": (
        _FAILS_THERE + "calls are noted with their grace period"
    ),
    "test_reconfigure_prefill_unmounts_segments": (
        _FAILS_THERE + "calls are noted with their grace period"
    ),
    "test_unmount_shm_string_segment_id_coercion": (
        _FAILS_THERE + "calls are noted with their grace period"
    ),
    "test_handle_get_empty_bytes_rechecks_existence": "looks at the order of calls inside",
    "test_main_closes_store_when_shutdown_requested_during_startup": (
        "looks at the name of a function inside"
    ),
}
# Answers that are meant to differ; docs/reference/compat.md says why.
KNOWN = {
    "('batch_get_into_multi_buffers', ['m1'], [[100, 200]], [[5, 6]])",
    "('batch_get_into_multi_buffers', ['m1'], [[100]], [[5, 5]])",
}
# Pages of documentation, and the examples on them that are meant to fail.
PAGES = (
    "docs/source/getting_started/quick-start.md",
    "docs/source/getting_started/observability.md",
    "docs/source/api-reference/python/mooncake-store.md",
    "docs/source/api-reference/python/transfer-engine.md",
    "docs/source/deployment/mooncake-store-deployment-guide.md",
)
SKETCHES = {
    "mooncake-store.md:169",  # its store is never set up
    "mooncake-store.md:200",
    "mooncake-store.md:313",  # a view outlives its lease, which that page forbids
    "transfer-engine.md:749",  # addresses are "..."
}
GUIDE = "docs/source/design/transfer-engine/index.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
MASTER_PORT = 50051
"""What programs and pages take for granted."""
FETCHED = sorted(
    {*FOLDERS, "mooncake-store/tests/e2e", "mooncake-wheel/mooncake"}
    | {page.rpartition("/")[0] for page in (*PAGES, GUIDE)}
)
"""Folders of the original's source."""
INSTALL_S = 600
RUN_S = 600
TOTAL_S = 2400
"""Within this everything has begun; what has not then fails."""
LEASE_MS = 1000
BEGUN_S = time.monotonic()


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


def answers(text: str) -> dict[int, tuple[str, Any]]:
    """What calls.py printed, by line."""
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("[")]
    return {at: (call, answer) for at, (call, answer) in enumerate(lines)}


def on_drop_in(**more: str) -> dict[str, str]:
    """The environment of a program of the original's that is to find the drop-in."""
    # Some import `store` itself, as the original's build directory lets them.
    path = [ROOT / "compat", ROOT, ROOT / "compat/mooncake"]
    return {"PYTHONPATH": os.pathsep.join(str(each) for each in path), **more}


def ours(script: str | Path, *arguments: str | Path, **environment: str) -> str:
    """Run a program on the drop-in."""
    return run(
        sys.executable, script, *arguments,
        timeout_s=RUN_S, error=Failed, **on_drop_in(**environment),
    )  # fmt: skip


def compare(address: str) -> int:
    """Run the same calls in both worlds; return how many answers differ unexpectedly."""
    from mooncake_store.bench.parts import upstream
    from mooncake_store.errors import UnavailableError

    script = ROOT / "tests/compat/calls.py"
    try:
        original = upstream.environment()
        with upstream.pool(original) as pool:
            theirs = answers(run(original.python, script, pool.address, timeout_s=RUN_S))
    except UnavailableError as error:
        raise Skipped(str(error)) from None
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


def fetch_source() -> Path:
    """What is run of the original at a commit, as files."""
    home = CACHE / f"source-{COMMIT[:9]}"
    ready = home / "ready"
    if ready.exists() and ready.read_text() == "\n".join(FETCHED):
        return home
    home.mkdir(parents=True, exist_ok=True)

    def git(*words: str) -> None:
        run("git", "-C", home, *words, timeout_s=INSTALL_S)

    here = os.environ.get("MOONCAKE_ORIGINAL_SOURCE")
    if here:
        # Folder by folder, as files: a copy may lack what is not needed here.
        for folder in FETCHED:
            files = home / "files.tar"
            run(
                "git", "-C", here, "archive", f"--prefix={folder}/", f"--output={files}",
                f"{COMMIT}:{folder}", timeout_s=RUN_S,
            )  # fmt: skip
            with tarfile.open(files) as packed:
                packed.extractall(home, filter="data")
            files.unlink()
    else:
        git("init", "-q")
        git("config", "remote.origin.url", SOURCE)
        git("fetch", "-q", "--depth=1", "--filter=blob:none", "origin", COMMIT)
        git("checkout", "-q", "FETCH_HEAD", "--", *FETCHED)
    ready.write_text("\n".join(FETCHED))
    return home


class Place(NamedTuple):
    """Where a master of ours is that was started with the original's flags."""

    master: str
    control: str
    metadata: str

    def environment(self) -> dict[str, str]:
        """What tells the original's tests."""
        return on_drop_in(
            MASTER_SERVER=self.master, MOONCAKE_MASTER=self.master,
            MC_METADATA_SERVER=self.metadata, MOONCAKE_TE_META_DATA_SERVER=self.metadata,
            PROTOCOL="tcp", DEVICE_NAME="", LOCAL_HOSTNAME="localhost",
            # Leases as long as the master's, and a little longer for those who wait for the end.
            MOONCAKE_CLIENT_LEASE_TTL=f"{LEASE_MS}ms", DEFAULT_KV_LEASE_TTL=str(LEASE_MS + 500),
        )  # fmt: skip


@contextmanager
def beside(*arguments: str | Path, until: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program on the drop-in that runs meanwhile; it has written a line with `until`."""
    process = subprocess.Popen(
        [sys.executable, "-u", *map(str, arguments)], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=os.environ | on_drop_in(),
    )  # fmt: skip
    # As long as its start and what runs beside it may take.
    ender = threading.Timer(2 * RUN_S, process.kill)
    ender.start()
    try:
        assert process.stdout is not None
        if not any(until in line for line in process.stdout):
            raise Failed(f"{' '.join(map(str, arguments))} ended early")
        yield process
    finally:
        process.terminate()
        process.communicate()
        ender.cancel()


@contextmanager
def our_master(port: int = 0, *flags: str, lends: str = "") -> Iterator[Place]:
    """A master of ours by the original's flags, with a worker beside it that lends a segment."""
    from mooncake_store.bench.parts.process import free_ports

    free, control, metadata = free_ports(3)
    port = port or free
    place = Place(
        f"127.0.0.1:{port}", f"http://127.0.0.1:{control}", f"http://127.0.0.1:{metadata}/metadata"
    )
    master = (
        "master", f"--rpc_port={port}", f"--metrics_port={control}",
        "--enable_http_metadata_server=true", f"--http_metadata_server_port={metadata}",
        f"--default_kv_lease_ttl={LEASE_MS}", "--enable_metric_reporting=false", *flags,
    )  # fmt: skip
    worker = ("worker", "--master", place.master, "--segment", lends)
    with ExitStack() as running:
        running.enter_context(beside("-m", "mooncake_store", *master, until="is ready"))
        if lends:
            running.enter_context(beside("-m", "mooncake_store", *worker, until=" lends "))
        yield place


def own_tests(source: Path, name: str) -> int:
    """Run one file of the original's tests on the drop-in; how many fail that should not."""
    # One of them knows no other port.
    port = MASTER_PORT if "buffer_pool" in name else 0
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        flags = [flag.format(folder=folder) for flag in MASTER_FLAGS.get(name, ())]
        files = {"MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": folder} if flags else {}
        lends = LENT.get(name, "").format(folder=folder)
        place = running.enter_context(our_master(port, *flags, lends=lends))
        done = subprocess.run(
            [
                sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "-W",
                "ignore", "-c", os.devnull, "--rootdir", str(source), "--import-mode=importlib",
                str(source / name), "-k", " and ".join(f"not {each}" for each in sorted(MEANT)),
            ],
            capture_output=True, text=True, timeout=RUN_S, cwd=source,
            env=os.environ | place.environment() | files,
        )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR ", "SUBFAILED"))]
    if not failed and done.returncode not in (0, 5):
        failed = [" / ".join(lines[-3:])]
    for line in failed:
        say(f"  {line}")
    say(f"{name}: {lines[-1].strip('= ') if lines else 'nothing'}")
    return len(failed)


def examples(source: Path) -> int:
    """Run the examples of the documentation on the drop-in; how many fail that should not."""
    from mooncake_store import LocalCluster

    with LocalCluster(workers=0, master={"port": MASTER_PORT}) as cluster:
        said = ours(
            ROOT / "tests/compat/examples.py", cluster.address, *(source / page for page in PAGES),
            MOONCAKE_ORIGINAL_PACKAGE=str(source / "mooncake-wheel/mooncake"),
        )  # fmt: skip
    found = [json.loads(line) for line in said.splitlines()]
    ran = [place for place, outcome in found if outcome == "ran"]
    wrong = [
        (place, outcome)
        for place, outcome in found
        if outcome != "ran" and not outcome.startswith("sketch") and place not in SKETCHES
    ]
    for place, outcome in wrong:
        say(f"  FAILED {place}: {outcome}")
    say(f"examples of the documentation: {len(ran)} ran, {len(wrong)} failed")
    return len(wrong)


def programs(source: Path) -> None:
    """Run the original's small programs on the drop-in; raises Failed."""
    from mooncake_store import LocalCluster

    end_to_end, tests = source / "mooncake-store/tests/e2e", source / "mooncake-wheel/tests"
    with LocalCluster(workers=0) as cluster:
        ours(end_to_end / "session_ranges_tcp_e2e.py", MOONCAKE_MASTER=cluster.address)
        said = ours(
            end_to_end / "store_client_e2e.py", f"--master-server={cluster.address}",
            "--nof-replica-num=0", "--duration-sec=3", "--sleep-ms=20",
        )  # fmt: skip
        if "put_fail=0" not in said or "get_fail=0 mismatch=0" not in said:
            raise Failed(said.splitlines()[-1])
    with our_master() as place:
        ours(
            source / "scripts/test_drain_http_api.py", f"--control-base={place.control}",
            **place.environment(),
        )  # fmt: skip
    with our_master(lends="1GiB") as place, ThreadPoolExecutor(2) as both:
        clients = [
            both.submit(
                ours, tests / "test_multi_dummy_clients.py", f"--client-id={name}",
                **place.environment(),
            )
            for name in ("client1", "client2")
        ]  # fmt: skip
        for client in clients:
            client.result()
    with beside(tests / "transfer_engine_target.py", until="Target server ready"):
        ours(tests / "transfer_engine_initiator_test.py")
    with tempfile.TemporaryDirectory() as folder:
        page = (source / GUIDE).read_text("utf-8")
        receiver, sender = Path(folder) / "receiver.py", Path(folder) / "sender.py"
        for file, text in zip((receiver, sender), BLOCK.findall(page), strict=True):
            file.write_text(text)
        with beside(receiver, until="Waiting for sender") as waiting:
            ours(sender)
            if "receiver buffer: 1" not in waiting.communicate("\n", RUN_S)[0]:
                raise Failed("the receiver of the guide saw nothing")
    say("7 programs: passed")


def attempt(what: str, check: Callable[[], int | None]) -> int:
    """Make one check; how much of it failed. What cannot be had is skipped."""
    if time.monotonic() - BEGUN_S > TOTAL_S:
        say(f"FAILED: {what}: not begun within {TOTAL_S} s")
        return 1
    try:
        return check() or 0
    except (Failed, subprocess.TimeoutExpired) as reason:
        say(f"FAILED: {what}: {reason}")
        return 1
    except (Skipped, OSError) as reason:
        say(f"skipped {what}: {reason}")
        return 0


def listed(source: Path) -> int:
    """Whether every test of the original's is run, or named with a reason; how many are not."""
    known = {*TESTS, *PROGRAMS, *NOT_RUN}
    found = {
        f"{folder}/{file.name}"
        for folder in FOLDERS
        for file in (source / folder).glob("test_*.py")
    }
    for name in sorted(found ^ known):
        say(f"  {name} is {'not listed' if name in found else 'listed and not there'}")
    for name, why in (NOT_RUN | MEANT).items():
        say(f"not run: {name}: {why}")
    return len(found ^ known)


def check_originals() -> int:
    """Run what is the original's; how much fails."""
    source = fetch_source()
    failures = attempt("the programs", lambda: programs(source))
    failures += attempt("the examples", lambda: examples(source))
    failures += attempt("the list of tests", lambda: listed(source))
    for name in TESTS:
        failures += attempt(name, partial(own_tests, source, name))
    return failures


def main() -> int:
    """Everything that can be had."""
    sys.path.insert(0, str(ROOT))
    from mooncake_store import LocalCluster

    with LocalCluster(workers=0) as cluster:
        address = cluster.address
        failures = attempt("the comparison with the original", lambda: compare(address))
    failures += attempt("the original's own tests", check_originals)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
