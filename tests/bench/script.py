"""What the scripted server does with one request: written by a test, read by the server."""

from __future__ import annotations

from typing import Any

import msgspec

FAILURES = (
    "",
    "status",  # answers with `status`, instead of a stream
    "redirect",  # answers 307 with a Location
    "cut",  # closes the connection after `fail_at` chunks
    "reset",  # the same with a TCP reset
    "end",  # ends the body properly after `fail_at` chunks, without the rest of the stream
    "malformed_sse",  # a line that is not server-sent events, after `fail_at` chunks
    "malformed_json",  # an event whose data is not JSON, after `fail_at` chunks
    "not_openai",  # an event whose data is JSON, and not an object of OpenAI's
    "error_event",  # {"error": {...}} as an event, after `fail_at` chunks
    "html",  # 200 with a page of HTML
    "garbage",  # bytes that are not HTTP
    "close",  # closes the connection without any byte of a response
    "close_if_reused",  # the same, unless it is the connection's first request
    "half_headers",  # closes it in the middle of the headers
    "hang",  # after `fail_at` chunks nothing more comes; with -1 not even headers
    "bad_chunk",  # a chunk size that is not a number, after `fail_at` chunks
)


class Script(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Times are in seconds. A stream is `chunks` chunks of tokens: the first `ttft_s` after the request came, each
    next one `gap_s`, or its entry of `gaps_s`, after the one before.

    Args:
        id: under which GET /log tells what happened; else the request's x-request-id, else its number.
        headers_delay_s: the status line and headers come this long after the request.
        chunks: None for max_tokens of the request (by `tokens_per_chunk`).
        tokens_per_chunk: of every chunk, or of each.
        texts: of each chunk; "tok " for all that have none.
        field: of a chat's delta: content, reasoning, reasoning_content, tool_calls or token_ids.
        role_first: a chat's stream begins with a delta that has only the role, together with the headers.
        usage, continuous_usage: whether the server honours a request for them.
        prompt_tokens: what usage says; None for the number of words, or of token ids, in the prompt.
        finish_apart: the finish_reason comes in a chunk of its own, without text, after the last token.
        timings: put in the last chunk of a choice, where the request has include_timings.
        done: whether the stream ends with [DONE].
        newline: how lines end: "\\n", "\\r\\n" or "\\r".
        comments: a comment comes before each event.
        framing: of the body: "chunked", "length" or "close".
        write_bytes: bytes in each write, with a millisecond between them; 0 for whole chunks.
        interim: a 100 and a 103 come before the response.
        close: the connection is closed after the response, which says so.
        drop: the connection is closed after the response, which does not say so.
        fail, fail_at, status, retry_after_s, message: what goes wrong (FAILURES), and after how many chunks.
        precise: the last millisecond before each chunk is waited for busily.
    """

    id: str = ""
    headers_delay_s: float = 0.0
    ttft_s: float = 0.0
    gap_s: float = 0.0
    gaps_s: list[float] | None = None
    chunks: int | None = None
    tokens_per_chunk: int | list[int] = 1
    texts: list[str] | None = None
    field: str = "content"
    role_first: bool = True
    usage: bool = True
    continuous_usage: bool = True
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str = "length"
    finish_apart: bool = False
    timings: dict[str, Any] | None = None
    done: bool = True
    newline: str = "\n"
    comments: bool = False
    framing: str = "chunked"
    write_bytes: int = 0
    interim: bool = False
    close: bool = False
    drop: bool = False
    fail: str = ""
    fail_at: int = 0
    status: int = 500
    retry_after_s: int | None = None
    message: str = "scripted"
    precise: bool = False

    def __post_init__(self) -> None:
        if self.fail not in FAILURES:
            raise ValueError(f"fail is {self.fail!r}; it must be one of {FAILURES}")
        if self.framing not in ("chunked", "length", "close"):
            raise ValueError(f"framing is {self.framing!r}; it must be chunked, length or close")

    def tokens_of(self, chunk: int) -> int:
        return self.tokens_per_chunk if isinstance(self.tokens_per_chunk, int) else self.tokens_per_chunk[chunk]

    def text_of(self, chunk: int) -> str:
        return self.texts[chunk] if self.texts is not None and chunk < len(self.texts) else "tok "

    def gap_after(self, chunk: int) -> float:
        return self.gaps_s[chunk] if self.gaps_s is not None and chunk < len(self.gaps_s) else self.gap_s


def script(**fields: Any) -> str:
    """A prompt that tells the scripted server what to do."""
    return msgspec.json.encode(Script(**fields)).decode()
