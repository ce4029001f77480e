"""The process that decides for a server which tunes itself; `python -m headway.advisor.online.process`.

It reads Begin from its standard input, follows the records of the engine's traffic, asks the policy every second, and
writes what the server is to do to its standard output. It ends with its input. It takes the processor when nobody else
wants it, and a small share of it at most.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec

from headway.advisor.online.forecast import Forecaster, drafts_of, options_of
from headway.advisor.online.levers import Levers, begun, limits_of
from headway.advisor.online.traffic import History
from headway.advisor.online.tuner import Move, OnlineTuner
from headway.policy.step.bounds import Begin, Told, begin_in, line_of
from headway.policy.step.traffic import Traffic

LOOK_S, TELL_S = 1.0, 10.0
_READ = 1 << 20
_decoder = msgspec.json.Decoder(Traffic)


class Tail:
    """Follows a file of records, which is begun anew now and then."""

    def __init__(self, path: str) -> None:
        self._file, self._at, self._rest = os.open(path, os.O_RDONLY), 0, b""

    def records(self) -> Iterator[Traffic]:
        """The records that have come since the last call."""
        if os.fstat(self._file).st_size < self._at:
            self._at, self._rest = 0, b""
        while data := os.pread(self._file, _READ, self._at):
            self._at += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                with suppress(msgspec.DecodeError):  # the rest of one whose beginning is gone
                    yield _decoder.decode(line)


class Deciding:
    """Asks the policy, and says what comes of it.

    Args:
        begin: as the server has told it.
    """

    def __init__(self, begin: Begin) -> None:
        self._begin, self._tail, self._history = begin, Tail(begin.traffic), History()
        self._tuner: OnlineTuner | None = None
        self._device = "cpu"
        self._told_s, self._doing = 0.0, ""

    def look(self) -> Iterator[Told]:
        """What is to be said now."""
        for record in self._tail.records():
            self._history.take(record)
        if self._tuner is None and self._history.engine is not None:
            self._tuner = self._made(self._begin)
        if self._tuner is None:
            return
        for move in self._tuner.look(time.monotonic_ns()):
            yield self._told(move)
        if self._tuner.doing != self._doing or time.monotonic() - self._told_s >= TELL_S:
            self._told_s, self._doing = time.monotonic(), self._tuner.doing
            yield Told(doing=self._doing, cpu_s=time.process_time())

    def reload(self, begin: Begin) -> Iterator[Told]:
        """The server has other classes."""
        self._begin = begin
        if self._tuner is not None:
            start = self._tuner.start
            limits = limits_of(start, self._device)
            for move in self._tuner.reload(begun(start, limits, begin.classes), time.monotonic_ns()):
                yield self._told(move)

    def _made(self, begin: Begin) -> OnlineTuner:
        engine = self._history.engine
        assert engine is not None
        built = engine.scheduler_config()
        self._device = "cpu" if engine.device == "cpu" else "cuda"
        start = begun(options_of(engine), begin.limits, begin.classes)
        room = built.max_num_seqs, built.max_num_batched_tokens, drafts_of(engine)
        levers = Levers(begin.bounds, start, self._device, *room)
        return OnlineTuner(Forecaster(self._history), levers, start, time.process_time)

    def _told(self, move: Move) -> Told:
        assert self._tuner is not None
        told = Told(move.kind, move.words, move.change, doing=self._tuner.doing, cpu_s=time.process_time())
        if move.options is not None:
            told.limits, told.classes = limits_of(move.options, self._device), move.options.classes
        return told


def main() -> None:
    """Decide until the server goes away."""
    os.nice(19)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the server decides when this ends
        signal.signal(number, signal.SIG_IGN)
    heard, deciding = b"", None
    while True:
        if select.select([0], [], [], LOOK_S)[0]:
            data = os.read(0, _READ)
            if not data:
                return
            *lines, heard = (heard + data).split(b"\n")
            for line in lines:
                if deciding is None:
                    deciding = Deciding(begin_in(line))
                else:
                    _say(deciding.reload(begin_in(line)))
        if deciding is not None:
            _say(deciding.look())


def _say(several: Iterator[Told]) -> None:
    for told in several:
        sys.stdout.buffer.write(line_of(told))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
