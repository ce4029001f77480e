"""The cost model beside measurements that others published: how far off it is, and how often its error bars hold.

`--fit` fits the efficiencies to the sources that are marked for it and writes them, with error bars taken from sources
that each fit had not seen, to the table that `headway plan` uses.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table as RichTable

from benchmarks.published.fit import (
    WELL_MEASURED,
    Compared,
    Parameter,
    Table,
    compare,
    error_bar,
    fit_in_turn,
    leave_one_out,
    summary,
)
from benchmarks.published.predict import EfficiencyOf, planned_ttft_ms
from benchmarks.published.rows import Row, rows
from headway.cost import catalogue
from headway.cost.catalogue import find_hardware, find_model
from headway.planner.estimates import published_bars

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt-llm": "TensorRT-LLM"}
OUTPUT = Path(__file__).parent / "results" / "plan_accuracy.json"

# What is fitted, with what is believed before: libraries reach 60 to 80 % of the dense peak in products and 80 to 90 %
# of the bandwidth; kernels of a captured graph follow each other in 1 to 3 us; an API process sends 10,000 tokens/s;
# each kernel counted here is several operations of PyTorch to a host without graphs, which takes 10 us for one.
# What no row speaks of stays as it is believed: all rows of TensorRT-LLM that are fitted to are of the engine alone.
PARAMETERS = [
    Parameter("all", "matmul_flops.other", 0.65, 0.1),
    Parameter("all", "matmul_bytes", 0.85, 0.1, most=0.95),
    Parameter("all", "widen_ops.8", 8.0, 0.5),
    Parameter("all", "widen_ops.4", 12.0, 0.5),
    Parameter("all", "expert_flops", 0.6, 0.3, most=1.0),
    Parameter("all", "expert_bytes", 0.9, 0.2, most=1.3),
    Parameter("all", "attention_flops", 0.45, 0.3, most=0.8),
    Parameter("all", "kv_bytes", 0.7, 0.2, most=0.95),
    Parameter("all", "element_bytes", 0.6, 0.3, most=0.95),
    Parameter("all", "link", 0.6, 0.3, most=0.95),
    Parameter("all", "sharpness", 3.0, 0.4),
    Parameter("all", "kernel_s", 2e-6, 0.3),
    Parameter("architecture.ampere", "matmul_flops.bf16", 0.75, 0.1, most=0.95),
    Parameter("architecture.hopper", "matmul_flops.bf16", 0.65, 0.1, most=0.95),
    Parameter("architecture.hopper", "matmul_flops.fp8", 0.6, 0.15, most=0.95),
    Parameter("architecture.ada", "link", 0.4, 0.4, most=0.95),
    Parameter("architecture.ada", "matmul_flops.bf16", 0.7, 0.15, most=0.95),
    Parameter("architecture.ada", "matmul_flops.fp8", 0.6, 0.15, most=0.95),
    Parameter("architecture.blackwell", "link", 0.5, 0.3, most=0.95),
    Parameter("architecture.blackwell", "kernel_s", 3e-6, 0.3),
    Parameter("architecture.blackwell", "matmul_flops.bf16", 0.6, 0.15, most=0.95),
    Parameter("architecture.blackwell", "matmul_flops.fp8", 0.5, 0.15, most=0.95),
    Parameter("architecture.blackwell", "matmul_flops.mxfp4", 0.5, 0.3, most=0.95),
    Parameter("architecture.blackwell", "expert_bytes", 0.8, 0.3, most=1.3),
    Parameter("architecture.cdna3", "link", 0.5, 0.3, most=0.95),
    Parameter("architecture.cdna3", "expert_bytes", 0.7, 0.3, most=1.3),
    Parameter("architecture.cdna3", "matmul_flops.bf16", 0.5, 0.15, most=0.95),
    Parameter("architecture.cdna3", "matmul_flops.fp8", 0.4, 0.15, most=0.95),
    Parameter("architecture.cdna3", "matmul_bytes", 0.7, 0.2, most=0.95),
    Parameter("architecture.cdna3", "kernel_s", 5e-6, 0.3),
    Parameter("engine.vllm", "step_s", 1e-3, 0.5),
    Parameter("engine.vllm", "sequence_s", 1e-5, 0.5),
    Parameter("engine.vllm", "token_s", 3e-6, 0.5),
    Parameter("engine.vllm", "request_s", 1.2e-2, 0.5),
    Parameter("engine.vllm", "output_s", 1e-4, 0.5),
    Parameter("engine.tensorrt-llm", "step_s", 5e-4, 0.5),
    Parameter("engine.tensorrt-llm", "sequence_s", 5e-6, 0.5),
    Parameter("engine.tensorrt-llm", "token_s", 3e-6, 0.5),
    Parameter("engine.tensorrt-llm", "request_s", 1.2e-2, 0.5),
    Parameter("engine.tensorrt-llm", "output_s", 1e-4, 0.5),
    Parameter("engine.sglang", "step_s", 1e-3, 0.5),
    Parameter("engine.sglang", "sequence_s", 1e-5, 0.5),
    Parameter("engine.sglang", "launch_s", 5e-5, 0.5),
    Parameter("engine.sglang", "token_s", 3e-6, 0.5),
    Parameter("engine.sglang", "request_s", 1.2e-2, 0.5),
    Parameter("engine.sglang", "output_s", 1e-4, 0.5),
    Parameter("engine.vllm-v0", "step_s", 5e-3, 0.7),
    Parameter("engine.vllm-v0", "sequence_s", 3e-5, 0.7),
    Parameter("engine.vllm-v0", "request_s", 1e-2, 0.5),
    Parameter("engine.gpt-fast", "step_s", 2e-4, 0.5),
    Parameter("engine.gpt-fast", "request_s", 1e-3, 0.5),
]


def main() -> None:
    """Compares, and with `--fit` fits first."""
    parser = argparse.ArgumentParser(prog="make bench-plan_accuracy", description=__doc__)
    parser.add_argument("--fit", action="store_true", help="Fit, and write the table of efficiencies.")
    parser.add_argument("--rows", action="store_true", help="Print every row.")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="Every figure as JSON.")
    arguments = parser.parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=150)
    table = rows()
    if arguments.fit:
        refit(table, console)
        catalogue._efficiencies.cache_clear()
    compared = list(compare(track(table, "predicting", console=console, transient=True), catalogue.efficiency))
    if arguments.rows:
        print_rows(compared, console)
    print_sources(compared, console)
    print_engines(compared, console)
    loops = under_load(table)
    for kind, found in loops.items():
        console.print(
            f"TTFT of closed loops as planned, {kind}: {found['figures']} figures, "
            f"{found['inside_80_percent_bar']:.0%} inside the bar, median error {found['median_error']:.0%}"
        )
    written = result(compared) | {"ttft_under_load_as_planned": loops}
    arguments.output.write_text(json.dumps(written, indent=1) + "\n")


def refit(table: Sequence[Row], console: Console) -> None:
    """Fit to the rows marked for it, take error bars from what no fit had seen, and write both."""
    fitted = [row for row in table if row.source.use == "fit"]
    with console.status("fitting"):
        values = fit_in_turn(fitted, PARAMETERS)
    judged = [row for row in table if row.source.use == "test"]
    families = {row.source.family for row in fitted}
    held: list[Compared] = []
    left_out = leave_one_out(fitted, judged, PARAMETERS, values)
    for group in track(left_out, "leaving out each family in turn", len(families), console=console, transient=True):
        held += group
    found = Table(list(values), list(values.values()))
    held += compare([row for row in judged if row.source.family not in families], found.efficiency)
    path = catalogue.FOLDER / "efficiency.toml"
    bars = error_bars(held)
    arrivals = [row for row in table if row.load == "rate" and row.ttft_ms is not None]
    for name, rows_of_load in (
        ("ttft_arrivals", list(compare(arrivals, found.efficiency))),
        ("ttft_clients", planned_loops(judged, found.efficiency)),
    ):
        if rows_of_load:
            bars[name] = load_bar(rows_of_load, bars["ttft_elsewhere"])
    path.write_text(as_toml(found.sections, bars))
    console.print(f"wrote {path}")


def error_bars(held: Sequence[Compared]) -> dict[str, tuple[float, float]]:
    """Error bars of TTFT and TPOT on the best-measured architectures, and on others, where they are never narrower."""
    bars = {}
    for well, suffix in ((True, ""), (False, "_elsewhere")):
        here = [each for each in held if (find_hardware(each.row.hardware).architecture in WELL_MEASURED) == well]
        bars[f"ttft{suffix}"] = error_bar([each for each in here if each.metric == "ttft_ms"])
        bars[f"tpot{suffix}"] = error_bar([each.as_time for each in here if each.metric != "ttft_ms"])
    for metric in ("ttft", "tpot"):
        (low, high), (low_there, high_there) = bars[metric], bars[f"{metric}_elsewhere"]
        bars[f"{metric}_elsewhere"] = (min(low, low_there), max(high, high_there))
    return bars


def load_bar(compared: Sequence[Compared], elsewhere: tuple[float, float]) -> tuple[float, float]:
    """The error bar of TTFT under load. It is never narrower than `elsewhere`, because there are few such rows."""
    low, high = error_bar([each for each in compared if each.metric == "ttft_ms"])
    return min(low, elsewhere[0]), max(high, elsewhere[1])


def planned_loops(table: Sequence[Row], efficiency_of: EfficiencyOf) -> list[Compared]:
    """TTFT of several clients, measured and as planned."""
    loops = [row for row in table if row.load == "concurrency" and row.load_value > 1]
    return [Compared(row, "ttft_ms", row.ttft_ms, planned_ttft_ms(row, efficiency_of)) for row in loops if row.ttft_ms]


def as_toml(sections: dict[str, dict[str, Any]], bars: dict[str, tuple[float, float]]) -> str:
    """The table of efficiencies."""
    lines = [
        "# What serving programs reach of a data sheet, fitted to published measurements:",
        "# `make bench-plan_accuracy ARGS=--fit` writes this file. Fields are those of cost.efficiency.Efficiency.",
    ]
    for name in sorted(sections, key=lambda each: each.partition(".")[0]):  # engines in their order, the default first
        lines += ["", f"[{name}]"]
        for field, value in sections[name].items():
            entries = value if isinstance(value, dict) else None
            text = "{ " + ", ".join(f"{k} = {v:.4g}" for k, v in entries.items()) + " }" if entries else f"{value:.4g}"
            lines.append(f"{field} = {text}")
    lines += ["", "# Measured by predicted: four in five lie between. From sources that the fit had not seen."]
    lines += ["[uncertainty]"]
    lines.append("measured = [" + ", ".join(f'"{name}"' for name in WELL_MEASURED) + "]")
    for name, (low, high) in bars.items():
        lines.append(f"{name} = [{low:.3f}, {high:.3f}]")
    return "\n".join(lines) + "\n"


def print_rows(compared: Sequence[Compared], console: Console) -> None:
    """Print every figure."""
    shown = RichTable("source", "deployment", "figure", "measured", "predicted", "error")
    for each in compared:
        row = each.row
        numbers = (f"{each.measured:.4g}", f"{each.predicted:.4g}", f"{each.error:+.0%}")
        shown.add_row(f"{row.source.key} ({row.engine})", row.label, each.metric, *numbers)
    console.print(shown)


def print_sources(compared: Sequence[Compared], console: Console) -> None:
    """A line for each source and figure, and for all that were fitted to and all that were not."""
    shown = RichTable("source", "use", "figure", "n", "median |error|", "P90", "predicted/measured", "inside 80 % bar")
    for name, use, metric, group in groups(compared):
        found = summary(group)
        shown.add_row(
            name,
            use,
            metric,
            str(found["figures"]),
            f"{found['median_error']:.0%}",
            f"{found['p90_error']:.0%}",
            f"{found['median_ratio']:.2f}",
            f"{inside(group):.0%}",
        )
    console.print(shown)


def groups(compared: Sequence[Compared]) -> list[tuple[str, str, str, list[Compared]]]:
    """(source, use, metric, figures), and at the end all sources of each use together."""
    found: dict[tuple[str, str, str], list[Compared]] = {}
    for each in compared:
        source, metric = each.row.source, each.metric
        found.setdefault((source.key, source.use, metric), []).append(each)
        found.setdefault(("~all", source.use, metric), []).append(each)
    return [(name.replace("~", ""), use, metric, found[name, use, metric]) for name, use, metric in sorted(found)]


def inside(compared: Sequence[Compared]) -> float:
    """Share of the figures within the error bar that `headway plan` gives of such a load."""
    held = 0
    for each in compared:
        bars, row = published_bars(find_hardware(each.row.hardware)), each.row
        low, high = bars.of_ttft(row.load, row.load_value) if each.metric == "ttft_ms" else bars.tpot
        held += low <= math.exp(-each.as_time.log_ratio) <= high
    return held / len(compared)


def by_engine(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """Errors and bars by engine and kind of model, on rows that nothing is fitted to; TPOT is also that of rates."""
    found: dict[tuple[str, str, str, str], list[Compared]] = {}
    for each in compared:
        row = each.row
        if row.source.use == "fit":
            continue
        model = "MoE" if find_model(row.model).shape.experts else "dense"
        metric = "TTFT" if each.metric == "ttft_ms" else "TPOT"
        for engine in (ENGINES.get(row.engine, "other"), "all"):
            found.setdefault((row.source.use, engine, model, metric), []).append(each)
    return [
        {
            "use": use,
            "engine": engine,
            "model": model,
            "metric": metric,
            **summary([each.as_time for each in group]),
            "inside_80_percent_bar": inside(group),
        }
        for (use, engine, model, metric), group in sorted(found.items())
    ]


def print_engines(compared: Sequence[Compared], console: Console) -> None:
    """A line for each engine and kind of model, of figures that nothing is fitted to."""
    shown = RichTable(
        "use", "engine", "model", "figure", "n", "median |error|", "predicted/measured", "inside 80 % bar"
    )
    for each in by_engine(compared):
        shown.add_row(
            *(str(each[name]) for name in ("use", "engine", "model", "metric", "figures")),
            f"{each['median_error']:.0%}",
            f"{each['median_ratio']:.2f}",
            f"{each['inside_80_percent_bar']:.0%}",
        )
    console.print(shown)


def under_load(table: Sequence[Row]) -> dict[str, Any]:
    """How often TTFT of closed loops lies inside the bar of `headway plan`, and its error."""
    low, high = catalogue.uncertainty(find_hardware("H100-SXM"), "ttft_clients")
    held = planned_loops(table, catalogue.efficiency)
    kinds = {"all": held, "test": [each for each in held if each.row.source.use == "test"]}
    return {
        kind: {
            "figures": len(group),
            "inside_80_percent_bar": sum(low <= each.measured / each.predicted <= high for each in group) / len(group),
            "median_error": float(np.median([abs(each.error) for each in group])),
        }
        for kind, group in kinds.items()
        if group
    }


def result(compared: Sequence[Compared]) -> dict[str, Any]:
    """The summary and every figure, for the results folder."""
    return {
        "summary": [
            {"source": name, "use": use, "metric": metric, **summary(group), "inside_80_percent_bar": inside(group)}
            for name, use, metric, group in groups(compared)
        ],
        "by_engine": by_engine(compared),
        "figures": [
            {
                "source": each.row.source.key,
                "engine": each.row.engine,
                "deployment": each.row.label,
                "metric": each.metric,
                "measured": each.measured,
                "predicted": round(each.predicted, 4),
            }
            for each in compared
        ],
    }


if __name__ == "__main__":
    main()
