"""Runs the tests that need an RDMA device, NVMe over fabrics or dax, in a small virtual machine.

    python -m tests.rdma.vm                            what `make test-rdma` runs
    python -m tests.rdma.vm -x -k lends_a_device       any arguments of pytest: here some tests only
    python -m tests.rdma.vm --run dmesg                a command, with the devices there

The machine has soft-RoCE: two devices, `rxe0` and `rxe1`, that do in software what an RDMA card
does. It is emulated (no KVM), so it says nothing about speed. A test that is skipped in it fails:
a green run means that everything ran.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from tests.rdma import image

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parents[2]
GUEST = Path(__file__).with_name("guest.sh")
# Compiled kernels of the guest's processor: it is told to be `generic`, and so is numba, here
# before the machine starts (seconds) rather than in it (minutes).
NUMBA = {
    "NUMBA_CACHE_DIR": str(image.CACHE / "numba"),
    "NUMBA_CPU_NAME": "generic",
    "NUMBA_CPU_FEATURES": "",
}
# Linux 6.1 (Debian 12) would stop by its own fault: what is written from two huge pages that lie
# side by side to an NVMe/TCP disk of the same machine is copied as one piece, and the check of
# copies takes that for an overrun of the first (docs/internals/rdma.md). A kernel that stops for
# another reason ends the run at once (oops=panic), not when time is up.
APPEND = (
    "console=ttyS0 quiet panic=-1 oops=panic hardened_usercopy=off mitigations=off memmap=128M!1G"
)
TIMEOUT_S = 900
NEVER_FINISHED = 99


def warm() -> None:
    """Compile the kernels for the guest, unless its cache has them."""
    program = "from mooncake_store.program import kernels; kernels.warmup()"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=os.environ | NUMBA, check=True)


def start_script(arguments: list[str]) -> str:
    """The first program of the guest: its environment, then guest.sh, then power off."""
    environment = NUMBA | {
        "HOME": str(Path.home()),
        "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHON": sys.executable,
        "TERM": "dumb",
    }
    exports = "\n".join(f"export {name}={shlex.quote(text)}" for name, text in environment.items())
    return (
        f"{exports}\ncd {shlex.quote(str(ROOT))}\n"
        f"/bin/bash {GUEST} {shlex.join(arguments)}\n"
        'echo "GUEST_EXIT=$?"\n/usr/bin/busybox poweroff -f\n'
    )


def boot(arguments: list[str]) -> int:
    """Run the guest to its end and return the status of guest.sh."""
    with tempfile.TemporaryDirectory(dir=image.CACHE) as folder:
        start = Path(folder, "start.sh")
        start.write_text(start_script(arguments))
        archive = image.initramfs(start)
        command = [
            "qemu-system-x86_64",
            "-accel", os.environ.get("MOONCAKE_VM_ACCEL", "tcg,thread=multi"),
            "-cpu", "max", "-M", "q35", "-smp", "2", "-m", "3072",
            "-nographic", "-no-reboot", "-nodefaults", "-serial", "stdio",
            "-kernel", str(image.KERNEL), "-initrd", str(archive),
            *share("host", "/"), *share("layer", image.ROOT_LAYER),
            "-append", APPEND,
        ]  # fmt: skip
        try:
            with subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace",
            ) as machine:  # fmt: skip
                assert machine.stdout is not None
                patience = threading.Timer(TIMEOUT_S, machine.kill)
                patience.start()
                try:
                    status = follow(machine.stdout)
                finally:
                    patience.cancel()
                    machine.kill()
        finally:
            archive.unlink()
        return status


def follow(lines: Iterable[str]) -> int:
    """Show what the machine writes until it ends; return the status that guest.sh had."""
    status = NEVER_FINISHED
    for line in lines:
        if found := re.match(r"GUEST_EXIT=(\d+)", line):
            status = int(found[1])
        else:
            sys.stdout.write(line.replace("\r", ""))
            sys.stdout.flush()
    return status


def share(tag: str, path: str | Path) -> list[str]:
    """The words that give the guest a directory of the host to read."""
    options = "security_model=none,readonly=on,multidevs=remap"
    return ["-virtfs", f"local,path={path},mount_tag={tag},{options}"]


def main(arguments: list[str]) -> int:
    """Prepare what is missing, run the guest, and say how it ended."""
    try:
        image.ensure_tools()
        image.build()
    except image.ImageError as error:
        sys.stderr.write(f"test-rdma: {error}\n")
        return 2
    # Without this a TERM would leave the machine running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(NEVER_FINISHED))
    warm()
    status = boot(arguments)
    if status == NEVER_FINISHED:
        sys.stderr.write(f"test-rdma: the machine ended early, or took over {TIMEOUT_S} s\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
