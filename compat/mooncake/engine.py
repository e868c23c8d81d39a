"""`mooncake.engine` of the original."""

from mooncake_store.compat.engine import TransferEngine
from mooncake_store.compat.values import TransferNotify, TransferOpcode

__all__ = ["Read", "TransferEngine", "TransferNotify", "TransferOpcode", "Write"]

Read, Write = TransferOpcode.Read, TransferOpcode.Write

SUPPORT_CUDA = False
SUPPORT_EFA = False
SUPPORT_HIP = False
SUPPORT_INTRA_NVLINK = False
SUPPORT_MNNVL = False
SUPPORT_MUSA = False
