"""Faults on fake cards: what fails is repeated, or goes another way, or is told."""

import contextlib
import logging
import threading
import time

import numpy as np
import pytest

from tests.transfer.rights import KEY, POOL, Ring, known_as
from tests.waiting import long_before, until
from transfer_engine import Operation, Segment, TransferEngine, TransferServer
from transfer_engine.base import CANCELLED, REFUSED, TIMED_OUT, UNKNOWN_SEGMENT, BatchRequest
from transfer_engine.errors import (
    AuthError,
    NotFoundError,
    PeerLostError,
    RemoteProtocolError,
    TransferError,
    TransferTimeoutError,
    UnavailableError,
)
from transfer_engine.rdma import verbs
from transfer_engine.rdma.endpoint import Endpoint
from transfer_engine.rdma.wire import CONNECT, OPEN, RDMA, Ask, Offer
from transfer_engine.testing import content
from transfer_engine.transports.dialing import dial
from transfer_engine.wire.faults import decode_error
from transfer_engine.wire.frame import ERROR, VERSIONS, FrameDecoder, encode_frame

SIZE = 8 << 20


class Setting:
    """A served segment of known content, opened over rdma, and registered memory."""

    def __init__(self, server, engine):
        self.server, self.engine = server, engine
        self.segment = Segment.create(SIZE)
        np.frombuffer(self.segment.buffer, np.uint8)[:] = content(3, SIZE)
        self.descriptor = server.publish(self.segment)
        self.memory = np.zeros(SIZE, np.uint8)
        self.region = engine.register(self.memory)
        self.target = engine.open(self.descriptor, require="rdma")
        self.transport = next(one for one in engine._transports if one.name == "rdma")

    def read(self, size=SIZE, **options):
        """Read from the start; return whether what came is right."""
        self.memory[:] = 0
        here = [self.region.address]
        self.engine.read_batch(self.target, [0], [size], here, **options).check()
        return np.array_equal(self.memory[:size], content(3, SIZE)[:size])

    def remote(self):
        """The segment as the transport sees it, over the first card."""
        return self.transport.open(self.descriptor, time.monotonic() + 5)

    def endpoints(self):
        return self.transport._pool.items()


@pytest.fixture
def setting(fake_nics, engine):
    with TransferServer() as server:
        made = Setting(server, engine)
        yield made
        made.segment.close()


