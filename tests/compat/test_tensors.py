"""Tensors: whole, in buffers of the caller, and cut for parallelism."""

import ctypes
import sys
import types

import pytest

from mooncake_store.compat import tensor_format
from mooncake_store.compat.tensors import deserialize, serialize
from mooncake_store.compat.values import (
    ParallelAxis,
    ReadTarget,
    ReplicateConfig,
    TensorParallelism,
)

torch = pytest.importorskip("torch")

TYPES = ["float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool", "float16"]
TYPES += ["bfloat16", "float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64"]


def axis(kind, rank, size, **more):
    made = ParallelAxis(kind, rank, size)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def cut(*axes):
    return TensorParallelism(list(axes))


def numbers(*shape):
    count = 1
    for n in shape:
        count *= n
    return torch.arange(count, dtype=torch.float32).reshape(shape)


@pytest.mark.parametrize("name", TYPES)
def test_every_type_comes_back(store, name):
    dtype = getattr(torch, name)
    tensor = torch.arange(24).reshape(2, 3, 4).to(torch.float32).to(dtype)
    assert store.put_tensor("t", tensor) == 0
    found = store.get_tensor("t")
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_empty_and_scalar_tensors(store, shape):
    tensor = torch.ones(shape)
    assert store.put_tensor("t", tensor) == 0
    found = store.get_tensor("t")
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    assert torch.equal(found, tensor)


def test_batches_and_what_is_no_tensor(store):
    tensors = [numbers(3, 4), numbers(5).to(torch.int64)]
    assert store.batch_put_tensor(["a", "b"], tensors) == [0, 0]
    store.put("bytes", b"no tensor")
    found = store.batch_get_tensor(["b", "none", "a", "bytes"])
    assert torch.equal(found[0], tensors[1])
    assert torch.equal(found[2], tensors[0])
    assert (found[1], found[3]) == (None, None)
    assert store.put_tensor("number", 3) == -600
    assert store.batch_put_tensor(["a"], tensors) == [-600]
    transposed = numbers(3, 4).T
    assert store.upsert_tensor("a", transposed) == 0
    assert torch.equal(store.get_tensor("a"), transposed)
    assert store.batch_upsert_tensor(["a", "c"], tensors) == [0, 0]
    assert torch.equal(store.get_tensor("c"), tensors[1])


def test_a_store_without_a_local_buffer_takes_registered_tensors_only(make, buffer_of):
    store = make(local_buffer_size=0)
    assert store.put_tensor("t", numbers(4)) == -600
    memory = buffer_of(store, 4096)
    layout, _ = tensor_format.describe(numbers(4))
    packed = layout.pack() + numbers(4).numpy().tobytes()
    memory.write(packed)
    assert store.put_tensor_from("t", memory.ptr, len(packed)) == 0
    assert torch.equal(store.get_tensor("t"), numbers(4))


def test_publishing_wants_a_segment_for_each_replica(store):
    config = ReplicateConfig()
    assert store.pub_tensor("t", numbers(2), config) == 0
    config.preferred_segments = [store.get_hostname()]
    assert store.upsert_pub_tensor("t", numbers(3), config) == 0
    config.replica_num = 2
    assert store.pub_tensor("other", numbers(2), config) == -600
    assert store.batch_upsert_pub_tensor(["other"], [numbers(2)], config) == [-600]


def test_the_layout_is_the_originals(store, buffer):
    header, address, nbytes, owner = serialize(numbers(2, 3))
    assert (len(header), tensor_format.HEADER_BYTES) == (304, 304)
    assert header[:4] == b"NOOM"
    assert torch.equal(deserialize(header + ctypes.string_at(address, nbytes)), owner)
    assert deserialize(b"short") is None
    assert store.put_tensor("t", numbers(2, 3)) == 0
    assert store.get("t") == header + ctypes.string_at(address, nbytes)
    found = store.get_tensor_into("t", buffer.ptr, buffer.nbytes)
    assert torch.equal(found, owner)
    assert found.data_ptr() == buffer.ptr + 304
    assert store.put_tensor_from("copy", buffer.ptr, 304 + nbytes) == 0
    assert torch.equal(store.get_tensor("copy"), owner)
    assert store.put_tensor_from("wrong", buffer.ptr, 304 + nbytes + 1) == -600
    assert store.upsert_tensor_from("copy", buffer.ptr, 304 + nbytes) == 0
    assert store.put_tensor_from("stray", 1, 400) == -600
    assert store.get_tensor_into("none", buffer.ptr, buffer.nbytes) is None
    target = torch.zeros(2, 3)
    assert store.get_tensor_into_cuda("t", target) == nbytes
    assert torch.equal(target, owner)
    assert store.batch_get_tensor_into_cuda(["t", "t"], [target]) == [-600, -600]


@pytest.mark.parametrize("damage", [(0, b"X"), (8, b"\x63"), (12, b"\x09"), (32, b"\x01")])
def test_a_damaged_header_is_no_tensor(store, damage):
    at, data = damage
    raw = bytearray(304 + 24)
    header, address, nbytes, owner = serialize(numbers(2, 3))
    raw[:304], raw[304:] = header, ctypes.string_at(address, nbytes)
    assert torch.equal(deserialize(bytes(raw)), owner)
    raw[at : at + len(data)] = data
    assert deserialize(bytes(raw)) is None


