"""The shape of a model, and shapes given in a few words.

    ModelConfig.random("tiny")                      random weights of a known shape
    ModelConfig.random("tiny,layers=2,seed=7")      the same with changes

Shapes of checkpoints are read by `checkpoint.py`. No torch, no weights.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from transfer_engine.errors import ConfigError

__all__ = [
    "DTYPE_BYTES",
    "LinearScaling",
    "Llama3Scaling",
    "Mixture",
    "ModelConfig",
    "RopeScaling",
    "YarnScaling",
    "is_random",
]


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies divided alike, as if positions were closer to each other."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3's stretching of low frequencies to a longer context."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: dimensions that turn often keep their frequency, those that turn seldom are divided."""

    factor: float
    original_context: int
    turns_kept: float
    """A dimension that turns as often within the original context keeps its frequency."""
    turns_divided: float
    """One that turns as seldom is divided by the whole factor."""
    whole_steps: bool
    """Whether the two borders are rounded to whole dimensions."""
    attention_factor: float
    """What cosines and sines are multiplied by."""


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True)
class Mixture:
    """Several experts in the place of one feed-forward network, a few of which a token uses."""

    experts: int
    used: int
    normalised: bool
    """Whether the weights of those that are used add up to one."""
    named_as_mixtral: bool = False
    """Whether checkpoints name the parts as Mixtral does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the decoder has to know of a model."""

    name: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_max: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normalised, a head at a time, before they are rotated."""
    window: int | None = None
    """How many tokens a token sees, itself included; None for all before it."""
    mixture: Mixture | None = None
    tied_embeddings: bool = False
    eos: tuple[int, ...] = ()
    dtype: str = "float32"
    seed: int = 0
    """Of random weights."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and field.name != "seed" and value < 1:
                raise ConfigError(f"{field.name} of {self.name} is {value}, must be above 0")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"{self.heads} heads cannot share {self.kv_heads} KV heads evenly",
                advice="num_attention_heads must be a multiple of num_key_value_heads",
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim of {self.name} is {self.head_dim}, rotation takes pairs")

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @classmethod
    def random(cls, text: str) -> ModelConfig:
        """A preset, with changes: "tiny,layers=2". Raises ConfigError for anything else."""
        preset, *changes = text.split(",")
        if preset not in PRESETS:
            raise ConfigError(
                f"there is no model {preset!r}",
                advice=f"give a directory with config.json, or one of {', '.join(PRESETS)}",
            )
        settings: dict[str, Any] = {}
        for change in changes:
            key, _, value = change.partition("=")
            if key not in _CHANGEABLE or not value.isdigit():
                raise ConfigError(
                    f"{change!r} is no setting of a random model",
                    advice=f"write NAME=NUMBER with one of {', '.join(_CHANGEABLE)}",
                )
            settings[key] = int(value)
        return dataclasses.replace(PRESETS[preset], name=text, **settings)


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Types that weights and KV may have."""

_TINY = ModelConfig(
    name="tiny",
    vocabulary=260,
    hidden=256,
    intermediate=768,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=64,
    context_max=8192,
    rope_theta=500_000.0,
    tied_embeddings=True,
    eos=(257,),
)
PRESETS = {
    "tiny": _TINY,
    # Small enough for hundreds of answers in a test.
    "nano": dataclasses.replace(
        _TINY, name="nano", hidden=64, intermediate=160, layers=3, head_dim=16, context_max=2048
    ),
    # The shape of a real one, for machines with an accelerator.
    "8b": dataclasses.replace(
        _TINY, name="8b", vocabulary=128_256, hidden=4096, intermediate=14_336, layers=32, heads=32,
        kv_heads=8, head_dim=128, context_max=131_072, tied_embeddings=False, dtype="bfloat16",
    ),
}  # fmt: skip
_CHANGEABLE = (
    "vocabulary", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim",
    "context_max", "seed",
)  # fmt: skip


def is_random(model: str) -> bool:
    """Whether a model's name means random weights, not a directory."""
    return model.split(",")[0] in PRESETS
