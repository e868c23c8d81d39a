"""Objects that stay open: writers, views, tensors and arrays."""

import msgspec
import numpy as np
import pytest

from mooncake_store import (
    AlreadyExistsError,
    HasLeaseError,
    InvalidArgumentError,
    LeaseExpiredError,
    NotFoundError,
)
from mooncake_store.client import tensors
from mooncake_store.units import MIB


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [0, 2, 1, 1]])
def test_ranges_in_any_order(url, connect, transport, order):
    store = connect(url, transports=[transport])
    value = np.random.default_rng(0).bytes(300)
    with store.writer("key", 300, replicas=2) as writer:
        assert not store.exists("key")
        for part in order:
            assert writer.write(100 * part, value[100 * part : 100 * part + 100]) == 100
    assert writer.result.stored
    assert writer.result.replicas == 2
    assert store.get("key") == value  # its checksum is right, too
    assert store.stat("key").checksum == store.query("key").checksum


def test_a_large_object_out_of_order(store):
    value = np.random.default_rng(0).bytes(17 * MIB)
    with store.writer("key", len(value)) as writer:
        writer.write(9 * MIB, memoryview(value)[9 * MIB :])
        writer.write(0, np.frombuffer(value, np.uint8)[: 9 * MIB])
    assert store.get("key") == value


def test_an_exception_gives_the_put_up(store):
    def fail():
        nonlocal writer
        with store.writer("key", 10) as writer:
            writer.write(0, b"12345")
            raise ZeroDivisionError

    writer = None
    with pytest.raises(ZeroDivisionError):
        fail()
    assert not store.exists("key")
    assert store.put("key", b"value").stored  # at once: its place is free again
    with pytest.raises(InvalidArgumentError, match="ended"):
        writer.write(5, b"12345")


def test_gaps_cannot_be_committed(store):
    writer = store.writer("key", 10)
    writer.write(0, b"123")
    writer.write(5, b"12345")
    with pytest.raises(InvalidArgumentError, match="byte 3 of 10 was never written"):
        writer.commit()
    with pytest.raises(InvalidArgumentError, match="outside"):
        writer.write(8, b"123")
    writer.write(2, b"345")
    assert writer.commit().stored
    assert store.get("key") == b"1234512345"
    writer.revoke()  # too late, and harmless
    assert store.exists("key")
    with pytest.raises(InvalidArgumentError, match="never written"), store.writer("gap", 2) as gap:
        gap.write(0, b"1")
    assert not store.exists("gap")
    with pytest.raises(InvalidArgumentError, match="at least 1 byte"):
        store.writer("empty", 0)


def test_writers_of_one_key(store, connect, url):
    other = connect(url)
    with store.writer("key", 3) as writer:
        with pytest.raises(AlreadyExistsError):
            other.writer("key", 3)
        assert other.put("key", b"abc").already_present
        with pytest.raises(InvalidArgumentError):
            other.writer("key", 3, colour="red")
        writer.write(0, b"123")
    assert other.get("key") == b"123"
    with other.writer("key", 2, upsert=True) as writer:
        writer.write(0, b"45")
        assert store.get("key") == b"123"
    assert other.get("key") == b"45"


def test_a_view_shows_shared_memory_under_a_lease(store, connect, url):
    store.put("key", b"value" * 100)
    other = connect(url)
    with store.view("key", ttl="5s") as view:
        assert view.zero_copy
        assert view.data.readonly
        assert view.data == b"value" * 100
        assert len(view) == 500
        assert 0 < view.remaining_s <= 5
        for client in (store, other):
            with pytest.raises(HasLeaseError):
                client.remove("key")
        view.renew()
        other.remove("key", force=True)
        with pytest.raises(LeaseExpiredError):
            view.renew()
        assert view.data == b"value" * 100  # the memory waits for the lease
    store.put("key", b"again")
    with store.view("key") as view:
        assert bytes(view.data) == b"again"
    store.remove("key")  # the view gave its lease back
    with pytest.raises(NotFoundError):
        store.view("key")


