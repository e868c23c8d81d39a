"""What TLS costs on the data path: reads and writes over tcp, sealed beside plain.

    python tests/transfer/bench_tls.py [rounds]

Two owner processes, one of them with TLS. The sides alternate round by round, so that noise of the
machine hits both; the figure is the median of the ratios of the rates, sealed to plain.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.certificates import Authority
from transfer_engine import TransferEngine
from transfer_engine.testing import OwnerProcess
from transfer_engine.wire.keyring import SharedSecret
from transfer_engine.wire.tls import Tls

SECRET = b"the secret of the bench"
SEGMENT = 64 << 20
SHAPES = [(4096, 1), (4096, 128), (65536, 1), (65536, 16), (1 << 20, 1), (1 << 20, 16)]
ROUND_BYTES = 8 << 20


def measured(sides, verb, size, count, rounds):
    """The median seconds of each side, and that of the ratios."""
    offsets = np.arange(count, dtype=np.int64) * (SEGMENT // count)
    lengths = np.full(count, size, dtype=np.int64)
    times = max(2, min(40, ROUND_BYTES // (size * count)))
    took = ([], [])
    for turn in range(rounds):
        for side in (0, 1) if turn % 2 else (1, 0):
            engine, target, region = sides[side]
            move, addresses = getattr(engine, verb), region.address + offsets
            move(target, offsets, lengths, addresses).check()
            began = time.perf_counter()
            for _ in range(times):
                move(target, offsets, lengths, addresses)
            took[side].append((time.perf_counter() - began) / times)
    ratios = [plain / sealed for plain, sealed in zip(*took, strict=True)]
    return *map(statistics.median, took), statistics.median(ratios)


def main(rounds=15):
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority(Path(folder))
        shown, believed = str(authority.signs("127.0.0.1")), str(authority.file)
        sealed = SharedSecret(SECRET, tls=Tls(authority=believed))
        with (
            OwnerProcess(secret=SECRET) as one,
            OwnerProcess(secret=SECRET, tls={"certificate": shown}) as other,
            TransferEngine(secret=SECRET) as plain_engine,
            TransferEngine(secret=sealed) as sealed_engine,
        ):
            memory = np.zeros(SEGMENT, dtype=np.uint8)
            sides = [
                (engine, engine.open(owner.publish(SEGMENT, 1), require="tcp"),
                 engine.register(memory))
                for owner, engine in ((one, plain_engine), (other, sealed_engine))
            ]  # fmt: skip
            for size, count in SHAPES:
                for verb in ("read_batch", "write_batch"):
                    plain, tls, ratio = measured(sides, verb, size, count, rounds)
                    print(
                        f"{verb[:-6]:6} {size:8} x{count:<4} plain {plain * 1e6:8.0f} us"
                        f"   TLS {tls * 1e6:8.0f} us   ratio {ratio:.2f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
