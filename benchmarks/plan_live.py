"""Whether the cost model predicts this engine on this machine: predicted beside measured step times.

    make bench-plan_live [ARGS="--rounds 1"]

In every round it calibrates the machine as `headway calibrate` does, then times steps of the real engine in this
process (live_engine.py): decodes over batches and contexts, and prompts, with models of random weights.

Shared machines are fast one minute and slow the next. So a point is held against the calibration of its own round,
minutes away, and its error is the median over the rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.checkpoint import SHAPES
from benchmarks.live_engine import BLOCK, DTYPE, LiveEngine
from headway.calibration.calibrate import calibrate
from headway.calibration.store import CalibratedMachine, StoreError, load
from headway.cost.attention import Chunk
from headway.cost.config import read_shape
from headway.cost.precision import Precision
from headway.cost.timing import Deployment

HERE = Path(__file__).parent
OUTPUT = HERE / "results" / "plan_live.json"
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (64, 256, 1024, 4096)
PROMPTS = (64, 128, 256, 512, 1024, 2048)
# A shape that no figure of the calibration has to do with: narrow, with a group of three heads to a key.
LLAMA_160M = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": DTYPE,
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2688,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, object]] = {"qwen2.5-0.5b": SHAPES["qwen2.5-0.5b"], "llama-160m": LLAMA_160M}


@dataclass(frozen=True, slots=True)
class Point:
    """Steps that are alike: `batch` sequences with `tokens` new tokens each after about `context` others."""

    model: str
    tokens: int
    context: int
    batch: int

    @property
    def phase(self) -> str:
        return "decode" if self.tokens == 1 else "prefill"

    @property
    def label(self) -> str:
        return f"{self.batch} x {self.context}" if self.tokens == 1 else f"{self.tokens}"


@dataclass(frozen=True, slots=True)
class Visit:
    """A point in one round.

    Args:
        seconds: median of its steps.
        predicted: for the step in their middle, from the calibration of this round.
    """

    seconds: float
    predicted: float


@dataclass(slots=True)
class Compared:
    """A point over all rounds; errors are predicted / measured - 1."""

    point: Point
    visits: list[Visit] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(each.seconds for each in self.visits)

    @property
    def spread(self) -> tuple[float, float]:
        """The least and the most seconds of the visits."""
        return min(each.seconds for each in self.visits), max(each.seconds for each in self.visits)

    @property
    def predicted(self) -> float:
        return statistics.median(each.predicted for each in self.visits)

    @property
    def error(self) -> float:
        """The median error over the rounds."""
        return statistics.median(each.predicted / each.seconds for each in self.visits) - 1.0


def points(model: str, batches: Sequence[int], contexts: Sequence[int], prompts: Sequence[int]) -> list[Point]:
    """The grid of decodes, and prompts alone, in the order in which they are measured."""
    decodes = [Point(model, 1, context, batch) for context in contexts for batch in batches]
    return decodes + [Point(model, tokens, 0, 1) for tokens in prompts]


def visit(engine: LiveEngine, point: Point, deployment: Deployment, budget_s: float) -> Visit:
    """Measure steps of the point."""
    context = 0
    if point.tokens == 1:
        seconds, context = engine.decode(point.context, point.batch, budget_s)
    else:
        seconds = engine.prefill(point.tokens, budget_s)
    predicted = deployment.step([Chunk(point.tokens, context, 1, point.batch)]).seconds
    return Visit(statistics.median(seconds), predicted)


def measure(arguments: argparse.Namespace, console: Console) -> tuple[list[CalibratedMachine], list[Compared]]:
    """Every round's calibration, and all points of all models, once in each round."""
    engines = {}
    for model in arguments.models:
        console.print(f"building {model}", highlight=False)
        most = (max(arguments.batches), max(arguments.contexts), max(arguments.prompts))
        engines[model] = LiveEngine(MODELS[model], *most, arguments.threads)
    grid = [
        Compared(point)
        for model in arguments.models
        for point in points(model, arguments.batches, arguments.contexts, arguments.prompts)
    ]
    machines = []
    gc.collect()
    gc.disable()
    for number in range(1, arguments.rounds + 1):
        machine = load(arguments.entry) if arguments.entry else calibrated(arguments, console)
        machines.append(machine)
        for each in track(grid, f"round {number}", console=console, transient=True):
            point = each.point
            shape = read_shape(MODELS[point.model], point.model)
            deployment = Deployment(shape, Precision.of(DTYPE), machine.hardware, machine.efficiency)
            each.visits.append(visit(engines[point.model], point, deployment, arguments.point_seconds))
    gc.enable()
    return machines, grid


