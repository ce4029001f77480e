"""A streamed answer, into its record as it comes.

What counts as a token chunk. Latencies need the time of each chunk that brought tokens, and servers send others too:

- Where each chunk carries `usage` (`stream_options.continuous_usage_stats`), a chunk counts if and only if
  `completion_tokens` grew with it, and for as many tokens as it grew. This is the server's own word, and exact when a
  chunk brings several tokens or a token brings no text. A server whose first text comes with a count of 0 only fills
  in the field, and is read as the others.
- Elsewhere a chunk counts for one when it has text: `text` of a completion; `content`, `reasoning`,
  `reasoning_content`, `refusal` or `tool_calls` of a chat's delta; or token ids. In completions a chunk without text
  and without a finish_reason counts too: its token is part of a character, or special. A delta with only a role, or
  nothing, does not count: it may be sent before the first token is computed.
- A chunk with only a finish_reason does not count, unless it is all there was and `usage` says that there were tokens.
- The closing chunk with an empty `choices` holds the usage of the whole, and never counts.

The number of output tokens is `usage`'s wherever there is one, and never the number of chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec

from headway.bench.client.connection import Receiver
from headway.bench.client.failures import RequestFailed, error_text, failure_of_status, one_line
from headway.bench.client.sse import EventParser, MalformedEvents
from headway.bench.client.validity import Calls, wrong_with
from headway.load.record import Failure, FailureKind, RequestRecord

MAX_ERROR_BYTES = 64 * 1024
MAX_TOKENS = 2**31 - 1  # most tokens of a request; a larger number is no count
_NOT_STREAMS = (b"application/json", b"text/html")


TokenCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


class TokenDetails(msgspec.Struct):
    cached_tokens: TokenCount | None = None


class Usage(msgspec.Struct):
    prompt_tokens: TokenCount | None = None
    completion_tokens: TokenCount | None = None
    prompt_tokens_details: TokenDetails | None = None


class Delta(msgspec.Struct):
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    refusal: Any = None
    tool_calls: Any = None
    token_ids: Any = None

    @property
    def reasons(self) -> bool:
        return bool(self.reasoning or self.reasoning_content)

    @property
    def answers(self) -> bool:
        return bool(self.content or self.tool_calls or self.refusal)

    @property
    def brings_tokens(self) -> bool:
        return self.answers or self.reasons or bool(self.token_ids)


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: Any = None

    @property
    def shows_tokens(self) -> bool:
        return bool(self.text or self.token_ids) or (self.delta is not None and self.delta.brings_tokens)

    @property
    def brings_tokens(self) -> bool:
        unseen = self.delta is None and self.text is not None and self.finish_reason is None
        return unseen or self.shows_tokens

    @property
    def content(self) -> str:
        content = self.text if self.delta is None else self.delta.content
        return content if isinstance(content, str) else ""


class Chunk(msgspec.Struct):
    """What a load generator reads of a chunk, of completions and of chats alike."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    timings: Any = None
    error: Any = None
    object: str | None = None
    message: Any = None


_decode = msgspec.json.Decoder(Chunk).decode


