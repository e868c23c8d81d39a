"""Connecting to an owner: TCP, then the handshake, then the check that it is the owner meant.

Every data connection begins this way, whatever it carries afterwards. A descriptor names one run
of one process; whoever else answers at its address (a restarted owner, another program) is told
apart here, and what is against its address (`rpc.networks`) before it is connected to. Cost: two
or three round trips, once a connection.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import TYPE_CHECKING

from transfer_engine.base import remaining_s, restarted
from transfer_engine.errors import (
    AuthError,
    PeerLostError,
    RemoteProtocolError,
    TransferTimeoutError,
    UnavailableError,
)
from transfer_engine.rpc.networks import connect
from transfer_engine.rpc.reached import dialled
from transfer_engine.transports.sealed_link import SealedLink
from transfer_engine.transports.stream import Link, handshake_decoder, identity
from transfer_engine.wire.handshake import ClientHandshake
from transfer_engine.wire.keyring import tls_of

if TYPE_CHECKING:
    from transfer_engine.rpc.networks import Objection
    from transfer_engine.wire.keyring import Secret

__all__ = ["dial"]

_CONNECT_S = 5.0


def dial(
    address: tuple[str, int],
    instance: bytes | None,
    *,
    secret: Secret | None,
    deadline: float,
    features: tuple[str, ...] = (),
    objection: Objection | None = None,
) -> tuple[Link, frozenset[str]]:
    """Return a connection to this owner, and the features that both ends have.

    Without an `instance`, whoever answers at the address is meant. `objection` is for an address
    that a peer told: it says what is against it.
    Raises PeerLostError, also when another instance answers; TransferTimeoutError; AuthError;
    UnavailableError for an address that something is against.
    """
    name = f"{address[0]}:{address[1]}"
    timeout_s = min(_CONNECT_S, remaining_s(deadline, "connect", name))
    try:
        if objection is None:
            sock = socket.create_connection(address, timeout=timeout_s)
        else:
            sock = connect(address, timeout_s, objection)
    except UnavailableError:  # an OSError as well
        raise
    except TimeoutError as error:
        raise TransferTimeoutError(
            f"{name} did not accept a connection of process {os.getpid()} in {timeout_s:.1f} s",
            peer=name,
            operation="connect",
        ) from error
    except OSError as error:
        raise PeerLostError(
            f"process {os.getpid()} cannot connect to {name}: {error.strerror or error}",
            peer=name,
            operation="connect",
        ) from error
    here = sock.getsockname()
    peer, tls = f"{name} (from {here[0]}:{here[1]})", tls_of(secret)
    seal = None if tls is None else tls.seal_of_client(address[0], bulk=True)
    link = Link(sock, peer) if seal is None else SealedLink(sock, peer, seal)
    try:
        link.deadline = time.monotonic() + timeout_s
        if isinstance(link, SealedLink):
            link.shake()
        return link, _greet(link, instance, secret, features)
    except (AuthError, RemoteProtocolError) as error:
        link.close()
        error.peer = error.peer or link.peer  # who decodes what came does not know whose it is
        raise
    except BaseException:
        link.close()
        raise


def _greet(
    link: Link,
    instance: bytes | None,
    secret: Secret | None,
    features: tuple[str, ...],
) -> frozenset[str]:
    handshake = ClientHandshake(identity("client", features=features), secret=secret)
    decoder = handshake_decoder()
    there = None
    with contextlib.suppress(OSError):
        there = link.sock.getpeername()
    link.send(handshake.start(dialled(there)))
    while handshake.session is None:
        reply = handshake.receive(link.frame(decoder))
        if reply:
            link.send(reply)
    found = handshake.session.peer.instance
    if instance is not None and found != instance.hex():
        raise restarted(instance, found, operation="connect", peer=link.peer)
    return handshake.session.features
