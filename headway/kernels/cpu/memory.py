"""Memory for weights.

In pages of two megabytes, where the system has them: reading them straight through costs less. And in turn on the
memory nodes of the processors in use: any thread may read any weight.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import platform
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

_CHUNK = 64 << 20
_PAGE = 2 << 20
_ALIGNMENT = 64
# Linux's mbind, by processor, and its policy of taking pages from nodes in turn.
_MBIND, _INTERLEAVE = {"x86_64": 237, "aarch64": 235}, 3
_MOST_NODES = 1024


class LargePages:
    """Tensors cut from large mappings, which are given back when the last tensor of one is gone.

    Args:
        first: a private, anonymous mapping to begin with, where somebody has prepared one.
    """

    def __init__(self, first: mmap.mmap | None = None) -> None:
        self._mapping = first
        self._used = 0 if first is None else _first_page(first)
        self._size = 0 if first is None else len(first)

    def empty(self, size: int) -> Tensor:
        """`size` bytes, uint8, zeros as the system hands them out."""
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        if self._mapping is None or self._used + size > self._size:
            self._mapping, self._size, self._used = _map(size)
        tensor = torch.frombuffer(self._mapping, dtype=torch.uint8, count=size, offset=self._used)
        self._used += math.ceil(size / _ALIGNMENT) * _ALIGNMENT
        return tensor


class SharedPages:
    """Tensors in a file in memory that several processes have: those that ask for the same sizes get the same bytes.

    Args:
        descriptor: of the file, which is made long enough.
        begin: what others have of it ends before that.
        size: bytes of all tensors, each of which begins where a cache line does.
    """

    def __init__(self, descriptor: int, begin: int, size: int) -> None:
        begin = math.ceil(begin / _PAGE) * _PAGE
        if os.fstat(descriptor).st_size < begin + size:
            os.ftruncate(descriptor, begin + size)
        self._mapping, self._used = mmap.mmap(descriptor, size, offset=begin), 0

    def empty(self, size: int) -> Tensor:
        """`size` bytes, uint8, zeros until a process writes to them. Raises ValueError where there is no room."""
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        tensor = torch.frombuffer(self._mapping, dtype=torch.uint8, count=size, offset=self._used)
        self._used += math.ceil(size / _ALIGNMENT) * _ALIGNMENT
        return tensor


def _map(least: int) -> tuple[mmap.mmap, int, int]:
    """(a mapping, its size, where its first large page begins)."""
    size = max(_CHUNK, math.ceil(least / _PAGE) * _PAGE) + _PAGE
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    interleave(_address(mapping), size, nodes_of(os.sched_getaffinity(0)))
    return mapping, size, _first_page(mapping)


def _first_page(mapping: mmap.mmap) -> int:
    return -_address(mapping) % _PAGE


def _address(mapping: mmap.mmap) -> int:
    address: int = torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()
    return address


def nodes_of(processors: Collection[int], folder: Path = Path("/sys/devices/system/node")) -> list[int]:
    """The memory nodes that these processors belong to; none where the system does not say."""
    nodes = []
    for file in folder.glob("node[0-9]*/cpulist"):
        spans = (span.split("-") for span in file.read_text().strip().split(",") if span)
        if any(number in processors for span in spans for number in range(int(span[0]), int(span[-1]) + 1)):
            nodes.append(int(file.parent.name.removeprefix("node")))
    return sorted(nodes)


def interleave(address: int, size: int, nodes: Collection[int]) -> bool:
    """Ask that pages not yet written come from the nodes in turn; whether that was worth asking for and allowed."""
    number = _MBIND.get(platform.machine())
    if number is None or len(nodes) < 2:
        return False
    mask = sum(1 << node for node in nodes if node < _MOST_NODES).to_bytes(_MOST_NODES // 8, "little")
    words = [ctypes.c_long(value) for value in (number, address, size, _INTERLEAVE)]
    return bool(system_call(*words, mask, ctypes.c_long(_MOST_NODES + 1), ctypes.c_long(0)) == 0)


system_call = ctypes.CDLL(None, use_errno=True).syscall
