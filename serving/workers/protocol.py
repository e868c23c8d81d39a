"""What is said to a serving worker, and what it answers: one registry of operations.

A client first says that it listens; then requests are *submitted* and answered at once with
nothing, and what happens to all of them comes as further answers to `listen`. So tokens cost a
frame for each step of the engine, however many requests share it; and a client that is gone is
noticed: a request whose connection ends is cancelled, and a connection that takes nothing for
`ABANDONED_S` is ended. Who listens hears something every `BEAT_S`, or the worker stands still.

    queued, started, first_token, done                             of `prefill`
    admitted | refused, tokens..., finished                        of `decode`
    queued, started, first_token, computed, tokens..., finished    of `generate`
    failed                                                         instead of the last, at any time

The same operations serve all roles; `set_role` changes which of them a worker takes. Workers speak
to each other with the second half: `kv_open` asks a decode worker for room, KV is then written
there from outside (`exchange.py`), and `kv_close` says that it is there; `kv_lend` asks for blocks
that a worker keeps, which are read likewise; `stage_*` run a prompt through a group of workers.

Tokens travel as little-endian int32 in one byte string. Bodies have limits before anything is
built of them, every request has a deadline, nothing in a message is executed.

No I/O here, and no torch: the conductor imports this file.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from serving.engine.sampling import Chosen, Likelihood, Sampling
from transfer_engine.errors import RemoteProtocolError
from transfer_engine.wire.cold import Cold
from transfer_engine.wire.registry import Operation, Registry
from transfer_engine.wire.schema import Column, Packed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = [
    # What workers are told by conductors.
    "CANCEL",
    "DECODE",
    "DRAIN",
    "FOLLOW_KEPT",
    "GENERATE",
    "HELLO",
    "LISTEN",
    "LOAD",
    "PREFILL",
    "SET_ROLE",
    # What workers tell each other.
    "KV_CLOSE",
    "KV_LEND",
    "KV_OPEN",
    "KV_RETURN",
    "STAGE_CHUNK",
    "STAGE_OPEN",
    "WORKER",
    # Bodies.
    "Cancel",
    "Chosen",
    "Decode",
    "Drain",
    "FollowKept",
    "Generate",
    "Held",
    "Hello",
    "KVClose",
    "KVLend",
    "KVLent",
    "KVOpen",
    "KVOpened",
    "KVPlace",
    "KVReturn",
    "Likelihood",
    "Listen",
    "Load",
    "LoadRequest",
    "HelloRequest",
    "ModelCard",
    "Ok",
    "Prefill",
    "Room",
    "Sampling",
    "SetRole",
    "StageOpen",
    # Events.
    "Admitted",
    "Computed",
    "Done",
    "Event",
    "Events",
    "Failed",
    "Finished",
    "FirstToken",
    "Queued",
    "Refused",
    "Started",
    "Tokens",
    # Limits and helpers.
    "ABANDONED_S",
    "BEAT_S",
    "PROMPT_TOKENS_MAX",
    "pack_tokens",
    "unpack_tokens",
]

ABANDONED_S = 15.0
"""A connection that takes nothing during this time is ended, with its requests."""
BEAT_S = 1.0
"""Who listens is told something at least about as often."""
PROMPT_TOKENS_MAX = 1 << 20
_SUBMIT_BYTES_MAX = 4 * PROMPT_TOKENS_MAX + (1 << 16)
CHUNK_BYTES_MAX = 32 << 20
"""Hidden states of one message between workers."""

PREFILL_ROLE = "prefill"
DECODE_ROLE = "decode"
COUPLED_ROLE = "coupled"
"""Of a worker that takes what both of the others take."""
ROLES = (PREFILL_ROLE, DECODE_ROLE, COUPLED_ROLE)


def pack_tokens(tokens: Sequence[int] | NDArray[np.integer]) -> bytes:
    """Tokens as they travel."""
    return np.asarray(tokens, "<i4").tobytes()


def unpack_tokens(data: bytes) -> NDArray[np.int64]:
    """Tokens that came; raises RemoteProtocolError when the bytes cannot be tokens."""
    if len(data) % 4 or not data:
        raise RemoteProtocolError(f"{len(data)} bytes are no tokens")
    tokens = np.frombuffer(data, "<i4").astype(np.int64)
    if tokens.min() < 0:
        raise RemoteProtocolError("a token is negative")
    return tokens


class ModelCard(msgspec.Struct, frozen=True, array_like=True):
    """Which model a worker serves, and all that its KV keys are made of (`naming.PoolNames`)."""

    name: str
    revision: str
    """A fingerprint of the weights."""
    dtype: str
    layout: str
    """How the bytes of a block are arranged, and in which arithmetic they were computed."""
    layers: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context_max: int
    """Tokens of prompt and answer together, at most."""
    block_tokens: int
    kv_bytes_per_token: int
    eos: tuple[int, ...] = ()
    directory: str = ""
    """Where the tokenizer lies; empty for a random model, whose tokens are bytes."""


class HelloRequest(msgspec.Struct, frozen=True, array_like=True, tag="hello?"):
    """Asks who serves."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Who serves, and what can be asked for."""

    worker_id: str
    role: str
    pid: int
    model: ModelCard
    pool_url: str
    kv_blocks: int
    running_max: int
    queued_tokens_max: int
    chunk_tokens: int


