"""What is wrong with a pool, as this host sees it: findings of the doctor, the worst one first.

    found = ask_pool("10.0.0.5:50051", secret)
    found[0].name, found[0].found, found[0].advice

The master says who there is: shards, standbys, hosts, and workers with all their addresses. Each
of them is then spoken to from here, a few times. One that does not answer is a problem. Who does
is compared with the others: how long it takes, by what clock and limits it runs, and which
version it is; who stands out is named, and this host where all others agree against it.

How two members reach each other is not seen from here: run it on the hosts of both.
Cost: `TRIES` conversations with each port, `AT_ONCE` ports at a time, each of them at most
`PORT_S` long; `transfer` moves `TRANSFER_BYTES` from each worker over TCP, one after the other.
"""

from __future__ import annotations

import math
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from mooncake_store.doctor import OPEN_FILES_MIN, Finding, Severity
from mooncake_store.doctor_access import ask_master
from mooncake_store.master.seats import MASTER
from mooncake_store.units import format_duration, format_rate, format_size
from mooncake_store.wire.about import ABOUT, About, AboutRequest
from mooncake_store.wire.cluster import CLUSTER, LIVENESS, MAP, STATUS, MapRequest, StatusRequest
from mooncake_store.wire.hosts import HOST, HOSTS, HostsRequest
from mooncake_store.wire.shard import SHARD
from mooncake_store.worker.master_link import MasterLink
from transfer_engine.base import SegmentDescriptor
from transfer_engine.engine import TransferEngine
from transfer_engine.errors import RemoteProtocolError, StoreError
from transfer_engine.notify import Alive, Probe
from transfer_engine.rpc.address import Address
from transfer_engine.rpc.blocking import BlockingConnection
from transfer_engine.surroundings import UNLIMITED, Surroundings
from transfer_engine.transports.calling import ask_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mooncake_store.wire.cluster import ClusterMap, ClusterStatus
    from mooncake_store.wire.hosts import HostsReply
    from transfer_engine.wire.keyring import Secret
    from transfer_engine.wire.registry import Registry

__all__ = ["Answer", "Member", "Met", "ask_pool", "judge", "judge_rates"]

OK, NOTE, WARNING, PROBLEM = Severity

TRIES = 5
AT_ONCE = 16
CALL_S = 5.0
"""How long a conversation may take."""
PORT_S = 10.0
"""After so long no further one is begun with a port."""
TRANSFER_BYTES = 8 << 20
TRANSFER_S = 30.0
LOST_S = 0.15
"""A packet that is lost is sent again after 0.2 s, or 1 s where it was the first of all."""
FAR, FAR_S = 4.0, 0.005
"""Who takes so many times as long as is usual, and so much longer, is far."""
CLOCK_S = 1.0
SLOW = 4.0
"""Who is read so many times slower than is usual is slow."""
SILENT_MS = 5000


NOTHING = About()


class Member(NamedTuple):
    """A port of the pool. `said` is what the master finds wrong with who listens there."""

    name: str
    address: str
    service: Registry | None
    """None for the data port of a worker."""
    said: str = ""

    @property
    def link(self) -> str:
        """What the way to it is called."""
        return f"{self.name} at {self.address}" if self.address else self.name


class Answer(NamedTuple):
    """A conversation: how long it took, and what was told."""

    took_s: float
    version: str = ""
    around: Surroundings = Surroundings()
    ahead_s: float = 0.0
    """How far the clock of who answered is ahead of the one here, where it was told."""


class Met(NamedTuple):
    """A member, the conversations with it, and why there were no more, where that is so."""

    member: Member
    answers: tuple[Answer, ...] = ()
    error: StoreError | None = None

    @property
    def best(self) -> Answer:
        """The one that says most of time: it waited least."""
        return min(self.answers, key=attrgetter("took_s"))


class _Judged(NamedTuple):
    finding: Finding
    weight: float = 0.0
    """Which of two findings of one severity comes first: the one with more."""


