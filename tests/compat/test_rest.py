"""The REST service: the original's routes, on loopback or with a token."""

import asyncio
import os
from pathlib import Path

import pytest

from mooncake_store.errors import ConfigError

pytest.importorskip("aiohttp")

from aiohttp import ClientSession
from aiohttp.test_utils import TestServer

from mooncake_store.compat.rest import main, rest_application


def talk(store, conversation, token=""):
    async def run():
        async with TestServer(rest_application(store, token)) as server, ClientSession() as session:

            async def ask(method, path, **more):
                async with session.request(method, server.make_url(path), **more) as answer:
                    return answer.status, await answer.read()

            await conversation(ask)

    asyncio.run(run())


def test_routes(store):
    async def conversation(ask):
        assert (await ask("PUT", "/api/put", json={"key": "a/b", "value": "text"}))[0] == 200
        assert await ask("GET", "/api/get/a/b") == (200, b"text")
        assert await ask("GET", "/api/exist/a/b") == (200, b'{"exists": true}')
        assert await ask("GET", "/api/exist/none") == (200, b'{"exists": false}')
        assert (await ask("GET", "/api/get/none"))[0] == 404
        assert (await ask("DELETE", "/api/remove/a/b"))[0] == 200
        assert (await ask("DELETE", "/api/remove/a/b"))[0] == 404
        assert (await ask("PUT", "/api/put", json={"key": "a"}))[0] == 400
        assert (await ask("PUT", "/api/put", data=b"{"))[0] == 400
        assert (await ask("PUT", "/api/put", json={"key": "", "value": "x"}))[0] == 500
        store.put("one", b"1")
        assert (await ask("DELETE", "/api/remove_all"))[1] == b'{"status": "success", "removed": 1}'
        status, body = await ask("POST", "/api/mount", json={"size": 2 << 20})
        assert status == 200
        names = __import__("json").loads(body)["segment_ids"]
        assert (await ask("POST", "/api/unmount", json={"segment_ids": names}))[0] == 200
        assert (await ask("POST", "/api/unmount", json={"segment_ids": names}))[0] == 404

    talk(store, conversation)


def test_a_token_is_asked_for(store):
    async def conversation(ask):
        assert (await ask("GET", "/api/exist/a"))[0] == 401
        headers = {"Authorization": "Bearer wrong"}
        assert (await ask("GET", "/api/exist/a", headers=headers))[0] == 401
        headers = {"Authorization": "Bearer right"}
        assert (await ask("GET", "/api/exist/a", headers=headers))[0] == 200

    talk(store, conversation, "right")


def test_other_machines_need_a_token():
    with pytest.raises(ConfigError, match="--host"):
        main(["--host", "10.0.0.1"])


def test_the_program_starts_and_stops(start_program, master, free_port):
    import signal

    root = Path(__file__).resolve().parents[2]
    program = start_program(
        "-m",
        "mooncake.mooncake_store_service",
        f"--port={free_port}",
        PYTHONPATH=os.pathsep.join([str(root / "compat"), str(root)]),
        MOONCAKE_MASTER=master,
        MOONCAKE_GLOBAL_SEGMENT_SIZE="4MB",
    )
    program.wait_for_line("listens on")
    program.signal(signal.SIGTERM)
    assert program.wait() == 0
