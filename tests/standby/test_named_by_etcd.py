"""Commands about standbys that are told an etcd, or several masters: who is asked, and followed."""

import base64
import json

import msgspec
import pytest

from mooncake_store.cli.shared.standbys import promotion_of
from mooncake_store.coordination.directory import Place
from mooncake_store.errors import UnavailableError
from mooncake_store.wire.standby import PROMOTE, PromoteRequest
from tests.coordination.etcds import Etcd, free_ports
from tests.standby import asking
from tests.standby.asking import mooncake
from tests.standby.members import Members, assert_there, put
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

QUICK = ("--ping-interval", "200ms")


@pytest.fixture
def etcd(start_program, tmp_path):
    return Etcd(start_program, tmp_path / "etcd")


@pytest.fixture
def pool(start_program, tmp_path, etcd):
    made = Members(start_program, tmp_path, etcd.addresses[0])
    yield made
    made.close()


def text_of(data):
    """Bytes as an etcd is told them."""
    return base64.b64encode(data).decode()


def refusal(address):
    """Why a standby is not promoted."""
    with pytest.raises(UnavailableError) as caught:
        asking.ask(address, PROMOTE, PromoteRequest())
    return caught.value.what.removeprefix("this standby cannot be promoted: ")


def follows(address, leader):
    """Wait until a standby has a whole copy of whoever leads there."""
    asking.until_copied(address)
    until(lambda: asking.status(address).leader == leader)


def test_a_standby_that_is_no_member_follows_whoever_leads_and_nobody_waits_for_it(
    pool, etcd, start_program, tmp_path
):
    def standbys():
        code, told = mooncake("standbys", pool.by_etcd)
        assert code == 0
        return {each["address"]: each["counts"] for each in told["standbys"]}

    members = [f"127.0.0.1:{port}" for port in pool.ports]
    assert pool.start(0)["leads"]
    copy = start_program(
        "-m", "mooncake_store", "standby", "--json", "--of", pool.by_etcd, "--port", 0,
        "--state", tmp_path / "copy", *QUICK,
    )  # fmt: skip
    address = json.loads(copy.wait_for_line('"ready"'))["address"]
    pool.lend(f"{pool.masters},{address}")
    client = pool.client(f"mooncake://{pool.masters},{address}")
    until(lambda: client.status().ready)
    for key in ("alone", "still"):
        before = asking.status(address).shards[0].position
        put(client, [key])
        asking.until_copied(address, before)
    follows(address, members[0])
    assert promotion_of(asking.status(address))["loses"] == "the last changes"
    assert not pool.start(1)["leads"]
    pool.counts(0, 1)  # and not the copy, which was there first
    put(client, ["both"])
    until(lambda: standbys() == {address: False, members[1]: True})
    code, told = mooncake("promote", pool.by_etcd, "--check")
    assert (code, told["leader"]) == (0, members[0])
    assert [(each["address"], each["could_lead"]) for each in told["standbys"]] == [
        (members[1], True)
    ]
    code, told = mooncake("promote", pool.by_etcd)
    assert (code, told["error"]["message"]) == (2, "the members that an etcd knows elect who leads")
    pool.lose(0)
    pool.leads(1)
    until(lambda: client.status().ready)
    put(client, ["other"])
    follows(address, members[1])
    assert refusal(address).endswith(": stop that first")
    # Nobody is left who is elected, but the etcd says that somebody is.
    pool.programs[1].kill()
    key, value = b"mooncake/pool/leaders/leader", msgspec.json.encode(Place("127.0.0.1:1", 1))
    etcd.post("kv/put", {"key": text_of(key), "value": text_of(value)})
    until(lambda: refusal(address).startswith(f"{pool.by_etcd} says that 127.0.0.1:1 leads"))
    etcd.post("kv/deleterange", {"key": text_of(key)})
    asking.promote(address)
    copy.wait_for_line('"leads": true')
    until(lambda: client.exists("other"))
    assert_there(client, ["alone", "still", "both", "other"])
    assert client.master == address


def test_whoever_is_named_wrongly_is_told_which_key_was_looked_up(
    pool, etcd, start_program, tmp_path
):
    wrong = pool.by_etcd + "s"
    for command in (
        ["standbys", wrong],
        ["promote", wrong, "--check"],
        ["shard", "list", "--url", wrong],
    ):
        code, told = mooncake(*command)
        assert code == 4
        assert "no key begins with mooncake/pools/" in told["error"]["message"]
    # Those that stay wait for a pool of that name, and say so.
    ports = free_ports(2)
    for port, command in zip(ports, (["standby"], ["shard", "serve"]), strict=True):
        program = start_program(
            "-m", "mooncake_store", *command, "--of", wrong, "--port", port,
            "--state", tmp_path / str(port),
        )  # fmt: skip
        program.wait_for_line("no key begins with mooncake/pools/")
    key, value = b"mooncake/pools/members/1", msgspec.json.encode(Place("127.0.0.1:1", 1))
    etcd.post("kv/put", {"key": text_of(key), "value": text_of(value)})
    lacking = f"nothing was heard of its leader {wrong} yet: no master answers: 127.0.0.1:1: "
    until(lambda: asking.status(f"127.0.0.1:{ports[0]}").lacking.startswith(lacking))
    (tmp_path / "etcd.toml").write_text('user = "somebody"')
    for command in (["standbys", wrong], ["promote", wrong, "--check"], ["standby", "--of", wrong]):
        code, told = mooncake(*command, "--etcd-file", str(tmp_path / "etcd.toml"))
        assert code == 3
        assert "etcd.toml" in told["error"]["message"]
