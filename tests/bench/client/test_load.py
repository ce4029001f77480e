"""The load: what is sent when, in open and closed loop, in conversations and to warm up."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest

from headway.bench.client.conversations import continued
from headway.bench.client.load import LoadListener, LoadMode, Pace, run_load
from headway.bench.client.openai_client import OpenAIClient
from headway.load.endpoint import Endpoint
from headway.load.errors import BenchError
from headway.load.measures.summary import summarise_all
from headway.load.record import FailureKind, RequestRecord
from headway.load.request import PlannedRequest, Prompt
from tests.bench.client.senders import FakeClient, Listening, Run, at, indices, kinds, turns
from tests.bench.script import script
from tests.bench.scripted_server import ScriptedServer

# --- open loop ------------------------------------------------------------------------------------------


def test_an_open_loop_waits_for_no_answer(run: Run) -> None:
    client = FakeClient(answer_after=20)  # nobody is answered before the last one is sent
    outcome = run(run_load(client, at(*(i * 0.002 for i in range(20)))))
    assert indices(outcome) == list(range(20)) and client.most == 20
    assert [record.scheduled_ns - outcome.began_ns for record in outcome.records] == [i * 2_000_000 for i in range(20)]
    assert all(record.sent_ns >= record.scheduled_ns for record in outcome.records)
    assert outcome.ended_ns == max(record.end_ns for record in outcome.records)
    assert not outcome.interrupted and outcome.never_due == outcome.waited_for_place == 0
    assert len(outcome.client.start_lag_ms) == 20


def test_requests_are_sent_in_order_of_their_times_whatever_their_order_in_the_workload(run: Run) -> None:
    client = FakeClient()
    outcome = run(run_load(client, at(0.03, 0.0, 0.02, 0.01, 0.01)))
    assert client.sent == [1, 3, 4, 2, 0] and indices(outcome) == [0, 1, 2, 3, 4]


def test_what_is_sent_late_stays_late_and_the_run_says_so(run: Run) -> None:
    class Blocking(LoadListener):
        def started(self, record: RequestRecord) -> None:
            if record.index == 5:
                time.sleep(0.15)

    outcome = run(run_load(FakeClient(delay_s=0.001), at(*(i * 0.004 for i in range(50))), listener=Blocking()))
    lags = [(record.sent_ns - record.scheduled_ns) / 1e6 for record in outcome.records]
    # Due 4 ms into the stall, it was sent at its end at the earliest.
    assert lags[6] > 140 and outcome.client.start_lag_ms[6] == pytest.approx(lags[6], abs=1e-3)
    assert outcome.records[6].scheduled_ns == outcome.began_ns + 24_000_000
    assert outcome.client.bound
    assert outcome.client.reasons[0].startswith("the load was not offered: requests were sent up to ")
    assert max(outcome.client.loop_lag_ms) > 100


def test_a_capped_open_loop_keeps_the_schedule_and_counts_who_waited(run: Run) -> None:
    client = FakeClient(delay_s=0.02)
    outcome = run(run_load(client, at(*[0.0] * 6), Pace(max_concurrency=2)))
    assert client.most == 2 and client.sent == [0, 1, 2, 3, 4, 5]
    assert outcome.waited_for_place == 4
    assert {record.scheduled_ns for record in outcome.records} == {outcome.began_ns}
    waits = [(record.sent_ns - record.scheduled_ns) / 1e6 for record in outcome.records]
    assert waits[5] > 35 and 35 < outcome.longest_wait_ms <= waits[5]
    # That wait is not the client's fault.
    assert outcome.client.start_lag_ms[5] <= waits[5] - outcome.longest_wait_ms + 1e-3


# --- closed loop ----------------------------------------------------------------------------------------


def test_users_of_a_closed_loop_send_again_when_they_have_their_answer(run: Run) -> None:
    client = FakeClient(delay_s=0.002)
    outcome = run(run_load(client, at(*[0.0] * 12), Pace(LoadMode.CLOSED, 3)))
    assert client.most == 3 and client.sent == list(range(12))
    first, later = outcome.records[:3], outcome.records[3:]
    assert all(record.scheduled_ns == outcome.began_ns for record in first)
    ends = sorted(record.end_ns for record in outcome.records)
    assert sorted(record.scheduled_ns for record in later) == ends[:9]


def test_a_user_of_a_closed_loop_ends_its_conversation_before_the_next(run: Run) -> None:
    client = FakeClient()
    requests = turns(3, think_s=0.01, arrival_s=None) + turns(2, first=3, arrival_s=None)
    outcome = run(run_load(client, requests, Pace(LoadMode.CLOSED, 1)))
    assert client.sent == [0, 1, 2, 3, 4] and client.most == 1
    ends = [record.end_ns for record in outcome.records]
    scheduled = [record.scheduled_ns for record in outcome.records]
    assert scheduled[1:] == [ends[0] + 10_000_000, ends[1] + 10_000_000, ends[2], ends[3]]


def test_a_class_may_be_a_closed_loop_beside_an_open_one(run: Run) -> None:
    client = FakeClient(delay_s=0.005)
    offline = [PlannedRequest(i, Prompt(text=str(i)), 1, 8, class_name="offline") for i in range(4, 16)]
    outcome = run(run_load(client, [*at(0.0, 0.01, 0.01, 0.02), *offline], Pace(users={"offline": 2})))
    open_loop, closed = outcome.records[:4], outcome.records[4:]
    assert [record.scheduled_ns - outcome.began_ns for record in open_loop] == [0, 10_000_000, 10_000_000, 20_000_000]
    ends = sorted(record.end_ns for record in closed)
    assert sorted(record.scheduled_ns for record in closed) == [outcome.began_ns] * 2 + ends[:10]


def test_a_place_in_an_open_loop_is_none_in_the_closed_one(run: Run) -> None:
    client = FakeClient(answer_after=4)
    offline = [PlannedRequest(i, Prompt(text=str(i)), 1, 8, class_name="offline") for i in range(1, 4)]
    outcome = run(run_load(client, [*at(0.0), *offline], Pace(max_concurrency=1, users={"offline": 3})))
    assert indices(outcome) == [0, 1, 2, 3] and client.most == 4


# --- probes ---------------------------------------------------------------------------------------------


def endless(gap_s: float) -> Iterator[PlannedRequest]:
    return (PlannedRequest(i, Prompt(text="probe"), 1, 1, arrival_s=i * gap_s) for i in itertools.count())


def test_probes_go_beside_the_load_and_end_with_it(run: Run) -> None:
    client, told = FakeClient(delay_s=0.004), Listening()
    loop = run_load(client, at(*[0.0] * 8), Pace(LoadMode.CLOSED, 1), probes=endless(0.003), listener=told)
    outcome = run(loop)
    assert indices(outcome) == list(range(8)) and told.starts == told.ends == list(range(8))
    probes = outcome.probes
    assert len(probes) >= 5 and [probe.index for probe in probes] == list(range(len(probes)))
    assert all(probe.ok and probe.sent_ns >= probe.scheduled_ns for probe in probes)
    assert {later.scheduled_ns - probe.scheduled_ns for probe, later in itertools.pairwise(probes)} == {3_000_000}
    assert len(outcome.client.start_lag_ms) == 8 and outcome.never_due == 0


def test_a_probe_that_hangs_does_not_hold_up_the_end(run: Run) -> None:
    class Hanging(FakeClient):
        async def send(self, planned: PlannedRequest, record: RequestRecord, prompt: Prompt | None = None) -> None:
            if planned.prompt.text == "probe":
                await asyncio.Event().wait()
            await super().send(planned, record, prompt)

    outcome = run(run_load(Hanging(delay_s=0.01), at(0.0, 0.0), Pace(grace_s=0.01), probes=endless(0.001)))
    assert len(outcome.records) == 2 and outcome.probes and not any(probe.ok for probe in outcome.probes)


def test_what_is_broken_in_a_probe_ends_the_run(run: Run) -> None:
    class Broken(FakeClient):
        async def send(self, planned: PlannedRequest, record: RequestRecord, prompt: Prompt | None = None) -> None:
            if planned.prompt.text == "probe":
                raise RuntimeError("broken")
            await super().send(planned, record, prompt)

    with pytest.raises(RuntimeError, match="broken"):
        run(run_load(Broken(delay_s=0.005), at(0.0), probes=endless(0.001)))


# --- clients that cancel --------------------------------------------------------------------------------


async def test_a_client_that_cancels_leaves_its_request_and_its_conversation(server: ScriptedServer) -> None:
    endpoint = Endpoint(server.url, model="scripted", api="chat")
    hangs, fine = Prompt(text=script(id="hangs", chunks=9, fail="hang", fail_at=2)), Prompt(text=script(id="fine"))
    requests = [
        PlannedRequest(0, hangs, 1, 9, arrival_s=0.0, cancel_after_s=0.15),
        PlannedRequest(1, Prompt(text="And then?"), 1, 2, follows=0),
        PlannedRequest(2, fine, 1, 2, arrival_s=0.0, cancel_after_s=30.0),
        PlannedRequest(3, fine, 1, 2, arrival_s=0.0, headers={"X-Tenant": "a"}),
    ]
    async with OpenAIClient(endpoint, keep_text=True) as client:
        outcome = await run_load(client, requests, as_messages=True, sockets=client.busy_sockets)
    given_up, later, patient, _ = outcome.records
    assert kinds(outcome) == {0: "cancelled", 1: "cancelled"} and patient.ok
    assert given_up.end_ns - given_up.sent_ns >= 149_000_000 and len(given_up.chunk_ns) == 2
    assert given_up.failure is not None and given_up.failure.message.startswith("its client gave it up 0.15 s")
    assert later.sent_ns == 0 and not (later.failed or given_up.failed)


# --- later turns ----------------------------------------------------------------------------------------


def test_a_later_turn_is_due_after_the_answer_and_brings_what_was_said(run: Run) -> None:
    client = FakeClient()
    outcome = run(run_load(client, turns(3, think_s=0.005)))
    ends = [record.end_ns for record in outcome.records]
    assert [record.scheduled_ns for record in outcome.records[1:]] == [ends[0] + 5_000_000, ends[1] + 5_000_000]
    assert client.prompts[1] == Prompt(text="turn 0;answer 0;turn 1;")
    assert client.prompts[2] == Prompt(text="turn 0;answer 0;turn 1;answer 1;turn 2;")


def test_a_conversation_in_messages(run: Run) -> None:
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
    requests = [
        PlannedRequest(0, Prompt(messages=(system, user)), 1, 8, arrival_s=0.0),
        PlannedRequest(1, Prompt(text="And then?"), 1, 8, follows=0),
    ]
    client = FakeClient()
    run(run_load(client, requests))
    answer, then = {"role": "assistant", "content": "answer 0"}, {"role": "user", "content": "And then?"}
    assert client.prompts[1] == Prompt(messages=(system, user, answer, then))


@pytest.mark.parametrize("mode", [LoadMode.OPEN, LoadMode.CLOSED])
def test_a_failed_turn_ends_its_conversation_visibly(run: Run, mode: LoadMode) -> None:
    client = FakeClient(failing=(1,))
    requests = turns(4) + turns(2, first=4)
    outcome = run(run_load(client, requests, Pace(mode, 2)))
    assert sorted(client.sent) == [0, 1, 4, 5]
    assert kinds(outcome) == {1: "server_error", 2: "abandoned", 3: "abandoned"}
    given_up = outcome.records[3]
    assert given_up.failure is not None and "request 1" in given_up.failure.message
    assert given_up.sent_ns == 0 and given_up.scheduled_ns == outcome.records[1].end_ns and given_up.end_ns
    assert outcome.never_due == 0 and not outcome.interrupted


def graph(*rows: tuple[int | None, tuple[int, ...], float], arrival_s: float | None = 0.0) -> list[PlannedRequest]:
    """Requests of one graph: what each follows, what else it waits for, and how long it thinks."""
    return [
        PlannedRequest(index, Prompt(text=f"{index};"), 1, 8, follows=follows, after=after, think_s=think_s,
                       arrival_s=None if follows is not None or after else arrival_s, graph=0, graph_size=len(rows))
        for index, (follows, after, think_s) in enumerate(rows)
    ]  # fmt: skip


# 0 starts 1 and 2, which run beside each other; 3 goes on from 0 when both are done; 4 goes on from 3.
DIAMOND = ((None, (), 0.0), (None, (0,), 0.0), (None, (0,), 0.02), (0, (1, 2), 0.01), (3, (), 0.0))


@pytest.mark.parametrize("mode", [LoadMode.OPEN, LoadMode.CLOSED])
def test_a_request_of_a_graph_waits_for_all_that_it_needs_and_its_tool(run: Run, mode: LoadMode) -> None:
    client = FakeClient(delay_s=0.005)
    requests = graph(*DIAMOND)
    outcome = run(run_load(client, [*requests, PlannedRequest(5, Prompt(text="5"), 1, 8)], Pace(mode, 1))
                  if mode is LoadMode.CLOSED else run_load(client, requests))  # fmt: skip
    ends = {record.index: record.end_ns for record in outcome.records}
    due = {record.index: record.scheduled_ns for record in outcome.records}
    assert (due[1], due[2]) == (ends[0], ends[0] + 20_000_000)
    assert due[3] == max(ends[1], ends[2]) + 10_000_000 and due[4] == ends[3]
    assert client.prompts[3] == Prompt(text="0;answer 03;") and client.prompts[1] == Prompt(text="1;")
    assert client.prompts[4] == Prompt(text="0;answer 03;answer 34;")
    if mode is LoadMode.CLOSED:  # the only user begins the next one when the whole graph is done
        assert due[5] == ends[4]
    (found,) = [each.graphs for each in summarise_all(outcome)[:1]]
    assert found is not None and (found.complete, found.total) == (1, 1) and found.makespan_ms is not None
    assert found.makespan_ms.mean == pytest.approx((outcome.records[4].last_token_ns - due[0]) / 1e6)
    last = {record.index: record.last_token_ns for record in outcome.records}
    served = [last[0] - due[0], last[1] - due[1], last[2] - due[2], last[3] - due[3], last[4] - due[4]]
    both = max(0, last[1] - due[2])  # of the two side by side
    assert found.served_ms is not None and found.served_ms.mean == pytest.approx((sum(served[:5]) - both) / 1e6)


def test_a_failure_ends_what_waits_for_it_by_name_and_nothing_else(run: Run) -> None:
    client = FakeClient(failing=(1,))
    outcome = run(run_load(client, [*graph(*DIAMOND), *at(0.0, 0.0)[1:]]))
    assert sorted(set(client.sent)) == [0, 1, 2]
    assert kinds(outcome) == {1: "server_error", 3: "abandoned", 4: "abandoned"}
    for lost in outcome.records[3:]:
        if lost.failure and lost.index > 1:
            assert lost.failure.message == "request 1, which it waited for, failed (server_error)"
    found = summarise_all(outcome)[0].graphs
    assert found is not None and (found.complete, found.makespan_ms) == (0, None)


def test_results_of_tools_belong_to_the_calls_that_came() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": "find", "arguments": "{}"}}

    asked = Prompt(messages=({"role": "user", "content": "Find it."},))
    results = Prompt(messages=tuple({"role": "tool", "tool_call_id": f"old {n}", "content": str(n)} for n in range(2)))
    found = continued(asked, "Well.", results, True, [call("a"), call("b"), call("c")]).messages or ()
    assert found[1] == {"role": "assistant", "content": "Well.", "tool_calls": [call("a"), call("b")]}
    assert [each["tool_call_id"] for each in found[2:]] == ["a", "b"]
    none = continued(asked, "Well.", results, True).messages or ()
    assert "tool_calls" not in none[1] and none[2:] == tuple({"role": "user", "content": str(n)} for n in range(2))
    more = continued(asked, "Well.", Prompt(text="And?"), True, [call("a")]).messages or ()
    assert more[1:] == ({"role": "assistant", "content": "Well."}, {"role": "user", "content": "And?"})


def test_a_client_that_keeps_no_text_is_found_out(run: Run) -> None:
    class Forgetful(FakeClient):
        async def send(self, planned: PlannedRequest, record: RequestRecord, prompt: Prompt | None = None) -> None:
            await super().send(planned, record, prompt)
            record.text = None

    with pytest.raises(RuntimeError, match="did not keep the answer to request 0"):
        run(run_load(Forgetful(), turns(2)))


# --- warm-up --------------------------------------------------------------------------------------------


def test_warm_ups_come_first_and_are_not_recorded(run: Run) -> None:
    client = FakeClient(failing=(101,))
    warm_ups = [PlannedRequest(index, Prompt(text="w"), 1, 8) for index in (100, 101, 102)]
    outcome = run(run_load(client, at(0.0, 0.0), warm_ups=warm_ups))
    assert client.sent == [100, 101, 102, 0, 1] and indices(outcome) == [0, 1]
    assert [failure.kind for failure in outcome.warm_up_failures] == [FailureKind.SERVER_ERROR]
    assert outcome.gave_up is None


def test_when_all_warm_ups_fail_nothing_is_measured(run: Run) -> None:
    client = FakeClient(failing=(100, 101))
    warm_ups = [PlannedRequest(index, Prompt(text="w"), 1, 8) for index in (100, 101)]
    outcome = run(run_load(client, at(0.0, 0.0), warm_ups=warm_ups))
    assert client.sent == [100, 101] and outcome.records == [] and outcome.never_due == 2
    assert outcome.gave_up == "all 2 warm-up requests failed, the first: 500: scripted"
    assert outcome.ended_ns == outcome.began_ns and not outcome.client.bound


@pytest.mark.parametrize(
    ("requests", "options", "message"),
    [
        (at(0.0), {"drain_s": float("inf")}, "drain time is inf s"),
        (at(0.0), {"drain_s": float("nan")}, "drain time is nan s"),
    ],
)
async def test_what_makes_no_sense_is_refused_in_a_line(
    requests: list[PlannedRequest], options: dict[str, Any], message: str
) -> None:
    client = FakeClient()
    with pytest.raises(BenchError, match=message) as refused:
        await run_load(client, requests, Pace(**options))
    assert "\n" not in str(refused.value) and client.sent == []


# --- with the real client -------------------------------------------------------------------------------


async def test_a_conversation_with_the_real_client(server: ScriptedServer) -> None:
    endpoint = Endpoint(server.url, model="scripted", api="chat")
    says = script(id="second", texts=["Fine", "."], chunks=2)
    requests = [
        PlannedRequest(0, Prompt(text=script(id="first", texts=["How ", "do?"], chunks=2)), 1, 2, arrival_s=0.0),
        PlannedRequest(1, Prompt(text=says), 1, 2, follows=0),
    ]
    async with OpenAIClient(endpoint, keep_text=True) as client:
        outcome = await run_load(client, requests[:1], sockets=client.busy_sockets)
        assert outcome.records[0].text == "How do?"
        outcome = await run_load(client, requests, as_messages=True, sockets=client.busy_sockets)
    first, second = outcome.records
    assert first.ok and second.ok and second.scheduled_ns == first.end_ns <= second.sent_ns
    asked = server.log("second")["body"]["messages"]
    assert [message["role"] for message in asked] == ["user", "assistant", "user"]
    assert [message["content"] for message in asked[1:]] == ["How do?", says]
    assert outcome.client.start_lag_ms == [
        pytest.approx((record.sent_ns - record.scheduled_ns) / 1e6) for record in outcome.records
    ]
