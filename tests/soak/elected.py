"""The part of the chaos soak that has elected leaders: hosts are lost, and what is between them.

Two members of a pool, or three where the seed is odd, an etcd, and two hosts with a worker and
clients each, all of them hosts of a test (`tests/hosts`): with addresses, memory and clocks of
their own. Leader, standbys and etcd are killed, or stopped as a host that hangs; the leader loses
all that it had; the network cuts it off, from all, from some, or one way only, and loses packets.
Before each fault a standby counts: what happens while none does is told by tests/standby.

It needs an etcd. Without root, or on a kernel that makes no such hosts, all of it is on addresses
of the loopback, and nothing happens to the network.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mooncake_store.journal.ring_file import remove_rings
from mooncake_store.standby.member import LEASE_S
from tests.conftest import programs
from tests.hosts.pool import NAMESPACE, Pool
from tests.soak.store import HERE, SEGMENT, Access, let_time_pass
from tests.soak.trial import CLIENT_TTL_S, SHARDS, WHOLE_S, Torment
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.conftest import Program
    from tests.soak.store import Players
    from tests.soak.trial import Findings, Outages

BOTH, TO, FROM = "cut", "cut_to", "cut_from"
"""How a network is cut (`Network`)."""
GRACE_S = 4.0
"""For how long a leader waits for a standby that is silent."""
SETTINGS = (
    *("--client-ttl", f"{CLIENT_TTL_S:g}s", "--standby-grace", f"{GRACE_S:g}s"),
    # Who leads next keeps all objects for as long: on a full pool nothing can be put meanwhile.
    *("--default-lease-ttl", "5s", "--lease-ttl-max", "5s"),
)


class Loopback:
    """Stands in for a network where there can be none: its hosts are addresses of this machine."""

    def __init__(self, *names: str, **_: object) -> None:
        self._numbers = {name: number for number, name in enumerate(names, 1)}
        # Those of another run are others.
        self._net = f"127.{1 + os.getpid() % 250}.{os.getpid() // 250 % 250}"

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *exception: object) -> None:
        """There is nothing to end."""

    def __getitem__(self, name: str) -> str:
        return f"{self._net}.{self._numbers[name]}"

    def on(self, _: str) -> tuple[str, ...]:
        """What to put before a command line."""
        return ()


class ElectedPool(Pool):
    """The pool, and what happens to its programs."""

    def start(self) -> None:
        """Start everything."""
        self.said: list[tuple[str, Program]] = []
        self.start_etcd()
        for name in self.members:
            self.run(name)
        for host in self.clients:
            self.start_worker(host, "--segment", SEGMENT, "--memory", "anonymous")

    def run(self, name: str) -> None:
        """Start a member, with what it has of before."""
        self.start_member(name, "--shards", str(SHARDS), *SETTINGS)
        self.said.append((name, self.programs[name]))

    def signal(self, names: Sequence[str], number: int) -> None:
        """Send a signal to members, with all their processes."""
        for name in names:
            os.killpg(self.programs[name].process.pid, number)

    def forget(self, name: str) -> None:
        """Remove what a member has kept."""
        state = self._folder / name
        for shard in state.glob("shard-*"):
            remove_rings(shard)
        shutil.rmtree(state)

    def leader(self) -> str:
        """Wait until one leads, and a standby counts that knows that it has all."""

        def leads(name: str) -> bool:
            others = (other for other in self.members if other != name)
            # Between a leader that waits for it and its own word lies the way to it.
            return self.leads(name) and self.counts(name) and any(map(self.has_all, others))

        return until(
            lambda: next(filter(leads, self.members), ""),
            WHOLE_S,
            "a leader with a standby that counts",
        )

    def has_all(self, name: str) -> bool:
        """Whether a member says of itself that nothing which was answered is lacking there."""
        on, address = map(str, self.network.on(name)), self.masters(name)
        asked = ("promote", address, "--check", "--json", "--secret-file", str(self.secret))
        done = subprocess.run(
            [sys.executable, *on, "-m", "mooncake_store", *asked],
            capture_output=True, cwd=HERE, timeout=WHOLE_S,
        )  # fmt: skip
        found = json.loads(done.stdout or "{}")
        return bool(found.get("promotion", {}).get("loses") == "nothing")

    def write_down(self, folder: Path) -> None:
        """Leave what all programs wrote."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        workers = [(name, self.programs[name]) for name in self.clients]
        etcd = [("etcd", program) for program in self.etcd.members]
        for number, (name, program) in enumerate([*self.said, *workers, *etcd]):
            (folder / f"{number:03d}-{name}.log").write_text(program.output, encoding="utf-8")


