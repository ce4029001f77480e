"""`headway bench profile`: measure the machine, start a server, send the requests, write the report, end the server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

import headway
from headway.bench.client.load import LoadListener, LoadMode, LoadOutcome, Pace, run_load
from headway.bench.client.openai_client import OpenAIClient
from headway.bench.interrupts import Interrupted, unless_stopped
from headway.bench.profile import tables
from headway.bench.profile.kernels import Kernels, timed_kernels
from headway.bench.profile.local_server import LocalServer
from headway.bench.profile.machine import peaks_for
from headway.bench.profile.model import ProfiledModel, find_model
from headway.bench.profile.naive import Naive, naive_of
from headway.bench.profile.options import ProfileOptions, check_options, fitting_lengths, settings_of
from headway.bench.profile.page import banners, page_of
from headway.bench.profile.result import ProfileResult, profile_length
from headway.bench.report.verdict import count
from headway.bench.results import write_json
from headway.calibration.peaks import MachinePeaks
from headway.engine.config import ModelOptions
from headway.flags import arguments_of, flags_of, option
from headway.load.endpoint import Endpoint
from headway.load.errors import BenchError
from headway.load.measures.server_metrics import parse_metrics
from headway.load.record import FailureKind, RequestRecord
from headway.load.request import PlannedRequest
from headway.load.workload.prompts import PromptMaker
from headway.load.workload.token_sources import TokenizerSource
from headway.report.console import print_banner, print_table
from headway.report.page import write_page
from headway.text.tokenizer import Tokenizer
from headway.text.tokenizer_files import TextError

LINES_IN_A_LOG = 10  # while requests are sent
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


async def run_profile(options: ProfileOptions, console: Console, stop: asyncio.Event | None = None) -> ProfileResult:
    """Profile a model and write `profile.json`, `profile.html` and `figures/*.png` to a folder of their own.

    No server is left behind, however it ends.

    Args:
        console: gets the tables at the end; the progress goes to standard error.
        stop: set it to end early (Ctrl-C): what was measured by then is written.

    Raises:
        BenchError: bad options, no such model, a server that does not start, a folder that cannot be written to, or
            stopped before anything was measured.
    """
    check_options(options)
    stop = stop or asyncio.Event()
    model = find_model(options.model, options.dtype, options.load_format, options.kv_cache_dtype, options.quantization)
    fitting_lengths(options, options.max_model_len or model.max_model_len)
    began = datetime.now().astimezone()
    folder = options.result_dir / (options.result_name or _folder_name(model, began))
    _check_place(folder)
    try:
        with _progress(Console(stderr=True)) as progress:
            result = await _Profiling(options, model, progress, stop).measure(began)
    except Interrupted:
        raise BenchError("stopped before anything was measured; nothing was written") from None
    result.folder = folder
    write_json(folder / "profile.json", result.as_json())
    write_page(folder / "profile.html", page_of(result), figures_dir=folder / "figures")
    print_profile(console, result)
    return result


class _Profiling:
    """One profile while it is made."""

    def __init__(self, options: ProfileOptions, model: ProfiledModel, progress: Progress, stop: asyncio.Event) -> None:
        self._options, self._model, self._progress, self._stop = options, model, progress, stop

    async def measure(self, began: datetime) -> ProfileResult:
        """Start the server, and ask it for all. Raises BenchError, or Interrupted before anything was measured."""
        options, model, stop = self._options, self._model, self._stop
        peaks = await unless_stopped(stop, self._peaks())
        task = self._stage("starting the server")

        def say(line: str) -> None:
            self._progress.update(task, description=f"starting the server: {' '.join(line.split())}"[:70])

        async with _started(LocalServer(serve_arguments(options, model), options.ready_timeout_s, say), stop) as server:
            self._progress.remove_task(task)
            url, lengths = server.startup.url, fitting_lengths(options, server.startup.max_model_len)
            stages, version = await unless_stopped(stop, asyncio.to_thread(_ask, url))
            outcome = await self._send(url, lengths)
            kernels = {} if outcome.interrupted else await self._kernels(url, lengths)
            naive = None if outcome.interrupted else await self._naive(url, lengths, outcome)
            died = server.died()
        if outcome.interrupted and not _done(outcome):
            raise Interrupted
        if peaks.busy and options.calibration is None:
            # What was measured must not be lost over this.
            with contextlib.suppress(Interrupted, BenchError):
                peaks = peaks.or_better(await unless_stopped(stop, self._peaks()))
        settings = settings_of(options)
        result = ProfileResult(
            model=model,
            peaks=peaks,
            startup=server.startup,
            engine_stages=stages,
            server_version=version,
            lengths=[
                profile_length(
                    length,
                    [record for record in _done(outcome) if record.planned_prompt_tokens == length],
                    options.percentiles,
                    model,
                    peaks,
                )
                for length in lengths
            ],
            settings={"threads": settings.pop("num_threads"), **settings},
            began_at=began.isoformat(timespec="seconds"),
            kernels=kernels,
            naive=naive,
            interrupted=outcome.interrupted,
        )
        result.lengths = [each for each in result.lengths if each.completed or each.failures]
        result.notes = [*([died] if died else []), *outcome.client.reasons, *_remarks(result, outcome)]
        return result

    async def _peaks(self) -> MachinePeaks:
        options, model = self._options, self._model
        if options.calibration is not None:
            return await peaks_for(options, model)
        task = self._stage("measuring the machine")
        try:
            return await peaks_for(
                options, model, lambda stage: self._progress.update(task, description=f"measuring the machine: {stage}")
            )
        finally:
            self._progress.remove_task(task)

    async def _send(self, url: str, lengths: tuple[int, ...]) -> LoadOutcome:
        options = self._options
        warm_ups, requests = await asyncio.to_thread(
            plan_requests, self._model.folder, lengths, options.repeats, options.output_len, options.seed
        )
        task = self._stage(
            f"{count(len(lengths), 'prompt length')}, {count(options.repeats, 'request')} each", len(requests)
        )
        every, numbers = max(1, len(requests) // LINES_IN_A_LOG), itertools.count(1)

        def done() -> None:
            self._progress.advance(task)
            if (number := next(numbers)) % every == 0 and not self._progress.console.is_terminal:
                self._progress.console.print(f"{number} of {len(requests)} requests", highlight=False)

        return await send_all(url, warm_ups, requests, options.request_timeout_s, self._stop, done)

    async def _kernels(self, url: str, lengths: tuple[int, ...]) -> dict[int, Kernels]:
        """One request more of each length, whose kernels are timed."""
        options = self._options
        task = self._stage("timing kernels")
        _, requests = await asyncio.to_thread(
            plan_requests, self._model.folder, lengths, 1, options.output_len, options.seed + 1
        )
        found = await asyncio.to_thread(timed_kernels, url, requests, options.request_timeout_s)
        self._progress.remove_task(task)
        return found

    async def _naive(self, url: str, lengths: tuple[int, ...], outcome: LoadOutcome) -> Naive | None:
        """The answer to a prompt of the middle length, token by token without a cache."""
        options = self._options
        if not options.naive:
            return None
        prompt = lengths[len(lengths) // 2]
        passes = range(prompt, prompt + options.output_len)
        warm_ups, requests = await asyncio.to_thread(plan_requests, self._model.folder, passes, 1, 1, options.seed + 2)
        task = self._stage("answering without a KV cache", len(requests))
        single = await send_all(
            url, warm_ups[:1], requests, options.request_timeout_s, self._stop, lambda: self._progress.advance(task)
        )
        if single.interrupted:
            return None
        cached = [record for record in _done(outcome) if record.planned_prompt_tokens == prompt]
        return naive_of(prompt, sorted(single.records, key=lambda record: record.index), cached)

    def _stage(self, title: str, total: int | None = None) -> TaskID:
        """Begin to show a stage. Where there is no terminal it is a line, so that a log shows signs of life."""
        if not self._progress.console.is_terminal:
            self._progress.console.print(f"{title} ...")
        return self._progress.add_task(title, total=total)


def _done(outcome: LoadOutcome) -> list[RequestRecord]:
    """Requests that ended by themselves, and not because the user stopped the run."""
    return [r for r in outcome.records if r.failure is None or r.failure.kind is not FailureKind.ABANDONED]


@contextlib.asynccontextmanager
async def _started(server: LocalServer, stop: asyncio.Event) -> AsyncIterator[LocalServer]:
    """Start the server, and end it afterwards; `stop` ends the waiting for it to become ready."""
    try:
        yield await unless_stopped(stop, server.__aenter__())
    finally:
        await server.stop()


def serve_arguments(options: ProfileOptions, model: ProfiledModel) -> list[str]:
    """Arguments of `headway serve` for this profile; the user's own come last."""
    own = [(option(field, flag), getattr(options, field.name)) for field, _, flag in flags_of(ModelOptions) if flag]
    flags = [text for name, value in own if value is not None for text in arguments_of(name, value)]
    return [str(model.folder), "--served-model-name", model.name, *flags, *options.serve_arguments]


