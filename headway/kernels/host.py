"""Torch on the host: its own operations on one thread, and numbers on their way to the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch work on the calling thread alone inside.

    OpenMP would wait for all its threads to be given a core, and its threads go on looking for work for milliseconds
    afterwards, on cores that the kernels' own team needs.
    """
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def to_device(numbers: NDArray[np.generic], device: torch.device) -> Tensor:
    """A tensor of the same shape and dtype. On a CPU it shares the array's memory; no copy to a GPU is waited for."""
    host = torch.from_numpy(numbers)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
