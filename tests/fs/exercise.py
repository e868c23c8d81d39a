"""Random operations on a file of a mount and on a model in memory, compared all along.

    python -m tests.fs.exercise --operations 100000 --seed 1

Writes, reads, truncations, extensions, memory maps, closing and opening, renames, fsync. On a
difference it prints the seed and the last operations, and exits with 1. `make test-mount` runs it
for 100,000 operations, and fio's own verification after it.
"""

import argparse
import contextlib
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path

from mooncake_store import LocalCluster

SIZE_MAX = 1 << 20
LENGTH_MAX = 64 << 10
REOPEN_EVERY = 50


class Exercise:
    """One file, its model, and the operations on both."""

    def __init__(self, directory, seed):
        self.random = random.Random(seed)
        self.directory = directory
        self.path = directory / "file-0"
        self.names = 0
        self.model = bytearray()
        self.log = deque(maxlen=40)
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT)

    def step(self):
        kinds = [self.write, self.read, self.read, self.truncate, self.extend, self.map_read]
        kinds += [self.map_write, self.append]
        if self.random.randrange(REOPEN_EVERY) == 0:
            kinds = [self.reopen, self.rename, self.sync, self.whole]
        operation = self.random.choice(kinds)
        self.log.append(operation.__name__)
        operation()
        size = os.fstat(self.fd).st_size
        assert size == len(self.model), f"size {size}, not {len(self.model)}"

    def span(self):
        offset = self.random.randrange(SIZE_MAX - LENGTH_MAX)
        return offset, self.random.randrange(1, LENGTH_MAX)

    def put(self, offset, data):
        if offset > len(self.model):
            self.model += bytes(offset - len(self.model))
        self.model[offset : offset + len(data)] = data

    def write(self):
        offset, length = self.span()
        data = self.random.randbytes(length)
        assert os.pwrite(self.fd, data, offset) == length
        self.put(offset, data)

    def append(self):
        if len(self.model) < SIZE_MAX - LENGTH_MAX:
            data = self.random.randbytes(self.random.randrange(1, 5000))
            assert os.pwrite(self.fd, data, len(self.model)) == len(data)
            self.model += data

    def read(self):
        offset, length = self.span()
        assert os.pread(self.fd, length, offset) == self.model[offset : offset + length]

    def truncate(self):
        size = self.random.randrange(SIZE_MAX)
        os.ftruncate(self.fd, size)
        self.model = self.model[:size] + bytes(max(0, size - len(self.model)))

    def extend(self):
        size = min(SIZE_MAX, len(self.model) + self.random.randrange(LENGTH_MAX))
        os.truncate(self.path, size)
        self.model += bytes(size - len(self.model))

    def map_read(self):
        if self.model:
            with mmap.mmap(self.fd, len(self.model), access=mmap.ACCESS_READ) as view:
                offset, length = self.span()
                assert view[offset : offset + length] == self.model[offset : offset + length]

    def map_write(self):
        if self.model:
            with mmap.mmap(self.fd, len(self.model)) as view:
                offset = self.random.randrange(len(self.model))
                data = self.random.randbytes(min(5000, len(self.model) - offset))
                view[offset : offset + len(data)] = data
                view.flush()
            self.put(offset, data)

    def reopen(self):
        os.close(self.fd)
        self.fd = os.open(self.path, os.O_RDWR)

    def rename(self):
        self.names += 1
        new = self.directory / f"file-{self.names}"
        os.rename(self.path, new)
        self.path = new

    def sync(self):
        os.fsync(self.fd)

    def whole(self):
        assert self.path.read_bytes() == self.model
        assert os.listdir(self.directory) == [self.path.name]


@contextlib.contextmanager
def mounted():
    """A cluster and a mount of it."""
    with LocalCluster(workers=2, segment="512MB") as cluster, tempfile.TemporaryDirectory() as at:
        directory = Path(at) / "pool"
        directory.mkdir()
        command = [sys.executable, "-m", "mooncake_store", "mount"]
        url = f"mooncake://{cluster.address}/exercise"
        subprocess.run([*command, url, str(directory)], check=True, timeout=60)
        try:
            yield directory
        finally:
            subprocess.run(["fusermount3", "-u", "-z", str(directory)], check=True, timeout=30)


def run(directory, seed, operations):
    """Return whether file and model agreed to the end."""
    exercise = Exercise(directory, seed)
    for number in range(operations):
        try:
            exercise.step()
        except (AssertionError, OSError) as error:
            sys.stdout.write(f"seed {seed}, operation {number}: {error!r}\n")
            sys.stdout.write(f"the last ones: {' '.join(exercise.log)}\n")
            return False
    os.close(exercise.fd)
    exercise.path.unlink()
    sys.stdout.write(f"seed {seed}: {operations} operations agreed\n")
    return True


def verify_with_fio(directory):
    """fio writes patterns in random order and reads them back."""
    for pattern in ("write", "randwrite"):
        command = [
            "fio", "--name=verify", f"--directory={directory}", "--size=32M", "--bs=4k-64k",
            f"--rw={pattern}", "--verify=xxhash", "--do_verify=1", "--verify_fatal=1",
            "--ioengine=psync", "--output-format=terse", "--verify_state_save=0",
        ]  # fmt: skip
        subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL)
        sys.stdout.write(f"fio {pattern}: verified\n")


def main():
    """Run from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--operations", type=int, default=100_000)
    given = parser.parse_args()
    with mounted() as directory:
        if not run(directory, given.seed, given.operations):
            sys.exit(1)
        if shutil.which("fio"):
            verify_with_fio(directory)


if __name__ == "__main__":
    main()