class HostTorment(Torment):
    """Takes hosts away, and what is between them."""

    def __init__(self, pool: ElectedPool, outages: Outages, seed: int, only: str) -> None:
        super().__init__(outages, seed, only)
        self._pool = pool
        self._leader = ""

    def prepare(self) -> None:
        """Wait until somebody leads and changes are known to a standby."""
        self._leader = self._pool.leader()
        while True:
            # A change that was answered since then had to wait for the standby, or for its grace.
            self.outages.whole("a standby counts")
            leader = self._pool.leader()
            if leader == self._leader:
                return
            self._leader = leader

    @property
    def _standbys(self) -> list[str]:
        return [name for name in self._pool.members if name != self._leader]

    def acts(self) -> list[tuple[str, Callable[[], None]]]:
        """The kinds of faults."""
        acts = [
            ("leader killed", lambda: self._kill([self._leader])),
            ("leader lost", self._lose_leader),
            ("leader stopped", lambda: self._stop([self._leader], LEASE_S)),
            ("standbys killed", lambda: self._kill(self._standbys)),
            ("standbys stopped", lambda: self._stop(self._standbys, GRACE_S)),
            ("all members killed", lambda: self._kill(self._pool.members)),
            ("etcd killed", self._kill_etcd),
            ("etcd stopped", self._stop_etcd),
        ]
        if isinstance(self._pool.network, Loopback):
            return acts
        return [
            *acts,
            ("leader cut off", lambda: self._cut((), LEASE_S, BOTH)),
            ("leader mute", lambda: self._cut((), LEASE_S, TO)),
            ("leader deaf", lambda: self._cut((), LEASE_S, FROM)),
            ("leader off members", lambda: self._cut(("etcd", *self._standbys), LEASE_S)),
            ("leader off standbys", lambda: self._cut(self._standbys, GRACE_S)),
            ("leader off etcd", lambda: self._cut(("etcd",), LEASE_S)),
            ("leader off clients", lambda: self._cut(self._pool.clients, CLIENT_TTL_S)),
            ("packets lost", self._lose_packets),
        ]

    def _pass(self, silence_s: float) -> None:
        """Let time pass, mostly for longer than somebody may be silent."""
        longer = silence_s + self.chance.uniform(0.5, 2)
        let_time_pass(self.chance.choice((self.chance.uniform(0.2, silence_s), longer, longer)))

    def _kill(self, names: Sequence[str]) -> None:
        for name in names:
            self._pool.programs[name].kill()
        if self.chance.choice((True, False)):
            self._pass(GRACE_S)
        for name in names:
            self._pool.run(name)

    def _lose_leader(self) -> None:
        self._pool.programs[self._leader].kill()
        self._pool.forget(self._leader)
        self._pass(LEASE_S)
        self._pool.run(self._leader)

    def _stop(self, names: Sequence[str], silence_s: float) -> None:
        self._pool.signal(names, signal.SIGSTOP)
        self._pass(silence_s)
        self._pool.signal(names, signal.SIGCONT)

    def _kill_etcd(self) -> None:
        self._pool.etcd.members[0].kill()
        self._pass(LEASE_S)
        self._pool.etcd.start_again()

    def _stop_etcd(self) -> None:
        self._pool.etcd.stop()
        self._pass(LEASE_S)
        self._pool.etcd.go_on()

    def _cut(self, others: Sequence[str], silence_s: float, way: str = "") -> None:
        """Let nothing pass between the leader and others, or all others, or nothing one way."""
        cut = getattr(self._pool.network, way or self.chance.choice((BOTH, TO, FROM)))
        cut(self._leader, *others)
        self._pass(silence_s)
        self._pool.network.mend()

    def _lose_packets(self) -> None:
        self._pool.network.slow(0.002, 0.05)
        self._pass(LEASE_S)
        self._pool.network.mend()


def elected(found: Findings, seconds: float, seed: int, only: str) -> None:
    """Try a pool whose leaders are elected."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as undo:
        started, folder = programs(), Path(directory)
        start = next(started)
        undo.callback(next, started, None)
        try:
            pool = _made(start, folder, seed)
            undo.callback(pool.close)
            pool.start()
        except pytest.skip.Exception as why:
            print(f"elected leaders are left out: {why}")
            return
        access = Access(
            f"mooncake://{pool.masters()}/{NAMESPACE}",
            tuple(tuple(map(str, pool.network.on(host))) for host in pool.clients),
            {"MOONCAKE_SECRET_FILE": str(pool.secret)},
        )

        def torment(_: Players) -> None:
            HostTorment(pool, found.outages, seed, only).run(seconds)

        if not found.look(access, seed, folder, torment):
            logs = HERE / "build" / "chaos" / f"seed-{seed}"
            pool.write_down(logs)
            print(f"what the programs wrote is in {logs}")
        pool.close()
        for name in pool.members:
            pool.forget(name)


def _made(start: Callable[..., Program], folder: Path, seed: int) -> ElectedPool:
    """A pool on hosts, where there can be any."""
    members = 2 + seed % 2
    try:
        return ElectedPool(start, folder, members, seed=seed)
    except pytest.skip.Exception as why:
        print(f"partitions are left out: {why}")
        return ElectedPool(start, folder, members, network=Loopback)
