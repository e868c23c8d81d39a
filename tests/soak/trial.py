"""What the soaks of a store that keeps its objects have in common: players, a ledger, faults.

    found = Findings()
    found.look(Access(url), seed, directory, lambda players: Torment(found.outages, seed).run(60.0))
    found.print()

A trial has clients under load and one that keeps a ledger (`ledger.py`), and faults beside them,
one after the other. Findings are of one trial or of many: for each kind of fault how often it came,
and for how long at most the ledger had no correct read, and no put, from its begin until all was
well again; what was acknowledged, and what of it was lost; and complaints, which there must not be.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest

from mooncake_store.errors import StoreError
from tests.soak.board import Board
from tests.soak.ledger import PUT, READ, SETTLE_S, calls_of, rounds_of
from tests.soak.player import DEADLINE_S
from tests.soak.store import Access, Players, forbidden, judge, let_time_pass, summed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SHARDS = 2
CLIENT_TTL_S = 4.0
PLAY_S = 3600.0
"""Whoever plays is told when it is over; this is for what nobody tells any more."""
WHOLE_S = 60.0
"""How long after the end of a fault everything may take to work again, on a busy machine."""
COMPLAINTS_MAX = 30
"""How many are shown."""
FAILURES = (StoreError, AssertionError, pytest.fail.Exception)
"""How it is said that something did not come about."""


class Keeper:
    """The process that keeps the ledger, and when all was well there."""

    def __init__(self, access: Access, seed: int, directory: Path) -> None:
        command = ["tests.soak.chaos", "--keep", access.url, "--seed", str(seed)]
        self._process = access.start(0, *command, "--directory", str(directory))
        self._directory = directory

    def ends(self, since_ns: int) -> np.ndarray:
        """When the rounds ended that began since then and found all as it must be."""
        rounds = rounds_of(self._directory)
        return rounds[rounds[:, 0] >= since_ns, 1]

    def calls(self) -> np.ndarray:
        """What its reads and puts did."""
        return calls_of(self._directory)

    def whole(self, since_ns: int) -> bool:
        """Wait until a round that began since then has found all as it must be."""
        end = time.monotonic() + WHOLE_S
        while time.monotonic() < end and self._process.poll() is None:
            if len(self.ends(since_ns)):
                return True
            let_time_pass(0.01)
        return False

    def report(self) -> dict[str, object]:
        """What it found, once it is over."""
        out, _ = self._process.communicate(timeout=DEADLINE_S + SETTLE_S + 120)
        if self._process.returncode:
            return {"failed": f"the ledger ended with {self._process.returncode}"}
        return json.loads(out)

    def kill(self) -> None:
        """End it, wherever it is. Idempotent."""
        self._process.kill()


def longest_s(calls: np.ndarray, kind: int, began_ns: int, ended_ns: int) -> float:
    """For how long at most no call of a kind succeeded between two moments."""
    ends = calls["ended"][(calls["kind"] == kind) & (calls["missed"] == 0)]
    ends = np.sort(ends[(ends > began_ns) & (ends < ended_ns)])
    return float(np.diff(np.concatenate([[began_ns], ends, [ended_ns]])).max()) / 1e9


class Outage(NamedTuple):
    """What one fault cost, in seconds."""

    reads_s: float
    """For how long at most there was no correct read, from its begin until all was well again."""
    puts_s: float
    after_s: float
    """From its end until all was well again."""


class Outages:
    """What faults cost, by their kind."""

    def __init__(self) -> None:
        self.keeper: Keeper | None = None
        self.complaints: list[str] = []
        self.by_kind: defaultdict[str, list[Outage]] = defaultdict(list)

    def whole(self, when: str) -> int:
        """Wait until all is well, and say when it was; complain where that takes too long."""
        since_ns = time.monotonic_ns()
        assert self.keeper is not None
        if not self.keeper.whole(since_ns):
            self.complaints.append(f"{WHOLE_S:g} s after {when} not everything works again")
            return time.monotonic_ns()
        return int(self.keeper.ends(since_ns)[0])

    @property
    def count(self) -> int:
        """How many faults there were."""
        return sum(map(len, self.by_kind.values()))

    @contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """Count a fault that lasts for as long as the body, and wait until all is well again."""
        print(f"{datetime.now():%H:%M:%S.%f} {kind}", end="", flush=True)
        began_ns = time.monotonic_ns()
        yield
        over_ns = time.monotonic_ns()
        well_ns = self.whole(kind)
        assert self.keeper is not None
        calls = self.keeper.calls()
        reads_s, puts_s = (longest_s(calls, each, began_ns, well_ns) for each in (READ, PUT))
        cost = Outage(reads_s, puts_s, (well_ns - over_ns) / 1e9)
        self.by_kind[kind].append(cost)
        lasted_s = (over_ns - began_ns) / 1e9
        print(f" for {lasted_s:.2f} s: no read for {reads_s:.2f} s, no put for {puts_s:.2f} s")

    def print(self) -> None:
        """Say how often each kind of fault came, and what it cost."""
        print(f"{'':27}{'no correct read for':>22}{'no put for':>22}{'all well after':>22}")
        print(f"{'fault':22}{'times':>5}" + f"{'median, s':>12}{'longest':>10}" * 3)
        for kind, outages in sorted(self.by_kind.items()):
            columns = zip(*outages, strict=True)
            cells = "".join(f"{statistics.median(each):12.2f}{max(each):10.2f}" for each in columns)
            print(f"{kind:22}{len(outages):5}{cells}")


class Torment:
    """Faults one after the other: a round of all kinds, each in random order, after the other."""

    def __init__(self, outages: Outages, seed: int, only: str = "") -> None:
        self.outages = outages
        self.chance = random.Random(seed)
        self._only = only

    def acts(self) -> list[tuple[str, Callable[[], None]]]:
        """The kinds of faults."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Called before each fault."""

    def run(self, seconds: float) -> None:
        """Go on for so long, and for one round at least."""
        end, rounds = time.monotonic() + seconds, 0
        acts = [(kind, act) for kind, act in self.acts() if self._only in kind]
        assert acts, f"no kind of fault is called {self._only!r}"
        while not rounds or time.monotonic() < end:
            self.chance.shuffle(acts)
            for kind, act in acts:
                if rounds and time.monotonic() >= end:
                    break
                let_time_pass(self.chance.uniform(0.2, 1.5))
                self.prepare()
                with self.outages.during(kind):
                    act()
            rounds += 1


