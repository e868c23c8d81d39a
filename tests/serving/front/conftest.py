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
async def conducting(fleet, pool_url=""):
    """A conductor of workers."""
    conductor = Conductor(connect=fleet.connect, pool_url=pool_url)
    await conductor.start(fleet.addresses)
    try:
        yield conductor
    finally:
        await conductor.close()


def fronting(conductor, shell, **settings):
    """The application of a front."""
    settings = {"tokenizer": ByteTokenizer()} | settings
    return front_application(Front(conductor, ConductorBoard(conductor), **settings), shell)


@contextlib.asynccontextmanager
async def serving(fleet, *, pool_url="", port=0, token="", **settings):
    """(base URL, conductor) of a front."""
    async with conducting(fleet, pool_url) as conductor:
        application = fronting(conductor, Shell(token=token), **settings)
        async with listening(application, port) as url:
            yield url, conductor


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