class Prefill(msgspec.Struct, frozen=True, array_like=True, tag="prefill"):
    """Computes a prompt and its first token, and leaves its KV where a decode worker gets it.

    With `decode_at` the KV is pushed there layer by layer while it is computed. Without it, its
    complete blocks are put into the pool, and the decode worker computes the incomplete one again.
    `group` names further workers that each take a share of the layers; this one takes the first.
    """

    request_id: str
    tokens: bytes
    sampling: Sampling
    max_new_tokens: int
    deadline_ms: int
    priority: int = 0
    """A higher one is served earlier."""
    use_pool: bool = True
    prefix_blocks: int = -1
    """How many blocks the caller expects in the pool. More are not loaded; -1 sets no bound."""
    fetch_deadline_ms: int = 0
    """Loading a prefix may take this long, then it is computed instead; 0 sets the worker's own."""
    decode_at: str = ""
    source: str = ""
    """A worker that keeps more of the prefix than this one, to be asked before the pool."""
    group: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    store: bool = True
    """Whether new blocks go to the pool."""


class Generate(msgspec.Struct, frozen=True, array_like=True, tag="generate"):
    """Computes a prompt and its whole answer on this worker, whatever its role."""

    request_id: str
    tokens: bytes
    sampling: Sampling
    max_new_tokens: int
    deadline_ms: int
    priority: int = 0
    use_pool: bool = True
    prefix_blocks: int = -1
    fetch_deadline_ms: int = 0
    stop_tokens: tuple[int, ...] = ()
    store: bool = True
    source: str = ""


class KVPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a prompt's KV is: `pool_blocks` from the first on in the pool, or `pushed` whole."""

    pool_blocks: int = 0
    pushed: bool = False


class Decode(msgspec.Struct, frozen=True, array_like=True, tag="decode"):
    """Goes on from a prompt and its first token, with the KV that a prefill left.

    What is not where `kv` says is computed again, so a lost block costs time and nothing else.
    """

    request_id: str
    tokens: bytes
    first_token: int
    sampling: Sampling
    max_new_tokens: int
    """First token included."""
    deadline_ms: int
    kv: KVPlace
    priority: int = 0
    stop_tokens: tuple[int, ...] = ()
    fetch_deadline_ms: int = 0
    store: bool = True
    """Whether the finished KV goes back to the pool, for the next turn."""


class Listen(msgspec.Struct, frozen=True, array_like=True, tag="listen"):
    """Asks to be told what happens to the requests of this connection, those to come included.

    It is answered again and again, for as long as the connection lasts.
    """


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Ends a request; harmless for one that is unknown."""

    request_id: str


class LoadRequest(msgspec.Struct, frozen=True, array_like=True, tag="load?"):
    """Asks how busy a worker is."""


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """How busy a worker is."""

    role: str
    draining: bool
    queued: int
    """Requests that wait for prefill."""
    running: int
    """Requests that are decoded."""
    kv_blocks: int
    kv_blocks_used: int
    tbt_s: float
    """Median time between tokens of the last decode steps; 0 before the first."""
    steps: tuple[tuple[int, int, float], ...]
    """Answers that a step went on with, tokens of a prompt beside them, seconds; newest last."""
    pending_puts: int
    """Blocks whose way to the pool has not ended."""


class SetRole(msgspec.Struct, frozen=True, array_like=True, tag="role"):
    """Changes the role: what runs is finished within `drain_ms`, then the new role is taken."""

    role: str
    drain_ms: int


class Drain(msgspec.Struct, frozen=True, array_like=True, tag="drain"):
    """Takes nothing new, finishes what runs within `drain_ms`; `resume` takes requests again."""

    drain_ms: int
    resume: bool = False


class Ok(msgspec.Struct, frozen=True, array_like=True, tag="ok"):
    """Done."""


class Queued(msgspec.Struct, frozen=True, array_like=True, tag="queued"):
    """The request waits behind this many tokens."""

    tokens_ahead: int


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """Prefill begins; so many tokens of the prompt come from the pool."""

    cached_tokens: int


class FirstToken(msgspec.Struct, frozen=True, array_like=True, tag="first"):
    """The first token of the answer."""

    token: int
    likelihood: Likelihood | None = None


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """A prefill ended well; `seconds` by stage ("queue", "fetch", "compute", "store", "push")."""

    computed_tokens: int
    cached_tokens: int
    seconds: dict[str, float]
    kv: KVPlace
    stopped: str = ""
    """Why nothing is left to decode: "stop" or "length"; empty when there is."""
    own_tokens: int = 0
    """Those of the cached ones that it had itself."""
    lent_tokens: int = 0
    """Those of the cached ones that another worker lent."""
    last: Chosen | None = None
    """The token that ended the answer, which is no part of it."""


class Computed(msgspec.Struct, frozen=True, array_like=True, tag="computed"):
    """A prompt is computed by the worker that goes on with its answer; fields as in `Done`."""

    computed_tokens: int
    cached_tokens: int
    seconds: dict[str, float]
    own_tokens: int = 0
    lent_tokens: int = 0


class Admitted(msgspec.Struct, frozen=True, array_like=True, tag="admitted"):
    """A decode begins; so many tokens of the prompt had to be computed again."""

    recomputed_tokens: int


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The worker's own check says no; nothing was changed."""

    reason: str
    retry_after_ms: int


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag="tokens"):
    """Further tokens of the answer."""

    ids: tuple[int, ...]
    likelihoods: tuple[Likelihood, ...] = ()
    """As many, where they were asked for."""


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """The answer is complete: `reason` is "stop" or "length"."""

    reason: str
    seconds: dict[str, float]
    cached_tokens: int = 0
    computed_tokens: int = 0
    last: Chosen | None = None
    """The token that ended it, which is no part of it."""


