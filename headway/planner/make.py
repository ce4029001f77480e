"""Makes the plan that a request asks for."""

from __future__ import annotations

import math
from dataclasses import replace

from headway.cost import price, speculative
from headway.cost.capacity import Capacity, capacity
from headway.cost.loading import loading
from headway.cost.memory import kv_cache_bytes, weight_bytes
from headway.cost.requests import RequestShape
from headway.planner import estimates
from headway.planner.assumptions import assumptions
from headway.planner.estimates import Estimates
from headway.planner.loads import Lanes, Outcome, intake_s, per_lane
from headway.planner.plan import Bars, Costs, Estimate, Plan, PlannedStep, Speculated
from headway.planner.problems import problem, warnings
from headway.planner.request import PlanRequest
from headway.planner.resolve import Resolved, draft_of, resolve
from headway.planner.steps import compute_bound_batch, compute_bound_weights, decode_step, prefill_step


def make_plan(request: PlanRequest, brief: bool = False) -> Plan:
    """The plan of a request: everything that can be said of a deployment before it runs.

    A model that does not fit is no error: the plan says by how much (`problem`), and what would make it fit.

    Args:
        brief: leave out what takes further runs of the load and does not decide whether objectives are met: the ends of
            error bars under a rate, and the saturation rate of other loads, are NaN.

    Raises:
        PlanError: a name is not known, or the model cannot be run like this.
    """
    found = resolve(request)
    deployment = found.deployment
    prompt, answer, cached = found.prompt_tokens, found.output_tokens, request.cached_tokens
    workload = RequestShape(prompt, answer, cached, request.output_spread)
    held = capacity(deployment, prompt, answer, found.settings, cached=cached)
    count = found.replicas * deployment.parallelism.data
    # Memory may hold fewer sequences than the engine would run.
    limits = replace(found.limits, sequences=min(found.limits.sequences, max(1, held.max_batch)))
    lanes = Lanes(deployment, workload, found.replicas, count, limits)
    load, value = _load(request)
    fits = held.fits and not (load == "batch" and value > held.max_batch * deployment.parallelism.data)
    plan = _plan(request, found, held, lanes, lanes.under(load, value) if fits else None, brief)
    return replace(plan, assumptions=assumptions(plan), warnings=warnings(plan), problem=problem(plan))


def _plan(
    request: PlanRequest, found: Resolved, held: Capacity, lanes: Lanes, outcome: Outcome | None, brief: bool
) -> Plan:
    """The plan without its sentences (assumptions, warnings and the problem).

    Args:
        outcome: what clients see under the load; None where it does not fit.
    """
    deployment, workload = lanes.deployment, lanes.workload
    load, value = _load(request)
    lane_batch = _lane_batch(lanes, load, value, outcome)
    stages = deployment.parallelism.data * deployment.parallelism.pipeline
    batch = int(value) if load == "batch" else lane_batch * stages
    weights = weight_bytes(deployment.shape, deployment.precision)
    prefill = prefill_step(deployment, workload, found.limits.batched_tokens)
    decode = decode_step(deployment, workload, batch, lane_batch)
    bars = _bars(found, workload, prefill, decode)
    found_estimates = _estimates(lanes, bars, load, value, outcome, brief)
    hour, source = _price(request, found)
    return Plan(
        request=request,
        model=found.model.name,
        dtype=found.dtype,
        quantization=found.quantization,
        kv_cache_dtype=found.kv_cache_dtype,
        deployment=deployment,
        replicas=found.replicas,
        devices=found.devices,
        engine=found.engine,
        lanes=lanes.count,
        workload=workload,
        limits=found.limits,
        load=load,
        load_value=value,
        batch=batch,
        lane_batch=lane_batch,
        settings=found.settings,
        capacity=held,
        weights_bytes=weights,
        kv_bytes_per_token=deployment.precision.kv.bytes_of(deployment.shape.kv_elements_per_token),
        kv_cache_bytes=_kv_cache_bytes(found, workload, batch),
        prefill=prefill,
        decode=decode,
        ridge_flops_per_byte=deployment.hardware.roofline(deployment.precision.linear.compute).ridge,
        served=outcome.served if outcome else None,
        bubble=outcome.bubble if outcome else 0.0,
        bars=bars,
        ttft=found_estimates.ttft,
        tpot=found_estimates.tpot,
        ttlt=found_estimates.ttlt,
        output_tokens_per_s=found_estimates.output_tokens_per_s,
        saturation_rate=_saturation_rate(lanes, held, brief and load != "rate"),
        compute_bound_batch=compute_bound_batch(deployment, workload.mean_context),
        compute_bound_weights=compute_bound_weights(deployment),
        loading=loading(weights, held.weights, deployment.hardware, request.storage_gb_per_s * 1e9),
        price_per_hour=hour,
        price_source=source,
        costs=_costs(hour, outcome, lanes, found.devices),
        slo_met=_slo_met(request, found_estimates),
        speculated=_speculated(request, found, workload, lane_batch),
    )


