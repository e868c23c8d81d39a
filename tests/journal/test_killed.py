"""What a process that is killed wrote down is all there: up to the last word it told of."""

import signal

import pytest

from mooncake_store.core.ring import SNAPSHOT
from mooncake_store.journal.reading import read_journal
from mooncake_store.journal.ring_file import RingFile
from tests.journal.streams import ORIGIN, at, covered
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize("level", ["written", "synced"])
def test_a_process_that_is_killed_again_and_again_loses_nothing(
    start_program, folder, shared_memory, level
):
    end = 1
    for _ in range(3):
        program = start_program("-m", "tests.journal.publisher", folder, shared_memory, level)
        program.wait_for_line("far", PATIENCE_S)
        program.kill()
        assert program.process.returncode == -signal.SIGKILL
        told = program.output.splitlines(keepends=True)
        heads = [
            int(line.split()[1])
            for line in told
            if line.startswith("head ") and line.endswith("\n")
        ]
        found, why = RingFile.find(folder, ORIGIN)
        assert not why
        contents = read_journal(folder, ORIGIN, found.ring)
        assert contents.complete, (contents.damages, contents.void)
        ((begin, last),) = covered(contents)
        assert begin <= at(found.ring, SNAPSHOT)
        assert end < heads[-1] <= last
        end = last
        found.close()