class PrefixLost(msgspec.Struct, frozen=True, array_like=True, tag="prefix_lost"):
    """Of a stage, to its leader: KV that both counted on cannot be loaded; it computes no more."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The request ended without its answer. Codes: see docs/internals/serving.md."""

    code: str
    message: str
    advice: str = ""
    retryable: bool = False


Event = (
    Queued | Started | FirstToken | Done | Computed | Admitted | Refused | Tokens | Finished
    | PrefixLost | Failed
)  # fmt: skip
"""What may happen to a request. The last of a request is Done, Refused, Finished or Failed."""
LAST = (Done, Refused, Finished, Failed)


class Events(msgspec.Struct, frozen=True, array_like=True, tag="events"):
    """What has happened since the last of these: events in order, by request.

    Often it is empty, and says only that the worker is there.
    """

    told: tuple[tuple[str, tuple[Event, ...]], ...]


class Room(msgspec.Struct, frozen=True, array_like=True):
    """Where the KV of one prompt may be written to."""

    descriptor: bytes
    """Of the worker's whole cache (`SegmentDescriptor`)."""
    blocks: tuple[int, ...]
    """Those of the prompt, in order."""
    of_blocks: int
    """How many the cache has: they decide where a block of a layer lies."""
    fence: int
    """Comes with every write and shows that it was asked for."""


class KVOpen(msgspec.Struct, frozen=True, array_like=True, tag="kv_open"):
    """Asks a decode worker to keep room for the KV of a prompt that will be pushed."""

    request_id: str
    tokens: int
    """Of the prompt."""
    max_new_tokens: int
    revision: str
    """The model's: KV of another one is refused."""
    layout: str
    """How blocks are arranged (`ModelCard`): both must have the same."""
    senders: int
    """How many workers push shares of it."""
    deadline_ms: int


class KVOpened(msgspec.Struct, frozen=True, array_like=True, tag="kv_opened"):
    """Where there is room, or why there is none."""

    room: Room | None = None
    reason: str = ""
    retry_after_ms: int = 0


class KVClose(msgspec.Struct, frozen=True, array_like=True, tag="kv_close"):
    """One sender has pushed all it has, or (`abort`) gives up; no write of it is under way."""

    request_id: str
    abort: bool = False
    senders: int = 1
    """For how many it speaks: those that were not asked to push will not."""


class KVLend(msgspec.Struct, frozen=True, array_like=True, tag="kv_lend"):
    """Asks for blocks that a worker keeps, to be read within `lasts_ms`."""

    names: bytes
    """Digests of the blocks, which follow each other."""
    lasts_ms: int


class KVLent(msgspec.Struct, frozen=True, array_like=True, tag="kv_lent"):
    """Where the first of them are, as many as there are; nothing where the first one is not."""

    room: Room | None = None


class KVReturn(msgspec.Struct, frozen=True, array_like=True, tag="kv_return"):
    """Says that what was lent under a number is read no more; harmless when it is not known."""

    fence: int


