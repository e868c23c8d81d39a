"""An owner that can be reached by several routes."""

import pytest

from transfer_engine.testing import OwnerProcess

RAILS = ["127.0.0.2:0", "127.0.0.3:0"]


@pytest.fixture(scope="module")
def owner():
    owner = OwnerProcess(rails=RAILS, unix=None)
    yield owner
    owner.close()
