"""Soak of a leader and its standby: `python -m tests.soak.standbys [--minutes 10] [--seed N]`.

Two places where a master may run: one leads at the level replicated, the other follows. Workers and
clients know both. Clients have a full pool under load, and one keeps a ledger (`ledger.py`). The
leader is killed, or stopped as a host that hangs, whose connections stay open; the standby is
promoted, and what led before ends and comes back as a standby with nothing. Standby and workers are
killed and stopped as well. It fails when an acknowledged object is lost or a removed one comes
back, on a wrong byte, and when all does not work again soon. Printed beside that is, per kind of
fault, for how long the ledger had no correct reads or no put.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from mooncake_store.journal.ring_file import remove_rings
from tests.soak.store import HERE, SEGMENT, Access, let_time_pass
from tests.soak.trial import CLIENT_TTL_S, SHARDS, Findings, Torment
from tests.standby.asking import promote, until_copied

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.soak.store import Players
    from tests.soak.trial import Outages

WORKERS = 2
TIMES = ("--client-ttl", f"{CLIENT_TTL_S:g}s", "--ping-interval", "500ms")


class Place:
    """Where a master may run: an address, a state directory, and what runs there."""

    def __init__(self, directory: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.state = directory
        self.tree = HERE
        """Where the source is of what runs here next."""
        self._process: subprocess.Popen[str] | None = None
        self._hangs = False
        self._standing: list[int] = []  # shard processes that hang, also of masters that ended

    def run(self, command: str, *options: str) -> None:
        """Start a program here and wait until it is ready."""
        self._process = start(
            self.state.with_suffix(".log"), command, "--port", self.address.rpartition(":")[2],
            "--state", str(self.state), "--journal", "replicated", *TIMES, *options,
            tree=self.tree,
        )  # fmt: skip

    def lead(self) -> None:
        """Run the first leader."""
        self.run("master", "--shards", str(SHARDS))

    def follow(self, leader: Place) -> None:
        """Run a standby; with what it has of before, if there is any."""
        self.run("standby", "--of", leader.address)
        until_copied(self.address)

    def wait_until_it_leads(self) -> None:
        """Return when what was promoted is ready."""
        assert self._process is not None
        assert self._process.stdout is not None
        assert '"leads": true' in self._process.stdout.readline()

    def signal(self, number: int) -> list[int]:
        """Send a signal to what runs here, and to its shard processes, which are returned."""
        assert self._process is not None
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
        shards = [int(shard) for shard in children.split()]
        for each in (pid, *shards):
            os.kill(each, number)
        return shards

    def hang(self) -> None:
        """Stop it. Its shard processes stand still from then on, and close no connection."""
        self._hangs = True
        self._standing += self.signal(signal.SIGSTOP)

    def stop(self) -> None:
        """End it in good order."""
        assert self._process is not None
        self._process.terminate()
        self.ended()

    def ended(self) -> None:
        """Return when what runs here has ended in good order."""
        assert self._process is not None
        assert self._process.wait() == 0, f"{self.address} did not end in good order"
        end(self._process)

    def kill(self) -> None:
        """End it at once, and its shard processes, unless these hang.

        They would end by themselves, but some time later, and write where the next one begins.
        """
        if self._process is not None:
            if self._process.poll() is None and not self._hangs:
                self.signal(signal.SIGKILL)
            end(self._process)
        self._hangs = False

    def close(self) -> None:
        """End all that is left of what ran here."""
        self.kill()
        for shard in self._standing:
            with contextlib.suppress(ProcessLookupError):
                os.kill(shard, signal.SIGKILL)
        for folder in self.state.glob("shard-*"):
            remove_rings(folder)

    def forget(self) -> None:
        """Remove what it has kept."""
        for shard in self.state.glob("shard-*"):
            remove_rings(shard)
        shutil.rmtree(self.state)


def start(log: Path, *command: str, tree: Path = HERE) -> subprocess.Popen[str]:
    """Start a program of a source tree and return when it is ready; what it logs goes to a file."""
    with log.open("a") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "mooncake_store", *command, "--json"],
            stdout=subprocess.PIPE, stderr=errors, text=True, cwd=tree,
        )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    assert '"ready": true' in line, f"{command} did not start: {line}; see {log}"
    return process


def end(process: subprocess.Popen[str]) -> None:
    """End a process at once. Idempotent."""
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


class Pool:
    """Both places, and the workers."""

    def __init__(self, directory: Path, memory: Path) -> None:
        self.leader, self.standby = Place(directory / "one"), Place(directory / "two")
        self.masters = f"{self.leader.address},{self.standby.address}"
        self.url = f"mooncake://{self.masters}/chaos"
        self._directory, self._memory = directory, memory
        self._workers: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        """Start everything."""
        self.leader.lead()
        self.standby.follow(self.leader)
        self._workers = [self._worker(number) for number in range(WORKERS)]

    def _worker(self, number: int) -> subprocess.Popen[str]:
        return start(
            self._directory / f"worker-{number}.log", "worker", "--master", self.masters,
            "--name", f"worker-{number}", "--segment", SEGMENT, "--memory", str(self._memory),
        )  # fmt: skip

    def change_leaders(self) -> None:
        """Promote the standby; what led before ends, and follows with nothing."""
        former = self.leader
        promote(self.standby.address, 120.0)
        self.standby.wait_until_it_leads()
        former.kill()
        former.forget()
        self.leader, self.standby = self.standby, former
        former.follow(self.leader)

    def kill_worker(self, number: int) -> None:
        """End a worker at once."""
        end(self._workers[number])

    def restart_worker(self, number: int) -> None:
        """Start it as what it was."""
        self._workers[number] = self._worker(number)

    def close(self) -> None:
        """End everything."""
        for worker in self._workers:
            worker.terminate()
            worker.wait()
            end(worker)
        for place in (self.standby, self.leader):
            place.close()


class StandbyTorment(Torment):
    """Kills and stops a leader and its standby, which is promoted, and workers."""

    def __init__(self, pool: Pool, outages: Outages, seed: int) -> None:
        super().__init__(outages, seed)
        self._pool = pool

    def acts(self) -> list[tuple[str, Callable[[], None]]]:
        """The kinds of faults."""
        return [
            ("leader killed", self._kill_leader),
            ("leader hangs", self._hang_leader),
            ("leader, worker killed", self._kill_both),
            ("standby killed", self._kill_standby),
            ("standby stopped", self._stop_standby),
            ("worker killed", self._kill_worker),
        ]

    def _kill_leader(self) -> None:
        self._pool.leader.kill()
        self._pool.change_leaders()

    def _hang_leader(self) -> None:
        self._pool.leader.hang()
        self._pool.change_leaders()

    def _kill_both(self) -> None:
        number = self.chance.randrange(WORKERS)
        self._pool.leader.kill()
        self._pool.kill_worker(number)
        self._pool.change_leaders()
        self._pool.restart_worker(number)

    def _kill_standby(self) -> None:
        self._pool.standby.kill()
        let_time_pass(self.chance.uniform(0, 2))
        self._pool.standby.follow(self._pool.leader)

    def _stop_standby(self) -> None:
        self._pool.standby.signal(signal.SIGSTOP)
        let_time_pass(self.chance.uniform(0.2, 3))
        self._pool.standby.signal(signal.SIGCONT)
        until_copied(self._pool.standby.address)

    def _kill_worker(self) -> None:
        number = self.chance.randrange(WORKERS)
        self._pool.kill_worker(number)
        let_time_pass(self.chance.uniform(0, 2))
        self._pool.restart_worker(number)


def soak(found: Findings, minutes: float, seed: int, directory: Path, memory: Path) -> None:
    """Run."""
    pool = Pool(directory, memory)
    with contextlib.closing(pool):
        pool.start()

        def torment(_: Players) -> None:
            StandbyTorment(pool, found.outages, seed).run(minutes * 60)

        found.look(Access(pool.url), seed, directory, torment)


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="a leader and its standby, under faults")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.minutes:g} minutes")
    found = Findings()
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mooncake-soak-") as memory,
    ):
        soak(found, options.minutes, options.seed, Path(directory), Path(memory))
    return found.print()


if __name__ == "__main__":
    sys.exit(main())
