"""What cards are told of each other: what is accepted, what is refused, and in which words."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_engine.errors import RemoteProtocolError, UnavailableError
from transfer_engine.rdma import verbs
from transfer_engine.rdma.wire import (
    CONNECT,
    OPEN,
    Ask,
    Grant,
    Offer,
    agree,
    check_answer,
    check_grant,
    draw_base,
)

OFFER = Offer(
    instance=bytes(16), nic="mlx5_1", rail=1, link_layer=verbs.ETHERNET, mtu=4, reads=16,
    gid=bytes(range(16)), lid=0, number=0xABCDEF, psn=0xFFFFFF,
)  # fmt: skip
GRANT = Grant(bytes(16), 0x123456789, 4096, 0xFFFFFFFF, True)
PEER = "10.0.0.2:4242 (from 10.0.0.1:5151)"


def changed(value, **fields):
    return msgspec.structs.replace(value, **fields)


def test_messages_come_back_as_they_were():
    assert CONNECT.request.unpack(CONNECT.request.pack(OFFER)) == OFFER
    assert OPEN.request.unpack(OPEN.request.pack(Ask(bytes(16), True))) == Ask(bytes(16), True)
    assert OPEN.reply.unpack(OPEN.reply.pack(GRANT)) == GRANT


@pytest.mark.parametrize(
    "fields",
    [
        {"mtu": 0}, {"mtu": 6}, {"reads": 0}, {"reads": 256}, {"gid": bytes(15)},
        {"number": 1 << 24}, {"psn": -1}, {"lid": 1 << 16}, {"nic": "x" * 65},
        {"instance": b""}, {"link_layer": 3}, {"rail": 256},
    ],
    ids=str,
)  # fmt: skip
def test_an_offer_no_card_can_make_is_refused(fields):
    body = msgspec.msgpack.encode(changed(OFFER, **fields))
    with pytest.raises(RemoteProtocolError, match="Offer"):
        CONNECT.request.unpack(body)


@pytest.mark.parametrize(
    "fields",
    [{"base": -1}, {"base": 1 << 62}, {"size": 0}, {"size": 1 << 61}, {"key": 1 << 32}],
    ids=str,
)
def test_a_grant_out_of_bounds_is_refused(fields):
    with pytest.raises(RemoteProtocolError, match="Grant"):
        OPEN.reply.unpack(msgspec.msgpack.encode(changed(GRANT, **fields)))


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error(body):
    for layout in (CONNECT.request, OPEN.request, OPEN.reply):
        with pytest.raises(RemoteProtocolError):
            layout.unpack(body)


def test_the_smaller_mtu_and_the_fewer_reads_are_agreed_on():
    assert agree(OFFER, changed(OFFER, mtu=3, reads=99), PEER) == (3, 16)
    assert agree(OFFER, changed(OFFER, mtu=5, reads=1), PEER) == (4, 1)


def test_cards_of_different_networks_are_told_so():
    other = changed(OFFER, nic="mlx5_7", link_layer=verbs.INFINIBAND)
    with pytest.raises(UnavailableError) as caught:
        agree(OFFER, other, PEER)
    for part in ("mlx5_1 (Ethernet, mtu 2048)", "mlx5_7 (InfiniBand, mtu 2048)", PEER):
        assert part in str(caught.value)


@pytest.mark.parametrize("fields", [{"mtu": 5}, {"reads": 17}], ids=str)
def test_an_answer_beyond_the_offer_names_both_ends(fields):
    check_answer(OFFER, changed(OFFER, mtu=3, reads=2), PEER)
    with pytest.raises(RemoteProtocolError, match="MTU mismatch") as caught:
        check_answer(OFFER, changed(OFFER, nic="mlx5_7", **fields), PEER)
    for part in ("mlx5_1", "mlx5_7", PEER):
        assert part in str(caught.value)


@pytest.mark.parametrize("fields", [{"uuid": b"x" * 16}, {"size": 4097}], ids=str)
def test_a_grant_for_something_else_is_refused(fields):
    check_grant(GRANT, bytes(16), 4096, PEER)
    with pytest.raises(RemoteProtocolError, match=r"was asked for.*grants"):
        check_grant(changed(GRANT, **fields), bytes(16), 4096, PEER)


def test_segments_begin_at_a_random_place_that_is_no_address():
    address = 0x7F12_3456_7042
    bases = {draw_base(address) for _ in range(100)}
    assert len(bases) == 100
    assert all(base % (2 << 20) == address % (2 << 20) for base in bases)
    assert all(0 <= base < 1 << 62 for base in bases)
    for base in bases:  # and is one that a grant may carry
        OPEN.reply.unpack(OPEN.reply.pack(changed(GRANT, base=base)))
