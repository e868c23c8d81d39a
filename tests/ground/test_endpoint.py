"""Addresses, store URLs and secrets."""

import logging
import re

import pytest

from mooncake_store.endpoint import (
    Etcd,
    read_secret,
    split_address,
    split_addresses,
    split_masters,
    split_quota,
    split_url,
)
from mooncake_store.errors import ConfigError

SECRET = b"0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:50051", ("127.0.0.1", 50051)),
        ("node-7.rack_2.example:1", ("node-7.rack_2.example", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("[fe80::1%eth0]:9", ("fe80::1%eth0", 9)),
    ],
)
def test_an_address_is_host_and_port(address, parts):
    assert split_address(address) == parts


@pytest.mark.parametrize(
    "address",
    [
        *("", "host", "host:", ":1", "host:0", "host:65536", "host:x", "::1:5", "a b:1"),
        *("h:1:2", "http://host:1", "host:1\n", "u@host:1", "host:٤"),
    ],
)
def test_what_is_no_address_is_refused_with_examples(address):
    with pytest.raises(ConfigError) as refused:
        split_address(address)
    assert str(refused.value) == (
        f"{address!r} is not an address; write host:port such as '127.0.0.1:50051' or '[::1]:50051'"
    )


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("mooncake://h:7/ns", ((("h", 7),), "ns")),
        ("mooncake://h/ns", ((("h", 50051),), "ns")),
        ("mooncake://h", ((("h", 50051),), "default")),
        ("mooncake://[::1]:7/", ((("::1", 7),), "default")),
        ("mooncake://[::1]/a/b", ((("::1", 50051),), "a/b")),
        (
            "mooncake://h:7,i,[::1]:9,[::2]/ns",
            ((("h", 7), ("i", 50051), ("::1", 9), ("::2", 50051)), "ns"),
        ),
        ("mooncake+etcd://h:7,[::1]/p/ns", (((("h", 7), ("::1", 2379)), "p"), "ns")),
        ("mooncake+etcd://h/p/a/b/", (((("h", 2379),), "p"), "a/b")),
        ("mooncake+etcd://h/p", (((("h", 2379),), "p"), "default")),
        ("mooncake+etcd://h", (((("h", 2379),), "default"), "default")),
        ("mooncake://etcd:2379/p/ns", ((("etcd", 2379),), "p/ns")),
    ],
)
def test_a_store_url_has_defaults_for_port_and_namespace(url, parts):
    assert split_url(url) == parts


