"""How long a stream stands still while thousands of other requests arrive at once, as the server sees it.

    python -m benchmarks.burst --requests 4000

One stream runs on a server of its own. Then all other requests are sent together, each on a connection of its own. The
server notes when each of the stream's tokens left the engine and when it was handed to the socket, so that the client,
which has the same cores, does not count. The figures: the longest time between two tokens in the engine, the longest
way from there to the socket, and the longest time between two at the socket. The last also in CPU time of the API
process's thread: what it did between two tokens, however busy the machine is.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.processes import environment
from headway.bundled import STORY

NOTES = "HEADWAY_BURST_NOTES"
_READY_S = 120.0
_END_S = 120.0


@dataclass(slots=True)
class Figures:
    """Milliseconds while the burst was answered, and the answers' statuses."""

    engine_gap_ms: float
    relay_ms: float
    socket_gap_ms: float
    socket_gap_cpu_ms: float
    burst_s: float
    tokens: int
    statuses: dict[int, int] = field(default_factory=dict)


# --- the server's side --------------------------------------------------------------------------------


def serve() -> None:
    """`headway serve`, which notes the times of the first stream's tokens and writes them to a file at its end."""
    from headway.cli import main
    from headway.engine.client import EngineClient
    from headway.engine.messages import EngineOutputs
    from headway.server.edge.connection import Connection
    from headway.server.edge.streaming import EventWriter

    made: list[int] = []
    written: list[int] = []
    written_cpu: list[int] = []
    first: list[str] = []
    deliver, write, write_now = EngineClient._deliver, EventWriter._write, Connection._write_now

    def noted_deliver(self: EngineClient, message: EngineOutputs) -> None:
        for output in message.outputs:
            if not first:
                first.append(output.request_id)
            if output.request_id == first[0]:
                made.append(message.made_ns)
        deliver(self, message)

    def note(data: bytes) -> None:
        tokens = data.count(b"data: {")
        written.extend([time.monotonic_ns()] * tokens)
        written_cpu.extend([time.thread_time_ns()] * tokens)

    async def noted_write(self: EventWriter, data: bytes, more: bool) -> None:
        await write(self, data, more)
        note(data)

    def noted_write_now(self: Connection, data: bytes) -> bool:
        is_written = write_now(self, data)
        if is_written:
            note(data)
        return is_written

    EngineClient._deliver = noted_deliver  # type: ignore[method-assign]
    EventWriter._write = noted_write  # type: ignore[method-assign]
    Connection._write_now = noted_write_now  # type: ignore[method-assign]
    try:
        main()
    finally:
        Path(os.environ[NOTES]).write_text(json.dumps({"made": made, "written": written, "cpu": written_cpu}))


# --- the client's side --------------------------------------------------------------------------------


def _message(port: int, body: dict[str, object]) -> bytes:
    encoded = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(encoded)}\r\n\r\n".encode() + encoded


def _is_ready(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return connection.recv(16).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def send_all(port: int, requests: int) -> dict[int, int]:
    """Send so many requests together and read all answers; how many had which status, 0 for none."""
    selector = selectors.DefaultSelector()
    message = _message(port, {"prompt": "The old house stood", "max_tokens": 1})
    statuses: Counter[int] = Counter()
    for _ in range(requests):
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex(("127.0.0.1", port))
        selector.register(connection, selectors.EVENT_WRITE, bytearray())
    left, until = requests, time.monotonic() + _END_S
    while left and time.monotonic() < until:
        for key, events in selector.select(1.0):
            assert isinstance(key.fileobj, socket.socket)
            connection, received = key.fileobj, key.data
            try:
                if events & selectors.EVENT_WRITE:
                    connection.sendall(message)
                    selector.modify(connection, selectors.EVENT_READ, received)
                    continue
                data = connection.recv(65536)
            except OSError:
                data = b""
            received += data
            if not data:
                statuses[int(received[9:12] or b"0")] += 1
                selector.unregister(connection)
                connection.close()
                left -= 1
    statuses[0] += left
    return dict(statuses)


def measure(model: str = str(STORY), requests: int = 4000, options: tuple[str, ...] = ()) -> Figures:
    """Serve the model, send the burst into a running stream, and say how long it stood still."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        notes = Path(folder) / "notes.json"
        command = [sys.executable, "-m", "benchmarks.burst", "serve", model, "--host", "127.0.0.1", "--port", str(port)]
        server = subprocess.Popen(
            [*command, "--log-level", "error", *options],
            env={**environment(), NOTES: str(notes)},
            stderr=subprocess.DEVNULL,
        )
        try:
            until = time.monotonic() + _READY_S
            while not _is_ready(port):
                if server.poll() is not None or time.monotonic() > until:
                    raise SystemExit("the server did not start")
                time.sleep(0.1)
            began, ended, statuses = _burst_into_stream(port, requests)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
        return _figures(json.loads(notes.read_text()), began, ended, statuses)


def _burst_into_stream(port: int, requests: int) -> tuple[int, int, dict[int, int]]:
    with socket.create_connection(("127.0.0.1", port)) as stream:
        body = {"prompt": "Once", "max_tokens": 1000, "stream": True, "ignore_eos": True, "return_token_ids": True}
        stream.sendall(_message(port, body))
        stream.recv(65536)
        reader = subprocess.Popen(["cat"], stdin=stream.fileno(), stdout=subprocess.DEVNULL)
        try:
            time.sleep(0.5)
            began = time.monotonic_ns()
            statuses = send_all(port, requests)
            return began, time.monotonic_ns(), statuses
        finally:
            reader.kill()
            reader.wait()


def _figures(notes: dict[str, list[int]], began: int, ended: int, statuses: dict[int, int]) -> Figures:
    made, written, cpu = notes["made"], notes["written"], notes["cpu"]
    # The last event has no token. What was not sent any more has no time.
    inside = [at for at in range(1, min(len(made), len(written))) if began <= written[at] <= ended]

    def longest(times: list[int], before: list[int], step: int) -> float:
        return max(times[at] - before[at - step] for at in inside) / 1e6

    return Figures(
        engine_gap_ms=longest(made, made, 1),
        relay_ms=longest(written, made, 0),
        socket_gap_ms=longest(written, written, 1),
        socket_gap_cpu_ms=longest(cpu, cpu, 1),
        burst_s=(ended - began) / 1e9,
        tokens=len(inside),
        statuses=statuses,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(STORY))
    parser.add_argument("--requests", type=int, default=4000)
    args, options = parser.parse_known_args()
    print(json.dumps(asdict(measure(args.model, args.requests, tuple(options)))))


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve()
    else:
        main()
