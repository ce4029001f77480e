"""What a tenant feels of another that sends 20 times as much, with and without turns between them.

    python -m benchmarks.fairness

A quiet tenant sends chat requests at random times, first alone and then beside a flood of the same requests from
another tenant. Servers are started one after the other: with tenants of equal weight under the policies `slo` and
`fcfs`, and `fcfs` without tenants. The figures are those of the quiet tenant's requests, and what turns cost: tokens/s
of all. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.machine import RESULTS, about, own_file, save
from benchmarks.overload import put
from benchmarks.servers import CHECKPOINTS, Server, Settings, running
from benchmarks.weights import write_weights
from headway.bench.record import RequestRecord, RunResult
from headway.tenant_file import key_digest

TENANTS = ("quiet", "flood")
CONTESTANTS = {"slo, turns": ("slo", True), "fcfs, turns": ("fcfs", True), "fcfs": ("fcfs", False)}
CLASSES = '[[class]]\nname = "chat"\nttft_ms = 1000\ntpot_ms = 100\n'


@dataclass(frozen=True)
class Figures:
    """Of one run. Times are milliseconds, of the quiet tenant's requests.

    Args:
        tokens_per_s: of all, prompts and outputs.
        lead, bound: the server's fairness_lead_tokens and fairness_bound_tokens at its end.
    """

    policy: str
    flooded: bool
    requests: int
    failed: int
    ttft_p50_ms: float
    ttft_p99_ms: float
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
    told = dict(line.rsplit(" ", 1) for line in httpx.get(f"{server.url}/metrics").text.splitlines() if line[:1] != "#")
    lead, bound = (
        next(float(value) for name, value in told.items() if name.startswith(f"headway:fairness_{each}_tokens"))
        for each in ("lead", "bound")
    )
    return Figures(
        policy=policy,
        flooded=flooded,
        requests=len(mine),
        failed=len(mine) - len(done),
        ttft_p50_ms=float(np.percentile(ttft, 50)),
        ttft_p99_ms=float(np.percentile(ttft, 99)),
        e2e_p99_ms=float(np.percentile(e2e, 99)),
        tokens_per_s=tokens / run.duration_s,
        lead=lead,
        bound=bound,
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    write_weights(arguments.shape, CHECKPOINTS)
    found: list[Figures] = []
    with tempfile.TemporaryDirectory(prefix="fairness-") as name:
        folder = Path(name)
        (folder / "classes.toml").write_text(CLASSES)
        (folder / "tenants.toml").write_text("".join(map(tenant, TENANTS)))
        settings = Settings(arguments.shape, os.cpu_count() or 1, arguments.context, arguments.streams)
        for contestant, (policy, turns) in CONTESTANTS.items():
            flags = ["--scheduling-policy", policy, "--service-classes", str(folder / "classes.toml")]
            flags += ["--max-num-seqs", str(arguments.streams), "--max-num-queued-reqs", "none"]
            flags += ["--max-num-queued-tokens", "none"]
            flags += ["--tenants", str(folder / "tenants.toml")] if turns else []
            with running("headway", sys.executable, settings, "headway", flags) as server, server.awake():
                for times in (0.0, arguments.times):
                    (folder / "mix.toml").write_text(mix(arguments.rate, times))
                    command = ["--mix", str(folder / "mix.toml"), "--api-key", TENANTS[0]]
                    ran = put(server, command, arguments.shape, arguments.seconds, seed=1)
                    found.append(figures(contestant, server, ran, times > 0))
                    print(found[-1], file=sys.stderr)
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": about(),
        "settings": {key: str(value) for key, value in vars(arguments).items() if key != "output"},
        "runs": [asdict(each) for each in found],
    }


def table(content: dict[str, Any]) -> str:
    """Markdown, a row for each run."""
    heads = {
        "ttft_p50_ms": "TTFT P50, ms",
        "ttft_p99_ms": "TTFT P99, ms",
        "e2e_p99_ms": "E2E P99, ms",
        "failed": "failed",
        "tokens_per_s": "tokens/s of all",
        "lead": "lead, tokens",
        "bound": "bound, tokens",
    }
    lines = [f"| | | {' | '.join(heads.values())} |", "|---|---" + "|---:" * len(heads) + "|"]
    for row in content["runs"]:
        beside = "beside the flood" if row["flooded"] else "alone"
        lines.append(f"| {row['policy']} | {beside} | {' | '.join(f'{row[key]:,.0f}' for key in heads)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fairness", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=3.0, help="requests/s of the quiet tenant")
    parser.add_argument("--times", type=float, default=20, help="how many times as much the other one sends")
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--shape", default="qwen2-30m")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--output", type=Path, default=RESULTS / "fairness.json")
    arguments = parser.parse_args(argv)
    arguments.output = own_file(arguments.output)
    content = run(arguments)
    save(content, arguments.output)
    print(table(content))


if __name__ == "__main__":
    main()