class Findings:
    """What came of one or more trials."""

    def __init__(self) -> None:
        self.outages = Outages()
        self.complaints: list[str] = []
        self._total: Counter[str] = Counter()
        self._lost = 0

    def look(
        self, access: Access, seed: int, directory: Path, torment: Callable[[Players], None]
    ) -> bool:
        """Let clients play while `torment` is under way; return whether all was well."""
        board, complaints = Board(directory), self.outages.complaints
        players = Players(access, seed * 100_000, PLAY_S, directory)
        self.outages.keeper = keeper = Keeper(access, seed, directory)
        try:
            self.outages.whole("the begin")
            torment(players)
        except FAILURES as error:
            complaints.append(f"something did not come about: {error}")
        except BaseException:  # as one that is told to end
            players.kill()
            keeper.kill()
            raise
        board.end()
        reports, gone = players.reports()
        kept = keeper.report()
        keeper.kill()
        complaints += gone
        if "failed" in kept:
            complaints.append(str(kept["failed"]))
        else:
            self._lost += int(str(kept["lost"]))
            total, slow = summed([*reports, kept])
            self._total += total
            complaints += slow + judge(total)
        complaints += board.complaints()
        told = [f"seed {seed}: {complaint}" for complaint in complaints]
        print(*told, sep="\n", end="\n" * bool(told), flush=True)
        self.complaints += told
        complaints.clear()
        return not told

    def print(self) -> int:
        """Say all of it; return what a program ends with."""
        total = self._total
        self.outages.print()
        kept = total["ledger put ok"]
        completed = total["put ok"] + total["upsert ok"] + total["race ok"] + kept
        done = sum(count for what, count in total.items() if what.endswith((" ok", " true")))
        unexplained = (
            sum(forbidden(total).values()) + total["MISDESCRIBED"] + total["ledger DENIED"]
        )
        print(f"operations {done + total['probed']}, faults {self.outages.count}")
        print(
            f"objects acknowledged {completed}, of them in the ledger {kept}: lost {self._lost},"
            f" wrong bytes {total['WRONG BYTES']}, too old ones {total['OLD BYTES']}, removed ones"
            f" that came back {total['CAME BACK']}, unexplained errors {unexplained}"
        )
        for complaint in self.complaints[:COMPLAINTS_MAX]:
            print(f"FAILED: {complaint}")
        if len(self.complaints) > COMPLAINTS_MAX:
            print(f"and {len(self.complaints) - COMPLAINTS_MAX} more of the kind")
        if not self.complaints:
            print("nothing acknowledged was lost, every byte read was right")
        return bool(self.complaints)
