"""How a run ends: when its time is up, when it is stopped, and when something in it is broken."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

import pytest

from headway.bench.client.load import LoadListener, LoadMode, LoadOutcome, LoadStage, Pace, run_load
from headway.bench.client.openai_client import OpenAIClient
from headway.load.endpoint import Endpoint
from headway.load.measures.slo import missed_objectives
from headway.load.record import RequestRecord
from headway.load.request import PlannedRequest, Prompt
from tests.bench.client.senders import FakeClient, Listening, Run, at, indices, kinds, turns
from tests.bench.script import script
from tests.bench.scripted_server import ScriptedServer

# --- time is up, or it is stopped ------------------------------------------------------------------------


def test_after_the_duration_nothing_is_sent_and_answers_are_awaited(run: Run) -> None:
    client = FakeClient(delay_s=0.1)
    listener = Listening()
    outcome = run(run_load(client, at(0.0, 0.01, 0.05, 60.0), Pace(duration_s=0.05), listener=listener))
    assert client.sent == [0, 1] and indices(outcome) == [0, 1] and outcome.never_due == 2
    assert all(record.ok for record in outcome.records) and not outcome.interrupted
    assert listener.stages == [LoadStage.LOAD, LoadStage.DRAIN, LoadStage.DONE]


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", [LoadMode.CLOSED, LoadMode.OPEN])
@pytest.mark.parametrize("client", [FakeClient(), FakeClient(delay_s=0.1, failing=(0,))])
def test_the_duration_ends_conversations_too(run: Run, mode: LoadMode, client: FakeClient) -> None:
    client.may_answer = None
    outcome = run(run_load(client, turns(3, think_s=30.0), Pace(mode, 1, duration_s=0.05)))
    assert indices(outcome) == [0] and outcome.never_due == 2


def test_draining_has_an_end(run: Run) -> None:
    client = FakeClient(answer_after=99)
    outcome = run(run_load(client, at(0.0, 0.0), Pace(duration_s=0.03, drain_s=0.02)))
    assert kinds(outcome) == {0: "drain_limit", 1: "drain_limit"} and outcome.abandoned_in_flight == 2
    assert client.now == 0 and not outcome.interrupted


class Hung(FakeClient):
    """Answers all but some, which never end."""

    def __init__(self, hung: tuple[int, ...], delay_s: float = 0.0) -> None:
        super().__init__(delay_s=delay_s)
        self.hung = hung

    async def send(self, planned: PlannedRequest, record: RequestRecord, prompt: Prompt | None = None) -> None:
        self.may_answer = asyncio.Event()
        self.answer_after = 99 if planned.index in self.hung else 0
        await super().send(planned, record, prompt)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("options", "failed", "never_due"),
    [
        ({}, {1}, 0),
        ({"mode": LoadMode.CLOSED, "max_concurrency": 1}, {1}, 1),  # its only user waits for ever
        ({"max_concurrency": 1}, {1, 2}, 0),  # the third is due and gets no place
    ],
)
def test_a_hung_stream_ends_with_the_drain_limit(
    run: Run, options: dict[str, Any], failed: set[int], never_due: int
) -> None:
    outcome = run(run_load(Hung((1,)), at(0.0, 0.0, 0.01), Pace(drain_s=0.1, **options)))
    assert kinds(outcome) == dict.fromkeys(failed, "drain_limit") and outcome.never_due == never_due
    assert all(record.ok for record in outcome.records if record.index not in failed) and not outcome.interrupted
    failure = outcome.records[1].failure
    assert failure is not None and failure.message.startswith("drain limit: ") and "for 0.1 s" in failure.message
    waited_s = (outcome.records[1].end_ns - outcome.began_ns) / 1e9
    assert waited_s >= 0.1
    assert missed_objectives(outcome.records, {"": {"ttft": 1e6}})[1] == ("failed",)


def test_the_drain_limit_waits_for_who_is_still_to_be_sent_and_as_long_as_requests_end(run: Run) -> None:
    # Ten of them one after the other take far longer than the limit, and so does the pause before the last.
    outcome = run(run_load(FakeClient(delay_s=0.04), at(*[0.0] * 9, 0.8), Pace(max_concurrency=1, drain_s=0.2)))
    assert len(outcome.records) == 10 and not kinds(outcome)


def test_stopping_ends_the_wait_for_the_drain_limit(run: Run) -> None:
    async def measure() -> LoadOutcome:
        listener = Listening(stop_after_starts=2, stop_after_ends=1)
        return await run_load(
            Hung((1,)), at(0.0, 0.01), Pace(drain_s=600, grace_s=0.05), stop=listener.stop, listener=listener
        )

    outcome = run(measure())
    assert outcome.interrupted and kinds(outcome) == {1: "abandoned"}


def test_who_was_due_and_had_no_place_when_the_time_was_up_has_failed(run: Run) -> None:
    client = FakeClient(delay_s=0.1)
    outcome = run(run_load(client, at(0.0, 0.0, 0.01, 50.0), Pace(max_concurrency=1, duration_s=0.05)))
    assert client.sent == [0] and kinds(outcome) == {1: "abandoned", 2: "abandoned"} and outcome.never_due == 1
    assert outcome.records[2].sent_ns == 0 and outcome.records[2].scheduled_ns == outcome.began_ns + 10_000_000
    assert outcome.waited_for_place == 2 and outcome.longest_wait_ms >= 45 and len(outcome.client.start_lag_ms) == 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("swallows", [False, True])
def test_stopping_keeps_what_was_measured(run: Run, swallows: bool) -> None:
    class HalfStuck(FakeClient):
        async def send(self, planned: PlannedRequest, record: RequestRecord, prompt: Prompt | None = None) -> None:
            self.answer_after = 0 if planned.index == 0 else 99
            try:
                if planned.index:
                    self.may_answer = asyncio.Event()
                await super().send(planned, record, prompt)
            except asyncio.CancelledError:
                if not swallows:
                    raise

    async def measure() -> LoadOutcome:
        listener = Listening(stop_after_starts=3, stop_after_ends=1)
        outcome = await run_load(
            HalfStuck(), at(0.0, 0.02, 0.04, 60.0), Pace(grace_s=0.05), stop=listener.stop, listener=listener
        )
        assert sorted(listener.starts) == sorted(listener.ends) == [0, 1, 2]
        return outcome

    outcome = run(measure())
    assert outcome.interrupted and outcome.never_due == 1 and outcome.abandoned_in_flight == 2
    assert outcome.records[0].ok and kinds(outcome) == {1: "abandoned", 2: "abandoned"}
    assert all(record.end_ns for record in outcome.records) and outcome.ended_ns >= outcome.records[2].end_ns


def test_what_ends_within_the_grace_is_kept_and_followed_by_nothing(run: Run) -> None:
    async def measure() -> LoadOutcome:
        listener = Listening(stop_after_starts=1)
        return await run_load(
            FakeClient(delay_s=0.02), turns(2), Pace(grace_s=30), stop=listener.stop, listener=listener
        )

    outcome = run(measure())
    assert indices(outcome) == [0] and outcome.records[0].ok
    assert outcome.interrupted and outcome.never_due == 1 and outcome.abandoned_in_flight == 0


@pytest.mark.parametrize(
    ("requests", "options"),
    [
        (at(0.0, 0.0), {"mode": LoadMode.CLOSED, "max_concurrency": 1}),  # its user would go on
        (at(0.0, 0.0), {"max_concurrency": 1}),  # its place would be taken
        (turns(2), {}),
        (turns(2, think_s=0.001), {}),
    ],
)
def test_nothing_is_sent_in_the_turn_of_the_loop_that_stops_it(
    run: Run, requests: list[PlannedRequest], options: dict[str, Any]
) -> None:
    async def measure() -> LoadOutcome:
        listener, client = Listening(stop_after_starts=1, stop_after_ends=1), FakeClient()
        outcome = await run_load(client, requests, Pace(**options), stop=listener.stop, listener=listener)
        assert client.sent == [0]
        return outcome

    outcome = run(measure())
    assert outcome.interrupted and outcome.records[0].ok


def test_nothing_is_sent_within_the_grace(run: Run) -> None:
    async def measure() -> LoadOutcome:
        listener = Listening(stop_after_starts=1)
        client = FakeClient(delay_s=0.15)
        outcome = await run_load(client, at(0.0, 0.05), Pace(grace_s=30), stop=listener.stop, listener=listener)
        assert client.sent == [0]
        return outcome

    outcome = run(measure())
    assert outcome.interrupted and outcome.never_due == 1 and outcome.records[0].ok


def test_a_request_that_waits_for_a_place_when_the_run_is_stopped_was_never_answered(run: Run) -> None:
    async def measure() -> LoadOutcome:
        listener = Listening(stop_after_starts=1)
        outcome = await run_load(
            FakeClient(answer_after=99),
            at(0.0, 0.0),
            Pace(max_concurrency=1, grace_s=0),
            stop=listener.stop,
            listener=listener,
        )
        assert listener.most_waiting == 1
        return outcome

    outcome = run(measure())
    assert kinds(outcome) == {0: "abandoned", 1: "abandoned"} and outcome.abandoned_in_flight == 1


def test_stopping_during_the_warm_up_measures_nothing(run: Run) -> None:
    async def measure() -> LoadOutcome:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(0.02, stop.set)
        client = FakeClient(answer_after=99)
        outcome = await run_load(client, at(0.0), warm_ups=at(0.0, 0.0), stop=stop)
        assert client.now == 0
        return outcome

    outcome = run(measure())
    assert outcome.interrupted and outcome.records == [] and outcome.never_due == 1 and outcome.gave_up is None


def test_an_empty_workload_is_done_at_once(run: Run) -> None:
    outcome = run(run_load(FakeClient(), []))
    assert outcome.records == [] and outcome.began_ns == outcome.ended_ns and not outcome.interrupted


# --- surroundings ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("thawed")
def test_the_collector_is_off_while_it_measures_and_as_before_afterwards(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "collect", lambda: None)  # which would look through what all tests have imported
    assert gc.isenabled()
    client = FakeClient()
    run(run_load(client, at(0.0)))
    assert client.collector == {False} and gc.isenabled() and gc.get_freeze_count() == 0
    gc.disable()
    try:
        run(run_load(client, at(0.0)))
        assert not gc.isenabled()
    finally:
        gc.enable()
    gc.freeze()
    run(run_load(client, at(0.0)))
    assert gc.get_freeze_count() > 0


class Broken(Exception):
    pass


class BrokenClient(FakeClient):
    async def send(self, planned: PlannedRequest, record: RequestRecord, prompt: Prompt | None = None) -> None:
        if planned.index == 1:
            raise Broken
        await super().send(planned, record, prompt)


class BrokenListener(LoadListener):
    def __init__(self, when: str) -> None:
        self.when = when

    def started(self, record: RequestRecord) -> None:
        if self.when == "started":
            raise Broken

    def ended(self, record: RequestRecord) -> None:
        if self.when == "ended":
            raise Broken


@pytest.mark.parametrize(
    ("client", "listener"),
    [
        (BrokenClient(answer_after=99), LoadListener()),
        (FakeClient(), BrokenListener("started")),
        (FakeClient(), BrokenListener("ended")),
    ],
)
def test_a_bug_ends_the_run_and_leaves_nothing_behind(run: Run, client: FakeClient, listener: LoadListener) -> None:
    client.may_answer = None

    async def measure() -> LoadOutcome:
        with pytest.raises(Broken):
            await run_load(client, at(0.0, 0.0, 0.0, 60.0), listener=listener)
        assert asyncio.all_tasks() == {asyncio.current_task()} and client.now == 0
        return await run_load(FakeClient(), [])

    run(measure())


def test_cancelling_the_run_cancels_its_requests(run: Run) -> None:
    async def measure() -> LoadOutcome:
        client = FakeClient(answer_after=99)
        task = asyncio.create_task(run_load(client, at(0.0, 0.0, 60.0)))
        while client.now < 2:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.now == 0 and gc.isenabled()
        return await run_load(FakeClient(), [])

    run(measure())


# --- with the real client -------------------------------------------------------------------------------


async def test_a_stopped_run_leaves_no_stream_behind_at_the_server(server: ScriptedServer) -> None:
    prompts = [script(id="done"), script(id="stuck", fail="hang", fail_at=2)]
    requests = [PlannedRequest(i, Prompt(text=each), 1, 4, arrival_s=0.01 * i) for i, each in enumerate(prompts)]
    requests.append(PlannedRequest(2, Prompt(text="never"), 1, 4, arrival_s=600.0))
    listener = Listening(stop_after_starts=2, stop_after_ends=1)
    async with OpenAIClient(Endpoint(server.url, model="scripted")) as client:
        outcome = await run_load(client, requests, Pace(grace_s=0.1), stop=listener.stop, listener=listener)
    assert outcome.interrupted and outcome.never_due == 1
    assert outcome.records[0].ok and kinds(outcome) == {1: "abandoned"}
    deadline = time.monotonic() + 10
    while "left_ns" not in server.log("stuck"):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
