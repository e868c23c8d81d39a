"""What who calls over HTTP may try: rows of `tests.soak.abuse`, against the programs of a pool.

Whoever has no token, or is a page of a stranger in somebody's browser, changes nothing. A front
leads to its engine nothing but what it has a route for, tells it nothing of what clients prove to
the front, and follows engines where administrators say so, in the networks that it was told.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.soak.insiders import Row
from tests.soak.pool_of_processes import CALL_S
from tests.strangers import descriptors
from tests.waiting import until

if TYPE_CHECKING:
    from tests.soak.insiders import Insider

__all__ = ["ROWS"]

JSON = {"Content-Type": "application/json"}
ELSEWHERE = {"Host": "evil.example"}
STRANGER = {"Origin": "http://evil.example"}
PAGES = {"Content-Type": "text/plain"}
"""What a page may send to others without being allowed to."""
OF_THE_CLIENT = {
    "Authorization": "Bearer of the client", "Cookie": "session=of the client",
    "X-Api-Key": "of the client", "Api-Key": "of the client",
    "Proxy-Authorization": "Basic of the client", "X-Auth-Token": "of the client",
    "Connection": "keep-alive, X-Mine", "X-Mine": "of the client",
}  # fmt: skip
PATHS = (
    "/v1/../collective_rpc", "/v1/%2e%2e/collective_rpc", "/v1/..%2fcollective_rpc",
    "/v1/completions/..%2F..%2Fcollective_rpc", "/collective_rpc", "/v1/collective_rpc",
    "/v1/load_lora_adapter", "/v1//../reset_prefix_cache", "/v1/models/../../sleep",
    "//collective_rpc", "/v1/models/%252e%252e/%252e%252e/sleep",
)  # fmt: skip
ENGINE = {"instance_id": "e", "modelname": "m", "block_size": 16, "type": "vLLM"}


class Caller(NamedTuple):
    """Asks one HTTP port."""

    where: tuple[str, int]

    def ask(self, method: str, path: str, head: dict[str, str], body: bytes = b"") -> int:
        """Send a request as it is written; return the status of its answer."""
        connection = http.client.HTTPConnection(*self.where, timeout=CALL_S)
        with contextlib.closing(connection):
            connection.putrequest(method, path, skip_host="Host" in head)
            for name, value in (
                head | ({"Content-Length": str(len(body))} if body else {})
            ).items():
                connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            answer.read()
            return answer.status

    def told(self, expected: int, method: str, path: str, *heads: dict[str, str], **body) -> None:
        """Fail unless a request has this answer."""
        head = {name: value for each in heads for name, value in each.items()}
        status = self.ask(method, path, head, json.dumps(body).encode() if body else b"")
        assert status == expected, f"{method} {path} with {head} was answered {status}"


def without_token(who: Insider, count: int) -> float:
    """The REST service, asked by who has no token, and by pages of others with one."""
    rest = Caller(who.places["rest"].where)
    right = {"Authorization": f"Bearer {who.pool.token}"}
    keys = ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {who.pool.token}"})
    with who.pool.client() as client:
        for _ in range(count):
            key = f"caller-{secrets.token_hex(4)}"
            wish = {"key": key, "value": "v"}
            for wrong in keys:
                for where in {}, ELSEWHERE:
                    rest.told(401, "PUT", "/api/put", wrong, where, JSON, **wish)
                rest.told(401, "GET", f"/api/get/{key}", wrong)
                rest.told(401, "POST", "/api/mount", wrong, JSON, size=4096)
                rest.told(401, "DELETE", "/api/remove_all", wrong)
            rest.told(403, "PUT", "/api/put", right, JSON, STRANGER, **wish)
            for kind in {}, PAGES, {"Content-Type": "application/x-www-form-urlencoded"}:
                rest.told(415, "PUT", "/api/put", right, kind, **wish)
            assert not client.exists(key), "it was put nevertheless"
        rest.told(200, "PUT", "/api/put", right, JSON, **wish)
        assert client.get(key) == b"v"
        client.remove(key, force=True)
    return who.asks()


def pages_of_others(who: Insider, count: int) -> float:
    """The ports that ask for no token, called by pages of strangers."""
    front, control, metadata = (
        Caller(who.places[name].where) for name in ("front", "control", "metadata")
    )
    with who.pool.client() as client:
        for _ in range(count):
            key = f"caller-{secrets.token_hex(4)}"
            client.put(key, b"value", hard_pin=True)
            there = f"/metadata?key={secrets.token_hex(4)}"
            front.told(421, "GET", "/stats", ELSEWHERE)
            front.told(403, "GET", "/stats", STRANGER)
            front.told(403, "POST", "/query", STRANGER, JSON, model="m", block_size=16)
            front.told(415, "POST", "/query", PAGES, model="m", block_size=16)
            control.told(400, "GET", "/get_all_keys", ELSEWHERE)
            control.told(403, "POST", "/api/v1/remove_all?force=true", STRANGER)
            metadata.told(400, "GET", there, ELSEWHERE)
            metadata.told(403, "PUT", there, STRANGER, of="a stranger")
            metadata.told(404, "GET", there)
            assert client.exists(key), "it was removed"
            client.remove(key, force=True)
    front.told(200, "GET", "/stats")
    control.told(200, "GET", "/get_all_keys")
    metadata.told(200, "PUT", there, of="somebody near")
    metadata.told(200, "DELETE", there)
    return who.asks()


def other_paths(who: Insider, count: int) -> float:
    """Ways of writing paths that lead to what only operators ask of an engine."""
    front, asked = Caller(who.places["front"].where), who.pool.engine.asked
    asked.clear()
    for _ in range(count):
        for path in PATHS:
            for method in "GET", "POST":
                status = front.ask(method, path, JSON, b"{}" if method == "POST" else b"")
                assert status in (400, 404, 405), f"{method} {path} was answered {status}"
    assert not asked, f"the engine was asked for {asked[0].path}"
    front.told(200, "GET", "/v1/models")
    assert [each.path for each in asked] == ["/v1/models"]
    return who.asks()


def keys_of_clients(who: Insider, count: int) -> float:
    """What clients prove to the front, and what of it its engine is told."""
    front, asked = Caller(who.places["front"].where), who.pool.engine.asked
    asked.clear()
    for _ in range(count):
        wish = {"model": "m", "prompt": "p"}
        front.told(200, "POST", "/v1/completions?api_key=k", OF_THE_CLIENT, JSON, **wish)
    assert len(asked) >= count, "the engine was not asked, so this was no abuse"
    for each in asked:
        assert "?" not in each.path, f"the engine was told {each.path}"
        told = [name for name, value in each.head.items() if "of the client" in value]
        assert not told, f"the engine was told {told}"
    return who.asks()


def registering(who: Insider, count: int) -> float:
    """Engines that are registered by who may not, and those that lead elsewhere."""
    place = who.places["front"]
    front, tasks = Caller(place.where), Path(f"/proc/{place.pid}/task")
    right = {"Authorization": f"Bearer {who.pool.admin_token}"}
    wrong = ({}, {"Authorization": "Bearer any"}, {"Authorization": f"Bearer {who.pool.token}"})
    before = descriptors(place.pid), len(list(tasks.iterdir()))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        for number in range(count):
            engine = ENGINE | {"instance_id": f"e{number}"}
            for key in wrong:
                front.told(401, "POST", "/register", key, JSON, **engine, endpoint=near)
            for far in "tcp://10.1.0.1:5557", "tcp://169.254.169.254:80", "ipc:///tmp/x":
                front.told(400, "POST", "/register", right, JSON, **engine, endpoint=far)
                asked = {"endpoint": near, "replay_endpoint": far}
                front.told(400, "POST", "/register", right, JSON, **engine, **asked)
        listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            listener.accept()[0].close()
            raise AssertionError("the front followed who may not register")
    until(lambda: descriptors(place.pid) <= before[0] + 4, what="descriptors are let go of")
    until(lambda: len(list(tasks.iterdir())) <= before[1] + 2, what="threads end")
    front.told(200, "POST", "/register", right, JSON, **ENGINE)
    front.told(200, "POST", "/unregister", right, JSON, instance_id="e")
    return who.asks()


ROWS = (
    Row("REST without a token", 50, without_token),
    Row("pages of others", 50, pages_of_others),
    Row("paths to an engine", 20, other_paths),
    Row("keys to an engine", 100, keys_of_clients),
    Row("engines registered", 60, registering),
)
