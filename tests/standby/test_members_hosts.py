"""Shards of a pool with elected masters that lead on other hosts: processes and a real etcd."""

import json

import pytest

from tests.coordination.etcds import free_ports
from tests.standby.members import Members, assert_there, elected, put
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

KEYS = [f"key-{number:04d}" for number in range(300)]


class Pool(Members):
    """Members, and hosts that lead shards for whichever of them leads."""

    def host(self, name, *options):
        """Start a host; return its program and where it listens."""
        address = f"127.0.0.1:{free_ports(1)[0]}"
        program = self._start(
            "-m", "mooncake_store", "shard", "serve", "--json", "--of", self.masters, "--port",
            address.rpartition(":")[2], "--state", self._folder / name, *options,
        )  # fmt: skip
        program.wait_for_line('"ready"')
        return program, address

    def move(self, shard, to):
        """Move a shard as people do."""
        url = f"{self.by_etcd}/tests"
        command = self._start("-m", "mooncake_store", "shard", "move", shard, to, "--url", url)
        assert command.wait() == 0, command.output

    def counts_too(self, leader, which):
        """Wait until a member counts, also where others do for shards elsewhere."""
        number = self.number(which)
        until(
            lambda: any(
                each.number == number and each.counts and each.exact and each.follows
                for each in self.standbys(leader)
            )
        )


@pytest.fixture
def pool(start_program, tmp_path):
    with elected(start_program, tmp_path, Pool, shards=2) as made:
        yield made


def test_shards_lead_elsewhere_for_whoever_is_elected_and_come_back(pool):
    pool.start(0)
    pool.lend()
    client = pool.client()
    until(lambda: client.status().ready)
    pool.start(1)
    pool.counts(0, 1)
    put(client, KEYS)
    other, place = pool.host("other")
    pool.host("third", "--copy", "1")
    pool.move(1, place)
    until(lambda: client.status().ready)
    put(client, ["first"])
    pool.programs[0].kill()
    pool.leads(1)
    until(lambda: client.status().ready)
    assert_there(client, [*KEYS, "first"])
    more = [f"more-{number:04d}" for number in range(100)]
    put(client, more)
    assert not pool.start(0)["leads"]
    pool.counts_too(1, 0)
    pool.move(1, "master")
    pool.counts_too(1, 0)
    put(client, ["last"])
    other.kill()
    pool.programs[1].kill()
    pool.leads(0)
    until(lambda: client.status().ready)
    assert_there(client, [*KEYS, "first", *more, "last"])
    assert json.loads(client_hosts(pool))["hosts"][0]["shards"] == [0, 1]


def client_hosts(pool):
    """What `mooncake shard list` says."""
    url = f"{pool.by_etcd}/tests"
    command = pool._start("-m", "mooncake_store", "shard", "list", "--json", "--url", url)
    assert command.wait() == 0, command.output
    return command.output
