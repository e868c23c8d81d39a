"""An HTTP server of ours as a program of its own: `python -m ... KIND` writes its port."""

import asyncio
import sys
import threading
from pathlib import Path

from mooncake_store.compat.control import Control
from mooncake_store.compat.rest import MooncakeStoreService
from mooncake_store.program.shell import Shell
from serving.front.external import ExternalFront, external_application
from serving.system import listen, serve_http


def plain(make):
    """Serve from the server's own thread."""
    with make() as server:
        print(server.address.rpartition(":")[2], flush=True)
        threading.Event().wait()


def with_aiohttp(make):
    """Serve an application as `mooncake serve` does."""

    async def main():
        _, url = await serve_http(make(), "127.0.0.1", listen("127.0.0.1", 0))
        print(url.rpartition(":")[2], flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())


KINDS = {
    "control": lambda: plain(lambda: Control("127.0.0.1", 0)),
    "front": lambda: with_aiohttp(lambda: external_application(ExternalFront({}), Shell())),
    "front, key": lambda: with_aiohttp(
        lambda: external_application(
            ExternalFront({}), Shell(admin_token=Path(sys.argv[2]).read_text())
        )
    ),
    "rest": lambda: with_aiohttp(lambda: MooncakeStoreService().application(Shell())),
}

if __name__ == "__main__":
    KINDS[sys.argv[1]]()
