"""Numbers of the host as tensors of the device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(numbers: NDArray[np.generic], device: torch.device) -> Tensor:
    """Of the same shape and dtype. The copy to a GPU is not waited for; on a CPU it is the array's own memory."""
    host = torch.from_numpy(numbers)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
