"""What is open on this host or in a pool, and who may do what: findings of the doctor.

    settings = examine_access(file="mooncake.toml")     # what programs would run with here
    asked = ask_master("10.0.0.5:50051", secret)

Settings are read as programs read them, the files that they name are looked at, and nothing is
changed. What would keep a program from starting is a problem, what opens more than is usual a
warning, and what one should have in mind a note. O(credentials).
"""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mooncake_store.config.loading import load_settings
from mooncake_store.config.settings import PROGRAMS, MasterConfig, WorkerConfig
from mooncake_store.credentials import look, secret_in
from mooncake_store.doctor import Finding, Severity
from mooncake_store.endpoint import is_loopback, split_quota
from mooncake_store.errors import AuthError, ConfigError, StoreError
from mooncake_store.limits import limits_text
from mooncake_store.sealing_keys import ring_at
from mooncake_store.wire.cluster import CLUSTER, MAP, MapRequest
from transfer_engine.rpc.address import Address
from transfer_engine.rpc.blocking import BlockingConnection
from transfer_engine.rpc.reached import ANY
from transfer_engine.segments.sealing import ALL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mooncake_store.config.guarded import Guarded
    from mooncake_store.credentials import Entry
    from transfer_engine.wire.keyring import Secret
    from transfer_engine.wire.rights import Rights

__all__ = ["SOON_S", "ask_master", "examine_access"]

OK, NOTE, WARNING, PROBLEM = Severity

SOON_S = 7 * 86_400
"""A credential that ends within this is told."""
_ASK_S = 5.0
_XXH3 = "xxh3"
_NAMED = 4
"""Namespaces that a finding names."""
_MAY = {
    "reader": "find, read and list",
    "writer": "put, change and remove objects",
    "worker": "lend memory, and put, change and remove objects",
    "admin": "do everything",
}


def examine_access(
    file: str | os.PathLike[str] | None = None,
    secret_file: str | None = None,
    credentials: str | None = None,
    now: float | None = None,
) -> list[Finding]:
    """Look at what a master and a worker would run with here, and at the files that it names.

    Options stand for what a configuration and the environment say otherwise.
    """
    given = {"secret_file": secret_file, "credentials": credentials}
    found, secrets, directories = [], set(), set()
    held: set[str] = set()
    for program in (MasterConfig, WorkerConfig):
        try:
            config = load_settings(program, PROGRAMS, file=file, overrides=given).value
        except ConfigError as error:
            advice = error.advice or "correct the setting"
            found.append(Finding(f"settings of a {program.table}", PROBLEM, error.what, advice))
            continue
        found += _settings(config)
        if isinstance(config, WorkerConfig) and config.cold_url:
            found.append(_cold_keys(config))
        secrets |= {config.secret_file} - {""}
        directories |= {config.credentials} - {""}
        if isinstance(config, MasterConfig):
            held |= {split_quota(quota)[0] for quota in config.quotas}
    found += [_secret_file(each, bool(directories)) for each in sorted(secrets)]
    for each in sorted(directories):
        found += _directory(each, held, time.time() if now is None else now)
    return found


def _settings(config: Guarded) -> Iterator[Finding]:
    """Say who comes in at a program's ports."""
    assert isinstance(config, MasterConfig | WorkerConfig)
    name, near = f"{config.table}.host", is_loopback(config.host)
    if config.insecure:
        who = "every user of this host" if near else f"whoever reaches {config.host}"
        yield Finding(
            f"{config.table}.insecure", WARNING, f"{who} may read and change everything",
            "leave it out" if near else "leave it out, and name a secret_file",
        )  # fmt: skip
    elif config.secret_file:
        yield Finding(name, OK, f"{config.host}, for who proves a secret")
    else:
        yield Finding(name, OK, f"{config.host}, for user {os.geteuid()} of this host")
    if ANY in config.reached_as:
        yield Finding(
            f"{config.table}.reached_as", WARNING,
            "any: nobody notices who stands between a client and this program",
            "name the services, forwarded ports and tunnels that lead here, by their addresses",
        )  # fmt: skip
    if isinstance(config, MasterConfig) and config.identity == _XXH3:
        yield _guessable(f"{config.table}.identity")


