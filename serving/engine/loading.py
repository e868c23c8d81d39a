"""From a name to a model that computes: a directory with a checkpoint, or random weights.

What identifies the model is taken from its content (`connectors.fingerprint`), so that two
directories with the same weights share KV blocks and two models of one name do not.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from serving.connectors.fingerprint import fingerprint
from serving.engine.checkpoint import read_config
from serving.engine.config import ModelConfig, is_random
from serving.engine.tensors import check_tensors, find_tensors
from transfer_engine.errors import ConfigError

if TYPE_CHECKING:
    from serving.engine.decoder import Decoder

__all__ = ["LoadedModel", "check_model", "load_model", "model_revision"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder, and what distinguishes its weights from all others."""

    decoder: Decoder
    revision: str
    directory: str
    """Where the tokenizer lies; empty for random weights."""

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self.decoder.config


def check_model(model: str) -> None:
    """Raise ConfigError for a model that `load_model` could not load, without loading it.

    Cheap: a name, or the settings of a checkpoint and the headers of its files.
    """
    if is_random(model) or not Path(model).is_dir():
        ModelConfig.random(model)
        return
    check_tensors(read_config(Path(model)), find_tensors(Path(model)))
    if not (Path(model) / "tokenizer.json").is_file():
        raise ConfigError(
            f"{model} has no tokenizer.json", advice="convert the tokenizer, or copy it"
        )


def model_revision(model: str, config: ModelConfig) -> str:
    """What identifies the weights."""
    if is_random(model):
        return "random-" + hashlib.blake2b(repr(config).encode(), digest_size=12).hexdigest()
    return fingerprint(Path(model))


def load_model(
    model: str, *, dtype: str = "", device: str = "cpu", exact: bool | None = None
) -> LoadedModel:
    """Load a checkpoint directory, or make a random model ("tiny", "nano,layers=2").

    `exact` None chooses batch-independent arithmetic for float32 on a CPU; see `decoder.py`.
    Raises ConfigError for what cannot be loaded.
    """
    import torch

    from serving.engine.decoder import Decoder
    from serving.engine.weights import random_weights, read_weights

    where = torch.device(device)
    with torch.inference_mode():
        if is_random(model) or not Path(model).is_dir():
            config = ModelConfig.random(model)
            if dtype:
                config = replace(config, dtype=dtype)
            weights = random_weights(config, where)
            directory = ""
        else:
            config = read_config(Path(model), dtype)
            weights = read_weights(config, Path(model), where)
            directory = str(Path(model).absolute())
        chosen = where.type == "cpu" and config.dtype == "float32" if exact is None else exact
        decoder = Decoder(config, weights, exact=chosen)
    return LoadedModel(decoder, model_revision(model, config), directory)
