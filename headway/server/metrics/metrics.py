"""Prometheus metrics with vLLM's names and labels. Buckets resolve 1 ms (for a step 10 us) to 100 s."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import Metric

from headway.engine.messages import EngineStats, Ready
from headway.policy.step.ledger import DECODE_STALLS, QUEUE_PHASES, Phase
from headway.policy.step.request import NEVER
from headway.server.api.choices import ServedChoice
from headway.server.classes import Terms
from headway.server.encoder import Encoder
from headway.server.errors import ApiError
from headway.server.grammars import OUTCOMES, GrammarChecks
from headway.server.metrics.classes import CLASS_HISTOGRAMS, ClassMetrics
from headway.server.metrics.families import Collector, Families
from headway.server.metrics.memory import MemoryMetrics
from headway.server.metrics.process import of_engine_process
from headway.server.metrics.telemetry import Telemetry
from headway.server.metrics.tenants import TenantMetrics
from headway.server.quotas import TenantQuotas

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

# Gauges of the last step, by the field of EngineStats.
_GAUGES = {
    "num_running": ("num_requests_running", "Choices in the batch."),
    "kv_cache_usage": ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1."),
    "swap_usage": ("cpu_cache_usage_perc", "Share of the swap space in use, 0 to 1."),
    "fairness_lead": ("fairness_lead_tokens", "Largest lead of a tenant over another that waited, in weighted tokens."),
    "fairness_bound": ("fairness_bound_tokens", "Largest bound of that lead, in weighted tokens."),
}
_TRIED = "spec_decode_num_draft_tokens", "Drafts that were tried"
_KEPT = "spec_decode_num_accepted_tokens", "Drafts that were accepted"
_BY_KIND = ", by what made them: ngram, draft_model, mtp, eagle3 or grammar."
# Counters of steps, by the field of EngineStats.
_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens computed."),
    "generation_tokens": ("generation_tokens", "Tokens generated."),
    "prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked up in the cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found in the cache."),
    "preemptions": ("num_preemptions", "Preempted sequences."),
    "left_out": ("tokens_left_out", "Tokens of requests without an objective that were left out of a step."),
    "moe_mixtures": ("moe_mixtures", "Times that a layer's experts were asked, in all steps."),
    "moe_expert_tokens": ("moe_expert_tokens", "Pairs of a token and an expert that it went to."),
    "moe_experts_touched": ("moe_experts_touched", "Experts with any token, by step and layer."),
    "moe_busiest_expert_tokens": (
        "moe_busiest_expert_tokens",
        "Tokens of the expert that had most, by step and layer.",
    ),
    "windows": ("batching_windows", "Times that an idle engine waited for more requests."),
    "spec_decode_num_drafts": ("spec_decode_num_drafts", "Times that a sequence tried drafts in a step."),
    _TRIED[0]: (_TRIED[0], f"{_TRIED[1]}."),
    _KEPT[0]: (_KEPT[0], f"{_KEPT[1]}."),
}
_increments = attrgetter(*_COUNTERS)
# Counters with a further label: the label, and what they count.
_LABELLED = {
    "service_class_reloads": ("result", "Reloads of the files of classes and tenants, by result."),
    "tool_calls": ("result", "Calls of tools in answers, by what came of them."),
    f"{_TRIED[0]}_by_kind": ("kind", _TRIED[1] + _BY_KIND),
    f"{_KEPT[0]}_by_kind": ("kind", _KEPT[1] + _BY_KIND),
    f"{_KEPT[0]}_per_pos": ("position", f"{_KEPT[1]}, by their position behind the newest token, from 0 on."),
    "stall_seconds": ("cause", "Time that sequences waited for work of others, by cause."),
    "request_success": ("finished_reason", "Choices finished, by reason."),
}
_HISTOGRAMS = {
    "iteration_tokens": (TOKENS, "Tokens computed by a step."),
    "iteration_sequences": (SEQUENCES, "Choices in a step."),
    "step_duration_seconds": (FINE_SECONDS, "Duration of an engine step."),
    "decode_step_duration_seconds": (FINE_SECONDS, "Duration of an engine step without prompts."),
    "step_prompt_tokens": (TOKENS, "Prompt tokens of a step that has some."),
    "step_slack_seconds": (FINE_SECONDS, "Time until the next token with a TPOT objective is due, when a step begins."),
    "step_time_to_roofline_ratio": (
        DISTANCES,
        "Measured time of a forward pass / the least that the machine needs for it, of one step in sixteen.",
    ),
    "step_time_measured_to_predicted_ratio": (RATIOS, "Measured time of a forward pass / predicted time."),
    "time_to_first_token_seconds": (SECONDS, "Arrival until the first token is sent."),
    "request_time_per_output_token_seconds": (SECONDS, "Mean time per token after the first."),
    "e2e_request_latency_seconds": (SECONDS, "Arrival until the last token is sent."),
    "request_tokenize_time_seconds": (FINE_SECONDS, "Time from the checked body to the engine."),
    "request_detokenize_time_seconds": (FINE_SECONDS, "Time to detokenize a choice's tokens."),
    "request_queue_time_seconds": (SECONDS, "Time waiting for the batch."),
    "request_batching_window_seconds": (SECONDS, "Time that an idle engine waited for more requests; not of others."),
    "request_prefill_time_seconds": (SECONDS, "Time in the batch before the first token."),
    "request_decode_time_seconds": (SECONDS, "Time in the batch after the first token."),
    "request_inference_time_seconds": (SECONDS, "Time in the batch."),
    "request_prompt_tokens": (TOKENS, "Tokens of a prompt."),
    "request_generation_tokens": (TOKENS, "Tokens of an output."),
}
M = TypeVar("M", Counter, Histogram)

prometheus_client.disable_created_metrics()


def of_clients(families: Families, backlog: tuple[int, int]) -> Iterable[Metric]:
    """How many clients are behind, and what they have yet to take."""
    behind, unread = backlog
    yield families.gauge("clients_behind", "Clients that have more than 8 KiB of what was sent yet to take.", behind)
    yield families.gauge("clients_unread_bytes", "Bytes that these clients have yet to take.", unread)


def of_encoder(families: Families, encoder: Encoder) -> Iterable[Metric]:
    """The tokenizer's queue, and what it need not do again."""
    gauge, counter, known = families.gauge, families.counter, encoder.known
    yield gauge("tokenizer_waiting_chars", "Characters that wait to be tokenized.", encoder.work.waiting)
    yield gauge("tokenizer_known_chars", "Characters whose token ids are kept.", known.size)
    yield counter("tokenizer_queries", "Characters of prompts that were looked up.", known.queries)
    yield counter("tokenizer_hits", "Characters of prompts whose token ids were known.", known.hits)
    yield counter("tokenizer_calls", "Calls of the tokenizer in a thread.", encoder.calls)


