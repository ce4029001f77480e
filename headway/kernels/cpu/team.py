"""The threads that share a kernel's work, without ever waiting for one that is not running: see `jobs`."""

from __future__ import annotations

import ctypes
import math
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.kernels.cpu.compile import callable_of, names
from headway.kernels.cpu.jobs import (
    ARGUMENTS_AT,
    ENTRY_WORDS,
    HELPERS_AT,
    INSIDE,
    LINE,
    MOST_ARGUMENTS,
    help_with_jobs,
    replay_jobs,
    run_job,
    run_job_alone,
)

# Results of so many bytes are kept mapped: malloc would map and unmap each of 32 MB and more, whose pages the system
# clears one by one.
_LARGE = 16 << 20
_CHUNK, _ALIGNMENT = 16 << 20, 64  # bytes that an arena takes of the system at a time, and of a tensor's start
_MOST_TIMES = 1 << 17  # jobs whose times are kept: of some hundred steps
# Below so many elements, waking the team costs more than it saves.
_ALONE = 8192


class Team:
    """A calling thread and its helpers, together as many as torch uses when the team is made, 128 at most.

    One thread at a time may run jobs of one team, as the step loop of an engine does.
    """

    def __init__(self) -> None:
        self.threads = min(torch.get_num_threads(), INSIDE + 1)  # more helpers than the board can count
        memory = np.zeros(ARGUMENTS_AT + 8 * MOST_ARGUMENTS + LINE, np.uint8)
        offset = -memory.ctypes.data % LINE
        self._memory: Any = memory
        self._board = memory.ctypes.data + offset
        self._arguments_at = offset + ARGUMENTS_AT
        self._most_helpers = memory[offset + HELPERS_AT :][:8].view(np.int64)
        self._arena, self._large = Arena(), Arena()
        self._recorded: list[list[int]] | None = None
        self._times: deque[tuple[int, int, int]] | None = None
        self._run, self._run_alone, self._replay = (callable_of(each) for each in (run_job, run_job_alone, replay_jobs))
        self._helpers = [_HelperState() for _ in range(self.threads - 1)]
        self.limit(self.threads)
        for number, helper in enumerate(self._helpers):
            threading.Thread(
                target=_helper, args=(memory, self._board, helper, number), daemon=True, name=f"headway-helper-{number}"
            ).start()
        weakref.finalize(self, _dismiss, self._helpers)

    def limit(self, threads: int) -> None:
        """Have no more than so many threads take part in the jobs that come now; the others leave within one."""
        self._most_helpers[0] = threads - 1
        self._woken = self._helpers[: threads - 1]

    def run(self, code: int, layout: struct.Struct, arguments: tuple[Any, ...]) -> None:
        """Run a job by all threads; `layout` packs its arguments in words of eight bytes."""
        layout.pack_into(self._memory, self._arguments_at, *arguments)
        self._note(1, code)
        self._wake()
        self._run(self._board, code)

    def share(self, code: int, layout: struct.Struct, rows: int, size: int, arguments: tuple[Any, ...]) -> None:
        """Run an operation on rows, of `size` elements together, alone or, from _ALONE elements on, by all threads.

        Its arguments begin with the rows that are taken at a time and the number of rows.
        """
        if size < _ALONE:
            self.run_alone(code, layout, (rows, rows, *arguments))
        else:
            self.run(code, layout, (max(1, rows // (4 * self.threads)), rows, *arguments))

    def run_alone(self, code: int, layout: struct.Struct, arguments: tuple[Any, ...]) -> None:
        """Run a job by the calling thread, where waking others costs more than it saves."""
        layout.pack_into(self._memory, self._arguments_at, *arguments)
        self._note(0, code)
        self._run_alone(self._board, code)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for a job's result, where a recorded job finds it again."""
        if self._recorded is not None:
            return self._arena.empty(shape, dtype)
        if math.prod(shape) * dtype.itemsize >= _LARGE:
            return self._large.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype)

    def record(self, run: Callable[[], Tensor]) -> Program:
        """Do `run`, and keep its jobs with their arguments, whose memory must be the caller's or come from `empty`."""
        self._recorded = []
        try:
            result = run()
            return Program(np.array(self._recorded, np.int64).reshape(-1, ENTRY_WORDS), result)
        finally:
            self._recorded = None

    def replay(self, program: Program) -> Tensor:
        """Run the jobs of a program again. The result is where it was."""
        self._wake()
        self._replay(self._board, program.entries.ctypes.data, len(program.entries))
        return program.result

    def loop(self, program: Program, code: Callable[[int, int, int, int], None], memory: int) -> None:
        """Run code that replays a program; its last argument is `memory`. Its jobs are not timed."""
        self._wake()
        code(self._board, program.entries.ctypes.data, len(program.entries), memory)

    @property
    def is_timed(self) -> bool:
        return self._times is not None

    def time_jobs(self, wanted: bool) -> None:
        """Begin to note when each job begins and ends, or end that. What is not wanted costs nothing."""
        run, run_alone, replay = (callable_of(each) for each in (run_job, run_job_alone, replay_jobs))
        if wanted:
            self._times = self._times if self._times is not None else deque(maxlen=_MOST_TIMES)
            run, run_alone = _timed(run, self._times), _timed(run_alone, self._times)
            replay = self._replay_one_by_one
        else:
            self._times = None
        self._run, self._run_alone, self._replay = run, run_alone, replay

    @property
    def times(self) -> list[tuple[str, int, int]]:
        """The names of jobs, and when each began and ended, by time.monotonic_ns(); the last ones, oldest first."""
        return [(names[code], began_ns, ended_ns) for code, began_ns, ended_ns in self._times or ()]

    def _replay_one_by_one(self, board: int, program: int, count: int) -> None:
        """Run the jobs of a program as replay_jobs() does, each in a call of its own."""
        words = memoryview((ctypes.c_int64 * (count * ENTRY_WORDS)).from_address(program))
        arguments = self._memory[self._arguments_at : self._arguments_at + 8 * MOST_ARGUMENTS].view(np.int64)
        for together, code, *given in np.frombuffer(words, np.int64).reshape(count, ENTRY_WORDS).tolist():
            arguments[:] = given
            (self._run if together else self._run_alone)(board, code)

    def _note(self, together: int, code: int) -> None:
        if self._recorded is not None:
            words = self._memory[self._arguments_at : self._arguments_at + 8 * MOST_ARGUMENTS].view(np.int64)
            self._recorded.append([together, code, *words.tolist()])

    def _wake(self) -> None:
        for helper in self._woken:
            helper.due = True
            if helper.asleep:
                helper.wanted.set()


def _timed(call: Callable[..., None], times: deque[tuple[int, int, int]]) -> Callable[..., None]:
    """`call`, which runs a job, and notes its code and when it began and ended."""

    def run(board: int, code: int) -> None:
        began_ns = time.monotonic_ns()
        call(board, code)
        times.append((code, began_ns, time.monotonic_ns()))

    return run


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


@dataclass(frozen=True, slots=True)
class Program:
    """Jobs that were run one after the other, int64 [jobs, ENTRY_WORDS], and the tensor that came of them."""

    entries: np.ndarray
    result: Tensor


class _HelperState:
    """What wakes a helper, and whether it sleeps."""

    def __init__(self) -> None:
        self.wanted = threading.Event()
        self.asleep = True
        self.due = False  # there was work since it last began to look for some
        self.dismissed = False


def _helper(memory: np.ndarray, board: int, helper: _HelperState, number: int) -> None:
    """A helper's life; holding `memory` keeps the board's address good.

    When it has given up looking it waits for the interpreter's lock. Who wakes the helpers meanwhile finds it not
    asleep, and is heard by `due`.
    """
    help_ = callable_of(help_with_jobs)
    while True:
        helper.asleep = True
        if not helper.due:
            helper.wanted.wait()
        helper.wanted.clear()
        helper.asleep = helper.due = False
        if helper.dismissed:
            return
        help_(board, number)


def _dismiss(helpers: list[_HelperState]) -> None:
    for helper in helpers:
        helper.dismissed = True
        helper.wanted.set()
