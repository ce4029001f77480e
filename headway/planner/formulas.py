"""The calculation behind a plan as formulas, in order; from the same values as the plan."""

from __future__ import annotations

from collections.abc import Iterator

from headway.cost.loading import DESERIALIZE_BYTES_PER_S, HOST_LINK_SHARE
from headway.planner.document_formulas import of_documents
from headway.planner.formula import Formula, plain
from headway.planner.loads import intake_s, per_lane
from headway.planner.plan import Plan
from headway.planner.step_formulas import added, of_cache, of_cache_saved, of_memory, of_ridge, of_step, of_weights

SIMULATED = "simulated step by step, simulator/serving.py: Orca 2022, Sarathi-Serve 2024"


def formulas(plan: Plan) -> Iterator[Formula]:
    """Formulas of every headline figure, each after the figures that it is made of."""
    yield from of_weights(plan)
    yield from of_cache(plan)
    yield from of_memory(plan)
    yield from of_ridge(plan)
    for name, step in (("prefill", plan.prefill), ("decode step", plan.decode)):
        yield from of_step(plan, name, step)
        yield from of_documents(plan, name, step)
    yield of_cache_saved(plan)
    yield from _turning_points(plan)
    if plan.output_tokens_per_s is not None:
        yield from _times(plan)
        yield from _money(plan)
    yield from _speculation(plan)
    yield from _loading(plan)


def _turning_points(plan: Plan) -> Iterator[Formula]:
    source = "search over batches; document 002, Why Batching Works, where it is the ridge"
    for name, rule, value in (
        (
            "products with weights",
            "the smallest that takes longer to multiply than to read",
            plan.compute_bound_weights,
        ),
        ("whole decode steps", "the smallest of which arithmetic takes most of the time", plan.compute_bound_batch),
    ):
        if value is not None:
            yield Formula(f"Batch from which on {name} are compute-bound", rule, "", value, "sequences", source)


def _times(plan: Plan) -> Iterator[Formula]:
    output = plan.workload.output
    if plan.ttft is not None:
        yield _ttft(plan, plan.ttft.value * 1e3)
    if plan.tpot is not None:
        yield Formula(
            "TPOT",
            "the decode step, halfway through the answer"
            if plan.load == "batch"
            else "mean over the requests of a lane",
            _round(plan) if plan.load == "batch" else "",
            plan.tpot.value * 1e3,
            "ms",
            "document 003, 3.2" if plan.load == "batch" else SIMULATED,
        )
    if plan.ttft is not None and plan.ttlt is not None:
        tpot = plan.tpot.value * 1e3 if plan.tpot else 0.0
        yield Formula(
            "TTLT",
            "TTFT + (output tokens - 1) × TPOT",
            f"{plain(plan.ttft.value * 1e3)} + ({output:,} - 1) * {plain(tpot)}",
            plan.ttlt.value * 1e3,
            "ms",
            "document 001, chapter 4; document 003, section 1, has one TPOT more",
        )
    yield _tokens_per_s(plan)
    yield Formula(
        "Saturation",
        "requests that are answered in a second when as many run as there is room for, and others wait",
        "",
        plan.saturation_rate,
        "requests/s",
        SIMULATED,
    )
    yield from _bars(plan)


def _tokens_per_s(plan: Plan) -> Formula:
    assert plan.output_tokens_per_s is not None
    output, tokens_per_s = plan.workload.output, plan.output_tokens_per_s.value
    if plan.load == "batch" and plan.ttlt is not None:
        return Formula(
            "Output tokens/s",
            "replicas × sequences × output tokens / TTLT",
            f"{plan.replicas} * {plan.batch:,} * {output:,} / ({plain(plan.ttlt.value * 1e3)} / 1000)",
            tokens_per_s,
            "tokens/s",
            "document 003, section 1",
        )
    return Formula(
        "Output tokens/s",
        "requests that are answered in a second × output tokens",
        f"{plain(tokens_per_s / output)} * {output:,}",
        tokens_per_s,
        "tokens/s",
        "document 003, section 1; the first factor: " + SIMULATED,
    )


def _bars(plan: Plan) -> Iterator[Formula]:
    """Formulas of the error bars' ends. A rate of arrivals has none: further runs of the load make its bars."""
    for name, estimate in (("TTFT", plan.ttft), ("TPOT", plan.tpot)):
        if estimate is not None and plan.load != "rate":
            for end, value in (("low", estimate.low), ("high", estimate.high)):
                yield Formula(
                    f"{name}, {end} end of the 80 % bar",
                    "estimate × factor between measurements and estimates",
                    f"{plain(estimate.value * 1e3)} * {plain(value / estimate.value)}",
                    value * 1e3,
                    "ms",
                    "residuals of headway calibrate"
                    if plan.deployment.hardware.measured
                    else "benchmarks/plan_accuracy.py",
                )


def _round(plan: Plan) -> str:
    """A decode step as a formula; in a pipeline, the step that all batches make at once."""
    step = plain(plan.decode.time.seconds * 1e3)
    stages = plan.deployment.parallelism.pipeline
    if stages == 1:
        return step
    group = per_lane(plan.batch, plan.deployment.parallelism.data)
    return f"max({step}, {min(stages, group)} * {plain(plan.deployment.pace(plan.decode.time) * 1e3)})"


