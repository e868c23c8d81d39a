"""Hosts of a test, and the wires between them: `python -m tests.hosts.switch '{"hosts": ...}'`.

Each host is a process that does nothing, in namespaces of its own: network, mounts (its memory
files, and by what id programs know that they share a host) and clock. Its one network card is a
TUN device whose other end is here: this process hands packets from one to the other, or drops,
loses or delays them. So it is the same on every kernel, nothing of it has a name that another run
could take, and all of it ends with this process, however that ends.

Commands are lines of JSON on standard input, each answered with an empty line once it holds: no
packet that a command forbids arrives after that. It ends when its input does. Cost: some 20 us of a
processor for each packet.
"""

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import signal
import socket
import struct
import sys
import time
import uuid
from pathlib import Path

SUBNET = "10.79.0."
MTU = 9000
CLONE_NEWTIME, CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x80, 0x20000, 0x4000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG = 1
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x1, 0x1000
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFMTU = 0x8914, 0x8916, 0x891C, 0x8922
SIOCSIFTXQLEN = 0x8943
IFF_UP = 1
BOOT_ID = "/proc/sys/kernel/random/boot_id"
QUEUE_PACKETS = 10_000
"""How many wait at a card before some are lost, as happens where they come faster than they go."""
AT_ONCE = 64
"""How many packets are taken from a card before others have their turn."""

libc = ctypes.CDLL(None, use_errno=True)


def address_of(number):
    """The address of a host."""
    return f"{SUBNET}{number + 1}"


# -- a host


def checked(result, what):
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source, target, kind, flags):
    checked(
        libc.mount(source.encode(), target.encode(), kind and kind.encode(), flags, None),
        f"mount on {target}",
    )


def leave_the_host(clock_s):
    """Have namespaces of one's own; its monotonic clock is ahead by so much where that can be."""
    clocks = Path("/proc/self/ns/time").exists()
    kinds = CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWUTS | (CLONE_NEWTIME if clocks else 0)
    checked(libc.unshare(kinds), "unshare")
    if clocks:
        Path("/proc/self/timens_offsets").write_text(f"monotonic {clock_s} 0\n", encoding="ascii")
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("mooncake", "/dev/shm", "tmpfs", 0)
    boot = Path("/dev/shm/boot")
    boot.write_text(f"{uuid.uuid4()}\n", encoding="ascii")
    mount(str(boot), BOOT_ID, None, MS_BIND)
    boot.unlink()


def card(address):
    """A network card with that address, and its other end as a descriptor."""
    wire = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(wire, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TUN | IFF_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:

        def tell(name, what, value):
            fcntl.ioctl(control, what, struct.pack("16s24s", name, value))

        def inet(text):
            return struct.pack("=HH4s", socket.AF_INET, 0, socket.inet_aton(text))

        tell(b"eth0", SIOCSIFADDR, inet(address))
        tell(b"eth0", SIOCSIFNETMASK, inet("255.255.255.0"))
        tell(b"eth0", SIOCSIFMTU, struct.pack("=i", MTU))
        tell(b"eth0", SIOCSIFTXQLEN, struct.pack("=i", QUEUE_PACKETS))
        for name in (b"eth0", b"lo"):
            tell(name, SIOCSIFFLAGS, struct.pack("=h", IFF_UP))
    return wire


def host(number, clock_s):
    """Make a host; return its process and the other end of its wire."""
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:
                leave_the_host(clock_s)
                wire = card(address_of(number))
                socket.send_fds(theirs, [b"made"], [wire])
                os.close(wire)
                signal.pause()
        except OSError as error:
            theirs.send(str(error).encode())
        finally:
            os._exit(1)
    theirs.close()
    said, wires, _, _ = socket.recv_fds(ours, 1000, 1)
    ours.close()
    if not wires:
        raise OSError(said.decode() or "a host ended while it was made")
    return pid, wires[0]


# -- the wires


class Switch:
    """Hands packets on between the cards of hosts."""

    def __init__(self, wires, seed):
        self._wires = wires
        self._numbers = {wire: number for number, wire in enumerate(wires)}
        self._chance = random.Random(seed)
        pairs = itertools.permutations(range(len(wires)), 2)
        self._links = {pair: {"cut": False, "loss": 0.0, "delay_s": 0.0} for pair in pairs}
        self._waiting = []  # (when it is due, in which order it came, its link, itself)
        self._order = itertools.count()

    def command(self, line):
        """Change how some links are."""
        told = json.loads(line)
        for pair in itertools.product(told["from"], told["to"]):
            if pair in self._links:
                self._links[tuple(pair)].update(told["is"])

    def run(self):
        """Go on until standard input ends."""
        commands = sys.stdin.fileno()
        while True:
            ready = select.select([commands, *self._wires], [], [], self._wait_s())[0]
            if commands in ready:
                line = sys.stdin.buffer.raw.readline()
                if not line:
                    return
                self.command(line)
                sys.stdout.write("\n")
                sys.stdout.flush()
            for wire in ready:
                if wire != commands:
                    self._take(wire)
            self._deliver_what_is_due()

    def _wait_s(self):
        return max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None

    def _take(self, wire):
        source = self._numbers[wire]
        for _ in range(AT_ONCE):
            try:
                packet = os.read(wire, MTU)
            except BlockingIOError:
                return
            # Of version 4, to a host that there is: the last byte of the address says which.
            link = source, packet[19] - 1
            if packet[0] >> 4 == 4 and link in self._links:
                self._send(link, packet)

    def _send(self, link, packet):
        how = self._links[link]
        if how["loss"] and self._chance.random() < how["loss"]:
            return
        if how["delay_s"]:
            due = time.monotonic() + how["delay_s"]
            heapq.heappush(self._waiting, (due, next(self._order), link, packet))
        else:
            self._deliver(link, packet)

    def _deliver(self, link, packet):
        if not self._links[link]["cut"]:
            with contextlib.suppress(OSError):  # its queue is full: lost
                os.write(self._wires[link[1]], packet)

    def _deliver_what_is_due(self):
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            _, _, link, packet = heapq.heappop(self._waiting)
            self._deliver(link, packet)


def main():
    """Make the hosts that the command line asks for, say their processes, and connect them."""
    asked = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its input
    try:
        made = [host(number, clock_s) for number, clock_s in enumerate(asked["clocks_s"])]
    except OSError as error:
        sys.stdout.write(json.dumps({"error": str(error)}) + "\n")
        return
    sys.stdout.write(json.dumps({"pids": [pid for pid, _ in made]}) + "\n")
    sys.stdout.flush()
    try:
        Switch([wire for _, wire in made], asked["seed"]).run()
    finally:
        for pid, _ in made:
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
