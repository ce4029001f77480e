"""`headway simulate verify`: a workload on a live server beside the same on a simulated one.

Runs with different seeds go to a server that records its steps. Every other run is predicted from the two around it:
how long steps take, and what the server does beside them. What was predicted is compared with what was measured.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
from rich.console import Console

from headway.bench.client.load import Pace
from headway.bench.interrupts import Interrupted, interrupts, unless_stopped
from headway.bench.options import Target
from headway.bench.profile.local_server import LocalServer
from headway.bench.reporting import INTERRUPTED
from headway.bench.results import write_json
from headway.bench.runs import Load, is_made_up, load_of
from headway.bench.session import Session
from headway.bench.tokens import load_tokenizer
from headway.flags import arguments_of, flags_of, option
from headway.load.errors import BenchError
from headway.load.measures.compare import Comparison, Difference, compare
from headway.load.measures.latencies import Latencies
from headway.load.record import RunResult
from headway.load.workload.arrivals import make_arrival
from headway.load.workload.build import build_workload, warm_up_requests
from headway.policy.admission.queue_bound import QueueLimits
from headway.policy.cache.sizing import PoolSize
from headway.policy.step.options import SchedulingOptions
from headway.policy.step.recording import RecordedEngine
from headway.policy.step.scheduler import Scheduler
from headway.report.console import print_table
from headway.report.parts import Table, cells
from headway.report.style import number
from headway.simulator.deployed import Deployed
from headway.simulator.engine import Host
from headway.simulator.learnt import FEWEST_STEPS, Learnt, RecordedStep, steps_of, teach
from headway.simulator.options import VerifyOptions
from headway.simulator.prompts import SketchSource
from headway.simulator.recording import Recording, read_recordings
from headway.simulator.run import answer
from headway.simulator.server import Server

EQUIVALENT = 0.10
CONFIDENCE = 0.90  # confidence of the interval that must lie within EQUIVALENT: two one-sided tests at 5 %
METRICS = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2el_ms": "E2EL"}
STATISTICS = {"median": "P50", "p90": "P90", "p99": "P99"}
DRIFT = 0.10  # largest drift of the machine's speed: a prediction can be no better than this
_LEARN_SEED = 1_000_003  # added to the seed for each run that is learnt from
_WARM_UPS = 3


@dataclass(frozen=True, slots=True)
class Verification:
    """What was measured beside what was predicted."""

    # The difference in each statistic for which both samples are large enough; a is measured, b predicted.
    differences: tuple[Difference, ...]
    # Kolmogorov and Smirnov's distance of each metric: the most by which the shares of latencies below a value differ.
    distances: dict[str, float]
    throughput: tuple[float, float]  # output tokens a second, measured and predicted
    # The time of each measured run's steps over their time by the runs around it, for the same work. It differs from 1
    # because of the machine, not of the simulator.
    slower: tuple[float, ...] = ()
    # Predicted over measured for each metric and statistic, if steps take as long as those of the measured runs
    # themselves: the simulator's error on a machine that does not change.
    by_own_steps: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether every median is equivalent."""
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
                runs = runner.run(_measure(options, load, steps, progress))
        except (Interrupted, asyncio.CancelledError):
            progress.print("Stopped: nothing was compared.")
            return INTERRUPTED
        recording = read_recordings(steps)[-1]
    with progress.status("Simulating ..."):
        found = verify([Round.of(recording, *runs[at : at + 3]) for at in range(0, len(runs) - 1, 2)])
    print_verification(Console(), found)
    if options.output is not None:
        write_json(options.output, dataclasses.asdict(found) | {"holds": found.holds})
    return 0 if found.holds else 1


@dataclass(frozen=True, slots=True)
class Measured:
    """A load that a live server was given, and what came of it."""

    load: Load
    result: RunResult


@dataclass(frozen=True, slots=True)
class Round:
    """A measured run and its predictions: from the runs around it, and from its own steps, where these are enough."""

    measured: RunResult
    predicted: RunResult
    by_own_steps: RunResult | None
    slower: float

    @classmethod
    def of(cls, recording: Recording, before: Measured, measured: Measured, after: Measured) -> Self:
        learning = [before, after]
        steps, own = recorded_steps(recording, learning), recorded_steps(recording, [measured])
        host = host_of(recording, learning, steps)
        predicted = simulated(recording, steps, measured.load, host)
        by_own_steps = simulated(recording, own, measured.load, host) if len(own) >= FEWEST_STEPS else None
        return cls(measured.result, predicted, by_own_steps, Learnt.of(steps).slower(own))


