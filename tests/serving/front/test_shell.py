"""What every application refuses before anything happens, by bytes on a real socket."""

import asyncio
import contextlib
import gzip
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from mooncake_store.compat.rest import MooncakeStoreService
from mooncake_store.errors import ConfigError
from mooncake_store.program.shell import Shell
from mooncake_store.program.token_file import TokenFile
from serving.front.app import Front, front_application
from serving.front.engine_places import EnginePlaces
from serving.front.external import ExternalFront, external_application
from serving.system import listen, serve_http
from tests.waiting import PATIENCE_S
from transfer_engine.errors import InvalidArgumentError
from transfer_engine.rpc.http_checks import is_own_host, is_own_origin, is_plain_path

ROOT = Path(__file__).resolve().parents[3]
JSON = "Content-Type: application/json"


class Kind(NamedTuple):
    """An application: one path of it that is read, one that something is sent to."""

    make: object
    read: str
    sent: str
    method: str
    public: str = ""


def rest(shell, monkeypatch):
    monkeypatch.setenv("MOONCAKE_MASTER", "127.0.0.1:1")
    return MooncakeStoreService().application(shell)


KINDS = {
    "rest": Kind(rest, "/api/exist/a", "/api/put", "PUT"),
    "front": Kind(
        lambda shell, _: front_application(Front(None, None), shell),
        "/metrics",
        "/v1/completions",
        "POST",
        "/page/page.css",
    ),
    "engines": Kind(
        lambda shell, _: external_application(ExternalFront({}), shell),
        "/stats",
        "/query",
        "POST",
        "/health",
    ),
}


@pytest.fixture(params=KINDS)
def kind(request):
    """Each application in turn."""
    return KINDS[request.param]


@pytest.fixture
def statuses(kind, monkeypatch):
    """Send requests, each a (method, path, lines, body), to an application; their statuses.

    Without a shell on it nothing of what they ask is there, which is a 500: they are let through.
    """

    def send(shell, *requests):
        async def run():
            application = kind.make(shell, monkeypatch)
            server, url = await serve_http(application, shell.host, listen(shell.host, 0))
            port = int(url.rpartition(":")[2])
            try:
                return [await asyncio.wait_for(one(port, *each), PATIENCE_S) for each in requests]
            finally:
                await server.cleanup()

        return asyncio.run(run())

    return send


async def one(port, method, path, lines=(), body=b""):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = [f"{method} {path} HTTP/1.1", "Connection: close", *lines]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    if not any(line.startswith("Host:") for line in lines):
        lines.append(f"Host: 127.0.0.1:{port}")
    writer.write("\r\n".join((*lines, "", "")).replace("PORT", str(port)).encode() + body)
    told = await reader.read()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    head = told.partition(b"\r\n\r\n")[0].lower()
    status = int(told.split()[1])
    assert b"access-control-" not in head
    assert b"x-content-type-options: nosniff" in head or status == 400
    return status


def hosts(kind, *given):
    return [("GET", kind.read, [f"Host: {host}"]) for host in given]


def is_let_through(status):
    return status in (200, 400, 500, 503)


def test_on_loopback_only_names_of_loopback_are_answered(kind, statuses):
    shell = Shell(names=("front.example",))
    ours = ("127.0.0.1:PORT", "localhost", "LOCALHOST.:9", "[::1]:80", "front.example:443")
    found = statuses(shell, *hosts(kind, *ours))
    assert all(map(is_let_through, found)), found
    strangers = ("evil.example", "evil.example:PORT", "10.0.0.5", "127.0.0.1.evil.example", "x y")
    assert statuses(shell, *hosts(kind, *strangers, "a@localhost", "")) == [421] * 7


def test_elsewhere_numbers_and_own_names_are_answered(kind, statuses, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "node7.cluster.example")
    ours = "10.0.0.5:80", "[fd00::1]", "node7", "node7.cluster.example", "localhost"
    found = statuses(Shell("0.0.0.0"), *hosts(kind, *ours))
    assert all(map(is_let_through, found)), found
    assert statuses(Shell("0.0.0.0"), *hosts(kind, "evil.example", "node8")) == [421, 421]


def test_another_user_of_the_host_sees_no_more_than_what_is_public(kind, statuses, monkeypatch):
    monkeypatch.setattr("transfer_engine.rpc.neighbours.user_of", lambda *_: 12345)
    asked = [
        ("GET", kind.read),
        (kind.method, kind.sent, [JSON], b"{}"),
        *([("GET", kind.public)] if kind.public else []),
    ]
    own, *others = statuses(Shell(own_user=True), *asked), statuses(Shell(), *asked)
    assert own[:2] == [403, 403]
    assert all(map(is_let_through, own[2:] + others[0])), (own, others)


def test_two_hosts_are_none(kind, statuses):
    both = ("GET", kind.read, ["Host: localhost", "Host: evil.example"])
    assert statuses(Shell(), both) == [400]


