"""Copies through the caches and past them: the measurement behind the size from which they stream.

    python tests/transfer/bench_copies.py [seconds per row]

Random blocks of a shared segment go into huge pages, both far larger than the caches; "read" adds
that the same processor then reads what was written. The sides of a row alternate copy by copy, so
that noise of the machine hits all of them; figures are medians.
"""

import mmap
import sys
import time

import numpy as np

from transfer_engine import Segment
from transfer_engine.kernels import moving
from transfer_engine.segments.mapping import load_kernels

MEMORY = 512 << 20
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
SIDES = {
    "memcpy": (0, False),
    "streamed": (1, False),
    "memcpy, read": (0, True),
    "streamed, read": (1, True),
}


def huge_pages():
    mapped = mmap.mmap(-1, MEMORY, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapped, np.uint8)
    memory.view(np.int64)[:] = 1
    return memory


def one_row(random, target, source, size, seconds):
    """Copy in every way in turn; give the median seconds of each."""
    times = {name: [] for name in SIDES}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, (streaming, reading) in SIDES.items():
            there, here = (random.integers(0, MEMORY // size, 2) * size).tolist()
            addresses = target.ctypes.data + there, source.ctypes.data + here
            begin = time.perf_counter()
            moving.copy_one(*addresses, size, streaming)
            if reading:
                target[there : there + size].view(np.int64).sum()
            times[name].append(time.perf_counter() - begin)
    return {name: float(np.median(taken)) for name, taken in times.items()}


def main(seconds):
    load_kernels()
    random = np.random.default_rng(1)
    target = huge_pages()
    with Segment.create(MEMORY) as segment:
        source = np.frombuffer(segment.buffer, np.uint8)
        source.view(np.int64)[:] = 1
        for size in SIZES:
            found = one_row(random, target, source, size, seconds)
            cells = (f"{name} {size / taken / 1e9:.1f}" for name, taken in found.items())
            print(f"{size >> 10:>6} KiB  GB/s: {' | '.join(cells)}", flush=True)
        del source


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0)
