"""What a tenant feels of another that sends 20 times as much, with and without turns between them.

    python -m benchmarks.fairness --vllm /path/to/vllm-venv/bin/vllm

A quiet tenant sends chat requests at random times, first alone and then beside a flood of the same requests from
another tenant: to servers with tenants of equal weight under the policies `slo` and `fcfs`, to one with `fcfs` and no
tenants, and to vLLM. The figures are those of the quiet tenant's requests, and what turns cost: tokens/s of all. See
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.machine import RESULTS, keep
from benchmarks.overload import put
from benchmarks.servers import CHECKPOINTS, Server, Settings, running
from benchmarks.weights import write_weights
from headway.config_files.tenants import key_digest
from headway.load.record import RequestRecord, RunResult

TENANTS = ("quiet", "flood")
# Each with its policy, and whether tenants take turns.
CONTESTANTS = {"slo, turns": ("slo", True), "fcfs, turns": ("fcfs", True), "fcfs": ("fcfs", False)}
SERVER_METRICS = ("lead", "bound")
TTFT_MS = 1000
CLASSES = f'[[class]]\nname = "chat"\nttft_ms = {TTFT_MS}\ntpot_ms = 100\n'


@dataclass(frozen=True)
class Figures:
    """Figures of one run. Times are milliseconds, of the quiet tenant's requests.

    Args:
        tokens_per_s: prompt and output tokens of all tenants.
        in_time: share of its requests whose first token came within TTFT_MS.
        lead, bound: fairness_lead_tokens and fairness_bound_tokens since the server's start; 0 of another server.
    """

    policy: str
    flooded: bool
    requests: int
    failed: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    in_time: float
    e2e_p99_ms: float
    tokens_per_s: float
    lead: float
    bound: float


def tenant(name: str) -> str:
    """One of the file of tenants, whose key is its name."""
    digest = key_digest(name.encode()).hex()
    return f'[[tenant]]\nname = "{name}"\n[[key]]\ntenant = "{name}"\nsha256 = "{digest}"\n'


def mix(rate: float, times: float) -> str:
    """A workload of both tenants, or of the quiet one alone where `times` is 0."""
    rates = {"quiet": rate, "flood": rate * times}
    return "\n".join(
        f"""[[class]]
