"""The tables of a profile, the same in the terminal and on the page."""

from __future__ import annotations

from headway.bench.profile.kernels import KINDS
from headway.bench.profile.naive import Naive
from headway.bench.profile.result import LengthProfile, Profile, ProfileResult, opportunities
from headway.bench.profile.stages import BY_KEY, STAGES
from headway.bench.report.tables import percentile_cell
from headway.report.parts import Cell, Table, cells
from headway.report.style import number

METRICS = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "ttlt_ms": "TTLT"}


def latency_table(result: Profile) -> Table:
    """TTFT, TPOT and TTLT for each prompt length: extremes, the median, and the percentiles that can be claimed."""
    rows = [(each, name) for each in result.lengths for name in METRICS if each.latencies[name].count]
    asked = [p for p in result.settings["percentiles"] if p != 50.0]
    claims = {p: [each.latencies[name].percentile(p) for each, name in rows] for p in asked}
    shown = [p for p in asked if any(claim is not None and claim.value is not None for claim in claims[p])]
    refused = [
        f"P{p:g} {max(claim.needs or 0 for claim in claims[p] if claim is not None):,}"
        for p in asked
        if rows and p not in shown
    ]
    note = (
        "Milliseconds from the send. TTFT: to the first token; TPOT: per token after it; TTLT: to the last. Below a "
        "percentile its 95 % interval."
    )
    if refused:
        note += f" Too few requests per length; needed are: {', '.join(refused)} (--repeats)."
    return Table(
        "Latency, one request at a time",
        ("prompt", "ms", "requests", "least", "median", *(f"P{p:g}" for p in shown), "most"),
        tuple(_latency_row(each, name, shown) for each, name in rows),
        left=frozenset({1}),
        note=note,
    )


def _latency_row(each: LengthProfile, name: str, shown: list[float]) -> tuple[Cell, ...]:
    found = each.latencies[name]
    claim = found.percentile(50.0)
    claimed = claim is not None and claim.value is not None
    median = percentile_cell(claim) if claimed else Cell(number(each.medians_ms[name]))
    claims = [percentile_cell(found.percentile(p)) for p in shown]
    first = f"{each.prompt_tokens:,}" if name == "ttft_ms" else ""
    return cells(
        first, METRICS[name], f"{found.count:,}", number(found.minimum), median, *claims, number(found.maximum)
    )


def stage_table(result: Profile) -> Table:
    """Milliseconds in each stage and its share: a column for each prompt length."""
    lengths = result.measured
    rows = [
        cells(
            stage.label,
            *(
                Cell(number(e.stages_ms[stage.key]), detail=f"{100 * e.stages_ms[stage.key] / e.total_ms:.1f} %")
                for e in lengths
            ),
        )
        for stage in STAGES
    ]
    rows.append(cells("whole", *(number(each.total_ms) for each in lengths)))
    return Table(
        "Stages of a request, by prompt length",
        ("tokens", *(f"{each.prompt_tokens:,}" for each in lengths)),
        tuple(rows),
        note="Milliseconds, mean of the middle half of the requests; below it the share of the whole. Scheduling is "
        "everything of the engine between two forward passes.",
    )


def achieved_table(result: Profile) -> Table:
    """Compute beside the roofline, for prefill and for the mean decode step."""
    rows = []
    for each in result.measured:
        for name, part in (("prefill", each.prefill), ("decode", each.decode)):
            if part is None:
                continue
            first = f"{each.prompt_tokens:,}" if name == "prefill" else ""
            sizes = (part.kept_bytes / 1e6, part.flops / 1e9, part.measured_ms, part.floor_ms)
            shares = (f"{100 * part.bandwidth_share:.1f} %", f"{100 * part.flops_share:.1f} %")
            rows.append(cells(first, name, *map(number, sizes), part.bound, *shares))
    return Table(
        "Compute, compared with the machine's limits",
        ("prompt", "pass", "MB", "GFLOP", "ms", "floor", "bound", "bytes/s", "FLOP/s"),
        tuple(rows),
        left=frozenset({1, 6}),
        note="A whole prompt, and the mean step after it. Floor: FLOPs at the peak rate of products, or weights and "
        "cache at the peak rate of reads, whichever is longer. Above 100 % of a rate: its peak was measured too low.",
    )


def kernel_table(result: ProfileResult) -> Table:
    """Attention, matrix products and other kernels of a prompt and of the median step after it."""
    rows = []
    for length, passes in result.kernels.items():
        for name, kinds in passes.items():
            whole = sum(kinds.values()) or 1.0
            shares = (Cell(number(kinds[kind]), detail=f"{100 * kinds[kind] / whole:.0f} %") for kind in KINDS)
            first = f"{length:,}" if name == "prefill" else ""
            rows.append(cells(first, name.replace("_", " "), *shares, number(whole)))
    return Table(
        "Kernels, by what they are part of",
        ("prompt", "pass", "attention", "products", "other", "all"),
        tuple(rows),
        left=frozenset({1}),
        note="Milliseconds of one request more, sent while the server timed each kernel; below it the share. What is "
        "between kernels is in none of them.",
    )


