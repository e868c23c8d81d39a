"""What a peer sent and nobody can read is the project's error, wherever it is read."""

import pytest

from mooncake_store.coordination.calls import Call
from mooncake_store.coordination.directory import _address
from mooncake_store.coordination.election import Leader
from mooncake_store.errors import ConfigError, InvalidArgumentError, RemoteProtocolError
from mooncake_store.standby.member import _place_of
from mooncake_store.wire import cluster
from serving.front.engine_events import read_batch
from transfer_engine.base import SegmentDescriptor
from transfer_engine.notify import PeerService, decode_answer
from transfer_engine.rpc.address import Address
from transfer_engine.wire.faults import decode_error

DEEP = 100_000
MESSAGE_PACK = {
    "nothing": b"",
    "nested lists": b"\x91" * DEEP,
    "nested maps": b"\x81\xa1a" * DEEP,
    "no UTF-8": b"\xa2\xff\xff",
    "no UTF-8 in a list": b"\x92\xa5found\xa2\xff\xff",
    "no UTF-8 in fields": b"\x99\xa5error" + b"\xa2\xff\xff" * 8,
    "a length without an end": b"\xdd\xff\xff\xff\xff",
    "a map as a name": b"\x81\x80\x01",
}
TEXT = {
    "nothing": b"",
    "nested lists": b"[" * DEEP,
    "nested fields": b'{"address":' * DEEP,
    "nested in what is not read": b'{"x":' + b"[" * DEEP,
    "no UTF-8": b'"\xff\xff"',
    "no UTF-8 in a field": b'{"address":"\xff","number":1,"error":"\xff","message":"\xff"}',
    "another thing": b"[]",
}
ETCD = Call(Address("127.0.0.1", 1), "look up", "kv/range", {})
WATCH = Call(Address("127.0.0.1", 1), "watch", "watch", {})


@pytest.mark.parametrize("body", MESSAGE_PACK.values(), ids=MESSAGE_PACK)
@pytest.mark.parametrize(
    ("read", "error"),
    [
        (SegmentDescriptor.decode, InvalidArgumentError),
        (lambda body: decode_answer(body, "peer"), RemoteProtocolError),
        (lambda body: PeerService(None, 1, "host").answer(body, "peer"), RemoteProtocolError),
        (cluster.MOUNT.request.unpack, RemoteProtocolError),
        (decode_error, RemoteProtocolError),
        (lambda body: read_batch([b"", bytes(8), body or b"\x90"]), RemoteProtocolError),
    ],
    ids=["descriptor", "answer", "question", "request", "error", "events"],
)
def test_message_pack_of_a_peer_that_is_none(read, error, body):
    with pytest.raises(error):
        read(body)


@pytest.mark.parametrize("body", TEXT.values(), ids=TEXT)
@pytest.mark.parametrize(
    ("read", "error"),
    [
        (ETCD.decoded, RemoteProtocolError),
        (WATCH.decoded, RemoteProtocolError),
        (lambda body: _place_of(Leader(body, 1)), ConfigError),
    ],
    ids=["answer", "stream", "leader"],
)
def test_json_of_an_etcd_that_is_none(read, error, body):
    with pytest.raises(error):
        read(body)


@pytest.mark.parametrize("body", TEXT.values(), ids=TEXT)
def test_json_of_an_etcd_is_as_good_as_nothing_where_it_is_one_of_many(body):
    assert _address(body) is None
    assert isinstance(ETCD.refusal(b"HTTP/1.1 500\r\n", body), RemoteProtocolError)


@pytest.mark.parametrize("answer", [b"\r\n\r\n", b"\r\n\r\n{}", b"\n", b"HTTP/1.1", b"\xff"])
def test_an_answer_without_a_head_is_none_of_an_etcd(answer):
    with pytest.raises(RemoteProtocolError):
        ETCD.answer(answer)