def _guessable(name: str) -> Finding:
    return Finding(
        name, WARNING, f"{_XXH3}: who chooses keys can make two of them meet, in any namespace",
        "begin the pool with --identity keyed, unless programs that make digests feed it",
    )  # fmt: skip


def _cold_keys(config: WorkerConfig) -> Finding:
    """Say whether what lies in a store elsewhere is sealed, and by whose keys."""
    name, path = "worker.cold_keys", config.cold_keys
    if not path:
        return Finding(
            name, NOTE, f"whoever can read {config.cold_url} reads what lies there",
            "make keys with `mooncake secret key`, and name their directory as cold_keys",
        )  # fmt: skip
    try:
        ring = ring_at(path)
    except ConfigError as error:
        advice = error.advice or "see that this user may read it"
        return Finding(name, PROBLEM, error.what, advice)
    else:
        others = "sealed by that of all others" if ring.of(ALL) else "not written there"
        return Finding(name, OK, f"{len(ring.ids)} keys; what has none of its own is {others}")


def _secret_file(path: str, guards: bool) -> Finding:
    """Look at a file with a secret; it `guards` a port where there are credentials as well."""
    name = f"secret file {path}"
    try:
        secret = secret_in(path)
        mode = stat.S_IMODE(Path(path).expanduser().stat().st_mode)
    except (ConfigError, OSError) as error:
        advice = getattr(error, "advice", "") or "see that this user may read it"
        return Finding(name, PROBLEM, str(getattr(error, "what", error)), advice)
    if mode & stat.S_IRGRP:
        return Finding(
            name, WARNING, f"mode {mode:04o}: its group may read it", f"run: chmod 600 {path}"
        )
    if not isinstance(secret, bytes):
        assert secret is not None
        told = f"the credential of {secret.own.principal}"
        if guards:
            return Finding(
                name, NOTE, f"{told}: a worker may run with it, no master can",
                "give masters the pool's secret",
            )  # fmt: skip
        return Finding(name, OK, told)
    return Finding(name, OK, "the pool's secret, for this user alone")


def _directory(directory: str, held: set[str], now: float) -> Iterator[Finding]:
    """Say of each principal what it may, what stands out, and which files are not believed.

    `held` are the namespaces with a quota.
    """
    try:
        entries, others = look(directory)
    except ConfigError as error:
        advice = error.advice or "see that this user may read it"
        yield Finding(f"credentials {directory}", PROBLEM, error.what, advice)
        return
    yield Finding(f"credentials {directory}", OK, f"{len(entries)} principals")
    for file, why in others.items():
        yield Finding(
            f"credential file {file}", PROBLEM, f"not believed: {why.what}",
            why.advice or "make it anew with `mooncake secret make`, or remove it",
        )  # fmt: skip
    shared = {name for entry in entries.values() for name in entry.namespaces}
    for principal, entry in entries.items():
        rights = entry.rights(principal, now)
        yield _credential(principal, entry, rights, now)
        yield from _readable(directory, principal, entry)
        if rights is not None:
            yield from _wide(principal, entry, shared, held)


def _credential(principal: str, entry: Entry, rights: Rights | None, now: float) -> Finding:
    """Say what a principal may do and how much of it, unless that ends."""
    name = f"credential of {principal}"
    if rights is None:
        return Finding(
            name, WARNING, "has run out, so nobody comes in with it",
            f"`mooncake secret revoke`, and `make` it anew if {principal} still needs it",
        )  # fmt: skip
    if rights.until - now <= SOON_S:
        return Finding(
            name, WARNING, f"runs out in {_days(rights.until - now)}",
            "`mooncake secret rotate` if its secret ends, else `revoke` it and `make` another",
        )  # fmt: skip
    where = ", ".join(entry.namespaces) or "all namespaces"
    limits = limits_text(entry.limits)
    bounds = f"limited to {limits}" if limits else "without limits"
    return Finding(name, OK, f"{entry.role} of {where}, who may {_MAY[entry.role]}; {bounds}")


