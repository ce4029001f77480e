"""What was measured of a running server: the stages of a probe, its metrics, and its machine."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from headway.advisor.machine import MachineLook
from headway.load.measures.server_metrics import HITS, Increase, parse_metrics
from headway.load.record import RequestRecord

MS = 1e-6  # milliseconds of a nanosecond
# Names of metrics that the advisor looks for, of Headway, vLLM, SGLang and llama.cpp.
DRAFTED = ("spec_decode_num_draft_tokens_total",)
ACCEPTED = ("spec_decode_num_accepted_tokens_total",)
USUAL = {
    "ttft": ("time_to_first_token_seconds",),
    "tpot": ("request_time_per_output_token_seconds", "inter_token_latency_seconds", "time_per_output_token_seconds"),
    "e2e": ("e2e_request_latency_seconds",),
}


def increase(before: str, after: str) -> Increase | None:
    """What counters have grown by between two texts of /metrics; None where there is none, or one cannot be read.

    Args:
        before: empty to have what was counted since the server's start.
    """
    if not after.strip():
        return None
    try:
        return Increase(parse_metrics(before), parse_metrics(after))
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of a probe: requests sent together, and what the server counted meanwhile."""

    records: list[RequestRecord]
    counted: Increase | None = None

    @property
    def answered(self) -> list[RequestRecord]:
        return [record for record in self.records if record.ok]

    @property
    def ttft_ms(self) -> list[float]:
        """Milliseconds from sending to the first token, of each answered request."""
        return [(record.chunk_ns[0] - record.sent_ns) * MS for record in self.answered]

    @property
    def gaps_ms(self) -> list[float]:
        """Milliseconds between chunks of tokens, of all answered requests."""
        pairs = (itertools.pairwise(record.chunk_ns) for record in self.answered)
        return [(later - earlier) * MS for earlier, later in itertools.chain.from_iterable(pairs)]

    @property
    def tpot_ms(self) -> float | None:
        """The median of the mean time of a further token; None where no answer has two."""
        means = []
        for record in self.answered:
            tokens = sum(record.chunk_tokens)
            if tokens > 1:
                means.append((record.chunk_ns[-1] - record.chunk_ns[0]) * MS / (tokens - record.chunk_tokens[0] or 1))
        return median(means)

    @property
    def at_once(self) -> int:
        """The most requests that were between their first and their last token at the same time."""
        ends = [(record.chunk_ns[0], 1) for record in self.answered] + [(r.end_ns, -1) for r in self.answered]
        return max(itertools.accumulate(step for _, step in sorted(ends)), default=0)

    def phases_ms(self, *names: str) -> float | None:
        """Mean milliseconds of a request in these phases of Headway's ledger; None for servers that have none."""
        told = [record.timings["phases_ns"] for record in self.answered if record.timings is not None]
        return statistics.fmean(sum(each.get(name, 0) for name in names) * MS for each in told) if told else None

    @property
    def cached_tokens(self) -> float | None:
        """Prompt tokens that the server found in its prefix cache, by its usage or else its metrics; None: unknown."""
        told = [record.cached_tokens for record in self.answered if record.cached_tokens is not None]
        if told:
            return float(sum(told))
        return None if self.counted is None else self.counted.total(HITS)


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known of a server."""

    kind: str  # headway, vllm, sglang, llamacpp or unknown
    about: dict[str, Any]  # name, version, model and context length, as results have them
    lengths: tuple[int, int] = (0, 0)  # tokens of the short and of the long prompts of the probe
    alone: Stage = field(default_factory=lambda: Stage([]))  # short prompts, one after the other
    # first, again: long prompts, one after the other: each the first time, and once more.
    first: Stage = field(default_factory=lambda: Stage([]))
    again: Stage = field(default_factory=lambda: Stage([]))
    crowd: Stage = field(default_factory=lambda: Stage([]))  # many short prompts at once
    # Streams that had begun when several long prompts came; `prompts` are those.
    beside: Stage = field(default_factory=lambda: Stage([]))
    prompts: Stage = field(default_factory=lambda: Stage([]))
    # What the server counted in all of the probe; lifetime: since its start, before the probe.
    counted: Increase | None = None
    lifetime: Increase | None = None
    # Highest values while the crowd was there: running, waiting, kv_cache_usage.
    gauges: dict[str, float] = field(default_factory=dict)
    # Milliseconds for the server's tokenizer to read a long prompt; None where it has no such route.
    tokenize_ms: float | None = None
    machine: MachineLook | None = None  # None where the server's processes are not known to be on this machine
    metrics: frozenset[str] = frozenset()  # the names of all series of its /metrics, without their prefix
    # Headers of an answer that tell limits, such as x-ratelimit-limit-requests.
    limits: dict[str, str] = field(default_factory=dict)
    traced_steps: int | None = None  # steps in the trace of /debug/profile; None where there is no such route
    skipped: tuple[str, ...] = ()  # stages that the time did not suffice for

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self.alone, self.first, self.again, self.crowd, self.beside, self.prompts

    def usual_ms(self, figure: str) -> float | None:
        """The mean of a figure since the server's start, by its metrics: ttft, tpot or e2e, in ms; None: unknown."""
        if self.lifetime is None:
            return None
        names = USUAL[figure]
        total = self.lifetime.total(f"{name}_sum" for name in names)
        count = self.lifetime.total(f"{name}_count" for name in names)
        return 1e3 * total / count if total and count else None

    @property
    def finished(self) -> float | None:
        """Requests that ended since the server's start; None: unknown."""
        return None if self.lifetime is None else self.lifetime.total(("e2e_request_latency_seconds_count",))

    def total(self, names: Iterable[str]) -> float | None:
        """A counter since the server's start, the probe included; None where it has none of the names."""
        names = tuple(names)
        found = [each.total(names) for each in (self.lifetime, self.counted) if each is not None]
        known = [each for each in found if each is not None]
        return sum(known) if known else None


def median(values: Iterable[float]) -> float | None:
    """The median; None of no values."""
    values = list(values)
    return statistics.median(values) if values else None
