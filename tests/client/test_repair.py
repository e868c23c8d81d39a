"""Replicas that were lost with a worker are made anew on the next one that comes."""

import random

import pytest

from tests.waiting import until

# Short, so that a killed worker is soon given up; long enough for one that is merely slow.
PATIENT = {"ping_interval": "200ms", "client_ttl": "8s", "suspect_after_pings": 10}


def totals(store):
    (shard,) = store.store_stats()
    return shard


@pytest.mark.slow
def test_data_survives_the_loss_of_one_worker_after_the_other(own_cluster, connect):
    cluster = own_cluster(master=PATIENT)
    store = connect(cluster.url)
    chance = random.Random(7)
    values = {
        f"key-{i}": chance.randbytes(chance.choice((1, 100, 4096, 200_000))) for i in range(200)
    }
    assert store.put_many(list(values), list(values.values()), replicas=2).replicas.min() == 2
    cluster.kill_worker(0)
    until(lambda: totals(store).replicas_missing == 200, what="the worker is given up")
    assert totals(store).tasks_unfinished == 0
    cluster.restart_worker(0)
    nbytes = sum(map(len, values.values()))
    until(
        lambda: not totals(store).replicas_missing and not totals(store).tasks_unfinished,
        what="all replicas are there again",
    )
    assert totals(store).bytes_used == 2 * nbytes
    cluster.kill_worker(1)
    reader = connect(cluster.url)
    assert reader.get_many(list(values)).values == list(values.values())


@pytest.mark.slow
def test_a_process_that_died_is_repaired_at_once(own_cluster, connect):
    """However long silence is suffered: two crashes one after the other lose nothing."""
    cluster = own_cluster(workers=3, master={"client_ttl": "1h"})
    store = connect(cluster.url)
    values = {f"key-{i}": bytes([i]) * 20_000 for i in range(100)}
    assert store.put_many(list(values), list(values.values()), replicas=2).replicas.min() == 2
    lent = totals(store).bytes_total
    cluster.kill_worker(0)
    until(lambda: totals(store).bytes_total == lent * 2 // 3, what="its memory is given up")

    def whole():
        """Whether all have two replicas on workers that live; what is lost is seen at once."""
        return all(len(store.query(key).replicas) == 2 for key in values)

    until(whole, what="all replicas are there again")
    cluster.kill_worker(1)
    until(lambda: totals(store).bytes_total == lent // 3, what="its memory is given up")
    reader = connect(cluster.url)
    assert reader.get_many(list(values)).values == list(values.values())
