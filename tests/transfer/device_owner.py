"""A process that lends device memory: a fake device's or a CUDA tensor's.

python device_owner.py fake|cuda SIZE [POLICY]      commands on standard input, one a line
"""

import sys

import xxhash

from tests.accelerators import FakeDevice, RealDevice
from transfer_engine import DeviceSegment, Operation, TransferServer
from transfer_engine.testing import content


def main(kind, size, policy="everybody"):
    device = FakeDevice() if kind == "fake" else RealDevice()
    tensor = device.make(int(size))
    device.fill(tensor, content(5, int(size)))
    fence = getattr(device, "device", device).fence()
    fence.wait()
    authorize = {
        "everybody": None,
        "nobody": lambda access: False,
        "readers": lambda access: access.operation is Operation.READ,
    }[policy]
    with TransferServer(authorize=authorize) as server, DeviceSegment.wrap(tensor) as segment:
        print(server.publish(segment).encode().hex(), flush=True)
        for line in sys.stdin:
            if line.strip() == "withdraw":
                server.withdraw(segment)
            print(xxhash.xxh3_128_hexdigest(device.content(tensor)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
