"""A host that is started anew, with many objects on its disk: `python -m tests.soak.reboot`.

A master and a worker that lends memory and a file; all that is put goes to the file as well. Then
both are killed, what lay in memory is deleted, the page cache is dropped where that is allowed, and
both start as on another boot of the host. It prints how long after the worker's mounting every
object is there again, compares one in a hundred, then all, and fails on an object that is lost, on
other bytes, and where it took longer than SERVED_S.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from mooncake_store import Client
from mooncake_store.journal.ring_file import remove_rings
from tests.master.wires import ClusterWire
from tests.waiting import until

SERVED_S = 5.0
BATCH = 4096
AHEAD = 4
"""Batches put before the disk has them: what it does not keep up with does not go there."""
PATIENCE_S = 60.0
HERE, ANEW = ("-m", "mooncake_store"), ("-m", "tests.master.rebooted")
MOUNTED = 1


class Host:
    """The processes of a host, its memory and its disk."""

    def __init__(self, folder: Path, memory: Path, objects: int, nbytes: int) -> None:
        self._folder, self._memory, self._objects = folder, memory, objects
        self._room = max(64 << 20, 2 * objects * max(nbytes, 512))
        self._running: list[subprocess.Popen[bytes]] = []
        self.port = 0

    @property
    def url(self) -> str:
        """Where its store is."""
        return f"mooncake://127.0.0.1:{self.port}/default"

    def start(self, command: tuple[str, ...]) -> float:
        """Start master and worker; return when what the worker has was mounted."""
        address = self._run(
            command, "master", "--port", self.port, "--state", self._folder / "state",
            "--journal", "synced", "--offload", "write", "--promotion-hits", 0, "--objects-max",
            2 * self._objects,
        )["address"]  # fmt: skip
        self.port = int(str(address).rpartition(":")[2])
        self._run(
            command, "worker", "--master", f"127.0.0.1:{self.port}", "--name", "w", "--memory",
            self._memory, "--segment", self._room, "--segment",
            f"file:{self._folder / 'pool'},{self._room}",
        )  # fmt: skip
        wire = ClusterWire(f"127.0.0.1:{self.port}")
        try:
            until(lambda: [s.state for s in wire.segments()] == [MOUNTED] * 2, PATIENCE_S)
        finally:
            wire.close()
        return time.monotonic()

    def _run(self, command: tuple[str, ...], *arguments: object) -> dict[str, object]:
        words = [sys.executable, *command, *map(str, arguments), "--json"]
        program = subprocess.Popen(words, stdout=subprocess.PIPE)
        self._running.append(program)
        assert program.stdout is not None
        readable, _, _ = select.select([program.stdout], [], [], PATIENCE_S)
        assert readable, f"{words[3]} is not ready within {PATIENCE_S:g} s"
        told: dict[str, object] = json.loads(program.stdout.readline())
        return told

    def end(self) -> None:
        """Kill all that runs, and with it what lay in memory."""
        for program in reversed(self._running):
            program.kill()
            program.wait(PATIENCE_S)
            if program.stdout is not None:
                program.stdout.close()
        self._running.clear()
        for path in self._memory.iterdir():
            path.unlink()
        remove_rings(self._folder / "state" / "shard-0")
        with contextlib.suppress(OSError):  # not everybody may
            Path("/proc/sys/vm/drop_caches").write_text("3")


def names_of(first: int, stop: int) -> list[str]:
    """The keys of some objects."""
    return [f"model/block/{number:09d}" for number in range(first, stop)]


def value_of(number: int, nbytes: int) -> bytes:
    """Bytes that belong to an object and to no other."""
    return (number.to_bytes(8, "little") * (nbytes // 8 + 1))[:nbytes]


def fill(host: Host, objects: int, nbytes: int) -> None:
    """Put all objects, not quicker than the disk takes them."""
    with Client(host.url, deadline=60.0) as client:
        batches = [range(first, min(first + BATCH, objects)) for first in range(0, objects, BATCH)]
        for at, batch in enumerate([*batches, *[range(0)] * AHEAD]):
            if batch:
                values = [value_of(number, nbytes) for number in batch]
                client.put_many(names_of(batch.start, batch.stop), values).check()
            if at >= AHEAD:
                before = batches[at - AHEAD]
                names = names_of(before.start, before.stop)
                what = f"objects {before} are on the disk"
                until(lambda names=names: on_disk(client, names), PATIENCE_S, what)


def on_disk(client: Client, names: list[str]) -> bool:
    """Whether each of these objects has a replica beside the one in memory."""
    return all(
        info is not None and len(info.replicas) > 1 for info in client.query_many(names).infos
    )


def compare(client: Client, numbers: list[int], nbytes: int) -> None:
    """Fail unless these objects are what was put."""
    for at in range(0, len(numbers), BATCH):
        some = numbers[at : at + BATCH]
        names = [names_of(number, number + 1)[0] for number in some]
        found = client.get_many(names, deadline=60.0).check().values
        assert found == [value_of(number, nbytes) for number in some], "other bytes"


def main() -> None:
    """Run once and say how long it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, default=1_000_000)
    parser.add_argument("--bytes", type=int, default=256)
    options = parser.parse_args()
    objects, nbytes = options.objects, options.bytes
    with (
        tempfile.TemporaryDirectory(prefix="mooncake-reboot-") as folder,
        tempfile.TemporaryDirectory(prefix="mooncake-reboot-", dir="/dev/shm") as memory,
    ):
        host = Host(Path(folder), Path(memory), objects, nbytes)
        try:
            host.start(HERE)
            fill(host, objects, nbytes)
            host.end()
            began = time.monotonic()
            mounted = host.start(ANEW)
            with Client(host.url, deadline=60.0) as client:
                for first in range(0, objects, BATCH):
                    names = names_of(first, min(first + BATCH, objects))
                    until(lambda names=names: client.exists_many(names).all(), 60.0)
                served = time.monotonic()
                print(f"{objects} objects: mounted {mounted - began:.2f} s after the start, all "
                      f"there {served - mounted:.2f} s later", flush=True)  # fmt: skip
                sample = np.random.default_rng(1).choice(objects, max(1, objects // 100), False)
                compare(client, sample.tolist(), nbytes)
                compare(client, list(range(objects)), nbytes)
                print("every object is what was put", flush=True)
                assert served - mounted < SERVED_S, f"more than {SERVED_S:g} s"
        finally:
            host.end()


if __name__ == "__main__":
    main()