class StreamedAnswer(Receiver):
    """Receives one response. After its end, check() says whether it was an answer.

    Args:
        keep_text: collect the answer's text in the record.
        keep_timings: keep Headway's `timings` object; other servers use the name for something else.
        structure: the fields of the request that ask for a structure, where any does: the answer is held against it.
    """

    def __init__(
        self,
        record: RequestRecord,
        *,
        keep_text: bool = False,
        keep_timings: bool = False,
        structure: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(record)
        self._keep_text, self._structure = keep_text, structure
        self._texts: list[str] | None = [] if keep_text or structure else None
        self._calls = Calls()
        self._keep_timings = keep_timings
        self._parser = EventParser()
        self._is_stream = False
        self._other_body = b""  # the body of a response that is no stream
        self._counted = 0
        self._continuous: bool | None = None
        self._finish_ns = 0
        self._reasons = False  # there was reasoning

    # --- as it comes --------------------------------------------------------------------------------

    def headers(self, status: int, headers: dict[bytes, bytes], now_ns: int) -> None:
        super().headers(status, headers, now_ns)
        media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        self._is_stream = 200 <= status < 300 and media_type not in _NOT_STREAMS

    def body(self, data: bytes, now_ns: int) -> None:
        """Raises RequestFailed when the bytes are no stream of chunks, or hold an error."""
        if not self._is_stream:
            if len(self._other_body) < MAX_ERROR_BYTES:
                self._other_body += data
        elif not self.is_satisfied:
            try:
                self._take_events(self._parser.feed(data), now_ns)
            except MalformedEvents as error:
                raise RequestFailed(FailureKind.MALFORMED, str(error)) from None

    def _take_events(self, events: list[tuple[bytes, bytes]], now_ns: int) -> None:
        for name, data in events:
            if data == b"[DONE]":
                self.is_satisfied = True
                self.record.end_ns = now_ns
                return
            try:
                chunks = self._chunks_of(data)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                if name == b"error":
                    raise RequestFailed(FailureKind.STREAM_ERROR, data.decode(errors="replace")) from None
                shown = data[:80].decode(errors="replace")
                raise RequestFailed(FailureKind.MALFORMED, f"not a chunk of OpenAI's: {error} in {shown!r}") from None
            for chunk in chunks:
                if name == b"error" or chunk.error is not None or chunk.object == "error":
                    said = error_text({"error": chunk.error, "message": chunk.message})
                    raise RequestFailed(FailureKind.STREAM_ERROR, said or data.decode(errors="replace"))
                self._take(chunk, now_ns)

    def _chunks_of(self, data: bytes) -> Iterable[Chunk]:
        """The chunk that an event brings; of other APIs, what their event comes to. Raises msgspec.DecodeError."""
        return (_decode(data),)

    def _take(self, chunk: Chunk, now_ns: int) -> None:
        record, usage = self.record, chunk.usage
        if usage is not None:
            self._take_usage(usage)
        if self._keep_timings and isinstance(chunk.timings, dict):
            record.timings = chunk.timings
        if not chunk.choices:
            return
        choice = chunk.choices[0]
        if choice.finish_reason is not None:
            record.finish_reason = choice.finish_reason
            self._finish_ns = now_ns
        if usage is not None and self._continuous is not False:
            tokens = (usage.completion_tokens or 0) - self._counted
            self._continuous = self._continuous or tokens > 0 or None
            if self._continuous is None and choice.shows_tokens:
                tokens, self._continuous = 1, False
        else:
            tokens = 1 if choice.brings_tokens else 0
            if tokens and usage is None and self._continuous is None:
                self._continuous = False
        if (delta := choice.delta) is not None and not record.answer_ns:
            if self._reasons and delta.answers:
                record.answer_ns = now_ns
            self._reasons = self._reasons or delta.reasons
        if tokens > 0:
            self._counted += tokens
            record.chunk_ns.append(now_ns)
            record.chunk_tokens.append(tokens)
        if self._texts is not None:
            self._texts.append(choice.content)
            if choice.delta is not None:
                self._calls.take(choice.delta.tool_calls)

    def _take_usage(self, usage: Usage) -> None:
        record = self.record
        if usage.completion_tokens is not None:
            record.output_tokens = usage.completion_tokens
        if usage.prompt_tokens is not None:
            record.prompt_tokens = usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            record.cached_tokens = usage.prompt_tokens_details.cached_tokens

    # --- at its end ---------------------------------------------------------------------------------

    def settle(self) -> None:
        """Put into the record what is only known at the end; also of an answer that failed in the middle."""
        self.record.tokens_per_chunk_known = bool(self._continuous)
        text = "".join(self._texts or ())
        if self._keep_text:
            self.record.text, self.record.calls = text, self._calls.as_message()
        if self._structure and self.record.ok:
            self.record.invalid = wrong_with(text, self._calls.made, self._structure)
            if self.record.invalid and self.record.finish_reason == "length":
                self.record.invalid += ", cut at its number of tokens"

    def failure(self, now_ns: int) -> Failure | None:
        """How a response failed that ended at `now_ns`; None when it was an answer."""
        record = self.record
        record.end_ns = record.end_ns or now_ns
        if not 200 <= self.status < 300:
            return failure_of_status(self.status, self.response_headers, self._other_body)
        if not self._is_stream:
            return self._failure_of_other_body()
        try:
            if not self.is_satisfied:
                self._take_events(self._parser.finish(), now_ns)
        except MalformedEvents as error:
            return Failure(FailureKind.MALFORMED, str(error))
        except RequestFailed as error:
            return error.failure
        if not self.is_satisfied and record.finish_reason is None:
            return Failure(FailureKind.CUT, "the stream ended without a finish_reason and without [DONE]")
        if not record.chunk_ns and record.output_tokens:
            record.chunk_ns.append(self._finish_ns or record.end_ns)
            record.chunk_tokens.append(1)
        if not record.chunk_ns:
            return Failure(FailureKind.NO_TOKENS, "the answer ended without an error, but without a token")
        return None

    def _failure_of_other_body(self) -> Failure:
        kind = self.response_headers.get(b"content-type", b"").decode("latin-1")
        try:
            said = error_text(msgspec.json.decode(self._other_body))
        except (ValueError, RecursionError):
            said = ""
        if said:
            return Failure(FailureKind.STREAM_ERROR, one_line(said), self.status)
        shown = self._other_body[:80].decode(errors="replace")
        message = f"{kind or 'no content-type'} instead of a stream of events: {shown!r}"
        return Failure(FailureKind.MALFORMED, one_line(message), self.status)
