"""How a gateway's routing serves conversations on two small servers, and what the simulator says of the same runs.

    python -m benchmarks.routing [--rounds 6] [--requests 100] [--rate 0.8]

Two servers of one thread each are behind a gateway that is started anew for each run. In each round every routing gets
the same conversations at the same times, in other words, so that no prefix cache knows them from before.

Each run is also simulated: the same load, the same scorers, two such engines, whose steps take as long as those that
were recorded in the other runs of its round. So is what a request takes beside its engine. Nothing is learnt from the
run itself. The result goes to benchmarks/results/routing.json (--output).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.gateway import HEADWAY, Proxy, running
from benchmarks.machine import RESULTS, about, own_file, save
from benchmarks.servers import CHECKPOINTS, MODEL
from benchmarks.weights import write_weights
from headway.bench.client.load import LoadMode
from headway.bench.options import Target
from headway.bench.profile.local_server import LocalServer
from headway.bench.runs import Load
from headway.bench.session import Session
from headway.load.measures.latencies import Latencies
from headway.load.measures.slo import missed_objectives
from headway.load.record import RequestRecord, RunResult
from headway.load.workload.arrivals import Poisson
from headway.load.workload.lengths import parse_distribution
from headway.load.workload.spec import WorkloadSpec
from headway.simulator.engine import Host
from headway.simulator.recording import Recording, read_recordings
from headway.simulator.verify import Measured, measure, recorded_steps, simulated

SERVERS = 2
ROUTINGS = ("round-robin", "least-loaded", "prefix-hits,least-loaded", "slack=2,prefix-hits,least-loaded")
_TITLES = {"ttft_p50": "TTFT P50, ms", "ttft_p99": "TTFT P99, ms", "hits": "hit rate", "goodput": "goodput, requests/s"}


@dataclass(frozen=True)
class Run:
    """A load through a gateway, measured."""

    routing: str
    measured: Measured


def load_of(arguments: argparse.Namespace, seed: int, prompt_seed: int) -> Load:
    """The conversations of a round, whose words are those of `prompt_seed`."""
    spec = WorkloadSpec(
        dataset_name="multi_turn",
        multi_turn_turns=parse_distribution(arguments.turns),
        multi_turn_think_s=parse_distribution(arguments.think_s),
        input_len=parse_distribution(arguments.input_len),
        output_len=parse_distribution(arguments.output_len),
        num_prompts=arguments.requests,
        arrival=Poisson(arguments.rate),
        seed=seed,
        prompt_seed=prompt_seed,
    )
    return Load(spec, LoadMode.OPEN, None)


async def measured_runs(arguments: argparse.Namespace, folder: Path) -> list[list[Run]]:
    """The runs of each round. The servers write their steps into the folder."""
    model, classes = write_weights(arguments.shape, CHECKPOINTS), folder / "classes.toml"
    classes.write_text(f'[[class]]\nname = "chat"\nttft_ms = {arguments.ttft_ms}\ntpot_ms = {arguments.tpot_ms}\n')
    flags = [str(model), "--served-model-name", MODEL, "--threads", "1", "--service-classes", str(classes)]
    flags += ["--max-model-len", str(arguments.context), "--kv-cache-memory", arguments.kv_cache_memory]
    command = (*HEADWAY, f"--service-classes={classes}")
    async with contextlib.AsyncExitStack() as stack:
        backends = ""
        for number in range(SERVERS):
            server = LocalServer([*flags, "--record-steps", str(folder / f"{number}.jsonl")], 300.0)
            url = (await stack.enter_async_context(server)).startup.url
            backends += f'[[backend]]\nname = "{number}"\nurl = "{url}"\nkind = "headway"\n'
        rounds: list[list[Run]] = []
        for number in range(arguments.rounds + 1):
            first, runs = number % len(ROUTINGS), list[Run]()
            for at, routing in enumerate(ROUTINGS[first:] + ROUTINGS[:first]):
                load = load_of(arguments, number, 1000 * (number + 1) + at)
                if not number:  # a first look at all of it, which counts for nothing
                    load = replace(load, spec=replace(load.spec, num_prompts=20))
                with running(Proxy(f'routing = "{routing}"\n{backends}', command)) as (gateway, _):
                    target = Target(base_url=gateway, tokenizer=str(model))
                    session = await Session.open(target)
                    runs.append(Run(routing, await measure(session, load, asyncio.Event())))
            rounds.append(runs)
    return rounds[1:]


def predicted(run: Run, others: Sequence[Run], recordings: Sequence[Recording]) -> RunResult:
    """What the simulator says of a run, by the steps of others."""
    learning = [each.measured for each in others]
    steps = [step for each in recordings for step in recorded_steps(each, learning)]

    def said(of: Run, host: Host) -> RunResult:
        return simulated(recordings[0], steps, of.measured.load, host, replicas=SERVERS, routing=of.routing)

    late_ms = [_median_ttft(each.measured.result) - _median_ttft(said(each, Host())) for each in others]
    return said(run, Host(request_ns=max(0, round(statistics.fmean(late_ms) * 1e6))))


def _median_ttft(result: RunResult) -> float:
    return float(np.median(Latencies.of(result.records).ttft_ms))


def figures(results: Sequence[RunResult], objectives: dict[str, float]) -> dict[str, float]:
    """What came of all requests of some runs."""
    records: list[RequestRecord] = [record for each in results for record in each.records]
    numbered = [replace(record, index=at) for at, record in enumerate(records)]
    ttft_ms = Latencies.of(numbered).ttft("schedule")
    met = sum(not missed for missed in missed_objectives(numbered, {"": objectives}).values())
    answered = [record for record in records if record.ok]
    return {
        "ttft_p50": float(np.percentile(ttft_ms, 50)),
        "ttft_p99": float(np.percentile(ttft_ms, 99)),
        "hits": sum(each.cached_tokens or 0 for each in answered) / sum(each.prompt_tokens or 0 for each in answered),
        "goodput": met / sum(each.duration_s for each in results),
        "failed": float(len(records) - len(answered)),
    }


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Markdown: what was measured, and what was predicted of it."""
    lines = [f"| | {' | '.join(_TITLES.values())} |", "|---" + "|---:" * len(_TITLES) + "|"]
    for routing, by in found.items():
        cells = [f"{by['measured'][key]:.3g} ({by['predicted'][key]:.3g})" for key in _TITLES]
        lines.append(f"| `{routing}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def ratios(by_round: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    """Markdown: multiples of the first routing's figures in the same round; the median, the least and the most."""
    lines = [f"| of `{ROUTINGS[0]}` | {' | '.join(_TITLES.values())} |", "|---" + "|---:" * len(_TITLES) + "|"]
    first = by_round[ROUTINGS[0]]["measured"]
    for routing, by in by_round.items():
        cells = []
        for key in _TITLES:
            each = [one[key] / base[key] for one, base in zip(by["measured"], first, strict=True)]
            cells.append(f"{statistics.median(each):.2f} ({min(each):.2f}..{max(each):.2f})")
        lines.append(f"| `{routing}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=100, help="of each run")
    parser.add_argument("--rate", type=float, default=0.8, help="conversations per second")
    parser.add_argument("--turns", default="uniform:min=3,max=9")
    parser.add_argument("--think-s", default="exponential:mean=2")
    parser.add_argument("--input-len", default="uniform:min=150,max=600", help="new tokens of a turn")
    parser.add_argument("--output-len", default="uniform:min=10,max=60")
    parser.add_argument("--ttft-ms", type=float, default=300.0, help="the objective, which `slack` knows")
    parser.add_argument("--tpot-ms", type=float, default=100.0)
    parser.add_argument("--shape", default="qwen2-30m")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--kv-cache-memory", default="1G", help="of each server")
    parser.add_argument("--output", type=Path, default=RESULTS / "routing.json")
    arguments = parser.parse_args(argv)
    objectives = {"ttft": arguments.ttft_ms, "tpot": arguments.tpot_ms}
    with tempfile.TemporaryDirectory(prefix="routing-") as name:
        rounds = uvloop.run(measured_runs(arguments, Path(name)))
        recordings = [read_recordings(Path(name) / f"{number}.jsonl")[-1] for number in range(SERVERS)]
    results: dict[str, dict[str, list[RunResult]]] = {each: {"measured": [], "predicted": []} for each in ROUTINGS}
    for runs in rounds:
        for run in runs:
            results[run.routing]["measured"].append(run.measured.result)
            others = [each for each in runs if each is not run]
            results[run.routing]["predicted"].append(predicted(run, others, recordings))
    found = {
        routing: {by: figures(each, objectives) for by, each in of_routing.items()}
        for routing, of_routing in results.items()
    }
    by_round = {
        routing: {by: [figures([one], objectives) for one in each] for by, each in of_routing.items()}
        for routing, of_routing in results.items()
    }
    print(table(found), ratios(by_round), sep="\n\n")
    settings: dict[str, Any] = {key: value for key, value in vars(arguments).items() if key != "output"}
    save({"machine": about(), "settings": settings, "all": found, "rounds": by_round}, own_file(arguments.output))


if __name__ == "__main__":
    main()
