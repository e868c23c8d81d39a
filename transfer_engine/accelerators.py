"""Which kind of accelerator memory belongs to: `locate` for that of this process, `borrow` for
what another process of the host lends.

The kinds themselves (`cuda`) know `devices` and nothing of this; they are imported when memory of
theirs is met.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transfer_engine.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from transfer_engine.devices.devices import DeviceMemory

__all__ = ["BORROWERS", "borrow", "locate"]


def locate(memory: object) -> DeviceMemory | None:
    """Return where memory lies on a device, or None when it does not; imports no torch.

    What has a method `device_memory()` is asked; torch tensors are recognised by their module.
    Raises InvalidArgumentError for tensors that are not contiguous.
    """
    ask = getattr(memory, "device_memory", None)
    if ask is not None:
        found: DeviceMemory = ask()
        return found
    if type(memory).__module__.partition(".")[0] == "torch" and getattr(memory, "is_cuda", False):
        from transfer_engine.devices.cuda import locate_tensor

        return locate_tensor(memory)
    return None


def _borrow_cuda(token: bytes) -> DeviceMemory:
    from transfer_engine.devices.cuda import borrow_memory

    return borrow_memory(token)


BORROWERS: dict[bytes, Callable[[bytes], DeviceMemory]] = {b"cuda": _borrow_cuda}
"""Who maps lent memory, by the first four bytes of what `Device.lend` returned."""


def borrow(token: bytes) -> DeviceMemory:
    """Map memory that another process lent; it stays mapped while the result's `keep` lives.

    Raises InvalidArgumentError for what no device of this process understands.
    """
    borrower = BORROWERS.get(token[:4])
    if borrower is None:
        raise InvalidArgumentError("this process has no device like the one that lends its memory")
    return borrower(token)
