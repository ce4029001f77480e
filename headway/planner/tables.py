"""The tables of a plan, for the terminal and for pages."""

from __future__ import annotations

from headway.cost.work import Operation, Work
from headway.planner.plan import Estimate, Plan, PlannedStep
from headway.planner.technique_formulas import of_techniques
from headway.planner.words import amount, bar, dollars, gigabytes, seconds, share_of_memory, timed
from headway.report.parts import NOTHING, Table, cells
from headway.report.style import number


def tables(plan: Plan, narrow: bool = False) -> tuple[Table, ...]:
    """All tables that say something of this plan. `narrow` ones have fewer columns."""
    phases = (phase_table(plan, name, narrow) for name in ("prefill", "decode"))
    parts = [device_table(plan), memory_table(plan), *phases]
    if plan.output_tokens_per_s is not None:
        parts.append(serving_table(plan))
    parts += [technique_table(plan), loading_table(plan)]
    if plan.costs.per_million_output_tokens is not None or plan.costs.tokens_per_s_per_watt is not None:
        parts.append(cost_table(plan))
    return tuple(parts)


def device_table(plan: Plan) -> Table:
    """What a device is, as far as it is known."""
    hardware = plan.deployment.hardware
    link, watts, host = hardware.link, hardware.tdp_w, hardware.host_bytes_per_s
    bus = f"{hardware.bus_bits:,} bits" if hardware.bus_bits else ""
    rows = [
        ("memory", gigabytes(hardware.memory_bytes), f"{gigabytes(hardware.bytes_per_s)}/s"),
        ("memory bus", bus, ""),
        ("CUDA cores", f"{hardware.cuda_cores:,}" if hardware.cuda_cores else "", ""),
        ("tensor cores", f"{hardware.tensor_cores:,}" if hardware.tensor_cores else "", ""),
        ("power", f"{watts:g} W" if watts else "", "at most"),
        ("to its neighbours", f"{gigabytes(link.bytes_per_s)}/s" if link else "", link.kind if link else ""),
        ("to its host", f"{gigabytes(host)}/s" if host else "", "one way"),
    ]
    return Table(hardware.name, ("", "", ""), tuple(cells(*row) for row in rows if row[1]), left=frozenset({2}))


def memory_table(plan: Plan) -> Table:
    """What the memory of the fullest device holds."""
    held, tokens = plan.capacity, plan.workload.prompt + plan.workload.output
    sampler = ", and its sampler" if plan.settings.sampler_bytes else ""
    rows = [
        ("memory", gigabytes(held.memory), plan.deployment.hardware.name),
        ("usable", gigabytes(held.usable), share_of_memory(plan.settings)),
        ("weights", gigabytes(held.weights), f"{gigabytes(plan.weights_bytes)} in all"),
        ("activations", gigabytes(held.activations), f"of a step of {plan.limits.batched_tokens:,} tokens{sampler}"),
        ("workspace", gigabytes(held.workspace), f"runtime and captured graphs{_adapters(plan)}"),
        ("left for the KV cache", gigabytes(held.kv_pool), f"{held.pool_tokens:,} tokens"),
        ("per token", gigabytes(held.kv_per_token), f"{gigabytes(plan.kv_bytes_per_token)} in all"),
        ("this plan's batch", gigabytes(plan.kv_cache_bytes), f"{plan.batch:,} of {tokens:,} tokens, in all"),
        ("maximum sequences", f"{plan.max_batch:,}", f"of {tokens:,} tokens"),
        ("longest context", f"{held.max_context:,}", _longest(plan)),
    ]
    if not held.fits:
        rows.append(("missing", gigabytes(held.shortfall), "for one request"))
    return Table("Memory of a device", ("", "", ""), tuple(cells(*row) for row in rows), left=frozenset({2}))


def _adapters(plan: Plan) -> str:
    size = plan.settings.adapter_bytes
    return f", and {gigabytes(size)} of slots for adapters" if size else ""


def _longest(plan: Plan) -> str:
    limit = plan.deployment.shape.max_positions
    return f"tokens; the model's limit is {limit:,}" if limit else "tokens"


def phase_table(plan: Plan, name: str, narrow: bool = False) -> Table:
    """A row for each operation: what is done, how long it takes, what decides that, and what the data sheet allows.

    Args:
        narrow: leave out the columns of FLOPs, bytes and their ratio.
    """
    step = plan.prefill if name == "prefill" else plan.decode
    whole = step.time.seconds
    rows = []
    for part in step.time.parts:
        work = part_work(step, part.name)
        figures = (
            (amount(work.flops, ""), gigabytes(work.bytes), number(work.intensity))
            if work is not None
            else (NOTHING, NOTHING, NOTHING)
        )
        rows.append(
            cells(
                part.name.replace("_", " "),
                *figures,
                seconds(part.seconds),
                f"{part.seconds / whole:.0%}",
                part.bound,
                seconds(step.floors_s.get(part.name, 0.0)),
            )
        )
    if step.time.host_s:
        host = (seconds(step.time.host_s), f"{step.time.host_s / whole:.0%}", "overhead", "0 s")
        rows.append(cells("host", NOTHING, NOTHING, NOTHING, *host))
    moved = step.bytes + step.activation_bytes
    sums = (amount(step.flops, ""), gigabytes(moved), number(step.flops / moved))
    rows.append(cells("whole", *sums, seconds(whole), "100%", step.bound, seconds(step.floor_s)))
    columns = ("", "FLOP", "bytes", "FLOP/B", "time", "share", "bound", "physics")
    shown = [place for place, column in enumerate(columns) if not narrow or not 1 <= place <= 3]
    return Table(
        _phase_title(plan, name),
        tuple(columns[place] for place in shown),
        tuple(tuple(row[place] for place in shown) for row in rows),
        left=frozenset({shown.index(6)}),
        note=("" if narrow else "FLOP and bytes: the whole model in one pass. Times: one device. ")
        + f"Weights and KV cache alone: {gigabytes(step.bytes)}, {number(step.intensity)} FLOP/byte; above "
        f"{number(plan.ridge_flops_per_byte)} it is compute-bound. Physics: the same at the data sheet's full rates.",
    )


