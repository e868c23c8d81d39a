"""What a lease makes of a service that answers late, wrongly or not at all."""

import asyncio

import pytest

from mooncake_store.coordination.leases import Lease
from mooncake_store.coordination.testing import MovedPace
from transfer_engine.errors import UnavailableError

pytestmark = pytest.mark.asyncio


class Service:
    """Answers a renewal with what a test puts there."""

    def __init__(self):
        self.asked = []
        self.revoked = []

    async def renew(self, lease, timeout_s):
        answer = asyncio.get_running_loop().create_future()
        self.asked.append((answer, timeout_s))
        return await answer

    async def revoke(self, lease, timeout_s):
        self.revoked.append(lease)


@pytest.fixture
def service():
    return Service()


@pytest.fixture
def pace():
    return MovedPace()


def taken(service, pace):
    """A lease of 100 s that was asked for 1 s ago."""
    ended = []
    lease = Lease(7, 100, pace.now_ns() - 10**9, service, pace, ended.append)
    lease.told = ended
    return lease


async def test_it_is_counted_from_before_it_was_asked_for(service, pace):
    lease = taken(service, pace)
    assert lease.held_until_ns() == 94 * 10**9
    await pace.advance(34)
    await pace.advance(20)  # the service takes its time
    service.asked[0][0].set_result(True)
    await pace.settle()
    assert lease.held_until_ns() < (34 + 95) * 10**9
    await lease.release(1)
    assert service.revoked == [7]
    assert lease.told == [lease]


async def test_a_renewal_that_hangs_does_not_outlive_it(service, pace):
    lease = taken(service, pace)
    await pace.advance(34)
    (answer, timeout_s), *_ = service.asked
    assert timeout_s <= 31  # so there is time for another one
    await pace.advance(61)
    assert not lease.held()
    await lease.ended()
    assert answer.cancelled()
    assert lease.told == [lease]


async def test_an_answer_that_comes_when_it_is_over_does_not_revive_it(service, pace):
    lease = taken(service, pace)
    await pace.advance(34)
    pace.stand_still(62)  # nobody has noticed that it is over when the answer is there
    service.asked[0][0].set_result(True)
    await pace.settle()
    assert not lease.held()
    assert lease.held_until_ns() == 0
    await lease.ended()


async def test_a_failure_is_followed_by_another_try(service, pace):
    lease = taken(service, pace)
    await pace.advance(34)
    for number, error in enumerate([UnavailableError("away"), RecursionError("a mistake")]):
        service.asked[number][0].set_exception(error)
        await pace.advance(6)
        assert lease.held()
    service.asked[2][0].set_result(True)
    await pace.advance(1)
    assert lease.held_until_ns() > (34 + 95) * 10**9
    lease.lose()


async def test_what_accompanies_it_ends_with_it(service, pace):
    lease = taken(service, pace)
    forever = pace.sleep(10**6)
    lease.accompany(forever)
    await pace.settle()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    lease.lose()
    await asyncio.gather(*tasks, return_exceptions=True)
    late = pace.sleep(10**6)
    lease.accompany(late)
    await pace.settle()
    assert asyncio.all_tasks() == {asyncio.current_task()}
