"""The demo plays its whole story with real processes, and says so."""

import numpy as np

from mooncake_store import demo


def test_blocks_differ_and_are_the_same_each_time():
    first = demo.block_bytes(range(3), 4096)
    assert first.shape == (3, 4096)
    assert (first == demo.block_bytes(range(3), 4096)).all()
    assert len(np.unique(first[:, :8], axis=0)) == 3


def test_the_demo_says_what_it_did(start_program):
    program = start_program("-m", "mooncake_store.demo")
    assert program.wait(90) == 0, program.output
    assert "Every block read back equal to what was put" in program.output
    for step in ("client 1 puts", "client 2 reads them", "a worker killed"):
        assert step in program.output
