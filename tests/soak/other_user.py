"""Another user of this host, for `impostors.py`: `python -m tests.soak.other_user URL N ...`.

As root it does each thing once, so that it is known to work; then it becomes nobody, and tries each
N times: a pool without a secret, by its own protocols and over both transports, and HTTP ports that
ask for no token. It ends with 1 where one of these was let in, or was refused for another reason.
"""

from __future__ import annotations

import http.client
import os
import sys
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from mooncake_store import Client
from mooncake_store.errors import AuthError, NotFoundError
from tests.master.wires import ClusterWire
from tests.soak.impostors import one_read
from transfer_engine.base import SegmentDescriptor
from transfer_engine.notify import Alive, Probe
from transfer_engine.transports.calling import ask_at

if TYPE_CHECKING:
    from collections.abc import Callable

NOBODY = 65534
CALL_S = 30.0


def removed(url: str) -> None:
    """Remove an object, as a client does."""
    with Client(url) as client, suppress(NotFoundError):
        client.remove("of nobody")


def changed(where: str) -> None:
    """Have something changed over HTTP, of which there is nothing."""
    host, _, port = where.partition(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=CALL_S)) as connection:
        connection.request("POST", "/nothing", b"{}", {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
    if answer.status == 403:
        raise AuthError(answer.reason)


def main(url: str, count: str, *web: str) -> int:
    """Try it all; returns the exit code."""
    address = url.partition("//")[2].partition("/")[0]
    wires = ClusterWire(address)
    descriptor = SegmentDescriptor.decode(wires.segments()[0].descriptor)
    wires.close()
    worker = f"{descriptor.tcp_host}:{descriptor.tcp_port}"
    tries: dict[str, Callable[[], object]] = {
        "a client": lambda: removed(url),
        "the master": lambda: ClusterWire(address).close(),
        "memory over TCP": lambda: one_read(descriptor, None, "tcp"),
        "memory of this host": lambda: one_read(descriptor, None, "shm"),
        "the worker": lambda: ask_at(worker, Probe(), Alive, None, CALL_S),
    }
    tries |= {each: lambda each=each: changed(each) for each in web}
    for each in tries.values():
        each()
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    let_in = []
    for name, each in tries.items():
        for _ in range(int(count)):
            try:
                each()
            except AuthError:
                continue
            let_in.append(name)
    print(*sorted(set(let_in)), file=sys.stderr, sep=", ")
    return bool(let_in)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
