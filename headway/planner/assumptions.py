"""What the figures of a plan rest on, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from headway.cost.catalogue import uncertainty
from headway.cost.timing import WIDTHS
from headway.planner.plan import Plan
from headway.planner.words import dollars, many
from headway.report.style import number


def assumptions(plan: Plan) -> tuple[str, ...]:
    """One thing each."""
    return tuple(_all(plan))


def _all(plan: Plan) -> Iterator[str]:
    yield from _of_model(plan)
    yield from _of_engine(plan)
    yield from _of_load(plan)
    yield from _of_hardware(plan)


def _of_model(plan: Plan) -> Iterator[str]:
    shape, request = plan.deployment.shape, plan.request
    weights = {
        "none": f"Weights are kept in {plan.dtype}",
        "mxfp4": f"{'Experts' if shape.experts else 'Layers'} are kept in mxfp4, everything else in {plan.dtype}",
    }.get(plan.quantization, f"Layers are kept in {plan.quantization}, embedding, head and norms in {plan.dtype}")
    yield f"{weights}; the cache in {plan.kv_cache_dtype}."
    yield from _other_arithmetic(plan)
    if shape.experts is not None:
        yield (
            f"The router spreads tokens evenly over {shape.experts.count} experts; real ones are less even, and a "
            "batch touches fewer."
        )
    if plan.workload.cached:
        yield f"Of each prompt {plan.workload.cached:,} tokens are in the prefix cache already."
    if not request.flash_attention:
        yield "Attention writes its whole matrix of scores to memory and reads it again (no FlashAttention)."


def _other_arithmetic(plan: Plan) -> Iterator[str]:
    hardware, precision = plan.deployment.hardware, plan.deployment.precision
    for kept in dict.fromkeys((precision.linear, precision.of_experts, precision.activations)):
        done = hardware.arithmetic(kept.compute)
        if done != kept.compute:
            widened = ", and its weights are widened for it" if kept.bits < WIDTHS[done] else ""
            yield f"{hardware.key} has no products in {kept.compute}: they are done in {done}{widened}."


def _of_engine(plan: Plan) -> Iterator[str]:
    limits, request = plan.limits, plan.request
    yield (
        f"The engine takes {request.gpu_memory_utilization:.0%} of the memory, runs {limits.sequences:,} sequences and "
        f"{limits.batched_tokens:,} tokens in a step at most, and keeps its cache in blocks of {request.block_size}."
    )
    if plan.deployment.hardware.measured:
        yield "Efficiency and overheads are those that were measured on this machine."
    else:
        yield (f"Efficiency and overheads are those of {request.engine}, fitted to published measurements.")


def _of_load(plan: Plan) -> Iterator[str]:
    if plan.load == "batch":
        yield (
            f"A batch of {many(plan.batch, 'prompt')}, then a token of each in every step; all answers are equally "
            f"long, and the context of a decode step is {plan.context:,} tokens, halfway through."
        )
    elif plan.load == "concurrency":
        yield (
            f"{many(int(plan.load_value), 'client')}, each of whom sends the next request when the last is answered; "
            f"prompts have {many(plan.workload.prompt, 'token')}, and their chunks share steps with decodes."
        )
    else:
        yield (
            f"Requests arrive at random times (Poisson), {number(plan.load_value)} a second; prompts have "
            f"{many(plan.workload.prompt, 'token')}. A first approximation: nothing is preempted."
        )
    if plan.load != "batch" and plan.workload.output > 1:
        yield _lengths(plan)
    room = _room(plan)
    if plan.load == "concurrency" and plan.fits and plan.load_value > room:
        yield (
            f"Only {many(room, 'sequence')} run at once, for which there is memory and which the engine allows: the "
            "others wait, which is part of TTFT."
        )
    if plan.replicas > 1:
        yield f"{plan.replicas} replicas share the load evenly; a batch is that of each replica."
    if plan.lanes > plan.replicas:
        yield (
            "Each data-parallel group and each pipeline stage works on a batch of its own; they are alike, and do not "
            "wait for each other."
        )


def _lengths(plan: Plan) -> str:
    mean, spread = plan.workload.output, plan.workload.spread
    short, long = max(1, round(mean * (1 - spread))), round(mean * (1 + spread))
    if short == long:
        return f"All answers have {mean:,} tokens, so that requests which begin together end together."
    return f"Answers are evenly spread between {short:,} and {long:,} tokens (--output-spread {spread:g})."


def _room(plan: Plan) -> int:
    """Sequences that run at once on all replicas."""
    groups = plan.replicas * plan.deployment.parallelism.data
    return min(plan.limits.sequences, plan.capacity.max_batch) * groups


def _of_hardware(plan: Plan) -> Iterator[str]:
    hardware = plan.deployment.hardware
    of_tpot, of_ttft = (uncertainty(hardware, metric) for metric in ("tpot", "ttft"))
    yield (
        f"Four in five measured TPOTs lie between {number(of_tpot[0])} and {number(of_tpot[1])} times the estimate, "
        f"and TTFTs between {number(of_ttft[0])} and {number(of_ttft[1])} times: the 80 % bars."
    )
    if hardware.note:
        yield hardware.note if hardware.note.endswith(".") else f"{hardware.note}."
    if plan.price_per_hour is not None:
        each = plan.price_per_hour / plan.devices
        yield f"A device costs {dollars(each)} an hour ({plan.price_source}), and is never idle."
