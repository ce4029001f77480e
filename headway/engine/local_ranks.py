"""The ranks of this machine that are processes of their own: how they are started, bound to cores, seen and ended."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

import msgspec

from headway.engine.config import EngineConfig
from headway.engine.host import Core, physical_cores, shared_out, usable_threads
from headway.engine.watchdog import main_thread
from headway.kernels.cpu.memory import SharedPages
from headway.kernels.cpu.rank_board import RankBoard
from headway.kernels.cpu.ranks import board_bytes
from headway.kernels.ranks import Connection

Connections = Mapping[int, Connection]  # by the rank at the other end
_encoder = msgspec.msgpack.Encoder()


class Assignment(msgspec.Struct, array_like=True):
    """What a rank reads from its standard input: which part of which model is its own."""

    config: EngineConfig
    number: int
    count: int
    threads: int  # that it may use
    processors: list[int]  # that it is bound to; empty for none
    max_model_len: int  # see load_model()
    connections: dict[int, Connection] = {}  # with ranks on other machines
    told: int = -1  # an eventfd for whoever tells other machines what this rank has done; -1 for nobody


class Look(msgspec.Struct, array_like=True):
    """What is seen of a rank from outside."""

    rank: int
    pid: int
    # state, had_s: see main_thread().
    state: str
    had_s: float
    got: int  # see RankBoard.progress()
    said: tuple[int, ...]  # see RankBoard.said()


class LocalRanks:
    """The processes of ranks on this machine, and the memory that these share.

    Args:
        config: of the engine.
        sizes: hidden and vocab of the model.
        numbers: the ranks of this machine. Rank 0 is this process, and all others are started.
        connections: each rank's with ranks on other machines.
        tells: the processes say when they have done something, for other machines.

    Attributes:
        board: that of rank 0, or of whoever hands its messages on.
        told: an eventfd that counts what they have done.
        processors: those that each rank is bound to, in the order of `numbers`; empty where they are bound to none.
    """

    def __init__(
        self,
        config: EngineConfig,
        sizes: tuple[int, int],
        numbers: range,
        connections: Mapping[int, Connections],
        tells: bool = False,
    ) -> None:
        self._config, self._numbers, self._connections = config, numbers, connections
        self._board_bytes = board_bytes(config.processes, *sizes)
        self._started = [number for number in numbers if number > 0]
        memory = os.memfd_create("headway-ranks")
        os.ftruncate(memory, self._board_bytes)
        self._bells = {number: os.eventfd(0) for number in self._started}
        self.told = os.eventfd(0) if tells else -1
        self._memory, self._descriptors = memory, [memory, *self._bells.values(), *([self.told] if tells else [])]
        listeners = self._started if tells else None
        self.board = RankBoard(memory, numbers[0], config.processes, self._bells, listeners)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._claims: list[socket.socket] = []
        self.processors: list[list[int]] = []

    def pages(self, size: int) -> SharedPages:
        """So many bytes behind the board, which all have."""
        return SharedPages(self._memory, self._board_bytes, size)

    def start(self) -> None:
        """Start the processes, which end with the thread that calls this. Raises OSError where one cannot be."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        for number, bell in self._bells.items():
            command = [sys.executable, "-m", "headway.engine", *map(str, (self._memory, bell, os.getpid()))]
            told = [self.told] if self.told >= 0 else []
            given = [
                self._memory,
                bell,
                *told,
                *(each.descriptor for each in self._connections.get(number, {}).values()),
            ]
            self._processes[number] = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, pass_fds=given)

    def bind(self, threads: int) -> None:
        """Choose the processors of each rank, whose cores no other engine has claimed for its ranks, if there are any.

        There are none where a quota allows less than all cores: others that have one may be bound to the same, and all
        see them.
        """
        cores = physical_cores()
        if usable_threads() < len(cores):
            return
        claims = {core: taken for core in cores if (taken := claim(core)) is not None}
        shares = shared_out(claims, len(self._numbers), threads)
        self._claims = [claims.pop(core) for share in shares for core in share]
        for left in claims.values():
            left.close()
        self.processors = [[core.processor for core in share] for share in shares]

    def assign(self, config: EngineConfig, threads: int, max_model_len: int) -> None:
        """Have the processes load their parts. See load_model()."""
        for number, process in self._processes.items():
            bound = self.processors[number - self._numbers[0]] if self.processors else []
            connections = dict(self._connections.get(number, {}))
            about = config, number, config.processes, threads, bound, max_model_len, connections, self.told
            with contextlib.suppress(OSError):  # ended() says that it has died
                assert process.stdin is not None
                process.stdin.write(_encoder.encode(Assignment(*about)))
                process.stdin.close()

    def ending(self) -> list[int]:
        """Descriptors, to be closed, of which each can be read when a process has ended."""
        return [os.pidfd_open(process.pid) for process in self._processes.values()]

    def ended(self) -> str:
        """Which process has ended, and how; empty where none has."""
        for number, process in self._processes.items():
            if process.poll() is not None:
                return f"rank {number} (pid {process.pid}) died: {_how(process.returncode)}"
        return ""

    def look(self) -> list[Look]:
        """What is seen of the processes."""
        return [
            Look(number, process.pid, *main_thread(process.pid), self.board.progress(number), self.board.said(number))
            for number, process in self._processes.items()
        ]

    def end(self) -> None:
        """End the processes."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        for taken in self._claims:
            taken.close()
        while self._descriptors:
            os.close(self._descriptors.pop())


def linked_ranks(parts: list[range], tensor: int, node: int) -> list[tuple[int, int]]:
    """Each pair of a rank of a node and a rank elsewhere that have to do with each other within a step.

    One of them takes what the other writes, or they have the same number in stages that follow each other.

    Args:
        parts: the ranks of each node.
        tensor: ranks that share each layer.
    """
    elsewhere = [rank for part in parts if part is not parts[node] for rank in part]
    takes = {rank: _takers(parts, tensor, rank) for part in parts for rank in part}
    pairs = itertools.product(parts[node], elsewhere)
    return [(a, b) for a, b in pairs if abs(a - b) == tensor or b in takes[a] or a in takes[b]]


def connections_of(parts: list[range], tensor: int, made: Mapping[int, Mapping[int, int]]) -> dict[int, Connections]:
    """Connections of ranks, of which `made` has the descriptors, by rank and the rank at the other end."""
    found = dict[int, Connections]()
    for own, descriptors in made.items():
        takers, first = _takers(parts, tensor, own), own // tensor * tensor
        has_first = {rank for part in parts if first in part for rank in part}
        found[own] = {
            other: Connection(descriptor, other in takers, other in has_first)
            for other, descriptor in descriptors.items()
        }
    return found


def _takers(parts: list[range], tensor: int, rank: int) -> set[int]:
    """The rank of each other node that takes, for all that share a rank's layers there, what this one writes."""
    shares = [[other for other in part if other // tensor == rank // tensor] for part in parts]
    own = next(share for share in shares if rank in share)
    return {share[own.index(rank) % len(share)] for share in shares if share and share is not own}


def claim(core: Core) -> socket.socket | None:
    """A name of the core that nobody else on this machine has while it is open; None where somebody has it."""
    taken = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        taken.bind(f"\0headway-core-{core.siblings}")
    except OSError:
        taken.close()
        return None
    return taken


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
