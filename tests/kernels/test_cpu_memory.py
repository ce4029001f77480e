"""Where the memory of weights lies on machines with several memory nodes."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.kernels.cpu import memory as cpu_memory
from headway.kernels.cpu.memory import LargePages, interleave, nodes_of


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """What the system is asked for; it refuses, as it does a container without the permission."""
    made: list[list[Any]] = []

    def refuse(*arguments: Any) -> int:
        made.append([getattr(each, "value", each) for each in arguments])
        return -1

    monkeypatch.setattr(cpu_memory, "system_call", refuse)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    return made


def two_nodes(folder: Path) -> Path:
    for node, processors in enumerate(("0-3,8-11", "4-7,12-15", "")):
        (folder / f"node{node}").mkdir()
        (folder / f"node{node}" / "cpulist").write_text(processors + "\n")
    return folder


def test_nodes_are_those_of_the_processors_in_use(tmp_path: Path) -> None:
    folder = two_nodes(tmp_path)
    assert nodes_of(range(16), folder) == [0, 1]
    assert nodes_of([3, 8], folder) == [0]
    assert nodes_of([12], folder) == [1]
    assert nodes_of(range(16), tmp_path / "none") == []


def test_pages_come_from_the_nodes_in_turn(calls: list[list[Any]]) -> None:
    assert not interleave(4096, 8192, [0, 9])
    mask = calls[0].pop(4)
    assert calls == [[237, 4096, 8192, 3, 1025, 0]]
    assert mask[:2] == bytes([1, 2])
    assert len(mask) == 128 and not any(mask[2:])


def test_one_node_is_left_alone(calls: list[list[Any]]) -> None:
    assert not interleave(4096, 8192, [1])
    assert not interleave(4096, 8192, [])
    assert calls == []


def test_a_refusal_is_no_error(calls: list[list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_memory, "nodes_of", lambda processors: [0, 1])
    tensor = LargePages().empty(1000)
    assert torch.equal(tensor, torch.zeros(1000, dtype=torch.uint8))
    (call,) = calls
    assert call[1] % 4096 == 0 and call[1] <= tensor.data_ptr() < call[1] + call[2]


def test_who_asks_for_the_same_sizes_gets_the_same_bytes() -> None:
    """Behind what others have of the file, and no more than there is room for."""
    file = os.memfd_create("test")
    os.ftruncate(file, 5000)
    one, other = (cpu_memory.SharedPages(file, 5000, 1000) for _ in range(2))
    os.close(file)
    first, second = ((pages.empty(100), pages.empty(0), pages.empty(800)) for pages in (one, other))
    assert not any(part.any() for part in first) and first[2].data_ptr() % 64 == 0
    first[0][99], second[2][0] = 7, 8
    assert second[0][99] == 7 and first[2][0] == 8 and not first[0][:99].any()
    with pytest.raises(ValueError, match="buffer length"):
        one.empty(100)


def test_the_system_understands_the_call() -> None:
    """It does as it is asked with those of the nodes that it has, unless it forbids the call altogether."""
    memory = LargePages().empty(1 << 20)
    done = interleave(memory.data_ptr() // 4096 * 4096, 1 << 20, [0, 1])
    assert done or ctypes.get_errno() in (errno.EPERM, errno.ENOSYS) or platform.machine() not in cpu_memory._MBIND
    assert not memory.any()
