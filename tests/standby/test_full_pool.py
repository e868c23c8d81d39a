"""A pool that is nearly full when its leader is lost: what its standby gives out, and how soon."""

import itertools

import pytest

from mooncake_store.client import patience
from tests.master.wires import ClusterWire, numbered
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SLOW = ("--ping-interval", "200ms", "--put-release", "1h", "--lease-ttl-max", "1h")
"""Nothing that readers or writers may still use comes to be free while a test lasts."""
MIB = 1 << 20
KEPT = numbered(b"kept", 57)
"""Nine tenths of the memory that is lent, in objects of a mebibyte."""
MORE = numbered(b"more", 64)
"""More of 256 KiB than there is room for."""
FREE = 15
"""How many there is room for when these, nine more and one of a mebibyte are there."""


def given(reply, nbytes):
    """The bytes that may be written now, as (begin, end)."""
    return [(offset, offset + nbytes) for offset in reply[1]["offset"].tolist()]


def test_a_pool_that_is_nearly_full_takes_puts_as_soon_as_its_standby_leads(pool, monkeypatch):
    """At replicated it knows every grant: it waits for nobody, and gives nobody's memory away."""
    monkeypatch.setattr(patience, "TAKEOVER_S", float(PATIENCE_S))
    pool.lead(*SLOW, "--journal", "replicated")
    pool.follow(*SLOW)
    pool.lend("leader", "standby")
    pool.until_copied()
    client = pool.client("leader", "standby", deadline=PATIENCE_S)
    wire = ClusterWire(pool.addresses["leader"])
    shard = wire.shard()
    taken = given(shard.put(KEPT, MIB), MIB)
    shard.get(KEPT, ttl_ms=60_000)
    # A writer that has not ended when the leader does.
    taken += given(shard.put_start([b"being written"], MIB), MIB)
    wire.close()
    pool.kill("leader")
    pool.promote()
    client.put("first", bytes(MIB // 4))
    client.put_many([f"batch-{number}" for number in range(8)], [bytes(MIB // 4)] * 8).check()
    wire = ClusterWire(pool.addresses["standby"])
    late = given(wire.shard().put_start(MORE, MIB // 4), MIB // 4)
    wire.close()
    assert FREE <= len(late) < len(MORE)
    taken = sorted(taken + late)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(taken))
