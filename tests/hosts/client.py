"""A client on a host of a test: `python -m tests.hosts.client '{"url": ...}'`.

It does what lines of JSON on standard input ask for, one after the other, and answers what came of
it and when, as `history.Operation` has it. Values are numbers, put as bytes that follow from them.
It keeps no leases, so each read is answered by a master.
"""

import json
import sys
import time

from mooncake_store.client.blocking import Client
from mooncake_store.errors import NotFoundError, StoreError
from tests.hosts.history import ABSENT, OK, PRESENT, UNKNOWN

AWAY = "absent"
"""What the error of a miss says where the object is there, and only its worker is not."""
WRONG = -1
"""The value that bytes are which nobody put."""


def bytes_of(value):
    """What is put for a number: 8 bytes to 32 KiB."""
    return b"%08d" % value * (1 << value % 13)


def value_of(data):
    """The number that was put as these bytes."""
    value = int(data[:8]) if data[:8].isdigit() else WRONG
    return value if value != WRONG and data == bytes_of(value) else WRONG


def put(client, key, value):
    result = client.put(key, bytes_of(value), hard_pin=True)
    return (PRESENT if result.already_present else OK), value


def get(client, key, _):
    return OK, value_of(client.get(key))


def exists(client, key, _):
    if not client.exists(key):
        # That is said also while only its worker is away. A read tells one from the other.
        client.get(key)
    return PRESENT, None


def remove(client, key, _):
    client.remove(key, force=True)
    return OK, None


def put_many(client, key, count):
    """Put so many small objects at once, for measuring."""
    client.put_many([f"{key}-{at}" for at in range(count)], [bytes(64)] * count).check()
    return OK, None


OPERATIONS = {each.__name__: each for each in (put, get, exists, remove, put_many)}


def done(client, asked):
    """The outcome, the value and the error of what is asked for."""
    act = OPERATIONS[asked["kind"]]
    try:
        return *act(client.made(), asked["key"], asked["value"]), ""
    except StoreError as error:
        # A put ends so where the key was removed before it was complete.
        absent = isinstance(error, NotFoundError) and act is not put and AWAY not in str(error)
        return ABSENT if absent else UNKNOWN, asked["value"], f"{type(error).__name__}: {error}"


class Lasting:
    """A client that is made with its first use, and again while that fails."""

    def __init__(self, url, **settings):
        self._url, self._settings = url, settings
        self._made = None

    def made(self):
        """Return it. Raises StoreError where its pool is not there."""
        if self._made is None:
            self._made = Client(self._url, lease_cache=False, **self._settings)
        return self._made


def main():
    """Serve until standard input ends."""
    client = Lasting(**json.loads(sys.argv[1]))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        asked = json.loads(line)
        begin = time.monotonic()
        outcome, value, error = done(client, asked)
        answer = {"begin": begin, "end": time.monotonic(), "outcome": outcome}
        sys.stdout.write(json.dumps(answer | {"value": value, "error": error}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
