"""The calculation behind a plan as formulas, in order; from the same values as the plan."""

from __future__ import annotations

from collections.abc import Iterator

from headway.cost.loading import DESERIALIZE_BYTES_PER_S, HOST_LINK_SHARE
from headway.planner.document_formulas import of_documents
from headway.planner.formula import Formula, Number, added, given, larger, ms
from headway.planner.loads import intake_s, per_lane
from headway.planner.plan import Plan
from headway.planner.step_formulas import in_words, of_cache, of_memory, of_ridge, of_step, of_weights
from headway.planner.technique_formulas import of_techniques

SIMULATED = "simulated step by step, simulator/serving.py: Orca 2022, Sarathi-Serve 2024"
SECTION_1, SECTION_13 = (f"document 003, section {number}" for number in (1, 13))
MILLION = 10**6


def formulas(plan: Plan) -> Iterator[Formula]:
    """Formulas of every headline figure, each after the figures that it is made of."""
    yield from of_weights(plan)
    yield from of_cache(plan)
    yield from of_memory(plan)
    yield of_ridge(plan)
    for name, step in (("prefill", plan.prefill), ("decode step", plan.decode)):
        yield from of_step(plan, name, step)
        yield from of_documents(plan, name, step)
    yield from _turning_points(plan)
    if plan.output_tokens_per_s is not None:
        yield from _times(plan)
        yield from _money(plan, plan.output_tokens_per_s.value)
    yield from _speculation(plan)
    yield from of_techniques(plan)
    yield from _loading(plan)


def _turning_points(plan: Plan) -> Iterator[Formula]:
    source = "search over batches; document 002, Why Batching Works, where it is the ridge"
    weights = "the smallest that takes longer to multiply than to read"
    steps = "the smallest of which arithmetic takes most of the time"
    for name, rule, value in (
        ("products with weights", weights, plan.compute_bound_weights),
        ("whole decode steps", steps, plan.compute_bound_batch),
    ):
        if value is not None:
            yield Formula(f"Batch from which on {name} are compute-bound", rule, value, "sequences", source)


def _times(plan: Plan) -> Iterator[Formula]:
    is_batch = plan.load == "batch"
    if plan.ttft is not None:
        yield _ttft(plan, plan.ttft.value)
    if plan.tpot is not None and is_batch:
        yield Formula("TPOT", "the decode step, halfway through the answer", _round(plan), "ms", "document 003, 3.2")
    elif plan.tpot is not None:
        yield Formula("TPOT", "mean over the requests of a lane", plan.tpot.value * 1e3, "ms", SIMULATED)
    output = given(plan.workload.output)
    if plan.ttft is not None and plan.ttlt is not None:
        yield Formula(
            "TTLT",
            "TTFT + (output tokens - 1) × TPOT",
            ms(plan.ttft.value) + (output - 1) * ms(plan.tpot.value if plan.tpot else 0),
            "ms",
            f"document 001, chapter 4; {SECTION_1}, has one TPOT more",
        )
    assert plan.output_tokens_per_s is not None
    rule, source = (
        "requests that are answered in a second × output tokens",
        f"{SECTION_1}; the first factor: {SIMULATED}",
    )
    rate = given(plan.output_tokens_per_s.value / plan.workload.output) * output
    if is_batch and plan.ttlt is not None:
        rule, source = "replicas × sequences × output tokens / TTLT", SECTION_1
        rate = given(plan.replicas) * given(plan.batch) * output / (ms(plan.ttlt.value) / 1000)
    yield Formula("Output tokens/s", rule, rate, "tokens/s", source)
    rule = "requests that are answered in a second when as many run as there is room for, and others wait"
    yield Formula("Saturation", rule, plan.saturation_rate, "requests/s", SIMULATED)
    yield from _bars(plan)


def _bars(plan: Plan) -> Iterator[Formula]:
    """Formulas of the error bars' ends. A rate of arrivals has none: further runs of the load make its bars."""
    measured = plan.deployment.hardware.measured
    source = "residuals of headway calibrate" if measured else "benchmarks/plan_accuracy.py"
    rule = "estimate × factor between measurements and estimates"
    for name, estimate in (("TTFT", plan.ttft), ("TPOT", plan.tpot)):
        if estimate is not None and plan.load != "rate":
            for end, value in (("low", estimate.low), ("high", estimate.high)):
                bar = ms(estimate.value) * given(value / estimate.value)
                yield Formula(f"{name}, {end} end of the 80 % bar", rule, bar, "ms", source)


