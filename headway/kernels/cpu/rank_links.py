"""Connections between ranks of a model on different machines, within a step.

Each machine has a board of its own (`rank_board`), laid out as all others. What a rank writes for one elsewhere goes
there as frames: bytes for the same place of that board, and then one of its words. So each machine adds up the same
parts in the same order. Frames are sent, and awaited, by compiled jobs: a step that is repeated is a program of jobs
without Python between them, and waiting ends when the board says so.

Who sends or waits also takes what comes from everyone else, so that no two wait for each other. A step that is ended in
its middle leaves frames behind, also half of one. They are of an earlier epoch, and are read and dropped.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from headway.kernels.cpu.compile import compiled, external
from headway.kernels.cpu.jobs import LINE, arg, job, once_per_kind
from headway.kernels.cpu.rank_board import AWAITS, EPOCH, LINES, MET, MOST_RANKS, RankBoard, word_of
from headway.kernels.cpu.ranks import CpuRanks
from headway.kernels.cpu.simd import add_to, read_int64, read_shared, write_integer, write_shared
from headway.kernels.cpu.team import Team
from headway.kernels.ranks import Connection, Share

# Words of the head of a frame. A line of -1 stands for no word.
_EPOCH, _LINE, _VALUE, _PLACE, _SIZE = range(5)
_HEAD_BYTES = 40
# Words of a link: its descriptor (-1 where it is lost), the rank at its other end, bytes received of the frame that
# comes, its head, bytes sent of the frame that goes (-1 where none does), its head; and what Connection says.
_FD, _RANK, _GOT, _COMES, _GIVEN, _GOES, _RECEIVES, _HAS_FIRST = 0, 1, 2, 3, 8, 9, 14, 15
_LINK_WORDS = 16
# Words for all links: how many there are, whose they are, the bytes of the board, and what poll() is given.
_COUNT, _OWN, _BOARD_BYTES, _POLLED = range(4)
_LINKS_AT = _POLLED + MOST_RANKS
_DROPPED_AT, _DROPPED_BYTES = 8 * (_LINKS_AT + _LINK_WORDS * MOST_RANKS), 1 << 16  # where bytes go that nobody wants
# Who waits looks so often, which takes some tens of microseconds, and then lets the system wake it.
_LOOKS, _SLEEP_MS = 100, 20
# Flags and events of Linux.
_DONT_WAIT, _NO_SIGNAL, _MORE = 0x40, 0x4000, 0x8000
_POLL_IN, _POLL_OUT = 1 << 32, 4 << 32  # where they stand in the eight bytes of a struct pollfd
_recv = external("recv", "int64", "int64", "int64", "int64", "int64")
_send = external("send", "int64", "int64", "int64", "int64", "int64")
_poll = external("poll", "int32", "int64", "int64", "int64")


@compiled()
def _link(links, index):
    return links + 8 * (_LINKS_AT + index * _LINK_WORDS)


@compiled()
def _lose(links, index, board):
    write_integer(_link(links, index), _FD, -1, 64)
    write_integer(links, _POLLED + index, -1, 64)
    add_to(board, 1)


@compiled()
def _fits(links, link):
    """Whether the frame that comes has a place on the board."""
    line, place = read_int64(link, _COMES + _LINE), read_int64(link, _COMES + _PLACE)
    size = read_int64(link, _COMES + _SIZE)
    return line < LINES and place >= 0 and size >= 0 and place + size <= read_int64(links, _BOARD_BYTES)


@compiled()
def _take(links, index, board):
    """Bring what has come on a link to the board. Returns 1 where something has, else 0."""
    link, came = _link(links, index), 0
    while read_int64(link, _FD) >= 0:
        got, size = read_int64(link, _GOT), read_int64(link, _COMES + _SIZE)
        is_wanted = read_int64(link, _COMES + _EPOCH) == read_shared(board + EPOCH * LINE)
        if got == _HEAD_BYTES and not _fits(links, link):
            _lose(links, index, board)
            return came
        if got >= _HEAD_BYTES and got == _HEAD_BYTES + size:
            line, value = read_int64(link, _COMES + _LINE), read_int64(link, _COMES + _VALUE)
            if is_wanted and line >= 0 and read_shared(board + line * LINE) < value:
                write_shared(board + line * LINE, value)
            write_integer(link, _GOT, 0, 64)
        else:
            into, room = link + 8 * _COMES + got, _HEAD_BYTES - got
            if got >= _HEAD_BYTES:
                into = board + read_int64(link, _COMES + _PLACE) + got - _HEAD_BYTES
                room = size + _HEAD_BYTES - got
                if not is_wanted:
                    into, room = links + _DROPPED_AT, min(room, _DROPPED_BYTES)
            count = _recv(read_int64(link, _FD), into, room, _DONT_WAIT)
            if count == 0:
                _lose(links, index, board)
            if count <= 0:
                return came
            write_integer(link, _GOT, got + count, 64)
            came = 1
    return came


@compiled()
def _take_all(links, board):
    """Bring what has come to the board. Returns how many links had something."""
    came = 0
    for index in range(read_int64(links, _COUNT)):
        came += _take(links, index, board)
    return came


@compiled()
def _sleep(links, milliseconds):
    _poll(links + 8 * _POLLED, read_int64(links, _COUNT), milliseconds)


@compiled()
def _push(links, index, board):
    """Send on the frame that goes on a link, until it has gone or that is of no use."""
    link, awaits = _link(links, index), word_of(board, read_int64(links, _OWN), AWAITS)
    while read_int64(link, _GIVEN) >= 0 and read_int64(link, _FD) >= 0:
        given, size, fd = read_int64(link, _GIVEN), read_int64(link, _GOES + _SIZE), read_int64(link, _FD)
        if given < _HEAD_BYTES:
            flags = _DONT_WAIT | _NO_SIGNAL
            if size > 0:
                flags |= _MORE
            count = _send(fd, link + 8 * _GOES + given, _HEAD_BYTES - given, flags)
        else:
            begun = given - _HEAD_BYTES
            from_ = board + read_int64(link, _GOES + _PLACE) + begun
            count = _send(fd, from_, size - begun, _DONT_WAIT | _NO_SIGNAL)
        if count > 0:
            write_integer(link, _GIVEN, given + count, 64)
            if given + count == _HEAD_BYTES + size:
                write_integer(link, _GIVEN, -1, 64)
        elif read_shared(board) != 0:
            return
        elif _take_all(links, board) == 0 and read_int64(link, _FD) >= 0:
            write_shared(awaits, read_int64(link, _RANK) + 1)
            write_integer(links, _POLLED + index, fd + _POLL_IN + _POLL_OUT, 64)
            _sleep(links, _SLEEP_MS)
            write_integer(links, _POLLED + index, fd + _POLL_IN, 64)
            write_shared(awaits, 0)


@compiled()
def _put(links, index, board, line, value, place, size):
    """Send bytes of this board to the same place of another, and then one of its words."""
    link = _link(links, index)
    _push(links, index, board)  # what was left of the step before
    if read_int64(link, _GIVEN) >= 0:
        return
    write_integer(link, _GOES + _EPOCH, read_shared(board + EPOCH * LINE), 64)
    write_integer(link, _GOES + _LINE, line, 64)
    write_integer(link, _GOES + _VALUE, value, 64)
    write_integer(link, _GOES + _PLACE, place, 64)
    write_integer(link, _GOES + _SIZE, size, 64)
    write_integer(link, _GIVEN, 0, 64)
    _push(links, index, board)


@compiled()
def _await(links, board, other, what, least):
    """Wait until a word of another rank, here or elsewhere, is at least so much, or until waiting is of no use."""
    theirs, awaits = word_of(board, other, what), word_of(board, read_int64(links, _OWN), AWAITS)
    looks, sleep_ms = 0, 0
    for index in range(read_int64(links, _COUNT)):
        if read_int64(_link(links, index), _RANK) == other:
            sleep_ms = _SLEEP_MS
    while read_shared(theirs) < least and read_shared(board) == 0:
        if _take_all(links, board) == 0:
            looks += 1
            if looks == _LOOKS:
                write_shared(awaits, other + 1)
            if looks >= _LOOKS:
                _sleep(links, sleep_ms)
    if looks >= _LOOKS:
        write_shared(awaits, 0)


_MEET = struct.Struct("10q")


@once_per_kind
def linked_meet_job() -> int:
    """The job that meets some ranks that follow each other, of which some are elsewhere.

    One rank of each machine is given what this one has written: `rows` pieces of `size` bytes, `apart` from each other.
    With `for_first`, only that of the first one's machine is.
    """

    def linked_meet(a: int) -> None:
        links, board, rank, first, count = arg(a, 0), arg(a, 1), arg(a, 2), arg(a, 3), arg(a, 4)
        place, size, apart, rows, for_first = arg(a, 5), arg(a, 6), arg(a, 7), arg(a, 8), arg(a, 9)
        mine = word_of(board, rank, MET)
        turn = read_shared(mine) + 1
        write_shared(mine, turn)
        line = (mine - board) // LINE
        for index in range(read_int64(links, _COUNT)):
            link = _link(links, index)
            if read_int64(link, _RECEIVES):
                pieces = rows if for_first == 0 or read_int64(link, _HAS_FIRST) else 0
                for row in range(pieces - 1):
                    _put(links, index, board, -1, 0, place + row * apart, size)
                if pieces > 0:
                    _put(links, index, board, line, turn, place + (pieces - 1) * apart, size)
                else:
                    _put(links, index, board, line, turn, 0, 0)
        for other in range(first, first + count):
            _await(links, board, other, MET, turn)

    return job(linked_meet)


_AWAIT = struct.Struct("7q")


@once_per_kind
def linked_await_job() -> int:
    """The job that waits until a word of a rank elsewhere is ahead of a word of this rank by so much."""

    def linked_wait(a: int) -> None:
        links, board, rank, other = arg(a, 0), arg(a, 1), arg(a, 2), arg(a, 3)
        theirs, own, lead = arg(a, 4), arg(a, 5), arg(a, 6)
        _await(links, board, other, theirs, read_shared(word_of(board, rank, own)) + lead)

    return job(linked_wait)


_COUNTED = struct.Struct("7q")


@once_per_kind
def linked_count_job() -> int:
    """The job that adds one to a word of this rank, and sends that on a link, behind some bytes of the board."""

    def linked_count(a: int) -> None:
        links, index, board, rank, what = arg(a, 0), arg(a, 1), arg(a, 2), arg(a, 3), arg(a, 4)
        mine = word_of(board, rank, what)
        value = add_to(mine, 1) + 1
        _put(links, index, board, (mine - board) // LINE, value, arg(a, 5), arg(a, 6))

    return job(linked_count)


class Links:
    """A rank's connections with ranks on other machines.

    Args:
        connections: by the rank at the other end.
        board: of this rank.
    """

    def __init__(self, connections: Mapping[int, Connection], board: RankBoard) -> None:
        self.ranks = list(connections)
        self._words = np.zeros((_DROPPED_AT + _DROPPED_BYTES) // 8, np.int64)
        self.address = int(self._words.ctypes.data)
        self._words[[_COUNT, _OWN, _BOARD_BYTES]] = len(connections), board.number, len(board.mapping)
        for index, (rank, each) in enumerate(connections.items()):
            self._words[_POLLED + index] = each.descriptor + _POLL_IN
            link = self._words[_LINKS_AT + index * _LINK_WORDS :]
            link[[_FD, _RANK, _GIVEN, _RECEIVES, _HAS_FIRST]] = (
                each.descriptor, rank, -1, each.receives, each.has_first,
            )  # fmt: skip

    @property
    def lost(self) -> list[int]:
        """The ranks at the other ends of connections that were closed, or on which something else came."""
        return [rank for index, rank in enumerate(self.ranks) if self._words[_LINKS_AT + index * _LINK_WORDS + _FD] < 0]


class LinkedRanks(CpuRanks):
    """CpuRanks of which some are on other machines.

    Args:
        links: with ranks elsewhere that this one has to do with. Of those that share its layers, one rank of each
            machine takes what this one writes, and brings it to the board for all, who wait there.
        apart: those that share its layers are on several machines.
    """

    def __init__(
        self, team: Team, board: RankBoard, share: Share, hidden: int, vocab: int, links: Links, apart: bool
    ) -> None:
        super().__init__(team, board, share, hidden, vocab)
        self._links, self._meets_elsewhere = links, apart

    @property
    def lost(self) -> list[int]:
        return self._links.lost

    def meet(self, written: Tensor | None = None, for_first: bool = False) -> None:
        if not self._meets_elsewhere:
            return super().meet()
        piece = 0, 0, 0, 0
        if written is not None and written.is_contiguous():
            piece = self._place_of(written), written.nbytes, 0, 1
        elif written is not None:
            rows, width = written.shape
            size = written.element_size()
            piece = self._place_of(written), width * size, written.stride(0) * size, rows
        own = self._links.address, self._board.address, self._board.number, self._first, self.count
        self._team.run_alone(linked_meet_job(), _MEET, (*own, *piece, for_first))

    def _await(self, other: int, theirs: int, own: int, lead: int) -> None:
        if other not in self._links.ranks:
            return super()._await(other, theirs, own, lead)
        here = self._links.address, self._board.address, self._board.number
        self._team.run_alone(linked_await_job(), _AWAIT, (*here, other, theirs, own, lead))

    def _count(self, what: int, other: int, written: Tensor | None = None) -> None:
        if other not in self._links.ranks:
            return super()._count(what, other)
        place, size = (0, 0) if written is None else (self._place_of(written), written.nbytes)
        here = self._links.address, self._links.ranks.index(other), self._board.address, self._board.number
        self._team.run_alone(linked_count_job(), _COUNTED, (*here, what, place, size))

    def _place_of(self, written: Tensor) -> int:
        return written.data_ptr() - self._board.address
