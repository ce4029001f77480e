"""The shapes of what is measured: percentiles with their uncertainty, distributions, summaries of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.load.record import FailureKind

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True)
class Percentile:
    """One percentile of one metric."""

    p: float  # 0 < p < 100
    # None when the claim is refused: there are fewer samples than even independent ones would have to be.
    value: float | None
    # low, high: bounds of the confidence interval; None where the effective number of samples is too small for one.
    low: float | None
    high: float | None
    needs: int | None = None  # samples that both bounds would take, where one is missing; None otherwise
    client_ms: float = 0.0  # how much of it the client's own delays may be, at most; in ms as the value

    @property
    def client_share(self) -> float:
        """How much of the value `client_ms` may be: 1 at most, also of a value of 0; 0 where there is no value."""
        return min(self.client_ms / max(self.value, 1e-6), 1.0) if self.value is not None else 0.0


@dataclass(frozen=True, slots=True)
class Distribution:
    """Distribution of one metric, in its own unit. `effective_count` is how many independent samples tell as much."""

    count: int
    effective_count: float
    mean: float
    std: float
    minimum: float
    maximum: float
    percentiles: tuple[Percentile, ...]

    def percentile(self, p: float) -> Percentile | None:
        return next((each for each in self.percentiles if each.p == p), None)


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a run, in time.monotonic_ns(): requests that were due in it belong to it.

    `reason` says how it was found, or why none was: then `found` is False and the window is the whole run.
    """

    began_ns: int
    ended_ns: int
    found: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Attainment:
    """How many requests met their objective."""

    objectives: dict[str, float]  # {"ttft": 200.0, ...} in ms
    # met, total: requests; failed ones have missed.
    met: int
    total: int
    # low, high: confidence interval of met / total.
    low: float
    high: float
    # requests_per_s, tokens_per_s: goodput: of the requests that met it.
    requests_per_s: float
    tokens_per_s: float
    missed_by: dict[str, int]  # how many requests missed each objective, and "failed"

    @property
    def share(self) -> float:
        return self.met / self.total if self.total else 0.0


@dataclass(frozen=True, slots=True)
class Validity:
    """How many answers had the structure that their requests asked for: JSON, a schema, calls of tools."""

    asked: int
    valid: int
    # low, high: confidence interval of valid / asked.
    low: float
    high: float
    wrong: dict[str, int]  # how many had each fault

    @property
    def share(self) -> float:
        return self.valid / self.asked


@dataclass(frozen=True, slots=True)
class Graphs:
    """Requests that wait for each other: conversations, agents."""

    # complete, total: graphs of which all requests were answered, and all that were begun.
    complete: int
    total: int
    # From when the first request of a complete graph was due to the last token of all its requests, with what tools and
    # users took in between; None where no graph is complete.
    makespan_ms: Distribution | None
    # The part of it in which a request of the graph was due and not answered; the rest is of tools and users.
    served_ms: Distribution | None

    @property
    def served_share(self) -> float | None:
        """The part of all makespans in which an answer was waited for."""
        if self.served_ms is None or self.makespan_ms is None or not self.makespan_ms.mean:
            return None
        return self.served_ms.mean / self.makespan_ms.mean


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of one view of a run (the whole, the steady state, one class)."""

    name: str
    window: Window
    completed: int
    failed: int
    failures: dict[str, int]  # the failures by kind
    # from_schedule, from_send: metric to distribution, latency counted from when a request was due (no coordinated
    # omission) and from when it was sent. Keys: ttft_ms, tpot_ms, itl_ms, e2el_ms, normalized_latency_ms (E2EL per
    # output token). tpot_ms and itl_ms are the same in both.
    from_schedule: dict[str, Distribution]
    from_send: dict[str, Distribution]
    # The times by phase of the server's ledger (where given), plus "queue" and "stall" as sums.
    phases_ms: dict[str, Distribution]
    # Request_throughput, output_throughput, total_token_throughput (per second), max_output_tokens_per_s,
    # max_concurrent_requests, mean_concurrent_requests.
    rates: dict[str, float]
    tokens: dict[str, int]  # prompt, output, cached; and "chunks"
    resent: int = 0  # requests that were sent again on a new connection, answered or not
    cancelled: int = 0  # requests that their own clients gave up, as planned; they have not failed
    # "output_tokens" and "steps" of an answer; empty where nothing was generated.
    answers: dict[str, Distribution] = field(default_factory=dict)
    ended_by: dict[str, int] = field(default_factory=dict)  # how many answers ended for each finish_reason
    attainment: Attainment | None = None  # None where no objective was given
    # cost_per_million_output_tokens, cost_per_million_tokens: None where no price was given.
    cost_per_million_output_tokens: float | None = None
    cost_per_million_tokens: float | None = None
    # Tokens/s of each request after its first token, 1000 / tpot_ms; None where no request has a TPOT.
    tps: Distribution | None = None
    # The time from the send to the first token that is no reasoning, of requests whose answer begins with reasoning;
    # None where none does.
    first_answer_ms: Distribution | None = None
    validity: Validity | None = None  # None where no request asked for a structure
    # None where no request waits for another, and of views of a part of the time or by length.
    graphs: Graphs | None = None
    tokens_per_joule: float | None = None  # output tokens; None where power cannot be read
    notes: list[str] = field(default_factory=list)

    @property
    def refused(self) -> int:
        """The number of failed requests that the server refused because of one of its limits."""
        return self.failures.get(FailureKind.REFUSED, 0)
