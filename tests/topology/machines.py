"""Trees like /sys, built by code: the machines that discovery is tested on.

`Tree` knows how the kernel lays devices out: real folders below `devices/`, relative symbolic
links in `class/`, `bus/` and `block/`. The machines are of shapes that exist in numbers.
"""

import os
from pathlib import Path

GIB_KIB = 1 << 20


class Tree:
    """A /sys to be filled."""

    def __init__(self, root):
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)

    def write(self, where, text):
        place = self.root / where
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"{text}\n")

    def link(self, where, target):
        place = self.root / where
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(self.root / target, place.parent))

    def node(self, number, cpus, gib, distances):
        folder = f"devices/system/node/node{number}"
        self.write(f"{folder}/cpulist", cpus)
        self.write(f"{folder}/meminfo", f"Node {number} MemTotal:       {gib * GIB_KIB} kB")
        self.write(f"{folder}/distance", " ".join(map(str, distances)))

    def pci(self, chain, *, node=-1, vendor="0x15b3", device_class="0x020000"):
        """A device at the end of a chain of host bridge, ports and itself; returns its folder."""
        folder = "devices/" + "/".join(chain)
        self.write(f"{folder}/vendor", vendor)
        self.write(f"{folder}/class", device_class)
        self.write(f"{folder}/numa_node", node)
        self.link(f"bus/pci/devices/{chain[-1]}", folder)
        return folder

    def netdev(self, name, device=None, *, megabits=None, state="up", mtu=1500):
        folder = f"{device or 'devices/virtual'}/net/{name}"
        self.write(f"{folder}/type", 1)
        self.write(f"{folder}/operstate", state)
        self.write(f"{folder}/mtu", mtu)
        if megabits is not None:
            self.write(f"{folder}/speed", megabits)
        if device:
            self.link(f"{folder}/device", device)
        self.link(f"class/net/{name}", folder)

    def rdma(self, name, device, *, gigabits, state="4: ACTIVE", parent=None):
        folder = f"{device or 'devices/virtual'}/infiniband/{name}"
        self.write(f"{folder}/ports/1/state", state)
        self.write(f"{folder}/ports/1/rate", f"{gigabits} Gb/sec (4X NDR)")
        self.write(f"{folder}/hca_type", "MT4129" if device else "rxe")
        if parent:
            self.write(f"{folder}/parent", parent)
        if device:
            self.link(f"{folder}/device", device)
        self.link(f"class/infiniband/{name}", folder)

    def gpu(self, chain, *, node=-1):
        self.pci(chain, node=node, vendor="0x10de", device_class="0x030200")

    def nvme(self, number, chain, *, node=-1, gib=3576):
        device = self.pci(chain, node=node, vendor="0x144d", device_class="0x010802")
        controller = f"{device}/nvme/nvme{number}"
        self.write(f"{controller}/model", "SAMSUNG MZWLJ3T8")
        block = f"{controller}/nvme{number}n1"
        self.write(f"{block}/size", gib * 2 * GIB_KIB)
        self.link(f"{block}/device", controller)
        self.link(f"block/nvme{number}n1", block)

    def sriov(self, physical, virtual):
        """Say that one device folder is a virtual function of another."""
        self.link(f"{virtual}/physfn", physical)


