"""`headway bench` for more than one run: a sweep, the search for a rate, a comparison."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headway.bench import max_rate
from headway.bench.client.dispatch import Pace
from headway.bench.jobs import sweep_loads
from headway.bench.max_rate import Prober
from headway.bench.options import BenchOptions, Output, Sweep, Target
from headway.bench.repeats import Repeated
from headway.bench.results import load_json
from headway.bench.runs import Bench, Load
from headway.bench.session import Session
from headway.load.errors import BenchError
from headway.load.measures.numbers import Summary
from headway.load.measures.search import SearchOptions
from headway.load.record import ClientHealth, RunResult
from headway.load.workload.arrival_flags import ArrivalFlags
from headway.load.workload.build import Workload
from headway.load.workload.spec import WorkloadSpec
from tests.bench.command_line import CommandLine
from tests.bench.script import script
from tests.bench.scripted_server import ScriptedServer

SHORT = ("--random-input-len", 8, "--random-output-len", 2, "--num-warmups", 0)
SERVICE_S = 0.01


@contextlib.contextmanager
def one_at_a_time() -> Iterator[str]:
    """A server that answers one request after the other, each in 10 ms: at more than 100 a second they queue up.

    It keeps time by the clock and not by sleeping: a busy machine makes it late and not slower.
    """
    loop = asyncio.new_event_loop()
    free_at = 0.0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal free_at
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.partition("content-length:")[2].partition("\r\n")[0] or 0)
                await reader.readexactly(length)
                if "/completions" not in head:
                    writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                    continue
                free_at = max(free_at, loop.time()) + SERVICE_S
                await asyncio.sleep(free_at - loop.time())
                choice = {"index": 0, "text": "a", "finish_reason": "length"}
                usage = {"prompt_tokens": length, "completion_tokens": 1}
                event = f"data: {json.dumps({'choices': [choice], 'usage': usage})}\n\ndata: [DONE]\n\n"
                headers = f"content-type: text/event-stream\r\ncontent-length: {len(event)}"
                writer.write(f"HTTP/1.1 200 OK\r\n{headers}\r\n\r\n{event}".encode())
        writer.close()

    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:

        async def end() -> None:
            server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for each in others:
                each.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def test_a_sweep_over_rates(headway: CommandLine, scripted: ScriptedServer) -> None:
    ran = headway(
        "bench", "--base-url", scripted.url, *SHORT, "--sweep", "rate:80,40,80", "--arrival", "constant",
        "--num-prompts", 10, "--goodput", "ttft:5000", "--result-filename", "mine.json", "--csv",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert [path.name for path in ran.files(".json")] == ["mine-1.json", "mine-2.json"]
    assert [path.name for path in ran.files(".csv")] == ["mine-1.csv", "mine-2.csv"]
    results = [json.loads(path.read_text()) for path in ran.files(".json")]
    assert [result["request_rate"] for result in results] == [80, 40]
    for result, rate in zip(results, (80, 40), strict=True):
        offsets = result["headway"]["requests"]["scheduled_ns"]
        assert offsets[9] - offsets[0] == pytest.approx(9e9 / rate, rel=1e-6)
    # Lengths and arrivals are the same, so that points compare; prompts are each run's own, or it would measure the
    # prefix cache.
    assert len({result["headway"]["settings"]["fingerprint"] for result in results}) == 2
    prompts = [entry["body"]["prompt"] for entry in scripted.logs()["requests"].values()]
    made = [prompt for prompt in prompts if isinstance(prompt, str) and len(prompt.split()) == 8]
    assert len(made) == len(set(made)) == 20
    for name in ("80 requests/s: Valid: 10 of 10", "40 requests/s: Valid"):
        assert name in ran.out


@pytest.mark.parametrize("over", ["rate:2,4,8", "concurrency:2,4,8"])
def test_points_of_a_sweep_share_all_but_their_words(over: str) -> None:
    workload = WorkloadSpec(seed=5, random_range_ratio=0.5)
    specs = [
        load.spec
        for load in sweep_loads(BenchOptions(Target("http://x"), ArrivalFlags(), workload, sweep=Sweep.parse(over)))
    ]
    assert [spec.seed for spec in specs] == [5, 5, 5]
    assert [spec.seed_of_prompts for spec in specs] == [5, 6, 7]


async def test_probes_of_a_search_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are pooled: the same arrivals again would be the same sample again."""
    seeds = []

    async def run(self: Bench, load: Load, label: str = "") -> tuple[RunResult, list[Summary]]:
        seeds.append((load.spec.seed, load.spec.seed_of_prompts, load.spec.num_prompts))
        return RunResult({"goodput_by_class": {}}, [], 0, 1, ClientHealth()), []

    monkeypatch.setattr(Bench, "run", run)
    options = BenchOptions(Target("http://x"), ArrivalFlags(), WorkloadSpec(seed=5), output=Output(save=False))
    prober = Prober(Bench(options, None, None, None, None))  # type: ignore[arg-type]
    for wanted in (1, 5000, 100_000):
        await prober.probe(10.0, wanted)
    assert seeds == [(5, 5, 400), (6, 6, 600), (7, 7, 600)] and len(prober.runs) == 3


