"""Several client processes: their results are one, and they end together."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from pathlib import Path

import pytest

from headway.bench.client.dispatch import LoadListener, LoadMode
from headway.bench.client.load import LoadOutcome, Pace, run_load
from headway.bench.client.openai_client import OpenAIClient
from headway.bench.client.probe import probe
from headway.bench.client.processes import ClientProcesses, Share, merged, shares_of
from headway.bench.mock import MockOptions, MockServer
from headway.load.endpoint import Endpoint
from headway.load.errors import BenchError
from headway.load.measures.summary import summarise_all
from headway.load.record import RequestRecord
from headway.load.request import PlannedRequest, Prompt
from tests.bench.command_line import Subprocess, wait_until
from tests.bench.script import script
from tests.bench.scripted_server import ScriptedServer

NOBODY = Endpoint("http://127.0.0.1:9")


def planned(count: int, gap_s: float = 0.01) -> list[PlannedRequest]:
    """Single requests, and one conversation of two turns at the end."""
    made = [PlannedRequest(i, Prompt(text="a b c"), 3, 4, arrival_s=i * gap_s) for i in range(count - 1)]
    made[-1] = dataclasses.replace(made[-1], graph=count - 2, graph_size=2)
    return [*made, PlannedRequest(count - 1, Prompt(text=" d"), 1, 4, follows=count - 2, graph=count - 2, graph_size=2)]


def test_graphs_users_and_places_are_dealt_out() -> None:
    requests = planned(8)
    shares = shares_of(Share(NOBODY, False, requests, Pace(LoadMode.OPEN, 5)), 3)
    assert [[each.index for each in share.requests] for share in shares] == [[0, 3, 6, 7], [1, 4], [2, 5]]
    assert [share.pace.max_concurrency for share in shares] == [2, 2, 1]
    closed = shares_of(Share(NOBODY, False, requests, Pace(LoadMode.CLOSED, 2)), 4)
    assert [share.pace.max_concurrency for share in closed] == [1, 1]  # no process without a user
    classes = [dataclasses.replace(each, class_name="loop", arrival_s=None) for each in planned(6)[:4]]
    mixed = shares_of(Share(NOBODY, False, classes, Pace(users={"loop": 3})), 2)
    assert [share.pace.users for share in mixed] == [{"loop": 2}, {"loop": 1}]
    assert [[each.index for each in share.requests] for share in mixed] == [[0, 2, 3], [1]]


async def measured(options: MockOptions, requests: list[PlannedRequest], count: int) -> LoadOutcome:
    """What `count` processes, or this one, see of a mock server."""
    async with MockServer(options).listening() as url:
        endpoint = (await probe(Endpoint(url))).endpoint
        if count == 1:
            async with OpenAIClient(endpoint, keep_text=True) as client:
                return await run_load(client, requests)
        whole = Share(endpoint, True, requests, Pace())
        async with ClientProcesses(shares_of(whole, count), LoadListener()) as processes:
            return await processes.go(asyncio.Event())


async def test_figures_are_those_of_one_process() -> None:
    """Of a server that answers at known times; and figures of merged records are those of the records, exactly."""
    options, requests = MockOptions(port=0, ttft_ms="60", itl_ms="20"), planned(24)
    one, several = [await measured(options, requests, count) for count in (1, 3)]
    for outcome in (one, several):
        assert [record.index for record in outcome.records] == list(range(24))
        assert all(record.ok and record.output_tokens == 4 for record in outcome.records)
        due = [record.scheduled_ns - outcome.began_ns for record in outcome.records[:23]]
        assert due == [i * 10_000_000 for i in range(23)]  # of one clock, whoever sent them
        assert outcome.records[23].scheduled_ns == outcome.records[22].end_ns
        found = summarise_all(outcome)[0]
        assert (found.completed, found.tokens["output"]) == (24, 96) and found.graphs is not None
        assert 60 <= found.from_send["ttft_ms"].minimum < 200 and 15 <= found.from_send["tpot_ms"].mean < 100
    parts = [dataclasses.replace(several, records=several.records[start::3]) for start in range(3)]
    again, whole = summarise_all(merged(parts))[0], summarise_all(several)[0]
    without = {metric: dataclasses.replace(each, percentiles=()) for metric, each in whole.from_schedule.items()}
    for metric, each in again.from_schedule.items():
        assert dataclasses.replace(each, percentiles=()) == without[metric]
        values = [(claim.value, claim.low, claim.high) for claim in each.percentiles]
        assert values == [(claim.value, claim.low, claim.high) for claim in whole.from_schedule[metric].percentiles]
    assert (again.rates, again.graphs) == (whole.rates, whole.graphs)


async def test_a_view_hears_of_all_and_a_process_that_dies_ends_the_run_in_a_line() -> None:
    class Counting(LoadListener):
        started_, ended_ = 0, 0

        def started(self, record: RequestRecord) -> None:
            self.started_ += 1

        def ended(self, record: RequestRecord) -> None:
            self.ended_ += record.ok

    listener = Counting()
    async with MockServer(MockOptions(port=0, ttft_ms="1", itl_ms="1")).listening() as url:
        endpoint = (await probe(Endpoint(url))).endpoint
        whole = Share(endpoint, True, planned(12), Pace())
        async with ClientProcesses(shares_of(whole, 2), listener) as processes:
            await processes.go(asyncio.Event())
        assert (listener.started_, listener.ended_) == (12, 12)
        slow = Share(endpoint, True, planned(12, gap_s=5.0), Pace())
        async with ClientProcesses(shares_of(slow, 2), listener) as processes:
            os.kill(processes.pids[1], signal.SIGKILL)
            with pytest.raises(BenchError, match=r"client process \d of 2 ended with code -9: it said nothing"):
                await processes.go(asyncio.Event())
        pids = processes.pids
    assert all(not Path(f"/proc/{pid}").exists() for pid in pids)


def test_an_interrupt_ends_all_and_leaves_a_whole_file(tmp_path: Path) -> None:
    with ScriptedServer(kind="vllm", script=script(ttft_s=0.01, gap_s=0.002), max_model_len=4096) as server:
        ran = Subprocess(
            tmp_path / "out", "bench", "--base-url", server.url, "--client-processes", 2, "--request-rate", 40,
            "--num-prompts", 4000, "--random-input-len", 8, "--random-output-len", 3, "--num-warmups", 0,
        )  # fmt: skip
        wait_until(lambda: len(server.logs()["requests"]) > 40)
        ran.send(signal.SIGINT)
        ended = ran.ended()
    assert ended.code == 130, ended.err
    result = ended.result()
    assert ended.settings()["client_processes"] == 2 and result["headway"]["interrupted"]
    assert result["completed"] >= 30 and ended.settings()["never_due"] > 3000
    indices = result["headway"]["requests"]["index"]
    assert indices == sorted(indices) and {index % 2 for index in indices} == {0, 1}
