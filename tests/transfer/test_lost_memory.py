"""Memory that owners lent and that is gone with them: nobody keeps it who does not look at it."""

import numpy as np

from tests.strangers import descriptors, shared_kib
from tests.waiting import until
from transfer_engine import TransferEngine
from transfer_engine.testing import OwnerProcess, content

SIZE = 8 << 20


def killed(owner):
    owner.process.kill()
    owner.process.wait()
    owner.close()


def test_memory_and_descriptors_stay_flat_over_owners_that_die():
    held = []
    with TransferEngine(transports=["shm"]) as engine:
        memory = bytearray(SIZE)
        for seed in range(6):
            owner = OwnerProcess(tcp=None)
            target = engine.open(owner.publish(SIZE, seed))
            engine.read_into(target, 0, memory)
            assert memory == content(seed, SIZE).data
            held.append((shared_kib(), descriptors()))
            killed(owner)
        kib, fds = zip(*held, strict=True)
        # What the last owner lent is let go of when the next one is met.
        assert max(kib[2:]) < kib[0] + SIZE // 1024
        assert max(fds[2:]) <= fds[0] + 1


def test_a_view_keeps_the_memory_of_an_owner_that_died_and_no_other_does():
    with TransferEngine(transports=["shm"]) as engine:
        first, other = OwnerProcess(tcp=None), OwnerProcess(tcp=None)
        target = engine.open(first.publish(SIZE, 1))
        before = shared_kib()
        view = target.view(0, SIZE)
        assert np.array_equal(view, content(1, SIZE))
        killed(first)
        engine.read_into(engine.open(other.publish(4096, 2)), 0, bytearray(4096))
        assert np.array_equal(view, content(1, SIZE))
        assert shared_kib() > before + SIZE // 1024 // 2
        view.release()
        until(lambda: shared_kib() < before + SIZE // 1024 // 2)
        killed(other)
