"""Finding NUMA nodes, network cards, GPUs and disks in /sys, or in a copy of one.

`root` is any folder laid out like /sys, so that the tree of another machine, recorded with its
symbolic links, gives that machine's topology. Nothing outside of `root` is read or run, except
that on the real /sys the order of GPUs is asked of `nvidia-smi` where there is one: CUDA numbers
GPUs as it likes, the kernel by address. Without it they are numbered by address.

The kernel answers some reads with an error (the speed of a link that is down) and leaves files
out (virtual devices have no node): what cannot be read is unknown, never a failure.
Cost: a few file reads per device; milliseconds on a large machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from transfer_engine.topology.machine import UNKNOWN_NODE, Device, Node, Topology

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SYS", "discover", "gpu_addresses"]

SYS = Path("/sys")
_PCI = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_GPU_VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380")
_DISK_IGNORED = re.compile(r"(loop|ram|zram|dm-|md|sr|fd|nbd)\d*")
_ETHERNET = "1"
_SECTOR_BYTES = 512
_ASK_TIMEOUT_S = 5.0


def discover(root: Path = SYS, *, gpus: Sequence[str] | None = None) -> Topology:
    """Return the topology of a machine from its /sys; `gpus` are PCI addresses in CUDA's order."""
    root = Path(root)
    if gpus is None and root == SYS:
        gpus = gpu_addresses()
    devices = [*_rdma(root), *_network(root), *_gpus(root, gpus or ()), *_disks(root)]
    nodes = _nodes(root)
    if len(nodes) == 1:
        # Firmware of machines with one node often leaves the node of a device out.
        only = nodes[0].number
        devices = [replace(device, node=only) for device in devices]
    return Topology(nodes, tuple(devices))


def gpu_addresses() -> tuple[str, ...]:
    """Return the PCI addresses of NVIDIA GPUs in the order of `nvidia-smi`, if it answers."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    command = [program, "--query-gpu=pci.bus_id", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    told = map(_address, done.stdout.split())
    return tuple(address for address in told if _PCI.fullmatch(address))


def _address(text: str) -> str:
    """Write a PCI address as the kernel does: nvidia-smi gives the domain eight digits."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}" if re.fullmatch("[0-9a-f]+", domain) else text


def _nodes(root: Path) -> tuple[Node, ...]:
    """Return the NUMA nodes; a kernel without NUMA has one, with all processors."""
    folder = root / "devices/system/node"
    found = []
    for name in _listed(folder):
        if not re.fullmatch(r"node\d+", name):
            continue
        place = folder / name
        total = re.search(r"MemTotal:\s+(\d+) kB", _read(place / "meminfo"))
        distances = _read(place / "distance").split()
        found.append(
            Node(
                int(name[4:]),
                _read(place / "cpulist"),
                int(total[1]) << 10 if total else 0,
                tuple(int(text) for text in distances if text.isdigit()),
            )
        )
    if not found:
        return (Node(0, _read(root / "devices/system/cpu/online"), 0, (10,)),)
    return tuple(sorted(found, key=lambda node: node.number))


def _rdma(root: Path) -> list[Device]:
    found = []
    for name in _listed(root / "class/infiniband"):
        place = root / "class/infiniband" / name
        device = _device(root, place / "device", name, "rdma")
        ports = [place / "ports" / port for port in _listed(place / "ports")]
        rates = [_number(_read(port / "rate")) for port in ports]
        netdevs = _listed(place / "device/net")
        # Soft-RoCE has no device; it names the interface it runs on.
        netdev = netdevs[0] if netdevs else _read(place / "parent")
        found.append(
            replace(
                device,
                gbps=max(rates, default=0.0),
                up=any("ACTIVE" in _read(port / "state") for port in ports),
                virtual=not device.pci,
                netdev=netdev,
                model=_read(place / "hca_type"),
            )
        )
    return found


def _network(root: Path) -> list[Device]:
    """Return Ethernet interfaces, virtual ones as well, without loopback."""
    found = []
    for name in _listed(root / "class/net"):
        place = root / "class/net" / name
        if _read(place / "type") not in (_ETHERNET, "") or not place.is_dir() or name == "lo":
            continue
        found.append(
            replace(
                _device(root, place / "device", name, "ethernet"),
                gbps=max(0.0, _number(_read(place / "speed"))) / 1000,
                up=_read(place / "operstate") in ("up", "unknown"),
                virtual=not (place / "device").exists(),
                mtu=int(_number(_read(place / "mtu"))),
            )
        )
    return found


def _gpus(root: Path, order: Sequence[str]) -> list[Device]:
    """Return GPUs, numbered as CUDA does where that is known, and by address otherwise."""
    folder = root / "bus/pci/devices"
    found = {}
    for address in _listed(folder):
        place = folder / address
        vendor = _GPU_VENDORS.get(_read(place / "vendor"))
        if vendor is None or not _read(place / "class").startswith(_GPU_CLASSES):
            continue
        found[address] = replace(_device(root, place, "", "gpu"), model=vendor)
    known = [address for address in order if address in found]
    rest = [address for address in sorted(found) if address not in known]
    return [
        replace(found[address], name=f"cuda:{number}")
        for number, address in enumerate((*known, *rest))
    ]


def _disks(root: Path) -> list[Device]:
    found = []
    for name in _listed(root / "block"):
        place = root / "block" / name
        if _DISK_IGNORED.fullmatch(name) or not (place / "device").exists():
            continue
        found.append(
            replace(
                _device(root, place / "device", name, "disk"),
                bytes=int(_number(_read(place / "size"))) * _SECTOR_BYTES,
                model=_read(place / "device/model"),
            )
        )
    return found


def _device(root: Path, link: Path, name: str, kind: str) -> Device:
    """Return a device by the link to its folder: its node, address, bridges, physical function."""
    top = os.path.realpath(root)
    real = os.path.realpath(link)
    if not os.path.exists(real) or os.path.commonpath((top, real)) != top:
        return Device(name, kind)
    parts = os.path.relpath(real, top).split(os.sep)
    chain = [part for part in parts if _PCI.fullmatch(part) or _HOST_BRIDGE.fullmatch(part)]
    if not chain or not _PCI.fullmatch(chain[-1]):
        return Device(name, kind, _node(Path(real)))
    own = Path(top, *parts[: parts.index(chain[-1]) + 1])
    parent = own / "physfn"
    physical = os.path.basename(os.path.realpath(parent)) if parent.exists() else ""
    return Device(name, kind, _node(own), chain[-1], tuple(chain[:-1]), parent=physical)


def _node(device: Path) -> int:
    """Return the node of a device, or of the nearest thing above it that has one."""
    for place in (device, *device.parents):
        text = _read(place / "numa_node")
        if text:
            return int(_number(text, UNKNOWN_NODE))
        if place.name == "devices":
            break
    return UNKNOWN_NODE


def _listed(folder: Path) -> list[str]:
    """Names in a folder, numbers in the order of counting."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(names, key=_natural)


def _natural(name: str) -> list[int | str]:
    """A key by which eth10 comes after eth9; text and numbers alternate, so they never meet."""
    parts = re.split(r"(\d+)", name)
    return [int(part) if at % 2 else part for at, part in enumerate(parts)]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(text: str, otherwise: float = 0.0) -> float:
    found = re.match(r"-?\d+(\.\d+)?", text)
    return float(found[0]) if found else otherwise
