"""A server that stands still for a second: which of the latencies show it, and which hide it.

Three loads meet the same freeze: an open loop, an open loop with room for one request, and one user of a closed loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import uvloop

from headway.bench.client.load import LoadMode, LoadOutcome, Pace, run_load
from headway.bench.client.openai_client import OpenAIClient
from headway.load.endpoint import Endpoint
from headway.load.record import RequestRecord
from headway.load.request import PlannedRequest, Prompt
from tests.bench.script import script
from tests.bench.scripted_server import ScriptedServer

RATE = 100.0  # requests/s
COUNT = 200
FREEZE_AT_S, FREEZE_S = 0.5, 1.0


@dataclass
class Seen:
    freeze: tuple[int, int]
    first_sent_ns: dict[str, int]
    open: LoadOutcome
    capped: LoadOutcome
    closed: LoadOutcome


def look() -> Seen:
    async def measure(server: ScriptedServer) -> list[LoadOutcome]:
        async with OpenAIClient(Endpoint(server.url, model="scripted")) as client:
            server.freeze(FREEZE_AT_S, FREEZE_S)
            return await asyncio.gather(
                run_load(client, workload("open")),
                run_load(client, workload("capped"), Pace(max_concurrency=1)),
                run_load(client, workload("closed"), Pace(LoadMode.CLOSED, 1)),
            )

    with ScriptedServer() as server:
        outcomes = uvloop.run(measure(server))
        logs = server.logs()
    ((began, ended),) = logs["freezes"]
    return Seen((began, ended), {name: log["sent_ns"][0] for name, log in logs["requests"].items()}, *outcomes)


def workload(name: str) -> list[PlannedRequest]:
    return [
        PlannedRequest(i, Prompt(text=script(id=f"{name}{i}", ttft_s=0.005, gap_s=0.001)), 10, 2, arrival_s=i / RATE)
        for i in range(COUNT)
    ]


def ttft_s(records: Sequence[RequestRecord], since: str) -> list[float]:
    assert all(record.ok for record in records) and len(records) == COUNT
    return [(record.first_token_ns - getattr(record, since)) / 1e9 for record in records]


def p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99, method="inverted_cdf"))


@pytest.mark.quiet
def test_an_open_loop_shows_the_freeze_and_others_hide_it() -> None:
    """One test, as it would wait again for all other workers before each."""
    seen = look()
    check_the_open_loop(seen)
    check_the_server_s_log(seen)
    check_one_place(seen)
    check_the_closed_loop(seen)


def check_the_open_loop(seen: Seen) -> None:
    """It shows the freeze."""
    began, ended = seen.freeze
    due_in_freeze = [record for record in seen.open.records if began < record.scheduled_ns < ended]
    assert len(due_in_freeze) >= 0.9 * FREEZE_S * RATE
    assert all(record.first_token_ns > ended for record in due_in_freeze)
    # The third worst of 200 requests, one every 10 ms, was due 20 to 30 ms after the freeze began.
    assert p99(ttft_s(seen.open.records, "scheduled_ns")) > FREEZE_S - 0.1
    assert seen.open.waited_for_place == 0


def check_the_server_s_log(seen: Seen) -> None:
    """It says the same, on the same clock: from when a request was due to when its first token was sent."""
    said = [(seen.first_sent_ns[f"open{r.index}"] - r.scheduled_ns) / 1e9 for r in seen.open.records]
    measured = ttft_s(seen.open.records, "scheduled_ns")
    late_s = max(0.005, max(seen.open.client.loop_lag_ms) / 1e3)  # the client may have had no core
    assert all(ours - theirs >= 0 for ours, theirs in zip(measured, said, strict=True))
    assert abs(p99(measured) - p99(said)) < 0.01 + late_s


def check_one_place(seen: Seen) -> None:
    """There the latency from the send hides the freeze."""
    records = seen.capped.records
    from_schedule, from_send = ttft_s(records, "scheduled_ns"), ttft_s(records, "sent_ns")
    assert p99(from_schedule) > FREEZE_S - 0.1
    assert sum(value > 0.9 * FREEZE_S for value in from_send) <= 1
    assert p99(from_send) < FREEZE_S / 4
    assert seen.capped.waited_for_place >= 0.9 * FREEZE_S * RATE
    assert seen.capped.longest_wait_ms > 1000 * (FREEZE_S - 0.1)


def check_the_closed_loop(seen: Seen) -> None:
    """It hides it altogether: one request meets it, before its first token or between its two, as it comes."""
    records = seen.closed.records
    for since in ("scheduled_ns", "sent_ns"):
        whole = [(record.end_ns - getattr(record, since)) / 1e9 for record in records]
        assert sum(seconds > FREEZE_S - 0.1 for seconds in whole) == 1
        assert p99(ttft_s(records, since)) < FREEZE_S / 4
