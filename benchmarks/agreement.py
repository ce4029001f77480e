"""Whether two load generators see the same: `headway bench` and `vllm bench serve` on one Headway server.

    python -m benchmarks.agreement --vllm /path/to/vllm-venv/bin/vllm

Both send the same Poisson load (rate, lengths, number of requests), one right after the other, seed by seed, and take
turns in going first. They draw arrivals and prompts each in its own way, so that two runs differ by chance even when
both clients are right: what is compared is the mean over the seeds, with its confidence. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import signal
import statistics
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import SHAPES, write_checkpoint
from benchmarks.clients import HEADWAY, Load, measure
from benchmarks.machine import about, own_file, save
from benchmarks.rounds import number, spread
from benchmarks.servers import CHECKPOINTS, MODEL, Settings, running, version

HERE = Path(__file__).parent

MEASURES = {
    "median_ttft_ms": "TTFT median, ms",
    "p99_ttft_ms": "TTFT P99, ms",
    "median_tpot_ms": "TPOT median, ms",
    "p99_tpot_ms": "TPOT P99, ms",
}
_CONFIDENCE = 0.95  # confidence in all intervals together
_WIDEST = 0.25  # an interval that reaches further than this share either way tells nothing


@dataclass(frozen=True)
class Agreement:
    """One measure, of two clients over the same seeds.

    Args:
        ours, theirs: of `headway bench` and of `vllm bench serve`, by seed.
        ratio: the medians over the seeds, ours by theirs.
        low, high: interval of the geometric mean of ours / theirs.
    """

    measure: str
    ours: list[float]
    theirs: list[float]
    ratio: float
    low: float
    high: float

    @property
    def reach(self) -> float:
        """How far the interval goes either way, as a share: smaller differences could not have been seen."""
        return math.sqrt(self.high / self.low) - 1

    @property
    def verdict(self) -> str:
        """Whether a difference shows over what two runs differ by chance."""
        if not self.low <= 1 <= self.high:
            return "differ"
        return "within noise" if self.reach <= _WIDEST else "too noisy to tell"


@functools.cache
def student_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t for 0.5 <= probability < 1, by bisection on the integral of its density."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)

    def below(t: float) -> float:  # with t = sqrt(freedom) tan(angle) the integrand is smooth on a bounded interval
        end, steps = math.atan(t / math.sqrt(freedom)), 400
        heights = [math.cos(end * step / steps) ** (freedom - 1) for step in range(steps + 1)]
        simpson = heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2])
        return 0.5 + scale * math.sqrt(freedom) * simpson * end / steps / 3

    low, high = 0.0, 1.0
    while below(high) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < probability else (low, middle)
    return high


def agreement(measure: str, ours: list[float], theirs: list[float], confidence: float) -> Agreement:
    """A paired t interval of the logarithm of the ratio; neighbours in time make a pair.

    Raises:
        ValueError: fewer than two pairs, or a value that is not positive.
    """
    if len(ours) < 2 or min(*ours, *theirs) <= 0:
        raise ValueError(f"{measure}: needs two pairs of positive values, has {ours} and {theirs}")
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    mean, error = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    reach = student_quantile(0.5 + confidence / 2, len(logs) - 1) * error
    ratio = statistics.median(ours) / statistics.median(theirs)
    return Agreement(measure, ours, theirs, ratio, math.exp(mean - reach), math.exp(mean + reach))


def judge(measured: dict[str, dict[str, list[float]]]) -> list[Agreement]:
    """Every measure, with intervals widened (Bonferroni) so that all hold together; `measured` is by client."""
    confidence = 1 - (1 - _CONFIDENCE) / len(MEASURES)
    return [agreement(key, measured["headway"][key], measured["vllm"][key], confidence) for key in MEASURES]


def table(rows: list[Agreement]) -> str:
    lines = [
        "| | headway bench | vllm bench serve | ratio of medians | by seed | interval of the mean | |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        clients = [spread(statistics.median(each), min(each), max(each)) for each in (row.ours, row.theirs)]
        pairs = [a / b for a, b in zip(row.ours, row.theirs, strict=True)]
        ratios = f"{row.ratio:.3f} | {min(pairs):.3f} .. {max(pairs):.3f} | {row.low:.3f} .. {row.high:.3f}"
        lines.append(f"| {MEASURES[row.measure]} | {' | '.join(clients)} | {ratios} | {row.verdict} |")
    return "\n".join(lines)


def verdict(rows: list[Agreement]) -> str:
    """Say in words what differs, and how large a difference would have been seen."""
    widest = max(rows, key=lambda row: row.reach)
    said = []
    for word, words in (("differ", "they differ in"), ("too noisy to tell", "there is too much noise to tell in")):
        if found := [_name(row) for row in rows if row.verdict == word]:
            said.append(f"{words} {', '.join(found)}")
    agreed = "; ".join(said) or "they agree within noise in all measures"
    return f"At {_CONFIDENCE:.0%} confidence {agreed}. The noise is largest in {_name(widest)}: +-{widest.reach:.1%}."


def _name(row: Agreement) -> str:
    return MEASURES[row.measure].partition(",")[0]


def run(arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Values by client and measure, one for each seed."""
    load = Load("Poisson", arguments.input_len, arguments.output_len, arguments.prompts, rate=arguments.rate, warmups=2)
    tokenizer = write_checkpoint(arguments.shape, CHECKPOINTS)
    settings = Settings(arguments.shape, arguments.threads, arguments.input_len + arguments.output_len + 64, 16)
    clients = {"headway": HEADWAY, "vllm": [arguments.vllm, "bench", "serve", "--disable-tqdm"]}
    measured: dict[str, dict[str, list[float]]] = {name: {key: [] for key in MEASURES} for name in clients}
    with running("headway", sys.executable, settings) as server, server.awake():
        opening = Load("opening", 32, 8, prompts=32, streams=16)
        for client in clients.values():  # nothing is at its speed from the start
            measure(client, server.url, MODEL, tokenizer, opening, seed=0)
        order = list(clients)
        for seed in range(1, arguments.seeds + 1):
            for name in order:
                result = measure(clients[name], server.url, MODEL, tokenizer, load, seed)
                found = _complete(name, result, load)
                for key, value in found.items():
                    measured[name][key].append(value)
                said = ", ".join(f"{MEASURES[key]} {number(value)}" for key, value in found.items())
                print(f"seed {seed}: {name}: {said}", file=sys.stderr)
            order.reverse()
    return measured


