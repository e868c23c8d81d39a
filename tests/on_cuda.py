"""Marks for tests that need a CUDA device, and for those that need there to be none."""

import pytest

from transfer_engine.devices.cuda import unavailable

_lacking = unavailable()
ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(_lacking is not None, reason=f"no CUDA device: {_lacking}"),
]
"""Marks of what `make test-gpu` runs."""
WITHOUT_CUDA = pytest.mark.skipif(_lacking is None, reason="there is a CUDA device")
