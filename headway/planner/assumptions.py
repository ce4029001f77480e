"""What the figures of a plan rest on, in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator

from headway.cost.timing import WIDTHS
from headway.planner.plan import Plan
from headway.planner.words import dollars, many, seconds, share_of_memory
from headway.report.style import number


def assumptions(plan: Plan) -> tuple[str, ...]:
    """Sentences that each state one assumption."""
    return tuple(_all(plan))


def _all(plan: Plan) -> Iterator[str]:
    yield from _of_model(plan)
    yield from _of_engine(plan)
    yield from _of_load(plan)
    yield from _of_hardware(plan)


def _of_model(plan: Plan) -> Iterator[str]:
    shape, request = plan.deployment.shape, plan.request
    whole = plan.quantization.removesuffix("-experts")
    weights = {
        "none": f"Weights are kept in {plan.dtype}",
        "mxfp4": f"{'Experts' if shape.experts else 'Layers'} are kept in mxfp4, everything else in {plan.dtype}",
    }.get(plan.quantization, f"Layers are kept in {plan.quantization}, embedding, head and norms in {plan.dtype}")
    if whole != plan.quantization:
        weights = f"Experts are kept in {whole}, everything else in {plan.dtype}"
    if plan.deployment.precision.head.bits < plan.deployment.precision.rest.bits:
        weights = (
            f"Layers are kept in {plan.quantization}, the head in {plan.deployment.precision.head.name}, norms in "
            f"{plan.dtype}, packed as this engine packs them"
        )
    yield f"{weights}; the cache in {plan.kv_cache_dtype}."
    yield from _other_arithmetic(plan)
    if shape.experts is not None:
        yield (
            f"The router spreads tokens evenly over {shape.experts.count} experts; real routers are less even, and a "
            f"batch uses fewer experts."
        )
    if (sinks := shape.attention_sinks) is not None:
        yield (
            f"Layers keep the first {sinks.sinks:,} tokens of a sequence and the last ones, of which attention sees "
            f"{sinks.window:,} in all."
        )
    if plan.workload.cached:
        yield (
            f"The first {plan.workload.cached:,} tokens of each prompt are already in the prefix cache, the same for "
            "all requests: memory holds them once, and decode steps read them for each sequence."
        )
    if not request.flash_attention:
        yield "Attention writes its score matrix to memory and reads it again (no FlashAttention)."


def _other_arithmetic(plan: Plan) -> Iterator[str]:
    hardware, precision = plan.deployment.hardware, plan.deployment.precision
    for kept in dict.fromkeys((precision.linear, precision.of_experts, precision.activations)):
        done = hardware.arithmetic(kept.compute)
        if done != kept.compute:
            widened = ", and its weights are widened for it" if kept.bits < WIDTHS[done] else ""
            yield f"{hardware.key} has no products in {kept.compute}: they are done in {done}{widened}."


def _of_engine(plan: Plan) -> Iterator[str]:
    limits, request, engine = plan.limits, plan.request, plan.engine
    yield (
        f"The engine uses {share_of_memory(plan.settings)}, at most {limits.sequences:,} sequences and "
        f"{limits.batched_tokens:,} tokens in a step, and KV blocks of {request.block_size} tokens: the defaults of "
        f"{engine.name}'s server unless an option changes them."
    )
    if plan.load != "batch":
        yield engine.in_words
    if plan.load != "batch" and math.isfinite(limits.prefill_stall_s):
        yield (
            f"Prefill delays running streams by at most {number(limits.prefill_stall_s * 1e3)} ms in a step, or by as "
            "long as their decodes take (--max-prefill-stall-ms)."
        )
    if plan.deployment.hardware.measured:
        yield (
            "The efficiency and overhead of steps were measured on this machine. The host's work before the first step "
            f"was not: {seconds(plan.deployment.efficiency.request_s)} per request and "
            f"{seconds(plan.deployment.efficiency.token_s)} per token are typical values of servers."
        )
    else:
        yield (
            f"Efficiency and overheads are those of {engine.efficiency}, fitted to published measurements"
            + (", as nobody has published any of this engine." if engine.is_headway else ".")
        )


def _of_load(plan: Plan) -> Iterator[str]:
    if plan.load == "batch":
        yield (
            f"A batch of {many(plan.batch, 'prompt')}, then one token of each per step. All answers are equally long; "
            f"the decode step is the one halfway, with a context of {plan.workload.mean_context:,} tokens."
        )
    elif plan.load == "concurrency":
        yield (
            f"{many(int(plan.load_value), 'client')} in a closed loop, with prompts of "
            f"{many(plan.workload.prompt, 'token')}."
        )
    else:
        yield (
            f"Poisson arrivals, {number(plan.load_value)} requests per second, with prompts of "
            f"{many(plan.workload.prompt, 'token')}. A first approximation: nothing is preempted."
        )
    if plan.load != "batch" and plan.workload.output > 1:
        yield _lengths(plan)
    room = _room(plan)
    if plan.load == "concurrency" and plan.fits and plan.load_value > room:
        yield (
            f"Memory and the engine's limits allow {many(room, 'sequence')} at once; the others wait, which counts as "
            f"TTFT."
        )
    if plan.replicas > 1:
        yield f"{plan.replicas} replicas share the load evenly; a batch is that of each replica."
    if plan.lanes > plan.replicas:
        yield "Each data-parallel group has its own batch. Groups have equal loads and do not wait for each other."
    if (stages := plan.deployment.parallelism.pipeline) > 1:
        yield (
            f"Each of the {stages} pipeline stages works on another batch, and batches queue for the slowest one: "
            f"stages are idle {plan.bubble:.0%} of the time."
        )


def _lengths(plan: Plan) -> str:
    mean, spread = plan.workload.output, plan.workload.spread
    short, long = max(1, round(mean * (1 - spread))), round(mean * (1 + spread))
    if short == long:
        return f"All answers have {mean:,} tokens, so requests that start together end together."
    return f"Answer lengths are uniform between {short:,} and {long:,} tokens (--output-spread {spread:g})."


def _room(plan: Plan) -> int:
    """Sequences that run at once on all replicas."""
    groups = plan.replicas * plan.deployment.parallelism.data
    return min(plan.limits.sequences, plan.capacity.max_batch) * groups


def _of_hardware(plan: Plan) -> Iterator[str]:
    hardware, bars = plan.deployment.hardware, plan.bars
    of_ttft = bars.of_ttft(plan.load, plan.load_value)
    whose = "runs of this calibration" if hardware.measured else "measured figures"
    yield (
        f"The 80 % error bars: four in five {whose} lie between {number(bars.tpot[0])} and {number(bars.tpot[1])} "
        f"times the estimate of TPOT, and between {number(of_ttft[0])} and {number(of_ttft[1])} times that of TTFT."
    )
    if of_ttft is not bars.ttft:
        yield (
            "TTFT under load is the least accurate prediction: real arrivals cluster, and servers differ in the time "
            "that a request takes beside its steps. Its error bar comes from published figures under such loads."
        )
    if hardware.arithmetic(plan.deployment.precision.of_experts.compute) == "nvfp4":
        yield (
            "No published figure for nvfp4 was available, so its products are assumed to reach the same share of the "
            "peak as fp8's."
        )
    if hardware.note:
        yield hardware.note if hardware.note.endswith(".") else f"{hardware.note}."
    if plan.price_per_hour is not None:
        each = plan.price_per_hour / plan.devices
        yield f"A device costs {dollars(each)} per hour ({plan.price_source}) and is never idle."