class FollowKept(msgspec.Struct, frozen=True, array_like=True, tag="kept?"):
    """Asks to be told which blocks a worker keeps. It is answered again and again."""


class Held(msgspec.Struct, frozen=True, array_like=True, tag="kept"):
    """Blocks that are kept now, and others that no longer are; `whole` when these are all."""

    whole: bool
    stored: bytes
    removed: bytes


class StageOpen(msgspec.Struct, frozen=True, array_like=True, tag="stage_open"):
    """Makes a worker stage `stage` of `stages` for one prompt; events are told as of others.

    The last stage emits first_token, all of them done or failed, or prefix_lost and then nothing.
    """

    request_id: str
    tokens: bytes
    sampling: Sampling
    stage: int
    stages: int
    start: int
    """The first token that is computed: what is before it is loaded from the pool."""
    chunk_tokens: int
    revision: str
    """Of the model; all stages must have the same."""
    following: str
    """Address of the next stage; empty for the last one."""
    deadline_ms: int
    priority: int
    fetch_deadline_ms: int
    decode_at: str
    room: Room | None
    """Where at `decode_at` its KV goes."""
    store: bool


HELLO = Operation("hello", 0x10, Cold(HelloRequest), Cold(Hello), "who serves")
PREFILL = Operation(
    "prefill", 0x11, Cold(Prefill, bytes_max=_SUBMIT_BYTES_MAX), Cold(Ok), "a prompt to compute"
)
DECODE = Operation(
    "decode", 0x12, Cold(Decode, bytes_max=_SUBMIT_BYTES_MAX), Cold(Ok), "an answer to go on with"
)
GENERATE = Operation(
    "generate", 0x13, Cold(Generate, bytes_max=_SUBMIT_BYTES_MAX), Cold(Ok), "both, on one worker"
)
CANCEL = Operation("cancel", 0x15, Cold(Cancel), Cold(Ok), "ends a request")
LOAD = Operation("load", 0x16, Cold(LoadRequest), Cold(Load), "how busy a worker is")
SET_ROLE = Operation("set_role", 0x17, Cold(SetRole), Cold(Ok), "a role of ROLES, after draining")
DRAIN = Operation("drain", 0x18, Cold(Drain), Cold(Ok), "finishes what runs, takes nothing new")
LISTEN = Operation(
    "listen", 0x19, Cold(Listen), Cold(Events, bytes_max=16 << 20), "what happens to requests"
)
KV_OPEN = Operation(
    "kv_open", 0x20, Cold(KVOpen), Cold(KVOpened, bytes_max=1 << 20), "room for pushed KV"
)
KV_CLOSE = Operation("kv_close", 0x22, Cold(KVClose), Cold(Ok), "all of a sender's KV is pushed")
KV_LEND = Operation(
    "kv_lend", 0x23, Cold(KVLend, bytes_max=1 << 20), Cold(KVLent, bytes_max=1 << 20),
    "blocks that are kept, to read",
)  # fmt: skip
KV_RETURN = Operation("kv_return", 0x24, Cold(KVReturn), Cold(Ok), "they are read no more")
FOLLOW_KEPT = Operation(
    "follow_kept", 0x1A, Cold(FollowKept), Cold(Held, bytes_max=16 << 20), "which blocks are kept"
)
STAGE_OPEN = Operation(
    "stage_open",
    0x28,
    Cold(StageOpen, bytes_max=_SUBMIT_BYTES_MAX),
    Cold(Ok),
    "a share of a prompt's layers",
)
STAGE_CHUNK = Operation(
    "stage_chunk",
    0x29,
    Packed(
        [("request", "b32"), ("start", "u4"), ("count", "u4")],
        [Column("hidden", "u1")],
        rows_max=CHUNK_BYTES_MAX,
    ),
    Packed(),
    "hidden states of a chunk, from the stage before",
)

WORKER: Registry = Registry(
    "mooncake-serving",
    [
        HELLO, PREFILL, DECODE, GENERATE, CANCEL, LOAD, SET_ROLE, DRAIN, LISTEN,
        FOLLOW_KEPT, KV_OPEN, KV_CLOSE, KV_LEND, KV_RETURN, STAGE_OPEN, STAGE_CHUNK,
    ],
)  # fmt: skip


def request_tag(request_id: str) -> bytes:
    """A request id as the packed bodies carry it: 32 bytes, its hash."""
    return hashlib.blake2b(request_id.encode(), digest_size=32).digest()


def deadline_of(message: Any) -> float:
    """Seconds a submitted request may take; raises RemoteProtocolError without any."""
    if message.deadline_ms <= 0:
        raise RemoteProtocolError("a request has no deadline")
    seconds: float = message.deadline_ms / 1000
    return seconds
