"""Two fronts as a program of its own: `python -m tests.fuzz.fronts TOKEN ADMIN_TOKEN` writes ports.

One is before workers without a model, the other before an engine that is played. Both ask for a
token, and the second for that of administrators where engines are registered.
"""

import asyncio
import contextlib
import sys

from mooncake_store.program.shell import Shell
from serving.front.external import ExternalFront, external_application
from serving.system import listen, serve_http
from tests.serving.fakes import Fleet
from tests.serving.front.conftest import conducting, fronting, listening
from tests.serving.front.engines import Engine


async def serve(shell):
    async with contextlib.AsyncExitStack() as stack:
        conductor = await stack.enter_async_context(conducting(Fleet()))
        engine = await stack.enter_async_context(listening(Engine().application()))
        engines = external_application(ExternalFront({"engine": engine}), shell)
        ports = []
        for application in (fronting(conductor, shell), engines):
            server, url = await serve_http(application, shell.host, listen(shell.host, 0))
            stack.push_async_callback(server.cleanup)
            ports.append(url.rpartition(":")[2])
        print(*ports, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Shell(token=sys.argv[1], admin_token=sys.argv[2])))
