"""Makes a hardware file of measurements: of what a front learnt, or of single samples.

    hardware = fit_hardware("stats.json")                    # `/stats` of a front
    hardware = fit_hardware("samples.jsonl", kv_bytes=131072, ...)
    write_hardware("mine.toml", hardware)

A sample is a line of JSON: a prompt that was computed (`tokens`, `cached`, `seconds`, without
waiting and loading) or a step that gave each of a batch a token (`batch`, `tokens` of context
together, `seconds`). They are fitted by the models that the conductor learns with, all counting
alike. What measurements do not tell is given, and what is given counts more than what they tell.

Whether they are plausible is not asked, only whether a machine can be so. O(samples).
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from mooncake_store.errors import InvalidArgumentError
from serving.scheduling.index import POOL
from serving.scheduling.learnt import LearntDecode, LearntPrefill
from serving.simulator.hardware import Hardware

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

__all__ = ["GIVEN", "fit_hardware", "write_hardware"]

MEASURED_MIN = 8
"""Before, what a front learnt is mostly what it assumed."""
DIFFERENT_MIN = 3
"""As many coefficients have a prompt and a step."""
GIVEN = {
    "kv_bytes": ("the bytes of a token's KV", "--kv-bytes"),
    "network_bytes_per_s": ("the rate of the network", "--network"),
    "load_bytes_per_s": ("the rate at which KV is loaded from memory", "--load"),
    "kv_tokens": ("the room for KV of what decodes", "--kv-tokens"),
    "layers": ("the number of layers", "--layers"),
}
"""What may be given, with what it is and the option for it."""


class _Prompt(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt that was computed."""

    tokens: Annotated[int, msgspec.Meta(ge=1)]
    seconds: Annotated[float, msgspec.Meta(gt=0)]
    cached: Annotated[int, msgspec.Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        if self.cached > self.tokens:
            raise ValueError(f"cached is {self.cached}, of {self.tokens} tokens")


class _Step(msgspec.Struct, forbid_unknown_fields=True):
    """A step of decoding."""

    batch: Annotated[int, msgspec.Meta(ge=1)]
    tokens: Annotated[int, msgspec.Meta(ge=0)]
    seconds: Annotated[float, msgspec.Meta(gt=0)]


class _Three(msgspec.Struct):
    """What a front learnt with three coefficients."""

    coefficients: tuple[float, float, float]
    measured: int


class _Four(msgspec.Struct):
    coefficients: tuple[float, float, float, float]
    measured: int


class _Two(msgspec.Struct):
    coefficients: tuple[float, float]
    measured: int


class _Costs(msgspec.Struct):
    kv_bytes: int
    prefill: _Three
    load: _Two
    decode: _Four
    transfer: dict[str, _Two]


class _Machine(msgspec.Struct):
    layers: int
    kv_tokens: int


class _Stats(msgspec.Struct):
    costs: _Costs
    machine: _Machine
    model: str = ""


def fit_hardware(path: str | PathLike[str], **given: float) -> Hardware:
    """The kind of machine that was measured. `given` has any of `GIVEN`, by name.

    Raises:
        InvalidArgumentError: the file cannot be read or used, lacks something that is not given
            either, or tells of a machine that cannot be.
    """
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot read the measurements {path}: {error.strerror}",
            advice="name the JSON of a front's /stats, or a file of JSON lines",
        ) from error
    stats = _stats_in(text, path)
    told = _of_front(stats, path) if stats else _of_samples(text, path)
    told |= given
    for name, (what, option) in GIVEN.items():
        if name not in told:
            raise InvalidArgumentError(f"{path} does not tell {what}", advice=f"say {option}")
    if told["prefill"][1] <= 0:
        raise InvalidArgumentError(
            f"{path} does not tell what a token of a prompt takes",
            advice="measure prompts of more different lengths",
        )
    try:
        return Hardware(**told)
    except ValueError as error:
        raise InvalidArgumentError(f"{path} tells of no machine: {error}") from None


def _stats_in(text: bytes, path: str | PathLike[str]) -> _Stats | None:
    """What a front told, if it is that and not lines of samples."""
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None
    if not isinstance(found, dict) or "seconds" in found:
        return None
    try:
        return msgspec.convert(found, _Stats)
    except msgspec.ValidationError as error:
        raise InvalidArgumentError(
            f"{path} is not what a front learnt: {error}",
            advice="take /stats of `mooncake serve`, or lines of samples",
        ) from None