def test_with_a_token_a_server_may_be_called_as_its_network_calls_it(kind, statuses):
    named, key = "Host: store.cluster.example", "Authorization: Bearer right"
    asked = [("GET", kind.read, [named, key]), ("GET", kind.read, [named])]
    let, refused = statuses(Shell(token="right"), *asked)
    assert is_let_through(let)
    assert refused == 401


def test_pages_of_others_ask_nothing(kind, statuses):
    def sent(origin):
        return kind.method, kind.sent, [JSON, f"Origin: {origin}"], b"{"

    pages = "http://evil.example", "null", "http://127.0.0.1:1", "https://evil.example:PORT", ""
    assert statuses(Shell(), *map(sent, pages)) == [403] * 5
    assert statuses(Shell(), ("GET", kind.read, ["Origin: http://evil.example"])) == [403]
    own = sent("http://127.0.0.1:PORT"), sent("https://front.example")
    found = statuses(Shell(names=("front.example",)), *own)
    assert all(map(is_let_through, found)), found


def test_pages_of_others_change_nothing_with_a_token_either(kind, statuses):
    lines = ["Authorization: Bearer right", "Origin: http://evil.example"]
    read, sent = ("GET", kind.read, lines), (kind.method, kind.sent, [JSON, *lines], b"{")
    let, refused = statuses(Shell(token="right"), read, sent)
    assert is_let_through(let)
    assert refused == 403


def test_preflights_are_not_answered(kind, statuses):
    asked = [f"Access-Control-Request-Method: {kind.method}"]
    own = ("OPTIONS", kind.sent, [*asked, "Origin: http://127.0.0.1:PORT"])
    other = ("OPTIONS", kind.sent, [*asked, "Origin: http://evil.example"])
    assert statuses(Shell(), own, other) == [405, 403]


def test_a_body_says_that_it_is_json(kind, statuses):
    def sent(*lines, body=b"{"):
        return kind.method, kind.sent, lines, body

    kinds = "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"
    refused = [sent(f"Content-Type: {each}") for each in (*kinds, "application/octet-stream")]
    assert statuses(Shell(), sent(), *refused) == [415] * 5
    let = statuses(Shell(), sent(JSON), sent(JSON + "; charset=utf-8"), sent(body=b""))
    assert all(map(is_let_through, let)), let


def test_a_body_comes_as_it_is(kind, statuses):
    bodies = gzip.compress(b"{" + bytes(1 << 20)), b"nobody tries to unpack this"
    lines = [JSON, "Content-Encoding: gzip"]
    sent = [(kind.method, kind.sent, lines, body) for body in bodies]
    assert statuses(Shell(), *sent) == [415, 415]


def test_a_body_that_is_too_large_is_not_read(kind, statuses, monkeypatch):
    for module in ("mooncake_store.compat.rest", "serving.front.app"):
        monkeypatch.setattr(f"{module}.BODY_BYTES_MAX", 1 << 10)
    body = json.dumps({"key": "k" * 2048}).encode()
    assert statuses(Shell(), (kind.method, kind.sent, [JSON], body)) == [413]


PATHS = (
    "/v1/../collective_rpc", "/v1/%2e%2e/collective_rpc", "/v1/.%2E/x", "/./stats", "//stats",
    "/v1//models", "/v1/models/a%2fb", "/v1/models/a%5Cb", "/v1/models/a\\b", "/v1/%252e%252e/x",
    "/v1/models/%00", "/v1/models/%ff", "/v1/models/a%0d%0ab", "/api/../api/remove_all",
    "http://evil.example/stats", "/v1/%zz",
)  # fmt: skip


def test_a_path_is_written_in_one_way(statuses):
    assert statuses(Shell(), *(("GET", path) for path in PATHS)) == [400] * len(PATHS)


@pytest.mark.parametrize(
    "path", ["/collective_rpc", "/v1/load_lora_adapter", "/reset_prefix_cache"]
)
def test_what_has_no_route_is_not_there(statuses, path):
    assert statuses(Shell(), ("GET", path), ("POST", path, [JSON], b"{}")) == [404, 404]


def test_who_has_no_token_reads_what_is_public_alone(kind, statuses):
    def keyed(key):
        return "GET", kind.read, [f"Authorization: {key}"]

    keys = "Bearer wrong", "Bearer ", "Bearer", "right", "Bearer right2", "Bearer \xff"
    refused = [*map(keyed, keys), ("GET", kind.read), (kind.method, kind.sent, [JSON], b"{")]
    assert statuses(Shell(token="right"), *refused) == [401] * 8
    assert is_let_through(statuses(Shell(token="right"), keyed("Bearer right"))[0])
    if kind.public:
        assert statuses(Shell(token="right"), ("GET", kind.public))[0] != 401


