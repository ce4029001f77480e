"""`headway checklist`: the ten boxes of document 003, chapter 15, each ticked by a measurement or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from headway.advisor.doctor import notes
from headway.advisor.evidence import ACCEPTED, DRAFTED, Evidence, median
from headway.advisor.pitfalls import FEW_ACCEPTED, FEW_DRAFTS
from headway.load.measures.server_metrics import HITS, PREEMPTIONS, QUERIES
from headway.report.style import number

ENOUGH = 20  # answered requests, for percentiles
NEAR = 5.0  # times the time of the roofline that a step may take on average
LINEAR = 1.3  # exponent of the growth of TTFT with the prompt, above which attention does not look fused
GAPS = 0.2  # share of a request's time that the host may take between steps
HOST = ("schedule", "transport", "detokenize", "send")
# Histograms that dashboards are made of, by their endings: of Headway, vLLM, SGLang.
DASHBOARD = ("time_to_first_token_seconds_bucket", "e2e_request_latency_seconds_bucket")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a measurement says of a box."""

    ticked: bool
    figure: str  # what was measured, or why nothing could be


Measure = Callable[[Evidence], Verdict]


@dataclass(frozen=True, slots=True)
class Box:
    """A box of the checklist, numbered from 1."""

    number: int
    title: str
    measure: Measure  # ticks the box or not
    advice: str  # what to do where it is not ticked


BOXES: list[Box] = []


def _box(title: str, advice: str) -> Callable[[Measure], Measure]:
    """Make the function below the measure of the next box."""

    def numbered(measure: Measure) -> Measure:
        BOXES.append(Box(len(BOXES) + 1, title, measure, advice))
        return measure

    return numbered


def checked(evidence: Evidence) -> list[tuple[Box, Verdict]]:
    """All boxes, in order, with what was measured."""
    return [(box, box.measure(evidence)) for box in BOXES]


@_box(
    "Baseline of TTFT, time between tokens and TTLT, with percentiles",
    "run headway bench with the load that you expect, and keep its result",
)
def _baseline(evidence: Evidence) -> Verdict:
    stages = [evidence.alone, evidence.crowd]
    ttft = [value for stage in stages for value in stage.ttft_ms]
    whole = [(each.end_ns - each.sent_ns) / 1e6 for stage in stages for each in stage.answered]
    gaps = [value for stage in stages for value in stage.gaps_ms]
    if len(ttft) < ENOUGH or not gaps:
        return Verdict(False, f"{len(ttft)} requests were answered; percentiles need {ENOUGH}")
    told = (f"{name} {_percentiles(values)}" for name, values in (("TTFT", ttft), ("ITL", gaps), ("TTLT", whole)))
    return Verdict(True, f"{', '.join(told)} ms at P50, P90, P99 of {len(ttft)} short requests")


def _percentiles(values: list[float]) -> str:
    return ", ".join(number(float(value)) for value in np.percentile(values, (50, 90, 99)))


@_box(
    "Kernels of attention and decoding near what the hardware allows",
    "use the engine's build for this hardware; headway calibrate tells Headway the roofline",
)
def _kernels(evidence: Evidence) -> Verdict:
    short, long = median(evidence.alone.ttft_ms), median(evidence.first.ttft_ms)
    step, lengths = evidence.alone.tpot_ms, evidence.lengths
    if short is None or long is None or step is None or lengths[1] < 4 * lengths[0]:
        return Verdict(False, "prompts of two lengths were not answered")
    # A decode step is what every prompt pays; only what lies beyond it grows with the prompt.
    beyond = max(long - step, 1e-3) / max(short - step, 1e-3)
    growth = float(np.log(beyond) / np.log(lengths[1] / lengths[0]))
    names = "step_time_to_roofline_ratio_sum", "step_time_to_roofline_ratio_count"
    ratio, count = (evidence.total((name,)) for name in names)
    said = f"TTFT grows with the prompt's length to the power of {growth:.2f}"
    if not ratio or not count:
        return Verdict(False, f"{said}; the server does not tell how far its steps are from the roofline")
    far = ratio / count
    said += f"; a step takes {far:.1f} times the least that the machine needs for it (at most {NEAR:g} is ticked)"
    return Verdict(growth <= LINEAR and far <= NEAR, said)


@_box(
    "Steps follow each other without gaps of the host",
    "capture decode steps as graphs (leave out --enforce-eager); let client and proxies run on other cores",
)
def _graphs(evidence: Evidence) -> Verdict:
    lost = evidence.crowd.phases_ms(*HOST)
    whole = median([(each.end_ns - each.sent_ns) / 1e6 for each in evidence.crowd.answered])
    if lost is None or not whole:
        return Verdict(False, "the server tells no ledger, so that gaps between its steps are not known")
    return Verdict(
        lost <= GAPS * whole, f"the host takes {lost / whole:.0%} of a request (at most {GAPS:.0%} is ticked)"
    )


@_box(
    "Continuous batching, with a window for each class",
    "serve with classes (--service-classes), or put headway gateway in front",
)
def _batching(evidence: Evidence) -> Verdict:
    ends = [record.chunk_ns[-1] for record in evidence.beside.answered]
    joined = sum(record.chunk_ns[0] < max(ends) for record in evidence.prompts.answered) if ends else 0
    sent = len(evidence.prompts.answered)
    classes = () if evidence.counted is None else evidence.counted.values("class_requests_running", "service_class")
    said = f"{joined} of {sent} requests joined while others streamed; {len(classes)} classes have windows of their own"
    return Verdict(bool(sent) and joined >= 0.5 * sent and len(classes) > 1, said)


