"""The figures of a profile, among them the two of document 000: memory requirements and optimisation opportunities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from headway.bench.profile.achieved import Achieved, decode_work, floor_ms, prefill_work
from headway.bench.profile.naive import Naive
from headway.bench.profile.result import LengthProfile, Opportunity, ProfileResult
from headway.bench.profile.stages import BY_KEY, STAGES
from headway.cost.roofline import Roofline
from headway.report import style
from headway.report.roofline import Marks, Spot, draw_roofline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIB, GIB = 2**20, 2**30
MARKER_AREA = 36.0  # square points
NOTHING_MEASURED = "no request came back with the server's timings"


@style.drawing()
def stage_breakdown(lengths: Sequence[LengthProfile]) -> Figure:
    """Stacked bars for each prompt length: milliseconds on the left, shares on the right."""
    height, labels = 1.9 + 0.42 * max(3, len(lengths)), ("Time of a request (ms)", "Share of it (%)")
    figure, (times, shares) = style.new_figure(8.0, height, columns=2, x=labels, y=("Prompt (tokens)", ""), sharey=True)
    if not lengths:
        style.nothing_to_show(times, NOTHING_MEASURED)
        return figure
    parts = [(stage, [each.stages_ms[stage.key] for each in lengths]) for stage in STAGES]
    totals = [each.total_ms for each in lengths]
    style.stacked_bars(times, ((stage.label, stage.colour, part) for stage, part in parts))
    of_all = [(stage, 100 * np.array(part) / totals) for stage, part in parts]
    style.stacked_bars(shares, ((None, stage.colour, part.tolist()) for stage, part in of_all))
    for row, whole in enumerate(totals):
        style.beside(times, whole, row, style.number(whole))
    for axes, most in ((times, max(totals) * 1.15), (shares, 100)):
        style.name_rows(axes, [f"{each.prompt_tokens:,}" for each in lengths])
        axes.set_xlim(0, most)
    style.legend_outside(figure, [times], 4)
    return figure


@style.drawing()
def latency_by_length(result: ProfileResult) -> Figure:
    """TTFT and TPOT against the prompt's length, with what the roofline would allow."""
    names = ("Time to first token (ms)", "Time per output token (ms)")
    figure, (ttft, tpot) = style.new_figure(8.0, 3.6, columns=2, x="Prompt (tokens)", y=names)
    measured = [each for each in result.lengths if each.completed]
    if not measured:
        style.nothing_to_show(ttft, "no request was answered")
        style.nothing_to_show(tpot, "no request was answered")
        return figure
    tokens = [each.prompt_tokens for each in measured]
    _median_with_range(ttft, measured, "ttft_ms")
    _median_with_range(tpot, measured, "tpot_ms")
    model, peaks = result.model, result.peaks
    shortest, longest = max(1, min(tokens)), max(tokens)
    if shortest == longest:  # a line needs room
        shortest, longest = max(1, shortest // 2), longest + (longest + 1) // 2
    grid = np.unique(np.geomspace(shortest, longest, 40).round().astype(int)).tolist()
    prompts = [prefill_work(model, n) for n in grid]
    floors = [floor_ms(model, peaks, work.flops, work.kept_bytes) for work in prompts]
    # The context in the middle of the answer stands for all of its steps.
    half = measured[0].output_tokens // 2
    steps = [floor_ms(model, peaks, *decode_work(model, n + half, 2)) for n in grid]
    line = {"color": style.colour("orange"), "ls": style.series_line(1), "label": "roofline: least possible compute"}
    ttft.plot(grid, floors, **line)
    tpot.plot(grid, steps, **line)
    for axes in (ttft, tpot):
        axes.set_ylim(bottom=0)
        if style.wants_log(tokens):
            style.log_axis(axes, "x")
    if style.wants_log([*(each.medians_ms["ttft_ms"] for each in measured), *floors]):
        ttft.set_ylim(bottom=min(floors) * 0.7)
        style.log_axis(ttft, "y")
    style.legend_outside(figure, [ttft], 3)
    return figure


def _median_with_range(axes: Axes, lengths: Sequence[LengthProfile], metric: str) -> None:
    having = [each for each in lengths if metric in each.medians_ms]
    tokens = [each.prompt_tokens for each in having]
    low = [each.latencies[metric].minimum for each in having]
    high = [each.latencies[metric].maximum for each in having]
    blue = style.colour("blue")
    style.band(axes, tokens, low, high, blue, label="least to most")
    axes.plot(tokens, [each.medians_ms[metric] for each in having], color=blue, marker="o", ms=4, label="median")


@style.drawing()
def memory_requirements(result: ProfileResult) -> Figure:
    """What one sequence needs by its length, and how many such sequences the cache has room for."""
    figure, (needs, room) = style.new_figure(8.0, 3.6, columns=2)
    lengths = _context_lengths(result)
    parts = [result.memory_of(n) for n in lengths]
    unit, name = (GIB, "GiB") if sum(parts[-1].values()) >= 2 * GIB else (MIB, "MiB")
    labels = {"weights": ("weights", "blue"), "activations": ("activations", "gold"), "kv_cache": ("KV cache", "green")}
    edges = np.zeros(len(lengths))
    for key, (label, colour) in labels.items():
        sizes = np.array([each[key] for each in parts]) / unit
        needs.bar(range(len(lengths)), sizes, bottom=edges, width=0.66, color=style.colour(colour), label=label)
        edges += sizes
    for at, whole in enumerate(edges):
        needs.text(at, whole, style.number(float(whole)), ha="center", va="bottom", fontsize=7.5)
    needs.set_ylim(0, float(edges.max()) * 1.12)
    needs.set_xticks(range(len(lengths)), [_short(n) for n in lengths])
    needs.set_xlabel("Context of one sequence (tokens)")
    needs.set_ylabel(f"Memory ({name})")
    needs.grid(axis="x", visible=False)
    style.legend_outside(figure, [needs], 3)
    _room(room, result, lengths)
    return figure


def _room(axes: Axes, result: ProfileResult, lengths: Sequence[int]) -> None:
    blocks, size = result.startup.num_blocks, max(1, result.startup.block_size)
    fits = [blocks // -(-n // size) for n in lengths]
    axes.bar(range(len(lengths)), fits, width=0.66, color=style.colour("green"))
    for at, count in enumerate(fits):
        axes.text(at, max(count, 1), f"{count:,}", ha="center", va="bottom", fontsize=7.5)
    axes.set_xticks(range(len(lengths)), [_short(n) for n in lengths])
    axes.set_xlabel("Context of each sequence (tokens)")
    axes.set_ylabel(f"Sequences in the cache of {_size(result.pool_bytes)}")
    axes.grid(axis="x", visible=False)
    axes.set_ylim(0, max([1, *fits]) * 1.12)
    if style.wants_log([n for n in fits if n]):
        axes.set_ylim(0.7, max(fits) * 2.2)
        style.log_axis(axes, "y")


def _context_lengths(result: ProfileResult) -> list[int]:
    """Powers of two up to the context, five of them at most, and the context itself."""
    longest = max(1, result.startup.max_model_len)
    powers = [2**n for n in range(4, 24) if 2**n < longest]
    return [*powers[-5:], longest]


@style.drawing()
def optimisation_opportunities(found: Sequence[Opportunity], each: LengthProfile | None) -> Figure:
    """Stages by their largest possible gain, above their floor."""
    figure, (axes,) = style.new_figure(8.0, 1.2 + 0.36 * max(3, len(found)), x="Time of a request (ms)")
    if each is None or not found:
        style.nothing_to_show(axes, NOTHING_MEASURED)
        return figure
    floors = [min(o.floor_ms, o.measured_ms) for o in found]
    wins = [o.winnable_ms for o in found]
    style.stacked_bars(
        axes, [("floor: the least time on this machine", "gray", floors), ("largest possible gain", "orange", wins)]
    )
    for row, o in enumerate(found):
        share = f"{100 * o.winnable_ms / each.total_ms:.0f} % of the request"
        text = f"{style.number(o.measured_ms)} ms, {style.number(o.winnable_ms)} to win ({share})"
        style.beside(axes, o.measured_ms, row, text)
    style.name_rows(axes, [BY_KEY[o.stage].label for o in found])
    axes.set_xlim(0, max(o.measured_ms for o in found) * 1.55)
    style.legend_outside(figure, [axes], 2)
    return figure


@style.drawing()
def naive_and_cached(naive: Naive) -> Figure:
    """Milliseconds until each token of an answer, without a KV cache and with one."""
    figure, (axes,) = style.new_figure(8.0, 3.2, x="Token of the answer", y="Milliseconds from the send")
    tokens = range(1, len(naive.naive_ms) + 1)
    for label, colour, ms in (("without", "orange", naive.naive_ms), ("with a cache", "blue", naive.cached_ms)):
        axes.plot(tokens, naive.until(ms), color=style.colour(colour), marker="o", ms=3, label=label)
    axes.set_ylim(bottom=0)
    style.legend_outside(figure, [axes], 2)
    return figure


@style.drawing()
def roofline(result: ProfileResult) -> Figure:
    """FLOP/s against FLOPs per byte: the machine's two limits, and where prefill and decode are."""
    intensity = "Arithmetic intensity (FLOP per byte of weights and cache)"
    figure, (axes,) = style.new_figure(8.0, 4.0, x=intensity, y="GFLOP/s")
    marks = [
        Marks("prefill", "o", "prefill-compute", _spots({e.prompt_tokens: e.prefill for e in result.measured})),
        Marks("decode", "s", "orange", _spots({e.prompt_tokens: e.decode for e in result.measured})),
    ]
    measured = [each for e in result.measured for each in (e.prefill, e.decode) if each]
    if not measured:
        style.nothing_to_show(axes, NOTHING_MEASURED)
        return figure
    roofs = _roofs(result, measured)
    low = min(each.intensity for each in measured) / 3
    high = max(*(each.intensity for each in measured), *(roof.ridge for roof in roofs.values())) * 3
    draw_roofline(axes, {label: roof.attainable for label, roof in roofs.items()}, marks, 1e9, (low, high))
    for spot in marks[0].spots:
        axes.annotate(spot.name, (spot.x, spot.y), (5, -9), textcoords="offset points", fontsize=7)
    style.legend_outside(figure, [axes], 2)
    return figure


def _spots(achieved: Mapping[int, Achieved | None]) -> list[Spot]:
    """A spot for each prompt length, named by its tokens, at its GFLOP/s."""
    return [
        Spot(f"{tokens:,}", each.intensity, each.flops / each.measured_ms / 1e6, MARKER_AREA)
        for tokens, each in achieved.items()
        if each
    ]


def _roofs(result: ProfileResult, points: Sequence[Achieved]) -> dict[str, Roofline]:
    """Memory's roof, and the caches' where the model fits in them, by label."""
    peaks, dtype = result.peaks, result.model.products
    memory = peaks.roofline(dtype)
    smallest = int(min(p.kept_bytes for p in points))
    nearer = peaks.roofline(dtype, smallest)
    gflops, gb = memory.flops_per_s / 1e9, memory.bytes_per_s / 1e9
    roofs = {f"{style.number(gflops)} GFLOP/s in {dtype}, memory {style.number(gb)} GB/s": memory}
    if nearer.bytes_per_s > 1.1 * memory.bytes_per_s:
        roofs[f"{_size(smallest)} over and over, from caches: {style.number(nearer.bytes_per_s / 1e9)} GB/s"] = nearer
    return roofs


@style.drawing()
def model_loading(stages: Mapping[str, float], total_s: float) -> Figure:
    """The stages of the start, in their order."""
    figure, (axes,) = style.new_figure(8.0, 1.1 + 0.32 * max(3, len(stages)), x="Seconds")
    if not stages:
        style.nothing_to_show(axes, "the server reported nothing about its start")
        return figure
    style.stacked_bars(axes, [(None, "blue", list(stages.values()))])
    for row, seconds in enumerate(stages.values()):
        share = f" ({100 * seconds / total_s:.0f} %)" if total_s else ""
        style.beside(axes, seconds, row, f"{style.number(1e3 * seconds)} ms{share}")
    style.name_rows(axes, list(stages))
    axes.set_xlim(0, max(stages.values()) * 1.25 or 1.0)
    return figure


def _short(tokens: int) -> str:
    """A number of tokens in short, such as 64K for 65,536."""
    return f"{tokens // 1024}K" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:,}"


def _size(size: float) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if size >= unit:
            return f"{style.number(size / unit)} {name}"
    return f"{style.number(size / 1024)} KiB"
