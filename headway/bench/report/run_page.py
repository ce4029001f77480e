"""The report of a run, or of several runs of one workload: which parts it has, and in which order."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import headway
from headway.bench.options import Claims
from headway.bench.report import pictures, tables, verdict
from headway.bench.report.comparison import comparison_banners, comparison_section
from headway.bench.report.figures_rates import load_points
from headway.bench.report.views import Run, load_name, load_of, steady_or_whole, tokens_per_s
from headway.load.measures.compare import Comparison
from headway.load.measures.numbers import Summary
from headway.load.record import RunResult
from headway.report.parts import Banner, Page, Section, Table, Tone
from headway.report.style import number, plain, sentence

MOST_DETAILED = 3  # runs of a sweep that are shown in full

DEFINITIONS = (
    ("TTFT", "Time to first token: from when a request was due (schedule) or sent (send) to its first token."),
    ("TPOT", "Time per output token of a request: (E2EL - TTFT) / (output tokens - 1)."),
    ("ITL", "Inter-token latency: the gaps between chunks with tokens, all requests pooled."),
    ("E2EL", "End to end: from when a request was due or sent to its last token."),
    ("E2EL/token", "Normalised latency: E2EL divided by the output tokens."),
    ("schedule", "Latency from when the request was due, including the wait before it was sent."),
    ("send", "Latency without that wait: a server that makes its clients wait looks faster (coordinated omission)."),
    ("tokens", "Counted by the server's usage; if it sends none, chunks are counted, and a note says so."),
    ("interval", "The range of the true percentile with 95 % confidence, from order statistics of dependent samples."),
    ("needs N+", "The sample is too small for this percentile; it needs at least N samples."),
    ("steady state", "The part of the run between ramp-up and drain, detected from the data."),
    ("goodput", "Requests per second that met all their objectives; failed requests count as missed."),
    ("refused", "Met a limit that the server keeps on purpose: missed its objectives, but the run stays valid."),
    (
        "cancelled",
        "Cancelled by its client as planned: not a failure, and judged only if it had already missed an objective.",
    ),
    ("probes", "Short requests in addition to the load; no figure of the load includes them."),
    ("client-bound", "The client did not offer the load, or its own delays may be more than 10 % of every figure."),
    ("queue", "Phases of the server's ledger in which a request waited for a place in the batch."),
    ("stall", "Phases in which a running request waited for others' work."),
)


def comparison_page(comparison: Comparison, sides: Mapping[str, tuple[RunResult, Sequence[Summary]]]) -> Page:
    """The report of a comparison.

    Args:
        sides: a run of each side, a first, with what `summarise_all` makes of it, by the name of the side.
    """
    a, b = sides
    first = comparison_section(comparison, a, b)
    both = pictures.sides_picture({name: result.records for name, (result, _) in sides.items()})
    sections = [replace(first, banners=(), pictures=(*first.pictures, both))]
    for name, (result, summaries) in sides.items():
        sections.append(
            Section(plain(name, 60), banners=verdict.banners(result, summaries), anchor=f"part-{len(sections)}")
        )
        sections += run_sections(result, summaries, prefix=plain(name, 60))
    results = [result for result, _ in sides.values()]
    return Page(
        title=f"headway bench: {plain(b, 60)} compared with {plain(a, 60)}",
        subtitle=_subtitle(results),
        verdict=comparison_banners(comparison, a, b),
        sections=(*sections, *_closing(results)),
        footer=_footer(),
    )


def _footer() -> str:
    return f"Written by headway {headway.__version__} on {datetime.now():%Y-%m-%d %H:%M}."


def report_page(
    runs: Sequence[Run], *, extra: Sequence[Section] = (), title: str | None = None, claims: Claims = verdict.USUAL
) -> Page:
    """The report of one run, or of several runs of one workload.

    Args:
        extra: sections that come first. Their banners, such as the outcome of a search, are the verdict of the page.
    """
    results = [result for result, _ in runs]
    result, views = runs[0]
    single = len(runs) == 1
    outcome = tuple(banner for section in extra for banner in section.banners)
    sections = [replace(section, banners=()) for section in extra]
    if single:
        sections += run_sections(result, views)
        banners = (*outcome, *_run_verdict(result, views, claims))
    else:
        sections += _sweep_sections(runs, claims)
        banners = outcome or verdict.of_runs(runs, claims.attainment)
    return Page(
        title=title or f"headway bench: {plain(_model(result), 120)}",
        subtitle=_subtitle(results),
        verdict=banners,
        key_figures=_key_figures(views) if single else (),
        sections=(*sections, *_closing(results)),
        footer=_footer(),
    )


def run_sections(result: RunResult, summaries: Sequence[Summary], prefix: str = "") -> list[Section]:
    """All parts of one run. `prefix` makes their anchors, names and titles unique among several."""
    whole = summaries[0]
    found = _present(
        tables.overview(summaries),
        *tables.latency_tables(summaries),
        *tables.part_tables(summaries),
        tables.probe_table(summaries),
        tables.failure_table(result),
    )
    notes = tuple(sentence(f"note: {note}") for note in verdict.other_notes(whole))
    parts = [
        Section("Numbers", tables=found, paragraphs=notes, anchor="numbers"),
        *(_answered_sections(result, summaries) if whole.completed else _unanswered_sections(result)),
        *_client_sections(result),
    ]
    return [replace(each, title=f"{prefix}: {each.title}", anchor="") for each in parts] if prefix else parts


def _client_sections(result: RunResult) -> list[Section]:
    table = tables.client_table(result.client)
    if table is None:
        return []
    return [Section("The client", tables=(table,), pictures=(pictures.client_picture(result),), anchor="client")]


def _answered_sections(result: RunResult, summaries: Sequence[Summary]) -> list[Section]:
    phases = _present(
        tables.phase_table(summaries[0], pictured=True), tables.metrics_table(result.server.get("metrics") or {})
    )
    tail = tuple(pictures.tail_pictures(result))
    return [
        Section("Latency", pictures=tuple(pictures.latency_pictures(result, summaries[0])), anchor="latency"),
        Section("Where the time went", tables=phases, pictures=tail, anchor="phases"),
        Section("Over time", pictures=tuple(pictures.time_pictures(result, summaries)), anchor="over-time"),
    ]


def _unanswered_sections(result: RunResult) -> list[Section]:
    """Sections of a run without an answer: pictures of latency would be empty, but one shows when requests failed."""
    if not any(record.sent_ns for record in result.records):
        return []
    found = (pictures.timeline_picture(result), pictures.load_picture(result, None))
    return [Section("Over time", pictures=found, anchor="over-time")]


def _present(*found: Table | None) -> tuple[Table, ...]:
    return tuple(table for table in found if table is not None)


def _sweep_sections(runs: Sequence[Run], claims: Claims) -> list[Section]:
    load = load_name([result for result, _ in runs])
    drawn = tuple(pictures.load_pictures(load_points(runs), load, claims.attainment))
    runs = sorted(runs, key=lambda run: load_of(run[0]))
    table = tables.sweep_table(runs, load, claims)
    sections = [Section(f"{len(runs)} runs", tables=(table,), pictures=drawn, anchor="runs")]
    for place in _most_telling(runs, claims.attainment):
        result, summaries = runs[place]
        name = f"{number(load_of(result))} {'requests/s' if '1/s' in load else 'in flight'}"
        banners = verdict.banners(result, summaries, claims)
        sections.append(Section(f"Run at {name}", banners=banners, anchor=f"run-{place + 1}"))
        sections += run_sections(result, summaries, prefix=name)
    return sections


def _most_telling(runs: Sequence[Run], target: float) -> list[int]:
    """All of a few runs; else the lightest, the heaviest, and the heaviest that holds its objectives."""
    if len(runs) <= MOST_DETAILED:
        return list(range(len(runs)))
    found = [steady_or_whole(summaries).attainment for _, summaries in runs]
    held = [place for place, a in enumerate(found) if a and a.total and verdict.outcome(a, target) == "held"]
    return sorted({0, len(runs) - 1, *held[-1:]})


def _closing(results: Sequence[RunResult]) -> list[Section]:
    settings = results[0].settings if len(results) == 1 else _shared([result.settings for result in results])
    found = _present(
        tables.mapping_table("Settings" if len(results) == 1 else "Settings that all runs share", settings),
        tables.server_table(results[0].server),
        tables.mapping_table("The client's machine", this_machine()),
    )
    return [
        Section("Definitions", terms=DEFINITIONS, anchor="definitions"),
        Section("Settings and environment", tables=found, anchor="settings"),
    ]


def _shared(all_settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = all_settings[0]
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in all_settings)}


def this_machine() -> dict[str, Any]:
    """What of this machine bears on a measurement."""
    return {
        "headway": headway.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "processors": os.cpu_count(),
    }


def _run_verdict(result: RunResult, views: Sequence[Summary], claims: Claims) -> tuple[Banner, ...]:
    valid = verdict.is_valid(result, views, claims)
    tone: Tone = "bad" if not valid else "warn" if verdict.spoilt_figures(views) else "good"
    opening = Banner(verdict.headline(result, views, claims), (), tone)
    return (opening, *verdict.banners(result, views, claims))


def _model(result: RunResult) -> str:
    return str(result.settings.get("model") or result.server.get("model") or "a model without a name")


def _subtitle(results: Sequence[RunResult]) -> str:
    result = results[0]
    server = " ".join(str(result.server[key]) for key in ("name", "version") if result.server.get(key))
    words = [server, str(result.settings.get("base_url") or ""), str(result.settings.get("workload") or "")]
    if len(results) == 1:
        rate, most = result.settings.get("request_rate"), result.settings.get("max_concurrency")
        in_numbers = f"{number(rate)} requests/s" if isinstance(rate, int | float) else ""
        words.append(str(result.settings.get("arrivals") or in_numbers))
        words.append(f"at most {most} in flight" if most else "")
    return plain(" · ".join(word for word in words if word), 240)


def _key_figures(views: Sequence[Summary]) -> tuple[tuple[str, str], ...]:
    view = steady_or_whole(views)
    figures = []
    for metric, name in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("e2el_ms", "E2EL")):
        found = view.from_schedule.get(metric)
        claims = [claim for claim in found.percentiles if claim.value is not None] if found else []
        for claim in [claim for claim in claims if claim.p == 50.0] + claims[-1:][: len(claims) > 1]:
            figures.append((f"{number(claim.value or 0.0)} ms", f"{name} P{claim.p:g}, {view.name}"))
    rate, of_what = tokens_per_s(view)
    figures.append((number(rate), f"{of_what}, {view.name}"))
    if view.attainment is not None and view.attainment.total:
        figures.append((number(view.attainment.requests_per_s), "goodput, requests/s"))
    return tuple(figures)
