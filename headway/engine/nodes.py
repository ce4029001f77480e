"""The other machines of an engine whose ranks are on several: node 0's side, and the messages between nodes.

Each node behind the first (`node`) joins at a port of node 0, and starts its ranks. They get rank 0's messages through
their node, which says what becomes of them. What ranks say to each other within a step goes over connections of their
own (`kernels.cpu.rank_links`), which nodes make and hand to their ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from headway.engine.config import EngineConfig, ModelOptions
from headway.engine.frames import Frames, framed
from headway.engine.local_ranks import Connections, Look, connections_of, linked_ranks
from headway.models.folder import weight_files
from headway.version import __version__

JOIN_S = 120.0  # nodes are started one after the other, and restarted ones may find that another loads
_READ = 1 << 18
# Options that nodes must have been given alike; those of node 0 alone decide the rest.
_ALIKE = (
    *(each.name for each in dataclasses.fields(ModelOptions)),
    *("seed", "tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel", "nnodes"),
)


# --- messages ---------------------------------------------------------------------------------------


class _Message(msgspec.Struct, array_like=True, tag=True):
    pass


class Hello(_Message):
    """A node wants to join."""

    version: str
    node: int = 0
    config: bytes = b""  # of the node, encoded, as another version's may not be readable
    content: str = ""  # see content_of()
    address: tuple[str, int] = ("", 0)  # where other nodes connect to it
    problem: str = ""  # why it cannot; empty where it can


class Refused(_Message):
    """Why a node cannot join, or why one cannot go on."""

    why: str


class Start(_Message):
    """All nodes have joined, and this one starts its ranks."""

    config: EngineConfig  # of node 0
    parts: list[tuple[int, int]]  # the first rank of each node, and how many it has
    addresses: list[tuple[str, int]]  # of the nodes, for connections
    session: str  # what those who connect say
    sizes: tuple[int, int]  # hidden and vocab of the model
    threads: int  # of a rank


class Link(_Message):
    """The only message on a connection between two ranks; then it is theirs."""

    session: str
    sender: int
    receiver: int


class Linked(_Message):
    """All connections of a node's ranks are made."""


class Assign(_Message):
    """Ranks load their parts. See load_model()."""

    max_model_len: int


class Work(_Message):
    """A message of rank 0 to all ranks."""

    content: bytes


class Stop(_Message):
    """What ranks compute from now on is of no use."""


class Reset(_Message):
    """All have ended what they did, and begin anew."""


class Report(_Message):
    """What a node sees of its ranks."""

    looks: list[Look]
    ended: str = ""  # which of them has ended, and how; empty for none


ToNode = Refused | Start | Assign | Work | Stop | Reset
FromNode = Hello | Link | Linked | Report | Refused
Message = ToNode | FromNode
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Message)