def test_a_sweep_over_users(headway: CommandLine, scripted: ScriptedServer) -> None:
    ran = headway("bench", "--base-url", scripted.url, *SHORT, "--sweep", "concurrency:1,3", "--num-prompts", 12)
    assert ran.code == 0
    results = [json.loads(path.read_text()) for path in ran.files(".json")]
    most = {
        result["max_concurrency"]: most_at_once(path) for result, path in zip(results, ran.files(".json"), strict=True)
    }
    assert most == {1: 1, 3: 3} and "3 at a time: Valid" in ran.out


def most_at_once(path: Path) -> int:
    records = load_json(path).records
    return max(sum(other.sent_ns <= each.sent_ns < other.end_ns for other in records) for each in records)


def test_a_sweep_with_failures_is_not_valid(headway: CommandLine, tmp_path: Path) -> None:
    with ScriptedServer(script=script()) as server:
        path = tmp_path / "scripts.jsonl"
        path.write_text(json.dumps({"prompt": script(fail="cut"), "output_tokens": 2}) + "\n")
        ran = headway(
            "bench", "--base-url", server.url, "--dataset-name", "custom", "--dataset-path", path, "--num-prompts", 2,
            "--num-warmups", 0, "--sweep", "concurrency:1,2",
        )  # fmt: skip
    assert ran.code == 1 and "Not valid: 0 of 2" in ran.out and len(ran.files(".json")) == 2


