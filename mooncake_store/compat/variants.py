"""Calls made from other calls: for one key instead of many, or with an option settled.

The original spells out every combination of put, publish and upsert, for one key and for a batch.
Here each kind of call is written once, for a batch and with its options, and the others are made of
it. They show, to `help` and `inspect.signature`, the arguments that the original documents.

Cost: arguments are bound by name, a few microseconds a call; calls for which that counts are
written out.
"""

from __future__ import annotations

from functools import update_wrapper
from inspect import Parameter, Signature, signature
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["named", "settled", "single"]

T = TypeVar("T")


def settled(call: Callable[..., T], **options: Any) -> Callable[..., T]:
    """The call with these options given for good; it does not take them any more."""
    whole = signature(call)
    left = [each for name, each in whole.parameters.items() if name not in options]
    return _made(whole.replace(parameters=left), lambda **given: call(**given, **options), call)


def single(batch: Callable[..., list[Any]], names: str) -> Callable[..., Any]:
    """The call for one key: the answer of a batch of one.

    `names` are its arguments in the batch's order. One that the batch calls otherwise stands for a
    list of it there.
    """
    whole = signature(batch)
    this, *listed = whole.parameters.values()
    mine = dict(zip(names.split(), listed, strict=True))
    shown = [
        each if each.name == name else each.replace(name=name, annotation=Parameter.empty)
        for name, each in mine.items()
    ]

    def call(self: Any, **given: Any) -> Any:
        theirs = {
            mine[name].name: value if mine[name].name == name else [value]
            for name, value in given.items()
        }
        return batch(self, **theirs)[0]

    return _made(Signature([this, *shown]), call, batch)


def _made(shown: Signature, call: Callable[..., T], origin: Callable[..., Any]) -> Callable[..., T]:
    def made(*args: Any, **kwargs: Any) -> T:
        return call(**shown.bind(*args, **kwargs).arguments)

    update_wrapper(made, origin)
    made.__signature__ = shown  # type: ignore[attr-defined]
    return made


KindT = TypeVar("KindT", bound=type)


def named(kind: KindT) -> KindT:
    """Give the calls made in a class the names that they have there."""
    for name, value in vars(kind).items():
        if isinstance(value, FunctionType) and hasattr(value, "__wrapped__"):
            value.__name__, value.__qualname__ = name, f"{kind.__qualname__}.{name}"
    return kind
