"""Torch's own operations on one thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch works on the calling thread alone.

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