def _round(plan: Plan) -> Number:
    """A decode step; in a pipeline, the step that all batches make at once."""
    step, stages = ms(plan.decode.time.seconds), plan.deployment.parallelism.pipeline
    if stages == 1:
        return step
    group = per_lane(plan.batch, plan.deployment.parallelism.data)
    return larger(step, given(min(stages, group)) * ms(plan.deployment.pace(plan.decode.time)))


def _ttft(plan: Plan, seconds: float) -> Formula:
    if plan.load != "batch":
        rule = "mean over the requests of a lane, waiting included"
        return Formula("TTFT", rule, seconds * 1e3, "ms", SIMULATED)
    e, prompts = plan.deployment.efficiency, plan.lane_batch
    steps = ms(seconds - intake_s(plan.deployment, plan.workload, prompts))
    return Formula(
        "TTFT",
        "of each request + tokenizing a token × tokens of all prompts + their steps",
        ms(e.request_s) + ms(e.token_s) * given(plan.workload.prompt) * given(prompts) + steps,
        "ms",
        f"{SECTION_1}: prefill dominates it",
    )


def _money(plan: Plan, tokens_per_s: float) -> Iterator[Formula]:
    costs, work, rate = plan.costs, plan.workload, given(tokens_per_s)
    if plan.price_per_hour is not None and costs.per_million_output_tokens is not None:
        hour = given(plan.price_per_hour)
        yield Formula(
            "Price of 1M output tokens",
            "price of an hour / 3600 × 10^6 / tokens a second",
            hour / 3600 * MILLION / rate,
            "US dollars",
            f"{SECTION_13}; price: {plan.price_source}",
        )
        share, requests_per_s = given(costs.prompt_share), given(tokens_per_s / work.output)
        for name, part, tokens, value in (
            ("input", share, work.prompt, costs.split_input),
            ("output", 1 - share, work.output, costs.split_output),
        ):
            if value is not None:
                yield Formula(
                    f"Price of 1M {name} tokens, where prompts pay for the time that they take alone",
                    f"price of an hour × share of the time / 3600 × 10^6 / {name} tokens a second",
                    hour * part / 3600 * MILLION / (requests_per_s * given(tokens)),
                    "US dollars",
                    f"{SECTION_13}, divided by time",
                )
    if costs.tokens_per_s_per_watt is not None:
        rule = "tokens a second / (power of a device × devices)"
        of_watt = rate / (given(plan.deployment.hardware.tdp_w or 0.0) * plan.devices)
        yield Formula("Tokens/s/W", rule, of_watt, "tokens/J", SECTION_13)
    if costs.tokens_per_s_per_watt is not None and costs.kwh_per_million is not None:
        energy = MILLION / given(costs.tokens_per_s_per_watt) / 3600000
        yield Formula(
            "Energy of 1M output tokens", "10^6 / tokens a joule / joules of a kWh", energy, "kWh", SECTION_13
        )


def _speculation(plan: Plan) -> Iterator[Formula]:
    found, asked = plan.speculated, plan.request.speculation
    if found is None or asked is None:
        return
    a, k = given(asked.acceptance), given(asked.tokens)
    yield Formula(
        "Tokens of a step with speculation",
        "(1 - a^(k + 1)) / (1 - a), k tokens proposed, each accepted with probability a",
        (1 - a ** (k + 1)) / (1 - a) if asked.acceptance < 1 else k + 1,
        "tokens",
        "Leviathan, Kalman and Matias 2023, equation 1; document 003, section 6",
    )
    yield Formula(
        "TPOT with speculation",
        "a step that checks k + 1 tokens and k steps of the draft / tokens of a step",
        ms(found.tpot_s * found.accepted) / given(found.accepted),
        "ms",
        "Leviathan, Kalman and Matias 2023, section 3",
    )


def _loading(plan: Plan) -> Iterator[Formula]:
    source, hardware = "document 000, Model Loading", plan.deployment.hardware
    weights, own = given(plan.weights_bytes), given(plan.capacity.weights)
    stages = {
        "Storage read": weights / given(plan.storage_bytes_per_s),
        "Deserialise": weights / given(DESERIALIZE_BYTES_PER_S),
    }
    if hardware.host_bytes_per_s:
        stages["To the devices"] = own / (given(hardware.host_bytes_per_s) * HOST_LINK_SHARE)
    stages["Layout"] = 2 * own / given(hardware.bytes_per_s)
    for name, seconds in stages.items():
        yield Formula(f"{name}, loading the model", "bytes / rate", seconds, "s", source)
    whole = added(given(seconds.value) for seconds in stages.values())
    yield Formula("Loading the model", in_words(map(str.lower, stages)), whole, "s", source)
