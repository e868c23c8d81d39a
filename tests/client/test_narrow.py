"""Tensors kept as fp8: half the bytes, and an error that is what the documents say."""

import msgspec
import numpy as np
import pytest

from mooncake_store.client import narrow, tensors
from mooncake_store.errors import InvalidArgumentError

torch = pytest.importorskip("torch")


def object_of(tensor, **options):
    """The bytes of an object."""
    header, elements = tensors.describe_tensor(tensor, **options)
    return np.frombuffer(header + elements.view(torch.uint8).numpy().tobytes(), np.uint8)


def back(data):
    return tensors.decode_tensor(np.array(data))


def assert_near(found, given):
    """Within a sixteenth of itself, or of 1/458,752 of the largest of its group, and rounding."""
    assert (found.dtype, found.shape) == (given.dtype, given.shape)
    count = given.numel()
    one, other = (t.reshape(-1).double().numpy() for t in (given, found))
    padded = np.zeros(-(-count // 128) * 128)
    padded[:count] = np.abs(one)
    largest = np.repeat(padded.reshape(-1, 128).max(axis=1), 128)[:count]
    rounding = torch.finfo(given.dtype).eps * np.abs(one) + torch.finfo(given.dtype).tiny
    assert (np.abs(other - one) <= np.maximum(np.abs(one) / 16, largest / 458_752) + rounding).all()


@pytest.mark.parametrize("dtype", narrow.TYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (127,), (128,), (129,), (3, 5, 70), (2, 0, 4)])
def test_numbers_come_back_nearly_as_they_were(dtype, shape):
    generator = torch.Generator().manual_seed(1)
    given = (torch.randn(shape, generator=generator) * 3).to(getattr(torch, dtype))
    assert_near(back(object_of(given, fp8=True)), given)


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1, 1e4, 1e30])
def test_each_group_has_a_scale_of_its_own(scale):
    generator = torch.Generator().manual_seed(2)
    given = torch.randn(64, 128, generator=generator) * torch.logspace(-4, 4, 64)[:, None] * scale
    found = back(object_of(given, fp8=True))
    assert_near(found, given)
    nonzero = given.abs() > given.abs().amax(dim=1, keepdim=True) / 1000
    error = ((found - given) / given).abs()[nonzero]
    assert 0.01 < float(error.mean()) < 0.03


def test_what_is_exact_stays_so():
    given = torch.tensor([0.0, -0.0, 448.0, 1.0, -2.0, 0.5, 240.0])
    assert torch.equal(back(object_of(given, fp8=True)), given)
    assert not back(object_of(torch.zeros(500), fp8=True)).any()


def test_it_takes_half_the_bytes_of_bf16():
    given = torch.randn(16, 1024).to(torch.bfloat16)
    assert len(object_of(given, fp8=True)) < 0.52 * len(object_of(given))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_what_is_not_finite_is_refused(bad):
    with pytest.raises(InvalidArgumentError, match="without fp8"):
        object_of(torch.tensor([1.0, bad], dtype=torch.float64), fp8=True)


@pytest.mark.parametrize("dtype", ["int8", "bool", "complex64", "float8_e4m3fn"])
def test_other_types_are_refused(dtype):
    given = torch.zeros(8, dtype=torch.float32).to(getattr(torch, dtype))
    with pytest.raises(InvalidArgumentError, match="not kept as fp8"):
        object_of(given, fp8=True)


def test_tensors_that_are_not_narrow_are_written_as_ever():
    header, _ = tensors.describe_tensor(torch.zeros(3))
    text = header[8:].rstrip(b"\0")
    assert msgspec.msgpack.decode(text) == {
        "version": 1, "kind": "torch", "dtype": "float32", "shape": [3],
    }  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "int32"},
        {"shape": [1000]},
        {"shape": [129]},
        {"kept": "fp4"},
        {"version": 1},
        {"version": 3},
        {"kept": ""},
        {"kind": "numpy", "dtype": "<f4"},
    ],
)
def test_a_header_that_does_not_fit_is_refused(change):
    data = object_of(torch.zeros(128), fp8=True)
    length = int(data[4:8].view(np.uint32)[0])
    header = msgspec.msgpack.decode(data[8 : 8 + length].tobytes().rstrip(b"\0")) | change
    text = msgspec.msgpack.encode(header).ljust(length, b"\0")
    hostile = np.frombuffer(
        data[:4].tobytes() + len(text).to_bytes(4, "little") + text + data[8 + length :].tobytes(),
        np.uint8,
    )
    for decode in (tensors.decode_tensor, tensors.decode_array):
        with pytest.raises(InvalidArgumentError, match="no tensor"):
            decode(np.array(hostile))


def test_a_store_keeps_them(store):
    given = torch.randn(2, 300).to(torch.bfloat16)
    assert store.put_tensor("narrow", given, fp8=True).stored
    assert_near(store.get_tensor("narrow"), given)
    with pytest.raises(InvalidArgumentError):
        store.get_array("narrow")
