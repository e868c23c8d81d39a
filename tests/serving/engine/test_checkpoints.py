"""What of a checkpoint is read, and what is refused before anything is loaded, by its name."""

import json

import pytest
import safetensors.torch
import torch

from serving.engine.checkpoint import read_config
from serving.engine.loading import check_model, load_model
from tests.serving.engine.support import make_engine
from transfer_engine.errors import ConfigError

HIDDEN, HEADS, WIDE, WORDS = 16, 2, 24, 32
SETTINGS = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": WORDS,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
TENSORS = {
    "model.embed_tokens.weight": (WORDS, HIDDEN),
    "model.layers.0.input_layernorm.weight": (HIDDEN,),
    "model.layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "model.layers.0.self_attn.k_proj.weight": (HIDDEN, HIDDEN),
    "model.layers.0.self_attn.v_proj.weight": (HIDDEN, HIDDEN),
    "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "model.layers.0.mlp.gate_proj.weight": (WIDE, HIDDEN),
    "model.layers.0.mlp.up_proj.weight": (WIDE, HIDDEN),
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, WIDE),
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (WORDS, HIDDEN),
}
QUERY = "model.layers.0.self_attn.q_proj.weight"
INDEX = "model.safetensors.index.json"


def make(directory, *, tensors=None, **changes):
    """A checkpoint whose settings and tensors are those above but for these changes."""
    directory.mkdir(exist_ok=True)
    settings = {name: value for name, value in (SETTINGS | changes).items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(settings))
    (directory / "tokenizer.json").write_text("{}")
    made = {name: torch.ones(shape) for name, shape in TENSORS.items()} | (tensors or {})
    made = {name: tensor for name, tensor in made.items() if tensor is not None}
    safetensors.torch.save_file(made, directory / "model.safetensors")
    return directory


