"""Each kind of checkpoint that is served, against the reference implementation.

Checkpoints are random, but spread widely enough that a rotation, a bias or a norm that is left out
changes the next layer by far more than the tolerance.
"""

import numpy as np
import pytest
import torch

from serving.engine.loading import load_model
from serving.engine.tokenizer import load_tokenizer
from serving.workers.protocol import Sampling
from tests.on_cuda import ON_CUDA
from tests.serving.engine.support import add, answer, make_engine, prompts, run

transformers = pytest.importorskip("transformers", reason="pip install transformers")

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "eos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
# So small a base that the line between its borders would go on behind the last dimension.
SMALL_YARN_ROPE = YARN_ROPE | {
    "rope_theta": 3.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "truncate": False,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "original_max_position_embeddings": 64,
}
QWEN3_MOE = {
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 24}
KINDS = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama, dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama, wide heads": ("Llama", {"head_dim": 32}),
    "llama, a KV head each": ("Llama", {"num_key_value_heads": 4}),
    "llama, biased": ("Llama", {"attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral, window": ("Mistral", {"sliding_window": 20}),
    "mistral, wide window": ("Mistral", {"sliding_window": 4096}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen2": ("Qwen2", {}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, yarn": ("Qwen2", {"rope_parameters": YARN_ROPE}),
    "qwen2, window": ("Qwen2", QWEN_WINDOW | {"max_window_layers": 0}),
    "qwen2, window of no layer": ("Qwen2", QWEN_WINDOW | {"max_window_layers": 3}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3, biased, tied": (
        "Qwen3",
        {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3, yarn": ("Qwen3", {"head_dim": 32, "rope_parameters": SMALL_YARN_ROPE}),
    "qwen3 moe": ("Qwen3Moe", QWEN3_MOE),
    "qwen3 moe, normalised": ("Qwen3Moe", QWEN3_MOE | {"norm_topk_prob": True}),
}


def make_checkpoint(directory, kind, **saving):
    """Save a random checkpoint of a kind; returns its reference model."""
    family, changes = KINDS[kind]
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**(SHAPE | changes))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        # Zeros and ones at first, which would hide that they are left out.
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
        elif "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(directory, safe_serialization=True, **saving)
    return model


@pytest.fixture(params=KINDS, ids=str)
def checkpoint(request, tmp_path):
    """A saved random checkpoint and its reference model."""
    return tmp_path, make_checkpoint(tmp_path, request.param)


def record(engine, prompt_tokens):
    """Lists that fill with hidden states behind each layer, and with logits, a row a token."""
    hidden = [[] for _ in range(engine.decoder.config.layers)]
    logits = []
    layer, head = engine.decoder.layer, engine.decoder.logits

    def recording_layer(number, *given):
        made = layer(number, *given)
        # Rows behind those of the prompt or of the one answer are padding.
        wanted = max(prompt_tokens - len(hidden[number]), 1)
        hidden[number].extend(made[:wanted])
        return made

    def recording_head(rows):
        logits.extend(head(rows))
        return torch.stack(logits[-len(rows) :])

    engine.decoder.layer, engine.decoder.logits = recording_layer, recording_head
    return hidden, logits


def reference_states(model, tokens):
    """Hidden states behind each layer, and logits, of one whole pass."""
    hidden = []
    hooks = [
        layer.register_forward_hook(
            lambda _module, _given, made: hidden.append(
                made[0] if isinstance(made, tuple) else made
            )
        )
        for layer in model.model.layers
    ]
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0]
    for hook in hooks:
        hook.remove()
    return [each.reshape(len(tokens), -1) for each in hidden], logits


@pytest.mark.parametrize("exact", [True, False])
def test_every_layer_equals_that_of_the_reference(checkpoint, exact):
    """Prompt in chunks and tokens one by one: hidden states are those of one whole pass."""
    directory, reference = checkpoint
    engine = make_engine(str(directory), exact=exact, chunk_tokens=32)
    prompt = prompts(1, seed=5, shortest=75, longest=75)[0]
    hidden, logits = record(engine, len(prompt))
    notes = add(engine, prompt, count=6)
    run(engine)
    theirs, their_logits = reference_states(reference, prompt + notes.tokens[:-1])
    assert len(hidden) == len(theirs) == 3
    for number, (ours, expected) in enumerate(zip(hidden, theirs, strict=True)):
        np.testing.assert_allclose(
            torch.stack(ours).numpy(), expected.numpy(), rtol=2e-4, atol=5e-5,
            err_msg=f"behind layer {number}",
        )  # fmt: skip
    expected = their_logits[len(prompt) - 1 :].numpy()
    np.testing.assert_allclose(torch.stack(logits).numpy(), expected, rtol=2e-4, atol=1e-4)


def test_answers_equal_those_of_the_reference(checkpoint):
    """Several at a time, in chunks, from blocks that are no neighbours: tokens are the same."""
    directory, reference = checkpoint
    given = prompts(4, seed=6, shortest=20, longest=110)
    engine = make_engine(str(directory), chunk_tokens=32)
    taken = engine.cache.acquire(64)
    engine.cache.release(taken[::2])
    notes = [add(engine, prompt, count=24) for prompt in given]
    run(engine)
    for prompt, note in zip(given, notes, strict=True):
        with torch.inference_mode():
            whole = reference.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=24, do_sample=False, pad_token_id=0,
            )[0].tolist()  # fmt: skip
        assert note.tokens == whole[len(prompt) :]


@pytest.mark.parametrize("kind", ["mixtral", "qwen3 moe", "mistral, window", "qwen3"])
def test_answers_do_not_depend_on_the_batch(tmp_path, kind):
    """Experts and windows keep what exact arithmetic promises, to the last bit."""
    make_checkpoint(tmp_path, kind)
    given = prompts(6, seed=7, longest=60)
    alone, together = make_engine(str(tmp_path)), make_engine(str(tmp_path), blocks=100)
    assert together.decoder.rows > 1
    seen = [record(engine, 10**6)[1] for engine in (alone, together)]
    expected = [answer(alone, prompt, count=6) for prompt in given]
    notes = [add(together, prompt, count=6) for prompt in given]
    run(together)
    assert [note.tokens for note in notes] == expected
    rows = [sorted(tuple(row.tolist()) for row in logits) for logits in seen]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("kind", ["llama 3", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_stored_types(tmp_path, kind, dtype):
    """What is stored in 16 bits is computed in them, or in float32 as exactly as the reference."""
    make_checkpoint(tmp_path, kind).to(getattr(torch, dtype)).save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).config.dtype == dtype
    prompt = prompts(1, seed=8, shortest=50, longest=50)[0]
    for chosen, tolerance in ((dtype, 0.05), ("float32", 2e-4)):
        reference = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=getattr(torch, chosen)
        )
        engine = make_engine(str(tmp_path), dtype=chosen)
        assert engine.decoder.dtype == getattr(torch, chosen)
        logits = record(engine, len(prompt))[1]
        answer(engine, prompt, count=1)
        expected = reference_states(reference, prompt)[1][-1].float()
        error = (logits[0] - expected).abs().max()
        assert error <= tolerance * expected.abs().max()


def test_yarn_reaches_the_length_it_stretches_to(tmp_path):
    """Also when max_position_embeddings was left as it is, as people are told to."""
    config = transformers.Qwen2Config(
        **(SHAPE | {"max_position_embeddings": 128, "rope_parameters": YARN_ROPE})
    )
    model = transformers.Qwen2ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    engine = make_engine(str(tmp_path))
    assert engine.decoder.config.context_max == 4 * 128
    prompt = prompts(1, seed=9, shortest=400, longest=400)[0]
    logits = record(engine, len(prompt))[1]
    answer(engine, prompt, count=1)
    expected = reference_states(model, prompt)[1][-1]
    np.testing.assert_allclose(logits[0].numpy(), expected.numpy(), rtol=2e-4, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_likelihoods_are_those_of_the_reference(checkpoint, temperature):
    """At temperature 1, whatever the one is at which tokens are drawn."""
    directory, reference = checkpoint
    engine = make_engine(str(directory), chunk_tokens=32)
    prompt = prompts(1, seed=8, shortest=50, longest=50)[0]
    sampling = Sampling(temperature, top_k=40, seed=2, likeliest=5)
    notes = add(engine, prompt, count=6, sampling=sampling)
    run(engine)
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + notes.tokens])).logits[0]
    theirs = torch.log_softmax(logits[len(prompt) - 1 : -1].double(), -1)
    for row, token, told in zip(theirs, notes.tokens, notes.likelihoods, strict=True):
        top = row.topk(5)
        assert told.chosen == pytest.approx(row[token].item(), abs=2e-4)
        assert told.tokens == tuple(top.indices.tolist())
        np.testing.assert_allclose(told.logprobs, top.values.numpy(), atol=2e-4)