def _ttft(plan: Plan, value_ms: float) -> Formula:
    if plan.load != "batch":
        return Formula("TTFT", "mean over the requests of a lane, waiting included", "", value_ms, "ms", SIMULATED)
    e, prompts = plan.deployment.efficiency, plan.lane_batch
    steps_ms = value_ms - intake_s(plan.deployment, plan.workload, prompts) * 1e3
    return Formula(
        "TTFT",
        "of each request + tokenizing a token × tokens of all prompts + their steps",
        f"{plain(e.request_s * 1e3)} + {plain(e.token_s * 1e3)} * {plan.workload.prompt:,} * {prompts:,} + "
        f"{plain(steps_ms)}",
        value_ms,
        "ms",
        "document 003, section 1: prefill dominates it",
    )


def _money(plan: Plan) -> Iterator[Formula]:
    costs, rate = plan.costs, plan.output_tokens_per_s
    if rate is None:
        return
    if plan.price_per_hour is not None and costs.per_million_output_tokens is not None:
        yield Formula(
            "Price of 1M output tokens",
            "price of an hour / 3600 × 10^6 / tokens a second",
            f"{plain(plan.price_per_hour)} / 3600 * 1000000 / {plain(rate.value)}",
            costs.per_million_output_tokens,
            "US dollars",
            f"document 003, section 13; price: {plan.price_source}",
        )
        yield from _split(plan, plan.price_per_hour, rate.value / plan.workload.output)
    if costs.tokens_per_s_per_watt is not None:
        watts = plan.deployment.hardware.tdp_w or 0.0
        yield Formula(
            "Tokens/s/W",
            "tokens a second / (power of a device × devices)",
            f"{plain(rate.value)} / ({plain(watts)} * {plan.devices})",
            costs.tokens_per_s_per_watt,
            "tokens/J",
            "document 003, section 13",
        )
    if costs.tokens_per_s_per_watt is not None and costs.kwh_per_million is not None:
        yield Formula(
            "Energy of 1M output tokens",
            "10^6 / tokens a joule / joules of a kWh",
            f"1000000 / {plain(costs.tokens_per_s_per_watt)} / 3600000",
            costs.kwh_per_million,
            "kWh",
            "document 003, section 13",
        )


def _split(plan: Plan, hour: float, requests_per_s: float) -> Iterator[Formula]:
    costs, work = plan.costs, plan.workload
    for name, share, tokens, value in (
        ("input", plain(costs.prompt_share), work.prompt, costs.split_input),
        ("output", f"(1 - {plain(costs.prompt_share)})", work.output, costs.split_output),
    ):
        if value is not None:
            yield Formula(
                f"Price of 1M {name} tokens, where prompts pay for the time that they take alone",
                f"price of an hour × share of the time / 3600 × 10^6 / {name} tokens a second",
                f"{plain(hour)} * {share} / 3600 * 1000000 / ({plain(requests_per_s)} * {tokens:,})",
                value,
                "US dollars",
                "document 003, section 13, divided by time",
            )


def _speculation(plan: Plan) -> Iterator[Formula]:
    found, asked = plan.speculated, plan.request.speculation
    if found is None or asked is None:
        return
    a, k = asked.acceptance, asked.tokens
    yield Formula(
        "Tokens of a step with speculation",
        "(1 - a^(k + 1)) / (1 - a), k tokens proposed, each accepted with probability a",
        f"(1 - {a:g}^({k} + 1)) / (1 - {a:g})" if a < 1 else f"{k} + 1",
        found.accepted,
        "tokens",
        "Leviathan, Kalman and Matias 2023, equation 1; document 003, section 6",
    )
    cycle = found.tpot_s * found.accepted * 1e3
    yield Formula(
        "TPOT with speculation",
        "a step that checks k + 1 tokens and k steps of the draft / tokens of a step",
        f"{plain(cycle)} / {plain(found.accepted)}",
        found.tpot_s * 1e3,
        "ms",
        "Leviathan, Kalman and Matias 2023, section 3",
    )


def _loading(plan: Plan) -> Iterator[Formula]:
    source, hardware = "document 000, Model Loading", plan.deployment.hardware
    weights, own = plan.weights_bytes, plan.capacity.weights
    stages = [
        ("Storage read", f"{plain(weights)} / {plain(plan.storage_bytes_per_s)}", plan.loading.storage_s),
        ("Deserialise", f"{plain(weights)} / {plain(DESERIALIZE_BYTES_PER_S)}", plan.loading.deserialize_s),
        ("Layout", f"2 * {plain(own)} / {plain(hardware.bytes_per_s)}", plan.loading.layout_s),
    ]
    if hardware.host_bytes_per_s:
        numbers = f"{plain(own)} / ({plain(hardware.host_bytes_per_s)} * {HOST_LINK_SHARE})"
        stages.insert(2, ("To the devices", numbers, plan.loading.transfer_s))
    for name, numbers, value in stages:
        yield Formula(f"{name}, loading the model", "bytes / rate", numbers, value, "s", source)
    yield Formula(
        "Loading the model",
        added([name.lower() for name, _, _ in stages]),
        added([plain(value) for _, _, value in stages]),
        plan.loading.seconds,
        "s",
        source,
    )
