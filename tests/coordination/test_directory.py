"""Looking up who the members of a pool are: what an etcd says, how soon, and how it is asked."""

import asyncio
import json
import ssl
import stat
import time
from base64 import b64encode
from itertools import count

import pytest
from cryptography import x509

from mooncake_store.coordination import exchange as module
from mooncake_store.coordination.access import Access, read_access
from mooncake_store.coordination.calls import Call
from mooncake_store.coordination.directory import Directory
from mooncake_store.coordination.etcd import EtcdCoordinator
from mooncake_store.coordination.exchange import Exchange, exchange, exchange_async
from mooncake_store.standby.member import LED
from tests.coordination.etcds import certificate, free_ports
from tests.strangers import Stranger
from tests.waiting import PATIENCE_S, long_before
from transfer_engine.errors import (
    AuthError,
    ConfigError,
    InvalidArgumentError,
    RemoteProtocolError,
    StoreError,
    TransferTimeoutError,
    UnavailableError,
)
from transfer_engine.rpc.address import Address

NUMBERS = count()


def blocking(asked):
    return exchange(asked)


def on_a_loop(asked):
    return asyncio.run(exchange_async(asked))


both_ways = pytest.mark.parametrize("carry_out", [blocking, on_a_loop])


def followed(lookup, carry_out):
    """What a lookup returns, and whom it asked for what."""
    asked = []
    try:
        step = next(lookup)
        while True:
            asked.append((str(step.place), step.call.operation))
            step = lookup.send(carry_out(step))
    except StopIteration as end:
        return end.value, asked


def saying(**values):
    """An answer of an etcd that has these values of the pool `prod`."""
    pairs = [
        {
            "key": b64encode(f"mooncake/prod/{name.replace('_', '/')}".encode()).decode(),
            "value": b64encode(value.encode()).decode(),
        }
        for name, value in values.items()
    ]
    return b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps({"header": {}, "kvs": pairs}).encode()


def place(address, number=1):
    return json.dumps({"address": address, "number": number})


def found(**values):
    directory = Directory([("e", 2379)], "prod", Access())
    return followed(directory.look_up(time.monotonic() + 1), lambda _: saying(**values))[0]


def test_who_leads_comes_first_and_nobody_twice():
    told = found(
        leaders_leader=place("b:2"), members_1=place("a:1"), members_2=place("b:2"), led="2"
    )
    assert told.leader == Address("b", 2)
    assert told.places == (Address("b", 2), Address("a", 1))
    told = found(members_1=place("a:1"), members_2=place("[::1]:2"))
    assert told == ((Address("a", 1), Address("::1", 2)), None)


@pytest.mark.parametrize("value", ["", "a:1", "{}", '{"address": 1}', place("a"), place("a:b:c:x")])
def test_what_others_wrote_there_is_nobody(value):
    told = found(leaders_leader=value, members_1=value, members_2=place("a:1"))
    assert told == ((Address("a", 1),), None)
    with pytest.raises(
        UnavailableError,
        match="no member of the pool 'prod' is there: no key begins with mooncake/prod/members/",
    ):
        found(members_1=value)


def test_a_pool_that_never_was_is_told_from_one_that_is_away():
    with pytest.raises(UnavailableError, match=r"no pool was ever called 'prod'.*check the name"):
        found()
    with pytest.raises(UnavailableError, match=r"no member of .*; start one: mooncake member --e"):
        found(led="1")


def test_a_pool_that_cannot_be_is_refused():
    with pytest.raises(InvalidArgumentError, match="cannot be a namespace"):
        Directory([("e", 2379)], "a" * 256, Access())


@both_ways
def test_two_pools_in_one_etcd_do_not_see_each_other(shared_etcd, carry_out):
    name = f"pool{next(NUMBERS)}"

    async def register():
        for pool, address in ((name, "a:1"), (f"{name}0", "b:2")):
            async with EtcdCoordinator(shared_etcd.addresses, pool) as coordinator:
                await coordinator.put("members/1", place(address).encode())
                await coordinator.put(LED, b"1")

    asyncio.run(register())
    etcd = [Address.parse(each) for each in shared_etcd.addresses]
    for pool, host in ((name, "a"), (f"{name}0", "b")):
        directory = Directory([(e.host, e.port) for e in etcd], pool, Access())
        told, _ = followed(directory.look_up(time.monotonic() + PATIENCE_S), carry_out)
        assert [each.host for each in told.places] == [host]


