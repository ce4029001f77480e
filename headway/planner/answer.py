"""The short answer of a plan: does it fit, how fast, what limits it, how many, what it costs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from headway.planner.models import names_taken
from headway.planner.plan import Estimate, Plan
from headway.planner.words import bar, dollars, gigabytes, many, milliseconds, seconds
from headway.report.parts import Line
from headway.report.style import number

NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2EL"}
BOUNDS = {
    "compute": "compute-bound",
    "memory": "memory-bound",
    "network": "bound by the links between devices",
    "overhead": "bound by kernel launches and the host",
}


def answer(plan: Plan) -> tuple[Line, ...]:
    """Five to nine lines, the problem first where there is one."""
    return tuple(_lines(plan))


def headline(plan: Plan) -> str:
    """A line that names model, hardware, precision and load."""
    work, parallelism = plan.workload, plan.deployment.parallelism
    spread = [
        f"{letters}{size}"
        for letters, size in (("TP", parallelism.tensor), ("PP", parallelism.pipeline), ("DP", parallelism.data))
        if size > 1
    ]
    if plan.replicas > 1:
        spread.insert(0, f"{plan.replicas:,} replicas")
    where = f"{plan.devices:,} × {plan.hardware_key}" + (f" ({', '.join(spread)})" if spread else "")
    weights = plan.dtype if plan.quantization == "none" else f"{plan.quantization} and {plan.dtype}"
    return (
        f"{plan.model} on {where}, {weights}: {many(work.prompt, 'token')} in, {work.output:,} out, {load_words(plan)}"
    )


def load_words(plan: Plan) -> str:
    """The load, such as "batch 8" or "64 clients"."""
    if plan.load == "batch":
        return f"batch {plan.batch:,}"
    if plan.load == "concurrency":
        return many(int(plan.load_value), "client")
    return f"{number(plan.load_value)} requests/s"


def _lines(plan: Plan) -> Iterator[Line]:
    if plan.problem:
        yield Line("Problem", plan.problem, "bad")
    for warning in plan.warnings:
        yield Line("Warning", warning, "bad")
    if said := names_taken(plan.request.model, plan.model, plan.request.hardware, plan.hardware_key):
        yield Line("Names", said)
    yield _memory(plan)
    if plan.ttft is not None or (plan.load == "rate" and plan.fits):
        ttft = "grows without limit" if plan.ttft is None else milliseconds(plan.ttft)
        note = load_note(plan)
        yield Line("TTFT", f"{ttft}; prefill is {BOUNDS[plan.prefill.bound]}." + (f" {note}" if note else ""))
    if plan.tpot is not None:
        yield Line("TPOT", f"{milliseconds(plan.tpot)}; decode is {BOUNDS[plan.decode.bound]}.")
    if plan.output_tokens_per_s is not None:
        yield Line("Tokens/s", _tokens(plan, plan.output_tokens_per_s))
    if plan.fits:
        yield Line("Maximum", _most(plan))
    if plan.costs.per_million_output_tokens is not None:
        yield Line("Cost", _cost(plan))
    if plan.slo_met:
        met = all(plan.slo_met.values())
        yield Line("SLO", slo_words(plan), "good" if met else "bad")
    if plan.speculated is not None:
        yield Line("Speculation", _speculation(plan))


def load_note(plan: Plan) -> str | None:
    """A remark on TTFT under load; None for one client, for a batch, and where there is no TTFT."""
    if plan.ttft is None or plan.served is None or (plan.load != "rate" and plan.load_value == 1):
        return None
    if plan.load == "rate":
        return "This is the least certain figure: real arrivals cluster more than random ones."
    median, slow = seconds(plan.served.ttft_p50_s), seconds(plan.served.ttft_p99_s)
    return f"All clients start at once, so the first prompts queue: median {median}, P99 {slow}."


def _memory(plan: Plan) -> Line:
    held, several = plan.capacity, plan.deployment.parallelism.devices > 1
    weights = f"The weights take {gigabytes(held.weights)}{_in_all(held.weights, plan.weights_bytes)}"
    usable = f"{gigabytes(held.usable)} of usable memory" + (" on each device" if several else "")
    if not plan.capacity.fits:
        return Line("Memory", f"{weights}. There are {usable}.", "bad")
    text = f"{weights} of {usable}."
    if adapters := plan.settings.adapter_bytes:
        slots = many(plan.request.max_loras or 0, "slot")
        text += f" {slots} for adapters of rank {plan.request.max_lora_rank} take {gigabytes(adapters)}."
    tokens = plan.workload.prompt + plan.workload.output
    shared = f", {plan.workload.cached:,} of them shared" if plan.workload.cached else ""
    text += (
        f" The KV cache gets {gigabytes(held.kv_pool)}, at {gigabytes(held.kv_per_token)} per token"
        f"{_in_all(held.kv_per_token, plan.kv_bytes_per_token)}: room for {many(plan.max_batch, 'request')} of "
        f"{tokens:,} tokens{shared}, or {_longest(plan)}."
    )
    return Line("Fits", text, "good") if plan.fits else Line("Memory", text)


def _in_all(of_device: int, whole: int) -> str:
    return "" if of_device == whole else f" ({gigabytes(whole)} in all)"


def _longest(plan: Plan) -> str:
    limit = plan.request.max_model_len or plan.deployment.shape.max_positions
    if limit and limit <= plan.capacity.max_context:
        return f"one of {limit:,}, the longest allowed"
    return f"one of {plan.capacity.max_context:,}"


def _tokens(plan: Plan, rate: Estimate) -> str:
    text = f"{number(rate.value)} of output, all that the clients ask for"
    if rate.low < rate.high:
        text = f"{number(rate.value)} ({bar(rate)}) of output"
    if plan.devices > 1:
        text += f", {number(rate.value / plan.devices)} per device"
    if plan.ttlt is not None:
        text += f"; a whole answer takes {seconds(plan.ttlt.value)}"
    return f"{text}."


def _most(plan: Plan) -> str:
    text = f"{number(plan.saturation_rate)} requests/s."
    if plan.compute_bound_batch is not None:
        return f"{text} Decode becomes compute-bound above batch {plan.compute_bound_batch:,}."
    return text if plan.compute_bound_weights is None else f"{text} Decode is memory-bound at every batch size."


def _cost(plan: Plan) -> str:
    costs, hour = plan.costs, plan.price_per_hour or 0.0
    price = "the price given" if plan.request.price_per_hour else "the list price"
    return (
        f"{dollars(costs.per_million_output_tokens)} per 1M output tokens, if these pay for everything. Split by time: "
        f"{dollars(costs.split_input)} per 1M input and {dollars(costs.split_output)} per 1M output tokens. "
        f"{dollars(hour)} an hour is {price}."
    )


def slo_words(plan: Plan) -> str:
    """A clause for each objective: whether its estimate meets it, and whether its error bar does."""
    values = {"ttft": plan.ttft, "tpot": plan.tpot, "e2el": plan.ttlt}
    why = "the queue grows without limit" if plan.fits else "the plan does not fit"
    said = []
    for name, limit in plan.request.slo.items():
        said_of_it = f"{NAMES[name]} ≤ {number(limit)} ms: "
        if (estimate := values[name]) is not None:
            said_of_it += _objective(limit, estimate)
        elif plan.slo_met[name]:
            said_of_it += "met, as an answer of one token has none"
        else:
            said_of_it += f"missed, because {why}"
        said.append(said_of_it)
    return "; ".join(said) + "."


def _objective(limit_ms: float, estimate: Estimate) -> str:
    ratio = estimate.value * 1e3 / limit_ms
    if ratio <= 1:
        if estimate.high * 1e3 <= limit_ms:
            return f"met, {1 - ratio:.0%} below the limit"
        return f"probably met, but the error bar ends at {_end(estimate.high)}"
    if estimate.low * 1e3 > limit_ms:
        return f"missed by {ratio - 1:.0%}" if ratio < 2 else f"missed, {number(ratio)} times the limit"
    return f"probably missed, but the error bar begins at {_end(estimate.low)}"


def _end(value: float) -> str:
    return seconds(value) if math.isfinite(value) else "no limit"


def _speculation(plan: Plan) -> str:
    found, asked = plan.speculated, plan.request.speculation
    assert found is not None and asked is not None
    up = found.speedup
    speed = f"{number(up)} times as fast" if up >= 1 else f"{number(1 / up)} times as slow"
    even = "never" if found.break_even is None else f"above an acceptance of {found.break_even:.2f}"
    return (
        f"with {many(asked.tokens, 'token')} at an acceptance of {asked.acceptance:g}, a step yields "
        f"{number(found.accepted)} tokens and TPOT is {seconds(found.tpot_s)}, {speed}; it is faster {even}; the best "
        f"number of tokens is {found.best_tokens or 0}"
    )
