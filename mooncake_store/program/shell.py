"""What every request passes before a page of ours sees it. Needs `aiohttp`.

    shell = Shell(host="127.0.0.1", token=token)
    application = shelled(shell, API, handlers, refusal=answer, bytes_max=1 << 20)

One shell for all applications: who asks (a token, compared in constant time, and another one for
what only administrators may do), through whom (`transfer_engine.rpc.http_checks`: a page of a
browser has to be our own), what (a path in one way of writing it, a body in JSON, uncompressed and
bounded). What has no route is not there. Preflights are not answered, so what a page of a stranger
could send is what browsers send unasked: no JSON, no header of its own, and an Origin. What can be
asked is a table (`program.openapi`), which is served too, as a description.

Host is looked at where requests need no token. Where they do, those who have it may call the server
as their network does: a page that got here by a name of its own has no token, and no browser adds
one.

Each request has an id: that of its X-Request-Id, or one that is made here. The answer names it, and
so do lines in the log (`program.logs`), a line of the request itself among them.

It keeps nothing; a check is O(length of the head). Time for head and body is `program.web`'s.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import secrets
import socket
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from aiohttp import web

from mooncake_store.errors import ConfigError
from mooncake_store.program.logs import of_request, request_id
from mooncake_store.program.openapi import PATH, Answer, openapi
from transfer_engine.rpc.address import is_loopback
from transfer_engine.rpc.http_checks import host_in, is_own_host, is_own_origin, is_plain_path
from transfer_engine.rpc.neighbours import stranger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from mooncake_store.program.openapi import Api, Operation

    Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

__all__ = ["REQUEST_ID", "Shell", "described", "shelled"]

log = logging.getLogger(__name__)

REQUEST_ID = "X-Request-Id"
"""The header with the id of a request."""
_ID = re.compile(r"[!-~]{1,128}")
_SAFE = ("GET", "HEAD")
_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Shell:
    """How an application is reached, and by whom. Without a token by whoever reaches it."""

    host: str = "127.0.0.1"
    """Where it listens."""
    token: str = ""
    """What requests have to carry, but for what is public."""
    admin_token: str = ""
    """What those of administrators have to carry; without one there are none."""
    names: tuple[str, ...] = ()
    """What it is called besides."""
    own_user: bool = False
    """Whether it is for the user of this host that runs it, and for root: others hear 403."""

    def check(self) -> None:
        """Raise ConfigError for a name that no request could have."""
        for name in self.names:
            if host_in(name) != name.lower():
                raise ConfigError(
                    f"{name!r} is not the name of a host",
                    advice="write one such as front.example, without a port",
                )

    @property
    def own_names(self) -> frozenset[str]:
        """All its names."""
        named = frozenset(name.lower() for name in self.names)
        if is_loopback(self.host):
            return named
        machine = socket.gethostname().lower()
        return named | {machine, machine.partition(".")[0]}


class _Refused(Exception):
    """Why a request goes no further."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


def described(api: Api, shell: Shell, keys: tuple[str, ...] = ()) -> dict[str, Any]:
    """The description of what an API is behind a shell."""

    def refusals(operation: Operation) -> Iterator[Answer]:
        def answer(status: int, what: str) -> Answer:
            return Answer(status, what, api.error)

        if "{" in operation.path and not operation.path.startswith(keys):
            yield answer(400, "the path can be read in several ways")
        if operation.access == "admin":
            yield answer(401, "the token of administrators is missing")
        elif shell.token and operation.access == "token":
            yield answer(401, "the token is missing")
        if not (shell.token and operation.method in _SAFE):
            yield answer(403, "asked by a page of another origin")
        if not shell.token:
            yield answer(421, "the Host is no name of this server")
        yield answer(415, "the body is compressed, or no JSON by what its type says")
        if operation.body is not None:
            yield answer(413, "the body is too large")

    return openapi(api, secured=bool(shell.token), further=refusals)


