"""How near `headway simulate` comes to a live server of this machine, on several workloads.

    python -m benchmarks.verify --traces DIR

Each workload is one `headway simulate verify`: a server gets it with different seeds, and the simulator learns from
every other run and predicts the ones between. The table has predicted over measured, for latencies and throughput, then
the same where step times are learnt from the measured runs themselves. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS, heading, own_file, save
from benchmarks.processes import Died
from benchmarks.servers import CHECKPOINTS
from benchmarks.weights import write_weights

RANDOM = ["--input-len", "lognormal:mean=500,cv=0.8,min=16,max=3000", "--output-len", "lognormal:mean=60,cv=0.7,min=4"]
WORKLOADS = {
    "bursts": [*RANDOM, "--request-rate", "6", "--burstiness", "0.25"],
    "overload": [*RANDOM, "--request-rate", "40"],
}
# Workloads of traces, by the name of the file in --traces. Lengths are clipped to the context.
TRACES = {
    "azure_conv_2023.csv": ("azure conversations", ["--dataset-name", "azure", "--request-rate", "5"]),
    "mooncake_synthetic.jsonl": ("mooncake, shortened", ["--dataset-name", "mooncake", "--request-rate", "3"]),
}
CLIPPED = ["--max-input-len", "3000", "--max-output-len", "300"]
ROWS = [(metric, which) for metric in ("ttft_ms", "tpot_ms", "e2el_ms") for which in ("median", "p90", "p99")]


def workloads(traces: Path | None) -> dict[str, list[str]]:
    """The workloads by name: the flags that say what is sent."""
    if traces is None:
        return WORKLOADS
    found = {name: [*flags, "--dataset-path", str(traces / file), *CLIPPED] for file, (name, flags) in TRACES.items()}
    return found | WORKLOADS


def verify(flags: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """What one `headway simulate verify` found. Raises Died where it found nothing."""
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        output = Path(folder) / "found.json"
        command = [sys.executable, "-m", "headway", "simulate", "verify", str(CHECKPOINTS / arguments.shape)]
        command += ["--max-model-len", str(arguments.context), "--num-prompts", str(arguments.requests)]
        command += ["--rounds", str(arguments.rounds), "--scheduling-policy", arguments.policy, *flags]
        command += ["--output", str(output)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        print(done.stdout, file=sys.stderr)
        if not output.exists():
            raise Died(f"nothing was compared (exit code {done.returncode}):\n{done.stdout}\n{done.stderr}")
        found: dict[str, Any] = json.loads(output.read_text())
        return found


def table(content: dict[str, Any]) -> str:
    """Markdown: a row for each workload, ratios of predicted to measured; a dash where the sample is too small."""
    heads = [f"{metric.removesuffix('_ms').upper()} {which}" for metric, which in ROWS]
    heads += ["tokens/s", "machine"]
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    for name, found in content["workloads"].items():
        ratios = {(each["metric"], each["statistic"]): each["ratio"] for each in found["differences"]}
        measured, predicted = found["throughput"]
        shown = [_ratio(ratios.get(row)) for row in ROWS] + [_ratio(predicted / measured)]
        lines.append(f"| {name} | " + " | ".join([*shown, ", ".join(map(_ratio, found["slower"]))]) + " |")
        own = [_ratio(found["by_own_steps"].get(metric, {}).get(which)) for metric, which in ROWS]
        lines.append("| ... by own steps | " + " | ".join([*own, "", ""]) + " |")
    return "\n".join(lines)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verify", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=Path, help=f"folder of {' and '.join(TRACES)}")
    parser.add_argument("--requests", type=int, default=250, help="of each run")
    parser.add_argument("--rounds", type=int, default=3, help="measured runs")
    parser.add_argument("--policy", default="slo")
    parser.add_argument("--shape", default="qwen2-30m")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--output", type=Path, default=RESULTS / "verify.json")
    arguments = parser.parse_args(argv)
    for file in TRACES if arguments.traces else ():
        if not (arguments.traces / file).is_file():
            parser.error(f"--traces {arguments.traces} has no {file}")
    arguments.output = own_file(arguments.output)
    write_weights(arguments.shape, CHECKPOINTS)
    content = heading(arguments) | {"workloads": {}}
    for name, flags in workloads(arguments.traces).items():
        content["workloads"][name] = verify(flags, arguments)
        save(content, arguments.output)
    print(table(content))


if __name__ == "__main__":
    main()
