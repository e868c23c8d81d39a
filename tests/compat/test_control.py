"""The HTTP ports of the original's master, as programs poll them."""

import asyncio
import http.client
import json
import re
import signal
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from types import SimpleNamespace

import pytest

from mooncake_store.compat import MooncakeDistributedStore, drains, metadata
from mooncake_store.compat.control import Control
from mooncake_store.compat.metadata import Metadata
from mooncake_store.core.records import SegmentState
from mooncake_store.errors import UnavailableError
from mooncake_store.wire.cluster import Drain, DrainReply
from tests.certificates import Authority
from tests.conftest import programs
from tests.waiting import until

MIB = 1 << 20


def ask(base, path, method="GET", body=None, **headers):
    """The status of an answer, and what it says."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    request = urllib.request.Request(base + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            status, kind, said = answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as error:
        with error:
            status, kind, said = error.code, error.headers["Content-Type"], error.read()
    return status, json.loads(said) if "json" in kind else said.decode()


@pytest.fixture(scope="module")
def place():
    """A master with both ports, by the original's flags."""
    starting = programs()
    start = next(starting)
    program = start(
        "-m", "mooncake_store", "master", "--rpc_port=0", "--port=0", "--metrics_port=0",
        "--enable_http_metadata_server=true", "--http_metadata_server_port=0",
    )  # fmt: skip
    control = program.wait_for_line("control port").split()[-1]
    values = program.wait_for_line("metadata server").split()[-1]
    master = re.search(r"ready at (\S+)", program.wait_for_line("is ready"))[1]
    yield SimpleNamespace(control=control, metadata=values, master=master, program=program)
    program.signal(signal.SIGTERM)
    assert program.wait() == 0
    next(starting, None)


@pytest.fixture
def store(place):
    with_segment = MooncakeDistributedStore()
    arguments = ("localhost", "P2PHANDSHAKE", 16 * MIB, 16 * MIB, "tcp", "", place.master)
    assert with_segment.setup(*arguments) == 0
    yield with_segment
    with_segment.close()


@pytest.fixture
def other(place):
    further = MooncakeDistributedStore()
    arguments = ("localhost", "P2PHANDSHAKE", 16 * MIB, 16 * MIB, "tcp", "", place.master)
    assert further.setup(*arguments) == 0
    yield further
    further.close()


def test_health_and_role(place):
    status, health = ask(place.control, "/health")
    assert (status, health["status"], health["service_ready"]) == (200, "ok", True)
    assert ask(place.control, "/role") == (200, "leader")
    assert ask(place.control, "/ha_status") == (200, "serving")
    assert ask(place.control, "/leader")[1]["present"] is False
    assert ask(place.control, "/nothing")[0] == 404
    assert ask(place.control, "/health", "POST")[0] == 404
    assert ask(place.metadata.removesuffix("/metadata"), "/health") == (200, "OK")


def test_keys(place, store):
    store.put("one", b"12345")
    (found,) = ask(place.control, "/query_key?key=one")[1]["data"]
    assert (found["size_"], found["transport_endpoint_"]) == (5, store.get_hostname())
    status, missing = ask(place.control, "/query_key?key=none")
    assert (status, missing["error_code"]) == (404, -704)
    _, found = ask(place.control, "/batch_query_keys?keys=one,none")
    assert found["data"]["one"]["values"][0]["size_"] == 5
    assert (found["data"]["none"]["ok"], found["data"]["none"]["values"]) == (False, None)
    assert ask(place.control, "/batch_query_keys")[0] == 400
    assert "one" in ask(place.control, "/get_all_keys")[1].splitlines()


def test_many_keys_are_listed_whole(place, store):
    names = [f"many-{at:05}" for at in range(9000)]
    assert store.put_batch(names, [b"x"] * len(names)) == 0
    said = ask(place.control, "/get_all_keys")[1].splitlines()
    assert sorted(name for name in said if name.startswith("many-")) == names
    status, removed = ask(place.control, "/api/v1/remove_all?force=true", "POST")
    assert (status, removed["success"]) == (200, True)
    assert removed["removed_count"] >= 9000
    assert ask(place.control, "/get_all_keys") == (200, "")
    assert ask(place.control, "/api/v1/remove_all?tenant_id=else", "POST")[0] == 400


