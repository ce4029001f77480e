"""Memory that the ranks of a model share on one machine: where each of them stands, and messages of rank 0.

Each word that one process writes and others look at stands on a cache line of its own. Ranks meet within microseconds
by looking at these words. A rank without a message sleeps until rank 0 rings its bell, an eventfd.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import mmap
import os
import select
import struct
from collections.abc import Callable, Iterable

import numpy as np

from headway.kernels.cpu.compile import callable_of, compiled, external
from headway.kernels.cpu.jobs import LINE, arg, job, once_per_kind
from headway.kernels.cpu.simd import add_to, pause, read_shared, write_shared

# Lines for all: whether waiting is of no use any more; how often all have begun anew; how many pieces of messages there
# were; the bytes of the last ones, and whether more follow, each in a line of its own.
MOST_AHEAD = 7  # pieces that are sent while a rank has not taken the one before them
_SLOTS = MOST_AHEAD + 1
STOPPED, EPOCH, _SENT, _PIECES = range(4)
# Lines of each rank, which begin behind these: how often it has met the others; what it has done with messages; what it
# has handed on to the next stage and received from the one before; and the rank that it has been waiting for, plus one.
MET, _TAKEN, _DONE, _FAILED, _ASLEEP, HANDED_ON, RECEIVED, AWAITS = range(8)
_SAID = _TAKEN, _DONE, _FAILED, AWAITS
_LINES_OF_ALL, _LINES_OF_RANK = _PIECES + _SLOTS, 8
MOST_RANKS = 64
LINES = _LINES_OF_ALL + _LINES_OF_RANK * MOST_RANKS
_MESSAGE_AT = LINES * LINE
_MESSAGE_BYTES = 1 << 20
HEADER_BYTES = _MESSAGE_AT + _SLOTS * _MESSAGE_BYTES
# A rank looks for some microseconds, then lets others have the core while it looks on for a few milliseconds.
_LOOKS, _YIELDING_LOOKS = 1000, 6000
_SLEEP_MS = 500  # after which a rank looks whether rank 0 is still there
_sched_yield = external("sched_yield", "int32")


@compiled()
def word_of(board, rank, what):
    return board + (_LINES_OF_ALL + rank * _LINES_OF_RANK + what) * LINE


@compiled()
def _await(board, rank, other, what, least):
    """Wait until a word of another rank is at least so much, or until waiting is of no use."""
    theirs, looks = word_of(board, other, what), 0
    while read_shared(theirs) < least and read_shared(board) == 0:
        looks += 1
        if looks == _LOOKS:
            write_shared(word_of(board, rank, AWAITS), other + 1)
        if looks < _LOOKS:
            pause()
        else:
            _sched_yield()
    if looks >= _LOOKS:
        write_shared(word_of(board, rank, AWAITS), 0)


MEET = struct.Struct("4q")


@once_per_kind
def meet_job() -> int:
    """The job that says that this rank is here, and waits until all of some ranks that follow each other are.

    It is run by the calling thread alone, and so are the others that wait.
    """

    def meet(a: int) -> None:
        board, rank, first, count = arg(a, 0), arg(a, 1), arg(a, 2), arg(a, 3)
        mine = word_of(board, rank, MET)
        turn = read_shared(mine) + 1
        write_shared(mine, turn)
        for other in range(first, first + count):
            _await(board, rank, other, MET, turn)

    return job(meet)


AWAIT = struct.Struct("6q")


@once_per_kind
def await_job() -> int:
    """The job that waits until a word of another rank is ahead of a word of this rank by so much."""

    def wait(a: int) -> None:
        board, rank, other, theirs, own, lead = arg(a, 0), arg(a, 1), arg(a, 2), arg(a, 3), arg(a, 4), arg(a, 5)
        _await(board, rank, other, theirs, read_shared(word_of(board, rank, own)) + lead)

    return job(wait)


COUNT = struct.Struct("3q")


@once_per_kind
def count_job() -> int:
    """The job that adds one to a word of this rank, behind all that was written before."""

    def count(a: int) -> None:
        add_to(word_of(arg(a, 0), arg(a, 1), arg(a, 2)), 1)

    return job(count)


@compiled()
def _look(address, least, board):
    """Look at a word until it is at least so much, for some milliseconds."""
    looks = 0
    while read_shared(address) < least and looks < _LOOKS + _YIELDING_LOOKS:
        looks += 1
        if looks < _LOOKS:
            pause()
        elif read_shared(board) != 0:
            return
        else:
            _sched_yield()


@compiled()
def _add(address, value):
    add_to(address, value)


class RankBoard:
    """One rank's view of the memory. Rank 0 makes it, and hands its descriptor to the others.

    Args:
        descriptor: that of the memory, which has HEADER_BYTES or more; what is behind these is for others.
        number: this rank.
        bells: eventfds by rank: of those on this machine that listen; of one that only listens, its own.
        listeners: the ranks that messages are for; by default all but the first.
    """

    def __init__(
        self, descriptor: int, number: int, count: int, bells: dict[int, int], listeners: Iterable[int] | None = None
    ) -> None:
        self.mapping = mmap.mmap(descriptor, 0)
        self.number, self.count, self._bells = number, count, bells
        self._listeners = list(range(1, count) if listeners is None else listeners)
        self._bytes = np.frombuffer(self.mapping, np.uint8)
        self._words = self._bytes[:_MESSAGE_AT].view(np.int64)
        self.address = int(self._bytes.ctypes.data)
        self._look_at, self._add_to = callable_of(_look), callable_of(_add)
        self._sent = self._taken = 0

    # --- what all say -------------------------------------------------------------------------------

    def progress(self, rank: int) -> int:
        """A number that grows whenever a rank gets on."""
        return sum(self._word(line_of(rank, what)) for what in (MET, _TAKEN, _DONE, HANDED_ON, RECEIVED))

    def is_awaited(self, rank: int) -> bool:
        """Whether another rank may wait for this one: in a step, or as it has not taken a message."""
        awaited = (self._word(line_of(other, AWAITS)) for other in range(self.count))
        return self._word(line_of(rank, _TAKEN)) < self._word(_SENT) or rank + 1 in awaited

    def awaits(self, rank: int) -> bool:
        """Whether a rank itself waits for another one in a step."""
        return self._word(line_of(rank, AWAITS)) != 0

    def failed(self) -> list[int]:
        """The ranks that an exception has stopped."""
        return [rank for rank in range(self.count) if self._word(line_of(rank, _FAILED))]

    @property
    def is_stopped(self) -> bool:
        return self._word(STOPPED) != 0

    def stop(self) -> None:
        """End all waiting: what ranks compute from now on is of no use."""
        self._add_to(self.address + STOPPED * LINE, 1)

    def reset(self) -> None:
        """Begin anew after stop(), when no rank is in a step."""
        for rank in range(self.count):
            for what in (MET, _FAILED, HANDED_ON, RECEIVED):
                self._set(line_of(rank, what), 0)
        self._set(EPOCH, self._word(EPOCH) + 1)
        self._set(STOPPED, 0)

    def said(self, rank: int) -> tuple[int, ...]:
        """What a rank says about messages and waiting, for the board of another machine."""
        return self._word(EPOCH), *(self._word(line_of(rank, what)) for what in _SAID)

    def note(self, rank: int, said: Iterable[int]) -> None:
        """Write what a rank of another machine says, unless it has been overtaken by reset().

        Others wait no longer where it has failed.
        """
        epoch, *words = said
        if epoch != self._word(EPOCH):
            return
        for what, value in zip(_SAID, words, strict=True):
            self._set(line_of(rank, what), value)
        if self._word(line_of(rank, _FAILED)):
            self.stop()

    # --- rank 0 -------------------------------------------------------------------------------------

    def send(self, message: bytes, wait: Callable[[], None]) -> None:
        """Give a message to all that listen.

        Args:
            wait: is called while a rank has more than MOST_AHEAD pieces before it; it may raise.
        """
        for at in range(0, len(message), _MESSAGE_BYTES):
            self.await_all(_TAKEN, self._sent - MOST_AHEAD, wait)
            line, start = _slot(self._sent)
            piece = message[at : at + _MESSAGE_BYTES]
            self._bytes[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
            self._words[line : line + 2] = len(piece), at + len(piece) < len(message)
            self._sent += 1
            self._add_to(self.address + _SENT * LINE, 1)
            for rank, bell in self._bells.items():
                if self._word(line_of(rank, _ASLEEP)):
                    os.eventfd_write(bell, 1)

    @property
    def has_room(self) -> bool:
        """Whether a piece of a message can be sent without waiting."""
        return all(self._word(line_of(rank, _TAKEN)) >= self._sent - MOST_AHEAD for rank in self._listeners)

    def await_done(self, wait: Callable[[], None]) -> None:
        """Wait until all other ranks have done what all messages asked for."""
        self.await_all(_DONE, self._sent, wait)

    def await_all(self, what: int, least: int, wait: Callable[[], None]) -> None:
        for rank in self._listeners:
            line = line_of(rank, what)
            while self._word(line) < least:
                self._look_at(self.address + line * LINE, least, self.address)
                if self._word(line) < least:
                    self._set(line_of(0, AWAITS), rank + 1)
                    wait()
            self._set(line_of(0, AWAITS), 0)

    # --- the others ---------------------------------------------------------------------------------

    def receive(self, is_alone: Callable[[], bool]) -> bytes:
        """The next message, after any time; nothing where rank 0 is gone, which `is_alone` says."""
        pieces: list[bytes] = []
        while True:
            if not self._await_piece(is_alone):
                return b""
            line, start = _slot(self._taken)
            size, more = self._words[line : line + 2]
            pieces.append(self._bytes[start : start + int(size)].tobytes())
            self._taken += 1
            if more:  # each piece counts as a message that is done
                self._count(_DONE)
            self._count(_TAKEN)
            if not more:
                return b"".join(pieces)

    def done(self) -> None:
        """Say that what the last message asked for is done."""
        self._count(_DONE)

    def fail(self) -> None:
        """Say that this rank could not do it, and let nobody wait for it."""
        self._count(_FAILED)
        self.stop()

    def _await_piece(self, is_alone: Callable[[], bool]) -> bool:
        bell, asleep = self._bells[self.number], self.address + line_of(self.number, _ASLEEP) * LINE
        rung = select.poll()
        rung.register(bell, select.POLLIN)
        while True:
            self._look_at(self.address + _SENT * LINE, self._taken + 1, self.address)
            if self._word(_SENT) > self._taken:
                return True
            # Both sides change a word before they look at the other's, so that no message is slept through.
            self._add_to(asleep, 1)
            if self._word(_SENT) == self._taken and rung.poll(_SLEEP_MS):
                os.eventfd_read(bell)
            self._add_to(asleep, -1)
            if is_alone():
                return False

    def _count(self, what: int) -> None:
        self._add_to(self.address + line_of(self.number, what) * LINE, 1)

    def _word(self, line: int) -> int:
        return int(self._words[line * LINE // 8])

    def _set(self, line: int, value: int) -> None:
        self._words[line * LINE // 8] = value


def _slot(number: int) -> tuple[int, int]:
    """The word with the bytes of a piece, behind which it says whether more follow; and where the piece begins."""
    slot = number % _SLOTS
    return (_PIECES + slot) * LINE // 8, _MESSAGE_AT + slot * _MESSAGE_BYTES


def line_of(rank: int, what: int) -> int:
    """The line of a word of a rank."""
    return _LINES_OF_ALL + rank * _LINES_OF_RANK + what