def _of_front(stats: _Stats, path: str | PathLike[str]) -> dict[str, Any]:
    costs = stats.costs
    for learnt, what in ((costs.prefill, "prompts"), (costs.decode, "steps of decoding")):
        if learnt.measured < MEASURED_MIN:
            raise InvalidArgumentError(
                f"{path} has {learnt.measured} measured {what}, too few to go by",
                advice=f"ask for /stats again once there are {MEASURED_MIN}",
            )
    fixed_s, sequence_s, token_s, _ = costs.decode.coefficients
    workers = [each for source, each in costs.transfer.items() if source != POOL]
    told: dict[str, Any] = {
        "about": f"Learnt by a front that served {stats.model or 'a model'}: from "
        f"{costs.prefill.measured} prompts and {costs.decode.measured} steps.",
        "kv_bytes": costs.kv_bytes,
        "prefill": costs.prefill.coefficients,
        "step": (fixed_s + sequence_s, sequence_s, token_s),
        "network_bytes_per_s": _rate(workers) or _rate([*costs.transfer.values()]),
        "load_bytes_per_s": _rate([costs.load]),
        "kv_tokens": stats.machine.kv_tokens,
        "layers": stats.machine.layers,
    }
    return {name: value for name, value in told.items() if value}


def _rate(learnt: Sequence[_Two]) -> float:
    """Bytes a second, of the middle one of what was measured; 0 where nothing tells."""
    seconds = [
        each.coefficients[1] for each in learnt if each.measured and each.coefficients[1] > 0
    ]
    return 1 / statistics.median(seconds) if seconds else 0.0


def _of_samples(text: bytes, path: str | PathLike[str]) -> dict[str, Any]:
    samples = [
        _sample(line, f"{path}, line {number}")
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip()
    ]
    prompts = [each for each in samples if isinstance(each, _Prompt)]
    steps = [each for each in samples if isinstance(each, _Step)]
    _check_different({(each.tokens, each.cached) for each in prompts}, "prompts", path)
    _check_different({(each.batch, each.tokens) for each in steps}, "steps of decoding", path)
    prefill, decode = LearntPrefill(kept=1.0), LearntDecode(kept=1.0)
    for prompt in prompts:
        prefill.observe(prompt.tokens, prompt.cached, prompt.seconds)
    for step in steps:
        decode.observe(step.batch, step.tokens, step.seconds)
    off = [
        statistics.mean(abs(predicted / measured - 1) for predicted, measured in pairs)
        for pairs in (
            [(prefill.predict(each.tokens, each.cached), each.seconds) for each in prompts],
            [(decode.predict(each.batch, each.tokens), each.seconds) for each in steps],
        )
    ]
    fixed_s, sequence_s, token_s, _ = decode.learnt.coefficients
    return {
        "about": f"Fitted to {len(prompts)} prompts, from which it is {off[0]:.1%} off on average, "
        f"and {len(steps)} steps, from which it is {off[1]:.1%} off.",
        "prefill": prefill.coefficients,
        "step": (fixed_s + sequence_s, sequence_s, token_s),
    }


def _sample(line: bytes, where: str) -> _Prompt | _Step:
    try:
        found = msgspec.json.decode(line)
        if not isinstance(found, dict):
            raise ValueError("not an object")
        if "batch" in found:
            return msgspec.convert(found, _Step)
        return msgspec.convert(found, _Prompt)
    # msgspec's errors are ValueErrors; invalid UTF-8 is one as well.
    except ValueError as error:
        raise InvalidArgumentError(
            f"{where}: no measurement: {error}",
            advice="a line has tokens, cached and seconds, or batch, tokens and seconds",
        ) from None


def _check_different(found: set[tuple[int, int]], what: str, path: str | PathLike[str]) -> None:
    if len(found) < DIFFERENT_MIN:
        raise InvalidArgumentError(
            f"{path} has {len(found)} different {what}, too few to tell what they take by",
            advice=f"measure at least {DIFFERENT_MIN}, better some dozens, of many sizes",
        )


def write_hardware(path: str | PathLike[str], hardware: Hardware) -> None:
    """Write a file that `read_hardware` reads. Raises InvalidArgumentError if it cannot be."""
    lines = []
    for name, value in msgspec.structs.asdict(hardware).items():
        shown = list(value) if isinstance(value, tuple) else value
        # Strings, numbers and lists of numbers are written in TOML as they are in JSON.
        lines.append(f"{name} = {json.dumps(shown, ensure_ascii=False)}\n")
    try:
        Path(path).write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"cannot write {path}: {error.strerror}") from error
