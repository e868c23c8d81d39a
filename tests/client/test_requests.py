"""Requests over keys, against shards that the test plays itself."""

from types import SimpleNamespace

import numpy as np
import pytest

from mooncake_store import UnavailableError, ids
from mooncake_store.client.keys import KeyBatch
from mooncake_store.client.requests import KeyRequests
from mooncake_store.identity import Unkeyed
from mooncake_store.wire.shard import EXISTS, PUT_END

KEYS = [f"key-{at}" for at in range(50)]


def batch(keys=KEYS, shards=3):
    identity = Unkeyed("default")
    core = SimpleNamespace(shards=shards, identity=identity)
    return KeyRequests(core, KeyBatch.of(keys, identity), until=0.0)


def answered(steps, answer):
    """Run steps that ask once; `answer` makes a body, or an error, of each call."""
    step = next(steps)
    with pytest.raises(StopIteration) as end:
        steps.send([answer(*call) for call in step.calls])
    return end.value.value


def present(shard, operation, body):
    count = len(operation.request.unpack(body).digests)
    return operation.reply.pack(present=np.full(count, shard, np.uint8))


@pytest.mark.parametrize("keys_max", [100, 7])
def test_each_shard_is_asked_for_its_keys_in_order(keys_max):
    asked = batch()
    requests = asked.requests(EXISTS, asked.good(), {"digests": asked.keys.digests}, keys_max)
    of = ids.shard_of(asked.keys.digests, 3)
    seen = np.full(len(KEYS), -1)
    for some, reply in answered(asked.ask(requests), present):
        assert len(some) <= keys_max
        assert (np.diff(some) > 0).all()
        seen[some] = reply.present
    assert seen.tolist() == of.tolist()


def test_columns_are_cut_functions_are_called_and_the_rest_is_sent_to_all():
    asked = batch()
    numbers = np.arange(len(KEYS), dtype=np.uint32)
    fields = {
        "digests": asked.keys.digests,
        "generations": numbers,
        "checksums": lambda some: some.astype(np.uint64) * 2,
    }
    for (_, operation, body), some, _ in asked.requests(PUT_END, np.arange(10, 20), fields):
        view = operation.request.unpack(body)
        assert view.digests.tolist() == asked.keys.digests[some].tolist()
        assert view.generations.tolist() == some.tolist()
        assert view.checksums.tolist() == (2 * some).tolist()


def test_what_befalls_a_request_befalls_its_keys_alone():
    asked = batch(["", *KEYS])
    lost = UnavailableError("shard 1 is away")

    def answer(shard, operation, body):
        return lost if shard == 1 else present(shard, operation, body)

    requests = asked.requests(EXISTS, asked.good(), {"digests": asked.keys.digests})
    answers = answered(asked.ask(requests), answer)
    away = [at + 1 for at in np.flatnonzero(ids.shard_of(asked.keys.digests[1:], 3) == 1)]
    assert sorted(asked.errors) == away
    assert np.flatnonzero(asked.status == UnavailableError.code).tolist() == away
    assert asked.status[0] not in (0, UnavailableError.code)  # it is no key, and was not asked for
    assert sum(len(some) for some, _ in answers) == len(KEYS) - len(away)


def test_nothing_is_asked_for_no_keys_and_no_answer_at_all_is_raised():
    asked = batch()
    assert asked.requests(EXISTS, np.arange(0), {"digests": asked.keys.digests}) == []
    with pytest.raises(StopIteration) as end:
        next(asked.ask([]))
    assert end.value.value == []
    requests = asked.requests(EXISTS, asked.good(), {"digests": asked.keys.digests})
    steps = asked.ask(requests)
    count = len(next(steps).calls)
    with pytest.raises(UnavailableError, match="nobody"):
        steps.send([UnavailableError("nobody is there")] * count)
    assert not asked.errors
