"""The profile of a server that runs already: its requests one at a time, in stages as far as it tells them.

Headway tells the phases of each request. vLLM and SGLang tell mean times in `/metrics`, and llama.cpp's server the time
that it computed; what these leave of a request counts as network and client. With a MODEL, whose config.json says what
is computed, and the peaks of this machine, prefill and decode stand beside what the machine allows.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from rich.console import Console

from headway.bench.client.load import LoadMode, Pace
from headway.bench.interrupts import Interrupted, unless_stopped
from headway.bench.options import Target
from headway.bench.profile import figures, tables
from headway.bench.profile.machine import peaks_for
from headway.bench.profile.model import ProfiledModel, find_model
from headway.bench.profile.options import ProfileOptions, check_options, fitting_lengths, settings_of
from headway.bench.profile.result import Profile, length_as_json, profile_length
from headway.bench.profile.stages import STAGES
from headway.bench.results import write_json
from headway.bench.session import Session
from headway.calibration.peaks import MachinePeaks
from headway.engine.config import ModelOptions
from headway.load.errors import BenchError
from headway.load.record import RequestRecord, RunResult
from headway.load.workload.build import build_workload, warm_up_requests
from headway.load.workload.lengths import Fixed
from headway.load.workload.spec import WorkloadSpec
from headway.report.console import print_table
from headway.report.page import write_page
from headway.report.parts import Page, Picture, Section, Table

UNKNOWN_CONTEXT = 8192  # tokens, of a server that does not tell
# Fields that say how a server is to be started.
_OF_A_START = {"serve_arguments", "naive", "ready_timeout_s"} | {each.name for each in fields(ModelOptions)}
# Fields among these that say what MODEL computes, or how the machine is measured.
_OF_A_MODEL = {"dtype", "quantization", "kv_cache_dtype", "device", "num_threads"}


@dataclass(slots=True, kw_only=True)
class RemoteProfile(Profile):
    """One profile of a running server."""

    url: str
    about: Mapping[str, Any]  # what the server says of itself
    # model, peaks: None where no MODEL was given.
    model: ProfiledModel | None = None
    peaks: MachinePeaks | None = None

    @property
    def ok(self) -> bool:
        return any(each.completed for each in self.lengths) and not any(each.failures for each in self.lengths)

    def as_json(self) -> dict[str, Any]:
        return {
            "profile": 1,
            "began_at": self.began_at,
            "base_url": self.url,
            "interrupted": self.interrupted,
            "server": dict(self.about),
            "settings": self.settings,
            "prompt_lengths": [length_as_json(each) for each in self.lengths],
        }


async def profile_server(options: ProfileOptions, console: Console, stop: asyncio.Event) -> RemoteProfile:
    """Profile the server at `options.base_url`, print its tables, and write profile.json and profile.html.

    Raises:
        BenchError: bad options, no server, or nothing was measured.
    """
    assert options.base_url is not None
    check_options(options)
    _check(options)
    began = datetime.now().astimezone()
    folder = options.result_dir / (options.result_name or f"profile-server-{began:%Y%m%d-%H%M%S}")
    model = peaks = None
    try:
        session = await unless_stopped(stop, Session.open(Target(options.base_url, api_key=options.api_key)))
        if options.model is not None:
            model = find_model(options.model, options.dtype, "auto", options.kv_cache_dtype, options.quantization)
            peaks = await unless_stopped(stop, peaks_for(options, model))
        result = RemoteProfile(
            url=options.base_url,
            about=session.server.about,
            settings=settings_of(options),
            began_at=began.isoformat(timespec="seconds"),
            lengths=[],
            model=model,
            peaks=peaks,
        )
        for length in fitting_lengths(options, session.server.max_model_len or UNKNOWN_CONTEXT):
            await _measure(options, session, length, result, stop)
    except Interrupted:
        raise BenchError("stopped before anything was measured; nothing was written") from None
    if not result.lengths:
        raise BenchError("stopped before anything was measured; nothing was written")
    write_json(folder / "profile.json", result.as_json())
    write_page(folder / "profile.html", _page(result))
    for table in _tables(result):
        print_table(console, table)
    console.print(f"Report: {folder / 'profile.html'}", highlight=False, soft_wrap=True)
    return result


def _check(options: ProfileOptions) -> None:
    allowed = _OF_A_MODEL if options.model is not None else set[str]()
    for name in sorted(options.given & (_OF_A_START - allowed)):
        raise BenchError(
            f"{name} is for a server that the profile starts, or for a MODEL; leave it out with --base-url"
        )


async def _measure(
    options: ProfileOptions, session: Session, length: int, result: RemoteProfile, stop: asyncio.Event
) -> None:
    """Add the profile of one prompt length."""
    if stop.is_set():
        return
    spec = WorkloadSpec(
        input_len=Fixed(length),
        output_len=Fixed(options.output_len),
        num_prompts=options.repeats,
        seed=options.seed,
        prompt_seed=options.seed + length,
        users=1,
    )
    workload = build_workload(spec, session.source, chat=False, context=session.server.max_model_len)
    measured = await session.measure(
        workload,
        Pace(LoadMode.CLOSED, 1),
        settings={},
        cache_salt=secrets.token_hex(8) if session.server.endpoint.cache_salt else "",
        warm_ups=warm_up_requests(workload, session.source, 1),
        stop=stop,
    )
    result.interrupted = result.interrupted or measured.interrupted
    records = [record for record in measured.records if record.ok or record.failure is not None]
    found = stages_of_metrics(measured, [record for record in records if record.ok])
    each = profile_length(length, records, options.percentiles, result.model, result.peaks, found)
    if each.completed or each.failures:
        result.lengths.append(each)


def stages_of_metrics(result: RunResult, done: Sequence[RequestRecord]) -> dict[str, float]:
    """Mean milliseconds in each stage, by the change of the server's /metrics; {} where these have no such times."""
    metrics, count = result.server.get("metrics") or {}, len(done)
    if not count:
        return {}
    queue, prefill, decode = (metrics.get(name, {}).get("mean_ms") for name in ("queue", "prefill", "decode"))
    if prefill is None and metrics.get("prompt_seconds"):  # llama.cpp's
        prefill = 1e3 * metrics["prompt_seconds"] / count
        decode = 1e3 * metrics.get("predicted_seconds", 0.0) / count
    if prefill is None or decode is None:
        return {}
    whole = sum(record.end_ns - record.sent_ns for record in done) / count / 1e6
    lengths = {stage.key: 0.0 for stage in STAGES} | {"schedule": queue or 0.0, "prefill": prefill, "decode": decode}
    return lengths | {"network": max(0.0, whole - sum(lengths.values()))}


def _tables(result: RemoteProfile) -> list[Table]:
    found = [tables.latency_table(result)]
    if result.typical is not None:
        found.append(tables.stage_table(result))
        if result.model is not None:
            found += [tables.achieved_table(result), tables.opportunity_table(result.typical)]
    return found


def _page(result: RemoteProfile) -> Page:
    latency, *others = _tables(result)
    picture = Picture(
        "stage-breakdown",
        "Stages by prompt length",
        "Milliseconds on the left, shares of the request on the right.",
        figures.stage_breakdown(result.measured),
    )
    text = (
        "One request at a time. Stages are those of the server's ledger, or else mean times of its /metrics; what "
        "these do not tell is in network and client."
    )
    return Page(
        title=f"Profile of {result.about.get('model') or result.url}",
        subtitle=f"{result.about.get('name', '')} at {result.url}, {result.began_at}",
        sections=(
            Section("Latency by prompt length", tables=(latency,), anchor="latency"),
            Section(
                "Where the time of a request goes", (text,), tables=tuple(others), pictures=(picture,), anchor="stages"
            ),
        ),
    )
