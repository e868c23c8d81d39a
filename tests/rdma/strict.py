"""A pytest plugin for the machine that is made to run certain tests: there, a skip is a failure.

It also starts the process that owner processes are forked from, so that its imports, slow in an
emulated machine, run beside those of pytest, and lets all tests have their owners from there.
"""

from multiprocessing import forkserver

import pytest

forkserver.set_forkserver_preload(["tests.rdma.owner"])
forkserver.ensure_running()


def pytest_configure():
    from tests.rdma.owner import ForkedOwner
    from transfer_engine import testing

    testing.OwnerProcess = ForkedOwner


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, in the machine made for it: {call.excinfo}"
    return report