async def _measure(options: VerifyOptions, load: Load, steps: Path, progress: Console) -> list[Measured]:
    """Runs that are learnt from and runs that are to be predicted, in turn: a machine that gets faster or slower
    meanwhile does so before and after a measured run alike.
    """
    stop = asyncio.Event()
    arguments = [
        *([options.model] if options.model is not None else []),
        *serve_flags(options.model_options, options.scheduling),
        "--record-steps",
        str(steps),
    ]
    with interrupts(stop, progress), progress.status("Starting the server ...") as status:
        async with LocalServer(arguments, options.ready_timeout_s) as server:
            target = Target(base_url=server.startup.url)
            session = await unless_stopped(stop, Session.open(target, made_up=is_made_up(load.spec)))
            found = []
            for run in range(2 * options.rounds + 1):
                number, measures = divmod(run, 2)
                status.update(
                    f"{'Measuring' if measures else 'Learning'}, run {run + 1} of {2 * options.rounds + 1} ..."
                )
                seed = load.spec.seed + (number if measures else (number + 1) * _LEARN_SEED)
                of_seed = dataclasses.replace(load, spec=dataclasses.replace(load.spec, seed=seed))
                found.append(await measure(session, of_seed, stop))
    return found


async def measure(session: Session, load: Load, stop: asyncio.Event) -> Measured:
    """Give a live server a load.

    Raises:
        Interrupted: `stop` was set meanwhile.
        BenchError: the server answered nothing.
    """
    workload = build_workload(load.spec, session.source, chat=False, context=session.server.max_model_len)
    result = await session.measure(
        workload,
        Pace(load.mode, load.max_concurrency, duration_s=load.spec.duration_s),
        settings={"seed": load.spec.seed},
        warm_ups=warm_up_requests(workload, session.source, _WARM_UPS),
        stop=stop,
    )
    if stop.is_set():
        raise Interrupted
    if not any(record.ok for record in result.records):
        raise BenchError("the server answered no request; there is nothing to compare")
    return Measured(load, result)


def given_flags(*options: Any) -> list[tuple[str, Any]]:
    """The flags of `headway serve` that are not its defaults, in dataclasses of options, with their values."""
    found = []
    for values in options:
        for each, _, flag in flags_of(cast(type, type(values))):
            value = getattr(values, each.name)
            if flag is not None and value != each.default:
                found.append((option(each, flag), value))
    return found


def serve_flags(*options: Any) -> list[str]:
    """The same as a command line has them."""
    return [word for name, value in given_flags(*options) for word in arguments_of(name, value)]


def recorded_steps(recording: Recording, runs: Sequence[Measured]) -> list[RecordedStep]:
    """The steps that were recorded during runs."""
    return [step for each in runs for step in steps_of(recording, each.result.began_ns, each.result.ended_ns)]


def host_of(recording: Recording, learning: Sequence[Measured], steps: list[RecordedStep]) -> Host:
    """What the server does beside its engine.

    A request takes so long there that the median TTFT of those runs comes out right, in the mean.
    """
    late_ms = [
        _median_ttft(each.result) - _median_ttft(simulated(recording, steps, each.load, Host())) for each in learning
    ]
    return Host(request_ns=max(0, round(float(np.mean(late_ms)) * 1e6)))


def _median_ttft(result: RunResult) -> float:
    return float(np.median(Latencies.of(result.records).ttft_ms))


def simulated(
    recording: Recording,
    steps: list[RecordedStep],
    load: Load,
    host: Host,
    scheduling: SchedulingOptions | None = None,
    replicas: int = 1,
    routing: str = "round-robin",
) -> RunResult:
    """A load on the recorded engine, simulated with steps that take as long as those.

    Args:
        scheduling: settings in place of the recorded ones. Raises ValueError where they contradict each other.
        replicas, routing: so many engines like it, and what chooses between them.
    """
    engine, servers = recording.engine, list[Server]()
    for replica in range(replicas):
        scheduler = _scheduler(engine, scheduling)
        teach(scheduler.accounting.step_time, steps)
        config = scheduler.config
        limits = QueueLimits.for_engine(config.max_num_seqs, scheduler.blocks.pool_tokens(config.max_model_len))
        timing = Learnt.of(steps, load.spec.seed + replica)
        servers.append(Deployed(scheduler, timing, limits, host, {}).server())
    source = SketchSource(load_tokenizer(engine.model))
    workload = build_workload(load.spec, source, chat=False, context=config.max_model_len)
    return answer(servers, load, workload, routing=routing)[0]


