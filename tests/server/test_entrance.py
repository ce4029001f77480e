"""Newcomers: who says nothing costs nothing, crowds take turns, and probes are answered before them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import selectors
import socket
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from headway.server.edge import entrance
from headway.server.edge.connection import Connection
from headway.server.edge.probes import MAX_PROBE, Probes
from headway.server.errors import unavailable
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer, eventually
from tests.server.test_connection import BODY, POST, Reader
from tests.server.test_slow_requests import read_until

StartServer = Callable[..., LiveServer]
PROBE = b"GET /health HTTP/1.1\r\nHost: a\r\n%b\r\n"
REQUEST = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


@contextlib.contextmanager
def crowd(server: LiveServer, size: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    connections = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(size)]
    for each in connections:
        each.sendall(sent)
    yield connections
    for each in connections:
        each.close()


@contextlib.contextmanager
def standing_still(server: LiveServer) -> Iterator[None]:
    """The event loop does nothing meanwhile."""
    is_busy, may_go_on = threading.Event(), threading.Event()

    def wait() -> None:
        is_busy.set()
        may_go_on.wait(10)

    server.call(wait)
    assert is_busy.wait(10)
    yield
    may_go_on.set()


def ask(server: LiveServer, message: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(message)
        return read_until(client, b"}")


def test_who_says_nothing_gets_no_connection_until_then(server: LiveServer) -> None:
    before = len(server.server.server_state.connections)
    with crowd(server, 40) as silent:
        assert b"200 OK" in ask(server, PROBE % b"")
        assert len(server.server.server_state.connections) == before
        silent[7].sendall(REQUEST)
        assert b"200 OK" in read_until(silent[7], b"}")
        assert len(server.server.server_state.connections) == before + 1


def test_the_silent_are_closed_the_oldest_first(start_server: StartServer) -> None:
    server = start_server(request_read_timeout=0.3)
    with crowd(server, 3) as silent:
        time.sleep(0.2)
        with crowd(server, 1) as later, selectors.EpollSelector() as ends:
            for each in (*later, *silent):
                ends.register(each, selectors.EVENT_READ)
            closed = list[object]()
            while len(closed) < 4:  # those that are ready come in the order in which they became so
                for key, _ in ends.select(10):
                    assert read_until(ends.unregister(key.fileobj).fileobj, b"") == b""  # type: ignore[arg-type]
                    closed.append(key.fileobj)
            assert closed == [*silent, *later]


def test_a_crowd_comes_in_a_few_to_a_turn_and_in_its_order(
    server: LiveServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, came = list[int](), list[int]()
    let_in, made = entrance.Entrance._let_in, Connection.connection_made

    def counted(self: entrance.Entrance) -> None:
        before = len(self._waiting)
        let_in(self)
        turns.append(before - len(self._waiting))

    def noted(self: Connection, transport: asyncio.Transport) -> None:
        made(self, transport)
        assert self.client is not None
        came.append(self.client[1])

    monkeypatch.setattr(entrance.Entrance, "_let_in", counted)
    monkeypatch.setattr(Connection, "connection_made", noted)
    with standing_still(server):
        clients = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(60)]
        for each in clients:
            each.sendall(REQUEST)
    assert all(b"200 OK" in read_until(each, b"}]") for each in clients)
    assert max(turns) == entrance.LET_IN_PER_TURN and sum(turns) == 60
    assert came == [each.getsockname()[1] for each in clients]
    for each in clients:
        each.close()


def test_a_probe_behind_a_crowd_is_answered_before_it(server: LiveServer, engine: FakeEngine) -> None:
    with standing_still(server):
        clients = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(60)]
        for each in clients:
            each.sendall(REQUEST)
        probe = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        probe.sendall(PROBE % b"")
    began = len(engine.requests)
    assert b"200 OK" in read_until(probe, b"}")
    assert len(engine.requests) - began < 60
    assert all(b"200 OK" in read_until(each, b"}]") for each in clients)
    for each in (*clients, probe):
        each.close()


def test_time_at_the_entrance_counts_as_the_request_s(server: LiveServer) -> None:
    timed = json.dumps({"prompt": "x", "max_tokens": 1, "include_timings": True}).encode()
    message = POST + b"Content-Length: %d\r\n\r\n" % len(timed) + timed
    with standing_still(server):
        clients = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(30)]
        for each in clients:
            each.sendall(message)
    began = list[int]()
    for each in clients:
        ((status, _, body),) = Reader().read(read_until(each, b"}}"))
        assert status == 200
        began.append(json.loads(body)["timings"]["phases_ns"]["receive"])
        each.close()
    assert began[-1] > began[0], "the last has waited for the others"


def test_a_server_without_file_descriptors_tries_again(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entrance, "ACCEPT_AGAIN_S", 0.01)
    server, refused = start_server(), []
    accept = socket.socket.accept

    def full(self: socket.socket) -> object:
        if len(refused) < 3:
            refused.append(1)
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", full)
    assert server.client.get("/version").status_code == 200
    assert len(refused) == 3


def test_a_probe_is_answered_like_any_request(server: LiveServer) -> None:
    """As by the route, which answers whoever sends another header."""
    ((status, head, body),) = Reader().read(ask(server, PROBE % b"User-Agent: kube-probe/1.33\r\nAccept: */*\r\n"))
    ((status_of_route, head_of_route, body_of_route),) = Reader().read(ask(server, PROBE % b"X-Other: 1\r\n"))
    assert (status, body) == (status_of_route, body_of_route) == (200, b'{"status":"ready"}')
    assert head.pop("connection") == "close" and head.keys() == head_of_route.keys()
    assert head["x-request-id"] != head_of_route["x-request-id"]


def test_probes_on_a_connection_that_stays(server: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        for _ in range(2):
            client.sendall(REQUEST)
            assert b"200 OK" in read_until(client, b"}]")
            for probe in (PROBE % b"", PROBE % b"Connection: keep-alive\r\n"):
                client.sendall(probe)
                ((status, head, _),) = Reader().read(read_until(client, b'"ready"}'))
                assert status == 200 and "connection" not in head
        client.sendall(PROBE % b"Connection: close\r\n")
        ((status, head, _),) = Reader().read(read_until(client, b""))
        assert (status, head["connection"]) == (200, "close")


def test_a_probe_behind_a_request_waits_for_its_answer(server: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(REQUEST)
        time.sleep(0.05)
        client.sendall(PROBE % b"")
        first, second = Reader().read(read_until(client, b'"ready"}'))
    assert b"choices" in first[2] and second[2] == b'{"status":"ready"}'


def test_only_whole_plain_probes_are_answered_at_once() -> None:
    probes = Probes(lambda: None, lambda: [(b"date", b"today")])
    assert (answer := probes.answer(PROBE % b"")) is not None and not answer.ends
    assert b"\r\ndate: today\r\n" in answer.data
    assert (answer := probes.answer(b"GET /ping HTTP/1.1\r\nhost: a\r\n\r\n", ends=True)) is not None and answer.ends
    for other in (
        PROBE[:-2] % b"",
        PROBE % b"" + b"x",
        (PROBE % b"") * 2,
        PROBE % b"Host: b\r\n",
        b"GET /health HTTP/1.1\r\nAccept: */*\r\n\r\n",
        PROBE % b"Content-Length: 1\r\n",
        PROBE % b"Transfer-Encoding: chunked\r\n",
        PROBE % b"X-Request-Id: 1\r\n",
        PROBE % b"Origin: a\r\n",
        PROBE % b"Accept : a\r\n",
        PROBE % b"Accept: \x00\r\n",
        PROBE % (b"User-Agent: %b\r\n" % (b"a" * MAX_PROBE)),
        (PROBE % b"").replace(b"GET", b"HEAD"),
        (PROBE % b"").replace(b"1.1", b"1.0"),
        (PROBE % b"").replace(b"/health", b"/Health"),
        (PROBE % b"").replace(b"/health", b"/health?a"),
    ):
        assert probes.answer(other) is None, other


def test_a_probe_of_a_server_that_is_not_ready() -> None:
    def check() -> None:
        raise unavailable("the model is loading", "engine_loading", 5)

    answer = Probes(check, list).answer(PROBE % b"")
    assert answer is not None
    ((status, head, body),) = Reader().read(answer.data)
    assert (status, head["retry-after"]) == (503, "5") and b"engine_loading" in body


def test_newcomers_are_closed_with_the_server(start_server: StartServer) -> None:
    server = start_server()
    with crowd(server, 5) as silent:
        eventually(lambda: len(server.server._entrance._silent) >= 5)
        server.call(server.server.drain)
        assert [read_until(each, b"") for each in silent] == [b""] * 5


async def test_a_connection_whose_task_is_cancelled_before_it_begins_is_closed() -> None:
    """As when a server ends in the moment in which somebody comes."""

    def cancelled(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.cancel()
        return task

    listener = socket.create_server(("127.0.0.1", 0))
    door = entrance.Entrance(
        lambda came_ns, refusal: asyncio.Protocol(), Probes(lambda: None, list), 5.0, None, cancelled
    )
    door.open([listener])
    with (
        warnings.catch_warnings(record=True) as warned,
        socket.create_connection(listener.getsockname(), timeout=5) as client,
    ):
        warnings.simplefilter("always")  # the collector closes it too, and says so
        client.sendall(b"GET")
        client.setblocking(False)
        with pytest.raises(ConnectionResetError):  # what it said was not read
            await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), 2)
    door.close()
    assert [each.category for each in warned if each.category is ResourceWarning] == []
