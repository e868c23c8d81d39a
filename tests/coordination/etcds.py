"""Real etcds on the loopback, and a relay in front of them that can be cut."""

import asyncio
import contextlib
import json
import shutil
import signal
import socket
import urllib.request

import pytest

from tests.processes import stopped
from tests.waiting import PATIENCE_S, until


def free_ports(count):
    """Ports that nobody used a moment ago."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


class Etcd:
    """An etcd of one or more members, each a process; they are killed with the test.

    `on` is put before their command lines, and `host` is where they listen then.
    """

    def __init__(
        self, start_program, folder, members=1, *options, scheme="http", host="127.0.0.1", on=()
    ):
        if shutil.which("etcd") is None:
            pytest.skip("no etcd is installed (Debian: apt install etcd-server)")
        self._start_program = start_program
        self._folder = folder
        self._options = options
        self._scheme, self._host, self._on = scheme, host, on
        self._ports = free_ports(2 * members)
        self.addresses = [f"{host}:{port}" for port in self._ports[:members]]
        self.members = [self.start(number) for number in range(members)]
        for member in self.members:
            member.wait_for_line("ready to serve")

    def start(self, number=0):
        """Start a member, on the ports and data that it had."""
        count = len(self.addresses)
        client, peer = f"{self._scheme}://{self.addresses[number]}", self._peer(number)
        return self._start_program(
            *self._on, "etcd",
            *("--name", f"m{number}", "--data-dir", self._folder / f"m{number}"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            "--initial-cluster",
            ",".join(f"m{other}={self._peer(other)}" for other in range(count)),
            *("--unsafe-no-fsync", "--log-level", "info", *self._options),
        )  # fmt: skip

    def start_again(self, number=0):
        """Start a member that was killed."""
        self.members[number] = self.start(number)
        self.members[number].wait_for_line("ready to serve")

    def stop(self, number=0):
        """Let a member stand still."""
        self.members[number].signal(signal.SIGSTOP)
        until(lambda: stopped(self.members[number].process.pid))

    def go_on(self, number=0):
        """Let it go on."""
        self.members[number].signal(signal.SIGCONT)

    def leader(self):
        """The number of the member that leads the others."""
        said = [self.post("maintenance/status", {}, number) for number in range(len(self.members))]
        return next(
            number for number, one in enumerate(said) if one["leader"] == one["header"]["member_id"]
        )

    def post(self, path, request, number=0, **headers):
        """Ask a member what the product does not ask."""
        url = f"http://{self.addresses[number]}/v3/{path}"
        asked = urllib.request.Request(url, json.dumps(request).encode(), headers)
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            return json.load(answer)

    def _peer(self, number):
        return f"http://{self._host}:{self._ports[len(self.addresses) + number]}"


class Relay:
    """Hands on what comes to it, until it is cut: then it swallows everything, and says nothing."""

    def __init__(self, address):
        self._host, port = address.split(":")
        self._port = int(port)
        self._cuts = 0
        self._cut = False
        self._tasks = set()

    async def open(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self, cut=True):
        """Cut off who is connected for ever, and who comes until this is undone."""
        self._cut = cut
        self._cuts += cut

    async def close(self):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        cuts = None if self._cut else self._cuts
        there = [writer]

        async def pump(source, sink):
            while data := await source.read(1 << 16):
                if cuts == self._cuts:
                    sink.write(data)
                    await sink.drain()
            if cuts == self._cuts:
                sink.close()

        answers = None
        with contextlib.suppress(OSError, asyncio.CancelledError):
            above = await asyncio.open_connection(self._host, self._port)
            there.append(above[1])
            answers = asyncio.ensure_future(pump(above[0], writer))
            await pump(reader, above[1])
            await answers
        if answers:
            answers.cancel()
            await asyncio.gather(answers, return_exceptions=True)
        for each in there:
            each.transport.abort()
        self._tasks.discard(asyncio.current_task())
