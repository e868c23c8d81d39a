"""The settings of all programs: what each means, its default, and what excludes what.

    loaded = load(MasterConfig, file="mooncake.toml", overrides={"port": 50060})
    loaded.value.port, loaded.origins["port"]         # 50060, "command line"

Defaults are overridden by a TOML file, that by `MOONCAKE_*` variables, those by the command line.
A frozen struct per program, checked when it is made: a value out of range, a misspelt name or a
contradiction is one sentence at start and never a surprise later. The explanation of a setting
stands beside its field and is what `mooncake config`, the error messages and
docs/reference/config.md say.

Attributes end in their native unit: the master's durations are `_ns` because its core counts in
nanoseconds, the client's are `_s` because sockets do. The settings are named without the unit:
`put_discard_ns` is `put_discard = "30s"`.

Not done here: how sources are merged (`loading.py`), reading secrets (`endpoint.read_secret`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from msgspec import Meta

from eviction.registry import STORE_POLICIES, check_store_policy
from mooncake_store.config.checks import (
    check_address,
    check_cold,
    check_kept_pool,
    check_list,
    check_memory,
    check_namespace_offloads,
    check_networks,
    check_order,
    check_own_namespace,
    check_quotas,
    check_rails,
)
from mooncake_store.config.common import (
    EtcdFile,
    LogJson,
    LogLevel,
    Overcommit,
    PortFile,
    Strict,
)
from mooncake_store.config.guarded import Guarded, Proving
from mooncake_store.config.loading import (
    CLIENT_ARGUMENT,
    COMMAND_LINE,
    Loaded,
    Row,
    Source,
    load_settings,
    rows,
)
from mooncake_store.config.member import MemberConfig
from mooncake_store.config.metrics import Watched
from mooncake_store.config.setting import Contradiction, Setting, Settings, settings_of
from mooncake_store.endpoint import split_masters, split_rail, split_url
from mooncake_store.units import GIB, HOUR_NS, MIB, MINUTE_NS, SECOND_NS, VALUE_MAX

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

__all__ = [
    "PROGRAMS",
    "ClientConfig",
    "Loaded",
    "MasterConfig",
    "MemberConfig",
    "Row",
    "Setting",
    "Settings",
    "WorkerConfig",
    "settings_of",
    "load",
    "load_client",
    "rows",
]

S = TypeVar("S", bound=Settings)

Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
# A segment below a mebibyte is a forgotten unit: `segments = ["16"]`.
SegmentBytes = Annotated[int, Meta(ge=MIB, le=VALUE_MAX, extra={"unit": "bytes"})]
DurationNs = Annotated[int, Meta(gt=0, le=365 * 24 * HOUR_NS, extra={"unit": "ns"})]
DurationS = Annotated[float, Meta(gt=0, le=365 * 24 * 3600, extra={"unit": "s"})]


class MasterConfig(Guarded, frozen=True, kw_only=True):
    """Settings of `mooncake master`: where it listens, how long things live, what is evicted."""

    table: ClassVar[str] = "master"

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="Port to listen on; 0 picks a free one.")] = 50051
    shards: Annotated[
        int,
        Meta(ge=1, le=4096, description="Shard processes; each serves its slice of the keys."),
    ] = 1
    port_file: PortFile = ""
    objects_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 30,
            description="Objects a shard can hold. Reserves address space, not memory.",
        ),
    ] = 64_000_000
    default_lease_ttl_ns: Annotated[
        DurationNs,
        Meta(description="Read lease of a get that does not ask for another."),
    ] = 10 * SECOND_NS
    lease_ttl_max_ns: Annotated[
        DurationNs,
        Meta(description="Longest read lease granted; also the pause after a restart."),
    ] = 5 * MINUTE_NS
    put_discard_ns: Annotated[
        DurationNs,
        Meta(description="Age at which an unfinished put may be replaced by a new put."),
    ] = 30 * SECOND_NS
    put_release_ns: Annotated[
        DurationNs,
        Meta(description="Age at which the space of an unfinished put is used again."),
    ] = 600 * SECOND_NS
    client_ttl_ns: Annotated[
        DurationNs,
        Meta(description="Silence after which a worker is absent and its replicas unreadable."),
    ] = 10 * SECOND_NS
    worker_grace_ns: Annotated[
        int,
        Meta(
            ge=0,
            le=365 * 24 * HOUR_NS,
            description="For how long what an absent worker holds is kept, to be read again if it "
            "returns with its memory. 0: what it holds is lost at once.",
            extra={"unit": "ns"},
        ),
    ] = 10 * MINUTE_NS
    ping_interval_ns: Annotated[
        DurationNs,
        Meta(description="How often workers report that they are alive."),
    ] = SECOND_NS
    suspect_after_pings: Annotated[
        Count,
        Meta(description="Missed reports after which a worker gets no new objects."),
    ] = 3
    soft_pin_ttl_ns: Annotated[
        DurationNs,
        Meta(description="Life of a soft pin that does not ask for another."),
    ] = 30 * MINUTE_NS
    soft_pin_ttl_max_ns: Annotated[
        DurationNs,
        Meta(description="Longest soft pin granted."),
    ] = 24 * HOUR_NS
    hard_pin_share: Annotated[
        Share,
        Meta(
            description="Share of the pool that hard-pinned objects may fill; those of one client "
            "three quarters of that."
        ),
    ] = 0.5
    writers_share: Annotated[
        Share,
        Meta(
            description="Share of the pool that hard pins, and leases longer than "
            "default_lease_ttl, leave to those who put. What is asked for beyond gets a lease of "
            "default_lease_ttl."
        ),
    ] = 0.125
    high_watermark: Annotated[
        float,
        Meta(gt=0, le=1, description="Used share of a segment above which objects are evicted."),
    ] = 0.90
    eviction_ratio: Annotated[
        float,
        Meta(gt=0, le=1, description="Share of the pool freed by one round of eviction."),
    ] = 0.05
    eviction_policy: Annotated[
        str,
        Meta(
            description=f"Which object leaves first: {', '.join(STORE_POLICIES)}, a name that "
            "another distribution registered, or module:Class of your own."
        ),
    ] = "lru"
    evict_soft_pinned: Annotated[
        bool,
        Meta(description="Evict soft-pinned objects when nothing else frees enough."),
    ] = True
    offload: Annotated[
        Literal["none", "evict", "write"],
        Meta(
            description="When objects are copied from memory to the disks that workers lend: when "
            "they are to leave memory (evict), soon after they were put, as far as the disks keep "
            "up (write), or never (none: what leaves memory is gone)."
        ),
    ] = "evict"
    namespace_offloads: Annotated[
        tuple[str, ...],
        Meta(
            description="Namespaces whose objects move otherwise, as namespace=none, =evict or "
            "=write."
        ),
    ] = ()
    promotion_hits: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="Gets within 10 s after which an object that lies on disks alone is copied "
            "back to memory, where the coldest make room for it. 0: never.",
        ),
    ] = 2
    promotion_ahead: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description="How many of the objects that were put behind one that lies on a disk come "
            "to memory when that is read, before somebody asks for them, unless promotion_hits is "
            "0. 0: none.",
        ),
    ] = 32
    state: Annotated[
        str,
        Meta(
            description="Directory for what the next run has to know: the secret that keys are "
            "named with. auto: one per port below XDG_STATE_HOME or ~/.local/state/mooncake, none "
            "for port 0. none: nothing is kept, and after a restart keys are named anew."
        ),
    ] = "auto"
    journal: Annotated[
        Literal["none", "written", "synced", "replicated"],
        Meta(
            description="How objects are kept, so that a master that was killed knows them when it "
            "is started again. written: a put is answered when it is in memory that outlives the "
            "master, and soon in a file. synced: when the disk has it. replicated: when a standby "
            "has it; without one nothing is changed. none: a restarted master begins with nothing."
        ),
    ] = "written"
    identity: Annotated[
        Literal["keyed", "xxh3"],
        Meta(
            description="How keys and blocks of tokens become digests: by a secret of the "
            "namespace, which no author of a prompt knows, or by XXH3, which anybody can compute, "
            "for pools that other programs feed."
        ),
    ] = "keyed"
    quotas: Annotated[
        tuple[str, ...],
        Meta(
            description="Most bytes of a namespace, as namespace=size: above it, its own coldest "
            "objects are evicted. Each shard has an equal part of it."
        ),
    ] = ()
    allocator: Annotated[
        Literal["slab", "offset", "composite"],
        Meta(
            description="Where in a segment an object goes: size classes, any size, or size "
            "classes for small objects and any size for the rest."
        ),
    ] = "composite"
    placement: Annotated[
        Literal["random", "free_ratio"],
        Meta(description="Which segment gets a new object: any, or the one with most room."),
    ] = "random"
    log_level: LogLevel = "info"
    log_json: LogJson = False
    debug_integrity: Annotated[
        bool,
        Meta(description="Check all invariants after every change. Slow; for finding bugs."),
    ] = False
    events_kept: Annotated[
        Count,
        Meta(description="Latest object events kept for readers that fell behind."),
    ] = 1_000_000
    connections_max: Annotated[
        Count,
        Meta(description="Connections served at once; for one more, the one idle longest ends."),
    ] = 10_000
    strict: Strict = False

    def check(self) -> None:
        """Refuse limits below their defaults, deadlines out of order, and an open port.

        Raises:
            Contradiction: the first such pair.
        """
        for small, large, why in (
            ("put_discard", "put_release", "a late write must not land in reused space"),
            ("default_lease_ttl", "lease_ttl_max", ""),
            ("soft_pin_ttl", "soft_pin_ttl_max", ""),
        ):
            # Equal is fine for a limit and its default; release must come after discard.
            check_order(self, small, large, why, strict=bool(why))
        try:
            check_store_policy(self.eviction_policy)
        except ValueError as error:
            raise Contradiction(f"master.eviction_policy: {error}", "eviction_policy") from None
        if self.suspect_after_pings * self.ping_interval_ns >= self.client_ttl_ns:
            raise Contradiction(
                "master.client_ttl must be longer than suspect_after_pings times ping_interval, "
                "or a worker is declared absent before it is suspect",
                "client_ttl",
                "suspect_after_pings",
                "ping_interval",
            )
        if self.eviction_ratio >= self.high_watermark:
            raise Contradiction(
                f"master.eviction_ratio ({self.eviction_ratio}) must be below high_watermark "
                f"({self.high_watermark}), or one round of eviction empties the pool",
                "eviction_ratio",
                "high_watermark",
            )
        check_namespace_offloads(self.table, self.namespace_offloads)
        check_quotas(self.table, self.quotas, self.shards)
        self.check_guard(self.host)


class WorkerConfig(Watched, frozen=True, kw_only=True):
    """Settings of `mooncake worker`: the memory it lends to the pool, and how it is reached."""

    table: ClassVar[str] = "worker"

    master: Annotated[
        str,
        Meta(
            description="Address of the master; several, separated by commas: any may lead; or "
            "the URL of a store, such as mooncake+etcd://host:port/pool."
        ),
    ] = "127.0.0.1:50051"
    etcd_file: EtcdFile = ""
    name: Annotated[
        str,
        Meta(
            description="Name in listings and logs, by which a worker that is started again finds "
            "its memory too (`memory`). Empty: host name and process number, and nothing is found."
        ),
    ] = ""
    host: Annotated[str, Meta(description="Address to serve data on.")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="Port to serve data on; 0 picks a free one.")] = 0
    segments_bytes: Annotated[
        tuple[SegmentBytes, ...],
        Meta(description="Size of each segment of memory lent to the pool; none beside `files`."),
    ] = (4 * GIB,)
    files: Annotated[
        tuple[str, ...],
        Meta(
            description="Files, block and DAX devices lent as well: path:size, or the path alone "
            "for all of what exists."
        ),
    ] = ()
    cold_url: Annotated[
        str,
        Meta(description="A store below disks, any URL of fsspec: /folder, s3://... Needs a name."),
    ] = ""
    cold_bytes: Annotated[SegmentBytes, Meta(description="Most of it that is used.")] = 1024 * GIB
    cold_codec: Annotated[
        Literal["none", "planes"],
        Meta(
            description="What is written there: as it is, or in planes of bf16 and fp16 numbers, "
            "compressed without loss, where that saves a tenth (needs zstandard)."
        ),
    ] = "none"
    cold_keys: Annotated[
        str,
        Meta(
            description="Seal what is written there (AES-256-GCM; needs cryptography): the "
            "directory with a key for each namespace that `mooncake secret key` makes, looked at "
            "once a second, for example that of the credentials. Or a TOML file with a key of 64 "
            'hex digits for each, "*" for all others, read when the worker starts.'
        ),
    ] = ""
    namespace: Annotated[
        str,
        Meta(
            description="The only namespace whose objects lie here; they then lie nowhere else. "
            "Empty: those of all without a worker of their own."
        ),
    ] = ""
    memory: Annotated[
        str,
        Meta(
            description="Where memory lies, and whether it is there again when a worker that was "
            "killed is started again: auto (in /dev/shm for a worker with a name, unless huge "
            "pages are required), anonymous (it ends with the process) or a folder, best on tmpfs "
            "or hugetlbfs."
        ),
    ] = "auto"
    hugepages: Annotated[
        Literal["auto", "never", "require"],
        Meta(description="Back segments by huge pages: where available, not at all, or else fail."),
    ] = "auto"
    overcommit: Overcommit = False
    numa: Annotated[
        int,
        Meta(ge=-1, description="NUMA node the segments belong to; -1 leaves it to the system."),
    ] = -1
    transports: Annotated[
        tuple[Literal["shm", "rdma", "tcp"], ...],
        Meta(
            description="Ways in which others may reach the segments; rdma needs a card, and tcp."
        ),
    ] = ("shm", "rdma", "tcp")
    rails: Annotated[
        tuple[str, ...],
        Meta(
            description="Further addresses, host or host:port, each on a network of its own: "
            "large transfers use all of them."
        ),
    ] = ()
    port_file: PortFile = ""
    log_level: LogLevel = "info"
    log_json: LogJson = False
    strict: Strict = False

    def check(self) -> None:
        """Refuse a worker that lends nothing, cannot be reached, or is open to anyone.

        Raises:
            Contradiction: the first such setting.
        """
        check_address(self.table, "master", self.master, split_masters)
        if not self.files:
            check_list(self.table, "segments", self.segments_bytes, distinct=False)
        for name, items in (("files", self.files), ("rails", self.rails)):
            if items:
                check_list(self.table, name, items)
        check_list(self.table, "transports", self.transports)
        check_own_namespace(self.table, self.namespace)
        check_memory(self.table, self.memory)
        check_cold(
            self.cold_url,
            self.cold_keys,
            self.name,
            self.memory,
            self.hugepages,
            self.transports,
        )
        check_rails(self.table, self.rails, self.transports)
        self.check_metrics()
        self.check_guard(self.host, *(split_rail(rail)[0] for rail in self.rails))


class ClientConfig(Proving, frozen=True, kw_only=True):
    """Settings of a client: which store it talks to, how patiently, and what it keeps."""

    table: ClassVar[str] = "client"
    profiled: ClassVar[bool] = True
    options: ClassVar[frozenset[str] | None] = frozenset({"url", "secret_file", "etcd_file"})

    url: Annotated[
        str,
        Meta(
            description="The store: mooncake://host:port/namespace; several host:port, separated "
            "by commas, where any of these masters may lead; mooncake+etcd://host:port/pool/"
            "namespace, where an etcd knows them.",
            extra={"general": ("", "url")},
        ),
    ] = "mooncake://127.0.0.1:50051/default"
    etcd_file: EtcdFile = ""
    connect_timeout_s: Annotated[
        DurationS,
        Meta(description="Longest wait for a connection."),
    ] = 2.0
    deadline_s: Annotated[
        DurationS,
        Meta(description="Longest duration of an operation that names no deadline."),
    ] = 30.0
    lease_ttl_s: Annotated[
        float,
        Meta(
            ge=0,
            le=365 * 24 * 3600,
            extra={"unit": "s"},
            description="Read lease asked for by a get; the master may grant less. 0: what the "
            "master's default_lease_ttl says.",
        ),
    ] = 0.0
    verify: Annotated[
        bool,
        Meta(description="Compare the checksum of what was read with what was put."),
    ] = True
    lease_cache: Annotated[
        bool,
        Meta(description="Read again under a running lease without asking the master."),
    ] = True
    lease_cache_entries: Annotated[
        Count,
        Meta(description="Leases remembered for that."),
    ] = 65_536
    transports: Annotated[
        tuple[Literal["local", "shm", "file", "rdma", "tcp"], ...],
        Meta(description="Ways to move bytes that may be used; the cheapest one is."),
    ] = ("local", "shm", "file", "rdma", "tcp")
    copy_threads: Annotated[
        int,
        Meta(ge=1, le=256, description="Threads that copy between shared memory and buffers."),
    ] = 2
    segment_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=VALUE_MAX,
            extra={"unit": "bytes"},
            description="Size of a segment that this client lends to the pool; 0: none.",
        ),
    ] = 0
    overcommit: Overcommit = False
    state: Annotated[
        str,
        Meta(
            description="Directory that keeps the pool of mooncake://local for the next program. "
            "Empty: the pool ends with this one."
        ),
    ] = ""
    replicas: Annotated[
        int,
        Meta(ge=1, le=16, description="Copies of an object that a put asks for."),
    ] = 1
    strict: Strict = False

    def check(self) -> None:
        """Refuse a URL that is none, no way to move bytes, and deadlines out of order.

        Raises:
            Contradiction: the first such setting.
        """
        check_address(self.table, "url", self.url, split_url)
        if 0 < self.segment_bytes < MIB:
            raise Contradiction("client.segment must be 0 or at least 1MiB", "segment")
        check_kept_pool(self.table, self.state, self.url)
        check_networks(self.table, self.data_networks)
        self.check_tls()
        check_list(self.table, "transports", self.transports)
        check_order(self, "connect_timeout", "deadline", "", strict=False)


PROGRAMS: tuple[type[Settings], ...] = (
    MasterConfig,
    MemberConfig,
    WorkerConfig,
    ClientConfig,
)
"""All programs whose tables may stand in one file and whose variables share one environment."""


def load(
    program: type[S],
    *,
    file: str | os.PathLike[str] | None = None,
    profile: str | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    source: Source = COMMAND_LINE,
) -> Loaded[S]:
    """Return the settings of `program` with the origin of each; warn of unknown variables.

    `file` defaults to what `MOONCAKE_CONFIG` names, `profile` to what `MOONCAKE_PROFILE` does,
    `environ` to this process's environment. `overrides` come from `source`: setting name to value
    or text, None for not given.

    Raises:
        ConfigError: a name is unknown, a value is impossible, or two contradict each other.
    """
    loaded = load_settings(
        program,
        PROGRAMS,
        file=file,
        profile=profile,
        environ=environ,
        overrides=overrides,
        source=source,
    )
    loaded.warn()
    return loaded


def load_client(url: str | None, settings: Mapping[str, Any]) -> ClientConfig:
    """Return the settings of a client from the keywords it was made with.

    Besides settings these may be `config_file` and `profile`: the file, and its table, to read.

    Raises:
        ConfigError: as `load`.
    """
    given = dict(settings)
    file, profile = given.pop("config_file", None), given.pop("profile", None)
    if url is not None:
        given["url"] = url
    return load(
        ClientConfig, file=file, profile=profile, overrides=given, source=CLIENT_ARGUMENT
    ).value
