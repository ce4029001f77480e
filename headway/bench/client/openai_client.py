"""Requests of a workload, sent to an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Self

from headway.bench.client.answer import StreamedAnswer
from headway.bench.client.failures import RequestFailed
from headway.bench.client.http_client import HttpClient
from headway.bench.client.other_answers import MessagesAnswer, ResponsesAnswer
from headway.bench.client.request_body import BodyBuilder, num_answers
from headway.bench.client.validity import structure_of
from headway.bench.client.vector_answer import VectorAnswer
from headway.load.endpoint import Endpoint, lower_names
from headway.load.record import Failure, FailureKind, RequestRecord
from headway.load.request import PlannedRequest, Prompt


def receiver(
    endpoint: Endpoint,
    record: RequestRecord,
    prompt: Prompt,
    keep_text: bool = False,
    structure: Mapping[str, Any] | None = None,
) -> StreamedAnswer | VectorAnswer:
    """The receiver that writes the answer to a prompt into its record."""
    timings = endpoint.include_timings
    if endpoint.generates:
        kind = {"responses": ResponsesAnswer, "messages": MessagesAnswer}.get(endpoint.api, StreamedAnswer)
        return kind(record, keep_text=keep_text, keep_timings=timings, structure=structure)
    return VectorAnswer(record, num_answers(endpoint, prompt), keep_timings=timings)


class OpenAIClient:
    """Sends planned requests and fills their records. Made and used inside one event loop.

    Connections are kept open between requests. Use it as an async context manager, or call close().
    """

    def __init__(self, endpoint: Endpoint, *, keep_text: bool = False) -> None:
        """`keep_text` keeps the answers' text in the records."""
        self.endpoint = endpoint
        self._keep_text = keep_text
        self.http = HttpClient.to(endpoint)
        self._bodies = BodyBuilder(endpoint)
        self._head = self.http.head("POST", endpoint.route, endpoint.all_headers())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.http.close()
        await asyncio.sleep(0)  # lets the event loop see the connections' ends

    def _head_of(self, planned: PlannedRequest) -> bytes:
        endpoint = self.endpoint
        return self.http.head(
            "POST", endpoint.route, endpoint.all_headers(planned.tenant) | lower_names(planned.headers)
        )

    def close(self) -> None:
        """Close all connections; requests under way end as CUT."""
        self.http.close()

    async def send(self, planned: PlannedRequest, record: RequestRecord, prompt: Prompt | None = None) -> None:
        """Send one request and fill its record from `sent_ns` on; return when it has ended, in whatever way.

        Nothing that a server or the network does raises: it becomes `record.failure`, and what came before that
        stays in the record. When the task is cancelled, the connection is closed, the failure is ABANDONED, and
        CancelledError goes on. Where the plan's `cancel_after_s` is over first, it is CANCELLED.

        Args:
            prompt: in place of the plan's, as for a later turn of a conversation.
        """
        endpoint = self.endpoint
        body = self._bodies.body(planned, prompt)
        head = self._head_of(planned) if planned.headers or planned.tenant else self._head
        structure = structure_of(endpoint.extra_body, planned.extra_body)
        answer = receiver(endpoint, record, planned.prompt if prompt is None else prompt, self._keep_text, structure)
        record.sent_ns = record.connected_ns = time.monotonic_ns()
        try:
            async with asyncio.timeout(planned.cancel_after_s):
                await self.http.exchange(head, body, answer, endpoint.timeout_s)
            record.failure = answer.failure(time.monotonic_ns())
        except TimeoutError:
            message = f"its client gave it up {planned.cancel_after_s:g} s after it was sent"
            record.failure = Failure(FailureKind.CANCELLED, message)
        except RequestFailed as error:
            record.failure = error.failure
        except asyncio.CancelledError:
            record.failure = Failure(FailureKind.ABANDONED, "stopped before its end")
            raise
        finally:
            record.end_ns = record.end_ns or time.monotonic_ns()
            answer.settle()

    def busy_sockets(self) -> list[int]:
        """File descriptors of the connections with a request under way."""
        return self.http.busy_sockets()
