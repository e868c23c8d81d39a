"""Makes docs/pictures/master-*.png: the page of a master over a pool at work, in a real browser.

    python scripts/page_pictures.py

A pool of three workers with memory and one with a disk is written and read for a minute;
one worker is stopped then, so that there is something wrong to show. Needs Debian's chromium.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mooncake_store import Client, LocalCluster  # noqa: E402
from mooncake_store.compat.control import Control  # noqa: E402
from tests.browser import Browser, installed  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

FOLDER = ROOT / "docs" / "pictures"
BUSY_S = 60.0
PICTURES: Mapping[str, dict[str, Any]] = {
    "master-light.png": {"height": 880},
    "master-dark.png": {"height": 880, "dark": True},
    "master-phone.png": {"width": 390, "height": 844},
}


def work(url: str, ended: threading.Event) -> None:
    """Read and write blocks of a few conversations, some far more often than others."""
    chance = random.Random(1)
    with Client(url) as client:
        while not ended.wait(0.03):
            first = int(chance.expovariate(1 / 250))
            keys = [f"llama/{chance.randrange(4)}/block-{first + at}" for at in range(16)]
            found = client.get_many(keys)
            missing = [key for key, status in zip(keys, found.statuses, strict=True) if status]
            if missing:
                client.put_many(missing, [b"x" * 60_000] * len(missing))


async def take(url: str) -> None:
    """Open the page as each picture shows it."""
    async with Browser(installed()) as browser:
        for name, how in PICTURES.items():
            page = await browser.open(url, **how)
            await page.until("document.querySelector('#problems')?.checkVisibility()")
            await page.until("document.querySelectorAll('figure circle').length > 9")
            (FOLDER / name).write_bytes(await page.picture())


def main() -> None:
    """Make them."""
    ended = threading.Event()
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(3, "64MB", 2) as cluster,
        Control("127.0.0.1", 0) as control,
    ):
        control.serve(cluster.address)
        disk = ("--segment", f"file:{folder}/pool,400MB", "--name", "worker-disk")
        lends = subprocess.Popen(
            [sys.executable, "-m", "mooncake_store", "worker", "--master", cluster.address, *disk]
        )
        thread = threading.Thread(target=work, args=(cluster.url, ended))
        thread.start()
        try:
            ended.wait(BUSY_S)
            cluster.stop_worker(2)
            asyncio.run(take(control.url))
            cluster.resume_worker(2)
        finally:
            ended.set()
            thread.join()
            lends.terminate()
            lends.wait()


if __name__ == "__main__":
    main()