@both_ways
def test_members_of_the_etcd_are_asked_in_turn_beginning_with_the_one_that_answered(
    shared_etcd, carry_out
):
    (nobody,) = free_ports(1)
    there = Address.parse(shared_etcd.addresses[0])
    with Stranger(b"") as silent:  # accepts, reads, and never answers
        etcd = [("127.0.0.1", nobody), ("127.0.0.1", silent.port), (there.host, there.port)]
        directory = Directory(etcd, f"nobody{next(NUMBERS)}", Access())
        for turn in range(2):
            asked = []

            def carried_out(step, asked=asked):
                asked.append(step.place.port)
                return carry_out(step)

            with pytest.raises(UnavailableError, match="no pool was ever called"):
                followed(directory.look_up(time.monotonic() + 2), carried_out)
            assert asked == [nobody, silent.port, there.port][2 * turn :]


@both_ways
def test_an_etcd_that_is_gone_silent_or_no_etcd_is_named(carry_out):
    (nobody,) = free_ports(1)

    def refusal(port, timeout_s=PATIENCE_S):
        directory = Directory([("127.0.0.1", port)], "prod", Access())
        with pytest.raises(StoreError) as caught:
            followed(directory.look_up(time.monotonic() + timeout_s), carry_out)
        assert caught.value.peer == f"127.0.0.1:{port}"
        return caught.value

    with long_before(PATIENCE_S):
        assert type(refusal(nobody)) is UnavailableError
        with Stranger(b"") as silent:
            error = refusal(silent.port, 0.1)
        assert type(error) is TransferTimeoutError
        assert 0.1 <= error.elapsed_s < PATIENCE_S / 2
        for answer, advice in (
            (b"SSH-2.0-OpenSSH_9.2\r\n", "where an etcd of version 3.4"),
            (b"HTTP/1.1 404 Not Found\r\n\r\nNot Found", "where an etcd of version 3.4"),
            (b"HTTP/1.1 200 OK\r\n\r\n<html>", "where an etcd of version 3.4"),
            (b"MC\r\n\0\0\0\0", "a master listens there, which is named by mooncake://HOST"),
        ):
            with Stranger(answer, ends=True) as other:
                error = refusal(other.port)
            assert type(error) is RemoteProtocolError
            assert advice in str(error)
        with Stranger(b"", ends=True) as other:
            assert "it hung up" in str(refusal(other.port))


@both_ways
def test_an_answer_without_an_end_is_left(monkeypatch, carry_out):
    monkeypatch.setattr(module, "ANSWER_BYTES_MAX", 4096)
    with Stranger(b"x" * 100_000) as other, long_before(PATIENCE_S):
        call = Call(Address("127.0.0.1", other.port), "look up", "kv/range", {})
        error = carry_out(Exchange(call, call.request(), PATIENCE_S))
    assert isinstance(error, RemoteProtocolError)
    assert "without an end" in str(error)


def access_file(folder, text):
    path = folder / "etcd.toml"
    path.write_text(text)
    path.chmod(stat.S_IRUSR | stat.S_IWUSR)
    return str(path)


