"""Single questions to a server outside a run, with errors that tell the user what to do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from headway.bench.client.connection import Receiver
from headway.bench.client.failures import RequestFailed, failure_of_status
from headway.bench.client.http_client import HttpClient
from headway.load.endpoint import Endpoint
from headway.load.errors import BenchError
from headway.load.record import Failure, FailureKind, RequestRecord

ASK_TIMEOUT_S = 120.0
LOOK_TIMEOUT_S = 10.0
RETRY_EVERY_S = 0.5
MAX_REPLY_BYTES = 64 * 2**20  # more than the longest list of tokens, or page of metrics
_NOT_READY_STATUSES = frozenset({502, 503, 504})
_NOT_READY_KINDS = frozenset({FailureKind.CONNECT, FailureKind.CUT})


class Reply(Receiver):
    """A response in one piece, whose times do not matter. One without an end raises RequestFailed."""

    def __init__(self) -> None:
        super().__init__(RequestRecord(0))
        self._received = bytearray()

    @property
    def raw(self) -> bytes:
        return bytes(self._received)

    def body(self, data: bytes, now_ns: int) -> None:
        self._received += data
        if len(self._received) > MAX_REPLY_BYTES:
            raise RequestFailed(FailureKind.MALFORMED, f"the answer has more than {MAX_REPLY_BYTES:,} bytes")

    @property
    def failure(self) -> Failure | None:
        return None if self.status == 200 else failure_of_status(self.status, self.response_headers, self.raw)

    @property
    def content(self) -> dict[str, Any]:
        """The JSON object that it holds; empty when it holds none."""
        try:
            content = msgspec.json.decode(self.raw)
        except (ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}


@dataclass(slots=True)
class Asker:
    """Asks one endpoint."""

    endpoint: Endpoint
    client: HttpClient
    ready_by: float = 0.0  # until this time.monotonic() a server that is not ready is asked again

    @classmethod
    @asynccontextmanager
    async def open(cls, endpoint: Endpoint, ready_timeout_s: float = 0.0) -> AsyncIterator[Self]:
        """Yield an asker with its own connections, which are closed at the end."""
        client = HttpClient.to(endpoint)
        try:
            yield cls(endpoint, client, time.monotonic() + ready_timeout_s)
        finally:
            client.close()
            await asyncio.sleep(0)

    async def ask(self, method: str, route: str, content: dict[str, Any] | None = None) -> Reply:
        """The reply, unless it is a 401, 403, 502, 503 or 504.

        Raises:
            BenchError: there is none, or it is one of those.
        """
        while True:
            try:
                reply = await self._exchange(method, route, content, ASK_TIMEOUT_S)
                failure = reply.failure
                ready = reply.status not in _NOT_READY_STATUSES
            except RequestFailed as error:
                failure = error.failure
                ready = failure.kind not in _NOT_READY_KINDS
            if ready or time.monotonic() + RETRY_EVERY_S > self.ready_by:
                break
            await asyncio.sleep(RETRY_EVERY_S)
        if failure is not None and (not ready or failure.status is None or failure.kind is FailureKind.AUTH):
            raise BenchError(self._advice(failure))
        return reply

    async def look(self, method: str, route: str, content: dict[str, Any] | None = None) -> Reply:
        """The reply of a route that many servers do not have; an empty one when there is none."""
        try:
            return await self._exchange(method, route, content, LOOK_TIMEOUT_S)
        except RequestFailed:
            return Reply()

    async def metrics(self) -> str:
        """The text of /metrics; "" where it cannot be had."""
        reply = await self.look("GET", "/metrics")
        return reply.raw.decode(errors="replace") if reply.status == 200 else ""

    async def _exchange(self, method: str, route: str, content: dict[str, Any] | None, timeout_s: float) -> Reply:
        reply = Reply()
        head = self.client.head(method, route, self.endpoint.all_headers())
        body = b"" if content is None else msgspec.json.encode(content)
        await self.client.exchange(head, body, reply, timeout_s)
        return reply

    def _advice(self, failure: Failure) -> str:
        url, said = self.endpoint.base_url, failure.message
        if failure.kind is FailureKind.AUTH:
            return (
                f"{url} does not accept the API key ({said}); give it with --api-key, OPENAI_API_KEY or HEADWAY_API_KEY"
            )
        if failure.kind is FailureKind.TLS:
            return f"{url}: {said}; --insecure accepts any certificate, and a server without TLS needs http://"
        if failure.kind is FailureKind.CONNECT:
            return (
                f"no server at {url} ({said}); start one with `headway serve`, name another with --base-url, or wait "
                "with --ready-check-timeout-sec"
            )
        if failure.status is not None:
            return f"the server at {url} is not ready ({said}); --ready-check-timeout-sec waits for it"
        return f"{url} gives no answer that can be read ({failure.kind}: {said}); is --base-url the server's?"
