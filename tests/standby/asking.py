"""What is asked of a standby, as `mooncake promote` does."""

import contextlib
import io
import json

from mooncake_store.cli.shared.tree import run
from mooncake_store.wire.cluster import CLUSTER
from mooncake_store.wire.standby import PROMOTE, STANDBY, PromoteRequest, StandbyRequest
from tests.waiting import PATIENCE_S, until
from transfer_engine.errors import StoreError, UnavailableError
from transfer_engine.rpc.blocking import BlockingConnection


def ask(address, operation, request):
    """The answer of a standby."""
    with BlockingConnection.connect(address, CLUSTER) as connection:
        body = operation.request.pack(request)
        return operation.reply.unpack(connection.call(operation, body, timeout_s=60.0))


def mooncake(*arguments):
    """Run a command here; return its exit code and what it printed for a program."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([*arguments, "--json"])
    return code, json.loads(out.getvalue() or err.getvalue())


def status(address):
    """How its copy stands."""
    return ask(address, STANDBY, StandbyRequest())


def until_copied(address, beyond=0, timeout_s=PATIENCE_S):
    """Wait until it has a whole copy, up to where its leader is.

    `beyond` is a position that it had when something was put.
    """

    def copied():
        with contextlib.suppress(StoreError):
            shards = status(address).shards
            return bool(shards) and all(
                s.state == "following" and s.head == s.position > beyond for s in shards
            )
        return False

    until(copied, timeout_s, "a whole copy")


def refusal(client, timeout_s=PATIENCE_S):
    """Why a change is refused for want of a standby; empty where it is taken.

    It is refused shortly before its deadline, so that one is short. Where nothing came before it,
    or something else is wrong, that says neither, and it is asked again.
    """

    def asked():
        try:
            client.put("another", b"value", upsert=True, deadline="1s")
        except StoreError as error:
            said = str(error)
            return [said] if isinstance(error, UnavailableError) and "standby" in said else None
        return [""]

    return until(asked, timeout_s, "an answer to a change")[0]


def promote(address, timeout_s=PATIENCE_S, *, hand_over=False):
    """Let it lead, once it knows that its leader is gone, or may end; return the words lost."""
    said = ""

    def promoted():
        nonlocal said
        try:
            return 1 + ask(address, PROMOTE, PromoteRequest(hand_over)).lost_words
        except StoreError as error:
            said = str(error)
        return 0

    try:
        return until(promoted, timeout_s) - 1
    except AssertionError:
        raise AssertionError(f"no promotion within {timeout_s} s: {said}") from None
