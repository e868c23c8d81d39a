"""What computing and moving take on a kind of machine, as read from a data file.

    hardware = read_hardware("a800-llama3-70b")      # one that comes with the package
    hardware = read_hardware("./mine.toml")

The forms are those that the conductor fits to its workers, so what is measured of one serves as a
file here. A file says where its figures come from. Pure arithmetic; reading is O(file).
"""

from __future__ import annotations

import os
import tomllib
from importlib import resources
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from mooncake_store.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Hardware", "known_hardware", "read_hardware"]


class Hardware(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One node that serves one model. Times are seconds, sizes bytes, lengths tokens."""

    about: str
    """What it is, and where the figures come from."""
    kv_bytes: int
    """KV of one token."""
    network_bytes_per_s: float
    load_bytes_per_s: float
    """From a node's memory to its accelerators."""
    prefill: tuple[float, float, float]
    """Fixed, by token, and by square of tokens; without the load of what was cached."""
    step: tuple[float, float, float]
    """Of decoding one token each: fixed for the first sequence, by further sequence, by token."""
    kv_tokens: int
    """Room for KV of what decodes."""
    layers: int = 80
    disk_bytes_per_s: float = 0.0
    """From a node's disk to its memory; 0 where nobody has measured it."""

    def __post_init__(self) -> None:
        rates = self.network_bytes_per_s, self.load_bytes_per_s
        sizes = self.kv_bytes, self.kv_tokens, self.layers
        others = *self.prefill, *self.step, self.disk_bytes_per_s
        if min(*rates, *sizes) <= 0 or min(others) < 0 or self.prefill[1] <= 0:
            raise ValueError(
                "rates, sizes and the time a token takes are above 0, other times 0 or more"
            )

    def prefill_s(self, tokens: int, cached: int) -> float:
        """Seconds to load what was cached of a prompt, and to compute the rest."""
        return self.compute_s(tokens, cached) + self.load_s(min(cached, tokens) * self.kv_bytes)

    def compute_s(self, tokens: int, cached: int) -> float:
        """Seconds to compute a prompt of which so much was cached, and is loaded."""
        # The last token is always computed: its logits give the first token of the answer.
        if cached >= tokens:
            cached = max(0, tokens - 1)
        fixed_s, token_s, square_s = self.prefill
        return fixed_s + token_s * (tokens - cached) + square_s * (tokens**2 - cached**2)

    def saved_s(self, tokens: NDArray[np.int64], cached: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds that prompts take less for what was cached of them, loads taken off; columns."""
        _, token_s, square_s = self.prefill
        spared = np.clip(cached, 0, np.maximum(tokens - 1, 0))
        loaded = np.minimum(cached, tokens) * (self.kv_bytes / self.load_bytes_per_s)
        return token_s * spared + square_s * spared.astype(np.float64) ** 2 - loaded

    def load_s(self, count: int) -> float:
        """Seconds to load so many bytes of KV from the node's memory."""
        return count / self.load_bytes_per_s

    def disk_s(self, count: int) -> float:
        """Seconds to read so many bytes of KV from the node's disk; 0 reads nothing."""
        return count / self.disk_bytes_per_s if count else 0.0

    def step_s(self, batch: int, tokens: float) -> float:
        """Seconds between two tokens of so many sequences with so much context together."""
        fixed_s, sequence_s, token_s = self.step
        return fixed_s + sequence_s * (batch - 1) + token_s * tokens


def known_hardware() -> list[str]:
    """The names of those that come with the package."""
    folder = resources.files("serving.simulator").joinpath("data")
    return sorted(
        each.name.removesuffix(".toml") for each in folder.iterdir() if each.name.endswith(".toml")
    )


def read_hardware(name: str | os.PathLike[str]) -> Hardware:
    """Return a kind of machine by its name or file.

    Raises:
        ConfigError: there is none, or the file says something impossible.
    """
    text = os.fspath(name)
    try:
        if text in known_hardware():
            file = resources.files("serving.simulator").joinpath("data", f"{text}.toml")
            return msgspec.toml.decode(file.read_bytes(), type=Hardware)
        with open(text, "rb") as opened:
            return msgspec.convert(tomllib.load(opened), Hardware)
    except OSError as error:
        raise ConfigError(
            f"there is no hardware {text!r}: {error.strerror}",
            advice=f"name a file, or one of: {', '.join(known_hardware())}",
        ) from None
    except (msgspec.ValidationError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{text} describes no hardware: {error}") from None
