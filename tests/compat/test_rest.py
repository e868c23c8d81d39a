"""The REST service: the original's routes, on loopback or with a token."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from mooncake_store.errors import ConfigError

pytest.importorskip("aiohttp")

from aiohttp import ClientSession
from aiohttp.test_utils import TestServer
from yarl import URL

from mooncake_store.compat.rest import MooncakeStoreService, _shm_name_to_path
from mooncake_store.program import descriptors
from mooncake_store.program.shell import Shell

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


def service(store, monkeypatch):
    """A service whose store is set up already."""
    monkeypatch.setenv("MOONCAKE_MASTER", "127.0.0.1:1")
    made = MooncakeStoreService()
    made.store = store
    return made


def talk(served, conversation, token=""):
    async def run():
        async with (
            TestServer(served.application(Shell(token=token))) as server,
            ClientSession() as session,
        ):

            async def ask(method, path, **more):
                async with session.request(method, server.make_url(path), **more) as answer:
                    return answer.status, await answer.read()

            await conversation(ask)

    asyncio.run(run())


def test_objects(store, monkeypatch):
    async def conversation(ask):
        assert (await ask("PUT", "/api/put", json={"key": "a/b", "value": "text"}))[0] == 200
        assert await ask("GET", "/api/get/a/b") == (200, b"text")
        assert await ask("GET", "/api/exist/a/b") == (200, b'{"exists": true}')
        assert await ask("GET", "/api/exist/none") == (200, b'{"exists": false}')
        assert (await ask("GET", "/api/get/none"))[0] == 404
        assert (await ask("DELETE", "/api/remove/a/b"))[0] == 200
        assert (await ask("DELETE", "/api/remove/a/b"))[0] == 404
        assert (await ask("DELETE", "/api/remove/" + "k" * 5000))[0] == 400
        for body in (
            {"key": "a"}, {"key": "", "value": "x"}, {"key": "a", "value": 1}, [],
            {"key": "a", "value": ""}, {"key": "k" * 5000, "value": "x"},
        ):  # fmt: skip
            assert (await ask("PUT", "/api/put", json=body))[0] == 400, body
        as_json = {"Content-Type": "application/json"}
        for raw in (b"{", b"[" * 50_000):
            assert (await ask("PUT", "/api/put", data=raw, headers=as_json))[0] == 400
        odd = {"Content-Type": "application/json; charset=utf-99"}
        assert (await ask("PUT", "/api/put", data=b"{}", headers=odd))[0] == 400
        store.put("one", b"1")
        status, body = await ask("DELETE", "/api/remove_all")
        assert (status, json.loads(body)) == (200, {"status": "success removed 1 keys"})

    talk(service(store, monkeypatch), conversation)


def test_memory(make, monkeypatch):
    store = make(segment=0)

    async def conversation(ask):
        for size in (0, -1, True, 1.5, "4", None):
            status, body = await ask("POST", "/api/mount", json={"size": size})
            assert status == 400, size
            error = json.loads(body)["error"]
            assert error.startswith("Invalid size"), error
            assert error.endswith("at `$.size`"), error
        status, body = await ask("POST", "/api/mount", json={"size": 2 * MIB})
        assert status == 200
        found = json.loads(body)
        assert (found["status"], found["allocated_size"]) == ("success", 2 * MIB)
        assert (await ask("PUT", "/api/put", json={"key": "a", "value": "x"}))[0] == 200
        names = {"segment_ids": found["segment_ids"]}
        assert (await ask("POST", "/api/unmount", json={"grace_period_seconds": 0}))[0] == 400
        assert (await ask("POST", "/api/unmount", json=names))[0] == 200
        assert (await ask("POST", "/api/unmount", json=names))[0] == 500
        assert (await ask("PUT", "/api/put", json={"key": "b", "value": "x"}))[0] == 500
        for grace, status in ((-1, 400), (True, 400), (3601, 400), (0, 200)):
            body = {"grace_period_seconds": grace}
            assert (await ask("POST", "/api/unmount_local_disk", json=body))[0] == status, grace

    talk(service(store, monkeypatch), conversation)


def test_what_has_no_place_or_no_room_is_refused_with_the_reason(make, monkeypatch):
    monkeypatch.setattr(descriptors, "LENDABLE_MAX", 1)
    store = make(segment=0)

    async def conversation(ask):
        async def mount(status, size=2 * MIB):
            found = await ask("POST", "/api/mount", json={"size": size})
            assert found[0] == status, found
            return json.loads(found[1])

        found = await mount(500, 1 << 60)
        assert "1024PiB are to be lent, and there is only room for " in found["error"]
        lent = await mount(200)  # what was refused takes no place
        found = await mount(500)
        assert "lends 1 segments beside its first, as many as it may" in found["error"]
        assert "ulimit -n" in found["error"]
        names = {"segment_ids": lent["segment_ids"]}
        assert (await ask("POST", "/api/unmount", json=names))[0] == 200
        await mount(200)

    talk(service(store, monkeypatch), conversation)


@pytest.fixture
def shared():
    """Two files in shared memory."""
    paths = [Path(f"/dev/shm/mooncake-test-{os.getpid()}-{name}") for name in "ab"]
    for path in paths:
        path.write_bytes(bytes(2 * MIB))
    yield paths
    for path in paths:
        path.unlink()


@pytest.mark.parametrize("name", [None, 123, "", "/", ".", "..", "a/b", "/../a"])
def test_what_is_no_name_of_shared_memory_has_no_path(name):
    assert _shm_name_to_path(name) is None


def test_shared_memory(make, monkeypatch, shared):
    store = make(segment=0)
    served = service(store, monkeypatch)
    one, two = shared

    async def conversation(ask):
        async def reconfigure(status, **body):
            found = await ask("POST", "/api/reconfigure", json=body)
            assert found[0] == status, found
            return json.loads(found[1])

        for name in ("../etc/x", "", ".", "/", 7):
            body = {"name": name, "size": 2 * MIB}
            assert (await ask("POST", "/api/mount_shm", json=body))[0] == 400, name
        status, body = await ask("POST", "/api/mount_shm", json={"name": one.name, "size": 2 * MIB})
        assert status == 200
        names = json.loads(body)["segment_ids"]
        assert store.put("key", b"in shared memory") == 0
        assert b"in shared memory" in one.read_bytes()
        status, body = await ask("POST", "/api/unmount_shm", json={"segment_ids": [*names, "no"]})
        assert (status, json.loads(body)["failed_segment_ids"]) == (500, ["no"])

        await reconfigure(400, mode="other")
        await reconfigure(400, mode="decode", size=2 * MIB)
        await reconfigure(400, mode="decode", path="/etc/passwd", size=2 * MIB)
        await reconfigure(400, mode="decode", path="/dev/shm/../../etc/passwd", size=2 * MIB)
        found = await reconfigure(500, mode="decode", path="/dev/shm/none-such", size=2 * MIB)
        assert found["mode"] == "prefill"
        first = await reconfigure(200, mode="decode", path=str(one), size=2 * MIB)
        found = await reconfigure(500, mode="decode", path="/dev/shm/none-such", size=2 * MIB)
        assert (found["mode"], served.mounted_segment_ids) == ("decode", first["segment_ids"])
        second = await reconfigure(200, mode="decode", path=str(two), size=2 * MIB)
        assert served.mounted_segment_ids == second["segment_ids"] != first["segment_ids"]
        assert (await reconfigure(200, mode="prefill"))["mode"] == "prefill"
        assert store.put("later", b"x") == -200  # nothing is lent any more

    talk(served, conversation)


def test_a_token_is_asked_for(store, monkeypatch):
    async def conversation(ask):
        assert (await ask("GET", "/api/exist/a"))[0] == 401
        headers = {"Authorization": "Bearer wrong"}
        assert (await ask("GET", "/api/exist/a", headers=headers))[0] == 401
        headers = {"Authorization": "Bearer right"}
        assert (await ask("GET", "/api/exist/a", headers=headers))[0] == 200

    talk(service(store, monkeypatch), conversation, "right")


def test_other_machines_need_a_token(store, monkeypatch):
    with pytest.raises(ConfigError, match="--host"):
        asyncio.run(service(store, monkeypatch).start_http_service(0, "10.0.0.1"))


def test_the_store_is_waited_for_no_longer_than_asked(monkeypatch):
    monkeypatch.setenv("MOONCAKE_MASTER", "127.0.0.1:1")
    assert asyncio.run(MooncakeStoreService().start_store_service(0)) is False


def test_on_loopback_a_token_is_made_for_the_same_user(store, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    made = tmp_path / "mooncake"

    async def run(**how):
        served = service(store, monkeypatch)
        served.store = None
        await served.start_http_service(0, **how)
        port = served._web.address[1]
        key = (made / f"rest-{port}.token").read_text().strip() if made.exists() else ""
        try:
            async with ClientSession(f"http://127.0.0.1:{port}") as session:
                found = []
                for headers in {}, {"Authorization": f"Bearer {key}"}:
                    async with session.get("/api/exist/a", headers=headers) as answer:
                        found.append(answer.status)
                return found
        finally:
            await served.stop()

    for how in {"insecure": True}, {"token": "t"}:
        asyncio.run(run(**how))
        assert not made.exists()
    assert asyncio.run(run(insecure=True)) == [500, 500]  # it has no store
    assert asyncio.run(run()) == [401, 500]
    assert not list(made.iterdir())


def test_keys_are_not_paths(store, monkeypatch):
    async def conversation(ask):
        for key, written in (
            ("a//b", "a//b"),
            ("../x", "%2e%2e%2fx"),
            ("a/b", "a%2Fb"),
            ("%", "%25"),
            ("a\nb\r\n", "a%0Ab%0D%0A"),
        ):
            store.put(key, key.encode())
            path = URL(f"/api/get/{written}", encoded=True)
            assert await ask("GET", path) == (200, key.encode()), written

    talk(service(store, monkeypatch), conversation)


def test_the_program_starts_and_stops(start_program, master, free_port):
    program = start_program(
        "-m",
        "mooncake.mooncake_store_service",
        f"--port={free_port}",
        "-Dglobal_segment_size=4MB",
        PYTHONPATH=os.pathsep.join([str(ROOT / "compat"), str(ROOT)]),
        MOONCAKE_MASTER=master,
    )
    program.wait_for_line("listens on")
    program.signal(signal.SIGTERM)
    assert program.wait() == 0