def ask_pool(
    named: str, secret: Secret | None, etcd_file: str = "", *, transfer: bool = False
) -> list[Finding]:
    """Ask the masters of a pool who there is, and everybody how he is; the worst comes first.

    Raises ConfigError for what names no pool.
    """
    link = MasterLink(named, secret, etcd_file)
    try:
        cluster: ClusterMap = link.call(MAP, MapRequest())
        status: ClusterStatus = link.call(STATUS, StatusRequest())
        hosts: HostsReply = link.call(HOSTS, HostsRequest())
        leader = str(link.masters.leader)
    except StoreError as error:
        advice = error.advice or "see that a master runs there"
        return [Finding(f"pool {named}", PROBLEM, error.what, advice)]
    finally:
        link.close()
    members = [*_services(leader, cluster, status, hosts), *_workers(status)]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        mets = list(threads.map(partial(_meet, secret=secret), members))
    found = [*judge(mets, status.version), *_of_status(status, hosts)]
    if transfer:
        found += judge_rates(_rates(status, secret))
    found += ask_master(leader, secret)
    # Of equals the first stays first, so that those of `judge` keep their order.
    return sorted(found, key=lambda finding: -finding.severity)


# -- who there is


def _services(
    leader: str, cluster: ClusterMap, status: ClusterStatus, hosts: HostsReply
) -> Iterator[Member]:
    yield Member("master", leader, CLUSTER)
    yield Member("signs of life to the master", cluster.liveness, LIVENESS)
    for number, address in enumerate(cluster.shards):
        if address:  # the others are said to be missing
            yield Member(f"shard {number}", address, SHARD)
    for each in status.standbys:
        said = "it does not follow" if not each.follows else "" if each.address else "not heard"
        yield Member(f"standby {each.number:016x}", each.address, CLUSTER, said)
    for host in hosts.hosts:
        if host.number != MASTER:
            silent = f"silent for {format_duration(host.silent_ms / 1e3)}"
            said = silent if host.silent_ms > SILENT_MS else ""
            yield Member(f"host {host.number:016x}", host.address, HOST, said)


def _workers(status: ClusterStatus) -> Iterator[Member]:
    """Each address at which a worker serves memory; one without any, where something is wrong."""
    for worker in status.workers:
        said = ""
        if worker.state != "alive":
            said = f"{worker.state}, silent for {format_duration(worker.silent_ms / 1e3)}"
        places: dict[str, None] = {}
        for segment in status.segments:
            if segment.worker == worker.name:
                described = SegmentDescriptor.decode(segment.descriptor)
                if described.tcp_port:
                    places[str(Address(described.tcp_host, described.tcp_port))] = None
                places |= dict.fromkeys(described.rails)
        if not places and said:
            yield Member(f"worker {worker.name}", "", None, said)
        for place in places:
            yield Member(f"worker {worker.name}", place, None, said)


# -- how they are


def _meet(member: Member, secret: Secret | None) -> Met:
    """Speak to a member some times."""
    answers: list[Answer] = []
    until = time.monotonic() + PORT_S
    while member.address and len(answers) < TRIES and time.monotonic() < until:
        try:
            answers.append(_converse(member, secret))
        except StoreError as error:
            return Met(member, tuple(answers), error.again())
    return Met(member, tuple(answers))


def _converse(member: Member, secret: Secret | None) -> Answer:
    """Connect, prove the secret and ask, as far as there is something to ask."""
    date_s, began = time.time(), time.monotonic()
    if member.service is None:
        alive = ask_at(member.address, Probe(), Alive, secret, CALL_S)
        told = About(alive.version, alive.around)
    else:
        with BlockingConnection.connect(
            member.address, member.service, secret=secret, timeout_s=CALL_S
        ) as connection:
            told = _about(connection) if _tells(member) else NOTHING
    took_s = time.monotonic() - began
    clock_ms = told.around.clock_ms
    ahead_s = clock_ms / 1e3 - (date_s + took_s / 2) if clock_ms else 0.0
    return Answer(took_s, told.version, told.around, ahead_s)


def _about(connection: BlockingConnection) -> About:
    request = ABOUT.request.pack(AboutRequest())
    try:
        return ABOUT.reply.unpack(connection.call(ABOUT, request, timeout_s=CALL_S))
    except RemoteProtocolError:  # it is older than this question
        return NOTHING


