"""A server whose every delay and failure a test writes down: the oracle of the load generator.

It runs in a process of its own, speaks enough of the OpenAI API, and keeps a log of when it sent what, on the
clock that all processes of a machine share (time.monotonic_ns). What it does with a request is a `Script`, as JSON
in the body's field `script` or in the prompt; without one, the script of the command line.

    with ScriptedServer() as server:
        ... ask server.url, with script(ttft_s=0.1, chunks=5, gap_s=0.02, id="a") as the prompt
        server.log("a")  # {"received_ns": ..., "headers_ns": ..., "sent_ns": [...], ...}

By hand, and as the trivial server of a benchmark: python -m tests.bench.scripted_server --port 8000 --no-log
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import ssl
import struct
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

import httptools
import msgspec
import uvloop

from tests.bench.script import Script
from tests.bench.scripted_stream import ScriptedStream
from tests.bench.served_kinds import KINDS, Asked, Settings, plain_answer

REPOSITORY = Path(__file__).resolve().parents[2]
_TCP_REPAIR = 19
REASONS = {200: "OK", 307: "Temporary Redirect", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found"}


class State:
    """What all connections of the process share."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.loop = asyncio.get_running_loop()
        self.ready_ns = time.monotonic_ns() + round(settings.loading_for_s * 1e9)
        self.requests: dict[str, dict[str, Any]] = {}
        self.freezes: list[tuple[int, int]] = []
        self.frozen_ns = 0
        self.connections = 0
        self.open: set[Connection] = set()
        self.count = 0

    def freeze(self, for_s: float) -> None:
        """Nothing is read and nothing is sent: the event loop itself stands still."""
        began = time.monotonic_ns()
        time.sleep(for_s)
        self.freezes.append((began, time.monotonic_ns()))
        self.frozen_ns += self.freezes[-1][1] - began

    def vanish(self) -> None:
        """Forget all connections without a word, as a machine does that is switched off; only root may."""
        for each in list(self.open):
            each.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
            each.transport.abort()

    @property
    def is_loading(self) -> bool:
        return time.monotonic_ns() < self.ready_ns

    def log(self) -> dict[str, Any]:
        return {"requests": self.requests, "freezes": self.freezes, "connections": self.connections}


