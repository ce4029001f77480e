"""A plan as a page with its pictures: `--plot`."""

from __future__ import annotations

from pathlib import Path

from headway.planner import pictures, tables
from headway.planner.answer import answer, headline
from headway.planner.formulas import formulas
from headway.planner.plan import Estimate, Plan
from headway.planner.words import bar, dollars, gigabytes
from headway.report.page import write_page
from headway.report.parts import Banner, Page, Picture, Section, Table, cells
from headway.report.style import number

PAGE = "plan.html"


def write_plan(folder: Path, plan: Plan) -> list[Path]:
    """Write plan.html and its pictures as PNG into a folder, which is made: all of them, or none.

    Returns:
        All files written, the page first.

    Raises:
        ReportError: they cannot be written there.
    """
    return write_page(folder / PAGE, page_of(plan), figures_dir=folder)


def page_of(plan: Plan) -> Page:
    """The short answer, then what it is made of."""
    assumptions = tuple((f"{place}.", text) for place, text in enumerate(plan.assumptions, 1))
    sections = (
        _short_answer(plan),
        _serving(plan),
        _times(plan),
        _memory(plan),
        _money(plan),
        Section("Loading the model", tables=(tables.loading_table(plan),), anchor="loading"),
        Section("Assumptions", terms=assumptions, anchor="assumptions"),
        Section("Formulas", tables=(_formulas(plan),), anchor="formulas", folded=True),
    )
    return Page(
        title=f"Plan of {plan.model} on {plan.hardware_key}",
        subtitle=headline(plan),
        verdict=_banners(plan),
        key_figures=key_figures(plan),
        sections=tuple(section for section in sections if section is not None),
        footer="Made by headway plan. All figures are predictions; the bars contain four in five measurements.",
    )


def key_figures(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Names and values of the numbers at the top; numbers that this plan does not have are left out."""
    found = []
    for name, time in (("TTFT", plan.ttft), ("TPOT", plan.tpot)):
        if time is not None:
            found.append((f"{number(time.value * 1e3)} ms", _with_bar(name, time.scaled(1e3))))
    if plan.output_tokens_per_s is not None:
        found.append((number(plan.output_tokens_per_s.value), _with_bar("output tokens/s", plan.output_tokens_per_s)))
    found.append((f"{plan.max_batch:,}", f"requests of {plan.workload.prompt + plan.workload.output:,} tokens fit"))
    found.append((gigabytes(plan.weights_bytes), "of weights"))
    if plan.costs.per_million_output_tokens is not None:
        found.append((dollars(plan.costs.per_million_output_tokens), "for 1M output tokens"))
    return tuple(found)


def _with_bar(name: str, estimate: Estimate) -> str:
    return f"{name}, 80 %: {bar(estimate)}"


def _banners(plan: Plan) -> tuple[Banner, ...]:
    lines = {line.label: line for line in answer(plan)}
    found = []
    if "Problem" in lines:
        found.append(Banner("This plan does not work", (lines["Problem"].text,)))
    if "SLO" in lines:
        found.append(Banner("Objectives", (lines["SLO"].text,), "good" if lines["SLO"].tone == "good" else "warn"))
    return tuple(found)


def _short_answer(plan: Plan) -> Section:
    shown = [(line.label, line.text) for line in answer(plan) if line.label not in ("Problem", "SLO")]
    return Section("The short answer", terms=tuple(shown), anchor="answer")


def _serving(plan: Plan) -> Section | None:
    if plan.output_tokens_per_s is None:
        return None
    what = {"batch": "the batch", "concurrency": "the number of clients", "rate": "the rate of requests"}[plan.load]
    caption = f"Each point is this plan with another value of {what}, shown beside it."
    figure = pictures.latency(plan, pictures.sweep(plan))
    drawn = Picture("throughput-latency", "Throughput against latency", caption, figure)
    found = (tables.serving_table(plan),)
    return Section("Throughput and latency", tables=found, pictures=(drawn,), anchor="serving")


def _times(plan: Plan) -> Section:
    return Section(
        "Where the time goes",
        tables=(tables.phase_table(plan, "prefill"), tables.phase_table(plan, "decode")),
        pictures=(
            Picture(
                "time-by-operation",
                "Prediction and physical limit",
                "Of one device. Physics: each operation at the data sheet's full rates. Shares are of the bar.",
                pictures.times(plan),
            ),
            Picture(
                "roofline",
                "Roofline of a device",
                "Operations that multiply; the larger a point, the more of its step's time it takes. The others only "
                "move bytes and would be at the left end. The distance to the line is what programs do not reach.",
                pictures.roofline(plan),
            ),
        ),
        anchor="time",
    )


def _memory(plan: Plan) -> Section:
    caption = (
        "Weights, activations and workspace at the bottom, above them the cache of this number of sequences. Dots: the "
        "usable memory is full."
    )
    drawn = Picture("memory-by-context", "Memory of a device by context", caption, pictures.memory(plan))
    return Section("Memory", tables=(tables.memory_table(plan),), pictures=(drawn,), anchor="memory")


def _money(plan: Plan) -> Section | None:
    if plan.costs.per_million_output_tokens is None and plan.costs.tokens_per_s_per_watt is None:
        return None
    return Section("Cost and energy", tables=(tables.cost_table(plan),), anchor="cost")


def _formulas(plan: Plan) -> Table:
    rows = [cells(f.name, *f.lines, f.source) for f in formulas(plan)]
    columns = ("", "formula", "numbers", "result", "source")
    return Table("Each figure with the numbers put in", columns, tuple(rows), left=frozenset({1, 2, 3, 4}))