def shelled(
    shell: Shell,
    api: Api,
    handlers: Mapping[str, Handler],
    *,
    refusal: Callable[[int, str, str | None], web.Response],
    bytes_max: int,
    keys: tuple[str, ...] = (),
    inner: Sequence[Any] = (),
) -> web.Application:
    """Return an application of these operations, each with its handler, behind a shell.

    `refusal(status, message, code)` is how it says no. Operations whose access is public need no
    token, those of administrators need theirs. What follows one of `keys` in a path is a key and no
    path, so anything may. Middlewares of `inner` come behind the shell.
    """
    paths = {
        access: frozenset(each.plain_path for each in api.whole if each.access == access)
        for access in ("public", "admin")
    }
    checks = _Checks(shell, paths["public"], paths["admin"], keys)
    description = json.dumps(described(api, shell, keys), indent=1)

    async def describe(_: web.Request) -> web.Response:
        return web.Response(text=description, content_type="application/json")

    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            checks.check(request)
            return await handler(request)
        except _Refused as refused:
            return refusal(refused.status, refused.message, refused.code)
        except web.HTTPException as error:
            response = refusal(error.status, error.reason, None)
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
            return response

    @web.middleware
    async def named(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get(REQUEST_ID, "")
        began = time.monotonic()
        with of_request(given if _ID.fullmatch(given) else secrets.token_hex(12)):
            response = await handler(request)
            _name(response)
            log.info(
                "%s %s: %d", request.method, request.path, response.status,
                extra={"elapsed_s": round(time.monotonic() - began, 6)},
            )  # fmt: skip
        return response

    application = web.Application(client_max_size=bytes_max, middlewares=[named, checked, *inner])
    for each in api.operations:
        # Whoever may GET may also ask for the HEAD of it.
        route = web.get if each.method == "GET" else partial(web.route, each.method)
        application.add_routes([route(each.path, handlers[each.handler or each.name])])
    application.router.add_get(PATH, describe)
    application.on_response_prepare.append(_as_it_is_called)
    return application


async def _as_it_is_called(_: web.Request, response: web.StreamResponse) -> None:
    """No browser takes an answer for something else than it is called; it names its request."""
    response.headers["X-Content-Type-Options"] = "nosniff"
    _name(response)


def _name(response: web.StreamResponse) -> None:
    """Have an answer name its request: a stream as it begins, which for others is too late."""
    if request_id():
        response.headers.setdefault(REQUEST_ID, request_id())


class _Checks:
    """What is checked of each request of an application."""

    def __init__(
        self, shell: Shell, public: frozenset[str], admin: frozenset[str], keys: tuple[str, ...]
    ) -> None:
        self._shell = shell
        self._names = shell.own_names
        self._public = public
        self._admin = admin
        self._keys = keys

    def check(self, request: web.Request) -> None:
        """Raise _Refused for a request that goes no further."""
        self._check_path(request)
        self._check_caller(request)
        self._check_token(request)
        self._check_body(request)

    def _check_path(self, request: web.Request) -> None:
        path = request.raw_path.partition("?")[0]
        if not (path.startswith(self._keys) or is_plain_path(path)):
            raise _Refused(400, f"{path[:_SHOWN]!r} is no plain path", "invalid_path")

    def _check_caller(self, request: web.Request) -> None:
        shell, given = self._shell, request.headers
        host = given.get("Host", "")
        if not (shell.token or "Host" not in given or is_own_host(host, shell.host, self._names)):
            raise _Refused(
                421,
                f"the Host {host[:_SHOWN]!r} is no name of this server; "
                "a name of its own is told to it with --allow-host, or it asks for a token",
                "unknown_host",
            )
        if shell.token and request.method in _SAFE:
            return
        for origin in given.getall("Origin", ()):
            if not is_own_origin(origin, host, self._names):
                raise _Refused(
                    403,
                    f"pages of {origin[:_SHOWN]!r} may ask nothing here; "
                    "where the server has that name, it is told so with --allow-host",
                    "foreign_origin",
                )

    def _check_token(self, request: web.Request) -> None:
        shell, resource = self._shell, request.match_info.route.resource
        path = "" if resource is None else resource.canonical
        given = request.headers.get("Authorization", "").encode("utf-8", "replace")
        is_admin = _carries(given, shell.admin_token)
        if path in self._admin and not is_admin:
            raise _Refused(401, "the key of administrators is required", "invalid_api_key")
        may_pass = is_admin or not shell.token or path in self._public
        if not (may_pass or _carries(given, shell.token)):
            raise _Refused(401, "a valid API key is required", "invalid_api_key")
        if shell.own_user and path not in self._public:
            self._check_user(request)

    def _check_user(self, request: web.Request) -> None:
        sock = None if request.transport is None else request.transport.get_extra_info("socket")
        try:
            other = None if sock is None else stranger(sock)
        except OSError:  # it left, and hears nothing of what it is answered
            return
        if other is not None:
            raise _Refused(403, other.what, "other_user")

    def _check_body(self, request: web.Request) -> None:
        if not request.body_exists:
            return
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise _Refused(415, "a body comes as it is, not compressed", "unsupported_media_type")
        if request.method not in _SAFE and request.content_type != "application/json":
            raise _Refused(
                415,
                f"a body is JSON and says so: Content-Type: application/json, "
                f"not {request.content_type[:_SHOWN]!r}",
                "unsupported_media_type",
            )


def _carries(given: bytes, token: str) -> bool:
    """Whether a header is that of a token; in the same time, whichever it is."""
    return hmac.compare_digest(given, f"Bearer {token}".encode()) and bool(token)