def test_one_key_for_each_rank(store, buffer):
    tensor = numbers(4, 6)
    assert store.put_tensor_with_tp("w", tensor, 0, 3, 1) == 0
    assert store.is_exist("w") == 0
    for rank in range(3):
        part = tensor[:, 2 * rank : 2 * rank + 2]
        assert torch.equal(store.get_tensor(f"w_tp_{rank}"), part)
        assert torch.equal(store.get_tensor_with_tp("w", rank, 3, 1), part)
    assert store.get_tensor_with_tp("w", 3, 4) is None
    into = store.get_tensor_with_tp_into("w", buffer.ptr, buffer.nbytes, 1, 3, 1)
    assert torch.equal(into, tensor[:, 2:4])
    assert store.batch_put_tensor_with_tp(["x", "y"], [numbers(5), numbers(2)], 0, 2) == [0, 0]
    shards = store.batch_get_tensor_with_tp(["x", "none", "y"], 1, 2)
    assert torch.equal(shards[0], torch.tensor([3.0, 4.0]))
    assert shards[1] is None
    assert store.put_tensor_with_tp("one", tensor) == 0
    assert torch.equal(store.get_tensor_with_tp("one"), tensor)
    assert store.pub_tensor_with_tp("p", tensor, ReplicateConfig(), 0, 2, 0) == 0
    assert torch.equal(store.get_tensor_with_tp("p", 1, 2), tensor[2:])
    assert store.put_tensor_with_tp("bad", tensor, 0, 2, 7) == -600
    whole = store.get_tensor_into("one", buffer.ptr, buffer.nbytes)
    assert store.put_tensor_with_tp_from("f", buffer.ptr, 304 + whole.nbytes, 0, 2, 0) == 0
    assert torch.equal(store.get_tensor_with_tp("f", 0, 2), tensor[:2])


def test_shards_make_the_whole_and_other_cuts(store, buffer):
    tensor = numbers(8, 4)
    for rank in range(4):
        part = cut(axis("tp", rank, 4, split_dim=0))
        shard = tensor[2 * rank : 2 * rank + 2]
        assert store.put_tensor_with_parallelism("w", shard, part) == 0
    assert torch.equal(store.get_tensor_with_parallelism("w", ReadTarget("full", None)), tensor)
    same = ReadTarget("shard", cut(axis("tp", 2, 4, split_dim=0)))
    assert torch.equal(store.get_tensor_with_parallelism("w", same), tensor[4:6])
    coarser = ReadTarget("shard", cut(axis("tp", 1, 2, split_dim=0)))
    assert torch.equal(store.get_tensor_with_parallelism("w", coarser), tensor[4:])
    across = ReadTarget("shard", cut(axis("tp", 0, 2, split_dim=1)))
    assert torch.equal(store.get_tensor_with_parallelism("w", across), tensor[:, :2])
    stored = ReadTarget("as_stored", cut(axis("tp", 3, 4, split_dim=0)))
    found = store.batch_get_tensor_with_parallelism(["w", "none"], [stored, None])
    assert torch.equal(found[0], tensor[6:])
    assert found[1] is None
    into = store.get_tensor_with_parallelism_into("w", buffer.ptr, buffer.nbytes, coarser)
    assert torch.equal(into, tensor[4:])
    assert into.data_ptr() == buffer.ptr + 304
    store.remove("w_tp_2", True)
    assert store.get_tensor_with_parallelism("w", ReadTarget("full", None)) is None


def test_several_axes_take_the_whole_tensor(store):
    tensor = numbers(2, 6)
    for rank in range(2):
        axes = cut(axis("tp", rank, 2, split_dim=1), axis("pp", 1, 4, stage_id=1))
        assert store.put_tensor_with_parallelism("w", tensor, axes) == 0
    stage = axis("pp", 1, 4, stage_id=1)
    shard = ReadTarget("shard", cut(stage, axis("tp", 1, 2, split_dim=1)))
    assert torch.equal(store.get_tensor_with_parallelism("w", shard), tensor[:, 3:])
    whole = ReadTarget("full", cut(axis("tp", 0, 2, split_dim=1), stage))
    assert torch.equal(store.get_tensor_with_parallelism("w", whole), tensor)
    expert = cut(axis("ep", 0, 2, expert_id=5))
    assert store.put_tensor_with_parallelism("e", tensor, expert) == 0
    found = store.get_tensor_with_parallelism("e", ReadTarget("shard", expert))
    assert torch.equal(found, tensor)


def test_other_cuts_of_several_axes_are_made_from_the_stored_one(store, buffer):
    whole = numbers(4, 8)
    for rank in range(4):
        stored = cut(axis("dp", 0, 2), axis("tp", rank, 4, split_dim=1))
        assert store.put_tensor_with_parallelism("k", whole, stored) == 0
    for rank in range(2):
        wanted = cut(axis("dp", 0, 2), axis("tp", rank, 2, split_dim=1))
        found = store.get_tensor_with_parallelism("k", ReadTarget("shard", wanted))
        assert torch.equal(found, whole.chunk(2, 1)[rank])
    other = cut(axis("dp", 1, 2), axis("tp", 0, 2, split_dim=1))
    assert store.get_tensor_with_parallelism("k", ReadTarget("shard", other)) is None


