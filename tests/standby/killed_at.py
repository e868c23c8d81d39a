"""The command of the store, killed at a moment: `python -m tests.standby.killed_at MOMENT ...`.

Moments of a leader that splits its shards, and of a standby that makes its copies anew.
"""

import asyncio
import os
import signal
import sys

from mooncake_store.cli.main import main
from mooncake_store.master import resharding, running
from mooncake_store.master.cluster import Cluster
from mooncake_store.master.server import Master
from mooncake_store.standby import renewing
from mooncake_store.standby.renewing import Renewal


def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def at_the_second(function):
    """That function, but for its second call."""
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return function(*arguments) if len(calls) < 2 else killed()

    return counted


def after(function):
    """That function, and the end."""

    def ended(*arguments):
        function(*arguments)
        killed()

    return ended


def started_twice(start):
    starts = []

    async def counted(master):
        addresses = await start(master)
        starts.append(master)
        return addresses if len(starts) < 2 else killed()

    return counted


def mounted_after(begin):
    """Workers that mount again with a master that was started anew, and the end."""
    calls = []

    async def counted(*arguments):
        calls.append(arguments)
        answer = await begin(*arguments)
        if len(calls) > 1:
            asyncio.get_running_loop().call_later(0.1, killed)
        return answer

    return counted


async def never(renewal, wanted):
    return await FOLLOW(renewal, wanted) and False


FOLLOW = Renewal.follow
MOMENTS = {
    "resting": lambda: setattr(running, "split_state", killed),
    "made": lambda: setattr(resharding, "write_registers", killed),
    "decided": lambda: setattr(resharding, "finish_resharding", killed),
    "half": lambda: setattr(resharding, "move_rings", at_the_second(resharding.move_rings)),
    "split": lambda: setattr(running, "split_state", after(running.split_state)),
    "started": lambda: setattr(Master, "start", started_twice(Master.start)),
    "mounted": lambda: setattr(Cluster, "_mount", mounted_after(Cluster._mount)),
    "copied": lambda: setattr(renewing, "write_registers", killed),
    "copies decided": lambda: setattr(renewing, "settle", killed),
    # Not killed: one whose copies are never all there.
    "copying": lambda: setattr(Renewal, "follow", never),
}

if __name__ == "__main__":
    MOMENTS[sys.argv.pop(1)]()
    sys.exit(main(sys.argv[1:]))
