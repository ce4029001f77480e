"""What a run comes to in about ten lines: what was asked, what came, whether it is good, and what to do next."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from headway.bench.options import Claims
from headway.bench.report import verdict
from headway.bench.report.views import part_views, steady_or_whole, tokens_per_s
from headway.load.measures.client_effect import SPOILT
from headway.load.measures.numbers import Distribution, Graphs, Percentile, Summary, Validity
from headway.load.measures.steady import OVERLOAD
from headway.load.measures.summary import STEADY_STATE
from headway.load.record import FailureKind, RunResult
from headway.report.parts import Line, Tone
from headway.report.style import number, plain

LATENCIES = (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("itl_ms", "ITL"), ("e2el_ms", "E2EL"))
SHOWN = (50.0, 90.0, 99.0)


def brief(result: RunResult, summaries: Sequence[Summary], claims: Claims = verdict.USUAL) -> Iterator[Line]:
    """The lines. Latencies are from the schedule, of the steady state where there is one."""
    whole, view, target = summaries[0], steady_or_whole(summaries), claims.attainment
    yield Line("Asked", _asked(result.settings))
    yield Line("Answered", _answered(result, whole), "bad" if whole.failed > whole.refused else "")
    for metric, name in LATENCIES:
        if said := _latency(view, metric):
            yield Line(name, said)
    if whole.graphs is not None:
        yield Line("Graphs", _graphs(whole.graphs))
    if cached := whole.tokens.get("cached", 0):
        yield Line("Cached", _cached(result.settings, cached, whole.tokens.get("prompt", 0)))
    if fleet := fleet_line(result.server):
        yield fleet
    if whole.cost_per_million_output_tokens is not None:
        yield Line("Cost", f"{number(whole.cost_per_million_output_tokens)} per 1M output tokens")
    for name, each in part_views(summaries, "tenant"):
        yield Line(plain(name, 12), _tenant_text(each), "bad" if each.failed > each.refused else "")
    if whole.validity is not None:
        yield Line("Structure", _structure(whole.validity))
    for name, each in [("Objectives", view), *part_views(summaries, "class_name")]:
        if (found := each.attainment) is not None and found.total:
            tones: dict[str, Tone] = {"held": "good", "missed": "bad", "undecided": "warn"}
            decision = verdict.outcome(found, target)
            judged = "too few requests to decide" if decision == "undecided" else decision
            said = f"{verdict.objectives_in_words(found.objectives)}: met by {100 * found.share:.4g} % "
            said += f"(target {100 * target:g} %: {judged})"
            yield Line(plain(name, 12), said, tones[decision])
    yield _good(result, summaries, claims)
    yield Line("Next", _next(result, summaries, claims))


def _asked(settings: dict[str, Any]) -> str:
    model, where = settings.get("model") or "", settings.get("base_url") or ""
    whom = " of ".join(each for each in (plain(str(model), 60), plain(str(where), 60)) if each)
    clients = settings.get("max_concurrency")
    what = f"{verdict.count(settings.get('num_prompts', 0), 'request')}, {settings.get('arrivals', '')}"
    what += f" of {clients}" * (settings.get("arrivals") == "closed loop" and clients is not None)
    return f"{what}; {plain(str(settings.get('workload', '')), 120)}" + (f"; {whom}" if whom else "")


def _answered(result: RunResult, whole: Summary) -> str:
    asked = result.settings.get("num_prompts", 0) if result.interrupted else whole.completed + whole.failed
    rate, of_what = tokens_per_s(whole)
    said = (
        f"{whole.completed:,} of {verdict.count(asked, 'request')} in {number(result.duration_s)} s: "
        f"{number(whole.rates.get('request_throughput', 0.0))} requests/s, {number(rate)} {of_what}"
    )
    failed = [(kind, times) for kind, times, _ in verdict.failures_by_kind(result) if kind != FailureKind.REFUSED]
    kinds = ", ".join(f"{kind} {times:,}" for kind, times in failed)
    said += f"; refused by a limit: {whole.refused:,}" * bool(whole.refused)
    return said + f"; failed: {kinds}" * bool(kinds) + f"; cancelled: {whole.cancelled:,}" * bool(whole.cancelled)


def fleet_line(server: dict[str, Any]) -> Line | None:
    """The line about the servers of a simulation that has several, or failures; None for other runs."""
    replicas, failures = server.get("replicas", 1), server.get("failures", [])
    if replicas == 1 and not any(failures):
        return None
    kinds = [f"{each['count']} x {each['hardware']}" for each in server["kinds"]]
    said = verdict.count(replicas, "replica") + f" ({', '.join(kinds)})" * (len(kinds) > 1)
    said += f", {number(server['replica_hours'])} replica-hours"
    if server.get("price_per_hour") is not None:
        said += f", {number(server['price_per_hour'])} an hour"
    failed = [f"replica {place} failed {verdict.count(times, 'time')}" for place, times in enumerate(failures) if times]
    more = f" and {len(failed) - 4} more" * (len(failed) > 4)
    return Line("Fleet", "; ".join([said, *failed[:4]]) + more)


def _graphs(found: Graphs) -> str:
    said = f"{found.complete:,} of {verdict.count(found.total, 'graph')} complete"
    if found.makespan_ms is not None:
        said += f"; makespan {_percentiles(found.makespan_ms, 'graphs')}"
    if (share := found.served_share) is not None:
        said += f", {100 * share:.3g} % of it waiting for answers"
    return said


def _structure(found: Validity) -> str:
    said = f"as asked for in {100 * found.share:.4g} % of {verdict.count(found.asked, 'answer')}"
    wrong = [f"{fault} ({times:,})" for fault, times in list(found.wrong.items())[:2]]
    return said + f"; otherwise: {', '.join(wrong)}" * bool(wrong)


def _tenant_text(view: Summary) -> str:
    said = f"{view.completed:,} of {verdict.count(view.completed + view.failed, 'request')}"
    ttft = _latency(view, "ttft_ms")
    return said + f"; refused by a limit: {view.refused:,}" * bool(view.refused) + f"; TTFT {ttft}" * bool(ttft)


def _latency(view: Summary, metric: str) -> str:
    found = view.from_schedule.get(metric)
    if found is None:
        return ""
    return _percentiles(
        found, ("steady " if view.name == STEADY_STATE else "") + ("samples" if metric == "itl_ms" else "requests")
    )


def _percentiles(found: Distribution, kind: str) -> str:
    """A distribution in a line; `kind` is what its samples are."""
    claims = [claim for claim in map(found.percentile, SHOWN) if claim is not None]
    known = [claim for claim in claims if claim.value is not None]
    said = (
        "  ".join(f"P{claim.p:g} {number(claim.value or 0.0)} ms" for claim in known) or f"mean {number(found.mean)} ms"
    )
    refused = next((claim for claim in claims if claim.value is None), None)
    if refused is not None and refused.needs:
        said += f"  (P{refused.p:g} needs {refused.needs:,} {kind}; this run had {found.count:,})"
    return said + _added(known)


def _added(claims: Sequence[Percentile]) -> str:
    """What the client may have added, where that is a percent or more."""
    most = max(claims, key=lambda claim: claim.client_share, default=None)
    if most is None or most.client_share < 0.01:
        return ""
    mark = ", which is not valid" if most.client_share > SPOILT else ""
    return f"  (client: up to {100 * most.client_share:.0f} % of P{most.p:g}{mark})"


def _cached(settings: dict[str, Any], cached: int, prompt: int) -> str:
    share = f"{100 * cached / prompt:.3g} %" if prompt else f"{cached:,} tokens"
    alone = settings.get("cache_salt") or settings.get("backend") == "simulate"  # each on a new server
    whose = "from this run's own prompts" if alone else "perhaps from earlier runs"
    return f"{share} of the prompt tokens came from the prefix cache, {whose}"


def _good(result: RunResult, summaries: Sequence[Summary], claims: Claims) -> Line:
    """Whether the numbers can be quoted, and the gravest thing against it."""
    valid = verdict.is_valid(result, summaries, claims)
    grave = [each for each in verdict.banners(result, summaries, claims) if each.tone == "bad"]
    figures = verdict.spoilt_figures(summaries, SHOWN)
    if not valid:
        why = " ".join(grave[0].lines[:2]) if grave else "The run measured nothing."
        return Line("Not valid", why, "bad")
    if figures:
        said = (
            f"but for {', '.join(figures[:4])}: the client, which found no free core in time, may have added more than "
            "10 %. Use them as upper bounds and the others as they are; objectives that were met are met. To mend it, "
            "end what else runs here or run the client on another machine"
        )
        return Line("Valid", said, "warn")
    notes = [note for note in summaries[0].notes if note.startswith("no steady state: ")]
    if notes and OVERLOAD in notes[0]:
        return Line("Overloaded", f"{notes[0]}; the figures are of the whole run", "warn")
    steady = steady_or_whole(summaries)
    said = f"the figures are the server's, of the {verdict.count(steady.completed, 'request')} in its steady state"
    if notes:
        said = f"over the whole run; {notes[0]}"
    return Line("Valid", said, "good")


def _next(result: RunResult, summaries: Sequence[Summary], claims: Claims) -> str:
    """The advice that helps most, for the last line."""
    target = claims.attainment
    found = steady_or_whole(summaries).attainment
    if not any(record.ok for record in result.records):
        if summaries[0].cancelled and not summaries[0].failed:
            return "let some clients wait: a lower --cancel-share, or a longer --cancel-after-s"
        log = "" if result.settings.get("backend") == "simulate" else "; see also the server's log"
        return f"--verbose shows what failed and how{log}"
    if result.client.bound:
        return "run the client on another machine, or at a lower --request-rate"
    if "ended_early" in result.settings:
        return "a lower load, or a higher --stop-at; --verbose shows what failed and how"
    if result.interrupted:
        return "let the run end, or make it shorter: --num-prompts"
    if not verdict.is_valid(result, summaries, claims):
        return "--verbose shows what failed and how"
    if any(OVERLOAD in note for note in summaries[0].notes):
        return "a lower load or more replicas; --find-max-rate with --goodput finds the highest rate that holds"
    if (found is None or not found.total) and summaries[0].failed > summaries[0].refused:
        return "--verbose shows what failed and how"
    if (found is None or not found.total) and summaries[0].refused:
        return "raise the limit that refused requests, or send fewer; --verbose shows which limit"
    if found is None or not found.total:
        objectives = "ttft:500 tpot:100" if summaries[0].tokens.get("output", 0) else "e2el:500"
        return f"add objectives with --goodput {objectives}; --verbose shows all tables, --report FILE.html pictures"
    decision = verdict.outcome(found, target)
    if decision == "undecided":
        unsteady = max(summaries[0].completed + summaries[0].failed - found.total, 0)
        enough = max(math.ceil(math.log(0.025) / math.log(target)), 2 * found.total) + unsteady
        return (
            f"to show that {100 * target:g} % of the requests meet the objectives, raise --num-prompts to at least "
            f"{enough:,}; more if slow requests come together"
        )
    if decision == "missed" and summaries[0].refused:
        return "refused requests count as missed; raise the limit that refused them, or send fewer requests"
    if decision == "missed":
        return (
            "--report FILE.html shows why the slowest requests took longer; --find-max-rate finds the rate that holds"
        )
    return "--find-max-rate finds the highest rate that holds; --verbose shows all tables"
