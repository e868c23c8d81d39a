"""What names a peer and what proves knowing it: addresses, hosts, store URLs, shared secrets.

Secrets come by reference: a setting holds the path of a file, never the secret, so none ends up in
a log or in `mooncake config show`. An address is `host:port`, with IPv6 in brackets. Where a master
is named there may be several, separated by commas: one of them leads, the others stand by. Or an
etcd is named that knows them, which has a scheme of its own, because any host may be called etcd:

    mooncake://10.0.0.5:50051,10.0.0.6:50051/namespace
    mooncake+etcd://10.0.0.9:2379,10.0.0.10:2379/pool/namespace

Not done here: name resolution and connecting. Everything is O(length of its text).
"""

from __future__ import annotations

import logging
import os
import re
import socket
import stat
from typing import NamedTuple

from mooncake_store.units import MIB, VALUE_MAX, format_size, parse_size
from transfer_engine.errors import ConfigError, InvalidArgumentError

__all__ = [
    "ETCD_PORT",
    "ETCD_SCHEME",
    "Etcd",
    "StoreUrl",
    "check_namespace",
    "host_name",
    "is_local",
    "is_loopback",
    "read_secret",
    "split_address",
    "split_addresses",
    "split_etcd",
    "split_masters",
    "split_offload",
    "split_quota",
    "split_rail",
    "split_url",
]

log = logging.getLogger(__name__)

LOCAL = "mooncake://local"
PORT_DEFAULT = 50051
ETCD_PORT = 2379
ETCD_SCHEME = "mooncake+etcd://"
MASTERS_MAX = 16
OFFLOADS = ("none", "evict", "write")
SECRET_BYTES_MAX = 4096

_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:/@,\[\]]+)):([0-9]{1,5})", re.ASCII)
_URL = re.compile(r"mooncake(?:\+etcd)?://([^/?#]+)(?:/([^?#]*))?", re.ASCII)


class Etcd(NamedTuple):
    """An etcd that knows the masters of a pool, and what the pool is called there."""

    members: tuple[tuple[str, int], ...]
    """Host and port of each member of the etcd."""
    pool: str

    def __str__(self) -> str:
        """Return a URL of it."""
        from transfer_engine.rpc.address import Address  # As in `is_loopback`.

        places = ",".join(str(Address(*place)) for place in self.members)
        return f"{ETCD_SCHEME}{places}/{self.pool}"


class StoreUrl(NamedTuple):
    """The parts of a store URL."""

    masters: tuple[tuple[str, int], ...] | Etcd
    """Host and port of each address at which the master may be, or who knows them."""
    namespace: str


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `"host:port"` or `"[ipv6]:port"`.

    Raises:
        ConfigError: it is neither, or the port is not from 1 to 65535.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None or not 1 <= int(found[3]) <= 65535:
        raise ConfigError(
            f"{address!r} is not an address; write host:port such as '127.0.0.1:50051' "
            "or '[::1]:50051'"
        )
    return found[1] or found[2], int(found[3])


def split_addresses(addresses: str, of: str = "a master") -> tuple[tuple[str, int], ...]:
    """Return host and port of each of `"host:port,host:port"`, in their order.

    `of` is what they are addresses of, for who reads the error.

    Raises:
        ConfigError: one is none, as `split_address` says, one comes twice, or there are too many.
    """
    each = addresses.split(",")
    if "" in map(str.strip, each) and len(each) > 1:
        raise ConfigError(
            f"{addresses!r} has nothing where an address should be; leave a comma out"
        )
    if len(each) > MASTERS_MAX:
        raise ConfigError(f"{len(each)} addresses of {of} are named; {MASTERS_MAX} is the most")
    found = tuple(split_address(address) for address in each)
    for at, place in enumerate(found):
        if place in found[:at]:
            raise ConfigError(f"{addresses!r} names {each[at]} more than once")
    return found


def split_rail(address: str) -> tuple[str, int]:
    """Return host and port of an address to listen on; port 0, any free one, where it has none.

    Raises:
        ConfigError: as `split_address`.
    """
    bare = address.startswith("[") and address.endswith("]")
    if address and (bare or ":" not in address):
        return address.removeprefix("[").removesuffix("]"), 0
    return split_address(address)


def split_etcd(addresses: str) -> tuple[tuple[str, int], ...]:
    """Return host and port of each member of an etcd; port 2379 may be left out.

    Raises:
        ConfigError: as `split_addresses`.
    """
    return split_addresses(_with_ports(addresses, ETCD_PORT), "an etcd")


def split_masters(named: str) -> tuple[tuple[str, int], ...] | Etcd:
    """Return where the masters are that are named by addresses, or by the URL of a store.

    Raises:
        ConfigError: as `split_addresses` and `split_url`.
    """
    return split_url(named).masters if "://" in named else split_addresses(named)


