"""Clients that believe to have measured what reads take."""

import time

from mooncake_store.client.costs import Sample


def measured(client, seconds, *, nbytes, objects=1, segment=None):
    """Let a client take it that such batches last so long, on one of its segments or on all.

    And did all the time, so that it is not tried whether they still do.
    """
    now = time.monotonic()
    for target in client._core.directory.known.values():
        if segment in (None, target.entry.name):
            target.pace = client._core.directory.costs.pace()  # of which nothing is known yet
            for minutes in reversed(range(20)):
                target.pace.samples.append(Sample(nbytes, objects, seconds, now - 60.0 * minutes))