def _phase_title(plan: Plan, name: str) -> str:
    if name == "prefill":
        computed = plan.workload.prompt - plan.workload.cached
        return f"Prefill of one prompt, {computed:,} tokens" + (
            f" after {plan.workload.cached:,} cached" if plan.workload.cached else ""
        )
    title = f"A decode step of {plan.batch:,} at a context of {plan.workload.mean_context:,}"
    return title if plan.lane_batch == plan.batch else f"{title}, {plan.lane_batch:,} at a time"


def part_work(step: PlannedStep, part: str) -> Work | None:
    """Work of the whole model in a part of the time; None for what is not work (the network)."""
    if part == "attention":
        return step.work[Operation.SCORES] + step.work[Operation.VALUES]
    return step.work[Operation(part)] if part in set(Operation) else None


def serving_table(plan: Plan) -> Table:
    """What clients see, with bars."""
    rows = [
        ("TTFT", *_time(plan.ttft), "to the first token"),
        ("TPOT", *_time(plan.tpot), "for each token after it"),
        ("TTLT", *_time(plan.ttlt), "to the last token"),
        ("output tokens/s", *_plain(plan.output_tokens_per_s), "of all devices"),
        ("running", number(plan.served.running if plan.served else plan.lane_batch), "", "sequences in a step"),
        ("saturation", number(plan.saturation_rate), "", "requests/s at most"),
    ]
    if (served := plan.served) is not None and plan.ttft is not None:
        rows[3:3] = [
            ("TTFT, median, P90, P99", _seconds(served.ttft_p50_s, served.ttft_p90_s, served.ttft_p99_s), "", ""),
            ("TPOT, median, P90, P99", _seconds(served.tpot_p50_s, served.tpot_p90_s, served.tpot_p99_s), "", ""),
        ]
    if plan.deployment.parallelism.pipeline > 1:
        rows.append(("pipeline bubbles", f"{plan.bubble:.0%}", "", "of the time stages are idle"))
    return Table(
        "Serving",
        ("", "estimate", "80 % bar", ""),
        tuple(cells(*row) for row in rows),
        left=frozenset({3}),
        note="Means over requests. The bars contain four in five measurements of similar deployments.",
    )


def _seconds(*values: float) -> str:
    return ", ".join(map(seconds, values))


def _time(estimate: Estimate | None) -> tuple[str, str]:
    return ("–", "") if estimate is None else timed(estimate)


def _plain(estimate: Estimate | None) -> tuple[str, str]:
    return ("–", "") if estimate is None else (number(estimate.value), bar(estimate))


def technique_table(plan: Plan) -> Table:
    """What the cache, batching and the like gain or cost here; --explain has the formulas."""
    rows = [cells(each.name, number(each.value), each.unit) for each in of_techniques(plan)]
    return Table("What techniques gain and cost", ("", "", ""), tuple(rows), left=frozenset({2}))


def loading_table(plan: Plan) -> Table:
    """A cold start, stage by stage (document 000)."""
    loading = plan.loading
    rows = [
        (f"storage read, at {gigabytes(plan.storage_bytes_per_s)}/s", seconds(loading.storage_s)),
        ("deserialise", seconds(loading.deserialize_s)),
        ("to the devices", seconds(loading.transfer_s) if loading.transfer_s else "–"),
        ("layout", seconds(loading.layout_s)),
        ("in sequence", seconds(loading.seconds)),
        ("all in parallel", seconds(loading.least_s)),
    ]
    return Table(
        "Loading the model",
        ("", "time"),
        tuple(cells(*row) for row in rows),
        note="Engines overlap some stages, so the real time is between the last two. Process start, compilation and "
        "graph capture are not included.",
    )


def cost_table(plan: Plan) -> Table:
    """Money and energy."""
    costs, rows = plan.costs, []
    if plan.price_per_hour is not None:
        rows += [
            ("an hour of all devices", dollars(plan.price_per_hour), plan.price_source),
            ("1M output tokens", dollars(costs.per_million_output_tokens), "all of the price"),
            ("1M input tokens", dollars(costs.split_input), "split by time: the prompts' share"),
            ("1M output tokens", dollars(costs.split_output), "split by time: the rest"),
        ]
    if costs.tokens_per_s_per_watt is not None and costs.kwh_per_million is not None:
        watts = (plan.deployment.hardware.tdp_w or 0.0) * plan.devices
        rows += [
            ("tokens/s/W", number(costs.tokens_per_s_per_watt), f"output tokens per joule, at {number(watts)} W"),
            ("kWh for 1M", number(costs.kwh_per_million), "output tokens; devices only"),
        ]
    return Table("Cost and energy", ("", "", ""), tuple(cells(*row) for row in rows), left=frozenset({2}))
