"""Where segments are found by name: one small interface, and a file per place to keep the names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transfer_engine.directory.base import Directory

__all__ = ["SCHEMES", "create"]

SCHEMES = ("memory", "http", "etcd", "redis")
"""What `create` takes; peers find each other without any of these."""


def create(url: str, *, secret: bytes | None = None) -> Directory:
    """Build a directory from its URL: `memory:`, `http://host:port`, `etcd://...`, `redis://...`.

    `secret` is the shared secret of an HTTP server, or the password of Redis. Asks nobody.
    """
    from transfer_engine.errors import ConfigError

    scheme, _, rest = url.partition(":")
    where = rest.removeprefix("//").rstrip("/")
    if scheme == "memory" and not where:
        from transfer_engine.directory.memory import MemoryDirectory

        return MemoryDirectory()
    if scheme == "http" and where:
        from transfer_engine.directory.http import HttpDirectory

        return HttpDirectory(where, secret=secret)
    if scheme == "etcd" and where:
        from transfer_engine.directory.etcd import EtcdDirectory

        return EtcdDirectory(where)
    if scheme == "redis" and where:
        from transfer_engine.directory.redis import RedisDirectory

        return RedisDirectory(where, password=secret)
    import difflib

    near = difflib.get_close_matches(scheme, SCHEMES, n=1)
    advice = f"did you mean {near[0]!r}?" if near else "for example http://127.0.0.1:8080"
    raise ConfigError(f"{url!r} is not a directory of segments", advice=advice)