class Connection(asyncio.Protocol):
    """One connection; requests on it are answered one after the other, as they come."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.served = 0
        self.stream: ScriptedStream | None = None
        self.received_ns = 0
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.state.connections += 1
        self.number = self.state.connections
        self.state.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.state.open.discard(self)
        if self.stream is not None:
            self.stream.client_left()

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        self.received_ns = self.received_ns or now
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.close()

    # --- what the parser calls ----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        path = self._target.partition(b"?")[0].decode()
        asked = Asked(self._parser.get_method().decode(), path, self._headers, b"".join(self._body))
        received_ns, self.received_ns = self.received_ns, 0
        self.served += 1
        prefix = self.state.settings.path_prefix
        asked.path = asked.path.removeprefix(prefix) if asked.path.startswith(prefix) else "/not-under-the-prefix"
        if asked.path == "/v1/completions" or asked.path == "/v1/chat/completions":
            self._generate(asked, received_ns)
        elif (answer := self._control(asked)) is not None:
            self.answer(200, answer)
        else:
            self.answer(*plain_answer(self.state.settings, asked, self.state.is_loading))

    # --- answers ------------------------------------------------------------------------------------

    def _control(self, asked: Asked) -> Any:
        """The oracle's own routes."""
        if asked.path == "/log":
            if asked.method == "DELETE":
                self.state.requests.clear()
            return self.state.log()
        if asked.path == "/freeze" and asked.method == "POST":
            wish = json.loads(asked.body)
            self.state.loop.call_later(wish["at_s"], self.state.freeze, wish["for_s"])
            return {"at_ns": time.monotonic_ns() + int(wish["at_s"] * 1e9)}
        if asked.path == "/script" and asked.method == "POST":
            self.state.settings.default_script = msgspec.json.decode(asked.body, type=Script)
            return {}
        if asked.path == "/vanish" and asked.method == "POST":
            self.state.loop.call_later(0.1, self.state.vanish)
            return {}
        if asked.path == "/ready" and asked.method == "POST":
            self.state.ready_ns = time.monotonic_ns() + round(json.loads(asked.body)["at_s"] * 1e9)
            return {"at_ns": self.state.ready_ns}
        return None

    def _generate(self, asked: Asked, received_ns: int) -> None:
        settings, state = self.state.settings, self.state
        refusal = settings.refusal(asked, state.is_loading)
        if refusal is not None:
            return self.answer(*refusal)
        body = asked.generation_body
        script = body.scripted(settings.default_script)
        state.count += 1
        name = script.id or asked.headers.get(b"x-request-id", b"").decode() or str(state.count)
        entry = {"received_ns": received_ns, "connection": self.number, "sent_ns": []}
        if settings.keep_log:
            entry["body"] = body.shown
            if name in state.requests:  # a client that tries again
                entry["before"] = state.requests[name]
            state.requests[name] = entry
        if script.fail == "close_if_reused" and self.served > 1:
            return self.transport.close()
        if not body.stream:
            return self.answer(*body.whole_answer(script, asked.is_chat))
        self.stream = ScriptedStream(self, script, body, asked.is_chat, entry)
        self.stream.begin()

    def answer(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        """A response in one piece."""
        is_text = isinstance(content, str)
        body = content.encode() if is_text else msgspec.json.encode(content)
        lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Scripted')}", f"content-length: {len(body)}"]
        lines += [f"content-type: {'text/plain' if is_text else 'application/json'}"]
        lines += [f"{name}: {value}" for name, value in (self.state.settings.headers() | (headers or {})).items()]
        self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    def reset(self) -> None:
        """End the connection so that the client sees a reset."""
        with contextlib.suppress(OSError):
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


async def serve(args: argparse.Namespace) -> None:
    settings = Settings(
        kind=args.kind,
        models=tuple(args.model or ["scripted"]),
        max_model_len=args.max_model_len,
        api_key=args.api_key,
        loading_for_s=args.loading_for,
        path_prefix=args.path_prefix,
        default_script=msgspec.json.decode(args.script, type=Script),
        keep_log=args.log,
    )
    state = State(settings)
    context = None
    if args.certfile:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(args.certfile, args.keyfile)
    server = await state.loop.create_server(lambda: Connection(state), args.host, args.port, ssl=context, backlog=4096)
    port = server.sockets[0].getsockname()[1]
    host = f"[{args.host}]" if ":" in args.host else args.host
    print(f"{'https' if context else 'http'}://{host}:{port}", flush=True)
    # It ends with whoever started it.
    if args.until_stdin_closes:
        await state.loop.run_in_executor(None, sys.stdin.read)
    else:
        await server.serve_forever()


class ScriptedServer:
    """The server in a process of its own, as a context manager.

    Args:
        options: of the command line, by name: kind="vllm", model=["a", "b"], api_key="k", loading_for=0.5, ...
    """

    def __init__(self, **options: Any) -> None:
        self._options = options

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "tests.bench.scripted_server", "--port", "0", "--until-stdin-closes"]
        for name, value in self._options.items():
            for one in value if isinstance(value, list) else [value]:
                flag = "--" + name.replace("_", "-")
                command += [flag] if one is True else ["--no-" + flag[2:]] if one is False else [flag, str(one)]
        self.process = subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.origin = self.process.stdout.readline().strip()
        if not self.origin:
            raise RuntimeError(f"the scripted server did not start: {command}")
        self.url = self.origin + self._options.get("path_prefix", "")
        self.port = int(self.origin.rpartition(":")[2])
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def log(self, request_id: str) -> dict[str, Any]:
        """What happened to one request: received_ns, headers_ns, sent_ns of each chunk with tokens, ended_ns (its
        last byte was sent), left_ns (the client closed before that), connection (its number), body, before (of the
        same id, the time before)."""
        entry: dict[str, Any] = self.logs()["requests"][request_id]
        return entry

    def logs(self) -> dict[str, Any]:
        """{"requests": {id: log}, "freezes": [[began_ns, ended_ns]], "connections": how many were opened}."""
        answer: dict[str, Any] = self._ask("GET", "/log")
        return answer

    def forget(self) -> None:
        self._ask("DELETE", "/log")

    def freeze(self, at_s: float, for_s: float) -> int:
        """Stand still for `for_s` seconds, `at_s` seconds from now; when that is, in time.monotonic_ns()."""
        at_ns: int = self._ask("POST", "/freeze", {"at_s": at_s, "for_s": for_s})["at_ns"]
        return at_ns

    def ready(self, at_s: float) -> None:
        """The loading ends, `at_s` seconds from now."""
        self._ask("POST", "/ready", {"at_s": at_s})

    def _ask(self, method: str, path: str, content: Any = None) -> Any:
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self.url + path, data, method=method)
        context = ssl._create_unverified_context() if self.origin.startswith("https") else None
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        with opener.open(request, timeout=30) as response:
            return json.load(response)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, default="unknown", help="which server it pretends to be")
    parser.add_argument("--model", action="append", help="a served model; may be given again")
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--api-key", default="")
    parser.add_argument("--loading-for", type=float, default=0.0, help="seconds of 503 after the start")
    parser.add_argument("--path-prefix", default="")
    parser.add_argument("--script", default="{}", help="for requests that bring none")
    parser.add_argument("--log", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--certfile")
    parser.add_argument("--keyfile")
    parser.add_argument("--until-stdin-closes", action="store_true")
    parser.add_argument("--uvloop", action="store_true", help="less work for the processor; writes wait for each other")
    args = parser.parse_args()
    (uvloop.run if args.uvloop else asyncio.run)(serve(args))


if __name__ == "__main__":
    main()
