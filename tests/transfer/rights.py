"""What tests of rights begin with: a pool's secret, credentials by name, and rights made as a shard
makes them."""

import secrets
import time

import numpy as np

from transfer_engine.kernels import rights as kernel
from transfer_engine.wire.keyring import Alone, Credential, Key, SharedSecret
from transfer_engine.wire.rights import Rights, Role

POOL = b"the secret of the pool"
PEOPLE = {
    "writer": (Role.WRITER, ()),
    "reader": (Role.READER, ()),
    "worker": (Role.WORKER, ()),
    "tenant": (Role.WRITER, ("tenants", "others")),
    "looker": (Role.READER, ("tenants",)),
}
KEY = bytes(range(16))


class Ring(SharedSecret):
    """The pool's secret, and those of PEOPLE."""

    def accepted(self, principal):
        if not principal:
            return super().accepted(principal)
        role, namespaces = PEOPLE[principal]
        return (Key(secret_of(principal), Rights(principal, role, namespaces)),)


def secret_of(principal):
    return f"the secret of {principal}".encode()


def known_as(principal, tls=None):
    """What somebody proves himself with; the pool's secret for nobody."""
    if not principal:
        return SharedSecret(POOL, tls=tls)
    return Alone(Credential(principal, secret_of(principal)), tls=tls)


def stamps_of(count, seconds=60.0, generation=None):
    """Stamps that end in so many seconds, of generations that were not there before."""
    end = int((time.time() + seconds) * 1000)
    first = secrets.randbits(23) if generation is None else generation
    return np.array([kernel.stamp_of(end, first + i) for i in range(count)], np.int64)


def tags(kind, offsets, lengths, stamps, key=KEY):
    low, high = np.frombuffer(key, np.int64).tolist()
    found = np.zeros(len(stamps), np.int64)
    columns = [np.array(column, np.int64) for column in (offsets, lengths)]
    kernel.tags_of(low, high, *columns, kind, stamps, found)
    return found


def granted(kind, offsets, lengths, seconds=60.0, key=KEY):
    """Rights to ranges, as rows (tag, stamp)."""
    stamps = stamps_of(len(offsets), seconds)
    return np.stack([tags(kind, offsets, lengths, stamps, key), stamps], axis=1)


def receipts(offsets, lengths, rights, key=KEY):
    """What an owner answers to writes by these rights."""
    return tags(kernel.WRITTEN, offsets, lengths, rights[:, 1].copy(), key)