def test_segments_and_figures(place, store):
    store.put("key", bytes(5000))
    name = store.get_hostname()
    assert name in ask(place.control, "/get_all_segments")[1].splitlines()
    _, detail = ask(place.control, "/get_segments_detail")
    (entry,) = [each for each in detail["segments"] if each["segment_name"] == name]
    assert (entry["size_bytes"], entry["status"]) == (16 * MIB, "OK")
    assert entry["allocator_used_bytes"] >= 5000
    said = ask(place.control, f"/query_segment?segment={name}")[1].splitlines()
    assert said[0] == name
    assert said[2] == f"Capacity(bytes) : {16 * MIB}"
    assert ask(place.control, "/query_segment?segment=none")[0] == 500
    _, status = ask(place.control, f"/api/v1/segments/status?segment={name}")
    assert (status["status"], status["status_name"]) == (1, "OK")
    assert ask(place.control, "/api/v1/segments/status?segment=none")[0] == 404
    assert ask(place.control, "/api/v1/segments/status")[0] == 400
    figures = ask(place.control, "/metrics")[1]
    assert f'segment_total_capacity_bytes{{segment="{name}"}} {16 * MIB}' in figures.splitlines()
    assert re.search(r"^master_key_count [1-9]", figures, re.MULTILINE)
    assert "Keys: " in ask(place.control, "/metrics/summary")[1]


def test_a_disk_is_told_from_memory(place, tmp_path, monkeypatch):
    monkeypatch.setenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", str(8 * MIB))
    lends = MooncakeDistributedStore()
    arguments = ("localhost", "P2PHANDSHAKE", 16 * MIB, 16 * MIB, "tcp", "", place.master)
    assert lends.setup(*arguments, None, True, str(tmp_path)) == 0
    assert lends.put("sunk", bytes(5000)) == 0
    lends.client.hint(["sunk"], "demote").check()

    def below():
        (found,) = ask(place.control, "/batch_query_keys?keys=sunk")[1]["data"].values()
        return found if found["values"] == [] else None

    (there,) = until(below)["local_disk_values"]
    assert there["object_size"] == 5000
    assert there["transport_endpoint"] == f"{lends.get_hostname()}/disk"
    assert ask(place.control, "/query_key?key=sunk")[1]["data"] == []
    figures = dict(
        line.split() for line in ask(place.control, "/metrics")[1].splitlines() if line[0] == "m"
    )
    assert int(figures["master_total_capacity_bytes"]) == 16 * MIB
    assert int(figures["master_total_file_capacity_bytes"]) == 8 * MIB
    assert int(figures["master_allocated_file_size_bytes"]) >= 5000
    before = int(figures["master_allocated_bytes"])
    assert "SSD Storage: " in ask(place.control, "/metrics/summary")[1]
    assert lends.put("here", bytes(MIB)) == 0
    after = re.search(r"^master_allocated_bytes (\d+)", ask(place.control, "/metrics")[1], re.M)[1]
    assert int(after) >= before + MIB
    lends.close()


def job_of(place, wish):
    status, job = ask(place.control, "/api/v1/drain_jobs", "POST", wish)
    assert (status, job["success"], job["status"]) == (200, True, "CREATED")
    return urllib.parse.quote(job["job_id"])


def test_a_drain_moves_everything_off(place, store, other):
    source, target = store.get_hostname(), other.get_hostname()
    keys = [f"drained-{at}" for at in range(20)]
    assert store.put_batch(keys, [b"value"] * len(keys)) == 0
    before = sum(
        source in str(r.get_memory_descriptor().buffer_descriptor.transport_endpoint)
        for key in keys
        for r in store.get_replica_desc(key)
    )
    job = job_of(place, {"segments": [source], "target_segments": [target], "max_concurrency": 1})

    def over():
        status, found = ask(place.control, f"/api/v1/drain_jobs/query?job_id={job}")
        assert status == 200
        return found if found["status_name"] != "RUNNING" else None

    done = until(over)
    assert (done["status_name"], done["active_units"]) == ("SUCCEEDED", 0)
    assert done["succeeded_units"] >= before
    assert done["segments"] == [source]
    _, status = ask(place.control, f"/api/v1/segments/status?segment={source}")
    assert status["status_name"] == "DRAINED"
    store.close()
    assert other.get_batch(keys) == [b"value"] * len(keys)
    assert over() == done  # how it ended is kept


