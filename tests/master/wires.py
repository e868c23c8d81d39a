"""Driving a master by its wire protocol, one blocking connection per service."""

import secrets

import numpy as np

from mooncake_store.core.records import EVENT, GET_ROW, LISTED, PUT_ROW, REPLICA
from mooncake_store.identity import Unkeyed
from mooncake_store.wire import cluster as cluster_wire
from mooncake_store.wire import shard as shard_wire
from transfer_engine.base import SegmentDescriptor
from transfer_engine.rpc.blocking import BlockingConnection
from transfer_engine.segments.mapping import host_identity

TIMEOUT_S = 60
IDENTITY = Unkeyed("default")
"""What these digests are keyed with is all the same to a master."""


def digests(*names):
    return IDENTITY.digests(list(names))


def numbered(prefix, count):
    return [b"%s-%d" % (prefix, index) for index in range(count)]


def descriptor(uuid, name, nbytes, tcp_port):
    """What a worker at this port of this machine says of a segment."""
    found = SegmentDescriptor(
        uuid, nbytes, name, True, host_identity(), bytes(16), 0, 0, ("tcp",), "", "127.0.0.1",
        tcp_port,
    )  # fmt: skip
    return found.encode()


class ClusterWire:
    """The cluster service of a master."""

    def __init__(self, address, secret=None, namespace="default"):
        self._secret, self._namespace = secret, namespace
        self.connection = BlockingConnection.connect(
            address, cluster_wire.CLUSTER, secret=secret, timeout_s=TIMEOUT_S
        )
        self._opened = []

    def ask(self, operation, request, timeout_s=TIMEOUT_S):
        body = self.connection.call(operation, operation.request.pack(request), timeout_s=timeout_s)
        return operation.reply.unpack(body)

    def map(self):
        return self.ask(cluster_wire.MAP, cluster_wire.MapRequest(self._namespace))

    def status(self):
        return self.ask(cluster_wire.STATUS, cluster_wire.StatusRequest())

    def segments(self, *numbers):
        return self.ask(cluster_wire.SEGMENTS, cluster_wire.SegmentsRequest(numbers)).segments

    def worker_states(self):
        return {worker.name: worker.state for worker in self.status().workers}

    def mount(self, *segments, uuid=None, epoch=1, name="w", host="h", tcp_port=0, keeps=False):
        """Mount segments given as (uuid, name, bytes), without any memory behind them."""
        specs = tuple(
            cluster_wire.SegmentSpec(u, n, b, descriptor(u, n, b, tcp_port) if tcp_port else b"")
            for u, n, b in segments
        )
        uuid = uuid or secrets.token_bytes(16)
        request = cluster_wire.Mount(uuid, epoch, name, host, specs, keeps)
        return self.ask(cluster_wire.MOUNT, request)

    def unmount(self, uuid, epoch, *segments, grace_ms=0):
        return self.ask(cluster_wire.UNMOUNT, cluster_wire.Unmount(uuid, epoch, segments, grace_ms))

    def drain(self, number, cancel=False):
        return self.ask(cluster_wire.DRAIN, cluster_wire.Drain(number, cancel))

    def drain_status(self, number):
        return self.ask(cluster_wire.DRAIN_STATUS, cluster_wire.DrainStatusRequest(number))

    def shard(self, index=0, **options):
        """A connection to one shard, open, that is closed with this one."""
        options = {"secret": self._secret, "namespace": self._namespace, **options}
        self._opened.append(ShardWire(self.map().shards[index], **options))
        return self._opened[-1]

    def close(self):
        for shard in self._opened:
            shard.close()
        self.connection.close()


class PingWire:
    """The liveness service of a master."""

    def __init__(self, address, secret=None):
        self.connection = BlockingConnection.connect(
            address, cluster_wire.LIVENESS, secret=secret, timeout_s=TIMEOUT_S
        )

    def ping(self, uuid, epoch=1):
        request = cluster_wire.PING.request.pack(cluster_wire.Ping(uuid, epoch))
        body = self.connection.call(cluster_wire.PING, request, timeout_s=TIMEOUT_S)
        return cluster_wire.PING.reply.unpack(body)

    def close(self):
        self.connection.close()


