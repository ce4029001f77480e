"""Memory for the results of operations that are recorded. An address is used again when nothing holds it any more."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

_CHUNK = 16 << 20
_ALIGNMENT = 64


class Arena:
    """Tensors whose memory stays mapped after they are gone, for those that come after them.

    A recorded sequence of operations is right whenever it is repeated: where two of its results share memory, the
    first was not needed any more when the second was made. Memory is never given back to the system.
    """

    def __init__(self) -> None:
        self._chunks: list[np.ndarray] = []
        self._free: list[tuple[int, int]] = []  # (address, size), by address
        # Whichever thread drops the last reference only appends here.
        self._returned: deque[tuple[int, int]] = deque()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of any numbers; its memory is free when the last tensor that shares its storage is gone."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        size = -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        address = self._take(size)
        memory = (ctypes.c_uint8 * size).from_address(address)
        weakref.finalize(memory, self._returned.append, (address, size)).atexit = False
        return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)

    def _take(self, size: int) -> int:
        while self._returned:
            self._give_back(*self._returned.popleft())
        for index, (address, room) in enumerate(self._free):
            if room >= size:
                if room == size:
                    del self._free[index]
                else:
                    self._free[index] = (address + size, room - size)
                return address
        chunk = np.empty(max(_CHUNK, size) + _ALIGNMENT, np.uint8)
        self._chunks.append(chunk)
        begin = -(-chunk.ctypes.data // _ALIGNMENT) * _ALIGNMENT
        self._give_back(begin, max(_CHUNK, size))
        return self._take(size)

    def _give_back(self, address: int, size: int) -> None:
        self._free.append((address, size))
        self._free.sort()
        joined: list[tuple[int, int]] = []
        for start, room in self._free:
            if joined and joined[-1][0] + joined[-1][1] == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + room)
            else:
                joined.append((start, room))
        self._free = joined
