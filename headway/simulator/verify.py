"""`headway simulate verify`: a workload on a live server beside the same on a simulated one.

Three runs with different seeds go to a server that records its steps. From the first and the last is learnt how long
steps take and what the server does beside them. The one between them is what is predicted, and then compared.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from headway.bench.errors import BenchError
from headway.bench.interrupts import Interrupted, interrupts, unless_stopped
from headway.bench.measures.compare import Difference, compare
from headway.bench.measures.latencies import Latencies
from headway.bench.measures.throughput import whole_run_rates
from headway.bench.options import Target
from headway.bench.profile.local_server import LocalServer
from headway.bench.record import RunResult
from headway.bench.reporting import INTERRUPTED
from headway.bench.results import write_json
from headway.bench.runs import Load, is_made_up, load_of
from headway.bench.session import Session
from headway.bench.tokens import load_tokenizer
from headway.bench.workload.arrivals import make_arrival
from headway.bench.workload.build import build_workload, warm_up_requests
from headway.flags import flags_of, option
from headway.policy.queue_bound import QueueLimits
from headway.policy.scheduler import Scheduler
from headway.report.console import print_table
from headway.report.parts import Table, cells
from headway.report.style import number
from headway.simulator.deployed import Deployed
from headway.simulator.learnt import Learnt, RecordedStep, steps_of, teach
from headway.simulator.options import VerifyOptions
from headway.simulator.prompts import SketchSource
from headway.simulator.recording import Recording, read_recordings
from headway.simulator.run import answer
from headway.simulator.server import Host

EQUIVALENT = 0.10
CONFIDENCE = 0.90  # of the interval that must lie within EQUIVALENT: two one-sided tests at 5 %
METRICS = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2el_ms": "E2E"}
STATISTICS = {"median": "P50", "p90": "P90", "p99": "P99"}
_LEARN_SEED = 1_000_003  # added to the run's seed for the one that is learnt from
_WARM_UPS = 3


@dataclass(frozen=True, slots=True)
class Verification:
    """What was measured beside what was predicted.

    Args:
        differences: of each statistic that both samples are large enough for; a is measured, b is predicted.
        distances: by metric, Kolmogorov and Smirnov's: the most that the shares of latencies below any value differ.
        throughput: output tokens a second, measured and predicted.
    """

    differences: tuple[Difference, ...]
    distances: dict[str, float]
    throughput: tuple[float, float]

    @property
    def holds(self) -> bool:
        """Every median is equivalent."""
        medians = [each for each in self.differences if each.statistic == "median"]
        return bool(medians) and all(verdict_of(each) == "equivalent" for each in medians)


def verdict_of(difference: Difference) -> str:
    """Whether the prediction is within EQUIVALENT of what was measured, with CONFIDENCE."""
    low, high = difference.ratio_low, difference.ratio_high
    if low is None or high is None:
        return "too few"
    if low >= 1 - EQUIVALENT and high <= 1 + EQUIVALENT:
        return "equivalent"
    return "different" if high < 1 - EQUIVALENT or low > 1 + EQUIVALENT else "undecided"


def run_verification(options: VerifyOptions) -> int:
    """Measure, predict, compare and print. Returns 0 where every median is equivalent, else 1; 130 when interrupted.

    Raises:
        ValueError: bad input, or a server that does not start or answer; one line.
    """
    import uvloop

    spec = options.workload
    arrival = make_arrival(options.arrivals, None if spec.mix else spec.dataset_name)
    load = load_of(dataclasses.replace(spec, arrival=arrival), options.max_concurrency)
    progress = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="headway-verify-") as folder:
        steps = Path(folder) / "steps.jsonl"
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                before, measured, after = runner.run(_measure(options, load, steps, progress))
        except (Interrupted, asyncio.CancelledError):
            progress.print("Stopped: nothing was compared.")
            return INTERRUPTED
        recording = read_recordings(steps)[-1]
    with progress.status("Simulating ..."):
        predicted = predict(recording, [before, after], measured)
    found = verify(measured.result, predicted)
    print_verification(Console(), found)
    if options.output is not None:
        write_json(options.output, dataclasses.asdict(found) | {"holds": found.holds})
    return 0 if found.holds else 1


@dataclass(frozen=True, slots=True)
class Measured:
    """A load that a live server was given, and what came of it."""

    load: Load
    result: RunResult


async def _measure(options: VerifyOptions, load: Load, steps: Path, progress: Console) -> list[Measured]:
    """The run that is to be predicted, between two that are learnt from: a machine that gets faster or slower meanwhile
    does so in both halves alike.
    """
    stop = asyncio.Event()
    arguments = [
        *([options.model] if options.model is not None else []),
        *_flags(options),
        "--record-steps",
        str(steps),
    ]
    with interrupts(stop, progress), progress.status("Starting the server ...") as status:
        async with LocalServer(arguments, options.ready_timeout_s) as server:
            target = Target(base_url=server.startup.url)
            session = await unless_stopped(stop, Session.open(target, made_up=is_made_up(load.spec)))
            found = []
            seed = load.spec.seed
            runs = ("Learning", seed + _LEARN_SEED), ("Measuring", seed), ("Learning again", seed + 2 * _LEARN_SEED)
            for name, each in runs:
                status.update(f"{name} ...")
                of_seed = dataclasses.replace(load, spec=dataclasses.replace(load.spec, seed=each))
                found.append(await _run(session, of_seed, stop))
    return found


async def _run(session: Session, load: Load, stop: asyncio.Event) -> Measured:
    workload = build_workload(load.spec, session.source, chat=False, context=session.server.max_model_len)
    result = await session.measure(
        workload,
        settings={"seed": load.spec.seed},
        mode=load.mode,
        max_concurrency=load.max_concurrency,
        warm_ups=warm_up_requests(workload, session.source, _WARM_UPS),
        duration_s=load.spec.duration_s,
        stop=stop,
    )
    if stop.is_set():
        raise Interrupted
    if not any(record.ok for record in result.records):
        raise BenchError("the server answered no request; there is nothing to compare")
    return Measured(load, result)


def _flags(options: VerifyOptions) -> list[str]:
    """Of `headway serve`, where they are not its defaults."""
    found = []
    for values in (options.model_options, options.scheduling):
        for each, _, flag in flags_of(type(values)):
            value = getattr(values, each.name)
            if flag is None or value == each.default:
                continue
            name = option(each, flag)
            if isinstance(value, bool):
                found.append(name if value else f"--no-{name.removeprefix('--')}")
            else:
                found += [name, str(value)]
    return found


def predict(recording: Recording, learning: Sequence[Measured], measured: Measured) -> RunResult:
    """A load on a simulated server that has learnt from others.

    What a request takes beside the engine is so long that the median TTFT of those comes out right, in the mean.
    """
    steps = [step for each in learning for step in steps_of(recording, each.result.began_ns, each.result.ended_ns)]
    late_ms = [
        _median_ttft(each.result) - _median_ttft(_simulated(recording, steps, each.load, Host())) for each in learning
    ]
    host = Host(request_ns=max(0, round(float(np.mean(late_ms)) * 1e6)))
    return _simulated(recording, steps, measured.load, host)


def _median_ttft(result: RunResult) -> float:
    return float(np.median(Latencies.of(result.records).ttft_ms))


def _simulated(recording: Recording, steps: list[RecordedStep], load: Load, host: Host) -> RunResult:
    engine = recording.engine
    scheduler = Scheduler(engine.scheduler_config(), engine.kv_blocks())
    teach(scheduler.accounting.step_time, steps)
    limits = QueueLimits.for_engine(scheduler.config.max_num_seqs, engine.num_blocks * engine.block_size)
    source, context = SketchSource(load_tokenizer(engine.model)), scheduler.config.max_model_len
    workload = build_workload(load.spec, source, chat=False, context=context)
    deployed = Deployed(scheduler, Learnt.of(steps, load.spec.seed), limits, host, {})
    return answer([deployed.server()], load, workload)[0]


def verify(measured: RunResult, predicted: RunResult) -> Verification:
    """Raises BenchError where one of the runs has no answers."""
    found = compare(measured, predicted, confidence=CONFIDENCE)
    latencies = [Latencies.of(result.records).metrics("schedule") for result in (measured, predicted)]
    distances = {name: _distance(*(each[name] for each in latencies)) for name in METRICS}
    rates = [whole_run_rates(each.records, each.began_ns, each.ended_ns) for each in (measured, predicted)]
    shown = tuple(each for each in found.differences if each.metric in METRICS and each.statistic in STATISTICS)
    return Verification(shown, distances, (rates[0]["output_throughput"], rates[1]["output_throughput"]))


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    a, b = np.sort(a[~np.isnan(a)]), np.sort(b[~np.isnan(b)])
    if not len(a) or not len(b):
        return float("nan")
    both = np.concatenate([a, b])
    below = [np.searchsorted(each, both, side="right") / len(each) for each in (a, b)]
    return float(np.abs(below[0] - below[1]).max())


def print_verification(console: Console, found: Verification) -> None:
    """A row for each statistic, and the verdict last."""
    rows = [_row(each, found.distances) for each in found.differences if each.a is not None and each.b is not None]
    names = ("", "measured", "predicted", "ratio", f"{100 * CONFIDENCE:g} % interval", "", "KS")
    note = (
        f"Equivalent: the whole interval of the ratio is within {100 * EQUIVALENT:g} %. Intervals by resampling "
        "requests. KS: distance of Kolmogorov and Smirnov. Latencies from the schedule."
    )
    print_table(console, Table("Measured beside predicted, ms", names, tuple(rows), note=note))
    measured, predicted = map(number, found.throughput)
    console.print(f"Output tokens per second: {measured} measured, {predicted} predicted.")
    console.print(f"{'Holds' if found.holds else 'Does not hold'}: medians within {100 * EQUIVALENT:g} %.")


def _row(each: Difference, distances: dict[str, float]) -> Any:
    ratio = "-" if each.ratio is None else f"{each.ratio:.2f}"
    interval = "-" if each.ratio_low is None else f"{each.ratio_low:.2f} to {each.ratio_high:.2f}"
    distance = f"{distances[each.metric]:.2f}" if each.statistic == "median" else ""
    assert each.a is not None and each.b is not None
    name = f"{METRICS[each.metric]} {STATISTICS[each.statistic]}"
    return cells(name, number(each.a), number(each.b), ratio, interval, verdict_of(each), distance)
