"""Members of a pool that an etcd elects a leader of: processes, sockets and a real etcd."""

import signal

import pytest

from mooncake_store.errors import StoreError, UnavailableError
from tests.coordination.etcds import Etcd
from tests.standby.members import Members, assert_there, put
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def pool(start_program, tmp_path, request):
    etcd = Etcd(start_program, tmp_path / "etcd")
    made = Members(start_program, tmp_path, ",".join(etcd.addresses), getattr(request, "param", 1))
    yield made
    made.close()


@pytest.mark.parametrize("pool", [1, 2], indirect=True)
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
    pool.programs[1].kill()
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
    pool.begin(1)
    with pytest.raises(UnavailableError):
        pool.client(deadline="8s", connect_timeout="8s")
    assert '"leads": true' not in pool.programs[1].output
    # The one that led last may go on at once.
    assert pool.start(0)["leads"]
    until(lambda: client.status().ready)
    assert_there(client, ["one"])


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
