"""Tensors of numbers kept in eight bits each, for who can do with less than all of them.

    scales     one float32 for each GROUP elements: what the largest of them is divided by
    elements   float8 (e4m3: 4 bits of exponent, 3 of mantissa), in units of the scale

Half of what bf16 takes, and 3 % of that for scales. Each number comes back within a sixteenth of
itself, or within 1/458,752 of the largest of its group, whichever is more; then it is rounded to
the type it had. Zeros stay zeros. What is not finite has no place here, nor have whole numbers.

Opt-in: other bytes are kept than those that were given, and it is these that checksums speak of.
Cost: a pass over the numbers by torch, each way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.errors import InvalidArgumentError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["TYPES", "narrow", "narrow_bytes", "widen"]

TYPES = ("float16", "bfloat16", "float32", "float64")
GROUP = 128
_LARGEST = 448.0
"""The largest number of e4m3."""
_SCALE_BYTES = 4


def narrow_bytes(count: int) -> int:
    """Return how many bytes so many numbers take."""
    return -(-count // GROUP) * _SCALE_BYTES + count


def narrow(tensor: Any) -> Any:
    """Return the bytes of a contiguous tensor on the CPU. Raises InvalidArgumentError."""
    import torch

    count = tensor.numel()
    groups = -(-count // GROUP)
    numbers = torch.zeros(groups * GROUP, dtype=torch.float32)
    numbers[:count] = tensor.reshape(-1)
    if not bool(torch.isfinite(numbers).all()):
        raise InvalidArgumentError(
            f"a tensor of {tensor.dtype} with numbers that fp8 cannot hold: infinite, or none",
            advice="put it without fp8",
        )
    rows = numbers.reshape(groups, GROUP)
    # Not below the least float32 that has all its bits, or quotients would be off.
    scales = (rows.abs().amax(dim=1) / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    units = (rows / scales[:, None]).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    elements = units.view(torch.uint8).reshape(-1)[:count]
    return torch.cat([scales.view(torch.uint8), elements])


def widen(data: NDArray[np.uint8], shape: tuple[int, ...], dtype: str) -> Any:
    """Return the tensor that `narrow` made these bytes of, nearly."""
    import torch

    count = int(np.prod(shape, dtype=np.int64))
    groups = -(-count // GROUP)
    stored = torch.from_numpy(data)
    scales = stored[: groups * _SCALE_BYTES].clone().view(torch.float32)
    numbers = torch.zeros(groups * GROUP, dtype=torch.float32)
    numbers[:count] = stored[groups * _SCALE_BYTES :].view(torch.float8_e4m3fn).float()
    numbers = (numbers.reshape(groups, GROUP) * scales[:, None]).reshape(-1)[:count]
    return numbers.to(getattr(torch, dtype)).reshape(shape)
