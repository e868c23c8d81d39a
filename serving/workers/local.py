"""Serving workers on this machine as child processes, for tests, demos and `mooncake serve`.

    with LocalWorkers(model="tiny", prefill=1, decode=1, pool_url=cluster.url) as workers:
        workers.addresses          # ["127.0.0.1:40001", "127.0.0.1:40002"]

They end with this process, however it ends. Each computes on one thread, so that two of them share
a small machine fairly. Nothing is restarted: whoever starts them decides that.
"""

from __future__ import annotations

import contextlib
from typing import Any

from mooncake_store.program import logs
from mooncake_store.program.children import Child
from serving.workers.protocol import COUPLED_ROLE, DECODE_ROLE, PREFILL_ROLE

__all__ = ["LocalWorkers"]

_PROGRAM = "serving.workers.program"


class LocalWorkers:
    """Worker processes. `settings` are further ones of `WorkerSettings`, by name."""

    def __init__(
        self,
        *,
        model: str = "tiny",
        prefill: int = 1,
        decode: int = 1,
        coupled: int = 0,
        pool_url: str = "",
        secret: bytes | None = None,
        **settings: Any,
    ) -> None:
        self._settings = {"model": model, "pool_url": pool_url, **settings}
        self._secret = secret
        self.roles = [PREFILL_ROLE] * prefill + [DECODE_ROLE] * decode + [COUPLED_ROLE] * coupled
        """Those that they are started with."""
        self.children: list[Child] = []
        self.addresses: list[str] = []

    def start(self) -> LocalWorkers:
        """Start all of them, at the same time; return self."""
        try:
            for number, role in enumerate(self.roles):
                self.children.append(self._child(number, role))
            for child in self.children:
                self.addresses.append(child.wait_ready()["address"])
        except BaseException:
            self.close()
            raise
        return self

    def _child(self, number: int, role: str) -> Child:
        worker_id = f"worker-{number}"
        message = {
            "settings": {**self._settings, "role": role, "worker_id": worker_id},
            "secret": self._secret,
            "log": logs.chosen(),
        }
        return Child(_PROGRAM, message, name=worker_id)

    def replace(self, number: int, role: str) -> str:
        """Start a new worker where one was killed; return its address."""
        self.kill(number)
        self.children[number] = child = self._child(number, role)
        self.addresses[number] = child.wait_ready()["address"]
        return self.addresses[number]

    def kill(self, number: int) -> None:
        """End one at once, as a crash would."""
        self.children[number].kill()

    def close(self) -> None:
        """End all of them. Idempotent."""
        for child in self.children:
            child.release()
        for child in self.children:
            with contextlib.suppress(OSError):
                child.stop()
        self.children.clear()

    def __enter__(self) -> LocalWorkers:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()
