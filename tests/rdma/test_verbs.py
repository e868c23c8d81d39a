"""The binding of libibverbs without a device: layouts, choice of GID, and why there is no card."""

import ctypes
import os

import pytest

from transfer_engine.errors import ConfigError
from transfer_engine.rdma import verbs

# sizeof and offsetof, as a C compiler gives them for infiniband/verbs.h of rdma-core.
SIZES = {
    verbs.QueuePairInit: 64,
    verbs.QueuePairAttributes: 144,
    verbs.AddressHandle: 32,
}
OFFSETS = {
    (verbs.QueuePairAttributes, "path_mtu"): 8,
    (verbs.QueuePairAttributes, "receive_psn"): 20,
    (verbs.QueuePairAttributes, "send_psn"): 24,
    (verbs.QueuePairAttributes, "peer_number"): 28,
    (verbs.QueuePairAttributes, "access"): 32,
    (verbs.QueuePairAttributes, "capacity"): 36,
    (verbs.QueuePairAttributes, "address"): 56,
    (verbs.QueuePairAttributes, "alternate"): 88,
    (verbs.QueuePairAttributes, "pkey_index"): 120,
    (verbs.QueuePairAttributes, "reads_out"): 126,
    (verbs.QueuePairAttributes, "reads_in"): 127,
    (verbs.QueuePairAttributes, "rnr_timer"): 128,
    (verbs.QueuePairAttributes, "port"): 129,
    (verbs.QueuePairAttributes, "timeout"): 130,
    (verbs.QueuePairAttributes, "retries"): 131,
    (verbs.QueuePairAttributes, "rnr_retries"): 132,
    (verbs.QueuePairAttributes, "rate_limit"): 136,
    (verbs.AddressHandle, "source_gid_index"): 20,
    (verbs.AddressHandle, "lid"): 24,
    (verbs.AddressHandle, "is_global"): 29,
    (verbs.AddressHandle, "port"): 30,
}


def test_layouts_are_those_of_the_library():
    assert {kind: ctypes.sizeof(kind) for kind in SIZES} == SIZES
    assert {(kind, name): getattr(kind, name).offset for kind, name in OFFSETS} == OFFSETS
    assert verbs.REQUEST_BYTES == 128
    assert verbs.COMPLETION.itemsize == 48


def port(tmp_path, gids):
    """Make a port's directory as /sys has it; an unused entry has no readable type."""
    (tmp_path / "gids").mkdir()
    (tmp_path / "gid_attrs" / "types").mkdir(parents=True)
    for index, (gid, kind) in enumerate(gids):
        (tmp_path / "gids" / str(index)).write_text(gid + "\n")
        if kind:
            (tmp_path / "gid_attrs" / "types" / str(index)).write_text(kind + "\n")
    return tmp_path


LINK = "fe80:0000:0000:0000:0200:00ff:fe00:0000"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a4d:0001"
IPV6 = "2001:0db8:0000:0000:0000:0000:0000:0001"
NONE = "0000:0000:0000:0000:0000:0000:0000:0000"


@pytest.mark.parametrize(
    ("gids", "chosen"),
    [
        ([(LINK, "IB/RoCE v1"), (LINK, "RoCE v2"), (IPV4, "IB/RoCE v1"), (IPV4, "RoCE v2")], 3),
        ([(LINK, "RoCE v2"), (IPV6, "RoCE v2"), (NONE, "")], 1),
        ([(LINK, "IB/RoCE v1"), (LINK, "RoCE v2")], 1),
        ([(LINK, "IB/RoCE v1"), (NONE, "")], 0),
        ([(NONE, ""), (IPV4, "RoCE v2"), (IPV6, "RoCE v2")], 1),
    ],
)
def test_the_most_routable_gid_is_chosen(tmp_path, gids, chosen):
    index, gid = verbs.choose_gid(port(tmp_path, gids))
    assert index == chosen
    assert gid == bytes.fromhex(gids[chosen][0].replace(":", ""))


def test_ten_gids_are_taken_in_the_order_of_their_numbers(tmp_path):
    gids = [(NONE, "")] * 9 + [(LINK, "RoCE v2"), (LINK, "RoCE v2")]
    assert verbs.choose_gid(port(tmp_path, gids))[0] == 9


def test_a_port_without_a_gid_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"no GID.*address"):
        verbs.choose_gid(port(tmp_path, [(NONE, "")]))


def test_gids_are_written_as_addresses():
    assert verbs.gid_text(bytes.fromhex(IPV4.replace(":", ""))) == "10.77.0.1"
    assert verbs.gid_text(bytes.fromhex(IPV6.replace(":", ""))) == "2001:db8::1"


@pytest.fixture
def looking(monkeypatch):
    """Look for cards anew."""
    opened = verbs._Opened()
    monkeypatch.setattr(verbs, "_opened", opened)


def test_a_host_without_a_device_says_so_in_one_sentence(looking, monkeypatch, tmp_path):
    for place in (tmp_path / "absent", tmp_path):
        monkeypatch.setattr(verbs, "SYSFS", place)
        assert verbs.unavailable() == "this host has no RDMA device"
        assert verbs.find_nics() == ()


def test_a_missing_library_is_named_with_its_package(looking, monkeypatch, tmp_path):
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(verbs, "SYSFS", tmp_path)
    monkeypatch.setattr(verbs, "LIBRARY", "libno-such-verbs.so.1")
    monkeypatch.setattr(verbs, "_library", verbs._library.__wrapped__)
    reason = verbs.unavailable()
    assert "libno-such-verbs.so.1" in reason
    assert "libibverbs1" in reason


def test_a_device_without_a_driver_is_not_an_error(looking, monkeypatch, tmp_path):
    """As in a container that sees /sys of its host and nothing else."""
    try:
        verbs._library()
    except OSError:
        pytest.skip("libibverbs is not installed")
    if os.path.isdir("/sys/class/infiniband") and os.listdir("/sys/class/infiniband"):
        pytest.skip("this host has RDMA devices")
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(verbs, "SYSFS", tmp_path)
    assert verbs.find_nics() == ()
    assert "RDMA device" in verbs.unavailable()
