"""`headway doctor`: what a probe found, in words and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from headway.advisor.evidence import Evidence, median
from headway.advisor.pitfalls import Finding, Gain
from headway.changes import most_needed, typed
from headway.report.style import number

# A finding that is less sure than this is told, and does not fail a pipeline.
SURE = 0.5


def exit_code(found: Sequence[Finding]) -> int:
    """0 where nothing is due that is sure enough, else 1."""
    return int(any(each.confidence >= SURE for each in found))


def notes(evidence: Evidence) -> Iterator[str]:
    """What could not be looked at, a sentence each."""
    if not evidence.metrics:
        yield "The server has no /metrics that can be read: preemptions, hit rates and drafts are not known."
    if not any(stage.records for stage in evidence.stages):
        yield "No requests were sent: only metrics and processes were looked at."
    elif evidence.alone.phases_ms("prefill_compute") is None:
        yield "The server tells no ledger: windows and gaps of the host cannot be seen from outside."
    if evidence.machine is None:
        yield "The server's processes were not looked at: threads, steal, swap, pages and frequency are not known."
    failed = [record for stage in evidence.stages for record in stage.records if record.failed]
    if failed:
        yield f"{len(failed)} requests of the probe were not answered ({failed[0].reason})."
    if evidence.skipped:
        yield f"The time did not suffice for: {', '.join(evidence.skipped)}; give --seconds more."


def figures(evidence: Evidence) -> dict[str, float | None]:
    """The measured figures of a probe in ms; None where one is not known."""
    return {
        "ttft_alone_ms": median(evidence.alone.ttft_ms),
        "tpot_alone_ms": evidence.alone.tpot_ms,
        "ttft_long_ms": median(evidence.first.ttft_ms),
        "ttft_repeated_ms": median(evidence.again.ttft_ms),
        "ttft_crowd_ms": median(evidence.crowd.ttft_ms),
        "tpot_crowd_ms": evidence.crowd.tpot_ms,
        "longest_gap_ms": max(evidence.beside.gaps_ms, default=None),
    }


def print_findings(url: str, evidence: Evidence, found: Sequence[Finding], console: Console) -> None:
    """Print what is due, the most rewarding first."""
    about = evidence.about
    named = " ".join(str(about[key]) for key in ("name", "version") if about.get(key))
    console.print(Text.assemble((f"{named}, {about.get('model') or 'a model'} at {url}", "bold")))
    shown = {name: value for name, value in figures(evidence).items() if value is not None}
    if shown:
        words = (f"{name.removesuffix('_ms').replace('_', ' ')} {number(value)} ms" for name, value in shown.items())
        console.print(Text(f"Measured: {', '.join(words)}", style="dim"))
    if not found:
        console.print(Text("Nothing is wrong that was looked for.", style="green"))
    for place, each in enumerate(found, 1):
        console.print()
        sure = f"  {each.confidence:.0%} sure"
        console.print(Text.assemble((f"{place}  {each.lever.title}", "bold"), (sure, "dim")))
        for line in _lines(each):
            console.print(Padding(line, (0, 0, 0, 3)))
    said = list(notes(evidence))
    if said:
        console.print()
        for note in said:
            console.print(Text(note, style="dim"))


def _lines(finding: Finding) -> Iterator[Text]:
    for sentence in finding.evidence:
        yield Text(f"• {sentence}")
    if finding.gain is not None:
        yield Text(f"Predicted: {gain_in_words(finding.gain)}")
    if finding.changes:
        yield Text(f"Next: {most_needed(finding.changes).value} with {typed(finding.changes)}", style="cyan")
    if advice := finding.lever.advised(finding.kind):
        yield Text(f"{'Or' if finding.changes else 'Next'}: {advice}", style="" if finding.changes else "cyan")
    yield Text(f"Verify: {finding.lever.verify}", style="dim")


def gain_in_words(gain: Gain) -> str:
    low, high = gain.bar
    now, then, least, most = map(number, (gain.now_ms, gain.then_ms, gain.low_ms, gain.high_ms))
    return f"{gain.figure} {now} ms becomes {then} ms ({least} to {most}), {gain.times:.1f} x ({low:.1f} to {high:.1f})"


def as_object(url: str, evidence: Evidence, found: Sequence[Finding]) -> dict[str, Any]:
    """JSON-able; docs/advisor.md says what each key means."""
    return {
        "url": url,
        "kind": evidence.kind,
        "server": evidence.about,
        "figures": figures(evidence),
        "findings": [_as_object(each) for each in found],
        "notes": list(notes(evidence)),
    }


def _as_object(finding: Finding) -> dict[str, Any]:
    lever, gain = finding.lever, finding.gain
    return {
        "key": lever.key,
        "title": lever.title,
        "signal": lever.signal,
        "confidence": finding.confidence,
        "evidence": list(finding.evidence),
        "gain": gain and asdict(gain) | {"times": gain.times, "range": list(gain.bar)},
        "changes": [change.as_json() for change in finding.changes],
        "advice": lever.advised(finding.kind),
        "verify": lever.verify,
        "lever": lever.planned or None,
    }
