"""A front over a conductor over fake workers, on a real socket."""

import contextlib

import aiohttp
import pytest_asyncio
from aiohttp import web

from mooncake_store.program.shell import Shell
from serving.conductor.conductor import Conductor
from serving.engine.tokenizer import ByteTokenizer
from serving.front.app import Front, front_application
from serving.front.board import ConductorBoard
from tests.serving.fakes import Fleet


@contextlib.asynccontextmanager
async def listening(application, port=0):
    """The base URL of an application that runs."""
    runner = web.AppRunner(application, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def serving(fleet, *, pool_url="", port=0, token="", **settings):
    """(base URL, conductor) of a front."""
    conductor = Conductor(connect=fleet.connect, pool_url=pool_url)
    await conductor.start(fleet.addresses)
    settings = {"tokenizer": ByteTokenizer()} | settings
    front = Front(conductor, ConductorBoard(conductor), **settings)
    try:
        async with listening(front_application(front, Shell(token=token)), port) as url:
            yield url, conductor
    finally:
        await conductor.close()


@pytest_asyncio.fixture
async def http():
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(20)) as session:
        yield session


@pytest_asyncio.fixture
async def fleet():
    return Fleet()


@pytest_asyncio.fixture
async def served(fleet):
    async with serving(fleet) as (url, conductor):
        yield url, conductor