def _rates(
    status: ClusterStatus, secret: Secret | None
) -> Iterator[tuple[str, float | StoreError]]:
    """Read from one segment of each worker, and say how quickly that went, or why it did not."""
    buffer = bytearray(TRANSFER_BYTES)
    seen: set[str] = set()
    with TransferEngine(transports=("tcp",), secret=secret) as engine:
        for segment in status.segments:
            descriptor = SegmentDescriptor.decode(segment.descriptor)
            if segment.worker in seen or not descriptor.tcp_port:
                continue
            seen.add(segment.worker)
            view = memoryview(buffer)[: min(TRANSFER_BYTES, descriptor.size)]
            try:
                handle = engine.open(descriptor, timeout_s=CALL_S)
                began = time.monotonic()
                engine.read_into(handle, 0, view, timeout_s=TRANSFER_S)
                yield segment.worker, len(view) / max(time.monotonic() - began, 1e-9)
            except StoreError as error:
                yield segment.worker, error.again()


# -- what that means


def _of_status(status: ClusterStatus, hosts: HostsReply) -> Iterator[Finding]:
    """Say what the master itself finds wrong."""
    if not status.ready:
        yield Finding(
            "pool", PROBLEM, f"takes no puts: {status.refusing or 'no worker lends memory'}",
            "see to the standby that changes wait for" if status.refusing
            else "start a worker: `mooncake worker --master HOST:PORT --segment SIZE`",
        )  # fmt: skip
    for shard in hosts.missing:
        yield Finding(
            f"shard {shard}", PROBLEM, "nobody leads it, so nothing of it can be read or put",
            "start the host that led it, or move it: `mooncake shard move`",
        )  # fmt: skip
    for segment in status.segments:
        if segment.fault:
            yield Finding(
                f"segment {segment.name} of worker {segment.worker}", PROBLEM, segment.fault,
                "see to what is under it; what it held is put to others meanwhile",
            )  # fmt: skip


def judge(mets: Sequence[Met], version: str) -> list[Finding]:
    """Compare members with each other and with their master's version; the worst comes first."""
    judged = [*_links(mets), *_clocks(mets), *_versions(mets, version), *_limits(mets)]
    judged.sort(key=lambda each: (-each.finding.severity, -each.weight))
    return [each.finding for each in judged]


def _links(mets: Sequence[Met]) -> Iterator[_Judged]:
    usual_s = statistics.median([met.best.took_s for met in mets if met.answers] or [0.0])
    for met in mets:
        name, said = met.member.link, met.member.said
        if met.error is not None:
            also = f"; the master says: {said}" if said else ""
            often = f"; it answered {len(met.answers)} times before" if met.answers else ""
            yield _Judged(
                Finding(
                    name, PROBLEM, f"{met.error.what}{often}{also}",
                    met.error.advice or "see that it runs, and that a firewall lets this host in",
                ),
                math.inf,
            )  # fmt: skip
            continue
        if not met.answers:
            yield _Judged(Finding(name, PROBLEM, f"the master says: {said}", "see its log"))
            continue
        slowest_s = max(answer.took_s for answer in met.answers)
        took = f"answers in {met.best.took_s * 1e3:.1f} ms"
        if said:
            yield _Judged(
                Finding(
                    name, WARNING, f"{took}, but the master says: {said}",
                    "see its log, and run the doctor on its host: the way to the master may fail",
                ),
                slowest_s,
            )  # fmt: skip
        elif slowest_s - met.best.took_s > LOST_S:
            yield _Judged(
                Finding(
                    name, WARNING, f"{took}, but one of {len(met.answers)} answers took "
                    f"{slowest_s * 1e3:.0f} ms: packets are lost, or it is overloaded",
                    "look for errors and drops on the way: `ip -s link`, `nstat TcpRetransSegs`",
                ),
                slowest_s,
            )  # fmt: skip
        elif met.best.took_s > FAR * usual_s + FAR_S:
            yield _Judged(
                Finding(
                    name, WARNING, f"{took}, where {usual_s * 1e3:.1f} ms are usual",
                    "find what is between: another network, a tunnel, or a host with much to do",
                ),
                met.best.took_s,
            )  # fmt: skip
        else:
            yield _Judged(Finding(name, OK, took))