def _complete(client: str, result: dict[str, Any], load: Load) -> dict[str, float]:
    """The measures of a run without failures; anything less cannot be compared."""
    if result["completed"] != load.prompts:
        raise SystemExit(f"{client}: {result['completed']} of {load.prompts} requests were answered; nothing compared")
    found = {key: float(result[key]) for key in MEASURES}
    if min(found.values()) <= 0:
        raise SystemExit(f"{client}: {found}; a latency of 0 cannot be compared, as where answers come in one chunk")
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agreement", description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", required=True, metavar="PROGRAM", help="the vllm program in vLLM's environment")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--rate", type=float, default=1.5, help="requests/s")
    parser.add_argument("--prompts", type=int, default=192, help="requests of a run")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=6, help="pairs of runs, at least 4")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the server's computation")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "agreement.json")
    arguments = parser.parse_args(argv)
    if not os.access(arguments.vllm, os.X_OK) or Path(arguments.vllm).is_dir():
        parser.error(f"--vllm {arguments.vllm!r} is not a program; name bin/vllm of vLLM's environment")
    for name, least in (("prompts", 1), ("input_len", 1), ("output_len", 2), ("threads", 1), ("seeds", 4)):
        value = getattr(arguments, name)
        if value < least:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    if not arguments.rate > 0:
        parser.error(f"--rate is {arguments.rate:g}; it must be more than 0")
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is ended too
    measured = run(arguments)
    rows = judge(measured)
    content = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": about(),
        "settings": {k: v for k, v in vars(arguments).items() if k not in ("vllm", "output")},
        "clients": {"headway": version(sys.executable, "headway"), "vllm": version(arguments.vllm, "vllm")},
        "verdict": verdict(rows),
        "summary": [asdict(row) | {"verdict": row.verdict} for row in rows],
    }
    save(content, own_file(arguments.output))
    print(table(rows), verdict(rows), sep="\n\n")


if __name__ == "__main__":
    main()
