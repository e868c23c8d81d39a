"""What keys tell apart, where blocks lie in memory, and what is refused at the start."""

import itertools
import json
import shutil
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mooncake_store import Pieces
from mooncake_store.errors import ConfigError
from serving.connectors.fingerprint import fingerprint
from serving.connectors.vllm.layout import read_layout
from serving.connectors.vllm.options import Options
from tests.on_cuda import ON_CUDA

torch = pytest.importorskip("torch")


def _weights(path, values):
    """A file in the format of safetensors."""
    header = json.dumps(
        {
            f"t{n}": {"dtype": "F32", "shape": [4], "data_offsets": [16 * n, 16 * n + 16]}
            for n in range(len(values))
        }
    ).encode()
    data = b"".join(struct.pack("4f", *([value] * 4)) for value in values)
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def _model(directory, values=(1.0, 2.0), layers=2):
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"layers": layers}))
    _weights(directory / "model.safetensors", values)
    return directory


def test_models_are_told_apart_by_content_not_by_path(tmp_path):
    one = fingerprint(_model(tmp_path / "a" / "tiny"))
    assert fingerprint(_model(tmp_path / "b" / "tiny")) == one
    assert fingerprint(_model(tmp_path / "c" / "tiny", (1.0, 3.0))) != one
    assert fingerprint(_model(tmp_path / "d" / "tiny", layers=3)) != one
    shutil.copytree(tmp_path / "a" / "tiny", tmp_path / "renamed")
    assert fingerprint(tmp_path / "renamed") == one


def test_weights_that_are_no_safetensors_are_sampled(tmp_path):
    for name, content in (("a", b"x" * 5000), ("b", b"x" * 2500 + b"y" * 2500)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.bin").write_bytes(content)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "model.safetensors").write_bytes(b"\xff" * 100)
    assert len({fingerprint(tmp_path / name) for name in "abc"}) == 3


def _spec(kind="FullAttentionSpec", **fields):
    return type(kind, (), {"block_size": 32, "sliding_window": None, **fields})()


def _configs(model, *specs, **changes):
    """What vLLM hands over, as far as the connector reads it."""
    facts = {
        "tensor": 1,
        "pipeline": 1,
        "context": 1,
        "heads": 8,
        "dtype": "bfloat16",
        "cache_dtype": "auto",
        "config": {"rope": 1},
        "eagle": False,
        "memory": "LBNHC",
        **changes,
    }
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model),
            revision=None,
            dtype=facts["dtype"],
            quantization=None,
            hf_config=SimpleNamespace(to_dict=lambda: {**facts["config"], "_name_or_path": model}),
            get_total_num_kv_heads=lambda: facts["heads"],
            seed=0,
        ),
        cache_config=SimpleNamespace(
            cache_dtype=facts["cache_dtype"], prefix_caching_hash_algo="sha256"
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=facts["tensor"],
            pipeline_parallel_size=facts["pipeline"],
            prefill_context_parallel_size=1,
            decode_context_parallel_size=facts["context"],
        ),
        load_config=SimpleNamespace(load_format="auto"),
        device_config=SimpleNamespace(device_type="cpu"),
        attention_config=SimpleNamespace(backend=None),
        speculative_config=SimpleNamespace(use_eagle=lambda: True) if facts["eagle"] else None,
    )
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs or (_spec(),)]
    kv_cache_config = SimpleNamespace(
        prefix_cacheable_group_ids=tuple(range(len(groups))),
        kv_cache_groups=groups,
        kv_cache_layout=facts["memory"],
    )
    return vllm_config, kv_cache_config


def _layout(model, *specs, options=None, **changes):
    return read_layout(*_configs(model, *specs, **changes), options or Options(), 32)


def test_keys_name_everything_that_matters(tmp_path):
    model = _model(tmp_path / "a" / "tiny")
    other = _model(tmp_path / "b" / "tiny", (5.0, 6.0))
    same = _model(tmp_path / "c" / "tiny")

    def key(*args, rank=(0, 0), **changes):
        layout = _layout(*args, **changes)
        return layout.part(layout.groups[0], *rank)

    assert key(model) == key(same)
    different = [
        key(model),
        key(other),
        key(model, dtype="float16"),
        key(model, cache_dtype="fp8"),
        key(model, config={"rope": 2}),
        key(model, memory="LBHNC"),
        key(model, _spec(block_size=64)),
        key(model, options=Options(salt="tenant")),
        key(model, options=Options(layers_per_object=4)),
        key(model, options=Options(model_id="x@1")),
        key(model, tensor=2),
        key(model, tensor=2, rank=(1, 0)),
        key(model, pipeline=2),
        key(model, pipeline=2, rank=(0, 1)),
    ]
    assert len(set(different)) == len(different)
    named = Options(model_id="x@1")
    assert key(model, options=named) == key(other, options=named)


