"""The virtual machine's kernel and root: Debian packages, unpacked into a cache, never installed.

The guest's root is the host's own root directory, read-only, under a layer with what the host
lacks: a kernel that has soft-RoCE (`rdma_rxe`), its modules, the RDMA libraries and `ndctl`. So
the interpreter, the virtual environment and the source tree have the same paths in the guest as
here, and there is no image to build or to keep up to date.

x86-64 Debian or Ubuntu with `apt-get`. The first run downloads about 75 MB and takes half a
minute; later ones find everything in the cache and write a new 2 MB initramfs.
"""

from __future__ import annotations

import gzip
import lzma
import os
import re
import shutil
import stat
import subprocess
import tarfile
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mooncake" / "rdma-vm"
ROOT_LAYER = CACHE / "root"
KERNEL = CACHE / "vmlinuz"

# Programs the host must have, and the packages that bring them.
TOOLS = {"qemu-system-x86_64": "qemu-system-x86", "busybox": "busybox-static", "rdma": "iproute2"}
PACKAGES = (
    "kmod", "libibverbs1", "ibverbs-providers", "libnl-3-200", "libnl-route-3-200",
    "ndctl", "daxctl", "libndctl6", "libdaxctl1", "libcxl1", "libiniparser1", "libtraceevent1",
    "libtracefs1",
)  # fmt: skip
# What of the kernel's modules is unpacked: enough for soft-RoCE, NVMe over fabrics and dax.
MODULES = re.compile(
    r"\./lib/modules/[^/]+/(modules\.|kernel/("
    r"drivers/(infiniband|nvme|dax|nvdimm|acpi|virtio|block|net/dummy)|"
    r"net|fs|lib|crypto|arch|block|security|mm))"
)
# Loaded before there is a root to load others from.
EARLY = ("virtio_pci", "9pnet_virtio", "9p", "overlay")

INIT = """#!/bin/busybox sh
B=/bin/busybox
$B mkdir -p /proc /sys /dev /host /layer /upper /root
$B mount -t proc proc /proc; $B mount -t sysfs sys /sys; $B mount -t devtmpfs dev /dev
for m in {modules}; do $B insmod /m/$m.ko || echo "vm: insmod $m failed"; done
OPTIONS=trans=virtio,version=9p2000.L,msize=524288,cache=loose,ro
$B mount -t 9p -o $OPTIONS host /host && $B mount -t 9p -o $OPTIONS layer /layer || $B poweroff -f
$B mount -t tmpfs -o size=70% tmpfs /upper; $B mkdir /upper/data /upper/work
$B mount -t overlay -o lowerdir=/layer:/host,upperdir=/upper/data,workdir=/upper/work \\
  overlay /root || $B poweroff -f
for d in proc sys dev; do $B mkdir -p /root/$d; $B mount --move /$d /root/$d; done
$B mkdir -p /root/dev/shm /root/dev/pts
for d in run dev/shm; do $B mount -t tmpfs -o mode=1777,size=70% tmpfs /root/$d; done
$B mount -t devpts devpts /root/dev/pts
exec $B switch_root /root /bin/bash {start}
"""


class ImageError(Exception):
    """Why there is no virtual machine to be had here."""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command and return what it wrote; raises ImageError with its errors."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise ImageError(f"{' '.join(map(str, command))} failed: {done.stderr.strip()}")
    return done.stdout


def ensure_tools() -> None:
    """Install missing programs when root, and name them otherwise."""
    missing = sorted(package for tool, package in TOOLS.items() if not shutil.which(tool))
    if not missing:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise ImageError(f"install these packages, then run this again: {' '.join(missing)}")
    run("apt-get", "update", "-qq")
    run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing)