def _ask(url: str) -> tuple[dict[str, float], str]:
    """Seconds of the engine's start by stage, from the server's metrics, and its version."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"{url}/metrics", timeout=30) as answer:
        series = parse_metrics(answer.read().decode()).series.get("startup_seconds", {})
    return {dict(labels)["stage"]: seconds for labels, seconds in series.items()}, headway.__version__


def _remarks(result: ProfileResult, outcome: LoadOutcome) -> list[str]:
    """What else a reader should know."""
    remarks = []
    if result.settings["naive"] and result.naive is None and not result.interrupted:
        remarks.append("the run without a KV cache has no result, as some of its requests failed or were interrupted")
    if outcome.warm_up_failures:
        remarks.append(
            f"{len(outcome.warm_up_failures)} warm-up requests failed: {outcome.warm_up_failures[0].message}"
        )
    off = [each for each in result.lengths if each.completed and each.prompt_tokens != each.asked_tokens]
    if off:
        pairs = ", ".join(f"{each.asked_tokens} became {each.prompt_tokens}" for each in off)
        remarks.append(f"the model's tokenizer gives no prompts of exactly the wanted lengths: {pairs} tokens")
    return remarks


def _check_place(folder: Path) -> None:
    """Find out before minutes of measuring whether the report can be written. Raises BenchError."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        problem = "it is no folder" if folder.exists() and not folder.is_dir() else None
        if not os.access(folder if folder.is_dir() else folder.parent, os.W_OK):
            problem = "no permission"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem is not None:
        raise BenchError(f"cannot write the report to {folder}: {problem}; choose another place with --result-dir")


