"""`mooncake topology`: NUMA nodes, devices, and which devices memory is moved through."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncake_store.cli.shared.app import JsonOption, command, emit, table

if TYPE_CHECKING:
    from transfer_engine.topology.machine import Device, Topology


@command(
    ("mooncake topology", "nodes, cards, GPUs, disks and what is near what"),
    ("mooncake topology --json", "the same for a program"),
    ("mooncake topology --sys ./recorded/sys", "of another machine, from a copy of its /sys"),
)
def topology(
    sys_root: Annotated[
        Path, typer.Option("--sys", metavar="DIR", help="Read this copy of a /sys instead.")
    ] = Path("/sys"),
    as_json: JsonOption = False,
) -> None:
    """Show the devices of this machine and, for each place of memory, the nearest ones."""
    from mooncake_store.errors import NotFoundError
    from transfer_engine.topology.scan import discover

    if not sys_root.is_dir():
        raise NotFoundError(f"there is no folder {sys_root}", advice="name a copy of /sys")
    found = discover(sys_root)
    emit(found.to_dict(), as_json=as_json, human=lambda: _draw(found))


def _draw(found: "Topology") -> Any:
    from rich.console import Group

    from mooncake_store.units import format_size
    from transfer_engine.topology.machine import KINDS

    nodes = [
        f"node {node.number}: cpus {node.cpus or '?'}, {format_size(node.memory_bytes)}"
        if node.memory_bytes
        else f"node {node.number}: cpus {node.cpus or '?'}"
        for node in found.nodes
    ]
    columns = dict.fromkeys(("device", "kind", "node", "pci", "speed", "state", "about"), "left")
    devices = [_device(device) for device in found.devices]
    cells = [
        (location, kind, " ".join(row[kind].preferred) or "-", " ".join(row[kind].secondary))
        for location, row in found.matrix().items()
        for kind in KINDS
        if row[kind].all
    ]
    titles = dict.fromkeys(("memory at", "through", "preferred", "secondary"), "left")
    return Group(*nodes, table(columns, devices), table(titles, cells))


def _device(device: "Device") -> tuple[str, ...]:
    from mooncake_store.units import format_size

    about = [
        f"on {device.netdev}" if device.netdev else "",
        f"mtu {device.mtu}" if device.mtu else "",
        f"virtual function of {device.parent}" if device.parent else "",
        "virtual" if device.virtual else "",
        format_size(device.bytes) if device.bytes else "",
        device.model,
    ]
    return (
        device.name,
        device.kind,
        str(device.node) if device.node >= 0 else "?",
        device.pci,
        f"{device.gbps:g} Gb/s" if device.gbps else "",
        "up" if device.up else "down",
        ", ".join(text for text in about if text),
    )
