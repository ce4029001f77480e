"""The short answer of a plan: does it fit, how fast, what limits it, how many, what it costs."""

from __future__ import annotations

from collections.abc import Iterator

from headway.planner.plan import Estimate, Plan
from headway.planner.words import bar, dollars, gigabytes, many, milliseconds, seconds
from headway.report.parts import Line
from headway.report.style import number

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
    """Model, hardware and load in a line."""
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
    yield _memory(plan)
    if plan.ttft is not None or (plan.load == "rate" and plan.fits):
        ttft = "grows without limit" if plan.ttft is None else milliseconds(plan.ttft)
        note = load_note(plan)
        yield Line("TTFT", f"{ttft}; prefill is {BOUNDS[plan.prefill.bound]}" + (f". {note}" if note else ""))
    if plan.tpot is not None:
        yield Line("TPOT", f"{milliseconds(plan.tpot)}; decode is {BOUNDS[plan.decode.bound]}")
    if plan.output_tokens_per_s is not None:
        yield Line("Tokens/s", _tokens(plan, plan.output_tokens_per_s))
    if plan.fits:
        yield Line("Most", _most(plan))
    if plan.costs.per_million_output_tokens is not None:
        yield Line("Cost", _cost(plan))
    if plan.slo_met:
        met = all(plan.slo_met.values())
        yield Line("SLO", slo_words(plan), "good" if met else "bad")
    if plan.speculated is not None:
        yield Line("Speculation", _speculation(plan))


def load_note(plan: Plan) -> str | None:
    """What is known of TTFT under load beyond its estimate; None for one client, a batch, and where there is none."""
    if plan.ttft is None or plan.served is None or (plan.load != "rate" and plan.load_value == 1):
        return None
    if plan.load == "rate":
        return "Under load this is the least certain figure: real arrivals cluster more than random ones"
    return f"All clients start at once: median {seconds(plan.served.ttft_p50_s)}, P99 {seconds(plan.served.ttft_p99_s)}"


def _memory(plan: Plan) -> Line:
    held, several = plan.capacity, plan.deployment.parallelism.devices > 1
    text = (
        f"{gigabytes(held.weights)} of weights{_in_all(held.weights, plan.weights_bytes)} in {gigabytes(held.usable)} "
        "of usable memory" + (" on each device" if several else "")
    )
    if not plan.capacity.fits:
        return Line("Memory", text, "bad")
    tokens = plan.workload.prompt + plan.workload.output
    shared = f", {plan.workload.cached:,} of them shared," if plan.workload.cached else ""
    text += (
        f"; {gigabytes(held.kv_pool)} remain for the KV cache, {gigabytes(held.kv_per_token)} per token"
        f"{_in_all(held.kv_per_token, plan.kv_bytes_per_token)}: {many(plan.max_batch, 'request')} of {tokens:,} "
        f"tokens{shared} at once, or {_longest(plan)}"
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
    return text


def _most(plan: Plan) -> str:
    text = f"{number(plan.saturation_rate)} requests/s"
    weights, whole = plan.compute_bound_weights, plan.compute_bound_batch
    if whole is not None and (weights is None or whole <= weights):
        return f"{text}; above batch {whole:,} decode is compute-bound"
    if weights is None:
        return text
    text += f"; above batch {weights:,} weight products are compute-bound"
    return text + (", but never dominate the step" if whole is None else f", and above {whole:,} the whole step")


def _cost(plan: Plan) -> str:
    costs, hour = plan.costs, plan.price_per_hour or 0.0
    return (
        f"{dollars(costs.per_million_output_tokens)} per 1M output tokens, input included; split by time, "
        f"{dollars(costs.split_input)} per 1M input and {dollars(costs.split_output)} per 1M output tokens "
        f"({dollars(hour)} an hour, {'as given' if plan.request.price_per_hour else 'list price'})"
    )


def slo_words(plan: Plan) -> str:
    """Each objective with its estimate, and how sure it is."""
    values = {"ttft": plan.ttft, "tpot": plan.tpot, "e2el": plan.ttlt}
    why = "the queue grows without limit" if plan.fits else "it does not fit"
    said = []
    for name, limit in plan.request.slo.items():
        if (estimate := values[name]) is not None:
            said.append(_objective(name, limit, estimate))
        elif plan.slo_met[name]:
            said.append(f"{name} met: an answer of one token has none")
        else:
            said.append(f"{name} of {number(limit)} ms missed: {why}")
    return "; ".join(said)


def _objective(name: str, limit_ms: float, estimate: Estimate) -> str:
    ratio = estimate.value * 1e3 / limit_ms
    if ratio <= 1:
        sure = "" if estimate.high * 1e3 <= limit_ms else ", but its error bar exceeds the limit"
        return f"{name} of {number(limit_ms)} ms met with {1 - ratio:.0%} to spare{sure}"
    over = f" by {ratio - 1:.0%}" if ratio < 2 else f": it takes {number(ratio)} times as long"
    sure = "" if estimate.low * 1e3 > limit_ms else ", but its error bar reaches below the limit"
    return f"{name} of {number(limit_ms)} ms missed{over}{sure}"


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
