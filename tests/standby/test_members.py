"""Members of a pool that an etcd elects a leader of: processes, sockets and a real etcd."""

import signal

import pytest

from mooncake_store.errors import StoreError
from tests.standby.asking import mooncake, refusal
from tests.standby.members import assert_there, elected, put
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def pool(start_program, tmp_path, request):
    with elected(start_program, tmp_path, **getattr(request, "param", {})) as made:
        yield made


@pytest.mark.parametrize("pool", [{"shards": 1}, {"shards": 2}], indirect=True)
def test_another_member_leads_when_the_leader_is_gone_and_nobody_has_to_be_told(pool):
    assert pool.start(0)["leads"]
    pool.lend()
    client = pool.client()
    until(lambda: client.status().ready)
    put(client, [f"alone-{n:04d}" for n in range(200)])  # while nobody follows
    assert not pool.start(1)["leads"]
    pool.counts(0)
    keys = [f"key-{n:04d}" for n in range(500)]
    put(client, keys)
    pool.programs[0].kill()
    pool.leads(1)
    until(lambda: client.status().ready)
    assert_there(client, keys + [f"alone-{n:04d}" for n in range(200)])
    put(client, ["after"])  # nobody else may lead now, so changes wait for nobody
    assert not pool.start(0)["leads"]
    pool.counts(1)
    put(client, ["both"])
    pool.lose(1)
    pool.leads(0)
    until(lambda: client.status().ready)
    assert_there(client, [*keys, "after", "both"])


def test_a_leader_that_stood_still_answers_nothing_when_it_comes_back(pool):
    pool.start(0)
    pool.lend()
    client = pool.client()
    until(lambda: client.status().ready)
    pool.start(1)
    pool.counts(0)
    put(client, ["one"])
    frozen = pool.only(0, deadline="30s")
    assert frozen.exists("one")
    pool.signal(0, signal.SIGSTOP)
    pool.leads(1)
    until(lambda: client.status().ready)
    client.remove("one", force=True)
    pool.signal(0, signal.SIGCONT)
    # It may refuse, or be gone as a leader by now; it must not say what was true before.
    try:
        said = frozen.exists("one")
    except StoreError:
        said = False
    assert not said
    frozen.close()
    pool.programs[0].wait_for_line('"leads": false')
    put(client, ["two"])
    assert_there(client, ["two"])


def test_who_lacks_something_does_not_lead(pool):
    """A standby that never caught up, while the only one that has all is away."""
    pool.start(0)
    pool.lend()
    client = pool.client()
    until(lambda: client.status().ready)
    put(client, ["one"])
    pool.programs[0].kill()
    pool.programs[1] = pool.run(1)
    pool.never_leads(1)
    # The one that led last may go on at once.
    assert pool.start(0)["leads"]
    until(lambda: client.status().ready)
    assert_there(client, ["one"])


@pytest.mark.parametrize(
    "pool", [{"shards": shards, "count": 3, "grace": "1h"} for shards in (1, 2)], indirect=True
)
def test_a_third_member_counts_when_the_second_is_gone_and_has_all_when_the_first_is(pool):
    pool.start(0)
    pool.lend()
    client = pool.client()
    until(lambda: client.status().ready)
    pool.start(1)
    pool.counts(0, 1)
    pool.start(2)
    pool.follows(0, 2)
    put(client, [f"three-{n:04d}" for n in range(300)])
    pool.programs[1].kill()
    pool.counts(0, 2)
    put(client, [f"two-{n:04d}" for n in range(300)])
    pool.lose(0)
    pool.leads(2)
    until(lambda: client.status().ready)
    assert_there(client, [f"{what}-{n:04d}" for what in ("three", "two") for n in range(300)])
    # It follows, and counts: then it leads like any other.
    assert not pool.start(1)["leads"]
    pool.counts(2, 1)
    put(client, ["again"])
    pool.lose(2)
    pool.leads(1)
    until(lambda: client.status().ready)
    assert_there(client, ["again", "two-0000"])


@pytest.mark.parametrize("pool", [{"grace": "2s"}], indirect=True)
def test_a_standby_that_hung_does_not_lead_with_less_than_was_answered(pool):
    pool.start(0)
    pool.lend()
    client = pool.client()
    until(lambda: client.status().ready)
    pool.start(1)
    pool.counts(0, 1)
    put(client, ["both"])
    pool.signal(1, signal.SIGSTOP)
    put(client, ["alone"])  # which waits until the standby is dropped, and is on its way to it
    put(client, ["later"])
    assert pool.number(1) not in {each.number for each in pool.standbys(0) if each.counts}
    pool.lose(0)
    pool.signal(1, signal.SIGCONT)
    pool.never_leads(1)
    assert pool.start(0)["leads"]
    until(lambda: client.status().ready)
    assert_there(client, ["both", "alone", "later"])
    pool.counts(0, 1)  # it came back, and was brought up to date
    pool.lose(0)
    pool.leads(1)
    until(lambda: client.status().ready)
    assert_there(client, ["both", "alone", "later"])


@pytest.mark.parametrize("pool", [{"grace": "0s"}], indirect=True)
def test_a_person_may_decide_instead(pool):
    pool.start(0)
    pool.lend()
    client = pool.client()
    until(lambda: client.status().ready)
    pool.start(1)
    pool.counts(0, 1)
    address = f"127.0.0.1:{pool.ports[0]}"
    number = f"{pool.number(1):016x}"
    code, told = mooncake("standbys", address, "--drop", number)
    assert code
    assert "follows" in told["error"]["message"]
    pool.programs[1].kill()
    with pool.only(0) as only:
        assert "does not follow" in refusal(only)
    assert not client.status().ready
    code, told = mooncake("standbys", address, "--drop", number)
    assert (code, told) == (0, {"dropped": number, "counts": "", "elected": True})
    put(client, ["alone"])
    pool.lose(0)
    pool.programs[1] = pool.run(1)
    pool.never_leads(1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--etcd", "10.0.0.9"), "others would be told 127.0.0.1:50051, where each of them is"),
        (("--host", "0.0.0.0", "--insecure"), "0.0.0.0:50051 is no address that the other members"),
        (("--etcd", "h:1,h:1"), "member.etcd: 'h:1,h:1' names h:1 more than once"),
        (("--name", "a/b"), "member.name 'a/b' cannot be in a URL"),
        (("--journal", "none"), "members keep what a standby needs, not --journal none"),
        (("--etcd-file", "/nowhere"), "cannot read the secret file /nowhere"),
    ],
)
def test_what_no_member_can_be_is_told_at_its_start(start_program, tmp_path, options, said):
    program = start_program("-m", "mooncake_store", "member", "--state", tmp_path, *options)
    assert program.wait() == 3
    assert said in program.output
