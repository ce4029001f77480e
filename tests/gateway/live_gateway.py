"""A real gateway on a loopback port, in a thread of the test's process, and backends that a test writes down."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import uvloop

from headway.config_files.gateway import parse_gateway_file, read_gateway_file
from headway.gateway.asking import addresses_of
from headway.gateway.run import GatewayServer
from headway.gateway.settings import GatewaySettings
from headway.server.edge.listening import bind
from tests.server.live_server import eventually

FAST = """
[timeouts]
connect_s = 2
first_byte_s = 3
stall_s = 2

[health]
every_s = 0.2
timeout_s = 1
failures = 2
eject_s = 0.3
slow_start_s = 0.01
"""


def file_text(backends: dict[str, str], top: str = "", tables: str = FAST, **keys: Any) -> str:
    """A file of backends by name and URL, each with these further keys."""
    tables = f"{tables}\n"
    more = "\n".join(
        f"{key}.{inner} = {json.dumps(each)}" if isinstance(value, dict) else f"{key} = {json.dumps(value)}"
        for key, value in keys.items()
        for inner, each in (value.items() if isinstance(value, dict) else [("", value)])
    )
    entries = [f'[[backend]]\nname = "{name}"\nurl = "{url}"\n{more}' for name, url in backends.items()]
    return "\n".join([top, tables, *entries])


class LiveGateway:
    """Runs from the call of start() to stop()."""

    def __init__(self, text: str, path: Path | None = None, **changes: Any) -> None:
        if path is not None:
            path.write_text(text)
        file = parse_gateway_file("gateway.toml", text) if path is None else read_gateway_file(str(path))
        if path is None:
            file = replace(file, path="")
        self._settings = GatewaySettings(**{"log_level": "error", "file": file, **changes})
        self._listener = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.client = httpx.Client(base_url=self.url, timeout=30)
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.server: GatewayServer | None = None
        self.look_up = addresses_of

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)

        async def serve() -> None:
            self.server = GatewayServer(self._settings)
            self.server.asker._look_up = self.look_up
            await self.server.serve(sockets=[self._listener])

        self.loop.run_until_complete(serve())

    @property
    def gateway(self) -> Any:
        assert self.server is not None
        return self.server.gateway

    def start(self, is_ready: bool = True) -> LiveGateway:
        self._thread.start()
        eventually(lambda: self.server is not None and self.server.started)
        if is_ready:
            eventually(lambda: all(each.is_known for each in self.gateway.members.values()))
        return self

    def call(self, function: Callable[[], Any]) -> None:
        self.loop.call_soon_threadsafe(function)

    def outcomes(self) -> dict[str, dict[str, int]]:
        """How many requests ended how, by backend."""
        return {name: dict(each.outcomes) for name, each in self.gateway.members.items()}

    def stop(self) -> None:
        self.client.close()
        assert self.server is not None
        self.call(self.server.drain)
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.loop.close()

    def __enter__(self) -> LiveGateway:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def events_of(answer: httpx.Response) -> list[str]:
    """The data of a stream's events."""
    return [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data:")]


Handler = Callable[[bytes, bytes, asyncio.StreamWriter], Awaitable[None]]


@contextlib.contextmanager
def raw_backend(handler: Handler) -> Iterator[str]:
    """A backend that calls `handler` with the head and the body of each POST, and a writer for the answer."""
    loop, ready, urls = asyncio.new_event_loop(), threading.Event(), list[str]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    if head.startswith(b"GET"):
                        body = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
                        writer.write(
                            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                            % (len(body), body)
                        )
                        continue
                    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                    await handler(head, await reader.readexactly(length), writer)
        finally:
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        ready.set()
        await server.serve_forever()

    def main() -> None:
        asyncio.set_event_loop(loop)
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        for each in asyncio.all_tasks(loop):
            each.cancel()
        loop.run_until_complete(asyncio.sleep(0.05))
        loop.close()

    task = loop.create_task(run())
    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    assert ready.wait(10)
    yield urls[0]
    loop.call_soon_threadsafe(task.cancel)
    thread.join(10)


def whole(body: bytes, *headers: bytes) -> bytes:
    """A JSON answer."""
    lines = [b"HTTP/1.1 200 OK", b"content-type: application/json", b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body