def _kv_cache_bytes(found: Resolved, workload: RequestShape, sequences: int) -> int:
    """Bytes of cache that all sequences take when they are longest.

    Each data-parallel group holds the shared prefix once, in whole blocks, unless it costs less not to share.
    """
    deployment, settings = found.deployment, found.settings

    def held(tokens: int, count: int) -> int:
        shape, block = deployment.shape, settings.block_size
        return kv_cache_bytes(shape, tokens, deployment.precision, block, count, settings.rolling)

    whole = workload.cached // settings.block_size * settings.block_size
    apart = held(workload.prompt + workload.output, sequences)
    groups = min(sequences, deployment.parallelism.data)
    return min(apart, held(whole, groups) + held(workload.prompt - whole + workload.output, sequences))


def _bars(found: Resolved, workload: RequestShape, prefill: PlannedStep, decode: PlannedStep) -> Bars:
    """The error bars of a calibrated machine, or else those of measurements by others."""
    if found.machine is None:
        return estimates.published_bars(found.deployment.hardware)
    return estimates.calibrated_bars(found.machine, prefill.time, decode.time, intake_s(found.deployment, workload))


def _load(request: PlanRequest) -> tuple[str, float]:
    if request.concurrency is not None:
        return "concurrency", request.concurrency
    if request.request_rate is not None:
        return "rate", request.request_rate
    return "batch", request.batch_size or 1


def _lane_batch(lanes: Lanes, load: str, value: float, outcome: Outcome | None) -> int:
    stages = lanes.deployment.parallelism.pipeline
    if load != "batch" and outcome is not None:
        return max(1, round(outcome.running / stages))
    if load == "rate":
        return 1
    return per_lane(value, stages * (lanes.count // lanes.replicas if load == "batch" else lanes.count))


def _saturation_rate(lanes: Lanes, held: Capacity, unasked: bool) -> float:
    if not held.fits:
        return 0.0
    return math.nan if unasked else lanes.saturated.requests_per_s


def _estimates(lanes: Lanes, bars: Bars, load: str, value: float, outcome: Outcome | None, brief: bool) -> Estimates:
    if outcome is None:
        return Estimates()
    if load != "rate":
        return estimates.of_steady(outcome, lanes.workload, bars, bars.of_ttft(load, value))

    def at(factor: float) -> Outcome:
        return lanes.at_rate(factor * outcome.requests_per_s)

    saturation = lanes.saturated.requests_per_s
    return estimates.of_arrivals(outcome, lanes.workload, bars, value, saturation, None if brief else at)


def _price(request: PlanRequest, found: Resolved) -> tuple[float | None, str]:
    """The price of all devices for an hour in US dollars, if known, and where it comes from."""
    if request.price_per_hour is not None:
        return request.price_per_hour * found.devices, "as given"
    listed = found.deployment.hardware.price
    if listed is None:
        return None, ""
    return listed.per_hour * found.devices, f"{listed.source}, {listed.date}".strip(", ")


def _costs(hour: float | None, outcome: Outcome | None, lanes: Lanes, devices: int) -> Costs:
    if outcome is None or outcome.requests_per_s <= 0:
        return Costs()
    workload = lanes.workload
    tokens_per_s = outcome.requests_per_s * workload.output
    money, watts = Costs(), lanes.deployment.hardware.tdp_w
    if hour is not None:
        of_input, of_output = price.split_cost(
            hour, outcome.requests_per_s, workload.prompt, workload.output, outcome.prompt_share
        )
        money = Costs(price.cost_per_million(hour, tokens_per_s), of_input, of_output, outcome.prompt_share)
    if watts is None:
        return money
    return replace(
        money,
        tokens_per_s_per_watt=price.tokens_per_s_per_watt(tokens_per_s, watts * devices),
        kwh_per_million=price.kwh_per_million(tokens_per_s, watts * devices),
    )


def _slo_met(request: PlanRequest, found: Estimates) -> dict[str, bool]:
    values: dict[str, Estimate | None] = {"ttft": found.ttft, "tpot": found.tpot, "e2el": found.ttlt}
    met = {}
    for name, limit_ms in request.slo.items():
        estimate = values[name]
        if name == "tpot" and estimate is None and request.output_tokens == 1:
            met[name] = found.ttft is not None
        else:
            met[name] = estimate is not None and estimate.value * 1e3 <= limit_ms
    return met


def _speculated(request: PlanRequest, found: Resolved, workload: RequestShape, batch: int) -> Speculated | None:
    """What speculative decoding makes of a decode step, if it is asked for.

    The draft runs on the devices that share a layer of the model where it can be divided so, otherwise on one.
    """
    if (asked := request.speculation) is None:
        return None
    draft = draft_of(asked.draft, found.deployment) if asked.draft is not None else None
    target, context = found.deployment, workload.mean_context
    plain = speculative.tpot_s(target, None, batch, context, 0, 0.0)
    tpot = speculative.tpot_s(target, draft, batch, context, asked.tokens, asked.acceptance)
    return Speculated(
        accepted=speculative.expected_tokens(asked.tokens, asked.acceptance),
        tpot_s=tpot,
        speedup=plain / tpot,
        best_tokens=speculative.best_tokens(target, draft, batch, context, asked.acceptance),
        break_even=speculative.break_even(target, draft, batch, context, asked.tokens),
    )
