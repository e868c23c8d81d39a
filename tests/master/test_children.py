"""A child process ends with its parent, whatever else goes wrong."""

import socket
import subprocess
import sys

from mooncake_store.program import children
from tests.waiting import PATIENCE_S

# A child that cannot do what it does when its parent is gone.
STUBBORN = """
import threading
from mooncake_store.program import children

children._ORPHAN_GRACE_S = 0.0
parent = children.Parent()
parent.watch(lambda: 1 / 0)
parent.ready({})
threading.Event().wait()
"""


def test_a_child_that_cannot_be_asked_to_end_does_not_outlive_its_parent():
    ours, theirs = socket.socketpair()
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdin=theirs, stderr=subprocess.PIPE
    ) as child:
        theirs.close()
        children._send(ours, {})
        ours.settimeout(PATIENCE_S)
        assert children._receive(ours) == {}
        ours.close()
        try:
            assert child.wait(PATIENCE_S) == 1
            assert b"ZeroDivisionError" in child.stderr.read()
        finally:
            child.kill()
