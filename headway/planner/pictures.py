"""The figures of a plan: roofline, memory by context, throughput against latency, and where the time goes."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.cost.capacity import sequence_bytes
from headway.cost.roofline import Roofline
from headway.cost.work import NORMALISATION, compute_format
from headway.planner.answer import load_words
from headway.planner.loads import per_lane
from headway.planner.make import make_plan
from headway.planner.plan import Estimate, Plan, PlannedStep
from headway.planner.words import gigabytes, many, seconds
from headway.report import style
from headway.report.roofline import Marks, Spot, draw_roofline, name_spots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Place = tuple[Estimate, Estimate]  # of a plan in the picture: milliseconds and tokens a second, with bars
SWEEP_POINTS = 12
LONGEST = 2**24
# A mark on the roofline has at least the first area, in square points, and its share of the time adds of the second.
LEAST_AREA, MORE_AREA = 18, 240
PHASES = {"prefill": ("prompt", "o", "prefill-compute"), "decode": ("decode step", "s", "orange")}
# Parts of a step that are drawn as one, with their colours.
GROUPS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("QKV", ("qkv", "rotary", "kv_store"), "blue"),
    ("attention", ("attention", "latent"), "orange"),
    ("output projection", ("output",), "sky"),
    ("feed-forward", ("gate_up", "activation", "down", "layer_inputs"), "green"),
    ("experts", ("router", "experts", "shared_experts"), "purple"),
    ("head and sampling", ("head", "sampling"), "red"),
    ("norms and embedding", ("embedding", "norms", "final_norm"), "gold"),
    ("between devices", ("all_reduce", "all_to_all", "pipeline"), "queue-blocks"),
    ("host", ("host",), "gray"),
)


@style.drawing()
def roofline(plan: Plan) -> Figure:
    """FLOP/s against FLOPs per byte: what one device allows, and where each operation is that does arithmetic.

    A point's area is its share of the time of its step.
    """
    roofs = _roofs(plan)
    unit, name = (1e12, "TFLOP/s") if max(roof.flops_per_s for roof in roofs.values()) >= 1e12 else (1e9, "GFLOP/s")
    figure, (axes,) = style.new_figure(8.0, 4.6, x="Arithmetic intensity (FLOP per byte)", y=f"{name} of a device")
    marks = [
        Marks(label, marker, colour, _points(getattr(plan, key), unit))
        for key, (label, marker, colour) in PHASES.items()
    ]
    xs = [spot.x for kind in marks for spot in kind.spots]
    ys = [spot.y for kind in marks for spot in kind.spots]
    main = next(iter(roofs.values()))
    across = min(*xs, main.ridge) / 4, max(*xs, main.ridge) * 25
    up = min(ys) / 4, max(roof.flops_per_s for roof in roofs.values()) / unit * 2.2
    draw_roofline(axes, {label: roof.attainable for label, roof in roofs.items()}, marks, unit, across, up)
    axes.axvline(main.ridge, color=style.colour("muted"), lw=0.8, ls=(0, (2, 2)))
    bottom = ("data", "axes fraction")
    text = f"ridge {style.number(main.ridge)}"
    axes.annotate(text, (main.ridge, 0.02), (4, 0), xycoords=bottom, textcoords="offset points", fontsize=8)
    roof_at = [Spot("", float(x), main.attainable(float(x)) / unit) for x in np.geomspace(*across, 200)]
    names = [kind.spots for kind in marks]
    name_spots(axes, names, [kind.colour for kind in marks], avoid=roof_at, size=(7.1, 3.5))
    style.legend_outside(figure, [axes], 2)
    return figure


def _roofs(plan: Plan) -> dict[str, Roofline]:
    """The rooflines to draw, by label: one for each format that products are done in, the layers' matrices' first.

    A further one has the bandwidth of the device's caches where that is known and clearly higher.
    """
    hardware, precision = plan.deployment.hardware, plan.deployment.precision
    used = [
        precision.linear.compute,
        *(compute_format(op, precision) for op in plan.decode.work if op not in NORMALISATION),
    ]
    roofs = {}
    for format_ in dict.fromkeys(hardware.arithmetic(each) for each in used):
        roof = hardware.roofline(format_)
        roofs[f"{_rate(roof.flops_per_s)} in {format_}, {gigabytes(roof.bytes_per_s)}/s"] = roof
    first = next(iter(roofs.values()))
    nearer = hardware.bandwidth(plan.deployment.working_set)
    if nearer > 1.1 * first.bytes_per_s:
        held = gigabytes(plan.deployment.working_set)
        roofs[f"{held} over and over, from caches: {gigabytes(nearer)}/s"] = Roofline(first.flops_per_s, nearer)
    return roofs


def _rate(flops_per_s: float) -> str:
    large = flops_per_s >= 1e12
    return f"{style.number(flops_per_s / (1e12 if large else 1e9))} {'TFLOP/s' if large else 'GFLOP/s'}"


def _points(step: PlannedStep, unit: float) -> list[Spot]:
    """The points of operations that multiply, those that take longest first."""
    whole = step.time.seconds
    parts = [part for part in step.time.parts if part.work.flops and part.work.bytes and part.seconds]
    return [
        Spot(
            part.name.replace("_", " "),
            part.work.intensity,
            part.work.flops / part.seconds / unit,
            LEAST_AREA + MORE_AREA * part.seconds / whole,
        )
        for part in sorted(parts, key=lambda part: -part.seconds)
    ]


@style.drawing()
def memory(plan: Plan) -> Figure:
    """What the fullest device holds by the context of its sequences, for one, some and all of the plan's."""
    x, y = "Context of each sequence (tokens)", "Memory of a device (GB)"
    figure, (axes,) = style.new_figure(8.0, 4.2, x=x, y=y)
    held = plan.capacity
    contexts = _contexts(plan)
    base = held.weights + held.activations + held.workspace
    layers = (
        (held.weights, "weights", "blue"),
        (held.activations, "activations", "gold"),
        (held.workspace, "workspace", "gray"),
    )
    edge = 0.0
    for size, name, colour in layers:
        label = f"{name}, {gigabytes(size)}"
        axes.fill_between(
            contexts, edge / 1e9, (edge + size) / 1e9, color=style.colour(colour), alpha=0.55, lw=0, label=label
        )
        edge += size
    for number, batch in enumerate(_batches(plan)):
        sizes = np.array([base + kv_of_device(plan, batch, context) for context in contexts]) / 1e9
        line = {"color": style.colour("green"), "ls": style.series_line(number), "lw": 1.2 + 0.5 * number}
        crossing = longest_context(plan, batch)
        axes.plot(contexts, sizes, label=f"with the cache of {batch:,}: {_reach(plan, crossing)}", **line)
        if contexts[0] <= crossing <= contexts[-1]:
            axes.plot(
                [crossing], [held.usable / 1e9], "o", ms=6, color=style.colour("green"), mec=style.colour("paper")
            )
    asked = plan.workload.prompt + plan.workload.output
    axes.axvline(asked, color=style.colour("muted"), lw=0.8, ls=(0, (2, 2)))
    ceiling = max(held.memory, base) * 1.16
    for size, what in ((held.usable, "to use"), (held.memory, "memory")):
        axes.axhline(size / 1e9, color=style.colour("red" if size == held.usable else "ink"), lw=1.2)
        axes.annotate(
            f"{what} {gigabytes(size)}",
            (0, size / 1e9),
            (4, 3 if size == held.memory else -9),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set_ylim(0, ceiling / 1e9)
    axes.set_xlim(contexts[0], contexts[-1])
    style.log_axis(axes, "x")
    axes.annotate(f"this plan: {asked:,}", (asked, 0), (4, 5), textcoords="offset points", fontsize=8)
    style.legend_outside(figure, [axes], 2)
    return figure


def _reach(plan: Plan, longest: int) -> str:
    """The longest context, in words: the model or the engine may limit it before memory does."""
    limit = _limit(plan)
    if not longest:
        return "none fits"
    return f"up to {longest:,} tokens" if not limit or longest < limit else f"all {limit:,} that are allowed"


def _limit(plan: Plan) -> int | None:
    """Tokens of a sequence that are allowed, however much memory there is."""
    return plan.request.max_model_len or plan.deployment.shape.max_positions


def kv_of_device(plan: Plan, batch: int, context: int) -> int:
    """Bytes of the cache of the fullest device, where a replica has `batch` sequences of so many tokens, in blocks."""
    each = per_lane(batch, plan.deployment.parallelism.data)
    return each * sequence_bytes(plan.deployment, context, plan.request.block_size)


def longest_context(plan: Plan, batch: int) -> int:
    """Tokens, in whole blocks, that each of `batch` sequences of a replica can have; 0 where not one block fits.

    At most LONGEST: with sliding windows alone, a context has no end.
    """
    block, pool = plan.request.block_size, plan.capacity.kv_pool
    fits = (
        bisect.bisect_right(range(LONGEST // block + 1), pool, key=lambda n: kv_of_device(plan, batch, n * block)) - 1
    )
    return max(0, fits) * block


def _batches(plan: Plan) -> list[int]:
    """Batch sizes to draw: one, some, and the plan's; or for a plan of one, larger ones."""
    most = plan.batch if plan.batch > 1 else 64
    return sorted({1, max(1, round(most**0.5)), most})


def _contexts(plan: Plan) -> list[int]:
    """Contexts to draw, in tokens: from a block to well above the plan's, or to the model's limit if that is near."""
    asked = plan.workload.prompt + plan.workload.output
    longest = max(8 * asked, 4 * min(plan.capacity.max_context, 2**20), 8192)
    limit = _limit(plan)
    longest = max(2 * asked, min(longest, limit) if limit else longest)
    shortest = max(plan.request.block_size, min(128, asked // 4))
    return [int(n) for n in np.unique(np.geomspace(shortest, longest, 200).round())]


def sweep(plan: Plan) -> tuple[Plan, ...]:
    """The same deployment under more and less of the same kind of load, the plan itself among them; () if unfit."""
    if not plan.capacity.fits:
        return ()
    if plan.load == "rate":
        values: list[float] = [plan.saturation_rate * share for share in np.linspace(0.1, 0.95, SWEEP_POINTS)]
    else:
        room = min(plan.limits.sequences, plan.max_batch // plan.deployment.parallelism.data)
        room *= plan.deployment.parallelism.data * (plan.replicas if plan.load == "concurrency" else 1)
        most = max(room, plan.load_value if plan.fits else 1)
        values = [int(n) for n in np.unique(np.geomspace(1, most, SWEEP_POINTS).round())]
    others = [value for value in values if value != plan.load_value]
    plans = [under(plan, value) for value in others]
    if plan.fits and plan.ttft is not None:
        plans.append(plan)
    return tuple(sorted(plans, key=lambda each: each.load_value))


def under(plan: Plan, value: float) -> Plan:
    """The plan at another value of its load, in brief."""
    name = {"batch": "batch_size", "concurrency": "concurrency", "rate": "request_rate"}[plan.load]
    change: dict[str, Any] = {name: value}
    return make_plan(replace(plan.request, **change), brief=True)


@style.drawing()
def latency(plan: Plan, plans: Sequence[Plan]) -> Figure:
    """Throughput against TPOT and TTFT over the load, with the plan, its error bars and its objectives."""
    x, y = ("TPOT (ms)", "TTFT (ms)"), ("Output tokens/s", "")
    figure, panels = style.new_figure(8.0, 4.0, columns=2, x=x, y=y, sharey=True)
    for axes, key in zip(panels, ("tpot", "ttft"), strict=True):
        shown = [(each, at) for each in plans if (at := _at(each, key)) is not None]
        if not shown:
            style.nothing_to_show(axes, "the model does not fit" if not plan.fits else f"there is no {key.upper()}")
            continue
        _curve(axes, plan, shown, plan.request.slo.get(key), key)
    style.legend_outside(figure, panels, 3)
    return figure


def _at(plan: Plan, key: str) -> Place | None:
    time, rate = getattr(plan, key), plan.output_tokens_per_s
    return None if time is None or rate is None else (time.scaled(1e3), rate)


def _curve(axes: Axes, plan: Plan, shown: Sequence[tuple[Plan, Place]], limit: float | None, key: str) -> None:
    xs, ys = [x.value for _, (x, _) in shown], [y.value for _, (_, y) in shown]
    what = {"batch": "batch size", "concurrency": "clients", "rate": "requests/s"}[plan.load]
    axes.plot(xs, ys, color=style.colour("blue"), marker="o", ms=3.5, label=f"by {what}")
    planned = _at(plan, key)
    if planned is not None:
        x, y = planned
        label, bars = f"planned, {load_words(plan)}, with its 80 % bar", {"xerr": _arms(x), "yerr": _arms(y)}
        style.ranges(axes, [x.value], [y.value], "orange", label, "D", **bars, ms=6, elinewidth=1.1, zorder=4)
    if limit is not None:
        axes.axvline(limit, color=style.colour("red"), lw=1.2, ls=(0, (5, 1.5)), label="objective")
    logarithmic = style.wants_log([*xs, *([limit] if limit else [])], 12)
    axes.set_ylim(0, max(ys) * 1.14)
    if logarithmic:
        axes.set_xlim(min(*xs, limit or xs[0]) / 1.4, max(*xs, limit or xs[0]) * 1.6)
        style.log_axis(axes, "x")
    else:
        axes.set_xlim(0, max(*xs, limit or 0.0) * 1.14)
    _name_loads(axes, shown, xs, ys)


def _arms(estimate: Estimate) -> list[list[float]]:
    """Lengths of both arms of a bar; one without an end reaches as far as the picture."""
    high = estimate.high if np.isfinite(estimate.high) else 1e6 * estimate.value
    return [[estimate.value - estimate.low], [high - estimate.value]]


def _name_loads(axes: Axes, shown: Sequence[tuple[Plan, Place]], xs: Sequence[float], ys: Sequence[float]) -> None:
    """The load beside its point, where there is room."""
    low, high = axes.get_xlim()
    log = axes.get_xscale() == "log"
    last: tuple[float, float] | None = None
    for (plan, _), x, y in zip(shown, xs, ys, strict=True):
        across = np.log(x / low) / np.log(high / low) if log else (x - low) / (high - low)
        at = (float(across), y / axes.get_ylim()[1])
        if last is None or abs(at[0] - last[0]) > 0.1 or abs(at[1] - last[1]) > 0.055:
            text = f"{plan.load_value:,.0f}" if plan.load != "rate" else style.number(plan.load_value)
            axes.annotate(text, (x, y), (-4, 4), textcoords="offset points", ha="right", fontsize=7.5)
            last = at


@style.drawing()
def times(plan: Plan) -> Figure:
    """A prompt's and a decode step's time by operation, above what the data sheet allows without any loss."""
    figure, panels = style.new_figure(8.0, 3.9, rows=2)
    decode = many(plan.lane_batch, "sequence")
    titles = {
        "prefill": f"A prompt of {plan.workload.prompt - plan.workload.cached:,} tokens",
        "decode": f"A decode step of {decode} at a context of {plan.workload.mean_context:,}",
    }
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        _stacked(axes, getattr(plan, key))
        axes.set_title(title)
    style.legend_outside(figure, panels, 5)
    return figure


def _bars(step: PlannedStep) -> list[tuple[str, float, float]]:
    """Groups with anything in them: their names, predicted seconds, and the least seconds that physics allows."""
    taken = {part.name: part.seconds for part in step.time.parts} | {"host": step.time.host_s}
    known = {name for _, names, _ in GROUPS for name in names}
    assert taken.keys() <= known, f"parts of a step that no group has: {taken.keys() - known}"
    rows = [
        (label, sum(taken.get(n, 0.0) for n in names), sum(step.floors_s.get(n, 0.0) for n in names))
        for label, names, _ in GROUPS
    ]
    return [row for row in rows if row[1] > 0]


def _stacked(axes: Axes, step: PlannedStep) -> None:
    whole = step.time.seconds
    factor, unit = (1.0, "s") if whole >= 10 else (1e3, "ms") if whole >= 1e-3 else (1e6, "µs")
    colours = {label: style.colour(colour) for label, _, colour in GROUPS}
    edges = np.zeros(2)
    for label, predicted, floor in _bars(step):
        widths = np.array((predicted, floor)) * factor
        axes.barh([0, 1], widths, left=edges, height=0.7, color=colours[label], label=label)
        for row, width in enumerate(widths):
            if width > 0.06 * whole * factor:
                share = width / (whole if row == 0 else step.floor_s) / factor
                middle = (edges[row] + width / 2, row)
                axes.annotate(
                    f"{share:.0%}", middle, ha="center", va="center", fontsize=7.5, color=style.colour("paper")
                )
        edges += widths
    for row, value in enumerate((whole, step.floor_s)):
        style.beside(axes, edges[row], row, seconds(value))
    style.name_rows(axes, ["predicted", "physics"])
    axes.set_xlim(0, max(edges) * 1.12)
    axes.set_xlabel(f"Time ({unit})")
