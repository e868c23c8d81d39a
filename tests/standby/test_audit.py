"""That a leader and its standby tell who had the one lead in place of the other."""

import pytest

from mooncake_store.wire.standby import PROMOTE, PromoteRequest
from tests.standby import asking
from transfer_engine.errors import UnavailableError


def test_who_promotes_is_told_by_both(pool):
    pool.lead()
    pool.follow()
    pool.until_copied()
    with pytest.raises(UnavailableError):
        pool.ask(PROMOTE, PromoteRequest(False))
    standby, leader = pool.programs["standby"], pool.programs["leader"]
    assert "promote(hand_over=False): UnavailableError: " in standby.wait_for_line("audit")
    asking.promote(pool.addresses["standby"], hand_over=True)
    standby.wait_for_line("promote(hand_over=True): answered lost_words=0")
    leader.wait_for_line("hand_over(done=True): answered")
