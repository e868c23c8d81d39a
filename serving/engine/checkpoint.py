"""What a checkpoint's config.json says of its model, as `transformers` writes it.

    read_config(Path("Llama-3.2-1B"))

What the decoder does not compute is refused here, with the name of the setting: a model that runs
with a wrong formula answers nonsense without a sign. A setting that is not there has the value that
`transformers` takes for it. No torch, no weights.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from serving.engine.config import (
    DTYPE_BYTES,
    LinearScaling,
    Llama3Scaling,
    Mixture,
    ModelConfig,
    YarnScaling,
)
from transfer_engine.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from serving.engine.config import RopeScaling

__all__ = ["read_config"]


@dataclass(frozen=True, slots=True)
class _Family:
    """What is not in config.json, because it is the same for all models of a type."""

    architecture: str
    qkv_bias: bool | None = None
    """None: `attention_bias` says it, and the projection behind attention has one as well."""
    qk_norm: bool = False
    window: str = "never"
    """When `sliding_window` counts: "never", "always", or "asked" for by `use_sliding_window`."""
    experts: bool = False
    head_dim: int = 0
    """What `head_dim` is where it is not given; 0 for a head's share of the hidden size."""
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM"),
    "mistral": _Family("MistralForCausalLM", qkv_bias=False, window="always"),
    "mixtral": _Family(
        "MixtralForCausalLM", qkv_bias=False, window="always", experts=True,
        rope_theta=1e6, norm_eps=1e-5,
    ),
    "qwen2": _Family("Qwen2ForCausalLM", qkv_bias=True, window="asked"),
    "qwen3": _Family("Qwen3ForCausalLM", qk_norm=True, window="asked", head_dim=128),
    "qwen3_moe": _Family("Qwen3MoeForCausalLM", qk_norm=True, window="asked", experts=True),
}  # fmt: skip
"""By model_type: those whose layers are the ones of `decoder.py`."""


class _Settings:
    """Settings of a file, or of a group in it, by name and kind. null is as good as absent."""

    def __init__(self, given: dict[str, Any], source: str) -> None:
        self._given = given
        self._source = source

    def get(self, name: str) -> Any:
        """Whatever is there."""
        return self._given.get(name)

    def _of_kind(self, name: str, kinds: tuple[type, ...], default: Any) -> Any:
        value = self._given.get(name)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self._source} lacks {name!r}")
        if not isinstance(value, kinds) or isinstance(value, bool) != (bool in kinds):
            raise ConfigError(f"{name} in {self._source} is of the wrong kind: {value!r}")
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number; required without a default."""
        value: int = self._of_kind(name, (int,), default)
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """A number above 0; required without a default."""
        value = float(self._of_kind(name, (int, float), default))
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} in {self._source} is {value}, must be a number above 0")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false."""
        value: bool = self._of_kind(name, (bool,), default)
        return value

    def text(self, name: str, default: str) -> str:
        """A word."""
        value: str = self._of_kind(name, (str,), default)
        return value

    def group(self, name: str) -> _Settings:
        """Settings under one name; empty where there are none."""
        return _Settings(self._of_kind(name, (dict,), {}), f"{name} of {self._source}")

    def words(self, name: str) -> list[str]:
        """A list of words; empty where there is none."""
        value = self._of_kind(name, (list,), [])
        if not all(isinstance(each, str) for each in value):
            raise ConfigError(f"{name} in {self._source} is of the wrong kind: {value!r}")
        return list(value)

    def numbers(self, name: str) -> tuple[int, ...]:
        """One whole number or a list of them; empty where there is none."""
        value = self._of_kind(name, (int, list), [])
        several = value if isinstance(value, list) else [value]
        if not all(type(each) is int for each in several):
            raise ConfigError(f"{name} in {self._source} is of the wrong kind: {value!r}")
        return tuple(several)

    @property
    def nested(self) -> list[str]:
        """Names of groups within this one."""
        return [name for name, value in self._given.items() if isinstance(value, dict)]


