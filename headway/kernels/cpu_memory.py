"""Memory for weights in pages of two megabytes, where the system has them: reading them straight through costs less."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

_CHUNK = 64 << 20
_PAGE = 2 << 20
_ALIGNMENT = 64


class LargePages:
    """Tensors cut from large mappings, which are given back when the last tensor of one is gone."""

    def __init__(self) -> None:
        self._mapping: mmap.mmap | None = None
        self._used = self._size = 0

    def empty(self, size: int) -> Tensor:
        """`size` bytes, uint8, zeros as the system hands them out."""
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        if self._mapping is None or self._used + size > self._size:
            self._mapping, self._size, self._used = _map(size)
        tensor = torch.frombuffer(self._mapping, dtype=torch.uint8, count=size, offset=self._used)
        self._used += math.ceil(size / _ALIGNMENT) * _ALIGNMENT
        return tensor


def _map(least: int) -> tuple[mmap.mmap, int, int]:
    """(a mapping, its size, where its first large page begins)."""
    size = max(_CHUNK, math.ceil(least / _PAGE) * _PAGE) + _PAGE
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    address = torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()
    return mapping, size, -address % _PAGE