@pytest.mark.parametrize(
    ("addresses", "said"),
    [
        ("h:1,", "'h:1,' has nothing where an address should be; leave a comma out"),
        (",h:1", "has nothing where an address should be"),
        ("h:1, ,i:1", "has nothing where an address should be"),
        ("h:1,i:1,h:1", "'h:1,i:1,h:1' names h:1 more than once"),
        ("h:1,i", "'i' is not an address; write host:port"),
        ("h:1, i:1", "' i:1' is not an address; write host:port"),
        (",".join(f"h:{port}" for port in range(1, 18)), "17 addresses of a master are named; 16"),
    ],
)
def test_several_addresses_are_distinct_and_not_too_many(addresses, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        split_addresses(addresses)
    with pytest.raises(ConfigError, match="is not an address"):
        split_address("h:1,i:2")


def test_as_many_addresses_as_may_be_are_split_in_their_order():
    addresses = [f"h:{port}" for port in range(1, 17)]
    assert split_addresses(",".join(addresses)) == tuple(map(split_address, addresses))


def test_an_etcd_is_no_list_of_masters_and_has_a_url():
    masters, _ = split_url("mooncake+etcd://h,[::1]:9/p/ns")
    assert isinstance(masters, Etcd)
    assert str(masters) == "mooncake+etcd://h:2379,[::1]:9/p"
    assert split_masters(str(masters)) == masters
    assert not isinstance(split_masters("h:1,i:2"), Etcd)
    assert split_masters("mooncake://h:1,i:2/ns") == split_masters("h:1,i:2")
    with pytest.raises(ConfigError, match="17 addresses of an etcd are named; 16"):
        split_url(f"mooncake+etcd://{','.join(f'h:{port}' for port in range(1, 18))}/p")
    with pytest.raises(ConfigError, match="carries no credentials"):
        split_url("mooncake+etcd://root:secret@h:2379/p")


def test_a_url_that_names_one_address_twice_is_refused():
    with pytest.raises(ConfigError, match="names h:50051 more than once"):
        split_url("mooncake://h,h:50051/ns")


@pytest.mark.parametrize(
    ("quota", "parts"),
    [
        ("team-a=200GB", ("team-a", 200 * 10**9)),
        (" models/one = 1MiB ", ("models/one", 1 << 20)),
        ("default=1048576", ("default", 1 << 20)),
    ],
)
def test_a_quota_is_a_namespace_and_a_size(quota, parts):
    assert split_quota(quota) == parts


@pytest.mark.parametrize(
    ("quota", "said"),
    [
        *[(text, "write namespace=size such as 'team-a=200GB'") for text in ("", "a", "a=", "a=x")],
        *[(text, "write namespace=size") for text in ("a=-1GB", "a=1GB=2GB", "a:1GB")],
        *[(text, "cannot be the namespace of a URL") for text in ("=1GB", "/a=1GB", "a?=1GB")],
        ("a,b=1GB", "names 'a,b', which cannot be"),
        *[(text, "is less than 1MiB; give the size with its unit") for text in ("a=200", "a=0")],
    ],
)
def test_what_is_no_quota_is_refused(quota, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        split_quota(quota)
    assert repr(quota) in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "h:1",
        "redis://h:1/x",
        "mooncake://",
        "mooncake://h:1?x",
        "etcd://h",
        "mooncake+etcd:///p",
    ],
)
def test_what_is_no_store_url_is_refused(url):
    with pytest.raises(ConfigError, match="is not a store URL; write mooncake://host:port/n") as no:
        split_url(url)
    assert "or mooncake+etcd://host:port/pool/namespace where an etcd knows" in str(no.value)


@pytest.fixture
def secret_file(tmp_path):
    """Return a function that writes a secret file with a mode."""

    def write(value=SECRET + b"\n", mode=0o600):
        path = tmp_path / "secret"
        path.write_bytes(value)
        path.chmod(mode)
        return str(path)

    return write


def test_a_secret_is_read_without_its_line_break(secret_file):
    assert read_secret(secret_file()) == SECRET


@pytest.mark.parametrize("mode", [0o644, 0o602, 0o620, 0o666])
def test_a_secret_open_to_others_is_refused_with_the_remedy(secret_file, mode):
    path = secret_file(mode=mode)
    with pytest.raises(ConfigError) as refused:
        read_secret(path)
    assert str(refused.value) == (
        f"the secret file {path} has mode {mode:04o}, so others can read or change it; "
        f"run: chmod 600 {path}"
    )


def test_a_secret_its_group_may_read_is_accepted_with_a_warning(secret_file, caplog):
    with caplog.at_level(logging.WARNING, logger="mooncake_store"):
        read_secret(secret_file(mode=0o440))
    assert "may read it (mode 0440)" in caplog.text


@pytest.mark.parametrize("value", [b"", b"\n", b"hunter2", b"x" * 5000])
def test_a_secret_too_short_or_too_long_is_refused_without_repeating_it(secret_file, value):
    with pytest.raises(ConfigError, match="must hold 16 to 4096 bytes; make one with: ") as refused:
        read_secret(secret_file(value))
    assert "hunter2" not in str(refused.value)


def test_a_missing_secret_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the secret file .*: No such file"):
        read_secret(str(tmp_path / "none"))


def test_a_secret_may_stand_in_the_home_directory(secret_file, monkeypatch, tmp_path):
    secret_file()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_secret("~/secret") == SECRET