def read_config(directory: Path, dtype: str = "") -> ModelConfig:
    """The configuration of a checkpoint. Raises ConfigError for what is not supported."""
    settings = _Settings(_read_json(directory / "config.json"), "config.json")
    family = _family(settings)
    heads, hidden = settings.whole("num_attention_heads"), settings.whole("hidden_size")
    layers, context = settings.whole("num_hidden_layers"), settings.whole("max_position_embeddings")
    rope = _rope(settings)
    # How long texts were that the model learnt from stands here or there.
    trained = settings.whole("original_max_position_embeddings", 0)
    scaling = _scaling(rope, trained)
    if isinstance(scaling, YarnScaling):
        # People are told to add the scaling to config.json and to leave the old length as it is.
        context = max(context, int(scaling.factor * scaling.original_context))
    bias = settings.flag("attention_bias") if family.qkv_bias is None else family.qkv_bias
    mixture = _mixture(settings) if family.experts else None
    wide = "moe_intermediate_size" if family.architecture.startswith("Qwen3Moe") else ""
    return ModelConfig(
        name=directory.name,
        vocabulary=settings.whole("vocab_size"),
        hidden=hidden,
        intermediate=settings.whole(wide or "intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=settings.whole("num_key_value_heads", heads),
        head_dim=_head_dim(settings, family, hidden, heads),
        context_max=context,
        rope_theta=rope.real("rope_theta", settings.real("rope_theta", family.rope_theta)),
        rope_scaling=scaling,
        norm_eps=settings.real("rms_norm_eps", family.norm_eps),
        qkv_bias=bias,
        output_bias=bias and family.qkv_bias is None,
        qk_norm=family.qk_norm,
        window=_window(settings, family, layers, context),
        mixture=mixture,
        tied_embeddings=settings.flag("tie_word_embeddings"),
        eos=_ends(directory) or settings.numbers("eos_token_id"),
        dtype=_dtype(settings, dtype),
    )


def _read_json(path: Path) -> dict[str, Any]:
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
    return given


def _family(settings: _Settings) -> _Family:
    kind = settings.text("model_type", "")
    family = _FAMILIES.get(kind)
    if family is None:
        raise ConfigError(
            f"models of type {kind!r} are not supported",
            advice=f"use one of {', '.join(_FAMILIES)}, or an engine of its own behind the front",
        )
    architectures = settings.words("architectures")
    if architectures and family.architecture not in architectures:
        raise ConfigError(
            f"the architecture {', '.join(architectures)} is not supported",
            advice=f"a model of type {kind} that writes text is {family.architecture}",
        )
    quantised = settings.group("quantization_config")
    if settings.get("quantization_config") is not None:
        raise ConfigError(
            f"quantised weights ({quantised.text('quant_method', 'of no name')}) are not supported",
            advice="use the checkpoint they were made from, in bfloat16, float16 or float32",
        )
    act = settings.text("hidden_act", "silu")
    if act != "silu":
        raise ConfigError(f"hidden_act {act!r} is not supported, only silu")
    if settings.flag("mlp_bias"):
        raise ConfigError("mlp_bias is not supported")
    return family


def _head_dim(settings: _Settings, family: _Family, hidden: int, heads: int) -> int:
    if settings.get("head_dim") is not None or family.head_dim:
        return settings.whole("head_dim", family.head_dim)
    if heads < 1 or hidden % heads:
        raise ConfigError(
            f"hidden_size {hidden} is no multiple of {heads} heads, and head_dim is not given"
        )
    return hidden // heads


def _dtype(settings: _Settings, asked: str) -> str:
    chosen = asked or settings.text("dtype", settings.text("torch_dtype", "float32"))
    if chosen not in DTYPE_BYTES:
        raise ConfigError(f"dtype {chosen!r} is not one of {', '.join(DTYPE_BYTES)}")
    return chosen


def _ends(directory: Path) -> tuple[int, ...]:
    """Tokens that end an answer, from where those of chat models are complete."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return ()
    return _Settings(_read_json(path), path.name).numbers("eos_token_id")


def _window(settings: _Settings, family: _Family, layers: int, context: int) -> int | None:
    """How far back a token sees. Raises ConfigError where layers differ in that."""
    asked = family.window == "always" or settings.flag("use_sliding_window")
    if family.window == "never" or not asked or settings.get("sliding_window") is None:
        return None
    window = settings.whole("sliding_window")
    if window < 1:
        raise ConfigError(f"sliding_window is {window}, must be above 0, or null for none")
    if window >= context:
        return None
    first = 0
    if family.window == "asked" and not family.experts:
        first = settings.whole("max_window_layers", 28)
    kinds = settings.words("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(layers)
    ]
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) != {"sliding_attention"}:
        raise ConfigError(
            f"sliding_window {window} of some layers only is not supported",
            advice="set use_sliding_window to false to have all layers see everything",
        )
    return window


def _mixture(settings: _Settings) -> Mixture:
    if settings.get("mlp_only_layers") or settings.whole("decoder_sparse_step", 1) != 1:
        raise ConfigError("mlp_only_layers and decoder_sparse_step are not supported")
    # Files have either name, whatever wrote them.
    experts = settings.whole("num_experts", settings.get("num_local_experts"))
    used = settings.whole("num_experts_per_tok")
    if not 1 <= used <= experts:
        raise ConfigError(f"num_experts_per_tok is {used}, of {experts} experts")
    mixtral = settings.get("model_type") == "mixtral"
    return Mixture(experts, used, mixtral or settings.flag("norm_topk_prob"), mixtral)


def _rope(settings: _Settings) -> _Settings:
    """All of the rotation: newer files keep it in one place, older ones in two."""
    rope = settings.group("rope_scaling" if settings.get("rope_scaling") else "rope_parameters")
    if rope.nested:
        raise ConfigError(f"a rotation for each of {', '.join(rope.nested)} is not supported")
    for group in (rope, settings):
        part = group.real("partial_rotary_factor", 1.0)
        if part != 1.0:
            raise ConfigError(f"partial_rotary_factor {part} is not supported")
    return rope


def _scaling(rope: _Settings, trained: int) -> RopeScaling | None:
    """What stretches the rotation; `trained` is 0 if only `rope` may know it."""
    kind = rope.text("rope_type", rope.text("type", "default"))
    # What "dynamic" changes, it changes for what is longer than the model's length, which is
    # refused anyway: keys in the pool must not depend on how long a prompt becomes.
    if kind in ("default", "dynamic"):
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise ConfigError(
            f"rope scaling of type {kind!r} is not supported",
            advice="supported are linear, dynamic, llama3 and yarn",
        )
    factor = rope.real("factor")
    if kind == "linear":
        return LinearScaling(factor)
    trained = trained or rope.whole("original_max_position_embeddings")
    if kind == "yarn":
        return _yarn(rope, factor, trained)
    low, high = rope.real("low_freq_factor"), rope.real("high_freq_factor")
    if low >= high:
        raise ConfigError(f"low_freq_factor {low} is not below high_freq_factor {high}")
    return Llama3Scaling(factor, low, high, trained)


def _yarn(rope: _Settings, factor: float, trained: int) -> YarnScaling:
    def gain(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    attention = gain(1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        attention = gain(rope.real("mscale")) / gain(rope.real("mscale_all_dim"))
    return YarnScaling(
        factor=factor,
        original_context=trained,
        turns_kept=rope.real("beta_fast", 32.0),
        turns_divided=rope.real("beta_slow", 1.0),
        whole_steps=rope.flag("truncate", default=True),
        attention_factor=rope.real("attention_factor", attention),
    )