def test_a_batch_is_few_chains_of_merged_requests(fake_nics, setting):
    before = [nic.chains for nic in fake_nics]
    offsets = np.arange(1000) * 64
    done = setting.engine.read_batch(
        setting.target, offsets, np.full(1000, 64), setting.region.address + offsets
    )
    assert done.ok
    assert sum(nic.requests for nic in fake_nics) == 1  # they are neighbours
    offsets = np.arange(1000) * 128
    setting.engine.read_batch(
        setting.target, offsets, np.full(1000, 64), setting.region.address + offsets
    ).check()
    assert sum(nic.requests for nic in fake_nics) == 1001
    # 32 rows a chain: half of the fake card's 64.
    assert sum(nic.chains for nic in fake_nics) - sum(before) == 1 + -(-1000 // 32)


def test_cards_that_cannot_reach_each_other_are_found_out_at_open(fake_nics, engine):
    for nic in fake_nics:
        nic.down = True
    with TransferServer() as server, Segment.create(4096) as segment:
        descriptor = server.publish(segment)
        with pytest.raises(PeerLostError, match=r"does not answer \(status 12\)"):
            engine.open(descriptor, require="rdma")
        with TransferEngine(transports=("rdma", "tcp")) as other:
            assert other.open(descriptor).transport == "tcp"
        for nic in fake_nics:
            nic.down, nic.silent = False, True
        with pytest.raises(TransferTimeoutError):
            engine.open(descriptor, require="rdma", timeout_s=0.2)


def test_a_large_batch_uses_every_card_and_a_small_one_uses_one(fake_nics, setting):
    assert setting.read(4096)
    assert sorted(nic.bytes for nic in fake_nics) == [0, 4096]
    until(lambda: setting.read() and all(nic.bytes > 4096 for nic in fake_nics))
    paths = {path.name: path for path in setting.target.paths}
    assert list(paths) == ["rdma fake0", "rdma other1"]
    assert all(path.moved_bytes for path in paths.values())


def test_small_batches_of_several_handles_use_every_card(fake_nics, setting):
    more = [setting.engine.open(setting.descriptor, require="rdma") for _ in range(3)]
    for target in (setting.target, *more):
        setting.engine.read_batch(target, [0], [64], [setting.region.address]).check()
    assert [nic.bytes for nic in fake_nics] == [128, 128]


def test_a_card_that_fails_is_left_to_rest_and_used_again(fake_nics, setting):
    _, second = fake_nics
    second.down = True
    assert setting.read()
    assert second.bytes == 0
    until(lambda: "does not answer (status 12)" in setting.target.paths[1].why)
    assert setting.target.paths[1].state != "healthy"
    second.down = False
    until(lambda: setting.target.paths[1].state == "healthy")
    until(lambda: setting.read() and second.bytes)


def test_small_batches_leave_a_card_that_fails(fake_nics, setting, caplog):
    first, second = fake_nics
    assert setting.read(64)
    first.down = True
    for _ in range(3):
        assert setting.read(64)
    assert (first.bytes, second.bytes) == (64, 3 * 64)
    (told,) = [record.message for record in caplog.records if "is not reached" in record.message]
    assert "over rdma fake0 but over rdma other1" in told


def test_a_card_is_not_healthy_for_an_idle_endpoint_that_works_no_more(fake_nics, setting):
    first, second = fake_nics
    assert setting.read(64)
    for nic in fake_nics:
        nic.down = True
    for card in range(2):
        with pytest.raises(PeerLostError):
            setting.transport.open(setting.descriptor, time.monotonic() + 5, card)
    first.down = second.down = False
    assert setting.remote().card == 0


def test_no_card_left_names_both_ends(fake_nics, setting):
    for nic in fake_nics:
        nic.down = True
    with pytest.raises(PeerLostError) as caught:
        setting.read()
    for part in ("of process", str(setting.descriptor.tcp_port), "does not answer (status 12)"):
        assert part in str(caught.value)
    assert caught.value.operation in ("open", "read")
    for nic in fake_nics:
        nic.down = False
    assert setting.read()


def test_a_deadline_destroys_what_is_under_way(fake_nics, setting):
    assert setting.read()
    fabric = fake_nics[0].fabric
    for nic in fake_nics:
        nic.silent = True
    with long_before(60), pytest.raises(TransferTimeoutError):
        setting.read(timeout_s=0.4)
    stuck = [pair for nic in fake_nics for pair in nic.stuck]
    assert stuck
    assert all(pair.closed for pair in stuck)
    submission = setting.engine.submit(
        Operation.READ, setting.target, [0], [9], [setting.region.address], timeout_s=0.2
    )
    assert submission.wait(60).tolist() == [TIMED_OUT]
    for nic in fake_nics:
        nic.silent = False
    assert setting.read()
    until(lambda: len(fabric.pairs) == 2 * len(setting.endpoints()))


@pytest.mark.parametrize("size", [8, SIZE])
def test_cancelling_wakes_a_transfer_that_sleeps(fake_nics, setting, size):
    assert setting.read(size)
    for nic in fake_nics:
        nic.silent = True
    submission = setting.engine.submit(
        Operation.READ, setting.target, [0], [size], [setting.region.address], timeout_s=60
    )
    until(lambda: submission._batch.interrupt is not None)
    with long_before(60):
        assert submission.cancel()
        submission.wait(60)
    assert submission.states() == ["cancelled"]
    assert all(pair.closed for nic in fake_nics for pair in nic.stuck)
    for nic in fake_nics:
        nic.silent = False
    assert setting.read()


def test_an_error_ends_what_sleeps_on_the_other_card(fake_nics, setting, monkeypatch):
    first, second = fake_nics
    target = setting.engine.open(setting.descriptor, require="rdma")  # begins with the second
    second.silent = True
    grant = Endpoint.grant

    def refusing(endpoint, *arguments):
        if endpoint.nic is first:
            raise AuthError("injected")
        return grant(endpoint, *arguments)

    monkeypatch.setattr(Endpoint, "grant", refusing)
    with pytest.raises(AuthError, match="injected"):
        setting.engine.read_batch(target, [0], [SIZE], [setting.region.address], timeout_s=60)
    assert second.stuck
    assert all(pair.closed for pair in second.stuck)


def test_waiting_costs_no_processor_time(fake_nics, setting):
    for nic in fake_nics:
        nic.silent = True
    begin = time.thread_time()
    with pytest.raises(TransferTimeoutError) as caught:
        setting.read(8, timeout_s=1.0)
    assert time.thread_time() - begin < 0.1
    assert caught.value.operation == "read"


def test_an_owner_that_ends_wakes_a_transfer_that_sleeps(fake_nics, setting):
    assert setting.read(8)
    for nic in fake_nics:
        nic.silent = True
    failures = []

    def read():
        try:
            setting.read(8, timeout_s=60)
        except TransferError as error:
            failures.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    until(lambda: any(nic.chains for nic in fake_nics))
    with long_before(60):
        setting.server.close()
        thread.join(60)
    assert [type(error) for error in failures] == [PeerLostError]


def test_a_dropped_connection_is_made_anew(setting):
    assert setting.read()
    old = setting.endpoints()
    for endpoint in old:
        endpoint.abort()
    # A batch that comes before the owner has noticed may still pass.
    until(lambda: setting.read() and not set(old) & set(setting.endpoints()))


def test_a_republished_segment_is_found_under_its_new_key(setting):
    assert setting.read()
    setting.server.withdraw(setting.segment)
    setting.server.publish(setting.segment)
    assert setting.read()


def test_a_withdrawn_segment_is_unknown_and_its_bytes_are_safe(setting):
    assert setting.read()
    setting.server.withdraw(setting.segment)
    setting.memory[:] = 9
    for move in (setting.engine.read_batch, setting.engine.write_batch):
        done = move(setting.target, [0, 5], [4, 4], [setting.region.address] * 2)
        assert done.statuses.tolist() == [UNKNOWN_SEGMENT] * 2
    assert (setting.memory == 9).all()
    assert np.array_equal(np.frombuffer(setting.segment.buffer, np.uint8), content(3, SIZE))
    with pytest.raises(NotFoundError):
        setting.engine.open(setting.descriptor, require="rdma")


def test_a_card_that_keeps_refusing_is_an_error(fake_nics, setting, monkeypatch):
    assert setting.read()
    monkeypatch.setattr(type(fake_nics[0]), "register", lambda nic, *_, **__: None)
    for region in list(fake_nics[0].fabric.regions.values()):
        if region.access != verbs.LOCAL:
            region.close()
    with pytest.raises(TransferError, match=r"refuses access \(status 10\)") as caught:
        setting.read()
    assert str(setting.descriptor.tcp_port) in str(caught.value)


def test_what_may_only_be_read_has_a_key_that_cannot_write(fake_nics, engine):
    with TransferServer(authorize=lambda access: access.operation is Operation.READ) as server:
        setting = Setting(server, engine)
        assert setting.read()
        done = engine.write_batch(setting.target, [0], [8], [setting.region.address])
        assert done.statuses.tolist() == [REFUSED]
        keys = {
            endpoint.grant(setting.descriptor, time.monotonic() + 5).key
            for endpoint in setting.endpoints()
        }
        regions = [fake_nics[0].fabric.regions[key] for key in keys]
        assert {region.access for region in regions} == {verbs.READABLE}
        setting.segment.close()


@pytest.mark.parametrize(
    ("principal", "namespace", "granted"),
    [
        ("", "", True),
        ("worker", "", True),
        ("writer", "", False),
        ("tenant", "", False),
        ("tenant", "tenants", True),
        ("writer", "tenants", False),
    ],
)
def test_who_would_have_to_show_rights_gets_no_key(fake_nics, principal, namespace, granted):
    with (
        TransferServer(secret=Ring(POOL)) as server,
        Segment.create(SIZE) as segment,
        TransferEngine(secret=known_as(principal)) as engine,
    ):
        descriptor = server.publish(segment, key=KEY, namespace=namespace)
        with contextlib.nullcontext() if granted else pytest.raises(AuthError):
            engine.open(descriptor, require="rdma")


def test_memory_no_card_takes_goes_through_the_arena(fake_nics, setting, caplog):
    for nic in fake_nics:
        nic.full = True
    other = np.zeros(SIZE, np.uint8)
    with caplog.at_level(logging.WARNING):
        region = setting.engine.register(other)
    assert "fake0 cannot register" in caplog.text
    for nic in fake_nics:
        nic.full = False
    setting.engine.read_batch(setting.target, [0], [SIZE], [region.address]).check()
    assert np.array_equal(other, content(3, SIZE))
    # Together with memory that is registered.
    both = [setting.region.address, region.address]
    setting.engine.read_batch(setting.target, [100, 200], [50, 60], both).check()
    assert np.array_equal(setting.memory[:50], content(3, SIZE)[100:150])
    assert np.array_equal(other[:60], content(3, SIZE)[200:260])


@pytest.mark.parametrize("operation", list(Operation))
def test_a_cancelled_batch_sends_nothing_that_lay_in_the_arena(setting, operation):
    """What the arena held before belongs to another batch."""
    setting.engine.read_into(setting.target, 0, bytearray(1000))
    memory = np.full(1000, 9, np.uint8)
    batch = setting.engine._prepare(
        setting.target,
        BatchRequest(operation, [0], [1000], [memory.ctypes.data], timeout_s=5, trusted=True),
    )
    batch.stop()
    setting.transport.move(setting.remote(), batch)
    assert batch.statuses.tolist() == [CANCELLED]
    assert (memory == 9).all() or operation is Operation.READ
    assert np.array_equal(np.frombuffer(setting.segment.buffer, np.uint8), content(3, SIZE))


def test_unregistered_memory_is_given_back_once_nothing_uses_it(fake_nics, setting):
    regions = fake_nics[0].fabric.regions
    before = len(regions)
    memory = np.zeros(4096, np.uint8)
    region = setting.engine.register(memory)
    assert len(regions) == before + len(fake_nics)
    table = setting.transport._memory.table(fake_nics)  # what a batch under way holds
    setting.engine.unregister(region)
    assert setting.read(8)
    assert len(regions) == before + len(fake_nics)
    del table
    assert len(regions) == before


def test_an_owner_whose_cards_are_full_offers_the_other_ways(fake_nics, caplog):
    for nic in fake_nics:
        nic.full = True
    caplog.set_level(logging.WARNING)
    with TransferServer() as server, Segment.create(4096) as segment:
        assert server.publish(segment).transports == ("shm", "tcp")
    assert "is not served over rdma" in caplog.text


def test_without_a_card_both_sides_say_so_and_use_another_way(monkeypatch):
    with TransferServer() as server, Segment.create(4096) as segment, TransferEngine() as engine:
        descriptor = server.publish(segment)
        assert descriptor.transports == ("shm", "tcp")
        told = {path.transport: path.reason for path in engine.explain(descriptor)}
        assert told["rdma"] == "the owner does not serve this segment over RDMA"
        import msgspec

        offered = msgspec.structs.replace(descriptor, transports=("shm", "rdma", "tcp"))
        monkeypatch.setattr(verbs, "unavailable", lambda: "this host has no RDMA device")
        told = {path.transport: path.reason for path in engine.explain(offered)}
        assert told["rdma"] == "this host has no RDMA device"
        with pytest.raises(UnavailableError, match="this host has no RDMA device"):
            engine.open(offered, require="rdma")


def test_an_owner_that_lost_its_cards_is_reached_over_tcp(fake_nics, setting, monkeypatch):
    with TransferServer(rdma=False) as server, Segment.create(4096) as segment:
        import msgspec

        descriptor = server.publish(segment)
        assert "rdma" not in descriptor.transports
        claimed = msgspec.structs.replace(descriptor, transports=("rdma", "tcp"))
        with TransferEngine(transports=("rdma", "tcp")) as engine:
            target = engine.open(claimed)
            assert target.transport == "tcp"
            assert "the owner has no RDMA device" in target.report[0].reason


def test_eviction_closes_both_ends(fake_nics, setting):
    setting.transport._pool.limit = 2
    others = []
    for _ in range(4):
        server = TransferServer()
        others.append((server, Setting(server, setting.engine)))
        for _, other in others:
            assert other.read(64)
        assert len(setting.transport._pool) <= 2
    until(lambda: len(fake_nics[0].fabric.pairs) <= 4)
    for server, other in others:
        server.close()
        other.segment.close()


def test_a_closed_engine_gives_everything_back(fake_nics):
    fabric = fake_nics[0].fabric
    engine = TransferEngine()
    with TransferServer() as server:
        setting = Setting(server, engine)
        assert setting.read()
        engine.close()
        until(lambda: not fabric.pairs)
        setting.segment.close()
    del setting
    until(lambda: not fabric.regions)


def greeted(descriptor):
    """Return a control connection, and a function that sends a frame and returns the answer."""
    link, features = dial(
        (descriptor.tcp_host, descriptor.tcp_port), descriptor.instance, secret=None,
        deadline=time.monotonic() + 5, features=("rdma",),
    )  # fmt: skip
    assert features == {"rdma"}
    decoder = FrameDecoder(RDMA.reply_limits, replies=True, versions=VERSIONS)
    link.deadline = time.monotonic() + 5

    def exchange(opcode, body):
        link.send(encode_frame(opcode, body, request_id=1))
        frame = link.frame(decoder)
        if frame.flags & ERROR:
            raise decode_error(frame.body)
        return frame.body

    return link, exchange


def test_messages_out_of_turn_end_their_connection_only(fake_nics, setting):
    descriptor = setting.descriptor
    ask = OPEN.request.pack(Ask(descriptor.uuid, True))
    nic = fake_nics[0]
    offer = Offer.of(nic, bytes(16), 0, 9)
    for messages in (
        [(OPEN.opcode, ask)],  # before any card is chosen
        [(CONNECT.opcode, CONNECT.request.pack(offer))] * 2,
        [(CONNECT.opcode, b"\xff" * 20)],
        [(CONNECT.opcode, ask)],
    ):
        link, exchange = greeted(descriptor)
        for message in messages[:-1]:
            exchange(*message)
        with pytest.raises(RemoteProtocolError):
            exchange(*messages[-1])
        with pytest.raises(PeerLostError):
            link.receive(memoryview(bytearray(1)))
        link.close()
    for garbage in (
        b"\x00" * 64,
        encode_frame(0x99, b"12"),
        encode_frame(OPEN.opcode, b"x" * 4000),
    ):
        link, _ = greeted(descriptor)
        link.send(garbage)
        with pytest.raises(PeerLostError):
            link.receive(memoryview(bytearray(1)))
        link.close()
    assert setting.read()


def test_an_unknown_segment_leaves_the_connection_in_step(fake_nics, setting):
    link, exchange = greeted(setting.descriptor)
    exchange(CONNECT.opcode, CONNECT.request.pack(Offer.of(fake_nics[0], bytes(16), 0, 9)))
    with pytest.raises(NotFoundError):
        exchange(OPEN.opcode, OPEN.request.pack(Ask(bytes(16), False)))
    body = exchange(OPEN.opcode, OPEN.request.pack(Ask(setting.descriptor.uuid, False)))
    assert OPEN.reply.unpack(body).size == SIZE
    link.close()


def test_cards_on_other_networks_do_not_join(fake_nics, setting, monkeypatch):
    offers = Offer.of.__func__

    def infiniband(cls, *arguments):
        import msgspec

        return msgspec.structs.replace(offers(cls, *arguments), link_layer=verbs.INFINIBAND)

    link, exchange = greeted(setting.descriptor)
    body = CONNECT.request.pack(infiniband(Offer, fake_nics[0], bytes(16), 0, 9))
    with pytest.raises(UnavailableError, match=r"fake0 \(Ethernet.*fake0 \(InfiniBand"):
        exchange(CONNECT.opcode, body)
    link.close()
