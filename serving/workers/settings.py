"""What a serving worker is started with, checked when it starts."""

from __future__ import annotations

import difflib
from typing import Any

import msgspec

from eviction.registry import check_store_policy
from serving.workers.protocol import PREFILL_ROLE, ROLES
from transfer_engine.errors import ConfigError

__all__ = ["WorkerSettings", "settings_from"]

OWN_BLOCKS_MAX = 1 << 19
"""Their names have to fit in one message."""


_LISTS = ("transports", "data_networks")
"""What text may name several of, with commas."""


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one worker."""

    worker_id: str = "worker"
    role: str = PREFILL_ROLE
    model: str = "tiny"
    """A checkpoint's directory, or a random model such as "tiny" or "nano,layers=2"."""
    dtype: str = ""
    """Of weights and KV; empty takes the checkpoint's."""
    device: str = "cpu"
    exact: bool | None = None
    """Arithmetic that does not depend on the batch; None chooses it for float32 on a CPU."""
    pool_url: str = ""
    """The store that KV is shared through; empty serves without one."""
    pool: dict[str, Any] = {}
    """Further settings of the store's client."""
    host: str = "127.0.0.1"
    port: int = 0
    data_port: int = 0
    """Where other workers write KV to; 0 takes any that is free."""
    transports: tuple[str, ...] = ()
    """The ways that its KV may take to other workers; empty allows all."""
    data_networks: tuple[str, ...] = ()
    """Networks, such as 10.0.0.0/8, that other workers may be reached in; empty as for a store."""
    insecure: bool = False
    block_tokens: int = 64
    chunk_tokens: int = 256
    """Of a prompt that are computed at a time, at most."""
    step_tokens: int = 0
    """Tokens of a step, those of answers included: what these leave is the next chunk of a prompt.

    0 leaves it to `chunk_tokens`: one chunk beside the answers, however many there are."""
    kv_blocks: int = 512
    """Blocks of the KV cache. A request that needs more than all of them is refused."""
    own_blocks: int = 256
    """Blocks kept of finished requests, for the next ones and for other workers; 0 keeps none."""
    own_policy: str = "lru"
    """Which of them leaves first."""
    copy_idle_s: float = 300.0
    """For how long a kept block that others computed stays unused."""
    running_max: int = 16
    queued_tokens_max: int = 131_072
    fetch_deadline_ms: int = 2_000
    """How long loading a prefix may take when a request does not say; then it is computed."""
    store_deadline_ms: int = 2_000
    threads: int = 1
    """Of torch. One per worker is right where several workers share a machine."""

    def check(self) -> None:
        """Raise ConfigError for a value that cannot work."""
        if self.role not in ROLES:
            raise ConfigError(f"role is {self.role!r}", advice=f"one of {', '.join(ROLES)}")
        for name in (
            "block_tokens", "chunk_tokens", "kv_blocks", "running_max", "queued_tokens_max",
            "fetch_deadline_ms", "store_deadline_ms", "threads",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be above 0")
        least = self.running_max + self.block_tokens
        if self.step_tokens and self.step_tokens < least:
            raise ConfigError(
                f"step_tokens is {self.step_tokens}, and as many answers as may run at a time "
                f"(running_max) leave no block for a prompt",
                advice=f"{least} or more, or a smaller running_max",
            )
        if not 0 <= self.own_blocks <= OWN_BLOCKS_MAX:
            raise ConfigError(f"own_blocks is {self.own_blocks}, may be 0 to {OWN_BLOCKS_MAX}")
        try:
            check_store_policy(self.own_policy)
        except ValueError as error:
            raise ConfigError(f"own_policy: {error}") from error


def settings_from(given: dict[str, Any]) -> WorkerSettings:
    """Settings by name, as values or as text; raises ConfigError for what is none."""
    known = WorkerSettings.__struct_fields__
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"a serving worker has no setting {name!r}",
                advice=f"did you mean {nearest[0]!r}?" if nearest else f"it has {', '.join(known)}",
            )
    for name in _LISTS:
        if isinstance(text := given.get(name), str):
            given = given | {name: [each.strip() for each in text.split(",")]}
    try:
        settings = msgspec.convert(given, WorkerSettings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"settings of a serving worker: {error}") from error
    settings.check()
    return settings
