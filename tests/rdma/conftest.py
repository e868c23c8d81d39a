"""Fixtures of the RDMA tests: fake cards everywhere, real ones where there are some.

Tests that need a device carry the marker `rdma` and skip without one, saying why; in the virtual
machine (`strict.py`) a skip is a failure.
"""

import pytest

from tests.rdma.fake import Fabric, FakeNic
from transfer_engine import TransferEngine
from transfer_engine.rdma import verbs


@pytest.fixture
def fake_nics(monkeypatch):
    """Two fake cards on one fabric, in place of those of the host."""
    fabric = Fabric()
    nics = (FakeNic(fabric, "fake0"), FakeNic(fabric, "other1"))
    monkeypatch.setattr(verbs, "find_nics", lambda: nics)
    monkeypatch.setattr(verbs, "unavailable", lambda: None)
    return nics


@pytest.fixture
def engine(request):
    """An engine; with `fake_nics` in the same test, on those."""
    if "fake_nics" in request.fixturenames:
        request.getfixturevalue("fake_nics")
    with TransferEngine() as engine:
        yield engine
