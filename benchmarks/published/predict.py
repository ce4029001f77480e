"""What the cost model says of a published measurement: the same deployment under the same load."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.published.rows import Row
from headway.cost.catalogue import find_hardware, find_model
from headway.cost.efficiency import Efficiency
from headway.cost.hardware import Hardware
from headway.cost.parallel import Parallelism
from headway.cost.precision import Format, Precision
from headway.cost.requests import Limits, RequestShape
from headway.cost.timing import Deployment
from headway.planner.engines import find_profile
from headway.planner.loads import PROMPTS_A_CLIENT
from headway.simulator.serving import Served, closed_loop, open_loop

EfficiencyOf = Callable[[Hardware, str], Efficiency]
MOST_REQUESTS = 1000
PLAN_SPREAD = 0.1  # the default of `headway plan`
MOST_ROUNDS = PROMPTS_A_CLIENT  # most rounds in a closed loop; more hardly change medians


@dataclass(frozen=True)
class Predicted:
    """Predictions in the units of a `Row`; None where the row has no such figure either."""

    ttft_ms: float | None
    tpot_ms: float | None
    output_tokens_per_s: float | None


def precision_of(row: Row) -> Precision:
    """The formats of the row's checkpoint."""
    scheme = {"mxfp4": "mxfp4"}.get(row.quantization, row.quantization)
    precision = Precision.named("bfloat16", scheme, row.kv_cache_dtype)
    if row.quantization == "mxfp4":
        precision = precision.for_experts_only()
    if row.engine == "gpt-fast" and row.quantization != "none":
        kept = precision.linear if row.quantization != "int4" else Format("int4", 4, "bf16", 32, 32)
        precision = dataclasses.replace(precision, linear=kept, head=kept)
    return precision


def deployment(row: Row, efficiency_of: EfficiencyOf) -> Deployment:
    """The row's model on its hardware. A batch, or a burst of one, is given to the engine without a server."""
    hardware = find_hardware(row.hardware)
    efficiency = efficiency_of(hardware, row.engine)
    if row.load in ("batch", "burst"):
        efficiency = dataclasses.replace(efficiency, token_s=0.0, request_s=0.0, output_s=0.0)
    return Deployment(
        find_model(row.model).shape,
        precision_of(row),
        hardware,
        efficiency,
        Parallelism(tensor=row.tensor_parallel),
    )


def predict(row: Row, efficiency_of: EfficiencyOf) -> Predicted:
    """The row's figures by the model."""
    found = deployment(row, efficiency_of)
    load = RequestShape(row.prompt_tokens, row.output_tokens, 0, row.spread)
    served = _serve(row, found, load, _limits(row))
    ttft = served.ttft_p50_s if row.statistic == "median" else served.ttft_s
    if row.load == "batch":  # until the last has its first token: how long the batch takes with one output token
        ttft = served.ttft_p99_s
    rate = served.requests_per_s * row.output_tokens
    return Predicted(
        ttft_ms=None if row.ttft_ms is None else 1e3 * ttft,
        tpot_ms=None if row.tpot_ms is None else 1e3 * served.tpot_s,
        output_tokens_per_s=None if row.output_tokens_per_s is None else rate,
    )


def planned_ttft_ms(row: Row, efficiency_of: EfficiencyOf) -> float:
    """The TTFT of a closed loop by `headway plan`, which does not know how, and how long, somebody measures."""
    found, clients = deployment(row, efficiency_of), int(row.load_value)
    load = RequestShape(row.prompt_tokens, row.output_tokens, 0, row.spread or PLAN_SPREAD)
    limits = find_profile(row.engine).limits(found.hardware)
    served = closed_loop(found, load, clients, PROMPTS_A_CLIENT * clients, limits)
    return 1e3 * (served.ttft_p50_s if row.statistic == "median" else served.ttft_s)


def _limits(row: Row) -> Limits:
    """The limits that the row's source states, or else the defaults of its engine's server."""
    usual, source = find_profile(row.engine).limits(find_hardware(row.hardware)), row.source
    return dataclasses.replace(
        usual,
        batched_tokens=source.max_num_batched_tokens or usual.batched_tokens,
        sequences=source.max_num_seqs or usual.sequences,
        ahead=source.ahead,
    )


def _serve(row: Row, found: Deployment, load: RequestShape, limits: Limits) -> Served:
    count = int(row.load_value)
    if row.load == "batch":
        return open_loop(found, load, [0.0] * count, limits)
    if row.load == "burst":
        return open_loop(found, load, [0.0] * (row.num_prompts or count), limits)
    if row.load == "concurrency":
        prompts = min(row.num_prompts or MOST_ROUNDS * count, MOST_ROUNDS * count)
        return closed_loop(found, load, count, prompts, limits, row.source.ramp_s)
    requests = min(row.num_prompts or 500, MOST_REQUESTS)
    gaps = np.random.default_rng(0).exponential(1.0 / row.load_value, requests)
    return open_loop(found, load, np.cumsum(gaps).tolist(), limits)