class ShardWire:
    """A shard, spoken to in the name of one client."""

    def __init__(
        self, address, uuid=None, epoch=1, host="h", namespace="default", opened=True, secret=None
    ):
        self.uuid = uuid or secrets.token_bytes(16)
        self.epoch = epoch
        self._stream = None
        self.connection = BlockingConnection.connect(
            address, shard_wire.SHARD, secret=secret, timeout_s=TIMEOUT_S
        )
        if opened:
            request = shard_wire.OpenClient(self.uuid, epoch, host, namespace)
            try:
                self.opened = self.cold(shard_wire.OPEN, request)
            except BaseException:
                self.close()
                raise

    def cold(self, operation, request):
        body = self.connection.call(operation, operation.request.pack(request), timeout_s=TIMEOUT_S)
        return operation.reply.unpack(body)

    def call(self, operation, timeout_s=TIMEOUT_S, **columns):
        return operation.reply.unpack(
            self.connection.call(operation, operation.request.pack(**columns), timeout_s=timeout_s)
        )

    def put_request(self, names, size, **options):
        values = {
            "flags": 0, "replicas": 1, "replicas_min": 1, "soft_pin": 0, "placement": -1,
            "soft_pin_ttl_ms": -1, "wait_ms": 0, "number": 0, "groups": [], "preferred": [],
            "excluded": [],
        }  # fmt: skip
        values |= options
        return {
            "digests": digests(*names),
            "sizes": np.full(len(names), size, np.int64),
            "names": names,
            **values,
        }

    def put_start(self, names, size, timeout_s=TIMEOUT_S, **options):
        """(PUT_ROW per name, REPLICA per replica)"""
        reply = self.call(
            shard_wire.PUT_START, timeout_s, **self.put_request(names, size, **options)
        )
        return put_reply(reply)

    def put_end(self, names, rows):
        return self.call(
            shard_wire.PUT_END,
            digests=digests(*names),
            generations=np.ascontiguousarray(rows["generation"]),
            checksums=np.zeros(len(names), np.uint64),
        ).statuses.tolist()

    def put(self, names, size, **options):
        """Begin and end; returns (rows, replicas) of the start."""
        rows, replicas = self.put_start(names, size, **options)
        assert set(rows["status"]) == {0}
        assert set(self.put_end(names, rows)) == {0}
        return rows, replicas

    def get(self, names, ttl_ms=0):
        reply = self.call(shard_wire.GET, ttl_ms=ttl_ms, stop_at_miss=0, digests=digests(*names))
        return as_records(reply.rows, GET_ROW), as_records(reply.replicas, REPLICA)

    def exists(self, names):
        return self.call(shard_wire.EXISTS, digests=digests(*names)).present.tolist()

    def remove(self, names, flags=0):
        return self.call(shard_wire.REMOVE, flags=flags, digests=digests(*names)).statuses.tolist()

    @property
    def stream(self):
        """What the shard calls its events."""
        if self._stream is None:
            self._stream = self.call(shard_wire.SNAPSHOT, cursor=0).stream
        return self._stream

    def events(self, number, limit=100, wait_ms=0, stream=None):
        reply = self.call(
            shard_wire.EVENTS,
            stream=self.stream if stream is None else stream,
            number=number,
            limit=limit,
            wait_ms=wait_ms,
        )
        return reply.first, as_records(reply.events, EVENT), reply.gap

    def list(self, prefix=b"", cursor=0, limit=100):
        reply = self.call(
            shard_wire.LIST, cursor=cursor, limit=limit, prefix=np.frombuffer(prefix, np.uint8)
        )
        return as_records(reply.rows, LISTED), bytes(reply.names), reply.cursor

    def stat(self, name):
        return self.cold(shard_wire.STAT, shard_wire.StatRequest(digests(name)[0].tobytes()))

    def stats(self):
        return self.cold(shard_wire.STATS, shard_wire.StatsRequest())

    def submit(self, kind, name, *targets, source=-1):
        request = shard_wire.SubmitTask(kind, digests(name)[0].tobytes(), targets, source)
        return self.cold(shard_wire.SUBMIT_TASK, request)

    def task(self, number):
        return self.cold(shard_wire.TASK, shard_wire.TaskRequest(number))

    def close(self):
        self.connection.close()


def put_reply(reply):
    return as_records(reply.rows, PUT_ROW), as_records(reply.replicas, REPLICA)


def as_records(words, kind):
    return np.ascontiguousarray(words).view(kind).reshape(-1)