def _scheduler(engine: RecordedEngine, scheduling: SchedulingOptions | None) -> Scheduler:
    recorded = engine.scheduler_config()
    if scheduling is None:
        return Scheduler(recorded, engine.kv_blocks())
    pool = PoolSize(engine.num_blocks, recorded.max_model_len, None, engine.num_checkpoints, tuple(engine.groups))
    return scheduling.scheduler("cpu" if engine.device == "cpu" else "cuda", pool, swap=recorded.swap)


def verify(rounds: Sequence[Round]) -> Verification:
    """Compare the requests of all rounds. Raises BenchError if one of the runs has no answers."""
    measured, predicted = (_pooled([getattr(each, name) for each in rounds]) for name in ("measured", "predicted"))
    found = _shown(compare(measured, predicted, confidence=CONFIDENCE))
    latencies = [Latencies.of(result.records).metrics("schedule") for result in (measured, predicted)]
    distances = {name: _distance(*(each[name] for each in latencies)) for name in METRICS}
    own: dict[str, dict[str, float]] = {}
    by_own_steps = [each.by_own_steps for each in rounds if each.by_own_steps is not None]
    if len(by_own_steps) == len(rounds):
        for each in _shown(compare(measured, _pooled(by_own_steps), confidence=CONFIDENCE)):
            if each.ratio is not None:
                own.setdefault(each.metric, {})[each.statistic] = each.ratio
    throughput = _throughput([each.measured for each in rounds]), _throughput([each.predicted for each in rounds])
    return Verification(found, distances, throughput, tuple(each.slower for each in rounds), own)


def _shown(found: Comparison) -> tuple[Difference, ...]:
    return tuple(each for each in found.differences if each.metric in METRICS and each.statistic in STATISTICS)


def _pooled(runs: Sequence[RunResult]) -> RunResult:
    """Pool the requests of several runs into one run."""
    records = [record for run in runs for record in run.records]
    return dataclasses.replace(
        runs[0], records=[dataclasses.replace(each, index=at) for at, each in enumerate(records)]
    )


def _throughput(runs: Sequence[RunResult]) -> float:
    """Output tokens per second of all runs."""
    return float(sum(record.tokens for run in runs for record in run.records) / sum(run.duration_s for run in runs))


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    a, b = np.sort(a[~np.isnan(a)]), np.sort(b[~np.isnan(b)])
    if not len(a) or not len(b):
        return float("nan")
    both = np.concatenate([a, b])
    below = [np.searchsorted(each, both, side="right") / len(each) for each in (a, b)]
    return float(np.abs(below[0] - below[1]).max())


def print_verification(console: Console, found: Verification) -> None:
    """A row for each statistic, and the verdict last."""
    rows = [_row(each, found) for each in found.differences if each.a is not None and each.b is not None]
    names = ("", "measured", "predicted", "ratio", f"{100 * CONFIDENCE:g} % interval", "", "own steps", "KS")
    note = (
        f"Equivalent: the whole interval of the ratio is within {100 * EQUIVALENT:g} %. Intervals by resampling "
        "requests. Own steps: the ratio if step times are learnt from the measured runs themselves. KS: distance of "
        "Kolmogorov and Smirnov. Latencies from the schedule."
    )
    print_table(console, Table("Measured beside predicted, ms", names, tuple(rows), note=note))
    measured, predicted = map(number, found.throughput)
    console.print(f"Output tokens per second: {measured} measured, {predicted} predicted.")
    changed = ", ".join(f"{each:.2f}" for each in found.slower)
    console.print(f"Step times of the measured runs, by those of the runs around them for the same work: {changed}.")
    within = f"within {100 * EQUIVALENT:g} %"
    console.print(f"Holds: medians {within}." if found.holds else f"Not shown: that all medians are {within}.")
    few = [
        f"{METRICS[each.metric]} P50" for each in found.differences if each.statistic == "median" and each.ratio is None
    ]
    if few:
        console.print(f"Too few requests for {', '.join(few)}; raise --num-prompts.")
    if not found.holds and any(abs(each - 1) > DRIFT for each in found.slower):
        console.print("The machine's speed changed between runs. Stop other programs, or take more --rounds.")


def _row(each: Difference, found: Verification) -> Any:
    ratio = "-" if each.ratio is None else f"{each.ratio:.2f}"
    interval = "-" if each.ratio_low is None else f"{each.ratio_low:.2f} to {each.ratio_high:.2f}"
    distance = f"{found.distances[each.metric]:.2f}" if each.statistic == "median" else ""
    own = found.by_own_steps.get(each.metric, {}).get(each.statistic)
    assert each.a is not None and each.b is not None
    name = f"{METRICS[each.metric]} {STATISTICS[each.statistic]}"
    said = "-" if own is None else f"{own:.2f}"
    return cells(name, number(each.a), number(each.b), ratio, interval, verdict_of(each), said, distance)
