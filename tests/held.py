"""That nothing in a store is held by anybody: no lease, no pin, no unfinished put."""


def assert_nothing_held(client, names):
    """No lease on any of these objects, and no pin or unfinished put in the whole store."""
    assert names
    assert [client.stat(name).lease_s for name in names] == [0] * len(names)
    for shard in client.store_stats():
        assert (shard.soft_pinned, shard.hard_pinned_bytes, shard.writing) == (0, 0, 0)
    client.remove_many(names).check()  # which a lease or a pin would refuse
