"""A node of an engine behind the first: it joins node 0, starts its ranks and hands rank 0's messages on to them."""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec

from headway.engine.config import EngineConfig
from headway.engine.local_ranks import Connections, LocalRanks, connections_of, linked_ranks
from headway.engine.nodes import (
    JOIN_S,
    Assign,
    Door,
    Hello,
    Link,
    Linked,
    Refused,
    Report,
    Reset,
    Start,
    Stop,
    Wire,
    Work,
    content_of,
)
from headway.models.folder import resolve_model
from headway.version import __version__

_TRY_S, _TRIES_EVERY_S = 5.0, 0.5
_LOOKS_EVERY_S, _LOOKS_IN_LIMIT = 1.0, 8
_PAUSE_S = 0.0005
_Handed = Assign | Work | Stop | Reset


def run_node(config: EngineConfig, node: int, tell: Callable[[str], None], rejoins: bool = True) -> None:
    """Be a node until node 0 is gone, and does not come back for JOIN_S.

    Args:
        config: as node 0 has it, but for `model` and `master_addr`.
        node: its number.
        tell: is told, in a line, what has happened.
        rejoins: wait for the next engine of node 0 when one has ended.

    Raises:
        ValueError: node 0 cannot be reached, or does not want this node; one line.
    """
    while True:
        wire = _reached(config)
        door = Door(str(wire.socket.getsockname()[0]), 0, [wire])
        try:
            wire.send(_hello(config, node, door))
            start = _started(door)
            tell(f"node {node} has joined node 0 at {wire.host}:{config.master_port}")
            _serve(config, node, wire, door, start)
        except (OSError, msgspec.MsgspecError) as error:
            if not rejoins:
                return
            said = getattr(error, "strerror", None) or error
            tell(f"node 0 is gone ({said}); its ranks have ended, and the next one is waited for")
        finally:
            door.close()
            wire.close()


def _reached(config: EngineConfig) -> Wire:
    """A connection with node 0, which may not be there yet. Raises ValueError where it does not come."""
    address, until = (config.master_addr, config.master_port), time.monotonic() + JOIN_S
    while True:
        try:
            return Wire(socket.create_connection(address, _TRY_S), config.rank_timeout)
        except OSError as error:
            if time.monotonic() > until:
                said = error.strerror or error
                raise ValueError(
                    f"node 0 cannot be reached at {address[0]}:{address[1]} for {JOIN_S:g} s ({said}); start it, or "
                    "give its --master-addr and --master-port"
                ) from None
        time.sleep(_TRIES_EVERY_S)


def _hello(config: EngineConfig, node: int, door: Door) -> Hello:
    hello = Hello(__version__, node, msgspec.msgpack.encode(config), address=door.address)
    try:
        hello.content = content_of(resolve_model(config.model))
    except (ValueError, OSError) as error:
        hello.problem = " ".join(str(error).split())
    return hello


def _started(door: Door) -> Start:
    """What node 0 says when all nodes are there. Raises ValueError where it does not want this one."""
    while True:
        for _, message in door.heard(JOIN_S):
            if isinstance(message, Refused):
                raise ValueError(message.why)
            if isinstance(message, Start):
                return message


def _serve(config: EngineConfig, node: int, wire: Wire, door: Door, start: Start) -> None:
    """Serve node 0 until it is gone, which raises OSError."""
    parts = [range(first, first + count) for first, count in start.parts]
    try:
        connections = _connected(config, node, start, parts, door)
    except OSError as error:
        why = f"node {node} cannot connect to another node: {error.strerror or error}"
        wire.send(Refused(why))
        raise ValueError(why) from None
    of_engine = replace(start.config, model=config.model)
    ranks = LocalRanks(of_engine, start.sizes, parts[node], connections, tells=True)
    try:
        ranks.start()
        if of_engine.bind_ranks:
            ranks.bind(start.threads)
        _Node(of_engine, wire, ranks, start.threads).run()
    finally:
        ranks.end()
        for connection in [each for of_rank in connections.values() for each in of_rank.values()]:
            os.close(connection.descriptor)


def _connected(config: EngineConfig, node: int, start: Start, parts: list[range], door: Door) -> dict[int, Connections]:
    """The connections of this node's ranks: made to nodes before it, and awaited from those behind it."""
    made = dict[int, dict[int, int]]()
    pairs = linked_ranks(parts, start.config.tensor_parallel_size, node)
    node_of = {rank: number for number, part in enumerate(parts) for rank in part}
    for own, other in pairs:
        if node_of[other] < node:
            # Node 0 may be known here by another address than it has itself.
            address = start.addresses[node_of[other]] if node_of[other] else (config.master_addr, config.master_port)
            link = Wire(socket.create_connection(address, JOIN_S))
            link.send(Link(start.session, own, other))
            made.setdefault(own, {})[other] = link.socket.detach()
    until = time.monotonic() + JOIN_S
    while sum(map(len, made.values())) < len(pairs):
        door.take_links(start.session, made)
        for _ in door.heard(1.0):
            pass
        if time.monotonic() > until:
            raise TimeoutError(f"not all ranks were connected within {JOIN_S:g} s")
    return connections_of(parts, start.config.tensor_parallel_size, made)


class _Node:
    """Hands on what node 0 says, and tells it of this node's ranks."""

    def __init__(self, config: EngineConfig, wire: Wire, ranks: LocalRanks, threads: int) -> None:
        self._config, self._wire, self._ranks, self._threads = config, wire, ranks, threads
        self._waiting = deque[_Handed]()
        self._pause_s = min(_LOOKS_EVERY_S, config.rank_timeout / _LOOKS_IN_LIMIT)
        self._reported = 0.0
        self._poll = select.poll()
        self._ending = ranks.ending()
        for descriptor in (wire.fileno(), ranks.told, *self._ending):
            self._poll.register(descriptor, select.POLLIN)

    def run(self) -> None:
        """Do what node 0 says until it is gone, which raises OSError."""
        self._wire.send(Linked())
        try:
            while True:
                self._attend(self._pause_s)
                while self._waiting and self._ranks.board.has_room:
                    self._do(self._waiting.popleft())
        finally:
            for descriptor in self._ending:
                os.close(descriptor)

    def _attend(self, pause_s: float) -> None:
        """Read what has come after some time, and say what has become of ranks."""
        ready = {descriptor for descriptor, _ in self._poll.poll(pause_s * 1000)}
        has_told = self._ranks.told in ready
        if has_told:
            os.eventfd_read(self._ranks.told)
        if self._wire.fileno() in ready:
            for message in self._wire.received():
                if isinstance(message, Stop):  # at once, and again behind what resets the board before it
                    self._ranks.board.stop()
                if isinstance(message, _Handed):
                    self._waiting.append(message)
        ended = self._ranks.ended() if ready & {*self._ending} else ""
        now = time.monotonic()
        if has_told or ended or now - self._reported >= self._pause_s:
            self._reported = now
            self._wire.send(Report(self._ranks.look(), ended))
        if ended:
            raise ConnectionAbortedError(ended)

    def _do(self, message: _Handed) -> None:
        if isinstance(message, Work):
            self._ranks.board.send(message.content, partial(self._attend, _PAUSE_S))
        elif isinstance(message, Reset):
            self._ranks.board.reset()
        elif isinstance(message, Stop):
            self._ranks.board.stop()
        else:
            self._ranks.assign(self._config, self._threads, message.max_model_len)
