"""Which device is near which memory: a machine's nodes and devices, and the matrix made of them.

    found = discover()
    found.matrix()["cuda:0"]["rdma"]      # Preference(preferred=("mlx5_0",), secondary=(...))

A *location* is where memory lies: "cpu:N" for NUMA node N, "cuda:N" for the memory of GPU N. For
each location and each kind of device the matrix holds two lists: the preferred devices, all of
them equally near, and the secondary ones, nearest first, for when a preferred one fails. Distance
between PCI devices is the lowest thing their paths have in common: a device, one switch, several
bridges, a host bridge, a NUMA node, the machine; that is the order of bandwidth in practice.

A virtual function whose physical function is also here is left out: it shares that one's wire.
So are devices that are down, and virtual network interfaces wherever there are real ones.

This module reads nothing: `scan` fills it from /sys. It decides nothing either: it is for
people, who choose addresses, cards and nodes by it.
Cost: O(locations x devices), once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, NamedTuple

__all__ = [
    "KINDS",
    "UNKNOWN_NODE",
    "Device",
    "Distance",
    "Node",
    "Preference",
    "Topology",
    "distance",
]

KINDS = ("rdma", "ethernet", "disk")
"""The kinds of device that memory is moved through; GPUs are locations."""
UNKNOWN_NODE = -1


class Distance(IntEnum):
    """The lowest thing two devices share, nearest first; as `nvidia-smi topo -m` names them."""

    SAME = 0
    SWITCH = 1
    BRIDGES = 2
    HOST_BRIDGE = 3
    NODE = 4
    SYSTEM = 5


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node. `distances` are the kernel's, by node number; 10 is local."""

    number: int
    cpus: str
    memory_bytes: int
    distances: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Device:
    """A network card, a disk or a GPU; what is not known is empty, 0 or UNKNOWN_NODE."""

    name: str
    kind: str
    node: int = UNKNOWN_NODE
    pci: str = ""
    bridges: tuple[str, ...] = ()
    """Host bridge, root port and switches above the device, outermost first."""
    gbps: float = 0.0
    up: bool = True
    virtual: bool = False
    parent: str = ""
    """PCI address of the physical function, when this is a virtual one."""
    netdev: str = ""
    """The network interface of an RDMA device."""
    mtu: int = 0
    bytes: int = 0
    model: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return what is known, as plain JSON values."""
        plain: dict[str, Any] = {"name": self.name, "kind": self.kind, "up": self.up}
        if self.node != UNKNOWN_NODE:
            plain["node"] = self.node
        if self.bridges:
            plain["bridges"] = list(self.bridges)
        for name in ("pci", "gbps", "virtual", "parent", "netdev", "mtu", "bytes", "model"):
            value = getattr(self, name)
            if value:
                plain[name] = value
        return plain


class Preference(NamedTuple):
    """Devices for one location: equally near ones first, then the rest, nearest first."""

    preferred: tuple[str, ...]
    secondary: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        """Every device, preferred ones first."""
        return self.preferred + self.secondary


def distance(one: Device, other: Device) -> Distance:
    """Return what the paths of two devices have in common. Unknown nodes count as one node."""
    if one.pci and one.pci.rpartition(".")[0] == other.pci.rpartition(".")[0]:
        return Distance.SAME
    shared = 0
    for mine, theirs in zip(one.bridges, other.bridges, strict=False):
        if mine != theirs:
            break
        shared += 1
    if shared > 1:
        # Below the shared switch: nothing, or one downstream port on the way to each.
        below = max(len(one.bridges), len(other.bridges)) - shared
        return Distance.SWITCH if below <= 1 else Distance.BRIDGES
    if shared == 1:
        return Distance.HOST_BRIDGE
    if one.node == other.node or UNKNOWN_NODE in (one.node, other.node):
        return Distance.NODE
    return Distance.SYSTEM


@dataclass(frozen=True, slots=True)
class Topology:
    """A machine: its nodes and devices."""

    nodes: tuple[Node, ...]
    devices: tuple[Device, ...]

    def of_kind(self, kind: str) -> tuple[Device, ...]:
        """Return the devices of a kind, in the order of their names."""
        return tuple(device for device in self.devices if device.kind == kind)

    def device(self, name: str) -> Device | None:
        """Return the device of this name."""
        return next((device for device in self.devices if device.name == name), None)

    @property
    def locations(self) -> tuple[str, ...]:
        """Where memory may lie: every NUMA node, then every GPU."""
        return (
            *(f"cpu:{node.number}" for node in self.nodes),
            *(gpu.name for gpu in self.of_kind("gpu")),
        )

    def usable(self, kind: str) -> tuple[Device, ...]:
        """Return the devices of a kind that the matrix chooses among."""
        up = [device for device in self.of_kind(kind) if device.up]
        here = {device.pci for device in up if device.pci}
        own = [device for device in up if device.parent not in here]
        real = [device for device in own if not device.virtual]
        return tuple(real or own)

    def matrix(self) -> dict[str, dict[str, Preference]]:
        """Return the preferred and secondary devices of every location, by kind of device."""
        return {
            location: {kind: self.preference(location, kind) for kind in KINDS}
            for location in self.locations
        }

    def preference(self, location: str, kind: str) -> Preference:
        """Return one cell of the matrix."""
        usable = self.usable(kind)
        if not usable:
            return Preference((), ())
        far = {device.name: self._far(location, device) for device in usable}
        nearest = min(far.values())
        # Stable: devices of one distance and speed keep the order they were found in.
        ordered = sorted(usable, key=lambda device: (*far[device.name], -device.gbps))
        return Preference(
            tuple(device.name for device in ordered if far[device.name] == nearest),
            tuple(device.name for device in ordered if far[device.name] != nearest),
        )

    def _far(self, location: str, device: Device) -> tuple[int, int]:
        """How far a device is from a location: the class of the distance, then NUMA's number."""
        place, _, number = location.partition(":")
        if place == "cpu":
            near = device.node in (int(number), UNKNOWN_NODE)
            kind = Distance.NODE if near else Distance.SYSTEM
            return kind, self._numa(int(number), device.node)
        gpu = self.device(location)
        assert gpu is not None, location
        return distance(gpu, device), self._numa(gpu.node, device.node)

    def _numa(self, one: int, other: int) -> int:
        if one == other or UNKNOWN_NODE in (one, other):
            return 10
        row = next((node.distances for node in self.nodes if node.number == one), ())
        order = [node.number for node in self.nodes]
        at = order.index(other) if other in order else len(row)
        return row[at] if at < len(row) else 20

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        return {
            "nodes": [asdict(node) | {"distances": list(node.distances)} for node in self.nodes],
            "devices": [device.to_dict() for device in self.devices],
            "matrix": {
                location: {
                    kind: [list(cell.preferred), list(cell.secondary)] for kind, cell in row.items()
                }
                for location, row in self.matrix().items()
            },
        }