@pytest.mark.parametrize("admin", ["", "of administrators"])
@pytest.mark.parametrize("token", ["", "of clients"])
@pytest.mark.parametrize("path", ["/register", "/%72egister", "/unregister"])
def test_only_administrators_register(monkeypatch, admin, token, path):
    """Not who has a key for requests, not who needs none, and nobody where there is no such key."""
    body = json.dumps({"instance_id": "a", "modelname": "m", "block_size": 4}).encode()

    async def run():
        front = ExternalFront({})
        application = external_application(front, Shell(token=token, admin_token=admin))
        server, url = await serve_http(application, "127.0.0.1", listen("127.0.0.1", 0))
        port = int(url.rpartition(":")[2])
        try:
            found = []
            for key in ("", "of clients", "of administrators"):
                lines = [JSON, f"Authorization: Bearer {key}"]
                found.append(await one(port, "POST", path, lines, body))
                assert bool(front.indexer.index.sources) == (found[-1] == 200 and "un" not in path)
            return found
        finally:
            await server.cleanup()

    assert asyncio.run(run()) == [401, 401, 200 if admin else 401]


def test_every_application_is_made_by_the_shell():
    """So one that is added has what is tested here; where one is made is not hard to find."""
    bare = re.compile(r"web\.Application\(")
    sources = [
        path.relative_to(ROOT).as_posix()
        for package in ("mooncake_store", "serving", "transfer_engine", "compat")
        for path in (ROOT / package).rglob("*.py")
        if bare.search(path.read_text("utf-8"))
    ]
    assert sources == ["mooncake_store/program/shell.py"]


@pytest.mark.parametrize(
    ("header", "bound", "own"),
    [
        ("localhost:1", "127.0.0.1", True), ("[::1]", "127.0.0.1", True),
        ("127.9.9.9:1", "localhost", True), ("0.0.0.0:1", "127.0.0.1", False),
        ("2130706433", "127.0.0.1", False), ("localhost.evil.example", "127.0.0.1", False),
        ("node", "node", True), ("node", "127.0.0.1", False), ("a:b:c", "0.0.0.0", False),
    ],
)  # fmt: skip
def test_what_host_is_own(header, bound, own):
    assert is_own_host(header, bound, ()) is own


def test_what_origin_is_own():
    assert is_own_origin("https://a.example", "a.example:443", ())
    assert is_own_origin("http://A.example:80", "a.example", ())
    assert not is_own_origin("http://a.example", "a.example:8000", ())
    assert not is_own_origin("file://", "", ())
    assert not is_own_origin("null", "null", ("null",))


def test_what_path_is_plain():
    for path in "/", "/v1/models/a%20b:c@d", "/a/", "/%C3%A9", "/...", "/.well-known/x":
        assert is_plain_path(path), path
    for path in "", "a", "*", "/a b", "/a/..", "/.", "/a//", "/é", "/a#b", "/%c0%ae%c0%ae/":
        assert not is_plain_path(path), path


def test_where_engines_may_be():
    places = EnginePlaces(["10.0.0.5", "Engine.example"], ["10.1.0.0/16", "fd00::/8"])
    for host in (
        "127.0.0.1", "localhost", "[::1]", "10.0.0.5", "engine.example", "10.1.2.3", "[fd00::9]",
        "[::ffff:10.1.2.3]",
    ):  # fmt: skip
        places.check(f"tcp://{host}:5557")
    for endpoint in (
        "tcp://10.0.0.6:5557", "tcp://169.254.169.254:80", "tcp://other.example:1",
        "tcp://167837957:1", "tcp://10.1.2.3", "tcp://10.1.2.3:0", "tcp://10.1.2.3:65536",
        "tcp://10.9.9.9:1;10.1.2.3:1", "tcp://*:1", "tcp://eth0:1", "ipc:///tmp/x", "inproc://x",
        "udp://10.1.2.3:1", "tcp://10.1.2.3:1\n", "",
    ):  # fmt: skip
        with pytest.raises(InvalidArgumentError):
            places.check(endpoint)
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1/8"):
        EnginePlaces((), ["10.0.0.1/8"])


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """The folder for what lives as long as its user is here."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "mooncake"


def test_a_token_is_made_for_one_user_and_one_run(runtime):
    first = TokenFile.make("rest", 8080)
    assert first.path == runtime / "rest-8080.token"
    assert first.path.stat().st_mode & 0o777 == 0o600
    assert runtime.stat().st_mode & 0o777 == 0o700
    assert first.path.read_text().strip() == first.token
    second = TokenFile.make("rest", 8080)
    assert second.token != first.token
    first.remove()
    assert second.path.read_text().strip() == second.token
    second.remove()
    second.remove()
    assert not list(runtime.iterdir())


def test_without_a_folder_for_that_it_is_kept_with_the_state_of_programs(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert TokenFile.make("rest", 1).path == tmp_path / "mooncake" / "rest-1.token"


def test_a_link_that_waits_for_a_token_gets_none(runtime, tmp_path):
    runtime.mkdir(0o700)
    (runtime / "rest-1.token").symlink_to(tmp_path / "elsewhere")
    TokenFile.make("rest", 1)
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_everybody_may_write_to_gets_no_token(runtime):
    runtime.mkdir()
    runtime.chmod(0o777)
    with pytest.raises(ConfigError, match="everybody"):
        TokenFile.make("rest", 8080)


def test_where_no_token_can_be_kept_is_told(runtime):
    runtime.write_bytes(b"")
    with pytest.raises(ConfigError, match="token of rest"):
        TokenFile.make("rest", 8080)