def test_a_drain_that_cannot_end_is_cancelled(place, store):
    store.put("alone", bytes(4 * MIB))
    name = store.get_hostname()
    others = [n for n in ask(place.control, "/get_all_segments")[1].splitlines() if n != name]
    assert others == []  # there is nowhere to go
    reader = store.get_buffer("alone")
    job = job_of(place, {"segments": [name]})
    status, cancelled = ask(place.control, f"/api/v1/drain_jobs/cancel?job_id={job}", "POST")
    # It may have failed by itself already, and then there is nothing to cancel.
    assert (status, cancelled.get("status")) in ((200, "CANCELED"), (409, None))
    _, now = ask(place.control, f"/api/v1/drain_jobs/query?job_id={job}")
    assert now["status_name"] in ("CANCELED", "FAILED")
    _, status = ask(place.control, f"/api/v1/segments/status?segment={name}")
    assert status["status_name"] == "OK"
    assert len(reader) == 4 * MIB


@pytest.mark.parametrize(
    ("wish", "status", "number"),
    [
        ({"segments": ["none"]}, 404, -101),
        ({"segments": []}, 400, -600),
        ({"segments": ["a", "a"]}, 400, -600),
        ({"segments": ["a"], "target_segments": ["a"]}, 400, -600),
        ({"segments": "a"}, 400, -600),
        (b"[]", 400, -600),
        (b"{", 400, -600),
        (b'{"segments": ["\xff"]}', 400, -600),
    ],
)
def test_drains_that_cannot_be(place, wish, status, number):
    found, said = ask(place.control, "/api/v1/drain_jobs", "POST", wish)
    assert (found, said["error_code"]) == (status, number)


def test_a_drain_that_breaks_off_is_cancelled(monkeypatch):
    asked = []

    async def ask(client, operation, request):
        asked.append(request)
        if request == Drain(2):
            raise UnavailableError("the master went away")
        return DrainReply(0)

    async def status():
        entries = [
            SimpleNamespace(name=name, number=number, state=SegmentState.OK, used_bytes=0)
            for number, name in enumerate("ab", 1)
        ]
        return SimpleNamespace(segments=entries)

    monkeypatch.setattr(drains, "_ask", ask)
    jobs, client = drains.Drains(), SimpleNamespace(status=status)
    with pytest.raises(UnavailableError):
        asyncio.run(jobs.start(client, b'{"segments": ["a", "b"]}'))
    assert asked == [Drain(1), Drain(2), Drain(1, cancel=True), Drain(2, cancel=True)]


def test_jobs_that_are_none(place):
    query = "/api/v1/drain_jobs/query?job_id="
    assert ask(place.control, query + "1-2") == (404, {
        "success": False, "error_code": -1402, "error_message": "JOB_NOT_FOUND",
    })  # fmt: skip
    assert ask(place.control, query + "x")[0] == 400
    assert ask(place.control, "/api/v1/drain_jobs/cancel?job_id=1-2", "POST")[0] == 404


def test_pages_of_browsers_change_nothing(place, store):
    store.put("kept", b"value")
    remove = "/api/v1/remove_all?force=true"
    assert ask(place.control, remove, "POST", Origin="http://evil.example")[0] == 403
    # A name that was made to lead here: a page of it could read the answers, too.
    assert ask(place.control, "/get_all_keys", Host="evil.example")[0] == 400
    assert ask(place.metadata, "?key=a", "PUT", b"x", Host="evil.example:80")[0] == 400
    assert ask(place.control, "/role", Host="localhost:9003")[0] == 200
    assert store.get("kept") == b"value"


def test_changes_from_a_network_want_an_insecure_master():
    for insecure, status in ((False, 403), (True, 503)):
        with Control("0.0.0.0", 0, insecure=insecure) as control:
            base = f"http://127.0.0.1:{control.address.rpartition(':')[2]}"
            assert ask(base, "/api/v1/remove_all", "POST")[0] == status
            assert ask(base, "/health")[1]["service_ready"] is False  # no master is known yet
            assert ask(base, "/get_all_keys")[0] == 503


