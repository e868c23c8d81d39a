"""Checks of settings that their type does not make; which of them apply, `settings.py` says.

Each raises Contradiction, which names the settings for the loader. O(length of the value).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake_store.config.setting import Contradiction, Settings, settings_of
from mooncake_store.endpoint import (
    LOCAL,
    check_namespace,
    is_local,
    is_loopback,
    split_address,
    split_offload,
    split_quota,
    split_rail,
)
from mooncake_store.units import MIB
from transfer_engine.errors import ConfigError
from transfer_engine.rpc.networks import Networks

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "check_address",
    "check_cold",
    "check_exposure",
    "check_kept_pool",
    "check_list",
    "check_memory",
    "check_own_namespace",
    "check_namespace_offloads",
    "check_networks",
    "check_order",
    "check_quotas",
    "check_rails",
]

QUOTAS_MAX = 64
"""Namespaces with a quota: a shard tells the eviction order of each of every use of an object."""


def check_list(table: str, name: str, items: tuple[object, ...], *, distinct: bool = True) -> None:
    """Refuse a list of nothing, and, unless they may be equal, one that names something twice."""
    if not items:
        raise Contradiction(f"{table}.{name} must name at least one", name)
    repeated = sorted({str(item) for item in items if items.count(item) > 1})
    if distinct and repeated:
        raise Contradiction(f"{table}.{name} names {repeated[0]} more than once", name)


def check_address(
    table: str,
    name: str,
    address: str,
    split: Callable[[str], object] = split_address,
) -> None:
    """Refuse what `split` says is no address."""
    try:
        split(address)
    except ConfigError as error:
        raise Contradiction(f"{table}.{name}: {error.what}", name) from None


def check_order(config: Settings, small: str, large: str, why: str, *, strict: bool) -> None:
    """Refuse a setting that is larger than the one it must be below."""
    settings = {setting.name: setting for setting in settings_of(type(config))}
    low, high = (getattr(config, settings[name].attribute) for name in (small, large))
    if low < high or (low == high and not strict):
        return
    relation = "longer than" if strict else "at least as long as"
    raise Contradiction(
        f"{config.table}.{large} ({settings[large].kind.show(high)}) must be {relation} "
        f"{small} ({settings[small].kind.show(low)})" + (f": {why}" if why else ""),
        small,
        large,
    )


def check_memory(table: str, memory: str) -> None:
    """Refuse what is neither a way to have memory nor a folder."""
    if memory not in ("auto", "anonymous") and not memory.startswith("/"):
        raise Contradiction(
            f"{table}.memory must be auto, anonymous or the whole path of a folder, not {memory!r}",
            "memory",
        )


def check_own_namespace(table: str, namespace: str) -> None:
    """Refuse what no URL of a store can name as its namespace, unless it is empty."""
    if namespace:
        try:
            check_namespace(f"{table}.namespace", namespace)
        except ConfigError as error:
            raise Contradiction(error.what, "namespace") from None


def check_kept_pool(table: str, state: str, url: str) -> None:
    """Refuse to keep a pool that is not the client's own."""
    if state and not is_local(url):
        raise Contradiction(
            f"{table}.state keeps the pool of {LOCAL}, and {url} is another one, which its master "
            "keeps",
            "state",
            "url",
        )


def check_quotas(table: str, quotas: tuple[str, ...], shards: int) -> None:
    """Refuse too many quotas, two of one namespace, and less than each shard can divide."""
    if len(quotas) > QUOTAS_MAX:
        raise Contradiction(
            f"{table}.quotas names {len(quotas)} namespaces, and {QUOTAS_MAX} is the most: leave "
            "those without a quota out",
            "quotas",
        )
    names = []
    for quota in quotas:
        try:
            name, quota_bytes = split_quota(quota)
        except ConfigError as error:
            raise Contradiction(f"{table}.quotas: {error.what}", "quotas") from None
        if quota_bytes < shards * MIB:
            raise Contradiction(
                f"{table}.quotas: {quota!r} is less than 1MiB for each of {shards} shards",
                "quotas",
                "shards",
            )
        names.append(name)
    if names:
        check_list(table, "quotas", tuple(names))


def check_namespace_offloads(table: str, offloads: tuple[str, ...]) -> None:
    """Refuse what is no policy of a namespace, and two of one."""
    try:
        names = tuple(split_offload(each)[0] for each in offloads)
    except ConfigError as error:
        raise Contradiction(
            f"{table}.namespace_offloads: {error.what}", "namespace_offloads"
        ) from None
    if names:
        check_list(table, "namespace_offloads", names)


def check_networks(table: str, networks: tuple[str, ...]) -> None:
    """Refuse what is no network."""
    try:
        Networks(networks)
    except ConfigError as error:
        raise Contradiction(f"{table}.data_networks: {error.what}", "data_networks") from None


def check_exposure(table: str, host: str, secret_file: str, insecure: bool) -> None:
    """Refuse an address that others reach and that nothing guards."""
    if insecure and secret_file:
        raise Contradiction(
            f"{table}.insecure and {table}.secret_file exclude each other: leave out one of them",
            "insecure",
            "secret_file",
        )
    if not (secret_file or insecure or is_loopback(host)):
        raise Contradiction(
            f"{table}.host {host!r} can be reached from other machines, so set secret_file, "
            "or insecure if everybody there may read and change everything",
            "host",
            "secret_file",
            "insecure",
        )


def check_rails(table: str, rails: tuple[str, ...], transports: tuple[str, ...]) -> None:
    """Refuse further addresses that nobody would use, or that are none."""
    if rails and "tcp" not in transports:
        raise Contradiction(
            f"{table}.rails are addresses for tcp, which {table}.transports leaves out",
            "rails",
            "transports",
        )
    for rail in rails:
        check_address(table, "rails", rail, split_rail)


def check_cold(
    url: str, keys: str, name: str, memory: str, hugepages: str, transports: tuple[str, ...]
) -> None:
    """Refuse a store that the worker's next run would not find, or that nobody could read."""
    if not url:
        if keys:
            raise Contradiction(
                "worker.cold_keys seals what lies in a store elsewhere, and worker.cold_url names "
                "none: memory and disks are not sealed",
                "cold_keys",
                "cold_url",
            )
        return
    kept = name and memory != "anonymous"
    if not kept or (memory, hugepages) == ("auto", "require"):
        raise Contradiction(
            "worker.cold_url names a store where a worker finds what is its own by its "
            "worker.name and a record beside its worker.memory, and this one has none",
            "cold_url",
            "name",
            "memory",
        )
    if "tcp" not in transports:
        raise Contradiction(
            "worker.cold_url names what others read over tcp, which worker.transports leaves out",
            "cold_url",
            "transports",
        )