def split(directory):
    """Cut a checkpoint in two files with an index; returns what the index says."""
    whole = safetensors.torch.load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(whole)
    places = {}
    for number, part in enumerate((names[:5], names[5:]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        safetensors.torch.save_file({name: whole[name] for name in part}, directory / file)
        places |= dict.fromkeys(part, file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return places


def refusal(directory):
    """Why a checkpoint is refused: before it is loaded, and by loading."""
    with pytest.raises(ConfigError) as checked:
        check_model(str(directory))
    with pytest.raises(ConfigError) as loaded:
        load_model(str(directory))
    assert str(checked.value) == str(loaded.value)
    return str(checked.value)


def test_a_whole_checkpoint_is_taken(tmp_path):
    check_model(str(make(tmp_path)))
    whole = load_model(str(tmp_path))
    split(tmp_path)
    check_model(str(tmp_path))
    parts = load_model(str(tmp_path))
    assert whole.config == parts.config
    assert whole.decoder.weights.head.shape == (WORDS, HIDDEN)
    assert torch.equal(whole.decoder.weights.head, parts.decoder.weights.head)


def test_files_of_a_checkpoint_may_be_links(tmp_path):
    """As in the cache that checkpoints are downloaded to."""
    make(tmp_path / "blobs")
    split(tmp_path / "blobs")
    (tmp_path / "model").mkdir()
    for number, path in enumerate(list((tmp_path / "blobs").iterdir())):
        (tmp_path / "model" / path.name).symlink_to(path.rename(path.with_name(f"blob{number}")))
    check_model(str(tmp_path / "model"))
    assert load_model(str(tmp_path / "model")).config.layers == 1


def test_what_old_and_careless_files_have_besides_is_left_alone(tmp_path):
    """Frequencies that are computed anyway, and the head of a model that shares its embedding."""
    spare = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(HIDDEN // HEADS // 2)}
    load_model(str(make(tmp_path, tensors=spare)))
    load_model(str(make(tmp_path, tie_word_embeddings=True)))
    load_model(str(make(tmp_path, tie_word_embeddings=True, tensors={"lm_head.weight": None})))
    another = {"lm_head.weight": torch.zeros(WORDS, HIDDEN)}
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        load_model(str(make(tmp_path, tie_word_embeddings=True, tensors=another)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "type 'mamba'"),
        ({"model_type": "absent"}, "type ''"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantised weights (awq)"),
        ({"quantization_config": {}}, "quantised weights"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "type 'longrope'"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "type 'mrope'"),
        ({"rope_scaling": {"type": "yarn"}}, "lacks 'factor'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor in rope_scaling"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "'4'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "KV heads"),
        ({"num_key_value_heads": 0}, "kv_heads"),
        ({"num_attention_heads": 3}, "hidden_size 16"),
        ({"head_dim": 5}, "head_dim"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_size": "16"}, "hidden_size in config.json is of the wrong kind"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
        ({"model_type": "mistral", "architectures": None, "sliding_window": 0}, "sliding_window"),
        (
            {"model_type": "qwen2", "architectures": None, "use_sliding_window": True,
             "num_hidden_layers": 2, "max_window_layers": 1, "sliding_window": 8},
            "sliding_window 8",
        ),
        (
            {"model_type": "qwen3_moe", "architectures": None, "mlp_only_layers": [0],
             "num_experts": 4, "num_experts_per_tok": 2},
            "mlp_only_layers",
        ),
        (
            {"model_type": "mixtral", "architectures": None, "num_local_experts": 2,
             "num_experts_per_tok": 3},
            "num_experts_per_tok is 3",
        ),
    ],
)  # fmt: skip
def test_settings_that_are_not_served_are_refused_by_name(tmp_path, change, words):
    assert words in refusal(make(tmp_path, **change))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({QUERY: None}, f"no tensor {QUERY}"),
        ({"lm_head.weight": None}, "no tensor lm_head.weight"),
        ({QUERY: torch.ones(HIDDEN, 8)}, f"{QUERY} has the shape (16, 8), config.json says"),
        ({QUERY: torch.ones(HIDDEN, HIDDEN, dtype=torch.int8)}, f"{QUERY} in"),
        ({QUERY: torch.ones(HIDDEN, HIDDEN).to(torch.float8_e4m3fn)}, "F8_E4M3"),
        ({QUERY.replace("weight", "bias"): torch.ones(HIDDEN)}, "q_proj.bias"),
        ({QUERY.replace("weight", "weight_scale"): torch.ones(1)}, "q_proj.weight_scale"),
        ({QUERY.replace("q_proj", "q_norm"): torch.ones(8)}, "q_norm.weight"),
        ({QUERY.replace("layers.0", "layers.1"): torch.ones(HIDDEN, HIDDEN)}, "layers.1"),
    ],
)
def test_tensors_of_another_model_are_refused_by_name(tmp_path, tensors, words):
    assert words in refusal(make(tmp_path, tensors=tensors))


@pytest.mark.parametrize("left", [0, 5, 8, 400, -1])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_file_that_is_cut_off_is_refused(tmp_path, left, sharded):
    name = "model.safetensors"
    make(tmp_path)
    if sharded:
        name = split(tmp_path)["model.norm.weight"]
    path = tmp_path / name
    whole = path.read_bytes()
    path.write_bytes(whole[:left])
    assert str(path) in refusal(tmp_path)
    path.write_bytes(whole + b"more")
    assert str(path) in refusal(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"[]", b"{", b'{"x": 1}', b'{"x": {"dtype": "F32", "shape": [2]}}', b"\xff\xfe",
        b'{"x": {"dtype": "F32", "shape": "no", "data_offsets": [0, 8]}}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": 8}}',
    ],
)  # fmt: skip
def test_a_damaged_header_is_refused(tmp_path, header):
    path = make(tmp_path) / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert f"the header of {path} is damaged" in refusal(tmp_path)


def test_a_header_that_contradicts_itself_is_refused(tmp_path):
    """What only the reader of the format looks at is told in the same way."""
    path = make(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F16"', 1))
    with pytest.raises(ConfigError, match=f"{path} cannot be read"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/etc/model.safetensors", "a/b.safetensors", "model.bin",
     "..\\model.safetensors", 7, None],
)  # fmt: skip
def test_an_index_that_leads_elsewhere_is_refused(tmp_path, name):
    """What it names exists: that is not why it is refused."""
    directory = tmp_path / "model"
    places = split(make(directory))
    (directory / "a").mkdir()
    for path in (tmp_path / "model.safetensors", directory / "a" / "b.safetensors"):
        path.write_bytes((directory / places[QUERY]).read_bytes())
    (directory / INDEX).write_text(json.dumps({"weight_map": places | {QUERY: name}}))
    assert f"names the file {name!r}" in refusal(directory)


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path):
    places = split(make(tmp_path))
    index = tmp_path / INDEX
    (tmp_path / places[QUERY]).rename(tmp_path / "kept")
    assert f"names the file {places[QUERY]}, which is not there" in refusal(tmp_path)
    (tmp_path / "kept").rename(tmp_path / places[QUERY])
    other = next(file for file in places.values() if file != places[QUERY])
    index.write_text(json.dumps({"weight_map": places | {QUERY: other}}))
    assert f"says that {QUERY} is in {other}" in refusal(tmp_path)
    for text in ("{", "[]", "{}", '{"weight_map": 1}', '{"weight_map": {"x": ["y"]}}'):
        index.write_text(text)
        assert INDEX in refusal(tmp_path)


def test_a_checkpoint_without_what_it_needs_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        load_model(str(tmp_path))
    make(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "consolidated.safetensors")
    assert "no model.safetensors" in refusal(tmp_path)
    make(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        check_model(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    assert "holds no settings" in refusal(tmp_path)
    with pytest.raises(ConfigError, match="no model 'tinny'"):
        make_engine("tinny")


def test_tokens_that_end_an_answer(tmp_path):
    """Those of generation_config.json, where chat models have them all; else of config.json."""
    assert read_config(make(tmp_path)).eos == ()
    assert read_config(make(tmp_path, eos_token_id=2)).eos == (2,)
    assert read_config(make(tmp_path, eos_token_id=[2, 3])).eos == (2, 3)
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [4, 5]}))
    assert read_config(tmp_path).eos == (4, 5)
    generation.write_text(json.dumps({"temperature": 0.6}))
    assert read_config(tmp_path).eos == (2, 3)
    generation.write_text(json.dumps({"eos_token_id": "</s>"}))
    assert "generation_config.json" in refusal(tmp_path)


def test_a_window_that_nothing_outgrows_is_none(tmp_path):
    mistral = {"model_type": "mistral", "architectures": None}
    assert read_config(make(tmp_path, **mistral, sliding_window=None)).window is None
    assert read_config(make(tmp_path, **mistral, sliding_window=64)).window is None
    assert read_config(make(tmp_path, **mistral, sliding_window=63)).window == 63
    qwen = {"model_type": "qwen2", "architectures": None, "sliding_window": 8}
    assert read_config(make(tmp_path, **qwen)).window is None