def eight_gpus(root):
    """Two sockets; on each four switches with a GPU and an RDMA card, two NVMe disks; one slow NIC.

    The shape of DGX and HGX machines: GPU n and mlx5_n share a switch.
    """
    tree = Tree(root)
    tree.node(0, "0-55,112-167", 1008, (10, 21))
    tree.node(1, "56-111,168-223", 1008, (21, 10))
    for number in range(8):
        node = number // 4
        bus = 0x10 + 0x10 * number
        host = f"pci0000:{bus:02x}"
        switch = [host, f"0000:{bus:02x}:01.0", f"0000:{bus + 1:02x}:00.0"]
        gpu = [*switch, f"0000:{bus + 2:02x}:00.0", f"0000:{bus + 3:02x}:00.0"]
        tree.gpu(gpu, node=node)
        nic = [*switch, f"0000:{bus + 2:02x}:01.0", f"0000:{bus + 4:02x}:00.0"]
        device = tree.pci(nic, node=node)
        tree.rdma(f"mlx5_{number}", device, gigabits=400)
        tree.netdev(f"eth{number}", device, megabits=400_000, mtu=9000)
        if number % 2:
            disk = [*switch, f"0000:{bus + 2:02x}:02.0", f"0000:{bus + 5:02x}:00.0"]
            tree.nvme(number // 2, disk, node=node)
    slow = tree.pci(["pci0000:00", "0000:00:1c.0", "0000:02:00.0"], node=0, vendor="0x8086")
    tree.netdev("eno1", slow, megabits=1000)
    tree.netdev("docker0", state="down")
    tree.netdev("veth12ab", megabits=10_000)
    return tree


def two_hosts_apart(root):
    """Two sockets, all cards on the first one: GPUs of the second are far from every card."""
    tree = Tree(root)
    tree.node(0, "0-31", 512, (10, 32))
    tree.node(1, "32-63", 512, (32, 10))
    for number, function in enumerate(("0000:17:00.0", "0000:17:00.1")):
        device = tree.pci(["pci0000:16", "0000:16:01.0", function], node=0)
        state = "4: ACTIVE" if number == 0 else "1: DOWN"
        tree.rdma(f"mlx5_{number}", device, gigabits=200, state=state)
    tree.gpu(["pci0000:16", "0000:16:03.0", "0000:18:00.0"], node=0)
    tree.gpu(["pci0000:30", "0000:30:01.0", "0000:31:00.0"], node=0)
    tree.gpu(["pci0000:97", "0000:97:01.0", "0000:98:00.0"], node=1)
    return tree


def no_numa(root):
    """A small machine whose kernel has no NUMA, and whose devices have no node."""
    tree = Tree(root)
    tree.write("devices/system/cpu/online", "0-7")
    device = tree.pci(["pci0000:00", "0000:00:1c.4", "0000:03:00.0"], vendor="0x10ec")
    tree.netdev("enp3s0", device, megabits=2500)
    tree.gpu(["pci0000:00", "0000:00:01.0", "0000:01:00.0"])
    tree.nvme(0, ["pci0000:00", "0000:00:1d.0", "0000:04:00.0"], gib=931)
    return tree


def virtual_machine(root):
    """A guest: virtio devices, one node, a link that does not know its speed, Soft-RoCE."""
    tree = Tree(root)
    tree.node(0, "0-1", 16, (10,))
    virtio = tree.pci(["pci0000:00", "0000:00:03.0"], vendor="0x1af4")
    tree.netdev("eth0", f"{virtio}/virtio2", megabits=-1)
    tree.write(f"{virtio}/virtio2/uevent", "")
    tree.rdma("rxe0", None, gigabits=2.5, parent="eth0")
    block = tree.pci(["pci0000:00", "0000:00:02.0"], vendor="0x1af4", device_class="0x010000")
    tree.write(f"{block}/virtio1/block/vda/size", 64 * 2 * GIB_KIB)
    tree.link(f"{block}/virtio1/block/vda/device", f"{block}/virtio1")
    tree.link("block/vda", f"{block}/virtio1/block/vda")
    tree.write("devices/virtual/block/loop0/size", 0)
    tree.link("block/loop0", "devices/virtual/block/loop0")
    return tree


def with_virtual_functions(root, *, physical=True):
    """One card with four virtual functions; `physical=False`: seen from where only those are."""
    tree = Tree(root)
    tree.node(0, "0-15", 128, (10, 20))
    tree.node(1, "16-31", 128, (20, 10))
    port = ["pci0000:3a", "0000:3a:00.0"]
    own = tree.pci([*port, "0000:3b:00.0"], node=0)
    if physical:
        tree.rdma("mlx5_0", own, gigabits=100)
        tree.netdev("ens1", own, megabits=100_000)
    for number in range(1, 5):
        virtual = tree.pci([*port, f"0000:3b:00.{number}"], node=0)
        tree.sriov(own, virtual)
        tree.rdma(f"mlx5_{number}", virtual, gigabits=100)
        tree.netdev(f"ens1v{number}", virtual, megabits=100_000)
    return tree
