"""A few stretches of work to a turn of the event loop, in order, and nobody waits where nobody else does."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import Callable

import pytest

from headway.server import lifecycle
from headway.server.lifecycle import Server
from headway.server.pacing import Pace
from tests.server.live_server import LiveServer, eventually


async def test_a_crowd_takes_turns_and_the_loop_goes_on_between_them() -> None:
    pace, log = Pace(3), []

    async def newcomer(number: int) -> None:
        await pace.turn()
        log.append(number)

    newcomers = [asyncio.create_task(newcomer(number)) for number in range(100)]
    done = asyncio.gather(*newcomers)
    between = []
    while not done.done():
        before = len(log)
        await asyncio.sleep(0)  # one turn of the loop
        between.append(len(log) - before)
    assert log == list(range(100))
    assert max(between) == 3 and sum(between) == 100


async def test_one_alone_does_not_wait() -> None:
    pace = Pace(1)
    for _ in range(5):
        turn = pace.turn()
        try:
            turn.send(None)
        except StopIteration:
            pass
        else:
            raise AssertionError("it waited")
        await asyncio.sleep(0)


async def test_who_gives_up_takes_no_place_from_others() -> None:
    pace, log = Pace(1), []

    async def newcomer(number: int) -> None:
        await pace.turn()
        log.append(number)

    newcomers = [asyncio.create_task(newcomer(number)) for number in range(10)]
    await asyncio.sleep(0)
    for gone in newcomers[2:9]:
        gone.cancel()
    await asyncio.gather(*newcomers, return_exceptions=True)
    assert log == [0, 1, 9]
    await asyncio.sleep(0)
    await asyncio.wait_for(pace.turn(), 1)


def test_a_crowd_is_taken_up_a_few_connections_to_a_turn(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    accept = Server._accept

    def counted(self: Server, listener: socket.socket) -> None:
        before = len(self._service._background)
        accept(self, listener)
        taken.append(len(self._service._background) - before)

    monkeypatch.setattr(Server, "_accept", counted)
    listener = server._listener
    busy, crowded = threading.Event(), threading.Event()

    def listen_and_be_busy() -> None:
        server.server._listen(listener)  # with the counting one
        busy.set()
        crowded.wait(10)

    server.call(listen_and_be_busy)
    assert busy.wait(10)
    crowd = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(60)]
    crowded.set()
    try:
        eventually(lambda: sum(taken) >= 60)
        assert max(taken) == lifecycle.ACCEPTED_PER_TURN
        eventually(lambda: len(server.server.server_state.connections) >= 60)
    finally:
        for connection in crowd:
            connection.close()
    monkeypatch.undo()
    server.call(lambda: server.server._listen(listener))


def test_a_server_without_file_descriptors_tries_again(
    start_server: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "ACCEPT_AGAIN_S", 0.01)
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
