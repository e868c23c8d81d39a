"""A process that writes words down until it is killed, and says how far it has come.

`python -m tests.journal.publisher FOLDER SHARED LEVEL`, where SHARED stands for /dev/shm.
"""

import sys
from pathlib import Path

from mooncake_store.journal import ring_file
from mooncake_store.journal.reading import read_journal
from mooncake_store.journal.ring_file import RingFile
from tests.journal.streams import CELLS, ORIGIN, Shard

FAR = 5 * CELLS


def main(folder, shared, level):
    ring_file.SHARED_MEMORY = shared
    found, _ = RingFile.find(folder, ORIGIN)
    contents = read_journal(folder, ORIGIN, found.ring if found else None)
    made = found or RingFile.create(folder, ORIGIN, events=1, cells=CELLS)
    shard = Shard(made.ring, folder, level=level, believed=contents.complete, file_bytes=65536)
    shard.keep()
    began = head = shard.head
    told = False
    while True:
        head = shard.publish(1 + head % 97)
        print(f"head {head}", flush=True)
        if head - began > FAR and not told:
            shard.snapshot()
            print("far", flush=True)
            told = True


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
