"""What a tuning found, as a config to serve with and as a report to read."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from headway.advisor.tuning.options import TuneOptions
from headway.advisor.tuning.race import LEAST_GAIN
from headway.advisor.tuning.subjects import OTHER_DEVICE, start_command
from headway.advisor.tuning.tune import Trial, Tuned
from headway.changes import applied, typed
from headway.report.style import number
from headway.simulator.verify import given_flags

CONFIG, COMMAND, REPORT = "serve.toml", "start.txt", "report.md"


def meets(runs: list[dict[str, Any]], share: float) -> bool:
    """Whether so large a share of the requests of all runs met their objectives."""
    return bool(runs) and fmean(run["attainment"] for run in runs) >= share


def write(options: TuneOptions, found: Tuned) -> list[Path]:
    """Write the config, or another server's command, and the report. Raises ValueError where one cannot be written."""
    served: dict[str, Iterable[str]]
    served = {CONFIG: config_lines(options, found)} if options.start is None else {COMMAND: [command(options, found)]}
    texts = {name: "\n".join(each) + "\n" for name, each in (served | {REPORT: lines(options, found)}).items()}
    written = []
    for name, text in texts.items():
        path = options.output / name
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror}") from None
        written.append(path)
    return written


def command(options: TuneOptions, found: Tuned) -> str:
    """The command that starts another server with what was kept; {port} stays for its user."""
    assert options.start is not None
    return shlex.join(start_command(options.start, applied(options.scheduling, found.changes), OTHER_DEVICE))


def config_lines(options: TuneOptions, found: Tuned) -> Iterator[str]:
    """TOML for `headway serve --config`: what was given and what was kept."""
    kept = {each.field: "kept by tuning" for each in found.changes}
    scheduling = applied(options.scheduling, found.changes)
    for name, value in given_flags(options.model_options, scheduling):
        key = name.removeprefix("--")
        word = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else json.dumps(value)
        yield f"{key} = {word}  # {kept.get(key.replace('-', '_'), 'as given')}"


def lines(options: TuneOptions, found: Tuned) -> Iterator[str]:
    """The report in Markdown."""
    objectives = ", ".join(f"{name} {limit:g} ms" for name, limit in options.claims.objectives.items())
    yield f"# Tuning of {options.start or options.model or 'headway/story'} for {objectives}"
    yield ""
    yield from _found(options, found)
    yield ""
    yield "## What helped, and by how much"
    yield ""
    if not found.trials:
        yield "Nothing was tried."
    else:
        yield "Gain: how many times nearer to their objectives the slowest quarter of the requests came."
        yield ""
        yield "| change | predicted (80 % bar) | measured (95 %) | pairs | verdict |"
        yield "|---|---|---|---:|---|"
        yield from map(_row, found.trials)
    yield ""
    yield "## What remains, and why"
    yield ""
    yield from _remains(options, found)


def _found(options: TuneOptions, found: Tuned) -> Iterator[str]:
    gain = math.exp(_loss(found.before) - _loss(found.after))
    yield f"| | before | after |\n|---|---:|---:|\n| met all objectives | {_met(found.before)} | {_met(found.after)} |"
    for name in found.before[0]["percentiles_ms"]:
        sides = (_percentiles(runs, name) for runs in (found.before, found.after))
        yield f"| {name.upper()} P50, P90, P99 in ms | {' | '.join(sides)} |"
    yield ""
    if found.changes:
        yield f"`{typed(found.changes)}` brings the slowest quarter {gain:.2f} times nearer to its objectives."
        served = (
            f"headway serve --config {options.output / CONFIG}" if options.start is None else command(options, found)
        )
        yield f"Serve with `{served}`."
    else:
        yield f"No change was proven to gain {LEAST_GAIN - 1:.0%} or more: the configuration stays as it is."


def _row(trial: Trial) -> str:
    race, said = trial.race, trial.prediction
    low, high = race.interval
    bar = f"{low:.2f} to {high:.2f}" if math.isfinite(high) else "too few pairs"
    verdict = "kept" if trial.kept else race.verdict
    return f"| `{said.change.typed}` | {said} | {race.times:.2f} ({bar}) | {len(race.gains)} | {verdict} |"


def _remains(options: TuneOptions, found: Tuned) -> Iterator[str]:
    yield f"It ended because {found.why}."
    missed = 1 - fmean(run["attainment"] for run in found.after)
    if not meets(found.after, options.claims.attainment):
        yield f"{missed:.1%} of the requests miss an objective; at most {1 - options.claims.attainment:.1%} may."
    yield f"On average, the slowest quarter takes {math.exp(_loss(found.after)):.2f} of the allowed time."
    shares: dict[str, float] = {}
    for run in found.after:
        for name, share in run["slowest"].items():
            shares[name] = shares.get(name, 0.0) + share / len(found.after)
    if shares:
        most = sorted(shares.items(), key=lambda pair: -pair[1])[:3]
        yield f"Most of its time is {', '.join(f'{name} ({share:.0%})' for name, share in most)}."
    for each in [each for each in found.left if each.high > 1.0][:3]:
        yield f"Not tried: `{each.change.typed}`, predicted {each}."
    yield "Weights, hardware and parallel sizes are not tried: `headway plan levers` ranks them."


def _loss(runs: list[dict[str, Any]]) -> float:
    return fmean(run["loss"] for run in runs)


def _met(runs: list[dict[str, Any]]) -> str:
    return f"{fmean(run['attainment'] for run in runs):.1%}"


def _percentiles(runs: list[dict[str, Any]], name: str) -> str:
    values = [[run["percentiles_ms"][name][place] for run in runs] for place in range(3)]
    return ", ".join(number(fmean(each)) for each in values)