def split_url(url: str) -> StoreUrl:
    """Return the parts of a store URL; ports, the pool and the namespace may be left out.

    Raises:
        ConfigError: it is no such URL, or it carries credentials, which it then does not repeat.
    """
    found = _URL.fullmatch(url)
    if "@" in (found[1] if found else url):
        raise ConfigError(
            "a store URL carries no credentials; name a file in secret_file, or etcd_file, instead"
        )
    if found is None:
        raise ConfigError(
            f"{url!r} is not a store URL; write mooncake://host:port/namespace "
            "such as 'mooncake://127.0.0.1:50051/default', or mooncake+etcd://host:port/pool/"
            "namespace where an etcd knows the masters"
        )
    path = (found[2] or "").strip("/")
    if not url.startswith(ETCD_SCHEME):
        masters = split_addresses(_with_ports(found[1], PORT_DEFAULT))
        return StoreUrl(masters, path or "default")
    pool, _, namespace = path.partition("/")
    return StoreUrl(
        Etcd(split_etcd(found[1]), pool or "default"), namespace.strip("/") or "default"
    )


def _with_ports(places: str, port: int) -> str:
    return ",".join(
        f"{place}:{port}" if place and not _ADDRESS.fullmatch(place) else place
        for place in places.split(",")
    )


def is_local(url: str) -> bool:
    """Whether a store URL asks for a pool inside this process."""
    return url == LOCAL or url.startswith(LOCAL + "/")


def split_quota(quota: str) -> tuple[str, int]:
    """Return namespace and bytes of `"team-a=200GB"`.

    Raises:
        ConfigError: there is no size, none of a mebibyte or more, or no URL has such a namespace.
    """
    name, equals, size = (part.strip() for part in quota.partition("="))
    try:
        quota_bytes = parse_size(size)
    except InvalidArgumentError:
        quota_bytes = -1
    if not equals or quota_bytes < 0:
        raise ConfigError(f"{quota!r} is not a quota; write namespace=size such as 'team-a=200GB'")
    check_namespace(quota, name)
    # Below a mebibyte it is a forgotten unit: `team-a=200`.
    if not MIB <= quota_bytes <= VALUE_MAX:
        raise ConfigError(f"{quota!r} is less than {format_size(MIB)}; give the size with its unit")
    return name, quota_bytes


def split_offload(offload: str) -> tuple[str, str]:
    """Return namespace and policy of `"team-a=write"`.

    Raises:
        ConfigError: there is no such policy, or no URL has such a namespace.
    """
    name, _, policy = (part.strip() for part in offload.partition("="))
    if policy not in OFFLOADS:
        known = ", ".join(OFFLOADS)
        raise ConfigError(f"{offload!r} is none of namespace=POLICY with POLICY one of {known}")
    check_namespace(offload, name)
    return name, policy


def check_namespace(given: str, name: str) -> None:
    """Raise ConfigError where no URL has a namespace that is called so; `given` names it."""
    url = _URL.fullmatch(f"mooncake://host/{name}")
    if "," in name or url is None or url[2].strip("/") != name or not name:
        raise ConfigError(f"{given!r} names {name!r}, which cannot be the namespace of a URL")


def host_name() -> str:
    """Return how placement and listings call this machine."""
    return socket.gethostname()


def is_loopback(host: str) -> bool:
    """Return whether binding to `host` can be reached from this machine only.

    A name other than `localhost` is not resolved and counts as reachable from elsewhere.
    """
    from transfer_engine.rpc import address  # Only programs that bind need it.

    return address.is_loopback(host.strip("[]"))


def read_secret(path: str) -> bytes:
    """Read a shared secret from the file `path`, without the line break at its end.

    Raises:
        ConfigError: as `read_private` does, or it is shorter than 16 bytes.
    """
    from transfer_engine.wire.keyring import SECRET_BYTES_MIN  # Only who has a secret needs it.

    path, value = read_private(path, SECRET_BYTES_MAX + 1)
    value = value.rstrip(b"\r\n")
    if not SECRET_BYTES_MIN <= len(value) <= SECRET_BYTES_MAX:
        raise ConfigError(
            f"the secret file {path} must hold {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes",
            advice=f"make one with: (umask 077; openssl rand -hex 32 > {path})",
        )
    return value


def read_private(path: str, nbytes_max: int) -> tuple[str, bytes]:
    """Read up to so many bytes of a file with secrets; return its whole path as well.

    A file that others may read or change is refused; one that its group may read is accepted
    with a warning, because orchestrators mount secrets that way.

    Raises:
        ConfigError: it cannot be read, or is open to others.
    """
    path = os.path.abspath(os.path.expanduser(path))
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            value = file.read(nbytes_max)
    except OSError as error:
        raise ConfigError(f"cannot read the secret file {path}: {error.strerror}") from None
    if mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        raise ConfigError(
            f"the secret file {path} has mode {mode:04o}, so others can read or change it",
            advice=f"run: chmod 600 {path}",
        )
    if mode & stat.S_IRGRP:
        log.warning("the group of the secret file %s may read it (mode %04o)", path, mode)
    return path, value