@pytest.fixture
def guarded(start_etcd, tmp_path):
    """An etcd with TLS that asks for certificates, and knows the users root and reader.

    Returns its port, and a function that makes a file of what is shown to it.
    """
    cert, key = certificate(tmp_path)
    mine, my_key = certificate(tmp_path, "mine", x509.NameOID.ORGANIZATION_NAME)
    (tmp_path / "ca.crt").write_bytes(cert.read_bytes() + mine.read_bytes())
    tls = "--cert-file", cert, "--key-file", key, "--trusted-ca-file", tmp_path / "ca.crt"
    etcd = start_etcd(1, *tls, "--client-cert-auth", scheme="https")

    def shown(user="", password="secret", mine=mine, my_key=my_key):
        lines = f'ca = "{cert.name}"\ncert = "{mine.name}"\nkey = "{my_key}"\n'
        if user:
            lines += f'user = "{user}"\npassword = "{password}"\n'
        return access_file(tmp_path, lines)

    async def prepare():
        root = EtcdCoordinator(etcd.addresses, "prod", access=read_access(shown()))
        await root.put("members/1", place("a:1").encode())
        for name in ("root", "reader"):
            user, role = {"name": name, "password": "secret"}, {"user": name, "role": name}
            await root._gateway.ask("prepare", "auth/user/add", user)
            await root._gateway.ask("prepare", "auth/role/add", {"name": name})
            await root._gateway.ask("prepare", "auth/user/grant", role)
        span = {"permType": "READ", "key": b"mooncake/prod/", "range_end": b"mooncake/prod0"}
        await root._gateway.ask("prepare", "auth/role/grant", {"name": "reader", "perm": span})
        await root._gateway.ask("prepare", "auth/enable", {})

    asyncio.run(prepare())
    return Address.parse(etcd.addresses[0]).port, shown


@both_ways
def test_a_user_and_a_certificate_are_shown(guarded, tmp_path, carry_out):
    port, shown = guarded

    def look_up(file, pool="prod"):
        directory = Directory([("127.0.0.1", port)], pool, read_access(file))
        return followed(directory.look_up(time.monotonic() + PATIENCE_S), carry_out)

    told, asked = look_up(shown("reader"))
    assert told.places == (Address("a", 1),)
    assert [operation for _, operation in asked] == ["log in", "look up"]
    for user, password, pool, said in (
        ("reader", "secret", "other", r"permission denied.*check the user"),
        ("reader", "wrong", "prod", "check the user"),
        ("", "", "prod", "check the user"),
    ):
        with pytest.raises(AuthError, match=said):
            look_up(shown(user, password), pool)
    with pytest.raises(AuthError, match=r"CommonName.*a certificate without a common name"):
        look_up(shown("reader", mine=tmp_path / "etcd.crt", my_key=tmp_path / "etcd.key"))
    for authority in ("etcd.crt", "mine.crt"):  # nothing of our own; the wrong one
        with pytest.raises(UnavailableError, match="certificate"):
            look_up(access_file(tmp_path, f'ca = "{authority}"\n'))
    with pytest.raises((RemoteProtocolError, UnavailableError)):
        look_up("")


def test_a_file_says_all_there_is_to_show(tmp_path):
    assert read_access("") == Access()
    text = 'user = "u"\npassword = "p"\n'
    assert read_access(access_file(tmp_path, text)) == Access("u", "p")
    cert, key = certificate(tmp_path)
    access = read_access(access_file(tmp_path, f'cert = "{cert.name}"\nkey = "{key}"\n'))
    assert (access.user, access.tls.verify_mode) == ("", ssl.CERT_REQUIRED)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("user =", "is not valid TOML"),
        ('users = "u"', "says 'users', which is nothing.*user, password, ca, cert, key"),
        ("user = 7\npassword = 8", "'user' in .* must be text"),
        ('user = "u"', "must say 'user' and 'password', or neither"),
        ('key = "k"', "must say 'cert' and 'key', or neither"),
        ('ca = "nowhere"', "the authorities in .*nowhere cannot be used.*No such file"),
        ('ca = "etcd.toml"', "the authorities in .*etcd.toml cannot be used"),
        ('ca = "etcd.crt"\ncert = "etcd.crt"\nkey = "etcd.crt"', "the certificate .* the key .*"),
    ],
)
def test_a_file_that_says_what_cannot_be_is_refused(tmp_path, text, said):
    certificate(tmp_path)
    with pytest.raises(ConfigError, match=said):
        read_access(access_file(tmp_path, text))


def test_a_file_that_others_can_read_is_refused(tmp_path):
    path = access_file(tmp_path, "")
    (tmp_path / "etcd.toml").chmod(0o644)
    with pytest.raises(ConfigError, match="others can read"):
        read_access(path)
