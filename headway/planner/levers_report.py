"""Levers on a terminal and as JSON."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from headway.changes import most_needed
from headway.flags import Needs
from headway.planner.answer import headline
from headway.planner.levers import Lever, Levers
from headway.planner.models import names_taken
from headway.planner.numbers import Numbers, missed_by, value_of
from headway.planner.words import dollars, seconds
from headway.report.console import print_table
from headway.report.parts import NOTHING, Cell, Table, Tone, cells
from headway.report.style import number

COLUMNS = ("", "lever", "gain", "TTFT", "TPOT", "tokens/s", "devices", "1M out")
MEANS = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "e2el": "the time of a whole answer",
    "throughput": "output tokens a second of each device",
    "cost": "the price of a million output tokens",
}
# What it takes to apply a change, as the end of "needs ...".
_NEEDS = {
    Needs.RELOAD: "a reload",
    Needs.RESTART: "a restart",
    Needs.LOAD: "another load",
    Needs.HARDWARE: "other hardware",
    Needs.MODEL: "another model",
}


def print_levers(found: Levers, console: Console) -> None:
    """The objective, levers by gain, those put together, and what is no lever here."""
    base = found.base
    console.print(Text(headline(base), style="bold"))
    if said := names_taken(base.request.model, base.model, base.request.hardware, base.hardware_key):
        console.print(Text(said))
    if found.base.problem:
        console.print(Text(found.base.problem, style="red"))
    if found.ranked:
        console.print(Text(f"Ranked by {MEANS[found.objective]} ({found.why})."))
        console.print()
        print_table(console, lever_table(found))
        listed = RichTable.grid(padding=(0, 1))
        for place, lever in enumerate(found.ranked, 1):
            listed.add_row(Text(f"{place}"), Text(f"{_applied(lever)}\n").append(lever.proposal.assumes, "dim"))
        console.print(listed)
    else:
        console.print(Text("No single change helps."))
    if found.chain:
        console.print()
        print_table(console, chain_table(found))
        total = "" if found.chain_gain is None else f", {found.chain_gain:.2f} x"
        console.print(Text(f"All of them{total}: {found.chain_flags}"))
    if found.left_out:
        console.print()
        console.print(Text("No levers here", style="bold"))
        reasons = RichTable.grid(padding=(0, 1))
        for reason, names in _by_reason(found).items():
            reasons.add_row(Text("•"), Text(f"{', '.join(names)}: {reason}"))
        console.print(reasons)


def _applied(lever: Lever) -> str:
    """The flags of a lever, the bar of its gain, and what it takes to apply it."""
    bar = "" if lever.gain_range is None else "gain {:.2f} to {:.2f} x; ".format(*lever.gain_range)
    return f"{lever.flags} ({bar}needs {_NEEDS[most_needed(lever.proposal.changes)]})"


def _by_reason(found: Levers) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for name, reason in found.left_out:
        names.setdefault(reason, []).append(name)
    return names


def lever_table(found: Levers) -> Table:
    """A row for the plan as it is, and then one for each lever, the largest gain first."""
    rows = [_lever_row(found, f"{place}", lever.proposal.name, lever) for place, lever in enumerate(found.ranked, 1)]
    served = " tokens/s: that can be served at most." if found.base.load == "rate" else ""
    note = (
        f"Gain: of {MEANS[found.objective]}; above 1 is better.{served} Below: the flags of each, the 80 % bar of its "
        "gain, what it needs, and what the figures assume."
    )
    return Table("One change at a time", COLUMNS, (_as_it_is(found), *rows), left=frozenset({1}), note=note)


def chain_table(found: Levers) -> Table:
    """Levers on top of each other."""
    rows = [_lever_row(found, "", f"+ {lever.proposal.name}", lever) for lever in found.chain]
    note = "Each is added to those before it, as long as the next one gains 3 % or more."
    return Table("The best combination", COLUMNS, (_as_it_is(found), *rows), left=frozenset({1}), note=note)


def _as_it_is(found: Levers) -> tuple[Cell, ...]:
    return _row("", "as it is", Cell(""), found.numbers, missed_by(found.base))


def _lever_row(found: Levers, place: str, name: str, lever: Lever) -> tuple[Cell, ...]:
    return _row(place, name, _gain(found, lever), lever.numbers, lever.misses)


def _row(place: str, name: str, gain: Cell, numbers: Numbers, missed: tuple[str, ...]) -> tuple[Cell, ...]:
    times = [NOTHING if value is None else Cell(seconds(value)) for value in (numbers.ttft_s, numbers.tpot_s)]
    tokens = "–" if numbers.tokens_per_s is None else number(numbers.tokens_per_s)
    said = Cell(name, detail=f"misses {' and '.join(missed)}" if missed else "")
    return cells(place, said, gain, *times, tokens, f"{numbers.devices}", dollars(numbers.cost))


def _gain(found: Levers, lever: Lever) -> Cell:
    """The gain; where the plan as it is has no such figure, what the lever makes of it."""
    if lever.gain is None:
        if not found.base.fits:
            return Cell("it fits", "good")
        return NOTHING if value_of(lever.numbers, found.objective) is None else Cell("it keeps up", "good")
    tone: Tone = "good" if lever.gain > 1.005 else "bad" if lever.gain < 0.995 else "quiet"
    return Cell(f"{lever.gain:.2f} x", tone)


def to_json(found: Levers) -> str:
    """One object; docs/plan-levers.md says what each key means."""
    return json.dumps(
        {
            "model": found.base.model,
            "hardware": found.base.hardware_key,
            "objective": found.objective,
            "why": found.why,
            "problem": found.base.problem,
            "base": _figures(found.numbers),
            "levers": [_lever(lever) for lever in found.ranked],
            "combination": [_lever(lever) for lever in found.chain],
            "combination_gain": found.chain_gain,
            "combination_flags": found.chain_flags,
            "left_out": [{"name": name, "reason": reason} for name, reason in found.left_out],
        },
        indent=2,
        allow_nan=False,
    )


def _lever(lever: Lever) -> dict[str, Any]:
    return {
        "name": lever.proposal.name,
        "kind": lever.proposal.kind,
        "flags": lever.flags,
        "changes": [change.as_json() for change in lever.proposal.changes if change.typed],
        "needs": most_needed(lever.proposal.changes).value,
        "gain": lever.gain,
        "gain_range": None if lever.gain_range is None else list(lever.gain_range),
        **_figures(lever.numbers),
        "misses": list(lever.misses),
        "assumes": lever.proposal.assumes,
    }


def _figures(numbers: Numbers) -> dict[str, Any]:
    def ms(value: float | None) -> float | None:
        return None if value is None else value * 1e3

    return {
        "ttft_ms": ms(numbers.ttft_s),
        "tpot_ms": ms(numbers.tpot_s),
        "e2el_ms": ms(numbers.e2el_s),
        "output_tokens_per_s": numbers.tokens_per_s,
        "cost_per_million_output_tokens": numbers.cost,
        "devices": numbers.devices,
    }
