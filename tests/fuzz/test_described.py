"""Requests of what HTTP ports say of themselves: the same few hundred for each of them."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

pytest.importorskip("schemathesis")
pytest.importorskip("aiohttp")

from mooncake_store.program.openapi import Answer, Api, Operation, Shape, openapi
from tests.fuzz.described import FILES, NAMES, Port, places_of
from tests.fuzz.ports import Watch
from tests.soak.pool_of_processes import PoolOfProcesses


@pytest.fixture(scope="module")
def pool():
    with PoolOfProcesses(FILES) as pool:
        yield pool


@pytest.fixture(scope="module")
def places(pool):
    return {place.name: place for place in places_of(pool)}


@pytest.mark.parametrize("name", NAMES)
def test_a_port_answers_as_it_says(pool, places, name):
    watch, port = Watch(pool, [places[name]]), Port(places[name], pool)
    assert [str(each) for each in port.fuzz(seed=1, examples=6)] == []
    watch.check()
    assert port.statuses[200] > 0
    assert port.statuses[400] > 0
    assert port.operations == port.described


class Number(Shape, frozen=True):
    """What the server below says that it answers."""

    number: int


def told(name):
    return Operation(name, "GET", f"/{name}", name, (Answer(200, "a number", Number),))


LIES = {
    "status": (404, "application/json", b'{"number": 1}'),
    "kind": (200, "text/plain", b'{"number": 1}'),
    "shape": (200, "application/json", b'{"number": "one"}'),
    "more": (200, "application/json", b'{"number": 1, "other": 2}'),
    "open": (200, "application/json", b'{"number": 1}'),
    "failing": (500, "application/json", b'{"number": 1}'),
}
API = Api("Lies", "", Number, tuple(map(told, LIES)))


class Liar(BaseHTTPRequestHandler):
    """Answers otherwise than it says, and whoever asks."""

    def do_GET(self):
        name = self.path.strip("/")
        status, kind, body = LIES.get(
            name, (200, "application/json", json.dumps(openapi(API)).encode())
        )
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Nothing."""


@contextlib.contextmanager
def lying():
    with ThreadingHTTPServer(("127.0.0.1", 0), Liar) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address
        server.shutdown()
        thread.join()


def test_each_kind_of_lie_is_found():
    with lying() as where:
        place, pool = (
            SimpleNamespace(name="lies", where=where),
            SimpleNamespace(token="a", admin_token="b"),
        )
        port = Port(place, pool)
        port.fuzz(seed=1, examples=3)
    found = {(each.operation, each.rule) for each in port.found}
    assert found >= {
        ("GET /status", "status_code_conformance"),
        ("GET /failing", "status_code_conformance"),
        ("GET /kind", "content_type_conformance"),
        ("GET /shape", "response_schema_conformance"),
        ("GET /more", "response_schema_conformance"),
        ("GET /open", "ignored_auth"),
        ("GET /open", "without a token"),
    }
