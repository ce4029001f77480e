"""What the gateway reads of a request: enough to route, admit and charge it. The backend checks the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from headway.policy.fleet.backend import Ask
from headway.server.errors import bad_request

# Bytes of JSON that make a token, about, until answers have told better; and tokens that an output may have where the
# request does not say.
BYTES_A_TOKEN, OUTPUT_TOKENS = 4, 4096
MOST_CHOICES = 4096
_FIELD = re.compile(r"`?\$\.([\w.\[\]]+)`?")
_NULL = msgspec.Raw(b"null")


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Body(msgspec.Struct):
    """The fields of a body that the gateway looks at. Raw ones are not made into objects."""

    model: str | None = None
    stream: bool | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    stream_options: StreamOptions | None = None
    service_class: str | None = None
    service_tier: str | None = None
    include_timings: bool | None = None
    previous_response_id: str | None = None
    input_file_id: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    prompt: msgspec.Raw = _NULL
    messages: msgspec.Raw = _NULL
    input: msgspec.Raw = _NULL
    documents: msgspec.Raw = _NULL
    system: msgspec.Raw = _NULL
    instructions: msgspec.Raw = _NULL
    tools: msgspec.Raw = _NULL

    @property
    def content(self) -> bytes:
        """What the model reads, in the order in which templates write it, as JSON."""
        parts = (self.tools, self.system, self.instructions, self.prompt, self.messages, self.input, self.documents)
        found = b"".join([bytes(part) for part in parts if part is not _NULL])
        return found.rstrip(b" ]}\n")  # what ends a list is where the next turn of a conversation goes on

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def most_output(self) -> int:
        """The most tokens of one choice."""
        return self.max_completion_tokens or self.max_tokens or self.max_output_tokens or OUTPUT_TOKENS


_decode_body = msgspec.json.Decoder(Body).decode


def body_of(raw: bytes | bytearray) -> Body:
    """The body of a request. Raises ApiError 400."""
    try:
        body = _decode_body(raw)
    except msgspec.ValidationError as error:
        field = _FIELD.search(str(error))
        raise bad_request(f"the body is not as it should be: {error}", field[1] if field else None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None
    if body.n is not None and not 1 <= body.n <= MOST_CHOICES:
        raise bad_request(f"n is {body.n}; it must be from 1 to {MOST_CHOICES}", "n")
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if (value := getattr(body, name)) is not None and not 0 <= value < 2**31:
            raise bad_request(f"{name} is {value}; it must be from 0 to 2147483647", name)
    return body


def with_usage(raw: bytes | bytearray) -> bytes:
    """The body of a stream, which also asks for what the request has used."""
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    options = fields.get("stream_options", _NULL)
    given = {} if bytes(options) == b"null" else msgspec.json.decode(options, type=dict[str, msgspec.Raw])
    fields["stream_options"] = msgspec.Raw(msgspec.json.encode(given | {"include_usage": True}))
    return msgspec.json.encode(fields)


def ask_of(body: Body, headers: Mapping[bytes, bytes], service_class: str, ttft_ms: float) -> Ask:
    """What routers see of a request.

    Args:
        headers: may name the session.
        ttft_ms: milliseconds that are left until its first token is due.
    """
    session = headers.get(b"x-session-id", b"").decode("latin-1") or body.prompt_cache_key or ""
    salt = f"{body.model or ''}\0{body.cache_salt or ''}"
    return Ask(body.content, BYTES_A_TOKEN, salt, service_class, session[:256], ttft_ms, body.choices)


Terminal = Literal["", "openai", "responses", "messages"]


@dataclass(frozen=True, slots=True)
class Api:
    """A route that is passed on."""

    streams: Terminal = ""  # it may answer with a stream, whose errors are those of this API
    is_work: bool = True  # it uses the model, and is admitted and charged
    stores: str = ""  # what it stores at a backend, or asks for there: responses, files or batches
    is_json: bool = True  # its answers are JSON


# What Api.stores may be of which only some backends have it.
OF_BATCHES = ("files", "batches")
POSTS = {
    "/v1/chat/completions": Api("openai"),
    "/v1/completions": Api("openai"),
    "/v1/responses": Api("responses", stores="responses"),
    "/v1/messages": Api("messages"),
    "/v1/embeddings": Api(),
    "/v1/score": Api(),
    "/score": Api(),
    "/v1/rerank": Api(),
    "/v2/rerank": Api(),
    "/rerank": Api(),
    "/tokenize": Api(is_work=False),
    "/detokenize": Api(is_work=False),
    "/v1/messages/count_tokens": Api(is_work=False),
    "/v1/files": Api(is_work=False, stores="files"),
    "/v1/batches": Api(is_work=False, stores="batches"),
}