@_box("Prompt cache on, hit rate known", "start the server with prefix caching; put what all prompts share first")
def _prefix(evidence: Evidence) -> Verdict:
    found, sent = evidence.again.cached_tokens, evidence.lengths[1] * len(evidence.again.answered)
    if not sent or found is None:
        return Verdict(False, "the server does not tell what it found of a repeated prompt")
    hits, queries = evidence.total(HITS), evidence.total(QUERIES)
    rate = f"; {hits / queries:.0%} of all prompt tokens since its start" if hits is not None and queries else ""
    said = f"{found / sent:.0%} of the tokens of repeated prompts were in the cache{rate}"
    return Verdict(found >= 0.5 * sent and hits is not None, said)


@_box(
    "Paging, preemption and eviction of the KV cache counted",
    "start the server with its metrics (llama-server --metrics)",
)
def _paging(evidence: Evidence) -> Verdict:
    used = evidence.gauges.get("kv_cache_usage")
    preempted = evidence.total(PREEMPTIONS)
    evicted = evidence.total(("kv_evictions_total",))
    if used is None or preempted is None:
        return Verdict(False, "the server tells neither its use of the KV cache nor its preemptions")
    told = f"{preempted:,.0f} preemptions" + ("" if evicted is None else f" and {evicted:,.0f} evictions")
    return Verdict(used > 0, f"up to {used:.1%} of the KV cache was in use; {told} since its start")


@_box(
    "Quantisation and shared KV heads compared by quality",
    "evaluate your own task with each format, and keep the result with the deployment",
)
def _quality(evidence: Evidence) -> Verdict:
    return Verdict(False, "nothing at an endpoint tells that its formats were compared by an evaluation")


@_box(
    "Speculative decoding tuned, acceptance known",
    "try drafts with your own texts; headway plan levers says from which acceptance on they pay",
)
def _drafts(evidence: Evidence) -> Verdict:
    tried, accepted = evidence.total(DRAFTED), evidence.total(ACCEPTED)
    if not tried or accepted is None:
        return Verdict(False, "no drafts were tried")
    said = f"{accepted / tried:.0%} of {tried:,.0f} drafts were accepted (from {FEW_ACCEPTED:.0%} on it is ticked)"
    return Verdict(tried >= FEW_DRAFTS and accepted >= FEW_ACCEPTED * tried, said)


@_box(
    "Requests routed by objectives, tenants held to limits",
    "give --service-classes and --tenants, or put headway gateway in front",
)
def _objectives(evidence: Evidence) -> Verdict:
    judged = None if evidence.counted is None else evidence.counted.total(("class_objectives_total",))
    limits = ", ".join(f"{name} {value}" for name, value in sorted(evidence.limits.items()))
    said = "no request is judged by objectives" if not judged else f"{judged:,.0f} objectives of requests were judged"
    return Verdict(bool(judged and limits), f"{said}; {limits or 'answers tell no limit of a tenant'}")


@_box(
    "Dashboards and traces for those on call",
    "scrape /metrics, import a dashboard (headway dashboard), and send traces to a collector",
)
def _telemetry(evidence: Evidence) -> Verdict:
    missing = [name for name in DASHBOARD if name not in evidence.metrics]
    traced = evidence.traced_steps
    said = f"/metrics has {len(evidence.metrics)} series" if evidence.metrics else "there is no /metrics"
    said += f" and lacks {', '.join(missing)}" if evidence.metrics and missing else ""
    told = "no trace can be had" if not traced else f"a trace has its last {traced} steps"
    return Verdict(bool(evidence.metrics and not missing and traced), f"{said}; {told}")


def print_checklist(url: str, evidence: Evidence, console: Console) -> None:
    """Print each box with its figure, and what to do about those that are not ticked."""
    found = checked(evidence)
    console.print(Text(f"{sum(verdict.ticked for _, verdict in found)} of {len(found)} at {url}", style="bold"))
    for box, verdict in found:
        mark = ("[x]", "green") if verdict.ticked else ("[ ]", "red")
        console.print(Text.assemble(mark, f" {box.number:2}  {box.title}"))
        for line in _lines(box, verdict):
            console.print(Padding(line, (0, 0, 0, 8)))
    for note in notes(evidence):
        console.print(Text(note, style="dim"))


def _lines(box: Box, verdict: Verdict) -> Iterator[Text]:
    yield Text(verdict.figure, style="dim")
    if not verdict.ticked:
        yield Text(f"Next: {box.advice}")


def as_object(url: str, evidence: Evidence) -> dict[str, Any]:
    """JSON-able; docs/advisor.md says what each key means."""
    boxes = [
        {"number": box.number, "title": box.title, "ticked": verdict.ticked, "figure": verdict.figure}
        | ({} if verdict.ticked else {"next": box.advice})
        for box, verdict in checked(evidence)
    ]
    return {"url": url, "kind": evidence.kind, "server": evidence.about, "boxes": boxes, "notes": list(notes(evidence))}
