"""What `headway bench` does: one run, a sweep, a search, a comparison."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from headway.bench.client.load import LoadMode
from headway.bench.comparing import figures_beside
from headway.bench.errors import BenchError
from headway.bench.interrupts import Interrupted, interruptible, interrupts, unless_stopped
from headway.bench.measures.numbers import Summary
from headway.bench.measures.summary import summarise_all
from headway.bench.options import BenchOptions, Output
from headway.bench.record import RunResult
from headway.bench.report import verdict
from headway.bench.report.console import print_runs, print_summary
from headway.bench.report.live import LiveView
from headway.bench.report.run_page import write_report
from headway.bench.results import default_file_name, to_json, write_csv, write_json
from headway.bench.session import Session
from headway.bench.settings import settings_of
from headway.bench.workload.arrivals import AllAtOnce, Constant, Gamma, Poisson
from headway.bench.workload.build import Workload, build_workload, warm_up_requests
from headway.bench.workload.spec import WorkloadSpec
from headway.bench.workload.traces import TRACES
from headway.report.parts import Section

VALID, NOT_VALID, INTERRUPTED = 0, 1, 130


TEXTS = ("sharegpt", "custom")  # datasets with prompts of their own
RATED = (Poisson, Gamma, Constant)  # arrival processes with one rate
Run = tuple[RunResult, list[Summary]]


@dataclass(frozen=True, slots=True)
class Load:
    """How the requests of one run are sent."""

    spec: WorkloadSpec
    mode: LoadMode
    max_concurrency: int | None


def load_of(options: BenchOptions) -> Load:
    """The load that the flags describe.

    Without an arrival process: a trace keeps its own times; --max-concurrency is a closed loop of so many users; and
    otherwise everything is sent at once, as by `vllm bench serve`.
    """
    spec, most = options.workload, options.max_concurrency
    timeless = spec.arrival is None and (spec.mix is not None or spec.dataset_name not in TRACES)
    if timeless or isinstance(spec.arrival, AllAtOnce):
        if most is not None:
            return Load(dataclasses.replace(spec, arrival=None, closed_loop=True), LoadMode.CLOSED, most)
        return Load(dataclasses.replace(spec, arrival=AllAtOnce()), LoadMode.OPEN, None)
    return Load(spec, LoadMode.OPEN, most)


def is_made_up(spec: WorkloadSpec) -> bool:
    """Whether prompts are random words, to which a model may well answer with its end token."""
    return spec.mix is not None or spec.dataset_name not in TEXTS


def run_job(options: BenchOptions) -> int:
    """Do what was asked, print what was found, write the results.

    Returns:
        The exit code: 0 for a valid run, 1 for one whose numbers are not the server's (nothing or too little was
        answered, the client could not keep up), 130 when it was interrupted.

    Raises:
        BenchError: bad input, or no server to measure.
    """
    import uvloop

    _check_places(options.output)
    progress = Console(stderr=True)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run_job(options, progress))
    except Interrupted:
        progress.print("Stopped: nothing was measured.")
    except asyncio.CancelledError:
        progress.print("Stopped at once: what was measured last is lost.")
    return INTERRUPTED


def _check_places(output: Output) -> None:
    """Before an hour is measured, and not after: whether its results could be written."""
    places = {"--result-dir": output.result_dir / (output.result_filename or "result.json")} if output.save else {}
    if output.report is not None:
        places["--report"] = output.report
    if output.csv and places["--result-dir"].suffix == ".csv":
        raise BenchError(
            f"--result-filename is {output.result_filename}, and so is the table of --csv; end it in .json"
        )
    for flag, path in places.items():
        there = next((each for each in path.absolute().parents if each.exists()), path)
        if path.is_dir() or not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise BenchError(f"cannot write {path}: no file can be made there; choose another place with {flag}")


async def _run_job(options: BenchOptions, progress: Console) -> int:
    out, stop = Console(), asyncio.Event()
    with interrupts(stop, progress):
        with progress.status("Looking at the server ..."):
            opening = Session.open(options.target, made_up=is_made_up(options.workload))
            session = await unless_stopped(stop, opening)
        bench = Bench(options, session, stop, out, progress)
        if options.find_max_rate:
            from headway.bench.max_rate import search

            return await search(bench)
        if options.sweep is not None:
            return await _sweep(bench)
        return await _single(bench)


class Bench:
    """Runs loads against one endpoint, and keeps what comes of them.

    Args:
        stop: is set when the user has had enough.
        out: for results; progress: for what happens meanwhile.
    """

    def __init__(
        self, options: BenchOptions, session: Session, stop: asyncio.Event, out: Console, progress: Console
    ) -> None:
        self.options, self.session = options, session
        self.stop, self.out, self.progress = stop, out, progress

    def plan(self, spec: WorkloadSpec) -> Workload:
        """Make the prompts.

        Raises:
            BenchError: the workload cannot be made, or is too long for the model.
            Interrupted: by the user.
        """
        with self.progress.status("Making prompts ...") as status:

            def show(made: int, total: int) -> None:
                status.update(f"Making prompts ... {made:,} of {total:,}")

            with self._stoppable():
                workload = build_workload(spec, self.session.source, chat=self.options.target.chat, progress=show)
        context = self.session.facts.max_model_len
        if context is not None and workload.longest_tokens > context:
            too_long = sum((each.prompt_tokens or 0) + each.output_tokens > context for each in workload.requests)
            raise BenchError(
                f"{too_long} of {len(workload.requests)} requests are longer than the model's context of {context} "
                f"tokens (prompt and answer; the longest has {workload.longest_tokens}); shorten them, or clip them "
                "with --max-input-len and --max-output-len"
            )
        return workload

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        try:
            with interruptible():
                yield
        except Interrupted:
            self.stop.set()
            raise

    async def run(self, load: Load, label: str = "") -> Run:
        """One run, from prompts to numbers.

        Raises:
            BenchError: see `plan` and `Session.measure`.
            Interrupted: by the user, before anything was measured.
        """
        workload = self.plan(load.spec)
        warm_ups = warm_up_requests(workload, self.session.source, self.options.num_warmups)
        last = workload.requests[-1].arrival_s if workload.requests[-1].follows is None else None
        with LiveView(self.progress, len(workload.requests), label, expected_s=last) as view:
            result = await self.session.measure(
                workload,
                settings=settings_of(self.options, self.session, load.spec, workload, load.max_concurrency),
                mode=load.mode,
                max_concurrency=load.max_concurrency,
                warm_ups=warm_ups,
                duration_s=load.spec.duration_s,
                drain_s=self.options.drain_timeout_s,
                stop=self.stop,
                listener=view,
                keep_text=self.options.output.detailed,
            )
        return result, self.summarise(result, workload)

    def summarise(self, result: RunResult, workload: Workload) -> list[Summary]:
        claims = self.options.claims
        summaries = summarise_all(
            result,
            percentiles=claims.percentiles,
            objectives=claims.objectives or None,
            objectives_by_class=workload.classes or None,
            price_per_hour=claims.price_per_hour,
        )
        summaries[0].notes.extend(workload.notes)
        return summaries

    def save(self, result: RunResult, summaries: Sequence[Summary], number: int | None = None) -> None:
        """Write what was asked for of one run; `number` tells the runs of a sweep or search apart."""
        output, claims = self.options.output, self.options.claims
        if not output.save:
            return
        name = Path(output.result_filename or default_file_name(result))
        if number is not None:
            name = name.with_stem(f"{name.stem}-{number}")
        path = output.result_dir / name
        by_class = result.settings["goodput_by_class"]
        values = to_json(
            result,
            summaries,
            percentiles=claims.percentiles,
            objectives=claims.objectives,
            objectives_by_class=by_class,
            save_detailed=output.detailed,
        )
        write_json(path, values)
        if output.csv:
            write_csv(path.with_suffix(".csv"), result, claims.objectives, by_class)
        self.out.print(Text(f"Result: {path}", style="dim"), soft_wrap=True)

    def report(self, runs: Sequence[Run], extra: Sequence[Section] = ()) -> None:
        """Write the HTML report, where one was asked for."""
        path, claims = self.options.output.report, self.options.claims
        if path is None or not runs:
            return
        try:
            with self.progress.status("Drawing the report ..."), self._stoppable():
                write_report(
                    path,
                    [result for result, _ in runs],
                    [summaries for _, summaries in runs],
                    extra=extra,
                    target=claims.attainment,
                    max_failed_share=claims.max_failed_share,
                    figures_dir=figures_beside(path),
                )
        except Interrupted:
            self.progress.print("Stopped: there is no report.")
            return
        self.out.print(Text(f"Report: {path}", style="dim"), soft_wrap=True)

    def print(self, result: RunResult, summaries: Sequence[Summary]) -> None:
        claims = self.options.claims
        print_summary(self.out, result, summaries, target=claims.attainment, most_failed=claims.max_failed_share)

    def exit_code(self, runs: Sequence[Run]) -> int:
        if self.stop.is_set():
            return INTERRUPTED
        most = self.options.claims.max_failed_share
        return VALID if all(verdict.is_valid(*run, max_failed_share=most) for run in runs) else NOT_VALID


async def _single(bench: Bench) -> int:
    run = await bench.run(load_of(bench.options))
    bench.save(*run)
    bench.print(*run)
    bench.report([run])
    return bench.exit_code([run])


async def _sweep(bench: Bench) -> int:
    """One run after the other: the same arrivals and lengths, so that points compare, and new prompts in each, so that
    none finds its own in the server's prefix cache.

    A server that is lost on the way ends the sweep; what was measured before is kept.
    """
    runs: list[Run] = []
    lost = False
    for number, load in enumerate(sweep_loads(bench.options), start=1):
        if bench.stop.is_set():
            break
        try:
            run = await bench.run(load, load_name(load))
        except Interrupted:
            break
        except BenchError as error:
            if not runs:
                raise
            bench.out.print(Text(f"{load_name(load)}: not measured: {error}"))
            lost = True
            break
        bench.save(*run, number=number)
        bench.out.print(Text(f"{load_name(load)}: {verdict.headline(*run)}"))
        runs.append(run)
    if not runs:
        raise Interrupted
    claims = bench.options.claims
    print_runs(bench.out, *zip(*runs, strict=True), target=claims.attainment, most_failed=claims.max_failed_share)
    bench.report(runs)
    return NOT_VALID if lost else bench.exit_code(runs)


def sweep_loads(options: BenchOptions) -> list[Load]:
    """Raises BenchError where another flag says the same thing otherwise."""
    assert options.sweep is not None
    base = options.workload
    if options.sweep.over == "concurrency":
        if base.arrival is not None or options.max_concurrency is not None:
            raise BenchError(
                "--sweep concurrency is a closed loop at each value; leave out --max-concurrency and rates"
            )
        return [
            Load(dataclasses.replace(spec, closed_loop=True), LoadMode.CLOSED, int(value))
            for spec, value in zip(_with_new_prompts(options), options.sweep.values, strict=True)
        ]
    if base.arrival is not None and not isinstance(base.arrival, RATED):
        raise BenchError("--sweep rate needs arrivals that have one rate: poisson, gamma or constant")
    specs = _with_new_prompts(options)
    return [at_rate(options, spec, value) for spec, value in zip(specs, options.sweep.values, strict=True)]


def _with_new_prompts(options: BenchOptions) -> list[WorkloadSpec]:
    """For each value of a sweep the same workload in other words."""
    assert options.sweep is not None
    base = options.workload
    return [dataclasses.replace(base, prompt_seed=base.seed + number) for number in range(len(options.sweep.values))]


def at_rate(options: BenchOptions, spec: WorkloadSpec, rate: float) -> Load:
    """The workload at another rate: with the same seed the same arrivals, closer together or farther apart."""
    arrival = dataclasses.replace(spec.arrival, rate=rate) if isinstance(spec.arrival, RATED) else Poisson(rate)
    return Load(dataclasses.replace(spec, arrival=arrival), LoadMode.OPEN, options.max_concurrency)


def load_name(load: Load) -> str:
    if load.mode is LoadMode.CLOSED:
        return f"{load.max_concurrency} at a time"
    rate = load.spec.arrival.mean_rate if load.spec.arrival is not None else None
    return "all at once" if rate is None else f"{rate:g} requests/s"
