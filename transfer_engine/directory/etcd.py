"""Names in etcd, through the JSON gateway that every etcd since 3.4 serves beside gRPC.

Directly, without a client library: `etcd3` does not import beside a current protobuf, and what a
directory needs is four requests. So no package is needed and none can break. Values expire with
an etcd lease; each publication with a time to live has a lease of its own, and what it replaces
takes the former lease with it when that ends.

Atomicity is etcd's: "create, or compare with the same value" is one transaction. Several
endpoints, separated by commas, are tried in turn.
Cost: one or two HTTP requests a call.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
from typing import TYPE_CHECKING, Any, ClassVar

from transfer_engine.directory.base import NAMES_MAX, Directory
from transfer_engine.directory.http import exchange
from transfer_engine.errors import ConfigError, RemoteProtocolError, StoreError, UnavailableError
from transfer_engine.rpc.address import Address

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["EtcdDirectory"]

PREFIX = "mooncake/segments/"


def _bytes(value: Any) -> bytes:
    return base64.b64decode(value, validate=True)


def _text(value: str | bytes) -> str:
    raw = value.encode() if isinstance(value, str) else value
    return base64.b64encode(raw).decode()


class EtcdDirectory(Directory):
    """Names kept by the etcd at "host:port", or at the first of several that answers."""

    name: ClassVar[str] = "etcd"

    def __init__(self, endpoints: str, *, prefix: str = PREFIX) -> None:
        self._endpoints = [str(Address.parse(part)) for part in endpoints.split(",") if part]
        if not self._endpoints:
            raise ConfigError("no endpoint of etcd", advice="for example 127.0.0.1:2379")
        self._prefix = prefix

    def _publish(self, name: str, value: bytes, ttl_s: float | None, replace: bool) -> bool:
        key = _text(self._prefix + name)
        put: dict[str, Any] = {"key": key, "value": _text(value)}
        if ttl_s is not None:
            # etcd counts whole seconds; an entry may live longer than asked for, never shorter.
            with self._understood("a lease"):
                put["lease"] = self._ask("lease/grant", {"TTL": math.ceil(ttl_s)})["ID"]
        request = [{"requestPut": put}]
        if replace:
            self._ask("kv/txn", {"success": request})
            return True
        absent = {"key": key, "target": "CREATE", "result": "EQUAL", "createRevision": "0"}
        same = {"key": key, "target": "VALUE", "result": "EQUAL", "value": put["value"]}
        for condition in (absent, same):
            answer = self._ask("kv/txn", {"compare": [condition], "success": request})
            if answer.get("succeeded"):
                return True
        return False

    def _lookup(self, address: str) -> bytes | None:
        found = self._ask("kv/range", {"key": _text(self._prefix + address)}).get("kvs")
        with self._understood("a value"):
            return _bytes(found[0]["value"]) if found else None

    def _withdraw(self, name: str) -> bool:
        answer = self._ask("kv/deleterange", {"key": _text(self._prefix + name)})
        with self._understood("a number"):
            return int(answer.get("deleted", 0)) > 0

    def _names(self, prefix: str) -> list[str]:
        first = (self._prefix + prefix).encode()
        # The end of a range of keys is the first key after it.
        last = first[:-1] + bytes([first[-1] + 1])
        options = {"key": _text(first), "range_end": _text(last), "keys_only": True}
        answer = self._ask("kv/range", {**options, "limit": NAMES_MAX})
        with self._understood("keys"):
            keys = [_bytes(item["key"]) for item in answer.get("kvs", ())]
        return [key.decode(errors="replace").removeprefix(self._prefix) for key in keys]

    def _ask(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        body = json.dumps(request).encode()
        failures = []
        for endpoint in self._endpoints:
            try:
                status, told, _ = exchange(
                    endpoint, "POST", f"/v3/{path}", body,
                    {"Content-Type": "application/json"}, str(self),
                )  # fmt: skip
            except UnavailableError as error:
                failures.append(error)
                continue
            if status == 200:
                return self._parsed(told)
            failures.append(
                UnavailableError(
                    f"etcd answered {status}: {told[:300].decode(errors='replace').strip()}",
                    peer=endpoint,
                    operation=path,
                    advice="check that the endpoint is etcd 3.4 or newer and healthy",
                )
            )
        raise failures[-1].again()

    def _parsed(self, told: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(told)
        except (ValueError, RecursionError) as error:
            raise RemoteProtocolError(f"not JSON: {error}", peer=str(self)) from error
        if not isinstance(answer, dict):
            raise RemoteProtocolError("etcd answered no object", peer=str(self))
        return answer

    @contextlib.contextmanager
    def _understood(self, what: str) -> Iterator[None]:
        try:
            yield
        except (LookupError, TypeError, ValueError) as error:
            if isinstance(error, StoreError):
                raise
            raise RemoteProtocolError(f"etcd sent no {what}: {error!r}", peer=str(self)) from error

    def __str__(self) -> str:
        return f"etcd at {','.join(self._endpoints)}"
