"""What was seen of a run: a record for each request, and the state of the client itself.

All times are time.monotonic_ns() of the client.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from headway.load.request import PlannedRequest


class FailureKind(StrEnum):
    """Why a request did not give an answer. Names are stable: they are keys of the results."""

    CONNECT = "connect"  # refused, unreachable, name not found
    TLS = "tls"
    TIMEOUT = "timeout"  # the request's own limit passed
    AUTH = "auth"  # 401, 403
    NOT_FOUND = "not_found"  # 404: route or model unknown
    REFUSED = "refused"  # refused by a limit that the server keeps on purpose: typed, with Retry-After
    RATE_LIMITED = "rate_limited"  # any other 429
    CLIENT_ERROR = "client_error"  # any other 4xx, and 3xx
    SERVER_ERROR = "server_error"  # 5xx
    CUT = "cut"  # the connection ended before the stream did
    MALFORMED = "malformed"  # not HTTP, not SSE, not JSON, or not an OpenAI object
    STREAM_ERROR = "stream_error"  # an error event inside the stream
    NO_TOKENS = "no_tokens"  # it ended well, without a token
    DRAIN_LIMIT = "drain_limit"  # had not ended when the run had waited for it as long as it may
    ABANDONED = "abandoned"  # still running, or never sent, when the run was interrupted
    CANCELLED = "cancelled"  # cancelled by its client, as planned: no failure of the server


@dataclass(frozen=True, slots=True)
class Failure:
    kind: FailureKind
    message: str  # one line
    status: int | None = None  # HTTP status


@dataclass(slots=True)
class RequestRecord:
    """One request as the client saw it; a time of 0 has not come.

    Args:
        index, class_name, tenant, graph: the fields of the PlannedRequest.
        graph_size: requests of its graph; 1 where it is alone.
        scheduled_ns: when it was due. In a closed loop, and for a later turn, when it became due.
        sent_ns: just before its first byte was handed to the socket (a new connection's set-up comes after).
        connected_ns: when its connection stood; equal to sent_ns where one was kept open.
        headers_ns: when the response's status line and headers were in.
        chunk_ns: when each chunk that brought tokens came; of vectors and scores when they were complete.
        chunk_tokens: tokens of each such chunk where the server says so (continuous usage), else 1 each; 0 of vectors.
        tokens_per_chunk_known: chunk_tokens are the server's word.
        answer_ns: when the first chunk came that was no reasoning, where reasoning had come before.
        end_ns: when the response was complete, or failed.
        prompt_tokens, output_tokens, cached_tokens: their numbers by the server's `usage`; None where it gave none.
        planned_prompt_tokens, planned_output_tokens: what was asked for.
        resent: how often it was sent again on a new connection, as the server had closed the one that was kept open.
        timings: Headway's `timings` object, where asked for and given.
        text, calls: the answer and its calls of tools (as `tool_calls` of a message), where asked to keep them.
        invalid: what is wrong with an answer that was to have a structure, "" where nothing is; None of others.
    """

    index: int
    class_name: str = ""
    planned_prompt_tokens: int | None = None
    planned_output_tokens: int = 0
    scheduled_ns: int = 0
    sent_ns: int = 0
    connected_ns: int = 0
    headers_ns: int = 0
    chunk_ns: array[int] = field(default_factory=lambda: array("q"))
    chunk_tokens: array[int] = field(default_factory=lambda: array("i"))
    tokens_per_chunk_known: bool = False
    answer_ns: int = 0
    end_ns: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    resent: int = 0
    failure: Failure | None = None
    timings: dict[str, Any] | None = None
    text: str | None = None
    invalid: str | None = None
    tenant: str = ""
    graph: int | None = None
    graph_size: int = 1
    calls: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, planned: PlannedRequest, due_ns: int) -> Self:
        """Make the record of a request that is due at `due_ns` and not sent yet."""
        return cls(
            index=planned.index,
            class_name=planned.class_name,
            planned_prompt_tokens=planned.prompt_tokens,
            planned_output_tokens=planned.output_tokens,
            scheduled_ns=due_ns,
            tenant=planned.tenant,
            graph=planned.graph,
            graph_size=planned.graph_size,
        )

    @property
    def ok(self) -> bool:
        return self.failure is None and bool(self.chunk_ns)

    @property
    def is_vector(self) -> bool:
        """Whether the answer was vectors or scores: it has an end, and no tokens."""
        return bool(self.chunk_tokens) and not any(self.chunk_tokens)

    @property
    def cancelled(self) -> bool:
        return self.failure is not None and self.failure.kind is FailureKind.CANCELLED

    @property
    def failed(self) -> bool:
        return not (self.ok or self.cancelled)

    @property
    def failure_kind(self) -> FailureKind:
        """The kind of failure of a request that was not answered."""
        return self.failure.kind if self.failure is not None else FailureKind.NO_TOKENS

    @property
    def reason(self) -> str:
        """Why there was no answer, in one line."""
        return self.failure.message if self.failure is not None else "its answer had no tokens"

    @property
    def first_token_ns(self) -> int:
        return self.chunk_ns[0] if self.chunk_ns else 0

    @property
    def last_token_ns(self) -> int:
        return self.chunk_ns[-1] if self.chunk_ns else 0

    @property
    def tokens(self) -> int:
        """Output tokens by `usage`, or by chunks where the server gave no usage."""
        return self.output_tokens if self.output_tokens is not None else sum(self.chunk_tokens)


@dataclass(slots=True)
class ClientHealth:
    """Whether the client kept up, so that its own delays are not taken for the server's."""

    # How late the event loop ran a timer, one sample every `sample_interval_s`.
    loop_lag_ms: list[float] = field(default_factory=list)
    # Bytes that waited unread in the sockets, summed over them, at each sample.
    backlog_bytes: list[int] = field(default_factory=list)
    start_lag_ms: list[float] = field(default_factory=list)  # sent_ns - scheduled_ns of each request of an open loop
    cpu_share: float = 0.0  # processor seconds of this process per second of the run (1.0 is a whole core)
    sample_interval_s: float = 0.01
    # Why the run as a whole is client-bound, a sentence each; empty when it is not.
    reasons: list[str] = field(default_factory=list)

    @property
    def bound(self) -> bool:
        return bool(self.reasons)


@dataclass(slots=True)
class RunResult:
    """One run: what was asked (`settings`), what was seen."""

    # JSON-able: base_url, model, endpoint, workload, arrivals, request_rate (requests/s; None where there is none),
    # max_concurrency, seed, goodput, ... as the command line said them.
    settings: dict[str, Any]
    records: list[RequestRecord]  # the records of the measured requests (no warm-ups), by index
    # began_ns, ended_ns: the start of the schedule, and the end of the last request.
    began_ns: int
    ended_ns: int
    client: ClientHealth
    interrupted: bool = False  # stopped by the user before all requests were done
    # What the server says of itself: name, version, model, max_model_len; and `metrics`, the change of its own metrics
    # over the run, where it has some.
    server: dict[str, Any] = field(default_factory=dict)
    # The energy of the machine over the run, where power can be read; None elsewhere.
    energy_joules: float | None = None
    # Short requests that were sent beside the load; they are in none of its numbers.
    probes: list[RequestRecord] = field(default_factory=list)

    @property
    def duration_s(self) -> float:
        return (self.ended_ns - self.began_ns) / 1e9
