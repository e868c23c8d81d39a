"""Logits against the reference implementation, for each kind of checkpoint that is supported."""

import numpy as np
import pytest
import torch

from serving.engine.loading import load_model
from serving.engine.tokenizer import load_tokenizer
from tests.serving.engine.support import add, make_engine, prompts, run
from transfer_engine.errors import ConfigError

transformers = pytest.importorskip("transformers", reason="pip install transformers")

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, wide heads": ("Llama", {"head_dim": 32}),
    "llama, biased": ("Llama", {"attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
}


@pytest.fixture(params=KINDS, ids=str)
def checkpoint(request, tmp_path):
    """A saved random checkpoint and its reference model."""
    family, changes = KINDS[request.param]
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**(SHAPE | changes))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zero at first, which would hide that it is left out
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path, safe_serialization=True)
    return tmp_path, model


@pytest.mark.parametrize("exact", [True, False])
def test_logits_equal_those_of_the_reference(checkpoint, exact):
    """Prompt in chunks and tokens one by one: each step's logits are those of one whole pass."""
    directory, reference = checkpoint
    engine = make_engine(str(directory), exact=exact, chunk_tokens=32)
    seen = []
    logits = engine.decoder.logits
    engine.decoder.logits = lambda hidden: seen.append(logits(hidden)) or seen[-1]
    prompt = prompts(1, seed=5, shortest=75, longest=75)[0]
    notes = add(engine, prompt, count=6)
    run(engine)
    with torch.inference_mode():
        whole = reference(torch.tensor([prompt + notes.tokens])).logits[0]
    ours = torch.cat(seen)
    theirs = whole[len(prompt) - 1 : -1].float()
    assert len(ours) == 6
    np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=2e-4, atol=2e-5)
    assert notes.tokens == theirs.argmax(-1).tolist()


def test_sharded_checkpoint_and_its_tokenizer(tmp_path):
    """A checkpoint in several files, with a tokenizer of its own and a chat template."""
    import tokenizers

    config = transformers.LlamaConfig(**SHAPE)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert load_model(str(tmp_path)).config.vocabulary == 300

    words = {"<unk>": 0, "hello": 1, "</s>": 2, "world": 3, "user": 4, "assistant": 5}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    plain.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}assistant"
    )
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode("hello world") == [1, 3]
    assert tokenizer.eos == (2,)
    assert tokenizer.chat([{"role": "user", "content": "hello"}]) == [4, 1, 5]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"num_key_value_heads": 3}, "KV heads"),
        ({"dtype": "int8"}, "int8"),
        ({"hidden_size": None}, "wrong kind"),
        ({"use_sliding_window": True, "sliding_window": 64}, "sliding_window"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(tmp_path, change, words):
    import json

    given = SHAPE | {"model_type": "llama"} | change
    (tmp_path / "config.json").write_text(json.dumps(given))
    with pytest.raises(ConfigError, match=words):
        load_model(str(tmp_path))


def test_a_checkpoint_without_what_it_needs_is_refused(tmp_path):
    import json

    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"model_type": "llama"}))
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        load_model(str(tmp_path))
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**(SHAPE | {"hidden_size": 32}))
    ).save_pretrained(tmp_path / "small")
    (tmp_path / "small" / "config.json").write_text(json.dumps(SHAPE | {"model_type": "llama"}))
    with pytest.raises(ConfigError, match="shape"):
        load_model(str(tmp_path / "small"))
    with pytest.raises(ConfigError, match="no model 'tinny'"):
        make_engine("tinny")
