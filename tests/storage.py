"""Files and devices that storage tests run on; a real device comes from the environment.

MOONCAKE_TEST_BLOCK_DEVICE names a block device and MOONCAKE_TEST_DAX_DEVICE a DAX device (or a
file to map) whose content the tests may destroy.
"""

import fcntl
import os

import pytest

from transfer_engine.testing import TransportCase, content

SEGMENT_BYTES = 20 << 20
BLOCK_DEVICE = os.environ.get("MOONCAKE_TEST_BLOCK_DEVICE", "")
DAX_DEVICE = os.environ.get("MOONCAKE_TEST_DAX_DEVICE", "")


def needs(device, variable):
    return pytest.mark.skipif(not device, reason=f"{variable} names no device to use")


needs_block_device = needs(BLOCK_DEVICE, "MOONCAKE_TEST_BLOCK_DEVICE")
needs_dax_device = needs(DAX_DEVICE, "MOONCAKE_TEST_DAX_DEVICE")


def is_direct(fd):
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def make_case(owner, engine, memory, descriptor, transport, *, seed=5):
    """A case of the conformance suite on a published segment; withdraws it afterwards."""
    target = engine.open(descriptor, require=transport)
    assert target.transport == transport
    yield TransportCase(
        engine,
        target,
        engine.register(memory),
        memory,
        content(seed, descriptor.size),
        lambda: owner.digest(descriptor),
    )
    owner.withdraw(descriptor)
