"""An answer with vectors or scores, which comes in one piece, into its record.

Its end counts as its only chunk, of no tokens: there is one latency, from the send until it was complete. What is
checked is that there are as many vectors or scores as were asked for, and that each holds something.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headway.bench.client.answer import MAX_ERROR_BYTES, TokenCount
from headway.bench.client.connection import Receiver
from headway.bench.client.failures import error_text, failure_of_status, one_line
from headway.load.record import Failure, FailureKind, RequestRecord


class _Usage(msgspec.Struct):
    prompt_tokens: TokenCount | None = None
    total_tokens: TokenCount | None = None


class _Entry(msgspec.Struct):
    """An entry in a list of embeddings, scores or rankings. A vector stays in JSON, as it was sent."""

    embedding: msgspec.Raw = msgspec.Raw(b"")
    score: float | None = None
    relevance_score: float | None = None

    @property
    def is_whole(self) -> bool:
        vector = bytes(self.embedding).strip()
        if not vector:
            return self.score is not None or self.relevance_score is not None
        return vector[:1] in b'["' and len(vector) > 2 and b"null" not in vector


class _Answer(msgspec.Struct):
    data: list[_Entry] | None = None
    results: list[_Entry] | None = None
    usage: _Usage | None = None
    timings: Any = None
    error: Any = None


_decode = msgspec.json.Decoder(_Answer).decode


class VectorAnswer(Receiver):
    """Receives one response. After its end, failure() says whether it was an answer.

    Args:
        wanted: vectors or scores that were asked for.
        keep_timings: keep Headway's `timings` object.
    """

    def __init__(self, record: RequestRecord, wanted: int, *, keep_timings: bool = False) -> None:
        super().__init__(record)
        self._wanted = wanted
        self._keep_timings = keep_timings
        self._pieces: list[bytes] = []
        self._last_ns = 0

    def body(self, data: bytes, now_ns: int) -> None:
        self._last_ns = now_ns
        self._pieces.append(data)

    def settle(self) -> None:
        """Do nothing: nothing is known of an answer that failed in the middle."""

    def failure(self, now_ns: int) -> Failure | None:
        """How a response failed that has ended; None when it was an answer."""
        record, body = self.record, b"".join(self._pieces)
        record.end_ns = self._last_ns or now_ns
        if not 200 <= self.status < 300:
            return failure_of_status(self.status, self.response_headers, body[:MAX_ERROR_BYTES])
        try:
            answer = _decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            shown = body[:80].decode(errors="replace")
            return self._malformed(f"not an answer with vectors or scores: {error} in {shown!r}")
        if answer.error is not None:
            return Failure(FailureKind.STREAM_ERROR, one_line(error_text({"error": answer.error})), self.status)
        entries = answer.results if answer.data is None else answer.data
        if entries is None:
            return self._malformed(f"neither data nor results in {body[:80].decode(errors='replace')!r}")
        if len(entries) != self._wanted or not all(entry.is_whole for entry in entries):
            whole = sum(entry.is_whole for entry in entries)
            return self._malformed(f"{whole} vectors or scores came, and {self._wanted} were asked for")
        self._take(answer)
        return None

    def _take(self, answer: _Answer) -> None:
        record, usage = self.record, answer.usage
        if usage is not None:
            record.prompt_tokens = usage.total_tokens if usage.prompt_tokens is None else usage.prompt_tokens
        record.output_tokens = 0
        record.chunk_ns.append(record.end_ns)
        record.chunk_tokens.append(0)
        if self._keep_timings and isinstance(answer.timings, dict):
            record.timings = answer.timings

    def _malformed(self, message: str) -> Failure:
        return Failure(FailureKind.MALFORMED, one_line(message), self.status)
