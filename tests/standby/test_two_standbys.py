"""A leader with two standbys, of which one counts: processes, and what they say of each other."""

from __future__ import annotations

import pytest

from mooncake_store.cli.shared.standbys import promotion_of, told_promotion
from mooncake_store.errors import UnavailableError
from mooncake_store.wire.standby import PROMOTE, PromoteRequest
from tests.standby import asking
from tests.standby.asking import mooncake
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

QUICK = ("--ping-interval", "200ms")


def put(client, keys):
    client.put_many(keys, [key.encode() * 50 for key in keys]).check()


def assert_there(client, keys):
    for key, value in zip(keys, client.get_many(keys).values, strict=True):
        assert value is not None, f"{key} is lost"
        assert bytes(value) == key.encode() * 50, f"{key} has other bytes"


def number_of(pool, name):
    return pool.state(name).joinpath("standby.number").read_text().strip()


def told(pool, name):
    """What the leader tells of a standby."""
    _, found = mooncake("standbys", pool.addresses["leader"])
    return {each["number"]: each for each in found["standbys"]}.get(number_of(pool, name))


def of_itself(pool, name):
    """What a standby says that a promotion would come to."""
    return mooncake("promote", pool.addresses[name], "--check")[1]["promotion"]


@pytest.fixture
def two(pool):
    """A leader, the standby that counts, and a second one that is a copy."""

    def start(*options):
        pool.lead(*QUICK, "--journal", "replicated", *options)
        pool.follow(*QUICK)
        pool.lend()
        pool.until_copied()
        pool.follow(*QUICK, name="second")
        pool.until_copied(name="second")
        return pool

    return start


@pytest.mark.parametrize("shards", [1, 2])
def test_the_second_takes_the_place_of_the_one_that_counts(two, shards):
    pool = two("--shards", shards)
    client = pool.client(deadline="20s")
    put(client, [f"three-{n}" for n in range(200)])
    assert (told(pool, "standby")["counts"], told(pool, "second")["counts"]) == (True, False)
    gone = number_of(pool, "standby")
    pool.kill("standby")
    until(lambda: not client.status().ready)
    assert f"{gone}, does not follow" in asking.refusal(client)
    code, dropped = mooncake("standbys", pool.addresses["leader"], "--drop", gone)
    second = number_of(pool, "second")
    assert (code, dropped) == (0, {"dropped": gone, "counts": second, "elected": False})
    put(client, [f"two-{n}" for n in range(200)])
    assert client.status().ready
    # Both say that nothing is lost, in the same words.
    until(lambda: told(pool, "second")["promotion"] == of_itself(pool, "second"))
    assert of_itself(pool, "second") == {
        "objects": 400, "lacking_words": 0, "loses": "nothing",
    }  # fmt: skip
    # The one that was dropped comes back, and knows that it lacks something.
    pool.follow(*QUICK)
    until(lambda: of_itself(pool, "standby")["loses"] == "the last changes")
    led = pool.take_over("second")
    until(lambda: led.status().ready)
    assert_there(led, [f"{what}-{n}" for what in ("three", "two") for n in range(200)])


def test_the_copy_may_go_and_come_and_nobody_waits(two):
    pool = two()
    client = pool.client(deadline="20s")
    put(client, ["one"])
    pool.kill("second")
    until(lambda: told(pool, "second") is None)
    put(client, ["two"])
    assert client.status().ready
    pool.follow(*QUICK, name="second", of="leader,standby")
    pool.until_copied(name="second")
    until(lambda: told(pool, "second")["address"] == pool.addresses["second"])
    assert not told(pool, "second")["counts"]
    put(client, ["three"])
    led = pool.take_over()
    until(lambda: led.status().ready)
    assert_there(led, ["one", "two", "three"])
    # It was told whom it may have to follow.
    second = pool.addresses["second"]
    until(lambda: asking.status(second).leader == pool.addresses["standby"])
    asking.until_copied(second)
    with pytest.raises(UnavailableError, match="stop that first"):
        asking.ask(second, PROMOTE, PromoteRequest())
    pool.kill("standby")
    asking.promote(second)


def test_what_a_promotion_loses_is_said_at_the_level_written_too(pool):
    pool.lead(*QUICK)
    pool.lend()
    pool.follow(*QUICK)
    client = pool.client()
    put(client, ["one", "two"])
    pool.until_copied()
    until(lambda: told(pool, "standby")["promotion"] == of_itself(pool, "standby"))
    value = of_itself(pool, "standby")
    assert value == {"objects": 2, "lacking_words": 0, "loses": "the last changes"}
    assert told_promotion(value) == (
        "a promotion restores 2 objects: what was answered last may be lost"
    )
    pool.kill("leader")
    until(lambda: pool.status().shards[0].state == "cut off")
    assert promotion_of(pool.status()) == value  # as it was heard last
    asking.promote(pool.addresses["standby"])
    pool.programs["standby"].wait_for_line("knows 2 objects")
