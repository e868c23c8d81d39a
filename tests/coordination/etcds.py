"""Real etcds on the loopback, and a relay in front of them that can be cut."""

import asyncio
import contextlib
import ipaddress
import json
import random
import shutil
import signal
import socket
import urllib.request
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.processes import stopped
from tests.waiting import PATIENCE_S, until


def free_ports(count):
    """Ports that nobody used a moment ago, none of those that the system gives to connections.

    A program that is told its port may start late, and an etcd is asked over many connections.
    """
    found = []
    for port in random.sample(range(20_000, 32_000), 12_000):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    pytest.fail(f"{count} ports are not free")


def certificate(folder, who="etcd", kind=x509.NameOID.COMMON_NAME):
    """Files of a key and a certificate for the loopback that its own key has signed."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(kind, who)])
    loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([loopback]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    cert_file, key_file = folder / f"{who}.crt", folder / f"{who}.key"
    cert_file.write_bytes(made.public_bytes(pem))
    key_file.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return cert_file, key_file


def post(address, path, request, **headers):
    """Ask an etcd what the product does not ask."""
    asked = urllib.request.Request(
        f"http://{address}/v3/{path}", json.dumps(request).encode(), headers
    )
    with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
        return json.load(answer)


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
        return post(self.addresses[number], path, request, **headers)

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
