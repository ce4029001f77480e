"""Plans side by side: what is asked for, which is the best of each figure, and what is too close to tell."""

from __future__ import annotations

import json
import math
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from rich.console import Console
from rich.text import Text

from headway.planner.answer import headline
from headway.planner.json import as_object
from headway.planner.models import names_taken
from headway.planner.numbers import missed_by, numbers_of, shortened
from headway.planner.plan import Estimate, Plan
from headway.planner.request import PlanError, PlanOptions, PlanRequest, SpeculationFlags
from headway.planner.words import bar, dollars, gigabytes, letter
from headway.report.console import print_table
from headway.report.parts import NOTHING, Cell, Table, cells
from headway.report.style import number

# The share of the squared error (in the logarithm) that predictions of the same engine and hardware architecture have
# in common: 0.5 for the TPOTs of the published measurements (0.4 for TTFTs), and 0.8 where they also have one source.
SHARED = 0.5
EXAMPLE = "llama-3.1-8b@H100-SXM, or llama-3.1-70b@4xH100-SXM:quantization=fp8,tp=4"
SHORT = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size"}
LOADS = ("batch_size", "concurrency", "request_rate")
_COUNTED = re.compile(r"(\d+)x(.+)", re.IGNORECASE)
_COUNT_LAST = re.compile(r"(.+)x(\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Wanted:
    """One plan as it was typed, with the flags that it sets."""

    text: str
    flags: dict[str, Any]


def parse_plans(texts: Sequence[str]) -> list[Wanted]:
    """Read MODEL@HARDWARE or MODEL@4xHARDWARE, with :FLAG=VALUE,... behind it if wanted.

    What a text leaves out is taken from the first one.

    Raises:
        PlanError: a text cannot be read; one line that says which and how to write it.
    """
    if len(texts) < 2:
        raise PlanError(f"plan compare takes two plans or more; write each like {EXAMPLE}")
    found: list[Wanted] = []
    for text in texts:
        if not text.strip("@ "):
            raise PlanError(f"plan {text!r} is empty; write it like {EXAMPLE}")
        found.append(Wanted(text, _flags(text, found[0].flags if found else {})))
    return found


def merged(shared: PlanOptions, speculation: SpeculationFlags, wanted: Wanted) -> PlanRequest:
    """What is asked of one plan: its own flags go before the shared ones, and its own load takes the place of theirs.

    Raises:
        PlanError: it cannot be planned.
    """
    left_out = LOADS if any(name in wanted.flags for name in LOADS) else ()
    of_speculation = [each.name for each in fields(SpeculationFlags)]
    own = {name: value for name, value in wanted.flags.items() if name not in of_speculation}
    kept = {each.name: getattr(shared, each.name) for each in fields(shared) if each.name not in left_out}
    guess = replace(speculation, **{name: wanted.flags[name] for name in of_speculation if name in wanted.flags})
    return PlanRequest(**kept | own, speculation=guess.speculation())


def _flags(text: str, first: Mapping[str, Any]) -> dict[str, Any]:
    model, at, rest = text.partition("@") if "@" in text else ("", "", text)
    hardware, colon, options = rest.partition(":")
    if not at:
        model, hardware = hardware, ""
    flags: dict[str, Any] = {"model": model or first.get("model"), "hardware": hardware or first.get("hardware")}
    missing = [name for name, value in flags.items() if not value]
    if missing or (colon and not options):
        lacks = f"no {' and no '.join(missing)}" if missing else "nothing after its colon"
        raise PlanError(f"plan {text!r} has {lacks}; write it like {EXAMPLE}")
    if hardware and (counted := _COUNTED.fullmatch(hardware)):
        flags |= {"count": _value(text, "count", counted[1], int), "hardware": counted[2]}
    elif not hardware and "count" in first:
        flags["count"] = first["count"]
    for option in options.split(",") if options else ():
        name, equals, value = option.partition("=")
        flags |= _option(text, name.strip().lstrip("-").replace("-", "_"), value.strip() if equals else None)
    return flags


def _option(text: str, name: str, value: str | None) -> dict[str, Any]:
    name = SHORT.get(name, name)
    known = _option_types()
    if name == "slo":
        raise PlanError(f"plan {text!r} sets slo; objectives are for all plans, so give --slo once")
    if name not in known:
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else "use flags of headway plan, such as quantization=fp8, or tp=2"
        raise PlanError(f"plan {text!r} sets {name!r}, which is no flag of one plan; {hint}")
    if value is None and known[name] is not bool:
        raise PlanError(f"plan {text!r} gives {name!r} no value; write {name}=VALUE")
    return {name: True if value is None else _value(text, name, value, known[name])}


def _value(text: str, name: str, value: str, kind: type) -> Any:
    if kind is bool:
        if value.lower() in ("true", "yes", "on", "1", "false", "no", "off", "0"):
            return value.lower() in ("true", "yes", "on", "1")
        raise PlanError(f"plan {text!r} has {name}={value}; give true or false")
    try:
        return kind(value)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise PlanError(f"plan {text!r} has {name}={value}, which is not {what}") from None


def _option_types() -> dict[str, type]:
    """The flags that can stand behind the colon: fields of a request with a single value, and those of speculation."""
    hints = typing.get_type_hints(PlanRequest) | typing.get_type_hints(SpeculationFlags)
    kinds = {name: _single(hint) for name, hint in hints.items() if name not in ("model", "hardware")}
    return {name: kind for name, kind in kinds.items() if kind in (int, float, str, bool)}


def _single(hint: Any) -> type:
    """The one type that a hint allows beside None: int for `int | None`."""
    parts = typing.get_args(hint)
    found: type = next(each for each in parts if each is not type(None)) if type(None) in parts else hint
    return found


def count_hint(wanted: Wanted) -> str:
    """A hint for an error about hardware that is not known because the count stands behind it; otherwise nothing."""
    last = _COUNT_LAST.fullmatch(str(wanted.flags["hardware"]))
    return f" (the number of devices goes first: {last[2]}x{last[1]})" if last else ""


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of each plan, in the unit of its key."""

    key: str
    label: str
    # Gives the figure of a plan, with a bar where it is predicted; None where the plan has no such figure.
    of: Callable[[Plan], Estimate | float | None]
    better: int  # -1 where less is better, 1 where more is
    words: Callable[[float], str]


def _milliseconds(value: float) -> str:
    return f"{number(value)} ms"


def _tpot(plan: Plan) -> Estimate | None:
    return plan.tpot.scaled(1e3 * shortened(plan).tpot) if plan.tpot else None


def _answer(plan: Plan) -> Estimate | None:
    return plan.ttlt.scaled(1e3 * shortened(plan).answer) if plan.ttlt else None


def _tokens(plan: Plan) -> Estimate | None:
    rate = plan.output_tokens_per_s
    return rate if rate is None or plan.load == "rate" else rate.scaled(1 / shortened(plan).answer)


def _per_device(plan: Plan) -> Estimate | None:
    rate = _tokens(plan)
    return rate.scaled(1 / plan.devices) if rate else None


def _cost(plan: Plan) -> Estimate | None:
    """Dollars for a million output tokens, with the error bar of the tokens a second that they follow from."""
    rate, cost = _tokens(plan), numbers_of(plan).cost
    if cost is None or rate is None:
        return None
    return Estimate(cost, cost * rate.value / rate.high, cost * rate.value / rate.low)


def _per_watt(plan: Plan) -> Estimate | None:
    rate, watts = _tokens(plan), plan.deployment.hardware.tdp_w
    return rate.scaled(1 / (watts * plan.devices)) if rate and watts else None


ROWS = (
    Row("weights_bytes", "weights", lambda plan: float(plan.weights_bytes), -1, gigabytes),
    Row("kv_bytes_per_token", "cache of a token", lambda plan: float(plan.kv_bytes_per_token), -1, gigabytes),
    Row("max_batch", "most sequences", lambda plan: float(plan.max_batch), 1, lambda value: f"{value:,.0f}"),
    Row("ttft_ms", "TTFT", lambda plan: plan.ttft.scaled(1e3) if plan.ttft else None, -1, _milliseconds),
    Row("tpot_ms", "TPOT", _tpot, -1, _milliseconds),
    Row("ttlt_ms", "whole answer", _answer, -1, _milliseconds),
    Row("output_tokens_per_s", "output tokens/s", _tokens, 1, number),
    Row("output_tokens_per_s_per_device", "of each device", _per_device, 1, number),
    Row("price_per_hour", "price of an hour", lambda plan: plan.price_per_hour, -1, dollars),
    Row("cost_per_million_output_tokens", "1M output tokens", _cost, -1, dollars),
    Row("tokens_per_s_per_watt", "tokens/s/W", _per_watt, 1, number),
)


def marks(row: Row, plans: Sequence[Plan]) -> list[str]:
    """For each plan "best", "close" (not told apart from the best), or nothing. Equal bests are all best.

    What does not fit is the best at nothing.
    """
    values = [row.of(plan) if plan.fits else None for plan in plans]
    known = [place for place, value in enumerate(values) if value is not None]
    if len(known) < 2:
        return [""] * len(plans)
    best = max(known, key=lambda place: row.better * _middle(values[place]))
    found = [""] * len(plans)
    for place in known:
        if _middle(values[place]) == _middle(values[best]):
            found[place] = "best"
        elif not told_apart(plans[best], values[best], plans[place], values[place]):
            found[place] = "close"
    return found if found.count("best") < len(known) else [""] * len(plans)


def told_apart(one_plan: Plan, one: Estimate | float | None, other_plan: Plan, other: Estimate | float | None) -> bool:
    """Whether two figures differ by more than both bars together, in the logarithm.

    The arms of the bars that point at each other are added like independent errors. For plans of the same engine and
    architecture, what these have in common (`SHARED`) is taken off. Counted figures, such as bytes, have no error.
    """
    if not (isinstance(one, Estimate) and isinstance(other, Estimate)):
        return True
    low, high = (one, other) if one.value < other.value else (other, one)
    if min(low.value, high.low) <= 0 or not math.isfinite(low.high):
        return False
    up, down = math.log(low.high / low.value), math.log(high.value / high.low)
    return math.log(high.value / low.value) > _joint(up, down, alike(one_plan, other_plan))


def _joint(one: float, other: float, are_alike: bool) -> float:
    """The arm of the bar of a ratio, from an arm of each of its figures; all in the logarithm."""
    shared = SHARED if are_alike else 0.0
    return math.sqrt(one * one + other * other - 2 * shared * one * other)


def range_of_gain(before: Plan, after: Plan, objective: str) -> tuple[float, float] | None:
    """The 80 % bar of how many times as good a plan gets, by the same rule as `told_apart`.

    None where a figure has no bar: plans in brief have none under a rate of arrivals.

    Args:
        objective: ttft, tpot, e2el, throughput or cost; the first three and the last are better where they are less.
    """
    key = {"e2el": "ttlt_ms", "throughput": "output_tokens_per_s_per_device", "cost": "cost_per_million_output_tokens"}
    row = next(each for each in ROWS if each.key == key.get(objective, f"{objective}_ms"))
    old, new = row.of(before), row.of(after)
    if not (isinstance(old, Estimate) and isinstance(new, Estimate)) or before.load == "rate":
        return None
    less, more = (old, new) if row.better < 0 else (new, old)  # the gain is less / more
    ends = [each for estimate in (less, more) for each in (estimate.low, estimate.value, estimate.high)]
    if not all(0 < each < math.inf for each in ends):
        return None
    gain, are_alike = less.value / more.value, alike(before, after)
    down = _joint(math.log(less.value / less.low), math.log(more.high / more.value), are_alike)
    up = _joint(math.log(less.high / less.value), math.log(more.value / more.low), are_alike)
    return gain * math.exp(-down), gain * math.exp(up)


def alike(one: Plan, other: Plan) -> bool:
    """Whether two plans have the same engine and hardware architecture."""
    mine, yours = one.deployment.hardware, other.deployment.hardware
    return one.engine == other.engine and mine.architecture == yours.architecture


def _middle(value: Estimate | float | None) -> float:
    assert value is not None
    return value.value if isinstance(value, Estimate) else value


def comparison_table(plans: Sequence[Plan]) -> Table:
    """A column for each plan."""
    rows = [cells("fits", *(Cell("yes", "good") if plan.fits else Cell("no", "bad") for plan in plans))]
    rows += [_row(row, plans) for row in ROWS if any(row.of(plan) is not None for plan in plans)]
    rows.append(cells("prompts bound by", *(plan.prefill.bound for plan in plans)))
    rows.append(cells("decoding bound by", *(plan.decode.bound for plan in plans)))
    if plans[0].request.slo:
        rows.append(cells("SLO", *(_slo(plan) for plan in plans)))
    note = (
        "* best of its row; ~ too close to the best to tell apart by the 80 % bars below the figures. Plans with "
        f"the same engine and architecture share {SHARED:.0%} of their squared error."
    )
    if any(plan.speculated for plan in plans):
        note += " Figures include speculative decoding if a plan uses it."
    return Table("Side by side", ("", *(letter(place) for place in range(len(plans)))), tuple(rows), note=note)


def _row(row: Row, plans: Sequence[Plan]) -> tuple[Cell, ...]:
    found = [Cell(row.label)]
    for plan, mark in zip(plans, marks(row, plans), strict=True):
        value = row.of(plan)
        if value is None:
            found.append(NOTHING)
            continue
        detail = bar(value) if isinstance(value, Estimate) else ""
        text = row.words(_middle(value)) + {"best": " *", "close": " ~", "": ""}[mark]
        found.append(Cell(text, "good" if mark == "best" else "", detail))
    return tuple(found)


def _slo(plan: Plan) -> Cell:
    if not plan.fits:
        return NOTHING
    missed = missed_by(plan)
    return Cell("met", "good") if not missed else Cell(f"{', '.join(missed)} missed", "bad")


def print_comparison(plans: Sequence[Plan], console: Console) -> None:
    """Print what each plan is, what is wrong with those that cannot work, and the table."""
    for place, plan in enumerate(plans):
        console.print(Text.assemble((f"{letter(place)}  ", "bold"), headline(plan)))
        if said := names_taken(plan.request.model, plan.model, plan.request.hardware, plan.hardware_key):
            console.print(Text(f"   {said}"))
        if plan.problem:
            console.print(Text(f"   {plan.problem}", style="red"))
    console.print()
    print_table(console, comparison_table(plans))


def comparison_json(wanted: Sequence[Wanted], plans: Sequence[Plan]) -> str:
    """A list: each plan as `headway plan --json` has it, the figures that are compared, and in which it is best.

    Speculative decoding counts in the figures that are compared.
    """
    found = {row.key: marks(row, plans) for row in ROWS}
    objects = [
        {
            "plan": each.text,
            **as_object(plan),
            "compared": {row.key: None if (value := row.of(plan)) is None else _middle(value) for row in ROWS},
            "best": [key for key, marked in found.items() if marked[place] == "best"],
            "close_to_best": [key for key, marked in found.items() if marked[place] == "close"],
        }
        for place, (each, plan) in enumerate(zip(wanted, plans, strict=True))
    ]
    return json.dumps(objects, indent=2, allow_nan=False)
