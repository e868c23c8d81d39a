"""A pool that is upgraded while it is used: `python -m tests.soak.upgrade [--previous REVISION]`.

A leader at the level replicated, its standby and two workers with names, all of the previous
version, under the load of two clients, one of each version. Then one part after the other is
replaced by this version: the standby, which is then promoted in place of the leader that ends in
order; what led before, as a standby; the workers, one at a time; last the client. Then the same the
other way round. Clients compare every byte, and know what must be found (`guest.py`).

It prints for each step how much of that was found, and for how long a client had no whole read, or
no whole put. It fails on a wrong byte, on what is lost, and when all does not work again soon.

The previous version is taken from git into build/previous, once, with kernels that are compiled
there, and runs with the packages that are installed here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mooncake_store.journal.ring_file import remove_rings
from tests.soak.board import Board
from tests.soak.ledger import PUT, READ, SETTLE_S, calls_of, rounds_of
from tests.soak.player import DEADLINE_S
from tests.soak.standbys import Place, end, start
from tests.soak.store import HERE, let_time_pass
from tests.standby.asking import promote

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGES = ("alloc", "eviction", "kernel_cache", "mooncake_store", "serving", "transfer_engine")
WORKERS = 2
SEGMENT = "128MiB"
QUIET_S = 8.0
"""How long is measured before and after; a step is measured until all is well, and SETTLED_S."""
SETTLED_S = 3.0
WHOLE_S = 60.0


def previous_tree(revision: str) -> Path:
    """Return a folder with the packages of a revision, ready to run."""
    asked = ["git", "rev-parse", "--verify", f"{revision}^{{commit}}"]
    commit = subprocess.run(asked, cwd=HERE, check=True, capture_output=True, text=True).stdout
    tree = HERE / "build" / "previous" / commit.strip()
    if not (tree / "ready").exists():
        tree.mkdir(parents=True, exist_ok=True)
        archive = subprocess.run(
            ["git", "archive", commit.strip(), *PACKAGES], cwd=HERE, check=True, capture_output=True
        ).stdout
        subprocess.run(["tar", "-x"], cwd=tree, input=archive, check=True)
        # In the folder of the tree: what is found there goes before what is installed.
        subprocess.run([sys.executable, "-m", "mooncake_store", "warmup"], cwd=tree, check=True)
        (tree / "ready").touch()
    return tree


def hands_over(tree: Path) -> bool:
    """Whether a version knows how a leader hands over to its standby."""
    return (tree / "mooncake_store" / "master" / "handing_over.py").exists()


def takes_over(tree: Path) -> bool:
    """Whether a worker of a version ends the one before it, once it is loaded."""
    return (tree / "mooncake_store" / "worker" / "relieving.py").exists()


class Version(NamedTuple):
    """A source tree, and what it is called."""

    name: str
    tree: Path


class Caller:
    """A client process of some version."""

    def __init__(
        self, url: str, version: Version, seed: int, directory: Path, replicas: int
    ) -> None:
        directory.mkdir()
        self.board = Board(directory)
        self.name = f"client of {version.name}"
        self._directory = directory
        command = ["-m", "tests.soak.guest", url, "--seed", str(seed), "--directory", directory]
        command += ["--replicas", str(replicas)]
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE, text=True, cwd=version.tree,
            env=os.environ | {"PYTHONPATH": str(HERE)},
        )  # fmt: skip
        assert self._process.stdout is not None
        runs = Path(json.loads(self._process.stdout.readline())["runs"])
        assert runs.is_relative_to(version.tree / "mooncake_store"), runs

    def whole(self, since_ns: int) -> bool:
        """Whether all was as it must be in a round that began since then."""
        return bool((rounds_of(self._directory)[:, 0] >= since_ns).any())

    def calls(self, began_ns: int, ended_ns: int) -> np.ndarray:
        """What ended between two moments."""
        calls = calls_of(self._directory)
        return calls[(calls["ended"] >= began_ns) & (calls["ended"] < ended_ns)]

    def report(self) -> dict[str, object]:
        """Let it come to an end; return what it found."""
        self.board.end()
        out, _ = self._process.communicate(timeout=DEADLINE_S + SETTLE_S + 120)
        return json.loads(out)

    def kill(self) -> None:
        """End it, wherever it is. Idempotent."""
        self._process.kill()


class Pool:
    """The processes, each of which may be of another version than the others."""

    def __init__(self, version: Version, directory: Path, memory: Path) -> None:
        self.leader, self.standby = Place(directory / "one"), Place(directory / "two")
        self.masters = f"{self.leader.address},{self.standby.address}"
        self._directory, self._memory = directory, memory
        self.leader.tree = self.standby.tree = version.tree
        self.leader.lead()
        self.standby.follow(self.leader)
        self._workers = [self._worker(number, version) for number in range(WORKERS)]

    def _worker(self, number: int, version: Version, *options: str) -> subprocess.Popen[str]:
        return start(
            self._directory / f"worker-{number}.log", "worker", "--master", self.masters,
            "--name", f"worker-{number}", "--segment", SEGMENT, "--memory", str(self._memory),
            *options, tree=version.tree,
        )  # fmt: skip

    def replace_standby(self, version: Version) -> None:
        """Have another version follow, with the copy that there is."""
        self.standby.stop()
        self.standby.tree = version.tree
        self.standby.follow(self.leader)

    def change_leaders(self, version: Version) -> None:
        """Let the standby lead; what led before ends first, and follows as another version."""
        former = self.leader
        if all(hands_over(place.tree) for place in (former, self.standby)):
            promote(self.standby.address, 60.0, hand_over=True)
            former.ended()
        else:
            former.stop()
            promote(self.standby.address, 60.0)
        self.standby.wait_until_it_leads()
        former.tree = version.tree
        self.leader, self.standby = self.standby, former
        former.follow(self.leader)

    def replace_worker(self, number: int, version: Version) -> None:
        """Start another version of a worker on the memory that it has."""
        former = self._workers[number]
        if takes_over(version.tree):
            self._workers[number] = self._worker(number, version, "--take-over")
            end(former)
        else:
            end(former)
            self._workers[number] = self._worker(number, version)

    def close(self) -> None:
        """End everything."""
        for worker in self._workers:
            worker.terminate()
            worker.wait()
            end(worker)
        for place in (self.standby, self.leader):
            place.kill()
            for shard in place.state.glob("shard-*"):
                remove_rings(shard)


class Exercise:
    """The steps, and what clients saw of them."""

    def __init__(self, pool: Pool, directory: Path, seed: int, replicas: int) -> None:
        self._pool, self._directory, self._seed = pool, directory, seed
        self._replicas = replicas
        self.callers: list[Caller] = []
        self.complaints: list[str] = []
        self.total: dict[str, int] = {"lost": 0, "wrong": 0}
        print(f"{'step':42} {'found':>8} {'reads of':>9} {'none for':>9}"
              f" {'taken':>8} {'puts of':>9} {'none for':>9}")  # fmt: skip

    def enter(self, version: Version) -> Caller:
        """Start a client, with a namespace of its own."""
        self._seed += 1
        url = f"mooncake://{self._pool.masters}/guest-{self._seed}"
        directory = self._directory / f"guest-{self._seed}"
        made = Caller(url, version, self._seed, directory, self._replicas)
        self.callers.append(made)
        return made

    def leave(self, caller: Caller) -> None:
        """Let a client come to its end, when it has read all it knows of once more."""
        report = caller.report()
        self.callers.remove(caller)
        self.complaints += caller.board.complaints()
        if "failed" in report:
            self.complaints.append(f"{caller.name}: {report['failed']}")
            return
        self.total["lost"] += report["lost"]
        self.total["wrong"] += report["counts"].get("WRONG BYTES", 0)
        for what, count in sorted(report["counts"].items()):
            if what in report["samples"]:
                print(f"  {caller.name}: {what} {count}  {report['samples'][what][:150]}")

    @contextmanager
    def step(self, name: str, seconds: float = SETTLED_S) -> Iterator[None]:
        """Measure what the body costs, until everything works again and so long after."""
        began_ns, callers = time.monotonic_ns(), list(self.callers)
        yield
        done_ns, limit = time.monotonic_ns(), time.monotonic() + WHOLE_S
        while not all(caller.whole(done_ns) for caller in self.callers):
            if time.monotonic() > limit:
                self.complaints.append(f"{WHOLE_S:g} s after {name!r} not everything works again")
                break
            let_time_pass(0.02)
        let_time_pass(seconds)
        ended_ns = time.monotonic_ns()
        calls = [
            (caller.calls(began_ns, ended_ns), caller not in self.callers) for caller in callers
        ]
        cells = "".join(self._measured(kind, calls, began_ns, ended_ns) for kind in (READ, PUT))
        print(f"{name:42}{cells}", flush=True)

    def _measured(
        self, kind: int, calls: list[tuple[np.ndarray, bool]], began_ns: int, ended_ns: int
    ) -> str:
        asked = missed = longest_ns = 0
        for each, left in calls:
            mine = each[each["kind"] == kind]
            asked += int(mine["asked"].sum())
            missed += int(mine["missed"].sum())
            whole = mine["ended"][mine["missed"] == 0]
            last_ns = int(each["ended"].max(initial=began_ns)) if left else ended_ns
            ends = np.concatenate([[began_ns], np.sort(whole), [last_ns]])
            longest_ns = max(longest_ns, int(np.diff(ends).max()))
        share = (asked - missed) / asked if asked else 0.0
        return f" {share:8.4%} {asked:9} {longest_ns / 1e9:7.2f} s"

    def change(self, old: Version, new: Version) -> None:
        """Replace all that is of one version by the other, one after the other."""
        pool, way = self._pool, f"{old.name} -> {new.name}"
        with self.step(f"{way}: before", QUIET_S):
            pass
        with self.step(f"{way}: standby"):
            pool.replace_standby(new)
        with self.step(f"{way}: leader"):
            pool.change_leaders(new)
        for number in range(WORKERS):
            with self.step(f"{way}: worker {number}"):
                pool.replace_worker(number, new)
        with self.step(f"{way}: client"):
            self.leave(self.callers[0])
            self.enter(new)
        with self.step(f"{way}: after", QUIET_S):
            pass


def exercise(
    old: Version, new: Version, options: argparse.Namespace, directory: Path, memory: Path
) -> list[str]:
    """Run; returns the complaints."""
    with ExitStack() as undo:
        pool = Pool(old, directory, memory)
        undo.callback(pool.close)
        ran = Exercise(pool, directory, options.seed, options.replicas)
        undo.callback(lambda: [caller.kill() for caller in ran.callers])
        for version in (old, new):
            ran.enter(version)
        with ran.step("filled", 2 * QUIET_S):
            pass
        ran.change(old, new)
        # Of the version that goes there has to be one, and of the one that comes another.
        with ran.step(f"a client of {old.name} comes"):
            ran.leave(ran.callers[0])
            ran.enter(old)
        ran.change(new, old)
        for caller in list(ran.callers):
            ran.leave(caller)
    print(f"lost {ran.total['lost']}, wrong bytes {ran.total['wrong']}")
    return ran.complaints + [f"{count} {what}" for what, count in ran.total.items() if count]


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="a pool that is upgraded while it is used")
    parser.add_argument("--previous", default="HEAD~1", help="the version it has before")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=1, help="of each object")
    options = parser.parse_args()
    old = Version("previous", previous_tree(options.previous))
    new = Version("this", HERE)
    print(f"previous is {old.tree.name[:12]}")
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mooncake-soak-") as memory,
    ):
        complaints = exercise(old, new, options, Path(directory), Path(memory))
    for complaint in complaints:
        print(f"FAILED: {complaint}")
    if not complaints:
        print("nothing acknowledged was lost, every byte read was right")
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