def test_a_view_of_what_was_read_before_asks_nobody(store, connect, url):
    store.put("key", b"value")
    assert store.get("key") == b"value"
    before = store.stats().requests
    with store.view("key") as view, store.view("key") as second:
        # The second one found no lease to take and asked for its own.
        assert (view.data, second.data) == (b"value", b"value")
        assert (view.zero_copy, second.zero_copy) == (True, True)
        assert store.stats().requests == before + 1
        # Neither this client nor another removes what is being shown.
        for client in (store, connect(url)):
            with pytest.raises(HasLeaseError):
                client.remove("key")
        connect(url).remove("key", force=True)
        assert view.data == b"value"  # its memory waits for the lease
    assert not store.exists("key")


def test_a_view_returns_the_lease_it_took(store):
    store.put("key", b"value")
    store.get("key")
    before = store.stats().requests
    for _ in range(3):
        with store.view("key") as view:
            assert view.data == b"value"
            assert 0 < view.remaining_s <= 10
    assert store.get("key") == b"value"
    assert store.stats().requests == before
    store.remove("key")  # what the gets were granted is given back: the view left it there


def test_a_view_over_the_network_is_a_copy(url, connect):
    store = connect(url, transports=["tcp"])
    store.put("key", b"value")
    with store.view("key") as view:
        assert not view.zero_copy
        assert view.data == b"value"
        assert view.data.readonly
    store.remove("key")


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype="<f4").reshape(2, 3, 4),
        np.arange(6, dtype=">i8").reshape(2, 3),
        np.array(3.5),
        np.zeros((0, 4), np.int8),
        np.ones(5, np.bool_),
        np.arange(4, dtype=np.complex128),
        np.arange(10)[::2],
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_come_back(store, array):
    assert store.put_array("key", array).stored
    found = store.get_array("key")
    assert found.shape == array.shape
    assert found.dtype == array.dtype.newbyteorder("<")
    assert (found == array).all()
    found += 1 if found.dtype != np.bool_ else False  # it is the caller's own memory
    assert store.put_array("key", array).already_present


def test_tensors_come_back(store):
    torch = pytest.importorskip("torch")
    for number, tensor in enumerate(
        [
            torch.randn(3, 5),
            torch.randn(4, 4).bfloat16().t(),
            torch.arange(7, dtype=torch.int16),
            torch.tensor(True),
            torch.empty(0, 2),
            torch.randn(2, dtype=torch.complex64).conj(),
            torch.randn(8).to(torch.float8_e4m3fn),
        ]
    ):
        assert store.put_tensor(f"key-{number}", tensor).stored
        found = store.get_tensor(f"key-{number}")
        assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
        assert torch.equal(found.float(), tensor.float()) if not tensor.is_complex() else True
        assert found.numel() == 0 or found.data_ptr() % 64 == 0
    with pytest.raises(InvalidArgumentError, match="get_tensor"):
        store.get_array("key-0")
    with pytest.raises(InvalidArgumentError):
        store.put_tensor("list", [1, 2])
    with pytest.raises(InvalidArgumentError):
        store.put_tensor("sparse", torch.eye(3).to_sparse())


def header(**fields):
    values = {"version": 1, "kind": "numpy", "dtype": "<f4", "shape": (2,)} | fields
    packed = msgspec.msgpack.encode(values)
    return b"MKTN" + len(packed).to_bytes(4, "little") + packed


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"MKTN",
        b"something else entirely",
        b"MKTN\xff\xff\xff\xff" + bytes(100),
        header(),  # the elements are missing
        header() + bytes(9),
        header(version=2) + bytes(8),
        header(dtype="O") + bytes(8),
        header(dtype="<O8") + bytes(8),
        header(dtype="<f999") + bytes(8),
        header(dtype="i4,f4") + bytes(8),
        header(shape=(1 << 62, 1 << 62)) + bytes(8),
        header(shape=(-1, -2)) + bytes(8),
        header(shape=(1,) * 65) + bytes(4),
        header(extra=1) + bytes(8),
        header(kind="torch", dtype="float32") + bytes(8),
        header(dtype="xyz").replace(b"xyz", b"\xff\xfe\xfd") + bytes(8),
    ],
)
def test_objects_that_are_no_arrays_are_refused(data):
    with pytest.raises(InvalidArgumentError, match="no tensor"):
        tensors.decode_array(np.frombuffer(data, np.uint8))


def test_arrays_of_objects_are_refused(store):
    for array in (np.array([object()]), np.array(["text"]), np.array(["2020"], "M8[D]")):
        with pytest.raises(InvalidArgumentError, match="only of numbers"):
            store.put_array("key", array)