def _readable(directory: str, principal: str, entry: Entry) -> Iterator[Finding]:
    """Say of a file that is believed who else can read it. Others than its group cannot."""
    file = Path(directory).expanduser() / f"{principal}.json"
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
    except OSError:  # it was taken away meanwhile
        return
    if mode & stat.S_IRGRP:
        yield Finding(
            f"credential file {file.name}", WARNING,
            f"mode {mode:04o}: its group may read the secret, and come in as the {entry.role}",
            f"run: chmod 600 {file}",
        )  # fmt: skip


def _wide(principal: str, entry: Entry, shared: set[str], held: set[str]) -> Iterator[Finding]:
    """Say what a principal may beyond what its like need, in a pool of these namespaces."""
    name = f"credential of {principal}"
    if entry.role == "admin":
        yield Finding(
            name, NOTE, "an admin: it may drain, move, split and promote",
            "give programs that only read and write a reader or writer",
        )  # fmt: skip
    elif not entry.namespaces and entry.role != "worker":
        worse = entry.role == "writer" and shared
        yield Finding(
            name, WARNING if worse else NOTE,
            f"a {entry.role} of all namespaces"
            + (f", those of others included: {_some(shared)}" if worse else ""),
            "name those that it is for: `mooncake secret make --namespace`",
        )  # fmt: skip
    free = sorted(set(entry.namespaces) - held)
    if entry.role == "writer" and free and len(shared) > 1 and "bytes" not in entry.limits:
        yield Finding(
            f"limits of {principal}", WARNING,
            f"nothing limits what it puts, so it can take the room of others in {_some(shared)}",
            "`mooncake secret make --limit bytes=SIZE`, or a quota: "
            f"`mooncake master --quota {free[0]}=SIZE`",
        )  # fmt: skip


def _some(names: set[str]) -> str:
    first = sorted(names)
    more = f" and {len(first) - _NAMED} more" if len(first) > _NAMED else ""
    return ", ".join(first[:_NAMED]) + more


def _days(seconds: float) -> str:
    hours = int(seconds // 3600)
    return f"{hours // 24} days" if hours >= 48 else f"{hours} hours"


def ask_master(address: str, secret: Secret | None) -> list[Finding]:
    """Ask a master at host:port whom it lets in, and what of it can be seen from outside."""
    where, name = Address.parse(address), f"master {address}"
    try:
        BlockingConnection.connect(where, CLUSTER, timeout_s=_ASK_S).close()
    except AuthError as error:
        found = [Finding(name, OK, f"who has no secret is refused: {error.what}")]
        if secret is None:
            return found
    except StoreError as error:
        return [Finding(name, PROBLEM, error.what, error.advice or "see that a master runs there")]
    else:
        secret = None
        if is_loopback(where.host):
            found = [Finding(name, OK, "it lets this user in without a secret, from this host")]
        else:
            found = [
                Finding(
                    name, PROBLEM, "whoever reaches it may read and change everything",
                    "start it, and its workers, with a secret_file and without insecure",
                )
            ]  # fmt: skip
    try:
        if _identity(where, secret) == _XXH3:
            found.append(_guessable(f"identity of {address}"))
    except StoreError as error:
        advice = error.advice or "see that it is the secret of this pool"
        found.append(Finding(f"secret for {address}", PROBLEM, error.what, advice))
    return found


def _identity(where: Address, secret: Secret | None) -> str:
    """Return how a pool makes digests; empty where that is not told. Raises StoreError."""
    with BlockingConnection.connect(where, CLUSTER, secret=secret, timeout_s=_ASK_S) as connection:
        request = MAP.request.pack(MapRequest("default"))
        try:
            return MAP.reply.unpack(connection.call(MAP, request, timeout_s=_ASK_S)).identity
        except AuthError:  # a credential for other namespaces
            return ""