name = "{name}"
request_rate = {rates[name]}
headers = {{ Authorization = "Bearer {name}" }}
input_len = "lognormal:mean=400,cv=0.8,min=16,max=2000"
output_len = "lognormal:mean=32,cv=0.6,min=4,max=100"
{"cancel_share = 1" if name == "flood" else ""}
{"cancel_after_s = 15" if name == "flood" else ""}
"""
        for name in TENANTS
        if rates[name]
    )


def figures(policy: str, server: Server, run: RunResult, flooded: bool) -> Figures:
    def is_quiet(record: RequestRecord) -> bool:
        return record.class_name in ("", "quiet")

    mine = [record for record in run.records if is_quiet(record)]
    done = [record for record in mine if record.ok]
    ttft = [(record.chunk_ns[0] - record.scheduled_ns) / 1e6 for record in done]
    e2e = [(record.end_ns - record.scheduled_ns) / 1e6 for record in done]
    tokens = sum((record.prompt_tokens or 0) + (record.output_tokens or 0) for record in run.records if record.ok)
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    told = dict(line.rsplit(" ", 1) for line in lines if line.startswith("headway:fairness_"))
    lead, bound = (
        sum(float(value) for name, value in told.items() if name.startswith(f"headway:fairness_{each}_tokens"))
        for each in SERVER_METRICS
    )
    return Figures(
        policy=policy,
        flooded=flooded,
        requests=len(mine),
        failed=len(mine) - len(done),
        ttft_p50_ms=float(np.percentile(ttft, 50)),
        ttft_p99_ms=float(np.percentile(ttft, 99)),
        in_time=sum(each <= TTFT_MS for each in ttft) / len(mine),
        e2e_p99_ms=float(np.percentile(e2e, 99)),
        tokens_per_s=tokens / run.duration_s,
        lead=lead,
        bound=bound,
    )


@contextmanager
def started(arguments: argparse.Namespace, folder: Path) -> Iterator[list[Server]]:
    """All contestants, started and paused."""
    (folder / "classes.toml").write_text(CLASSES)
    (folder / "tenants.toml").write_text("".join(map(tenant, TENANTS)))
    settings = Settings(arguments.shape, os.cpu_count() or 1, arguments.context, arguments.streams)
    seats = ["--max-num-seqs", str(arguments.streams)]
    servers: list[Server] = []
    with ExitStack() as stack:
        for name, (policy, turns) in CONTESTANTS.items():
            flags = [*seats, "--scheduling-policy", policy, "--service-classes", str(folder / "classes.toml")]
            flags += ["--max-num-queued-reqs", "none", "--max-num-queued-tokens", "none"]
            flags += ["--tenants", str(folder / "tenants.toml"), "--quota-journal", "none"] if turns else []
            servers.append(stack.enter_context(running(name, sys.executable, settings, "headway", flags)))
        if arguments.vllm:
            servers.append(stack.enter_context(running("vllm", arguments.vllm, settings, "vllm", seats)))
        yield servers


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    write_weights(arguments.shape, CHECKPOINTS)
    found: list[Figures] = []
    with tempfile.TemporaryDirectory(prefix="fairness-") as name, started(arguments, folder := Path(name)) as servers:
        for seed in range(1, arguments.rounds + 1):
            for server in servers:
                for times in (0.0, arguments.times):
                    (folder / "mix.toml").write_text(mix(arguments.rate, times))
                    command = ["--mix", str(folder / "mix.toml"), "--api-key", TENANTS[0]]
                    with server.awake():
                        ran = put(server, command, arguments.shape, arguments.seconds, seed)
                        found.append(figures(server.name, server, ran, times > 0))
                    print(found[-1], file=sys.stderr)
            servers = [*servers[1:], *servers[:1]]  # nobody always comes first
    return {
        "runs": [asdict(each) for each in found],
    }


def table(content: dict[str, Any]) -> str:
    """Markdown, a row for each contestant alone and one beside the flood: medians of the rounds."""
    heads = {
        "ttft_p50_ms": "TTFT P50, ms",
        "ttft_p99_ms": "TTFT P99, ms",
        "in_time": "in time, %",
        "e2e_p99_ms": "E2EL P99, ms",
        "failed": "failed",
        "tokens_per_s": "tokens/s of all",
        "lead": "lead, tokens",
        "bound": "bound, tokens",
    }
    lines = [f"| | | {' | '.join(heads.values())} | P99 to alone |", "|---|---" + "|---:" * (len(heads) + 1) + "|"]
    for name in dict.fromkeys(row["policy"] for row in content["runs"]):
        alone, beside = (
            [row for row in content["runs"] if (row["policy"], row["flooded"]) == (name, flooded)]
            for flooded in (False, True)
        )
        ratios = sorted(b["ttft_p99_ms"] / a["ttft_p99_ms"] for a, b in zip(alone, beside, strict=True))
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}..{ratios[-1]:.2f})"
        for rows, label, ratio in ((alone, "alone", ""), (beside, "beside the flood", spread)):
            values = {key: statistics.median(row[key] for row in rows) for key in heads}
            values["in_time"] *= 100
            lines.append(f"| {name} | {label} | {' | '.join(f'{each:,.0f}' for each in values.values())} | {ratio} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fairness", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm", metavar="PROGRAM", help="vllm of its environment, as a contestant")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rate", type=float, default=3.0, help="requests/s of the quiet tenant")
    parser.add_argument("--times", type=float, default=20, help="how many times as much the other one sends")
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--shape", default="qwen2-30m")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--output", type=Path, default=RESULTS / "fairness.json")
    keep(parser.parse_args(argv), run, table)


if __name__ == "__main__":
    main()
