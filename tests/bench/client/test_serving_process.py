"""Who runs on this machine: the server itself, and none of those that only pass on what they get."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.bench.client import serving_process
from headway.bench.client.serving_process import runs_here
from tests.bench.scripted_server import ScriptedServer

# Passes each connection on to another port: what ssh -L, socat, kubectl port-forward and docker-proxy do.
FORWARDER = """
import asyncio, sys

async def pump(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()

async def serve(reader, writer):
    up_reader, up_writer = await asyncio.open_connection("127.0.0.1", int(sys.argv[1]))
    await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""
# Listens, and has a child that does the work over a loopback connection, as engines do.
WITH_AN_ENGINE = """
import socket, subprocess, sys
inside = socket.create_server(("127.0.0.1", 0))
child = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); s.recv(1)"
engine = subprocess.Popen([sys.executable, "-c", child, str(inside.getsockname()[1])])
link, _ = inside.accept()
outside = socket.create_server(("127.0.0.1", 0))
print(outside.getsockname()[1], flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def running(source: str, *arguments: object) -> Iterator[int]:
    """A process of this source; the port that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-c", source, *map(str, arguments)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.stdin.close()
        process.terminate()
        process.wait(30)
        process.stdout.close()


@contextlib.contextmanager
def asked(port: int) -> Iterator[None]:
    """A connection that was used and is kept open, as a client of the load generator has it."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request("GET", "/v1/models")
        assert json.loads(connection.getresponse().read())["data"]
        yield
    finally:
        connection.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_here(scripted: ScriptedServer, host: str) -> None:
    port = int(scripted.url.rpartition(":")[2])
    with asked(port):
        assert runs_here(host, port)


def test_a_tunnel_is_not_the_server(scripted: ScriptedServer) -> None:
    with running(FORWARDER, scripted.url.rpartition(":")[2]) as port:
        assert runs_here("127.0.0.1", port)  # it has nothing to show yet
        with asked(port):
            assert not runs_here("127.0.0.1", port)


def test_a_server_may_have_an_engine_of_its_own() -> None:
    with running(WITH_AN_ENGINE) as port:
        assert runs_here("127.0.0.1", port)


def test_what_is_not_known_is_not_here(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    port = int(scripted.url.rpartition(":")[2])
    assert not runs_here("192.0.2.1", port)  # an address of nobody here
    assert not runs_here("no.such.name.invalid", port)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = listener.getsockname()[1]
    assert not runs_here("127.0.0.1", free)  # nobody listens
    monkeypatch.setattr(serving_process, "process_ids", list)  # another user's process, of which nothing is told
    assert not runs_here("127.0.0.1", port)
    monkeypatch.undo()
    monkeypatch.setattr(serving_process, "PROC", tmp_path)  # no Linux
    assert not runs_here("127.0.0.1", port)


def test_addresses_are_read_as_linux_writes_them() -> None:
    expected = "0100007F:1F90" if sys.byteorder == "little" else "7F000001:1F90"
    assert [str(each) for each in serving_process.socket_end(expected)] == ["127.0.0.1", "8080"]
    mapped = "0000000000000000FFFF00000100007F:0050" if sys.byteorder == "little" else None
    if mapped is not None:
        assert [str(each) for each in serving_process.socket_end(mapped)] == ["127.0.0.1", "80"]
        assert str(serving_process.socket_end("00000000000000000000000001000000:0050")[0]) == "::1"