def build() -> None:
    """Download and unpack kernel and libraries, unless they are there already."""
    if (ROOT_LAYER / ".complete").exists():
        return
    shutil.rmtree(CACHE / "packages", ignore_errors=True)
    shutil.rmtree(ROOT_LAYER, ignore_errors=True)
    downloads = CACHE / "packages"
    downloads.mkdir(parents=True)
    found = re.search(
        r"Depends: (linux-image-\d\S+)", run("apt-cache", "depends", "linux-image-amd64")
    )
    if found is None:
        raise ImageError("apt knows no linux-image-amd64; run apt-get update")
    kernel = found[1]
    run("apt-get", "download", "-qq", kernel, *PACKAGES, cwd=downloads)
    (ROOT_LAYER / "usr/lib/modules").mkdir(parents=True)
    unpack_kernel(next(downloads.glob(f"{kernel}_*.deb")))
    for package in PACKAGES:
        run("dpkg", "-x", next(downloads.glob(f"{package}_*.deb")), ROOT_LAYER)
    merge_usr()
    release = next((ROOT_LAYER / "usr/lib/modules").iterdir()).name
    base = CACHE / "depmod"
    shutil.rmtree(base, ignore_errors=True)
    (base / "lib").mkdir(parents=True)
    (base / "lib/modules").symlink_to(ROOT_LAYER / "usr/lib/modules")
    depmod = base / "depmod"
    depmod.symlink_to(ROOT_LAYER / "usr/bin/kmod")
    run(depmod, "-b", base, release)
    shutil.rmtree(downloads)
    (ROOT_LAYER / ".complete").touch()


def unpack_kernel(package: Path) -> None:
    """Take the kernel and the chosen modules out of a package."""
    with (
        subprocess.Popen(
            ["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE
        ) as unpacking,
        tarfile.open(fileobj=unpacking.stdout, mode="r|") as archive,
    ):
        for member in archive:
            if member.name.startswith("./boot/vmlinuz"):
                extracted = archive.extractfile(member)
                assert extracted is not None
                KERNEL.write_bytes(extracted.read())
            elif MODULES.match(member.name):
                member.name = "usr" + member.name.removeprefix(".")
                archive.extract(member, ROOT_LAYER, filter="data")


def merge_usr() -> None:
    """Move /bin, /sbin and /lib under /usr, or the layer would hide the host's links to there."""
    for name in ("bin", "sbin", "lib"):
        source = ROOT_LAYER / name
        if source.is_dir():
            shutil.copytree(source, ROOT_LAYER / "usr" / name, dirs_exist_ok=True, symlinks=True)
            shutil.rmtree(source)
    for name in ("modprobe", "depmod"):
        link = ROOT_LAYER / "usr/sbin" / name
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to("/usr/bin/kmod")


def early_modules() -> list[Path]:
    """The files of the first modules, each after those it needs."""
    base = next((ROOT_LAYER / "usr/lib/modules").iterdir())
    needs = {}
    for line in (base / "modules.dep").read_text().splitlines():
        path, _, others = line.partition(":")
        needs[module_name(path).replace("-", "_")] = [path, *others.split()]
    ordered: dict[Path, None] = {}
    for name in EARLY:
        for path in reversed(needs.get(name, ())):  # not listed: built in, as of Debian 13
            ordered.setdefault(base / path)
    return list(ordered)


def module_name(path: str | Path) -> str:
    """The name of a module's file, less .ko or .ko.xz."""
    return Path(path).name.partition(".")[0]


def module_bytes(path: Path) -> bytes:
    """What is in a module's file, as the kernel takes it."""
    return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()


def initramfs(start: Path) -> Path:
    """Write the initramfs that mounts the root and runs `start` in it; return its path."""
    modules = early_modules()
    names = " ".join(map(module_name, modules))
    files = {
        "init": INIT.format(modules=names, start=start).encode(),
        "bin/busybox": Path(shutil.which("busybox") or "").read_bytes(),
        **{f"m/{module_name(path)}.ko": module_bytes(path) for path in modules},
    }
    archive = bytearray()
    for number, name in enumerate(("bin", "m")):
        archive += cpio_entry(name, number + 1, stat.S_IFDIR | 0o755, b"")
    for number, (name, data) in enumerate(files.items()):
        archive += cpio_entry(name, number + 10, stat.S_IFREG | 0o755, data)
    archive += cpio_entry("TRAILER!!!", 0, 0, b"")
    target = CACHE / f"initramfs-{os.getpid()}.gz"
    target.write_bytes(gzip.compress(bytes(archive), 1))
    return target


def cpio_entry(name: str, inode: int, mode: int, data: bytes) -> bytes:
    """One member of a cpio archive in the format the kernel reads ("newc")."""
    fields = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
    head += bytes(-len(head) % 4)
    return head + data + bytes(-len(data) % 4)