def summary(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """Points, the median and the largest |error|, and the median error, for each model and phase."""
    groups: dict[tuple[str, str], list[Compared]] = {}
    for each in compared:
        groups.setdefault((each.point.model, each.point.phase), []).append(each)
    return [
        {
            "model": model,
            "phase": phase,
            "points": len(group),
            "median_error": statistics.median(abs(each.error) for each in group),
            "worst_error": max(abs(each.error) for each in group),
            "bias": statistics.median(each.error for each in group),
        }
        for (model, phase), group in groups.items()
    ]


def result(
    machines: Sequence[CalibratedMachine], compared: Sequence[Compared], settings: dict[str, Any]
) -> dict[str, Any]:
    """The calibrations, the summary and every visit, for the results folder."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "name": machines[0].hardware.name,
            "threads": machines[0].threads,
            "versions": machines[0].versions,
        },
        "calibrations": [
            {
                "date": each.date,
                "busy": each.busy,
                "bytes_per_s": each.hardware.bytes_per_s,
                "flops_per_s": each.hardware.flops_per_s,
                "efficiency": asdict(each.efficiency),
                "fit_error": each.fit_error,
            }
            for each in machines
        ],
        "settings": settings,
        "summary": summary(compared),
        "points": [
            {
                **asdict(each.point),
                "measured_ms": each.median * 1e3,
                "predicted_ms": each.predicted * 1e3,
                "error": each.error,
                "visits": [asdict(one) for one in each.visits],
            }
            for each in compared
        ],
    }


def print_points(console: Console, compared: Sequence[Compared]) -> None:
    """A line for each point."""
    for model in dict.fromkeys(each.point.model for each in compared):
        table = Table("", "point", "measured ms", "least .. most", "predicted ms", "error")
        for each in compared:
            if each.point.model != model:
                continue
            low, high = (1e3 * value for value in each.spread)
            table.add_row(
                each.point.phase,
                each.point.label,
                f"{each.median * 1e3:.1f}",
                f"{low:.1f} .. {high:.1f}",
                f"{each.predicted * 1e3:.1f}",
                f"{each.error:+.0%}",
            )
        table.title = f"{model}: decodes are batch x context, prefills tokens"
        console.print(table)


def print_summary(console: Console, compared: Sequence[Compared]) -> None:
    """A line for each model and phase."""
    table = Table("model", "phase", "points", "median |error|", "most", "bias")
    for row in summary(compared):
        shown = (f"{row['median_error']:.1%}", f"{row['worst_error']:.1%}", f"{row['bias']:+.1%}")
        table.add_row(row["model"], row["phase"], str(row["points"]), *shown)
    console.print(table)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-plan_live", description=__doc__.splitlines()[0])
    parser.add_argument("--entry", type=Path, help="an entry as calibrate --output writes; default: each round's own")
    parser.add_argument("--effort", choices=("quick", "default", "full"), default="default", help="of the calibration")
    parser.add_argument("--threads", type=int, default=None, help="of calibration and engine; default: one a core")
    parser.add_argument("--models", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS), help=f"multiples of {BLOCK}")
    parser.add_argument("--prompts", type=int, nargs="+", default=list(PROMPTS), help="tokens of prefill steps")
    parser.add_argument("--rounds", type=int, default=3, help="calibrations, and visits of each point")
    parser.add_argument("--point-seconds", type=float, default=0.6, help="of each visit, about")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args(argv)
    for name in ("batches", "contexts", "prompts", "rounds"):
        value = getattr(arguments, name)
        if min(value if isinstance(value, list) else [value]) < 1:
            parser.error(f"--{name} is {value}; it must be at least 1")
    if min(arguments.prompts) < 2:
        parser.error(f"--prompts is {arguments.prompts}; a prompt of one token is a decode, so at least 2")
    if any(context % BLOCK for context in arguments.contexts):
        parser.error(f"--contexts is {arguments.contexts}; contexts are whole blocks of {BLOCK} tokens")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints and saves."""
    arguments = parse(argv)
    console = Console()
    began = time.monotonic()
    try:
        machines, compared = measure(arguments, console)
    except StoreError as error:
        raise SystemExit(f"plan_live: {error}") from None
    print_points(console, compared)
    print_summary(console, compared)
    for busy in dict.fromkeys(each.busy for each in machines if each.busy):
        console.print(f"At a calibration {busy}.", highlight=False)
    settings = {name: value for name, value in vars(arguments).items() if name not in ("output", "entry")}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result(machines, compared, settings), indent=1) + "\n")
    console.print(f"{time.monotonic() - began:.0f} s; wrote {arguments.output}", highlight=False, soft_wrap=True)


def calibrated(arguments: argparse.Namespace, console: Console) -> CalibratedMachine:
    """Calibrate like `headway calibrate`, but in this process."""
    with console.status("calibrating") as status:
        return calibrate(
            None, "cpu", arguments.threads, arguments.effort, lambda stage, done: status.update(f"{done:.0%} {stage}")
        )


if __name__ == "__main__":
    main()