def test_what_ranks_share_is_stored_once(tmp_path):
    model = _model(tmp_path / "tiny")
    latent = _layout(model, _spec("MLAAttentionSpec"), tensor=4)
    assert len(latent.parts(latent.groups[0])) == 1
    replicated = _layout(model, tensor=4, heads=2)
    group = replicated.groups[0]
    assert len(replicated.parts(group)) == 2
    assert replicated.part(group, 0, 0) == replicated.part(group, 1, 0)
    assert replicated.part(group, 1, 0) != replicated.part(group, 2, 0)
    split = _layout(model, tensor=4, pipeline=2)
    assert len(set(split.parts(split.groups[0]))) == 8


def test_groups_and_their_windows(tmp_path):
    layout = _layout(
        _model(tmp_path / "tiny"),
        _spec(block_size=64),
        _spec("SlidingWindowSpec", block_size=32, sliding_window=128),
    )
    assert [(g.block_tokens, g.hashes_per_block, g.window) for g in layout.groups] == [
        (64, 2, 0),
        (32, 1, 128),
    ]
    assert layout.step_tokens == 64
    chain = [bytes([n]) for n in range(4)]
    assert layout.block_hash(layout.groups[0], chain, 1) == chain[3]
    assert layout.groups[1].first_needed(256) == 129 // 32


@pytest.mark.parametrize(
    ("specs", "changes", "named"),
    [
        ((_spec("MambaSpec"),), {}, "MambaSpec"),
        ((_spec("CrossAttentionSpec"),), {}, "CrossAttentionSpec"),
        ((), {"context": 2}, "context parallelism"),
        ((), {"eagle": True}, "EAGLE"),
    ],
)
def test_what_would_be_restored_wrongly_is_refused(tmp_path, specs, changes, named):
    with pytest.raises(ConfigError, match=named):
        _layout(_model(tmp_path / "tiny"), *specs, **changes)


SHAPES = {
    "blocks first": lambda: torch.rand(6, 2, 4, 3),
    "heads apart": lambda: torch.rand(2, 6, 4, 3).transpose(0, 1),
    "rows with gaps": lambda: torch.rand(6, 4, 8)[:, :, :3],
    "kernel blocks": lambda: torch.rand(12, 4, 3),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("kind", "device"),
    [
        ("HostMemory", "cpu"),
        ("StagedMemory", "cpu"),
        pytest.param("StagedMemory", "cuda", marks=ON_CUDA),
    ],
)
def test_blocks_travel_byte_for_byte(shape, kind, device):
    from serving.connectors.vllm import memory
    from serving.connectors.vllm.memory import with_blocks_first

    source, target = ([SHAPES[shape]().to(device) for _ in range(2)] for _ in range(2))
    views = [[with_blocks_first(each, 6) for each in side] for side in (source, target)]
    give, take = (getattr(memory, kind)(side) for side in views)
    assert give.block_bytes == sum(view[0].numel() * 4 for view in views[0])
    before = [view.clone() for view in views[1]]
    taken, given = [4, 1, 3], [0, 5, 2]
    _copy(give.gathered(taken, None), take.buffers(given))
    take.scatter(given, [0, 2])
    for mine, theirs, old in zip(views[1], views[0], before, strict=True):
        assert torch.equal(mine[[0, 2]], theirs[[4, 3]])
        assert torch.equal(mine[[1, 3, 4]], old[[1, 3, 4]])


def _copy(source, target):
    """Move objects as the store would: the bytes of each in order."""
    import ctypes

    def ranges(buffers):
        if isinstance(buffers, Pieces):
            return [
                list(zip(buffers.addresses[a:b], buffers.lengths[a:b], strict=True))
                for a, b in itertools.pairwise(buffers.starts)
            ]
        rows = range(buffers.rows)
        return [[(buffers.address + row * buffers.stride, buffers.nbytes)] for row in rows]

    for one, other in zip(ranges(source), ranges(target), strict=True):
        data = b"".join(ctypes.string_at(int(at), int(size)) for at, size in one)
        for at, size in other:
            ctypes.memmove(int(at), data[:size], int(size))
            data = data[size:]
        assert not data


def test_memory_of_unknown_shape_is_refused():
    from serving.connectors.vllm.memory import with_blocks_first

    with pytest.raises(ConfigError, match="7 blocks"):
        with_blocks_first(torch.zeros(3, 5), 7)


def test_nothing_imports_numba_before_an_engine_runs():
    """vLLM's workers for CPUs stumble over llvmlite when it is there at their start."""
    code = (
        "import sys\n"
        "import serving.connectors.vllm.worker, serving.connectors.vllm.scheduler\n"
        "import serving.connectors.vllm.layout, serving.connectors.vllm.options\n"
        "import serving.connectors.link\n"
        "assert 'llvmlite' not in sys.modules and 'numba' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
