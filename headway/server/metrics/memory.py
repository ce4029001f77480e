"""Metrics of the KV pool: who uses it, what is found again in it, and what is given up."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily

from headway.engine.client import EngineClient
from headway.engine.messages import EngineStats
from headway.server.metrics.classes import ClassMetrics
from headway.server.metrics.families import Families

# What comes of a prompt: at the server that has computed it, and at the one that is to go on with it.
HANDOVERS = ("given", "not_kept", "fetched", "expired", "taken", "refused", "lost")
_LOADS = {"load": "load", "recompute_loadable": "recompute", "late": "late"}
SEVERAL = "several"  # label of blocks that requests of several classes share


class MemoryMetrics:
    """Counts what the engine says of its pool.

    Args:
        by_class: knows which classes have a label of their own.
    """

    def __init__(
        self, registry: CollectorRegistry, families: Families, by_class: ClassMetrics, engine: EngineClient
    ) -> None:
        self._families, self._by_class, self._engine, labels = families, by_class, engine, families.labels

        def counter(name: str, text: str, *further: str) -> Counter:
            return Counter(families.prefix + name, text, (*labels, *further), registry=registry)

        by = "service_class"
        self._queries = counter("class_prefix_cache_queries", "Prompt tokens looked up in the cache, by class.", by)
        self._hits = counter("class_prefix_cache_hits", "Prompt tokens found in the cache, by class.", by)
        self._evictions = counter("kv_evictions", "Evicted blocks, by class and reason.", by, "reason")
        self._allocated = counter("kv_blocks_allocated", "Allocated blocks.").labels(**labels)
        self._runs = counter("kv_block_runs_allocated", "Runs of consecutive blocks, allocated.").labels(**labels)
        swapped = counter("kv_swapped_tokens", "Tokens copied out to host memory, and back in.", "direction")
        decided = counter("kv_swap_decisions", "Decisions about the KV of preempted requests.", "choice")
        predicted = counter("kv_swap_predicted_seconds", "Predicted seconds of these decisions.", "of")
        offloaded = counter("kv_offload_tokens", "Tokens of blocks that --kv-offload kept, and loaded.", "direction")
        loads = counter("kv_offload_decisions", "Prompts of which something was kept by --kv-offload.", "choice")
        self._named = {
            **{each: (swapped.labels(**labels, direction=each), 1) for each in ("out", "in")},
            **{each: (decided.labels(**labels, choice=each), 1) for each in ("swap", "recompute", "full")},
            **{f"offload_{each}": (offloaded.labels(**labels, direction=each), 1) for each in ("out", "in")},
            **{name: (loads.labels(**labels, choice=choice), 1) for name, choice in _LOADS.items()},
            **{f"{each}_ns": (predicted.labels(**labels, of=each), 1e-9) for each in ("copy", "recompute")},
        }
        handed = counter("kv_handovers", "Prompts handed over to other servers, or taken over, by outcome.", "outcome")
        self._named |= {each: (handed.labels(**labels, outcome=each), 1) for each in HANDOVERS}
        found = counter("adapter_lookups", "Requests whose adapter was in a slot when they came, or was not.", "result")
        loads = counter("adapter_loads", "Adapters that were brought into slots.").labels(**labels)
        self._named |= {each: (found.labels(**labels, result=each), 1) for each in ("hits", "misses")}
        self._named["loads"] = loads, 1
        registry.register(self)

    def label_of(self, service_class: str) -> str:
        """The label of a class; SEVERAL for an empty name."""
        return self._by_class.label_of(service_class) if service_class else SEVERAL

    def labels_of(self, service_class: str) -> dict[str, str]:
        return {**self._families.labels, "service_class": self.label_of(service_class)}

    def on_step(self, stats: EngineStats) -> None:
        for name, count in stats.queries_of_class.items():
            self._queries.labels(**self.labels_of(name)).inc(count)
        for name, count in stats.hits_of_class.items():
            self._hits.labels(**self.labels_of(name)).inc(count)
        for name, reasons in stats.evictions.items():
            for reason, count in reasons.items():
                self._evictions.labels(**self.labels_of(name), reason=reason).inc(count)
        for name, count in (*stats.swaps.items(), *stats.adapters.items()):
            metric, unit = self._named[name]
            metric.inc(count * unit)
        if stats.allocated_blocks:
            self._allocated.inc(stats.allocated_blocks)
            self._runs.inc(stats.allocated_runs)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Gauges of what the engine last said, read when they are scraped."""
        gauge, stats, ready = self._families.gauge, self._engine.stats, self._engine.ready
        protected, watermark = (0, 0) if stats is None else (stats.protected_blocks, stats.watermark_blocks)
        yield gauge("kv_blocks_protected", "Blocks that are evicted last or never.", protected)
        left_out = 0 if ready is None else len(ready.left_out)
        yield gauge("preloaded_prompts_left_out", "Preloaded prompts that did not fit.", left_out)
        if ready is not None:
            text = "The KV cache: tokens of a block, blocks, type of its numbers."
            about = str(ready.block_size), str(ready.num_blocks), ready.kv_cache_dtype
            yield gauge("cache_config_info", text, {about: 1}, "block_size", "num_gpu_blocks", "cache_dtype")
            in_use = ready.pinned_blocks if stats is None else sum(stats.blocks_of_class.values())
            if ready.draft_block_bytes:
                text = "Bytes of the draft model's KV cache, beside the model's own."
                yield gauge("draft_kv_cache_bytes", text, ready.num_blocks * ready.draft_block_bytes)
            if (speculation := self._engine.config.speculative_config) is not None:
                text = "Most drafts behind a token; only with --speculative-config."
                yield gauge("spec_decode_num_speculative_tokens", text, speculation.num_speculative_tokens)
            free = ready.num_blocks - in_use
            yield gauge("kv_cache_used_bytes", "Bytes of KV blocks in use.", in_use * ready.block_bytes)
            yield gauge("kv_blocks_free", "KV blocks that no request uses, cached ones included.", free)
        in_slots = 0 if stats is None else stats.adapter_slots_used
        yield gauge("adapter_slots_used", "Adapters that are in slots (--max-loras).", in_slots)
        yield gauge("kv_watermark_blocks", "Blocks that admission keeps free.", watermark)
        used = dict.fromkeys(((name,) for name in (*self._by_class.names, SEVERAL)), 0)
        for name, count in ({} if stats is None else stats.blocks_of_class).items():
            label = (self.label_of(name),)
            used[label] = used.get(label, 0) + count
        yield gauge("class_kv_blocks_used", "Blocks in use, by class.", used, "service_class")
