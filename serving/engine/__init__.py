"""A compact Llama-family decoder with a paged KV cache, for laptops, tests and demonstrations."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.engine.config import ModelConfig
    from serving.engine.engine import Engine
    from serving.engine.loading import load_model
    from serving.engine.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Engine", "ModelConfig", "Tokenizer", "load_model", "load_tokenizer"]

_HOME = {
    "Engine": "serving.engine.engine",
    "ModelConfig": "serving.engine.config",
    "Tokenizer": "serving.engine.tokenizer",
    "load_model": "serving.engine.loading",
    "load_tokenizer": "serving.engine.tokenizer",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