def test_sharded_checkpoint_and_its_tokenizer(tmp_path):
    """A checkpoint in several files, with a tokenizer of its own and a chat template."""
    import tokenizers

    reference = make_checkpoint(tmp_path, "qwen3, biased, tied", max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    prompt = prompts(1, seed=5, shortest=40, longest=40)[0]
    engine = make_engine(str(tmp_path))
    logits = record(engine, len(prompt))[1]
    answer(engine, prompt, count=1)
    expected = reference_states(reference, prompt)[1][-1]
    np.testing.assert_allclose(logits[0].numpy(), expected.numpy(), rtol=2e-4, atol=1e-4)

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


def test_older_and_newer_settings_mean_the_same(tmp_path):
    """Rotation in one group or in two, and defaults that are written or not."""
    import json

    for kind in KINDS:
        make_checkpoint(tmp_path, kind)
        path = tmp_path / "config.json"
        given = json.loads(path.read_text())
        newer = load_model(str(tmp_path)).config
        rope = given.pop("rope_parameters")
        given["rope_theta"] = rope.pop("rope_theta")
        given["rope_scaling"] = None
        if rope["rope_type"] != "default":
            given["rope_scaling"] = rope | {"type": rope.pop("rope_type")}
        given["torch_dtype"] = given.pop("dtype")
        if "num_local_experts" in given and kind.startswith("qwen"):
            given["num_experts"] = given.pop("num_local_experts")
        for name in ("layer_types", "mlp_bias", "pad_token_id", "architectures"):
            given.pop(name, None)
        path.write_text(json.dumps(given))
        assert load_model(str(tmp_path)).config == newer


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_CUDA)])
def test_a_random_model_is_the_same_on_every_device(device):
    """Its name says nothing of where it runs, and keys of its KV are made of its name."""
    here, there = (load_model("nano", device=each).decoder.weights for each in ("cpu", device))
    assert torch.equal(here.head, there.head.cpu())
    for mine, theirs in zip(here.layers, there.layers, strict=True):
        assert torch.equal(mine.qkv, theirs.qkv.cpu())
        assert torch.equal(mine.experts[0].down, theirs.experts[0].down.cpu())
