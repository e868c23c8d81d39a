"""A checkpoint of random weights whose tokenizer is a real one, so that it can write any text."""

import json

import pytest

TEXTS = [
    'The quick brown fox says {"name": "value", "list": [1, 2, 3], "flag": true} and jumps. ' * 3,
    "It is a truth universally acknowledged, that a single man must be in want of a wife. ",
    "Größe, naïve, façade, €5 and 😀 are texts with longer characters. ",
]


def byte_level(path, size=320, specials=("<s>", "</s>")):
    """Train and save a tokenizer as GPT-2, Llama 3 and Qwen have it."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, show_progress=False, special_tokens=list(specials),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(TEXTS, trainer)
    made.save(str(path / "tokenizer.json"))
    return made


def checkpoint(path, template=""):
    """Write a checkpoint to a directory; return it."""
    transformers = pytest.importorskip("transformers")
    import torch

    made = byte_level(path)
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=made.get_vocab_size() + 6, hidden_size=64, intermediate_size=112,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=2048, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    settings = {"eos_token": "</s>"} | ({"chat_template": template} if template else {})
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path
