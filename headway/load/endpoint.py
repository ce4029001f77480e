"""An OpenAI-compatible endpoint: how it is asked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

from headway.load.errors import BenchError

Api = Literal["completions", "chat", "responses", "messages", "embeddings", "rerank", "score"]
ROUTES: dict[str, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "embeddings": "/v1/embeddings",
    "rerank": "/v1/rerank",
    "score": "/v1/score",
}
CHATS = ("chat", "responses", "messages")
GENERATING = ("completions", *CHATS)
ANTHROPIC_VERSION = "2023-06-01"
DEFAULT_PORTS = {"http": 80, "https": 443}
_FRAMING_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection", "accept-encoding"})


@dataclass(frozen=True, slots=True)
class Address:
    """The address to connect to, and the path to ask for."""

    scheme: str
    host: str  # as it is looked up; an IPv6 address without brackets
    port: int
    host_header: str  # the value of the Host header
    prefix: str  # path in front of every route, "" or "/like/this"; without a final /v1

    @property
    def is_tls(self) -> bool:
        return self.scheme == "https"


def parse_base_url(base_url: str) -> Address:
    """`http://host:8000`, with or without a path in front of the routes, with or without /v1 at its end.

    Raises:
        BenchError: it is no such URL.
    """

    def wrong(what: str) -> BenchError:
        return BenchError(f"--base-url is {base_url!r}: {what}; give it like http://127.0.0.1:8000")

    if not base_url.isascii() or any(character.isspace() for character in base_url):
        raise wrong("only ASCII without blanks is allowed")
    try:
        parts = urlsplit(base_url)
        port = parts.port
    except ValueError as error:
        raise wrong(str(error)) from None
    if parts.scheme not in DEFAULT_PORTS:
        raise wrong("it must begin with http:// or https://")
    if parts.username is not None or parts.password is not None:
        raise BenchError("--base-url has a user name or password in it; give the key with --api-key")
    if not parts.hostname:
        raise wrong("it has no host")
    if parts.query or parts.fragment:
        raise wrong("it must end before ? and #")
    if port == 0:
        raise wrong("port 0 cannot be connected to")
    return _address(parts, parts.hostname, port or DEFAULT_PORTS[parts.scheme])


def _address(parts: SplitResult, host: str, port: int) -> Address:
    shown = f"[{host}]" if ":" in host else host
    host_header = shown if port == DEFAULT_PORTS[parts.scheme] else f"{shown}:{port}"
    prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return Address(parts.scheme, host, port, host_header, prefix)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How a server is asked. The one that a given server understands is made by `probe`.

    Raises:
        BenchError: a value cannot be used.
    """

    # Http:// or https://, host, port, and a path if the routes have one in front; a final /v1 is optional.
    base_url: str
    model: str | None = None  # None leaves the field out
    api: Api = "completions"
    path: str | None = None  # route in place of the API's own
    api_key: str | None = field(default=None, repr=False)  # sent as a bearer token
    # In place of it, by the tenant of a request.
    tenant_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    # Further ones, or others than the client's own.
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    ignore_eos: bool = False  # ask for exactly the planned number of tokens
    extra_body: Mapping[str, Any] = field(default_factory=dict)  # further fields of every body; those of a request win
    cache_salt: str = ""  # prompts share cached prefixes only with prompts of the same salt; "" leaves the field out
    include_timings: bool = False  # ask for Headway's `timings`. Others than Headway may refuse it.
    # include_usage, continuous_usage: `stream_options`, the second with vLLM's `continuous_usage_stats`.
    include_usage: bool = True
    continuous_usage: bool = False
    # Max_tokens or max_completion_tokens.
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    timeout_s: float = 3600.0  # the longest time of a whole request, from before it connects to the end of its response
    connect_timeout_s: float = 30.0  # the longest time of a new connection
    insecure: bool = False  # accept any TLS certificate

    def __post_init__(self) -> None:
        parse_base_url(self.base_url)
        if self.path is not None and not (self.path.startswith("/") and _is_header_text(self.path, blanks=False)):
            raise BenchError(f"the endpoint's path is {self.path!r}; it must begin with / and have no blanks")
        for name, seconds in (("timeout", self.timeout_s), ("connect timeout", self.connect_timeout_s)):
            if not 0 < seconds < math.inf:
                raise BenchError(f"the {name} is {seconds:g} s; it must be a finite number above 0")
        for key in (self.api_key, *self.tenant_keys.values()):
            if key is not None and not _is_header_text(key, blanks=False):
                wrong = "has characters that a header cannot carry; give it without blanks" if key else "is empty"
                raise BenchError(f"the API key {wrong}")
        check_headers(self.headers)

    @property
    def address(self) -> Address:
        return parse_base_url(self.base_url)

    @property
    def generates(self) -> bool:
        """Whether answers are texts: those of the other APIs are vectors or scores, in one piece."""
        return self.api in GENERATING

    @property
    def is_chat(self) -> bool:
        """Whether prompts are messages, around which the server puts a chat template."""
        return self.api in CHATS

    @property
    def length_field(self) -> str:
        """The field of a body that bounds the answer's tokens."""
        return "max_output_tokens" if self.api == "responses" else self.max_tokens_field

    @property
    def route(self) -> str:
        return self.path or ROUTES[self.api]

    def all_headers(self, tenant: str = "") -> dict[str, str]:
        """The headers of each request of a tenant, without those that HTTP itself needs; names in lower case."""
        headers = {"content-type": "application/json", "accept": "text/event-stream, application/json"}
        if (key := self.tenant_keys.get(tenant, self.api_key)) is not None:
            headers["authorization"] = f"Bearer {key}"
            if self.api == "messages":
                headers["x-api-key"] = key
        if self.api == "messages":
            headers["anthropic-version"] = ANTHROPIC_VERSION
        return headers | lower_names(self.headers)


def lower_names(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): str(value) for name, value in headers.items()}


def check_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The same. Raises BenchError where one of them cannot be sent, or is HTTP's own."""
    for name, value in headers.items():
        if not _is_header_text(name, blanks=False) or ":" in name or not _is_header_text(str(value)):
            raise BenchError(f"the header {name!r} cannot be sent: only printable ASCII is allowed")
        if name.lower() in _FRAMING_HEADERS:
            raise BenchError(f"the header {name!r} is the client's own; leave it out")
    return dict(headers)


def _is_header_text(text: str, blanks: bool = True) -> bool:
    return bool(text) and text.isascii() and text.isprintable() and (blanks or " " not in text)