def of_grammars(families: Families, checks: GrammarChecks) -> Iterable[Metric]:
    """The checks of structured outputs."""
    yield families.gauge("grammars_waiting", "Requests that wait for the check of their grammar.", checks.waiting)
    for outcome, text in OUTCOMES.items():
        count = checks.num_checked[outcome]
        yield families.counter(f"grammars_{outcome}", f"Requests whose grammar was {text}.", count)


class Metrics:
    """All metrics of one server, in a registry of their own.

    Args:
        prefix: `headway:`, or `vllm:` for dashboards made for vLLM.
        model_name: the value of the label `model_name`.
        engine: gives `stats` (EngineStats or None), `num_waiting` and `pid` when scraped.
    """

    def __init__(self, prefix: str, model_name: str, engine: Any) -> None:
        self.registry, self._of_tenants = CollectorRegistry(), CollectorRegistry()
        self._engine, self._labels = engine, (model_name, "0")
        self.families = Families(prefix, dict(zip(LABELS, self._labels, strict=True)))
        self._counters = [self._made(Counter, *each) for each in _COUNTERS.values()]
        self._by = {name: self._made(Counter, name, text, label) for name, (label, text) in _LABELLED.items()}
        self._seen = {
            name: self._made(Histogram, name, text, buckets=buckets) for name, (buckets, text) in _HISTOGRAMS.items()
        }
        self.by_class = ClassMetrics(self.registry, self.families, SECONDS, engine)
        self._memory = MemoryMetrics(self.registry, self.families, self.by_class, engine)
        self.by_tenant: TenantMetrics | None = None
        self._steps: list[EngineStats] = []  # steps that are not counted yet
        self._startup_s: dict[tuple[str], float] = {}  # by stage
        ProcessCollector(registry=self.registry)
        self.add(self._of_engine)
        self.allocators: Mapping[str, int] = {}  # bytes that the engine's hold, by allocator and state, as it last said
        Telemetry(self.registry, self.families, engine, lambda: self.allocators)

    def _made(self, kind: type[M], name: str, text: str, *further: str, **options: Any) -> M:
        # vLLM's name for it ends as that of a counter, which checks of names complain of.
        name += "_total" * (name == "iteration_tokens" and self.families.prefix == "vllm:")
        made = kind(self.families.prefix + name, text, (*LABELS, *further), registry=self.registry, **options)
        return made if further else made.labels(*self._labels)

    def add(self, collect: Callable[[Families], Iterable[Metric]]) -> None:
        """Have further metrics from now on, which are read whenever they are scraped."""
        self.registry.register(Collector(partial(collect, self.families)))

    def add_tenants(self, quotas: TenantQuotas) -> None:
        """Have metrics of tenants from now on."""
        self.by_tenant = TenantMetrics(self._of_tenants, self.families, quotas)

    def _of_engine(self, families: Families) -> Iterable[Metric]:
        engine, gauge = self._engine, families.gauge
        for field, (name, text) in _GAUGES.items():
            yield gauge(name, text, 0.0 if engine.stats is None else float(getattr(engine.stats, field)))
        yield gauge("num_requests_waiting", "Choices waiting for the batch.", float(engine.num_waiting))
        yield gauge("engine_restarts", "Restarts of the engine process.", engine.restarts)
        yield gauge("engine_hangs", "Of these restarts, those as no step ended.", engine.hangs)
        yield gauge("startup_seconds", "Start-up time by stage.", self._startup_s, "stage")
        yield from of_engine_process(families, engine.pid)

    # --- what happens -------------------------------------------------------------------------------

    def on_ready(self, ready: Ready) -> None:
        self._startup_s = {(stage,): length * NS for stage, length in ready.startup_ns.items()}

    def on_calls(self, complete: int, broken: int, malformed: int) -> None:
        """Count the calls of a choice, and whether it has text that was to be one."""
        for result, count in (("complete", complete), ("broken", broken), ("malformed", malformed)):
            if count:
                self._by["tool_calls"].labels(*self._labels, result).inc(count)

    def on_reload(self, result: str) -> None:
        """Count that the file of service classes was read again: `done`, or `failed` where it was wrong."""
        self._by["service_class_reloads"].labels(*self._labels, result).inc()

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
        for counter, increment in zip(self._counters, _increments(stats), strict=True):
            if increment:
                counter.inc(increment)
        seen = self._seen
        if stats.scheduled_tokens:
            seen["iteration_tokens"].observe(stats.scheduled_tokens)
            seen["iteration_sequences"].observe(stats.scheduled_sequences)
            seen["step_duration_seconds"].observe(stats.step_ns * NS)
            if not stats.prompt_tokens and stats.scheduled_tokens == stats.scheduled_sequences:
                seen["decode_step_duration_seconds"].observe(stats.step_ns * NS)
        if stats.prompt_tokens:
            seen["step_prompt_tokens"].observe(stats.prompt_tokens)
        if stats.slack_ns:
            seen["step_slack_seconds"].observe(stats.slack_ns * NS)
        if stats.least_ns and stats.forward_ns:
            seen["step_time_to_roofline_ratio"].observe(stats.forward_ns / stats.least_ns)
        if stats.predicted_ns and stats.forward_ns:
            seen["step_time_measured_to_predicted_ratio"].observe(stats.forward_ns / stats.predicted_ns)
        self._memory.on_step(stats)
        for kind, counts in stats.drafts_of_kind.items():
            for name, count in zip((_TRIED[0], _KEPT[0]), counts, strict=True):
                self._by[f"{name}_by_kind"].labels(*self._labels, kind).inc(count)
        for position, count in enumerate(stats.accepted_at):
            self._by[f"{_KEPT[0]}_per_pos"].labels(*self._labels, position).inc(count)
        for cause, length in stats.stall_ns.items():
            self._by["stall_seconds"].labels(*self._labels, cause).inc(length * NS)

    def on_sent(self, key: str, since_arrival_ns: int, service_class: str) -> None:
        """Count that the first token of a choice was handed to the connection (`ttft`), or its end (`e2e`)."""
        self._seen[CLASS_HISTOGRAMS[key][0]].observe(since_arrival_ns * NS)
        self.by_class.observe(key, service_class, since_arrival_ns)

    def on_refused(self, error: ApiError, service_class: str) -> None:
        """Count a request that was refused; other errors do not count."""
        if error.status in _REFUSALS and error.code is not None:
            self.by_class.refused(service_class, error.code)

    def on_finish(self, choice: ServedChoice, phases_ns: Mapping[Phase, int], terms: Terms) -> None:
        """Count a choice that has ended, with its closed ledger, which is empty where its timings are None."""
        reason, stamps, timings = choice.finish_reason or "abort", choice.stamps, choice.timings
        self._by["request_success"].labels(*self._labels, reason).inc()
        name, tpot_ns = terms.service.name, stamps.tpot_ns(choice.num_tokens)
        self.by_class.spent(name, phases_ns)
        if timings is not None and timings.yielded:
            self.by_class.yielded(name, timings.yielded)
        if timings is not None and timings.passed_over and self.by_tenant is not None:
            self.by_tenant.passed_over[terms.tenant] += timings.passed_over
        if reason in _BROKEN:
            self.by_class.judged(name, terms.verdicts(NEVER, None, NEVER))
        if reason not in ("stop", "length"):
            return
        seen = self._seen
        self.by_class.judged(name, terms.verdicts(stamps.ttft_ns, tpot_ns, stamps.e2e_ns))
        seen["request_prompt_tokens"].observe(len(choice.prompt.token_ids))
        if choice.num_tokens:
            seen["request_generation_tokens"].observe(choice.num_tokens)
        seen["request_tokenize_time_seconds"].observe((stamps.sent_ns - stamps.checked_ns) * NS)
        seen["request_detokenize_time_seconds"].observe(stamps.detokenizing_ns * NS)
        if tpot_ns is not None:
            seen["request_time_per_output_token_seconds"].observe(tpot_ns * NS)
            self.by_class.observe("tpot", name, tpot_ns)
        if timings is not None:
            self._observe_phases(timings.phases_ns)

    def _observe_phases(self, phases_ns: Mapping[str, int]) -> None:
        def total(phases: tuple[Phase, ...]) -> float:
            return sum(phases_ns.get(phase, 0) for phase in phases) * NS

        seen, prefill, decode = self._seen, total(_PREFILL), total(_DECODE)
        seen["request_queue_time_seconds"].observe(total(QUEUE_PHASES))
        if window := total((Phase.QUEUE_WINDOW,)):
            seen["request_batching_window_seconds"].observe(window)
        seen["request_prefill_time_seconds"].observe(prefill)
        seen["request_decode_time_seconds"].observe(decode)
        seen["request_inference_time_seconds"].observe(prefill + decode)

    def exposition(self, with_tenants: bool = False) -> bytes:
        """All metrics as text.

        Args:
            with_tenants: the reader may see the names and budgets of tenants.
        """
        self.settle()
        whole: bytes = prometheus_client.generate_latest(self.registry)
        return whole + prometheus_client.generate_latest(self._of_tenants) if with_tenants else whole
