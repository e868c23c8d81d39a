"""vLLM's point-to-point connector on a machine without an accelerator, from outside of vLLM.

One line of it asks which accelerator is current; here the answer is 0. All else is vLLM's.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnector,
)


class MooncakeConnectorOnCpu(MooncakeConnector):
    """`MooncakeConnector`, told that accelerator 0 is current."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        with mock.patch("torch.accelerator.current_device_index", return_value=0):
            super().__init__(*arguments, **named)