def _folder_name(model: ProfiledModel, began: datetime) -> str:
    plain = _NOT_IN_A_NAME.sub("-", Path(model.name).name).strip("-.") or "model"
    return f"profile-{plain}-{began:%Y%m%d-%H%M%S}"


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def print_profile(console: Console, result: ProfileResult) -> None:
    """The tables, then what must not be missed, then where the report is."""
    found = [tables.loading_table(result), tables.latency_table(result), tables.stage_table(result)]
    found.append(tables.achieved_table(result))
    if result.kernels:
        found.append(tables.kernel_table(result))
    if result.naive is not None:
        found.append(tables.naive_table(result.naive))
    if result.typical is not None:
        found.append(tables.opportunity_table(result.typical))
    for table in found:
        print_table(console, table)
    for banner in reversed(banners(result)):
        print_banner(console, banner)
    if result.folder is not None:
        console.print(f"Report: {result.folder / 'profile.html'}", highlight=False, soft_wrap=True)


def plan_requests(
    folder: Path, lengths: Sequence[int], repeats: int, output_len: int, seed: int = 0
) -> tuple[list[PlannedRequest], list[PlannedRequest]]:
    """Warm-ups, one of each length, and the requests themselves, round by round.

    Prompts are text, so that tokenizing them is measured; no two share a beginning, so that no prefix cache helps.

    Raises:
        BenchError: the model's tokenizer is missing or can make no prompts.
    """
    try:
        maker = PromptMaker(TokenizerSource(Tokenizer.load(folder)), seed)
    except TextError as error:
        raise BenchError(str(error)) from None

    def plan(index: int, length: int) -> PlannedRequest:
        made = maker.make(length)
        return PlannedRequest(index, made.prompt, length, output_len)

    warm_ups = [plan(index, length) for index, length in enumerate(lengths)]
    rounds = [length for _ in range(repeats) for length in lengths]
    return warm_ups, [plan(index, length) for index, length in enumerate(rounds)]


async def send_all(
    base_url: str,
    warm_ups: Sequence[PlannedRequest],
    requests: Sequence[PlannedRequest],
    timeout_s: float,
    stop: asyncio.Event,
    on_done: Callable[[], None],
) -> LoadOutcome:
    """Send them to the server and see how each went; `stop` ends it with what there is by then.

    Raises:
        BenchError: every warm-up failed, so that there is nothing to measure.
    """
    endpoint = Endpoint(
        base_url,
        ignore_eos=True,
        extra_body={"temperature": 0.0},
        include_timings=True,
        continuous_usage=True,
        timeout_s=timeout_s,
    )
    async with OpenAIClient(endpoint) as client:
        outcome = await run_load(
            client,
            requests,
            Pace(LoadMode.CLOSED, 1, grace_s=0.0),
            warm_ups=warm_ups,
            stop=stop,
            listener=_Progress(on_done),
            sockets=client.busy_sockets,
        )
    if outcome.gave_up is not None:
        raise BenchError(outcome.gave_up)
    return outcome


class _Progress(LoadListener):
    def __init__(self, on_done: Callable[[], None]) -> None:
        self._on_done = on_done

    def ended(self, record: RequestRecord) -> None:
        self._on_done()