def naive_table(naive: Naive) -> Table:
    """Tokens of an answer without a KV cache and with one: the first, the one in the middle, the last, and all."""
    last = len(naive.naive_ms) - 1
    rows = [
        cells(f"token {at + 1:,}", number(naive.naive_ms[at]), number(naive.cached_ms[at]), _times(naive, at))
        for at in dict.fromkeys((0, last // 2, last))
    ]
    whole = (number(sum(naive.naive_ms)), number(sum(naive.cached_ms)), f"{naive.times:.1f} x")
    rows.append(cells("the whole answer", *whole))
    return Table(
        f"Without a KV cache and with one, prompt of {naive.prompt_tokens:,} tokens",
        ("", "without", "with", "times"),
        tuple(rows),
        note="Milliseconds. Without a cache, each token is a request of its own with the whole text before it.",
    )


def _times(naive: Naive, at: int) -> str:
    if not naive.cached_ms[at]:
        return "–"  # it came together with the token before it
    return f"{naive.naive_ms[at] / naive.cached_ms[at]:.1f} x"


def opportunity_table(each: LengthProfile) -> Table:
    """Stages by their largest possible gain, with remedies."""
    rows = [
        cells(
            BY_KEY[o.stage].label,
            number(o.measured_ms),
            number(o.floor_ms),
            number(o.winnable_ms),
            f"{100 * o.winnable_ms / each.total_ms:.0f} %",
            BY_KEY[o.stage].advice,
        )
        for o in opportunities(each)
    ]
    return Table(
        f"Largest possible gain, prompt of {each.prompt_tokens:,} tokens and answer of {each.output_tokens:,}",
        ("stage", "ms", "floor", "to win", "share", "what helps"),
        tuple(rows),
        left=frozenset({5}),
        note="Gain: if the stage took only its floor. Only prefill and decode have a floor; lowering the floor itself "
        "(fewer bytes, fewer passes) is not counted.",
    )


def machine_table(result: ProfileResult) -> Table:
    """The peaks that everything is compared with."""
    peaks = result.peaks
    rows = [cells(peaks.device, peaks.name, f"{peaks.threads} threads" if peaks.threads else "")]
    for rate in peaks.read_bytes_per_s:
        what = f"reads of {rate.size / 2**20:,.0f} MiB"
        rows.append(cells(what, f"{number(rate.best / 1e9)} GB/s", f"median {number(rate.median / 1e9)}, by {rate.by}"))
    for dtype, rate in peaks.gemm_flops_per_s.items():
        detail = f"median {number(rate.median / 1e9)}, by {rate.by}, {rate.size} x {rate.size}"
        rows.append(cells(f"products in {dtype}", f"{number(rate.best / 1e9)} GFLOP/s", detail))
    rows.append(cells("one small operation", f"{number(peaks.small_op_s * 1e6)} µs", "torch"))
    rows.append(cells("one kernel call", f"{number(peaks.kernel_call_s * 1e6)} µs", "the engine's own"))
    return Table("The machine", ("", "peak", ""), tuple(rows), left=frozenset({2}), note=peaks.busy or "")


def loading_table(result: ProfileResult) -> Table:
    """The ledger of the server's start."""
    rows = [cells(name, number(seconds * 1e3)) for name, seconds in loading_stages(result).items()]
    return Table("Model loading", ("stage", "ms"), tuple(rows), note=_loading_note(result))


def loading_stages(result: ProfileResult) -> dict[str, float]:
    """Seconds by stage: the engine's, one after the other, and what of the whole is neither."""
    stages = {name.replace("_", " ").replace("kv ", "KV "): seconds for name, seconds in result.engine_stages.items()}
    rest = result.startup.seconds - sum(stages.values())
    return stages | ({"process starts and waiting": rest} if stages and rest > 0 else {})


def _loading_note(result: ProfileResult) -> str:
    beside = ", ".join(f"{name} {number(s * 1e3)} ms" for name, s in result.startup.api_stages.items())
    note = f"Ready after {number(result.startup.seconds)} s."
    if beside:
        note += f" Meanwhile in the API process: {beside}."
    brought = sum(result.engine_stages.get(name, 0.0) for name in ("storage_read", "convert", "layout"))
    if brought > 0 and result.model.checkpoint_bytes:
        rate = result.model.checkpoint_bytes / brought / 1e9
        note += (
            f" {result.model.checkpoint_bytes / 1e6:,.0f} MB of weights were read, converted and laid out in "
            f"{number(brought * 1e3)} ms, {number(rate)} GB/s; memory is read at "
            f"{number(result.peaks.memory_read.best / 1e9)} GB/s."
        )
    return note