def test_a_taken_port_is_told_at_start(start_program):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        program = start_program(
            "-m", "mooncake_store", "master", "--port=0", f"--metrics_port={port}"
        )
        assert program.wait() == 3
    assert f"127.0.0.1:{port}" in program.output


def test_ports_that_others_reach_speak_https_where_there_is_a_certificate(start_program, tmp_path):
    authority, secret = Authority(tmp_path), tmp_path / "secret"
    secret.write_text("of the pool " * 3)
    secret.chmod(0o600)
    program = start_program(
        "-m", "mooncake_store", "master", "--rpc_port=0", "--port=0",
        "--metrics_host=0.0.0.0", "--metrics_port=0",
        "--enable_http_metadata_server=true", "--http_metadata_server_host=127.0.0.1",
        "--http_metadata_server_port=0",
        MOONCAKE_SECRET_FILE=str(secret),
        MOONCAKE_TLS_CERTIFICATE=str(authority.signs("127.0.0.1")),
    )  # fmt: skip
    control = program.wait_for_line("control port").split()[-1]
    values = program.wait_for_line("metadata server").split()[-1]
    program.wait_for_line("is ready")
    assert control.startswith("https://")
    judge = ssl.create_default_context(cafile=str(authority.file))
    url = f"https://127.0.0.1:{control.rpartition(':')[2]}/role"
    with urllib.request.urlopen(url, timeout=20, context=judge) as answer:
        assert answer.status == 200
    # Nobody else reaches it, and a proxy there may speak TLS itself.
    assert ask(values, "?key=none") == (404, "metadata not found")


def test_metadata(place):
    url = place.metadata
    assert ask(url, "?key=none") == (404, "metadata not found")
    assert ask(url, "?key=mooncake/ram/a", "PUT", b'{"a": 1}')[0] == 200
    assert ask(url, "?key=mooncake%2Fram%2Fa") == (200, {"a": 1})
    assert ask(url, "?key=mooncake/ram/a", "PUT", b"{}")[0] == 200
    assert ask(url, "?key=mooncake/ram/a") == (200, {})
    assert ask(url, "?key=mooncake/ram/a", "DELETE")[0] == 200
    assert ask(url, "?key=mooncake/ram/a", "DELETE")[0] == 404
    for query in ("", "?key=", "?other=x"):
        assert ask(url, query)[0] == 400
    assert ask(url, "?key=mooncake/rpc_meta/h", "PUT", b"1")[0] == 200
    assert ask(url, "?key=mooncake/rpc_meta/h", "PUT", b"1")[0] == 200
    assert ask(url, "?key=mooncake/rpc_meta/h", "PUT", b"2")[0] == 400
    assert ask(url, "?key=a", "POST", b"1")[0] == 404


def test_metadata_is_bounded(monkeypatch):
    monkeypatch.setattr(metadata, "TOTAL_BYTES_MAX", 3000)
    with Metadata("127.0.0.1", 0) as server:
        base = f"http://{server.address}/metadata"
        assert ask(base, "?key=a", "PUT", bytes(2000))[0] == 200
        assert ask(base, "?key=b", "PUT", bytes(2000))[0] == 507
        assert ask(base, "?key=a", "PUT", bytes(2500))[0] == 200  # in place of the one before
        assert ask(base, "?key=a", "DELETE")[0] == 200
        assert ask(base, "?key=b", "PUT", bytes(2000))[0] == 200
        assert ask(base, f"?key={'n' * 5000}", "PUT", b"x")[0] == 400


def test_one_connection_carries_many_requests_until_its_peer_ends_it(place):
    host = urllib.parse.urlsplit(place.control).netloc
    connection = http.client.HTTPConnection(host, timeout=20)
    for _ in range(3):
        connection.request("GET", "/role")
        assert connection.getresponse().read() == b"leader"
    connection.request("GET", "/role", headers={"Connection": "close"})
    answer = connection.getresponse()
    assert answer.read() == b"leader"
    assert answer.getheader("Connection") == "close"
    connection.close()
