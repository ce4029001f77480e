"""`headway serve --auto-tune` over an hour, beside the same server with settings that stay: is it ever worse?

    python -m benchmarks.auto_tune [--cases chat-good ...] [--minutes 60] [--output FILE]

Nothing is live: the policy of a live server drives a simulated one on the virtual clock. Its steps take as long as the
cost model says of its hardware, off by a tenth here and there and with noise, and what it predicts by is learnt from
its own records. Both servers get the same requests. What counts is the loss of the whole hour, as in `headway tune`:
the mean logarithm by which the quarter of the requests that is furthest from its objectives misses them, where half of
an objective is as good as less. 0.02 is 2 % of a latency. The real traces are looked for in --traces; cases of a trace
that is not there are left out.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import RESULTS, heading, save
from benchmarks.regret import Jittered, _off
from benchmarks.tuned_server import TunedServer
from headway.advisor.online.traffic import GOOD_ENOUGH
from headway.advisor.online.tuner import S
from headway.advisor.tuning.race import FAILED, attainment, loss
from headway.policy.objectives.service_class import ClassTable, ServiceClass
from headway.policy.step.bounds import Bounds
from headway.policy.step.options import SchedulingOptions
from headway.simulator.answers import Answer
from headway.simulator.deployed import ServerOptions, deploy
from headway.simulator.server import NO_TIME, Server
from headway.simulator.timing import Predicted
from headway.simulator.traffic import Arrival, arrival, made_prompt

TRACES = Path("traces")
_GIVEN = frozenset({"max_num_seqs", "max_num_batched_tokens", "scheduling_policy", "max_prefill_stall_ms"})
BOUNDS = Bounds(max_num_seqs=(4, 256), max_num_batched_tokens=(256, 4096))
Asked = tuple[float, int, int, str, tuple[int, ...]]  # seconds, tokens of prompt and answer, class, shared blocks


@dataclass(frozen=True)
class Case:
    """A server with settings to begin with, under the requests of an hour.

    Args:
        trace: name of a function below.
        rate: how many times as many requests as in the trace come.
        shorter: how many times as short prompts and answers are.
        seqs, tokens: what it begins with; it has room for those of `bounds`.
        objectives: TTFT and TPOT of the class `chat`, in milliseconds.
    """

    trace: str
    model: str
    hardware: str
    devices: int
    objectives: tuple[float, float]
    seqs: int = 128
    tokens: int = 2048
    stall_ms: float = 50.0
    rate: float = 1.0
    shorter: int = 1
    window_ms: tuple[float, float] = (0.0, 5.0)
    batch_share: float = 0.0
    bounds: Bounds = BOUNDS


SMALL = "qwen2.5-7b", "L4", 1, (1200.0, 120.0)
LARGE = "llama-3.1-70b", "H100-SXM", 4, (1500.0, 60.0)
CASES = {
    "chat, good settings": Case("azure", *SMALL, rate=0.4, shorter=4),
    "chat, seats too few": Case("azure", *SMALL, rate=0.4, shorter=4, seqs=8),
    "chat, window of 500 ms": Case("azure", *SMALL, rate=0.4, shorter=4, window_ms=(500.0, 500.0)),
    "chat, short steps": Case("azure", *SMALL, rate=0.4, shorter=4, tokens=256, stall_ms=10.0),
    "chat, more than it can serve": Case("azure", *SMALL, rate=0.8, shorter=4),
    "conversations, good settings": Case("mooncake", *LARGE, rate=0.1),
    "conversations, seats too few": Case("mooncake", *LARGE, rate=0.1, seqs=4),
    "two classes, good settings": Case("mixed", *SMALL, shorter=4),
    "two classes, seats kept for the batch": Case("mixed", *SMALL, shorter=4, seqs=8, batch_share=0.5),
    "long prompts from the half hour on": Case("changing", *SMALL, shorter=4),
    "the same, seats too few": Case("changing", *SMALL, shorter=4, seqs=6),
}


def azure(folder: Path) -> Iterator[Asked]:
    """Chat of the Azure trace of 2023."""
    with (folder / "azure_conv_2023.csv").open(encoding="utf-8") as file:
        began: datetime | None = None
        for row in csv.DictReader(file):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            began = began or at
            seconds = (at - began).total_seconds()
            yield seconds, int(row["ContextTokens"]), max(1, int(row["GeneratedTokens"])), "chat", ()


def mooncake(folder: Path) -> Iterator[Asked]:
    """The trace of Mooncake, whose prompts share blocks of 512 tokens; repeated until the hour is full."""
    with (folder / "mooncake_synthetic.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    length = rows[-1]["timestamp"] / 1e3 + 1.0
    for turn in range(4):
        for row in rows:
            shared = tuple(each + turn * 10_000_000 for each in row["hash_ids"])
            seconds = turn * length + row["timestamp"] / 1e3
            yield seconds, row["input_length"], max(1, row["output_length"]), "chat", shared


def mixed(folder: Path) -> Iterator[Asked]:
    """Chat, by Poisson and with lengths by lognormal laws, beside a batch of long answers in bursts."""
    yield from sorted([*_made(1, 3600.0, 1.2, 400, 150), *_bursts(2)])


def changing(folder: Path) -> Iterator[Asked]:
    """Chat, and from the half hour on prompts that are ten times as long and come a sixth as often."""
    yield from _made(3, 1800.0, 1.5, 500, 200)
    for seconds, *rest in _made(4, 1800.0, 0.25, 5000, 200):
        yield (1800.0 + seconds, *rest)  # type: ignore[misc]


def _made(seed: int, seconds: float, rate: float, prompt: int, output: int) -> Iterator[Asked]:
    chance, now = random.Random(seed), 0.0
    while (now := now + chance.expovariate(rate)) < seconds:
        lengths = [min(8000, max(1, round(mean * chance.lognormvariate(-0.32, 0.8)))) for mean in (prompt, output)]
        yield now, lengths[0], lengths[1], "chat", ()


def _bursts(seed: int) -> Iterator[Asked]:
    chance = random.Random(seed)
    for minute in range(0, 60, 2):
        for _ in range(20):
            yield 60.0 * minute + 10 * chance.random(), chance.randint(200, 2000), chance.randint(100, 600), "batch", ()


def requests(case: Case, folder: Path, seconds: float) -> Iterator[Arrival]:
    """The requests of a case, in order of time."""
    chance, number = random.Random(0), 0
    for at, prompt, output, name, shared in {
        "azure": azure,
        "mooncake": mooncake,
        "mixed": mixed,
        "changing": changing,
    }[case.trace](folder):
        if at >= seconds:
            return
        prompt, output = -(-prompt // case.shorter), -(-output // case.shorter)
        times = int(case.rate) + (chance.random() < case.rate % 1.0)
        for copy in range(times):
            blocks = [(block + copy * 100_000_000, 512) for block in shared]
            ids = made_prompt(number, prompt, blocks)
            yield arrival(number, round((at + 0.37 * copy) * S), ids, output, output_len=output, service_class=name)
            number += 1


def run(case: Case, folder: Path, seconds: float, tunes: bool, seed: int) -> tuple[list[Answer], TunedServer | None]:
    """The answers of an hour, with settings that stay or not."""
    chance = random.Random(f"{case.model} {seed}")
    ttft_ms, tpot_ms = case.objectives
    chat = ServiceClass(name="chat", ttft_ms=ttft_ms, tpot_ms=tpot_ms, window_ms=case.window_ms)
    classes = ClassTable((chat, ServiceClass(name="batch", seats=case.batch_share)), "chat")
    options = ServerOptions(model=case.model, hardware=case.hardware, tensor_parallel_size=case.devices, given=_GIVEN)
    scheduling = SchedulingOptions(
        max_num_seqs=case.seqs,
        max_num_batched_tokens=case.tokens,
        max_prefill_stall_ms=case.stall_ms,
        classes=classes,
    )
    limits = case.bounds.make_room(scheduling)
    deployed = deploy(options, scheduling)
    assert deployed.deployment is not None
    off = _off(chance)
    exact = Predicted(replace(deployed.deployment, efficiency=off(deployed.deployment.efficiency)))
    timing, scheduler = Jittered(exact, random.Random(seed)), deployed.scheduler
    server: Server
    if tunes:
        server = TunedServer(scheduler, timing, deployed.limits, "cuda", limits, case.bounds)
    else:
        scheduler.set_classes(classes, {}, limits)
        server = Server(scheduler, timing, deployed.limits, NO_TIME, None, None)
    server.expect(requests(case, folder, seconds))
    server.run()
    return server.answers, server if isinstance(server, TunedServer) else None


def distances(answers: list[Answer], case: Case, classes: dict[str, str]) -> np.ndarray:
    """How far each request of the class `chat` was from its objectives."""
    found = []
    for each in answers:
        if classes[each.request_id] != "chat":
            continue
        if not each.token_ns or each.refused:
            found.append(FAILED)
            continue
        ttft_ms = (each.token_ns[0] - each.arrived_ns) / 1e6
        tpot_ms = (each.token_ns[-1] - each.token_ns[0]) / 1e6 / max(1, len(each.token_ns) - 1)
        worst = max(ttft_ms / case.objectives[0], tpot_ms / case.objectives[1])
        found.append(min(max(np.log(worst), GOOD_ENOUGH), FAILED))
    return np.array(found)


def study(name: str, folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """One hour of both servers."""
    case = CASES[name]
    classes = {each.request.request_id: each.request.service_class for each in requests(case, folder, seconds)}
    found: dict[str, Any] = {"case": name, "seed": seed}
    for tunes in (False, True):
        answers, server = run(case, folder, seconds, tunes, seed)
        far = distances(answers, case, classes)
        others = [each for each in answers if classes[each.request_id] != "chat" and each.token_ns]
        found["tuned" if tunes else "static"] = {
            "loss": loss(far),
            "attainment": attainment(far),
            "others_s": float(np.mean([(each.ended_ns - each.arrived_ns) / 1e9 for each in others]))
            if others
            else None,
            "tokens": sum(len(each.token_ns) for each in answers),
            "ended_s": max(each.ended_ns for each in answers) / 1e9,
        }
        if server is not None:
            found["moves"] = [[round(at / S), move.kind, move.words] for at, move in server.moves]
            found["simulated_steps"], found["steps"] = server.forecaster.steps, len(server.steps)
    found["worse"] = found["tuned"]["loss"] - found["static"]["loss"]
    return found


def table(found: list[dict[str, Any]]) -> str:
    """A row for each hour."""
    lines = [
        "| case | static loss | tuned | worse by | met, static | met, tuned | moves |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for each in found:
        static, tuned = each["static"], each["tuned"]
        kinds = [kind for _, kind, _ in each["moves"]]
        moves = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        met = f"{static['attainment']:.1%} | {tuned['attainment']:.1%}"
        lines.append(
            f"| {each['case']} | {static['loss']:.3f} | {tuned['loss']:.3f} | {each['worse']:+.3f} | {met} | {moves} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.auto_tune", description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "auto_tune.json")
    arguments = parser.parse_args(argv)
    found: list[dict[str, Any]] = []
    for name in arguments.cases:
        for seed in range(arguments.seeds):
            try:
                found.append(study(name, arguments.traces, 60.0 * arguments.minutes, seed))
            except FileNotFoundError as missing:
                print(f"{name} is left out: {missing.filename} is not there", file=sys.stderr)
                continue
            print(json.dumps(found[-1], indent=1), file=sys.stderr)
            save(heading(arguments) | {"hours": found}, arguments.output)
    print(table(found))


if __name__ == "__main__":
    main()