class Wire:
    """Messages over a TCP connection.

    Attributes:
        host: the address at the other end.
    """

    def __init__(self, connection: socket.socket, timeout_s: float = JOIN_S) -> None:
        connection.setblocking(True)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(timeout_s * 1000)))
        self.socket, self._frames = connection, Frames()
        self.host = str(connection.getpeername()[0])

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: Message) -> None:
        """Raises OSError where the other end is gone."""
        self.socket.sendall(framed(_encoder.encode(message)))

    def received(self) -> list[Message]:
        """What has come. Raises OSError where the other end is gone, msgspec.MsgspecError for what cannot be read."""
        try:
            data = self.socket.recv(_READ, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError("it has closed the connection")
        return [_decoder.decode(each) for each in self._frames.take(data)]

    def close(self) -> None:
        self.socket.close()


class Door:
    """A port at which other nodes come in.

    Args:
        known: nodes that are here already, or will be.

    Attributes:
        links: connections of ranks that have come in, with what was said on them.

    Raises:
        ValueError: it cannot listen there.
    """

    def __init__(self, host: str, port: int, known: list[Wire]) -> None:
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            raise ValueError(
                f"master_addr is {host!r} and master_port {port}, where this node cannot listen: "
                f"{error.strerror or error}"
            ) from None
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._known, self._strangers = known, list[Wire]()
        self.links: list[tuple[Wire, Link]] = []

    def heard(self, timeout_s: float) -> Iterator[tuple[Wire, Message]]:
        """What has come within so many seconds, from those who are known already and from others.

        Raises:
            OSError: one that is known is gone.
        """
        poll, wires = select.poll(), {wire.fileno(): wire for wire in [*self._known, *self._strangers]}
        for descriptor in (self._listener.fileno(), *wires):
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(timeout_s * 1000):
            if descriptor not in wires:
                with contextlib.suppress(OSError):  # it has gone already
                    self._strangers.append(Wire(self._listener.accept()[0]))
                continue
            wire = wires[descriptor]
            try:
                for message in wire.received():
                    if isinstance(message, Link):
                        self.links.append((wire, message))
                    else:
                        yield wire, message
            except (OSError, msgspec.MsgspecError):  # whoever scans ports is no node
                if wire in self._known:
                    raise
                self._strangers.remove(wire)
                wire.close()

    def know(self, wire: Wire) -> None:
        """A stranger has said who it is."""
        self._strangers.remove(wire)
        self._known.append(wire)

    def take_links(self, session: str, made: dict[int, dict[int, int]]) -> None:
        """Add the connections of ranks that have come in for a session to those that are made."""
        for wire, link in self.links:
            if link.session == session:
                self._strangers.remove(wire)
                made.setdefault(link.receiver, {})[link.sender] = wire.socket.detach()
        self.links = []

    def close(self) -> None:
        self._listener.close()
        for wire in self._strangers:
            wire.close()


def content_of(folder: Path) -> str:
    """The hash of a model's config.json and of its files' names and sizes. Raises OSError where one cannot be read."""
    found = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    for path in weight_files(folder):
        found.update(f" {path.name} {path.stat().st_size}".encode())
    return found.hexdigest()


# --- node 0 -----------------------------------------------------------------------------------------


class OneMachine:
    """The nodes of an engine all of whose ranks are on one machine: this one.

    Attributes:
        numbers: the ranks of this node.
        connections: each one's with ranks on other nodes.
    """

    def __init__(self, ranks: int) -> None:
        self.numbers, self.connections = range(ranks), dict[int, Connections]()

    def assign(self, max_model_len: int) -> None:
        """Have ranks on other nodes load their parts. See load_model()."""

    def send(self, message: bytes) -> None:
        """Send a message of rank 0 to ranks on other nodes."""

    def stop(self) -> None:
        """What ranks on other nodes compute from now on is of no use."""

    def reset(self) -> None:
        """Ranks on other nodes begin anew."""

    def descriptors(self) -> list[int]:
        """What can be read when a node has said something."""
        return []

    def heard(self, take: Callable[[int, tuple[int, ...]], None]) -> str:
        """Read what nodes have said, and give RankBoard.note() what their ranks say; why one cannot go on, or empty."""
        return ""

    def silent(self, passed_s: float, limit_s: float) -> str:
        """Which node has said nothing for too long, of which so much has just passed; empty for none."""
        return ""

    def looks(self) -> list[tuple[str, Look]]:
        """Where ranks on other nodes are, for people, and what is seen of them."""
        return []

    def leave(self) -> None:
        """Have the ranks of other nodes end, and whoever is sending to them here go on."""

    def end(self) -> None:
        """See leave(); nothing can be sent after this."""


class Nodes(OneMachine):
    """The nodes behind the first, which are waited for.

    Args:
        config: of the engine.
        content: of its model, see content_of().
        sizes: hidden and vocab of the model.
        threads: of a rank.
        parts: the ranks of each node.
        door: where they join. It is closed when all have.
        missing: raises ValueError where nodes that have not joined yet will not come.

    Raises:
        ValueError: a node does not come, or does not fit; one line.
    """

    def __init__(
        self,
        config: EngineConfig,
        content: str,
        sizes: tuple[int, int],
        threads: int,
        parts: list[range],
        door: tuple[str, int],
        missing: Callable[[tuple[str, int]], None],
    ) -> None:
        super().__init__(len(parts[0]))
        self._config, self._content, self._parts = config, content, parts
        self._wires: dict[int, Wire] = {}
        self._addresses: dict[int, tuple[str, int]] = {}
        self._looks: dict[int, list[Look]] = {}
        self._silent_s = dict.fromkeys(range(1, len(parts)), 0.0)
        self._session = secrets.token_hex(16)
        known: list[Wire] = []
        opened = Door(*door, known)
        try:
            self._gather(opened, lambda: missing(opened.address))
            self.connections = self._link(opened, sizes, threads)
        except OSError as error:
            raise ValueError(f"a node has left before all had joined: {error.strerror or error}") from None
        finally:
            opened.close()
            if not self.connections:
                self.end()

    def _name(self, node: int) -> str:
        return f"node {node} ({self._wires[node].host})"

    def _gather(self, door: Door, missing: Callable[[], None]) -> None:
        """Wait until all nodes have joined."""
        until = time.monotonic() + JOIN_S
        while len(self._wires) < len(self._parts) - 1:
            missing()
            for wire, message in door.heard(1.0):
                if isinstance(message, Hello):
                    self._admit(door, wire, message)
            if time.monotonic() > until:
                absent = [node for node in range(1, len(self._parts)) if node not in self._wires]
                raise ValueError(
                    f"node {', '.join(map(str, absent))} of {len(self._parts)} has not joined within {JOIN_S:g} s at "
                    f"{door.address[0]}:{door.address[1]}; start it with --node-rank and this --master-addr"
                )

    def _admit(self, door: Door, wire: Wire, hello: Hello) -> None:
        """Let a node join. Raises ValueError where it does not fit, which it is told, too."""
        why = self._refusal(hello)
        if why:
            why = f"node {hello.node} ({wire.host}) {why}"
            wire.send(Refused(why))
            raise ValueError(why)
        door.know(wire)
        self._wires[hello.node], self._addresses[hello.node] = wire, hello.address

    def _refusal(self, hello: Hello) -> str:
        if hello.version != __version__:
            return f"has Headway {hello.version}, and node 0 has {__version__}; install the same version on both"
        if hello.problem:
            return f"cannot join: {hello.problem}"
        theirs = msgspec.msgpack.decode(hello.config, type=EngineConfig)
        for name in _ALIKE:
            here, there = (getattr(each, name) for each in (self._config, theirs))
            if here != there:
                return f"was started with {name} {there}, and node 0 with {here}; start all nodes alike"
        if not 0 < hello.node < len(self._parts) or hello.node in self._wires:
            return f"is there twice; give each of {len(self._parts)} nodes a --node-rank of its own"
        if hello.content != self._content:
            return "has another model: its config.json, or its files' names or sizes, differ from those of node 0"
        return ""

    def _link(self, door: Door, sizes: tuple[int, int], threads: int) -> dict[int, Connections]:
        """Have all nodes start their ranks and connect them; the connections of this one's."""
        parts = [(part[0], len(part)) for part in self._parts]
        addresses = [door.address, *(self._addresses[node] for node in range(1, len(self._parts)))]
        for wire in self._wires.values():
            wire.send(Start(self._config, parts, addresses, self._session, sizes, threads))
        linked, until = set[int](), time.monotonic() + JOIN_S
        pairs = linked_ranks(self._parts, self._config.tensor_parallel_size, 0)
        made = dict[int, dict[int, int]]()
        while len(linked) < len(self._wires) or sum(map(len, made.values())) < len(pairs):
            for wire, message in door.heard(1.0):
                if isinstance(message, Refused):
                    raise ValueError(message.why)
                if isinstance(message, Linked):
                    linked.add(wire.fileno())
            door.take_links(self._session, made)
            if time.monotonic() > until:
                raise ValueError(f"the ranks of {len(self._parts)} nodes were not connected within {JOIN_S:g} s")
        return connections_of(self._parts, self._config.tensor_parallel_size, made)

    def assign(self, max_model_len: int) -> None:
        self._tell(Assign(max_model_len))

    def send(self, message: bytes) -> None:
        self._tell(Work(message))

    def stop(self) -> None:
        self._tell(Stop())

    def reset(self) -> None:
        self._tell(Reset())

    def _tell(self, message: ToNode) -> None:
        for wire in self._wires.values():
            with contextlib.suppress(OSError):  # heard() says that it is gone
                wire.send(message)

    def descriptors(self) -> list[int]:
        return [wire.fileno() for wire in self._wires.values()]

    def heard(self, take: Callable[[int, tuple[int, ...]], None]) -> str:
        for node, wire in self._wires.items():
            try:
                reports = wire.received()
            except (OSError, msgspec.MsgspecError) as error:
                return f"{self._name(node)} is gone: {getattr(error, 'strerror', None) or error}"
            for report in reports:
                if isinstance(report, Refused):
                    return f"{self._name(node)} cannot go on: {report.why}"
                if isinstance(report, Report):
                    self._silent_s[node], self._looks[node] = 0.0, report.looks
                    if report.ended:
                        return f"on {self._name(node)}, {report.ended}"
                    for look in report.looks:
                        take(look.rank, look.said)
        return ""

    def silent(self, passed_s: float, limit_s: float) -> str:
        for node in self._silent_s:
            self._silent_s[node] += passed_s
            if self._silent_s[node] > limit_s:
                return f"{self._name(node)} has said nothing for {limit_s:g} s"
        return ""

    def looks(self) -> list[tuple[str, Look]]:
        return [(f"on {self._name(node)}, ", look) for node, looks in self._looks.items() for look in looks]

    def leave(self) -> None:
        for wire in self._wires.values():
            with contextlib.suppress(OSError):
                wire.socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        self.leave()
        for connection in [each for of_rank in self.connections.values() for each in of_rank.values()]:
            os.close(connection.descriptor)
        self.connections = {}
        for wire in self._wires.values():
            wire.close()
        self._wires = {}
