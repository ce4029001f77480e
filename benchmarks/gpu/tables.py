"""What `make gpu` prints: a table for each part, predictions beside what was measured, and all that failed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import SHAPES
from benchmarks.gpu.record import Record
from headway.calibration.store import CalibratedMachine
from headway.cost.attention import Chunk
from headway.cost.config import read_shape
from headway.cost.precision import Precision
from headway.cost.timing import Deployment

Cells = Sequence[str]
_NAMED = 3  # tasks that are left out for one reason


def heading(found: dict[str, Any], commit: str) -> str:
    """One line of GPU, versions and commit."""
    gpus = found["gpus"]
    gpu = f"{gpus[0]['name']} (compute capability {gpus[0]['capability']})" if gpus else "no GPU"
    versions = f"driver {found['driver']}, torch {found['torch'].get('version')}, Triton {found['triton']}"
    return f"{gpu}, {versions}, Python {found['python']['version']}, commit {commit}"


def report(record: Record, names: Sequence[str], log: Path) -> str:
    """Tables of the parts, then what was left out, left over, and failed."""
    blocks = [block for name in names if name in TABLES and (block := _table(record, name))]
    left_out = [line for name, part in _parts(record, names) for line in _left_out(name, part)]
    left = [f"{name}: {', '.join(part['left']) or 'all'}" for name, part in _parts(record, names) if part["cut"]]
    if left_out:
        blocks.append("Left out:\n" + "\n".join(f"  {line}" for line in left_out))
    if left:
        blocks.append("Left for want of time; the same command goes on with it:\n" + "\n".join(f"  {x}" for x in left))
    blocks += [failures(record, names), f"Results: {record.path}\nFull output: {log}"]
    return "\n" + "\n\n".join(blocks)


def _table(record: Record, name: str) -> str:
    """One that cannot be made, as rows of an earlier call may be others, takes no other one along."""
    try:
        return TABLES[name](record)
    except (KeyError, TypeError, ValueError) as error:
        return f"{name}: what it measured is in the results, but makes no table ({error!r}); run it with --again"


def _left_out(name: str, part: dict[str, Any]) -> list[str]:
    """A line for each reason, with the tasks that it is the reason of."""
    reasons: dict[str, list[str]] = {}
    for task, about in part["tasks"].items():
        if "skipped" in about:
            reasons.setdefault(about["skipped"], []).append(task)
    lines = [f"{name}: there is no {', '.join(part['missing'])}"] if part["missing"] else []
    for reason, tasks in reasons.items():
        more = f" and {len(tasks) - _NAMED} more" if len(tasks) > _NAMED else ""
        lines.append(f"{name}: {', '.join(tasks[:_NAMED])}{more}: {reason}")
    return lines


def failures(record: Record, names: Sequence[str]) -> str:
    """All failures, each with the first lines of its error."""
    found = [
        f"{name}: {task}\n" + "\n".join(f"    {line}" for line in about["error"].splitlines())
        for name, part in _parts(record, names)
        for task, about in part["tasks"].items()
        if "error" in about
    ]
    return "\n".join([f"FAILED: {len(found)}", *found]) if found else "Nothing failed."


def _parts(record: Record, names: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, record.parts[name]) for name in names if name in record.parts]


def columns(title: str, header: Cells, rows: Sequence[Cells]) -> str:
    """Format rows in columns, with numbers to the right; "" without rows."""
    if not rows:
        return ""
    widths = [max(len(row[at]) for row in (header, *rows)) for at in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (header, *rows)
    ]
    return "\n".join([title, *(f"  {line.rstrip()}" for line in lines)])


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def limits(record: Record) -> str:
    units = {"B/s": (1e9, "GB/s"), "FLOP/s": (1e12, "TFLOP/s"), "1/s": (1e3, "thousand/s")}
    rows = []
    for row in record.rows("limits"):
        scale, unit = units[row["unit"]]
        rows.append((row["name"], f"{row['rate'] / scale:,.1f}", f"{row['median'] / scale:,.1f}", unit))
    return columns("Limits", ("", "best", "median", ""), rows)


def compiled(record: Record) -> str:
    """A table of the most that any shape of a kernel takes, because there are dozens of shapes."""
    most: dict[str, dict[str, int]] = {}
    names = ("registers", "spilled_bytes", "shared_bytes")
    for row in record.rows("compiled"):
        known = most.setdefault(row["kernel"], dict.fromkeys(names, 0) | {"variants": 0})
        known["variants"] += 1
        for name in names:
            known[name] = max(known[name], row[name])
    rows = [(kernel, *(f"{known[name]:,}" for name in ("variants", *names))) for kernel, known in most.items()]
    return columns(
        "Kernels as compiled, the most of all variants", ("", "variants", "registers", "spilled B", "shared B"), rows
    )


def tests(name: str) -> Callable[[Record], str]:
    def table(record: Record) -> str:
        tasks = record.parts.get(name, {}).get("tasks", {})
        failed = sum("error" in task for task in tasks.values())
        skipped = sum("skipped" in task for task in tasks.values())
        passed = len(tasks) - failed - skipped
        return f"{name.capitalize()}: {passed} passed, {failed} failed, {skipped} skipped" if tasks else ""

    return table


def agreement(record: Record) -> str:
    rows = []
    for row in record.rows("agreement"):
        if "how" in row:
            rows.append((f"{row['task']}, {row['how']}", f"{row['same']} of {row['of']} the same"))
        else:
            beside = f"; torch in that type {row['of_torch']:.2g}" if "of_torch" in row else f", {row['tokens']} tokens"
            rows.append((row["task"], f"{row['rms_error']:.2g} off{beside}"))
    return columns("Agreement with plain torch in float32, and alone with in company", ("", ""), rows)


def kernels(record: Record) -> str:
    rows = []
    for row in record.rows("kernels"):
        launch = row["launch"] or {}
        resources = (str(launch.get("registers", "")), str(launch.get("shared_bytes", "")))
        rates = (f"{row['bytes_per_s'] / 1e9:,.0f}", f"{row['flops_per_s'] / 1e12:,.1f}")
        share = f"{percent(row['share'])} of {row['of']}" if row["of"] else ""
        rows.append((f"{row['task']}: {row['kernel']}", f"{row['us']:,.1f}", *rates, share, *resources))
    return columns("Kernels", ("", "us", "GB/s", "TFLOP/s", "share", "registers", "shared B"), rows)


def steps(record: Record) -> str:
    """Measured beside the limits, and beside what the cost model predicts from the calibration."""
    machine = _calibrated(record)
    rows, gaps = [], []
    for row in record.rows("steps"):
        if "gap" in row:
            times = (f"{row['seconds'] * 1e3:,.2f}", f"{row['busy'] * 1e3:,.2f}")
            gaps.append((row["task"], *times, percent(row["gap"]), f"{row['launches']:,.0f}"))
        elif "share" in row:
            predicted = _predicted(machine, row)
            share = f"{percent(row['share'])} of {row['of']}" if row["share"] is not None else ""
            ahead = (
                ("", "") if predicted is None else (f"{predicted * 1e3:,.2f}", f"{predicted / row['seconds'] - 1:+.0%}")
            )
            rows.append((row["task"], f"{row['seconds'] * 1e3:,.2f}", share, *ahead))
    found = [columns("Steps of the engine", ("", "ms", "share", "predicted ms", "error"), rows)]
    found.append(columns("Where a step's time is", ("", "ms", "kernels ms", "host's gap", "launches"), gaps))
    return "\n\n".join(filter(None, found))


def _calibrated(record: Record) -> CalibratedMachine | None:
    rows = record.rows("calibration")
    return CalibratedMachine.from_json(json.dumps(rows[-1]["machine"])) if rows else None


def _predicted(machine: CalibratedMachine | None, row: dict[str, Any]) -> float | None:
    """The predicted seconds of the step."""
    if machine is None:
        return None
    shape = read_shape(SHAPES[row["model"]], row["model"])
    deployment = Deployment(shape, Precision.of("bfloat16"), machine.hardware, machine.efficiency)
    return deployment.step([Chunk(row["tokens"], row["context"], 1, row["batch"])]).seconds


def calibration(record: Record) -> str:
    rows = [(kind, f"{error:.0%}") for row in record.rows("calibration") for kind, error in row["fit_error"].items()]
    return columns("Calibration: median error of the fit on what it was made from", ("", "error"), rows)


def served(record: Record) -> str:
    names = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_itl_ms", "failed")
    rows = [
        (row["load"], *("" if row[name] is None else f"{row[name]:,.1f}" for name in names))
        for row in record.rows("served")
        if "load" in row
    ]
    header = ("", "tokens/s", "TTFT ms", "TTFT P99", "TPOT ms", "ITL P99", "failed")
    return columns("Served, 512 tokens in and 128 out", header, rows)


def experiment(record: Record) -> str:
    """Loading by stage; then each length of prompt in each stage, with memory and what could be won most."""
    loading, rows = [], []
    for row in record.rows("experiment"):
        for stage, seconds in [*row["loading_s"].items(), ("ready", row["ready_s"])]:
            loading.append((row["model"], stage.replace("_", " "), f"{seconds:,.2f}"))
        for each in row["lengths"]:
            stages = each["stages_ms"]
            times = [
                f"{stages[name]:,.2f}" if name in stages else "" for name in ("input", "prefill", "decode", "output")
            ]
            step = "" if each["decode_step_ms"] is None else f"{each['decode_step_ms']:,.2f}"
            memory = f"{sum(each['memory'].values()) / 1e9:,.2f}"
            first = each["opportunities"][0] if each["opportunities"] else None
            win = f"{first['stage']} {first['winnable_ms']:,.1f} ms" if first else ""
            rows.append((f"{row['model']}, {each['prompt']}", *times, step, memory, win))
    header = (
        "prompt tokens",
        "input ms",
        "prefill ms",
        "decode ms",
        "output ms",
        "a step ms",
        "memory GB",
        "most to win",
    )
    found = [columns("Loading, seconds (random weights)", ("", "stage", "s"), loading)]
    found.append(columns("Stages of a request, 32 tokens out", header, rows))
    return "\n\n".join(filter(None, found))


TABLES: dict[str, Callable[[Record], str]] = {
    "limits": limits,
    "compiled": compiled,
    "tests": tests("tests"),
    "parity": tests("parity"),
    "agreement": agreement,
    "kernels": kernels,
    "steps": steps,
    "calibration": calibration,
    "served": served,
    "experiment": experiment,
}
