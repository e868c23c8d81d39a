"""Visits to HTTP ports over plain sockets: requests of every route, and such as no client sends.

The rules: what comes back are whole HTTP/1.1 answers, no more of them than requests were sent, none
that tells of a failure of the server itself, and a request that two servers could read in two ways
is refused and ends its connection. Reading is strict: what a lenient client forgives is a finding.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NamedTuple

from tests.fuzz.visits import HUNG_UP
from tests.fuzz.wire import mutate

if TYPE_CHECKING:
    import random

    from tests.fuzz.visits import Visit
    from tests.soak.pool_of_processes import Place, PoolOfProcesses

__all__ = ["WebVisits"]

_STATUS = re.compile(rb"HTTP/[0-9]\.[0-9] ([1-5][0-9][0-9]) [\x20-\x7e]*")
_FIELD = re.compile(rb"[!#-'*+.0-9A-Z^-z|~-]+:[\t\x20-\x7e\x80-\xff]*")
_REQUESTS_MAX = 6
_KEYS = ("fuzz", "a/b", "..", "%2e%2e", "%00", "k" * 500, "\u00e9", "a?b=c", "")
_TEXTS = (*_KEYS, "decode", "prefill", "../../etc/passwd", "/dev/shm/../../etc/passwd", "1e999")
_NUMBERS = (-1, 0, 1, 4096, 1 << 31, 1 << 63, 1 << 64, 1.5, 1e308)
_FIELDS = (
    "key", "value", "size", "name", "path", "offset", "protocol", "location", "segment_ids",
    "grace_period_seconds", "mode", "segments", "keys", "job_id", "segment", "target_segments",
    "instance_id", "model", "token_ids", "hashes", "prompt",
)  # fmt: skip
_STORE = [
    ("PUT", "/api/put"), ("GET", "/api/get/KEY"), ("GET", "/api/exist/KEY"),
    ("DELETE", "/api/remove/KEY"), ("DELETE", "/api/remove_all"), ("POST", "/api/mount"),
    ("POST", "/api/unmount"), ("POST", "/api/mount_shm"), ("POST", "/api/unmount_shm"),
    ("POST", "/api/unmount_local_disk"), ("POST", "/api/reconfigure"),
]  # fmt: skip
_CONTROL = [
    ("GET", "/metrics"), ("GET", "/metrics/summary"), ("GET", "/query_key?key=KEY"),
    ("GET", "/batch_query_keys?keys=KEY,KEY"), ("GET", "/get_all_keys"), ("GET", "/health"),
    ("GET", "/get_all_segments"), ("GET", "/get_segments_detail"), ("GET", "/role"),
    ("GET", "/query_segment?segment=KEY"), ("GET", "/api/v1/segments/status?segment=KEY"),
    ("GET", "/api/v1/drain_jobs/query?job_id=KEY"), ("POST", "/api/v1/drain_jobs"),
    ("POST", "/api/v1/drain_jobs/cancel?job_id=KEY"), ("POST", "/api/v1/remove_all"),
    ("GET", "/v1/ready"), ("GET", "/v1/objects?prefix=KEY&limit=9"), ("GET", "/v1/object?key=KEY"),
    ("GET", "/v1/jobs"), ("GET", "/v1/job?id=KEY"), ("GET", "/v1/events?after=KEY"),
    ("GET", "/v1/config"), ("POST", "/v1/drain"), ("POST", "/v1/copy"), ("POST", "/v1/move"),
    ("POST", "/v1/cancel"), ("POST", "/v1/remove"), ("POST", "/v1/quota"),
]  # fmt: skip
_METADATA = [
    ("GET", "/metadata?key=KEY"), ("PUT", "/metadata?key=KEY"), ("DELETE", "/metadata?key=KEY"),
    ("GET", "/health"),
]  # fmt: skip
_FRONT = [
    ("GET", "/health"), ("GET", "/stats"), ("GET", "/v1/models"), ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"), ("POST", "/v1/../collective_rpc"), ("POST", "/unregister"),
    ("POST", "/register"), ("POST", "/register"),
    ("POST", "/query"), ("POST", "/query_by_hash"), ("GET", "/services"), ("GET", "/global_view"),
]  # fmt: skip
_ROUTES = {
    "rest": _STORE, "control": _CONTROL, "metadata": _METADATA, "front": _FRONT,
    "front, key": _FRONT,
}  # fmt: skip
_ELSEWHERE = (
    "tcp://127.0.0.1:1", "tcp://127.0.0.1:9", "tcp://10.0.0.1:5557", "tcp://[::1]:x",
    "ipc:///etc/passwd", "inproc://a", "tcp://", "http://127.0.0.1/", "x" * 2000,
)  # fmt: skip
"""Where an engine may say that it publishes; nobody does so there."""
_HIDDEN = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
_TWO_READINGS = b"0\r\n\r\n" + _HIDDEN
"""A body of no chunks and another request, or one of so many bytes."""
_WHOLE = b"Content-Length: %d\r\n" % len(_TWO_READINGS)
_AMBIGUOUS = (
    _WHOLE + b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: chunked\r\n" + _WHOLE,
    b"Content-Length: 5\r\n" + _WHOLE,
    _WHOLE + b"Content-Length: 5\r\n",
    b"Content-Length: +5\r\n",
    b"Content-Length: 0x5\r\n",
    b"Transfer-Encoding: xchunked\r\n",
    b"Transfer-Encoding: chunked, identity\r\n",
    _WHOLE + b"Transfer-Encoding : chunked\r\n",
    _WHOLE + b" Transfer-Encoding: chunked\r\n",
)


class Answer(NamedTuple):
    """An answer, and what came after it."""

    status: int
    ends: bool
    rest: bytes


LENDING = b"POST /api/mount "
"""How requests begin with which who has the token may have all memory of a host lent: only who has
none sends them."""


class WebVisits:
    """Visits to one HTTP port."""

    def __init__(self, place: Place, pool: PoolOfProcesses) -> None:
        self._routes = _ROUTES[place.name]
        self._token = pool.token

    def stranger(self, visit: Visit) -> None:
        """Without a token: requests that are damaged, cut, or none at all."""
        rng = visit.rng
        sound = self._request(rng, rng.choice((None, "wrong")))
        chance = rng.randrange(4)
        if chance == 0:
            self._ambiguous(visit)
            return
        if chance == 1:
            said = sound[: rng.randrange(1, len(sound))]
        elif chance == 2:
            said = mutate(rng, sound, sound)
        else:
            said = self._odd(rng)
        if not visit.send(said or b"\r\n"):
            return
        came = visit.rest()
        # Where a HEAD was damaged nobody knows whether it was read as one.
        bare = said.startswith(b"HEAD ") and came.endswith(b"\r\n\r\n")
        while came:
            answer = read(came, said if bare else b"")
            visit.note(str(answer.status))
            came = answer.rest
        visit.note(HUNG_UP)

    def caller(self, visit: Visit) -> None:
        """With the token, where one is asked for: requests of every route, one after another."""
        rng = visit.rng
        for _ in range(rng.randrange(1, _REQUESTS_MAX)):
            request = self._request(rng, self._token)
            if request.startswith(LENDING):
                continue
            if not visit.send(request):
                visit.note(HUNG_UP)
                return
            came = b""
            while not complete(came, request):
                data = visit.receive()
                if not data:
                    break
                came += data
            if not came:
                visit.note(HUNG_UP)
                return
            answer = read(came, request)
            assert answer.ends or not answer.rest, f"two answers: {answer.rest[:200]!r}"
            visit.note(str(answer.status))
            if answer.ends:
                return

    def _ambiguous(self, visit: Visit) -> None:
        """One request that could also be read as two: the second is never answered."""
        method, path = visit.rng.choice(self._routes)
        head = f"{method} {_filled(visit.rng, path)} HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode()
        if not visit.send(head + visit.rng.choice(_AMBIGUOUS) + b"\r\n" + _TWO_READINGS):
            return
        came, statuses = visit.rest(), []
        while came:
            answer = read(came, b"")
            statuses.append(answer.status)
            visit.note(str(answer.status))
            came = answer.rest
        hidden = [status for status in statuses[1:] if status < 400]
        assert not hidden, f"a request within another one was answered: {statuses}"

    def _request(self, rng: random.Random, token: str | None) -> bytes:
        method, path = rng.choice(self._routes)
        if rng.random() < 0.2:
            method = rng.choice(("GET", "PUT", "POST", "DELETE", "HEAD", "OPTIONS", "BREW"))
        lines = [f"{method} {_filled(rng, path)} HTTP/1.1", "Host: 127.0.0.1"]
        if token is not None:
            lines.append(f"Authorization: Bearer {token}")
        if rng.random() < 0.2:
            lines.append(rng.choice(_EXTRA))
        body = b""
        if method in ("PUT", "POST"):
            chosen = _registration if path == "/register" and rng.random() < 0.7 else _content
            body = chosen(rng)
            lines.append(rng.choice(_TYPES))
            lines.append(f"Content-Length: {len(body)}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    def _odd(self, rng: random.Random) -> bytes:
        """What is no request."""
        return rng.choice((
            rng.randbytes(rng.randrange(1, 3_000)),
            b"GET " + b"/" * rng.choice((9_000, 70_000)) + b" HTTP/1.1\r\nHost: a\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * rng.choice((200, 20_000)) + b"\r\n",
            b"GET / HTTP/" + rng.choice((b"0.9", b"2.0", b"1.9", b"99999999999")) + b"\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost: a\r\n\r\n",
            b"GET http://example.invalid/ HTTP/1.1\r\nHost: a\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
            b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n",
            b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\nx",
            b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\nx",
            b"GET / HTTP/1.1\r\nHost: a\r\nX: a\x00b\r\n\r\n",
            b"GET / HTTP/1.1\nHost: a\n\n",
        ))  # fmt: skip


_EXTRA = (
    "Connection: close", "Origin: http://evil.invalid", "Accept-Encoding: gzip, br", "Cookie: a=b",
    "Range: bytes=0-1,5-9,-1", "X-Forwarded-For: 10.0.0.1", "Host: other.invalid",
)  # fmt: skip
_TYPES = (
    "Content-Type: application/json", "Content-Type: application/json",
    "Content-Type: text/plain", "Content-Type: application/json; charset=utf-99",
    "Content-Type: multipart/form-data; boundary=x", "Content-Encoding: gzip",
)  # fmt: skip


def _filled(rng: random.Random, path: str) -> str:
    while "KEY" in path:
        key = "".join(f"%{each:02x}" if each > 126 else chr(each)
                      for each in rng.choice(_KEYS).encode())  # fmt: skip
        path = path.replace("KEY", key, 1)
    return path


def _content(rng: random.Random) -> bytes:
    """JSON with fields that some route reads, or something like it."""
    chance = rng.random()
    if chance < 0.1:
        return rng.randbytes(rng.randrange(200))
    if chance < 0.15:
        return b"[" * 50_000
    fields = rng.sample(_FIELDS, rng.randrange(1, 8))
    content = json.dumps({name: _value(rng) for name in fields}).encode()
    return mutate(rng, content, content) if chance < 0.3 else content


def _registration(rng: random.Random) -> bytes:
    """An engine as it might be registered, or nearly so."""
    fields: dict[str, object] = {
        "instance_id": rng.choice(("fuzz", "a")),
        "modelname": "m",
        "block_size": rng.choice((1, 16)),
    }
    if rng.random() < 0.5:  # each that is followed has threads and descriptors, so one name
        fields["instance_id"] = "fuzz"
        fields["endpoint"] = rng.choice(_ELSEWHERE)
        fields["replay_endpoint"] = rng.choice((None, *_ELSEWHERE))
        return json.dumps(fields).encode()
    for name in ("type", "tenant_id", "lora_name", "additionalsalt"):
        fields[name] = rng.choice((None, "Mooncake", *_TEXTS, "x" * 2000))
    fields["dp_rank"] = rng.choice((0, 1, 7, *_NUMBERS))
    if rng.random() < 0.5:
        fields[rng.choice(list(fields))] = _value(rng)
    content = json.dumps(fields).encode()
    return mutate(rng, content, content) if rng.random() < 0.2 else content


def _value(rng: random.Random, depth: int = 0) -> object:
    chance = rng.randrange(5)
    if chance == 0 and depth < 2:
        return [_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if chance == 1:
        return rng.choice((None, True, {}, {"a": [1]}))
    return rng.choice(_TEXTS) if chance < 4 else rng.choice(_NUMBERS)


def _head(came: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    head, end, body = came.partition(b"\r\n\r\n")
    assert end, f"half an answer: {came[:200]!r}"
    first, *lines = head.split(b"\r\n")
    status = _STATUS.fullmatch(first)
    assert status, f"no answer of HTTP: {first[:200]!r}"
    assert all(_FIELD.fullmatch(line) for line in lines), f"a malformed header: {head[:500]!r}"
    fields = {name.lower(): value.strip() for name, _, value in
              (line.partition(b":") for line in lines)}  # fmt: skip
    return int(status[1]), fields, body


def read(came: bytes, request: bytes) -> Answer:
    """Take one whole answer apart; AssertionError where it is none."""
    status, fields, body = _head(came)
    if status == 100:
        return Answer(status, ends=False, rest=body)
    wish = fields.get(b"connection", b"").lower()
    ends = wish == b"close" or (came.startswith(b"HTTP/1.0 ") and wish != b"keep-alive")
    if request.startswith(b"HEAD ") or status in (204, 304):
        return Answer(status, ends, body)
    if fields.get(b"transfer-encoding") == b"chunked":
        return Answer(status, ends, _after_chunks(body))
    if b"content-length" not in fields:
        assert ends, f"an answer {status} whose end nobody knows"
        return Answer(status, ends, b"")
    length = int(fields[b"content-length"])
    assert len(body) >= length, f"an answer {status} that lacks {length - len(body)} bytes"
    return Answer(status, ends, body[length:])


def _after_chunks(body: bytes) -> bytes:
    while True:
        size, end, body = body.partition(b"\r\n")
        assert end, "an answer whose chunks do not end"
        length = int(size, 16)
        assert body[length : length + 2] == b"\r\n", "a chunk of another length than it says"
        body = body[length + 2 :]
        if not length:
            return body


def complete(came: bytes, request: bytes) -> bool:
    """Whether all of an answer is there."""
    try:
        read(came, request)
    except (AssertionError, ValueError):
        return False
    return True
