"""Owner processes that start at once, also where starting Python and numba takes ten seconds.

They are forked from a server process that imported everything and loaded the kernels before.
"""

import multiprocessing

from transfer_engine import testing
from transfer_engine.kernels import rdma
from transfer_engine.segments import mapping as memory

memory.load_kernels()
rdma.warmup()

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.rdma.owner"])


def serve(connection, options):
    """Answer the commands of `ForkedOwner.ask` until it goes away."""
    owner = testing.Owner(options)
    with owner.server:
        while True:
            command, arguments = connection.recv()
            connection.send(getattr(owner, command)(**arguments))


class ForkedOwner(testing.OwnerProcess):
    """What `OwnerProcess` is, forked."""

    def __init__(self, **options):
        self._connection, theirs = _context.Pipe()
        self.process = _context.Process(target=serve, args=(theirs, options), daemon=True)
        self.process.start()
        self.process.poll = lambda: self.process.exitcode
        theirs.close()

    def ask(self, command, **arguments):
        self._connection.send((command, arguments))
        assert self._connection.poll(60), f"the owner does not answer {command}"
        return self._connection.recv()

    def close(self):
        self.process.kill()
        self.process.join(30)
        self._connection.close()