def test_one_tensor_that_cannot_be_cut_does_not_spoil_its_batch(store):
    cuts = [cut(axis("dp", 0, 2), axis("tp", 0, size, split_dim=1)) for size in (2, 4)]
    tensors = [numbers(2, 4), numbers(2, 3)]
    assert store.batch_put_tensor_with_parallelism(["a", "b"], tensors, cuts) == [0, -600]
    found = store.get_tensor_with_parallelism("a", ReadTarget("shard", cuts[0]))
    assert torch.equal(found, tensors[0].chunk(2, 1)[0])


def test_one_tensor_without_room_does_not_keep_another_from_being_cut_anew(store):
    whole, large = numbers(2, 4), torch.zeros(2, 8 << 20)
    for rank in range(2):
        halves = cut(axis("dp", 0, 2), axis("tp", rank, 2, split_dim=1))
        found = store.batch_put_tensor_with_parallelism(["k", "l"], [whole, large], [halves] * 2)
        assert found == [0, -200]
    quarter = ReadTarget("shard", cut(axis("dp", 0, 2), axis("tp", 3, 4, split_dim=1)))
    assert torch.equal(store.get_tensor_with_parallelism("k", quarter), whole[:, 3:])


def test_a_writer_partition_cuts_the_whole_tensor(store):
    tensor = numbers(4, 2)
    writers = [(0, 2, 0), {"rank": 1, "size": 2, "split_dim": 0}]
    found = store.batch_put_tensor_with_parallelism(
        ["w", "w"], [tensor, tensor], writer_partitions=writers
    )
    assert found == [0, 0]
    assert torch.equal(store.get_tensor_with_parallelism("w", ReadTarget("full", None)), tensor)


@pytest.mark.parametrize(
    "axes",
    [
        [("tp", 0, 2)],  # no split_dim
        [("dp", 0, 2, {"split_dim": 0})],
        [("tp", 2, 2, {"split_dim": 0})],
        [("xx", 0, 2)],
        [("ep", 0, 2)],
        [("tp", 0, 2, {"split_dim": 0}), ("tp", 1, 2, {"split_dim": 0})],
    ],
)
def test_contradictory_axes_are_refused(store, buffer, axes):
    made = [axis(*each[:3], **(each[3] if len(each) > 3 else {})) for each in axes]
    assert store.put_tensor_with_parallelism("w", numbers(4, 4), cut(*made)) == -600
    target = ReadTarget("as_stored", cut(*made))
    assert store.batch_get_tensor_with_parallelism(["w"], [target]) == [None]
    assert store.get_tensor_with_parallelism_into("w", buffer.ptr, 4096, target) is None


def test_upserts_and_buffers_of_shards(store, buffer):
    tensor = numbers(4, 2)
    part = cut(axis("tp", 0, 1, split_dim=0))
    assert store.upsert_tensor_with_parallelism("w", tensor, part) == 0
    assert store.upsert_tensor_with_parallelism("w", tensor + 1, part) == 0
    read = store.get_tensor_with_parallelism_into(
        "w", buffer.ptr, buffer.nbytes, ReadTarget("as_stored", part)
    )
    assert torch.equal(read, tensor + 1)
    size = 304 + tensor.nbytes
    assert store.put_tensor_with_parallelism_from("v", buffer.ptr, size) == 0
    assert torch.equal(store.get_tensor("v"), tensor + 1)
    found = store.batch_upsert_tensor_with_parallelism_from(["v"], [buffer.ptr], [size], [part])
    assert found == [0]
    assert store.put_tensor_with_parallelism("x", tensor, part, None, (0, 1, 0)) == -600
    assert store.get_tensor_with_parallelism("w", ReadTarget("sideways", None)) is None
    assert store.get_tensor_with_parallelism("w", ReadTarget("shard", None)) is None


def test_safetensors_files(store, tmp_path, monkeypatch):
    """With a stand-in for the package, which need not be installed."""
    files = {}
    module = types.ModuleType("safetensors.torch")
    module.save_file = lambda tensors, name: files.update({name: tensors})
    module.load_file = lambda name: {"other": numbers(3)}
    monkeypatch.setitem(sys.modules, "safetensors", types.ModuleType("safetensors"))
    monkeypatch.setitem(sys.modules, "safetensors.torch", module)
    store.put_tensor("t", numbers(2))
    path = str(tmp_path / "file")
    assert store.save_tensor_to_safetensor("t", path) == 0
    assert torch.equal(files[path]["t"], numbers(2))
    assert store.save_tensor_to_safetensor("none") == -600
    assert store.load_tensor_from_safetensor("new", path) is None
    (tmp_path / "file").touch()
    assert torch.equal(store.load_tensor_from_safetensor("new", path), numbers(3))
    assert torch.equal(store.get_tensor("new"), numbers(3))
