"""What rights to memory cost on the data path: reads and writes over tcp, by rights beside without.

    python tests/transfer/bench_rights.py [rounds [shape ...]]          shapes such as 128x4096
    chrt -f 1 taskset -c 1 python tests/transfer/bench_rights.py        where other programs run too

One owner process and one segment with a key. A client with the credential of a writer shows rights,
one with the pool's secret moves the same ranges without. The sides alternate within each round, in
turns of a few calls, and the figure is the median of the ratios of their times. Each write has
rights of its own, which a round makes before it begins.
"""

import itertools
import statistics
import subprocess
import sys
import time

import numpy as np

from tests.transfer.rights import KEY, POOL, Ring, known_as, receipts
from transfer_engine import Segment, TransferEngine, TransferServer
from transfer_engine.base import SegmentDescriptor
from transfer_engine.kernels import rights

SEGMENT = 16 << 20
SHAPES = ((1, 64 << 10), (16, 64 << 10), (1, 1 << 20), (128, 4096), (116, 4096), (1, 4096))
TURNS, CALLS = 10, 20
SECONDS = 3
_generations = itertools.count(step=1 << 17)


def serve():
    with TransferServer(secret=Ring(POOL)) as server, Segment.create(SEGMENT) as segment:
        print(server.publish(segment, key=KEY).encode().hex(), flush=True)
        sys.stdin.read()


def granted(kind, offsets, lengths, calls):
    """Rights for so many calls, each a row (tag, stamp) for every range."""
    count = calls * offsets.size
    stamps = np.int64(rights.stamp_of(int((time.time() + SECONDS) * 1000), 0))
    stamps = stamps | (next(_generations) + np.arange(count)) & rights.GENERATION_MASK
    low, high = np.frombuffer(KEY, np.int64).tolist()
    tags = np.zeros(count, np.int64)
    rights.tags_of(low, high, np.tile(offsets, calls), np.tile(lengths, calls), kind, stamps, tags)
    return list(np.stack([tags, stamps], axis=1).reshape(calls, offsets.size, 2))


def timed(side, verb, columns, shown):
    """The seconds of calls that show these rights; one more before them is not counted."""
    engine, target = side
    move = getattr(engine, verb)
    done = [move(target, *columns, rights=shown[0])]
    began = time.perf_counter()
    done += [move(target, *columns, rights=each) for each in shown[1:]]
    took = time.perf_counter() - began
    assert all(each.ok for each in done)
    if verb == "write_batch" and shown[0] is not None:
        for each, right in zip(done, shown, strict=True):
            assert np.array_equal(each.receipts, receipts(*columns[:2], right))
    return took


def measured(sides, region, verb, count, size, rounds):
    """The median seconds of a call of each side, and that of the ratios."""
    offsets = np.arange(count, dtype=np.int64) * size
    lengths = np.full(count, size, dtype=np.int64)
    columns = offsets, lengths, region.address + offsets
    calls = 1 + CALLS
    kind = rights.WRITE if verb == "write_batch" else rights.READ
    took = []
    for _ in range(rounds):
        shown = granted(kind, offsets, lengths, TURNS * calls)
        spent = [0.0, 0.0]
        for turn in range(TURNS):
            mine = shown[turn * calls : (turn + 1) * calls]
            for side in (0, 1) if turn % 2 else (1, 0):
                each = mine if side else [None] * calls
                spent[side] += timed(sides[side], verb, columns, each)
        took.append([each / (TURNS * CALLS) for each in spent])
    ratios = [shows / plain for plain, shows in took]
    return *map(statistics.median, zip(*took, strict=True)), statistics.median(ratios)


def main(rounds=60, *shapes):
    command = sys.executable, "-m", "tests.transfer.bench_rights", "serve"
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    chosen = [tuple(map(int, shape.split("x"))) for shape in shapes] or SHAPES
    with (
        owner,
        TransferEngine(secret=known_as("")) as plain,
        TransferEngine(secret=known_as("writer")) as asked,
    ):
        descriptor = SegmentDescriptor.decode(bytes.fromhex(owner.stdout.readline().decode()))
        sides = [(engine, engine.open(descriptor, require="tcp")) for engine in (plain, asked)]
        memory = np.ones(SEGMENT, dtype=np.uint8)
        region = plain.register(memory)
        asked.register(memory)
        for count, size in chosen:
            for verb in ("read_batch", "write_batch"):
                alone, shown, ratio = measured(sides, region, verb, count, size, int(rounds))
                print(
                    f"{verb[:-6]:5} {count:4} x {size:<8} without {alone * 1e6:7.1f} us"
                    f"   by rights {shown * 1e6:7.1f} us   ratio {ratio:.3f}",
                    flush=True,
                )
        owner.stdin.close()


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        main(*sys.argv[1:])
