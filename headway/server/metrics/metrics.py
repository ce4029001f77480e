"""Prometheus metrics with vLLM's names and labels. Buckets resolve 1 ms (for a step 10 us) to 100 s."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from headway.engine.messages import EngineStats, Ready, SequenceTimings
from headway.policy.step.ledger import DECODE_STALLS, QUEUE_PHASES, Phase
from headway.policy.step.request import NEVER
from headway.server.classes import Terms
from headway.server.encoder import Encoder
from headway.server.errors import ApiError
from headway.server.grammars import OUTCOMES, GrammarChecks
from headway.server.metrics.classes import ClassMetrics
from headway.server.metrics.families import Families
from headway.server.metrics.memory import MemoryMetrics
from headway.server.metrics.process import EngineProcessMetrics
from headway.server.metrics.telemetry import Telemetry
from headway.server.metrics.tenants import TenantMetrics
from headway.server.quotas import TenantQuotas
from headway.server.timings import Stamps

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
FINE_SECONDS = tuple(round(m * 10.0**e, 7) for e in range(-5, 2) for m in (1, 1.5, 2, 3, 5, 7.5)) + (100.0,)
SECONDS = tuple(bound for bound in FINE_SECONDS if bound >= 1e-3)
TOKENS = tuple(2.0**e for e in range(18))
SEQUENCES = TOKENS[:13]
RATIOS = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0, 4.0)
DISTANCES = (1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0, 300.0, 1000.0)
LABELS = ("model_name", "engine")
NS = 1e-9
_REFUSALS = (403, 429, 503)
# Steps that are counted together: during a step of a large model the code that counts leaves the processor's caches, so
# that to count one step takes as long as to count many.
_STEPS_TOGETHER = 16
# Reasons for an end that mean that a request has missed its objectives.
_BROKEN = ("late", "timeout", "error")

_PREFILL = (Phase.PREFILL_COMPUTE, Phase.PREFILL_STALL)
_DECODE = (Phase.DECODE_COMPUTE, Phase.DRAFT, Phase.VERIFY, *DECODE_STALLS, Phase.SAMPLING, Phase.SCHEDULE)

M = TypeVar("M", Counter, Gauge)

prometheus_client.disable_created_metrics()


@dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    """Counters whose values other objects keep, read when they are scraped."""

    families: Families
    sums: Mapping[str, tuple[str, Callable[[], int]]]

    def collect(self) -> Iterator[CounterMetricFamily]:
        for name, (text, value) in self.sums.items():
            yield self.families.counter(name, text, value())


@dataclass(frozen=True, slots=True, eq=False)
class _Backlog:
    """The clients that are behind, looked at when they are scraped."""

    families: Families
    backlog: Callable[[], tuple[int, int]]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        behind, unread = self.backlog()
        text = "Clients that have more than 8 KiB of what was sent yet to take."
        yield self.families.gauge("clients_behind", text, behind)
        yield self.families.gauge("clients_unread_bytes", "Bytes that these clients have yet to take.", unread)


class Metrics:
    """All metrics of one server, in a registry of their own.

    Args:
        prefix: `headway:`, or `vllm:` for dashboards made for vLLM.
        model_name: the value of the label `model_name`.
        engine: gives `stats` (EngineStats or None), `num_waiting` and `pid` when scraped.
    """

    def __init__(self, prefix: str, model_name: str, engine: Any) -> None:
        self.registry, self._of_tenants = CollectorRegistry(), CollectorRegistry()
        self.prefix = prefix
        self._labels = (model_name, "0")
        self._gauges(engine)
        self._step_metrics()
        self._request_metrics()
        self.families = Families(prefix, dict(zip(LABELS, self._labels, strict=True)))
        self.by_class = ClassMetrics(self.registry, self.families, SECONDS, engine)
        self._memory = MemoryMetrics(self.registry, self.families, self.by_class, engine)
        self.by_tenant: TenantMetrics | None = None
        self._steps: list[EngineStats] = []  # steps that are not counted yet
        ProcessCollector(registry=self.registry)
        EngineProcessMetrics(self.registry, self.families, lambda: engine.pid)
        self.allocators: Mapping[str, int] = {}  # bytes that the engine's hold, by allocator and state, as it last said
        Telemetry(self.registry, self.families, engine, lambda: self.allocators)

    def _gauges(self, engine: Any) -> None:
        def of_stats(name: str) -> Callable[[], float]:
            return lambda: float(getattr(engine.stats, name)) if engine.stats is not None else 0.0

        self._gauge("num_requests_running", "Choices in the batch.", of_stats("num_running"))
        self._gauge("num_requests_waiting", "Choices waiting for the batch.", lambda: float(engine.num_waiting))
        self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", of_stats("kv_cache_usage"))
        self._gauge("cpu_cache_usage_perc", "Share of the swap space in use, 0 to 1.", of_stats("swap_usage"))
        self._gauge(
            "fairness_lead_tokens",
            "Largest lead of a tenant over another that waited, in weighted tokens.",
            of_stats("fairness_lead"),
        )
        self._gauge(
            "fairness_bound_tokens",
            "Largest bound of that lead, in weighted tokens.",
            of_stats("fairness_bound"),
        )
        self._gauge("engine_restarts", "Restarts of the engine process.", lambda: engine.restarts)
        self._gauge("engine_hangs", "Of these restarts, those as no step ended.", lambda: engine.hangs)
        reloads = "Reloads of the files of classes and tenants, by result."
        self._reloads = self._by("result", Counter, "service_class_reloads", reloads)
        self._calls = self._by("result", Counter, "tool_calls", "Calls of tools in answers, by what came of them.")
        self._startup = self._by("stage", Gauge, "startup_seconds", "Start-up time by stage.")

    def _by(self, label: str, kind: type[M], name: str, text: str) -> M:
        return kind(self.prefix + name, text, (*LABELS, label), registry=self.registry)

    def _gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        gauge = Gauge(self.prefix + name, text, LABELS, registry=self.registry)
        gauge.labels(*self._labels).set_function(value)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(self.prefix + name, text, LABELS, registry=self.registry).labels(*self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        histogram = Histogram(self.prefix + name, text, LABELS, buckets=buckets, registry=self.registry)
        return histogram.labels(*self._labels)

    def _step_metrics(self) -> None:
        self._counters = {
            "prompt_tokens": self._counter("prompt_tokens", "Prompt tokens computed."),
            "generation_tokens": self._counter("generation_tokens", "Tokens generated."),
            "prefix_cache_queries": self._counter("prefix_cache_queries", "Prompt tokens looked up in the cache."),
            "prefix_cache_hits": self._counter("prefix_cache_hits", "Prompt tokens found in the cache."),
            "preemptions": self._counter("num_preemptions", "Preempted sequences."),
            "left_out": self._counter(
                "tokens_left_out", "Tokens of requests without an objective that were left out of a step."
            ),
            "moe_mixtures": self._counter("moe_mixtures", "Times that a layer's experts were asked, in all steps."),
            "moe_expert_tokens": self._counter("moe_expert_tokens", "Pairs of a token and an expert that it went to."),
            "moe_experts_touched": self._counter("moe_experts_touched", "Experts with any token, by step and layer."),
            "moe_busiest_expert_tokens": self._counter(
                "moe_busiest_expert_tokens", "Tokens of the expert that had most, by step and layer."
            ),
            "windows": self._counter("batching_windows", "Times that an idle engine waited for more requests."),
        }
        # vLLM's name for it ends as that of a counter, which checks of names complain of.
        name = "iteration_tokens" + "_total" * (self.prefix == "vllm:")
        self._iteration_tokens = self._histogram(name, "Tokens computed by a step.", TOKENS)
        self._iteration_sequences = self._histogram("iteration_sequences", "Choices in a step.", SEQUENCES)
        self._step_seconds = self._histogram("step_duration_seconds", "Duration of an engine step.", FINE_SECONDS)
        self._decode_step_seconds = self._histogram(
            "decode_step_duration_seconds", "Duration of an engine step without prompts.", FINE_SECONDS
        )
        self._chunk_tokens = self._histogram("step_prompt_tokens", "Prompt tokens of a step that has some.", TOKENS)
        self._slack_seconds = self._histogram(
            "step_slack_seconds",
            "Time until the next token with a TPOT objective is due, when a step begins.",
            FINE_SECONDS,
        )
        self._roofline = self._histogram(
            "step_time_to_roofline_ratio",
            "Measured time of a forward pass / the least that the machine needs for it, of one step in sixteen.",
            DISTANCES,
        )
        self._overrun = self._histogram(
            "step_time_measured_to_predicted_ratio",
            "Measured time of a forward pass / predicted time.",
            RATIOS,
        )
        self._drafts = {
            "spec_decode_num_drafts": self._counter(
                "spec_decode_num_drafts", "Times that a sequence tried drafts in a step."
            ),
            "spec_decode_num_draft_tokens": self._counter("spec_decode_num_draft_tokens", "Drafts that were tried."),
            "spec_decode_num_accepted_tokens": self._counter(
                "spec_decode_num_accepted_tokens", "Drafts that were accepted."
            ),
        }
        by_kind = ", by what made them: ngram, draft_model, mtp, eagle3 or grammar."
        tried = "spec_decode_num_draft_tokens_by_kind", "Drafts that were tried" + by_kind
        kept = "spec_decode_num_accepted_tokens_by_kind", "Drafts that were accepted" + by_kind
        self._of_kind = [self._by("kind", Counter, *each) for each in (tried, kept)]
        accepted = "Drafts that were accepted, by their position behind the newest token, from 0 on."
        self._accepted_at = self._by("position", Counter, "spec_decode_num_accepted_tokens_per_pos", accepted)
        stalls = "Time that sequences waited for work of others, by cause."
        self._stall = self._by("cause", Counter, "stall_seconds", stalls)

    def _request_metrics(self) -> None:
        self._success = self._by("finished_reason", Counter, "request_success", "Choices finished, by reason.")
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival until the first token is sent.")
        self._tpot = self._histogram("request_time_per_output_token_seconds", "Mean time per token after the first.")
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival until the last token is sent.")
        self._tokenize = self._histogram(
            "request_tokenize_time_seconds", "Time from the checked body to the engine.", FINE_SECONDS
        )
        self._detokenize = self._histogram(
            "request_detokenize_time_seconds", "Time to detokenize a choice's tokens.", FINE_SECONDS
        )
        self._queue = self._histogram("request_queue_time_seconds", "Time waiting for the batch.")
        self._window = self._histogram(
            "request_batching_window_seconds", "Time that an idle engine waited for more requests; not of others."
        )
        self._prefill = self._histogram("request_prefill_time_seconds", "Time in the batch before the first token.")
        self._decode = self._histogram("request_decode_time_seconds", "Time in the batch after the first token.")
        self._inference = self._histogram("request_inference_time_seconds", "Time in the batch.")
        self._prompt_len = self._histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._output_len = self._histogram("request_generation_tokens", "Tokens of an output.", TOKENS)

    def add_tenants(self, quotas: TenantQuotas) -> None:
        """Have metrics of tenants from now on."""
        self.by_tenant = TenantMetrics(self._of_tenants, self.families, quotas)

    def add_clients(self, backlog: Callable[[], tuple[int, int]]) -> None:
        """Have metrics of the clients that are behind from now on: how many, and what they have yet to take."""
        self.registry.register(_Backlog(self.families, backlog))

    def add_encoder(self, encoder: Encoder) -> None:
        """Have metrics of the tokenizer's queue from now on."""
        self._gauge("tokenizer_waiting_chars", "Characters that wait to be tokenized.", lambda: encoder.work.waiting)
        self._gauge("tokenizer_known_chars", "Characters whose token ids are kept.", lambda: encoder.known.size)
        sums = {
            "tokenizer_queries": ("Characters of prompts that were looked up.", lambda: encoder.known.queries),
            "tokenizer_hits": ("Characters of prompts whose token ids were known.", lambda: encoder.known.hits),
            "tokenizer_calls": ("Calls of the tokenizer in a thread.", lambda: encoder.calls),
        }
        self.registry.register(_Sums(self.families, sums))

    def add_grammars(self, checks: GrammarChecks) -> None:
        """Have metrics of the grammars of structured outputs from now on."""
        self._gauge("grammars_waiting", "Requests that wait for the check of their grammar.", lambda: checks.waiting)
        sums = {
            f"grammars_{outcome}": (
                f"Requests whose grammar was {text}.",
                partial(checks.num_checked.__getitem__, outcome),
            )
            for outcome, text in OUTCOMES.items()
        }
        self.registry.register(_Sums(self.families, sums))

    # --- what happens -------------------------------------------------------------------------------

    def on_ready(self, ready: Ready) -> None:
        for stage, length in ready.startup_ns.items():
            self._startup.labels(*self._labels, stage).set(length * NS)

    def on_calls(self, complete: int, broken: int, malformed: int) -> None:
        """Count the calls of a choice, and whether it has text that was to be one."""
        for result, count in (("complete", complete), ("broken", broken), ("malformed", malformed)):
            if count:
                self._calls.labels(*self._labels, result).inc(count)

    def on_reload(self, result: str) -> None:
        """Count that the file of service classes was read again: `done`, or `failed` where it was wrong."""
        self._reloads.labels(*self._labels, result).inc()

    def on_step(self, stats: EngineStats) -> None:
        self._steps.append(stats)
        if len(self._steps) == _STEPS_TOGETHER:
            self.settle()

    def settle(self) -> None:
        """Count the steps that have gathered."""
        for stats in self._steps:
            self._count_step(stats)
        self._steps.clear()

    def _count_step(self, stats: EngineStats) -> None:
        for name, counter in self._counters.items():
            if increment := getattr(stats, name):
                counter.inc(increment)
        if stats.scheduled_tokens:
            self._iteration_tokens.observe(stats.scheduled_tokens)
            self._iteration_sequences.observe(stats.scheduled_sequences)
            self._step_seconds.observe(stats.step_ns * NS)
            if not stats.prompt_tokens and stats.scheduled_tokens == stats.scheduled_sequences:
                self._decode_step_seconds.observe(stats.step_ns * NS)
        if stats.prompt_tokens:
            self._chunk_tokens.observe(stats.prompt_tokens)
        if stats.slack_ns:
            self._slack_seconds.observe(stats.slack_ns * NS)
        if stats.least_ns and stats.forward_ns:
            self._roofline.observe(stats.forward_ns / stats.least_ns)
        if stats.predicted_ns and stats.forward_ns:
            self._overrun.observe(stats.forward_ns / stats.predicted_ns)
        self._memory.on_step(stats)
        if stats.spec_decode_num_drafts:
            for name, counter in self._drafts.items():
                counter.inc(getattr(stats, name))
            for kind, counts in stats.drafts_of_kind.items():
                for of_kind, count in zip(self._of_kind, counts, strict=True):
                    of_kind.labels(*self._labels, kind).inc(count)
            for position, count in enumerate(stats.accepted_at):
                self._accepted_at.labels(*self._labels, position).inc(count)
        for cause, length in stats.stall_ns.items():
            self._stall.labels(*self._labels, cause).inc(length * NS)

    def on_output(self, gap_ns: int, service_class: str) -> None:
        """Count tokens of a choice that came `gap_ns` after those before."""
        self.by_class.gaps.add(service_class, gap_ns)

    def on_first_sent(self, since_arrival_ns: int, service_class: str) -> None:
        """Count the first token of a choice, which was handed to the connection."""
        self._ttft.observe(since_arrival_ns * NS)
        self.by_class.observe("ttft", service_class, since_arrival_ns)

    def on_last_sent(self, since_arrival_ns: int, service_class: str) -> None:
        """Count a choice that ended by stop or length, and whose end was handed to the connection."""
        self._e2e.observe(since_arrival_ns * NS)
        self.by_class.observe("e2e", service_class, since_arrival_ns)

    def on_refused(self, error: ApiError, service_class: str) -> None:
        """Count a request that was refused; other errors do not count."""
        if error.status in _REFUSALS and error.code is not None:
            self.by_class.refused(service_class, error.code)

    def on_finish(
        self,
        reason: str,
        stamps: Stamps,
        prompt_len: int,
        num_tokens: int,
        timings: SequenceTimings | None,
        phases_ns: Mapping[Phase, int],
        terms: Terms,
    ) -> None:
        """Count a choice that has ended, with its closed ledger, which is empty where its timings are None."""
        self._success.labels(*self._labels, reason).inc()
        name, tpot_ns = terms.service.name, stamps.tpot_ns(num_tokens)
        self.by_class.spent(name, phases_ns)
        if timings is not None and timings.yielded:
            self.by_class.yielded(name, timings.yielded)
        if timings is not None and timings.passed_over and self.by_tenant is not None:
            self.by_tenant.passed_over[terms.tenant] += timings.passed_over
        if reason in _BROKEN:
            self.by_class.judged(name, terms.verdicts(NEVER, None, NEVER))
        if reason not in ("stop", "length"):
            return
        self.by_class.judged(name, terms.verdicts(stamps.ttft_ns, tpot_ns, stamps.e2e_ns))
        self._prompt_len.observe(prompt_len)
        if num_tokens:
            self._output_len.observe(num_tokens)
        self._tokenize.observe((stamps.sent_ns - stamps.checked_ns) * NS)
        self._detokenize.observe(stamps.detokenizing_ns * NS)
        if tpot_ns is not None:
            self._tpot.observe(tpot_ns * NS)
            self.by_class.observe("tpot", name, tpot_ns)
        if timings is not None:
            self._observe_phases(timings.phases_ns)

    def _observe_phases(self, phases_ns: Mapping[str, int]) -> None:
        def total(phases: tuple[Phase, ...]) -> float:
            return sum(phases_ns.get(phase, 0) for phase in phases) * NS

        prefill, decode = total(_PREFILL), total(_DECODE)
        self._queue.observe(total(QUEUE_PHASES))
        if window := total((Phase.QUEUE_WINDOW,)):
            self._window.observe(window)
        self._prefill.observe(prefill)
        self._decode.observe(decode)
        self._inference.observe(prefill + decode)

    def exposition(self, with_tenants: bool = False) -> bytes:
        """All metrics as text.

        Args:
            with_tenants: the reader may see the names and budgets of tenants.
        """
        self.settle()
        whole: bytes = prometheus_client.generate_latest(self.registry)
        return whole + prometheus_client.generate_latest(self._of_tenants) if with_tenants else whole
