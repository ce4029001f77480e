"""Requests that come slowly or not at all hold no connection for longer than --request-read-timeout."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer, eventually

StartServer = Callable[..., LiveServer]
BODY = b'{"prompt": "x"}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: mine\r\ncontent-length: %d\r\n\r\n" % len(BODY)


def connect(server: LiveServer) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def read_until(connection: socket.socket, end: bytes) -> bytes:
    """What comes up to `end`, or, with none, until the server closes."""
    received = b""
    while not (end and end in received):
        chunk = connection.recv(65536)
        if not chunk:
            assert not end, received
            break
        received += chunk
    return received


def trickle(connection: socket.socket, data: bytes) -> bytes:
    """Send a byte at a time, until the server answers or closes; what it says."""
    connection.settimeout(0.05)
    for byte in data:
        try:
            connection.sendall(bytes([byte]))
            received = connection.recv(65536)
        except TimeoutError:
            continue
        connection.settimeout(10)
        return received + (read_until(connection, b"") if received else b"")
    raise AssertionError("all of it was taken")


@pytest.mark.parametrize("prompt_part", [b"", HEAD], ids=["headers", "body"])
def test_request_that_trickles_is_cut_off(start_server: StartServer, engine: FakeEngine, prompt_part: bytes) -> None:
    server = start_server(request_read_timeout=0.3)
    with connect(server) as connection:
        connection.sendall(prompt_part)
        began = time.monotonic()
        answer = trickle(connection, b" " * 1000 if prompt_part else HEAD + BODY)
        assert time.monotonic() - began < 5
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "request_timeout")
    assert "0.3 s" in error["message"] and "--request-read-timeout" in error["message"]
    eventually(lambda: not server.server.server_state.connections and not server.service.in_flight)
    assert engine.requests == []
    assert server.post("/v1/completions", prompt="x").status_code == 200, "others are served"


def test_id_of_a_request_that_is_cut_off_is_echoed(start_server: StartServer) -> None:
    server = start_server(request_read_timeout=0.1)
    with connect(server) as connection:
        connection.sendall(HEAD)
        assert b"x-request-id: mine\r\n" in read_until(connection, b"")


@pytest.mark.parametrize("sent", [b"", b"\r\n"])
def test_connection_without_a_request_is_closed(start_server: StartServer, sent: bytes) -> None:
    server = start_server(request_read_timeout=0.1)
    with connect(server) as connection:
        connection.sendall(sent)
        assert read_until(connection, b"") == b""
    with connect(server) as connection:  # the same after an answer
        connection.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        read_until(connection, b"}")
        connection.sendall(b"\r\n")
        assert read_until(connection, b"") == b""


def test_rest_of_a_refused_body_may_not_trickle_either(start_server: StartServer) -> None:
    server = start_server(request_read_timeout=0.2, max_body_size=10)
    with connect(server) as connection:
        connection.sendall(HEAD)
        answer = read_until(connection, b"}")
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert read_until(connection, b"") == b"", "one answer to one request"


def test_answers_may_take_longer_than_requests(start_server: StartServer, engine: FakeEngine) -> None:
    server = start_server(request_read_timeout=0.2)
    engine.open = False
    with connect(server) as connection:
        connection.sendall(HEAD + BODY)
        # The next request of the connection begins while the first is answered, and is not complete.
        connection.sendall(HEAD + BODY[:-1])
        eventually(lambda: len(engine.running) == 1)
        time.sleep(0.5)
        engine.open = True
        assert read_until(connection, b"}]").startswith(b"HTTP/1.1 200 ")
        rest = read_until(connection, b"")
    assert rest.count(b"HTTP/1.1 408 ") == 1
    assert len(engine.requests) == 1