@pytest.mark.quiet
def test_the_highest_rate(headway: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with 10 ms of work for each request bears less than 100 a second; they may wait six times as long.

    First looks at 70 a second and at 140, and then the proof of the one that looked good; none in between, to be quick.
    """
    monkeypatch.setattr(max_rate, "SearchOptions", partial(SearchOptions, tolerance=1.5))
    with one_at_a_time() as url:
        ran = headway(
            "bench", "--base-url", url, *SHORT, "--random-output-len", 1, "--find-max-rate", "--goodput", "ttft:60",
            "--slo-attainment", 0.5, "--stall-seconds", 0, "--arrival", "constant", "--request-rate", 70,
            "--num-prompts", 60,
        )  # fmt: skip
    assert ran.code == 0, ran.err
    tried = {json.loads(path.read_text())["request_rate"]: path for path in ran.files(".json")}
    assert 70 in tried and max(tried) == 140
    assert re.search(r"\b70 requests/s: \d+ of 60 met their objectives, looks good", ran.err)
    assert re.search(r"\b140 requests/s: \d+ of 60 met their objectives, (failed|undecided)", ran.err)
    assert "Highest rate: 70 requests/s" in ran.out and "97.5 % certain if stalls" in ran.out


def test_a_search_finds_where_to_start(headway: CommandLine, scripted: ScriptedServer, tmp_path: Path) -> None:
    """No probe begins after the first second, and the first takes longer."""
    ran = headway(
        "bench", "--base-url", scripted.url, *SHORT, "--find-max-rate", "--goodput", "ttft:1",
        "--max-search-seconds", 1, "--num-prompts", 40, "--report", tmp_path / "search.html",
    )  # fmt: skip
    results = [json.loads(path.read_text()) for path in ran.files(".json")]
    rates = [result["request_rate"] for result in results]
    assert "a first look" in ran.err
    assert rates and rates[0] > 20
    assert ran.code == 1 and "Nothing proven yet" in ran.out
    assert "<svg" in (tmp_path / "search.html").read_text()


def run_twice(headway: CommandLine, server: ScriptedServer, count: int, **scripts: Any) -> list[Path]:
    paths = []
    for seed in range(count):
        body = json.dumps({"script": scripts})
        ran = headway(
            "bench", "--base-url", server.url, *SHORT, "--seed", seed, "--request-rate", 400, "--num-prompts", 30,
            "--extra-body", body, "--label", f"gap {scripts['gap_s']}", "--save-detailed",
        )  # fmt: skip
        assert ran.code == 0
        paths += ran.files(".json")
    return paths


@pytest.fixture
def two_sides(headway: CommandLine, scripted: ScriptedServer) -> tuple[list[Path], list[Path]]:
    """Three runs each, that differ in the time to the first token by far more than a busy machine changes it."""
    sides = [run_twice(headway, scripted, 3, ttft_s=ttft_s, gap_s=0.001) for ttft_s in (0.005, 0.25)]
    return sides[0], sides[1]


@pytest.mark.quiet
def test_comparisons(headway: CommandLine, two_sides: tuple[list[Path], list[Path]], tmp_path: Path) -> None:
    fast, slow = two_sides
    ran = headway("bench", "--compare", fast[0], slow[0], results=False)
    assert ran.code == 0 and "TTFT" in ran.out and "worse" in ran.out
    report = tmp_path / "compared.html"
    ran = headway("bench", "--compare", fast[1], slow[1], "--report", report, results=False)
    assert ran.code == 0 and "TTFT" in report.read_text() and str(report) in ran.out
    ran = headway("bench", "--compare", *[",".join(map(str, side)) for side in two_sides], results=False)
    assert ran.code == 0 and "worse" in ran.out
    # And by what vLLM would have written of the same runs.
    of_vllm = []
    for number, path in enumerate((fast[0], slow[0])):
        content = json.loads(path.read_text())
        del content["headway"]
        of_vllm.append(tmp_path / f"vllm{number}.json")
        of_vllm[-1].write_text(json.dumps(content))
    ran = headway("bench", "--compare", *of_vllm, results=False)
    assert ran.code == 0 and "worse" in ran.out


def test_comparisons_that_cannot_be(headway: CommandLine, tmp_path: Path) -> None:
    no_json, other = tmp_path / "no.json", tmp_path / "other.json"
    no_json.write_text("{")
    other.write_text("[]")
    for a, says in ((tmp_path / "none.json", "none.json"), (no_json, "not JSON"), (other, "not a result")):
        assert says in headway("bench", "--compare", a, a, results=False).error()
    assert "--compare" in headway("bench", "--compare", no_json, results=False).error()
    thrice = ",".join([str(other)] * 3)
    assert "a file is given twice" in headway("bench", "--compare", thrice, thrice, results=False).error()
    error = headway("bench", "--compare", no_json, no_json, "--num-prompts", 3, results=False).error()
    assert "--num-prompts does not apply to --compare" in error


def test_a_server_that_is_lost_ends_a_sweep_and_keeps_what_was_measured(
    headway: CommandLine, scripted: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Session.measure

    async def lose_it_at_the_second(self: Session, workload: Workload, pace: Pace, **options: Any) -> RunResult:
        if pace.max_concurrency == 2:
            raise BenchError("all 3 warm-up requests failed")
        return await measure(self, workload, pace, **options)

    monkeypatch.setattr(Session, "measure", lose_it_at_the_second)
    report = tmp_path / "[/bold]" / "sweep.html"
    ran = headway(
        "bench", "--base-url", scripted.url, "--num-prompts", 4, "--sweep", "concurrency:1,2,3",
        "--input-len", 4, "--output-len", 2, "--report", report,
    )  # fmt: skip
    assert ran.code == 1 and report.is_file() and len(ran.files(".json")) == 1
    assert "1 at a time: Valid" in ran.out and "2 at a time: not measured: all 3 warm-up" in ran.out
    assert str(report) in ran.out


def test_a_run_ends_early_and_its_sweep_with_it(headway: CommandLine, scripted: ScriptedServer, tmp_path: Path) -> None:
    slow = ("--random-input-len", 8, "--random-output-len", 200, "--num-warmups", 0, "--num-prompts", 200)
    asked = ("bench", "--base-url", scripted.url, *slow, "--sweep", "rate:500,1000", "--stop-at", "in-flight:20")
    ran = headway(*asked)
    assert ran.code == 1 and "1,000 requests/s" not in ran.out
    assert "were in flight or waited for a place (--stop-at in-flight:20)" in ran.out
    result = ran.result()
    assert 20 <= len(result["headway"]["requests"]["sent_ns"]) < 200
    path = tmp_path / "scripts.jsonl"
    path.write_text(json.dumps({"prompt": script(fail="cut"), "output_tokens": 2}) + "\n")
    custom = ("--dataset-name", "custom", "--dataset-path", path, "--num-prompts", 50, "--num-warmups", 0)
    ran = headway("bench", "--base-url", scripted.url, *custom, "--max-concurrency", 1, "--stop-at", "failures:5")
    assert ran.code == 1 and "5 requests had failed (--stop-at failures:5)" in ran.out
    assert result["headway"]["settings"]["ended_early"] and "50 sent" in ran.out
    assert "is no limit" in headway("bench", "--base-url", scripted.url, "--stop-at", "errors:5").error()
    both = ("--stop-at", "failures:5", "--find-max-rate", "--goodput", "ttft:100")
    assert "leave one of them out" in headway("bench", "--base-url", scripted.url, *both).error()


def test_runs_are_repeated_until_their_figures_are_narrow(headway: CommandLine, scripted: ScriptedServer) -> None:
    load = (*SHORT, "--max-concurrency", 4, "--num-prompts", 24)
    ran = headway("bench", "--base-url", scripted.url, *load, "--repeat-until", "ttft:90,throughput:95")
    assert ran.code == 0 and "3 runs" in ran.out, ran.out
    results = [json.loads(path.read_text())["headway"] for path in ran.files(".json")]
    assert [each["settings"]["seed"] for each in results] == [0, 1, 2]
    assert len(results[-1]["repeats"]["throughput"]["values"]) == 3
    never = ("--repeat-until", "e2el:0.0001", "--max-repeats", 3)
    ran = headway("bench", "--base-url", scripted.url, *load, *never)
    assert ran.code == 1 and " no" in ran.out
    for wrong in ("ttft", "ttft:0", "speed:5"):
        assert "is no interval" in headway("bench", "--base-url", scripted.url, "--repeat-until", wrong).error()


def test_the_interval_over_runs_is_students() -> None:
    found = Repeated("ttft", (10.0, 11.0, 12.0), 0.25)
    assert found.half == pytest.approx(4.303 * 1.0 / 3**0.5, rel=1e-3) and found.is_narrow
    assert not Repeated("ttft", (10.0, 11.0, 12.0), 0.2).is_narrow
    assert math.isinf(Repeated("ttft", (10.0, 11.0), 0.2).half)
