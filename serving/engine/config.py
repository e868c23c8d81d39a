"""The shape of a model: read from a checkpoint's config.json, or given in a few words.

    ModelConfig.read(Path("Llama-3.2-1B"))          a checkpoint of the Llama or Qwen2 family
    ModelConfig.random("tiny")                      random weights of a known shape
    ModelConfig.random("tiny,layers=2,seed=7")      the same with changes

What the decoder does not compute is refused here, with the name of the setting: a model that runs
with a wrong formula answers nonsense without a sign. No torch, no weights.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transfer_engine.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ModelConfig", "RopeScaling", "is_random"]

FAMILIES = ("llama", "qwen2", "mistral")
"""Values of model_type whose layers are the ones of `decoder.py`."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's stretching of low frequencies to a longer context."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


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
    tied_embeddings: bool = False
    eos: tuple[int, ...] = ()
    dtype: str = "float32"
    seed: int = 0
    """Of random weights."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"{self.heads} heads cannot share {self.kv_heads} KV heads evenly",
                advice="num_attention_heads must be a multiple of num_key_value_heads",
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and field.name != "seed" and value < 1:
                raise ConfigError(f"{field.name} of {self.name} is {value}, must be above 0")

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _DTYPE_BYTES[self.dtype]

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

    @classmethod
    def read(cls, directory: Path, dtype: str = "") -> ModelConfig:
        """The configuration of a checkpoint. Raises ConfigError for what is not supported."""
        path = directory / "config.json"
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read: {error.strerror}",
                advice="name the directory of a checkpoint",
            ) from error
        except ValueError as error:
            raise ConfigError(f"{path} is no JSON: {error}") from error
        if not isinstance(given, dict):
            raise ConfigError(f"{path} holds no settings")
        return _parsed(given, directory.name, dtype)


_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

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


def _parsed(given: dict[str, Any], name: str, dtype: str) -> ModelConfig:
    family = given.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"models of type {family!r} are not supported",
            advice=f"use one of {', '.join(FAMILIES)}, or an engine of its own behind the front",
        )
    if given.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act {given['hidden_act']!r} is not supported, only silu")
    if given.get("mlp_bias"):
        raise ConfigError("mlp_bias is not supported")
    window = given.get("sliding_window")
    if window and given.get("use_sliding_window", family == "mistral"):
        raise ConfigError(f"sliding_window {window} is not supported")
    try:
        return _built(given, name, dtype, family)
    except KeyError as error:
        raise ConfigError(f"config.json lacks {error.args[0]!r}") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config.json holds a value of the wrong kind: {error}") from error


def _built(given: dict[str, Any], name: str, dtype: str, family: str) -> ModelConfig:
    hidden, heads = int(given["hidden_size"]), int(given["num_attention_heads"])
    # Newer files keep everything of the rotation in one place, older ones in two.
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    theta = rope.get("rope_theta", given.get("rope_theta", 10_000.0))
    chosen = dtype or str(given.get("dtype") or given.get("torch_dtype") or "float32")
    if chosen not in _DTYPE_BYTES:
        raise ConfigError(f"dtype {chosen!r} is not one of {', '.join(_DTYPE_BYTES)}")
    eos = given.get("eos_token_id")
    return ModelConfig(
        name=name,
        vocabulary=int(given["vocab_size"]),
        hidden=hidden,
        intermediate=int(given["intermediate_size"]),
        layers=int(given["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(given.get("num_key_value_heads") or heads),
        head_dim=int(given.get("head_dim") or hidden // heads),
        context_max=int(given["max_position_embeddings"]),
        rope_theta=float(theta),
        rope_scaling=_scaling(rope),
        norm_eps=float(given.get("rms_norm_eps", 1e-6)),
        qkv_bias=bool(given.get("attention_bias", family == "qwen2")),
        output_bias=bool(given.get("attention_bias")) and family != "qwen2",
        tied_embeddings=bool(given.get("tie_word_embeddings", False)),
        eos=tuple(eos) if isinstance(eos, list) else (() if eos is None else (int(eos),)),
        dtype=chosen,
    )


def _scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError(f"rope scaling of type {kind!r} is not supported, only llama3")
    return RopeScaling(
        float(rope["factor"]),
        float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]),
        int(rope["original_max_position_embeddings"]),
    )