def _clocks(mets: Sequence[Met]) -> Iterator[_Judged]:
    """Name the clocks that are not as most are, this host's among them."""
    told = [met for met in mets if met.answers and met.best.around.clock_ms]
    if not told:
        return
    most_s = statistics.median([0.0, *(met.best.ahead_s for met in told)])
    clocks = {met.member.name: (met.best.ahead_s, met.best.took_s) for met in told}
    wrong = 0
    for name, (ahead_s, took_s) in {"this host": (0.0, 0.0), **clocks}.items():
        off_s = ahead_s - most_s
        if abs(off_s) - took_s / 2 > CLOCK_S:
            wrong += 1
            yield _Judged(
                Finding(
                    f"clock of {name}", WARNING,
                    f"{abs(off_s):.1f} s {'ahead of' if off_s > 0 else 'behind'} most others, "
                    "so credentials there begin and end at other times",
                    "let chrony or systemd-timesyncd keep it; see `timedatectl` there",
                ),
                abs(off_s),
            )  # fmt: skip
    if not wrong:
        yield _Judged(Finding("clocks", OK, f"all {len(clocks)} agree to {CLOCK_S:g} s"))


def _versions(mets: Sequence[Met], version: str) -> Iterator[_Judged]:
    others = {
        met.member.name: met.best.version
        for met in mets
        if met.answers and met.best.version != version and _tells(met.member)
    }  # fmt: skip
    for name, other in others.items():
        yield _Judged(
            Finding(
                f"version of {name}", WARNING if other else NOTE,
                f"{other or 'it does not tell'}, where the master has {version}",
                "finish the upgrade: docs/operating/upgrading.md has the order",
            )
        )  # fmt: skip
    if not others:
        yield _Judged(Finding("versions", OK, f"all have {version}"))


def _tells(member: Member) -> bool:
    return member.service is None or ABOUT.opcode in member.service.by_opcode


def _limits(mets: Sequence[Met]) -> Iterator[_Judged]:
    told = {met.member.name: met.best.around for met in mets if met.answers}
    for name, around in told.items():
        if not around.open_files:
            continue
        shown = (
            f"open files {_limit(around.open_files)}, locked memory "
            f"{_limit(around.locked_bytes, size=True)}, /dev/shm {format_size(around.shared_free)} "
            f"free of {format_size(around.shared_bytes)}"
        )
        if around.open_files == UNLIMITED or around.open_files >= OPEN_FILES_MIN:
            yield _Judged(Finding(f"limits of {name}", OK, shown))
        else:
            yield _Judged(
                Finding(
                    f"limits of {name}", WARNING,
                    f"{shown}: about as many connections and segments as files",
                    f"ulimit -n {OPEN_FILES_MIN} or more where it is started",
                )
            )  # fmt: skip


def _limit(value: int, *, size: bool = False) -> str:
    if value == UNLIMITED:
        return "unlimited"
    return format_size(value) if size else str(value)


def judge_rates(rates: Iterator[tuple[str, float | StoreError]]) -> list[Finding]:
    """Compare how quickly workers were read, the slowest first."""
    told = dict(rates)
    known = {name: rate for name, rate in told.items() if not isinstance(rate, StoreError)}
    usual = statistics.median(known.values()) if known else 0.0
    found = []
    for name, rate in sorted(known.items(), key=lambda each: each[1]):
        shown = f"{format_rate(rate)} over TCP from here"
        if rate * SLOW < usual:
            found.append(
                Finding(
                    f"transfer from worker {name}", WARNING, f"{shown}; usual are "
                    f"{format_rate(usual)}",
                    "see its interface's speed (`ethtool`) and what else uses that; "
                    "`mooncake bench transfer` measures more closely",
                )
            )  # fmt: skip
        else:
            found.append(Finding(f"transfer from worker {name}", OK, shown))
    found += [
        Finding(f"transfer from worker {name}", WARNING, f"not measured: {error.what}",
                error.advice or "see the log of the worker")
        for name, error in told.items() if isinstance(error, StoreError)
    ]  # fmt: skip
    return found
