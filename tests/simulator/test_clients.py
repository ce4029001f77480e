"""Clients of a simulation keep to the rules of the load generator."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.bench.client.load import LoadMode
from headway.load.record import FailureKind, RequestRecord
from headway.load.request import PlannedRequest, Prompt
from headway.load.workload.build import Workload, build_workload
from headway.load.workload.spec import WorkloadSpec
from headway.policy.admission.queue_bound import QueueLimits
from headway.policy.cache.sizing import PoolSize
from headway.policy.objectives.service_class import BUILT_IN
from headway.policy.step.options import SchedulingOptions
from headway.simulator.clients import BEGAN_NS, Clients
from headway.simulator.prompts import SketchSource, ids_of
from headway.simulator.server import simulate
from headway.simulator.timing import Fixed

MS = 1_000_000


def request(index: int, arrival_s: float | None = None, **fields: Any) -> PlannedRequest:
    prompt = Prompt(text=chr(0x4E00 + index) * 40)
    planned = PlannedRequest(index, prompt, 40, 5, arrival_s=arrival_s)
    return replace(planned, **fields)


def run(
    requests: list[PlannedRequest],
    most: int | None = None,
    mode: LoadMode = LoadMode.OPEN,
    duration_s: float | None = None,
    limits: QueueLimits = QueueLimits(),  # noqa: B008
    users: dict[str, int] | None = None,
) -> list[RequestRecord]:
    workload = Workload("", "", requests, 0, users=users or {})
    options = SchedulingOptions(max_num_seqs=16, max_prefill_stall_ms=math.inf)
    scheduler = options.scheduler("cpu", PoolSize(400, max_model_len=400))
    clients = Clients(workload, BUILT_IN, mode, most, duration_s)
    arrivals = clients.arrivals()
    simulate(scheduler, arrivals, Fixed(10 * MS), limits, after=clients.after, sends=clients.sends)
    clients.give_up_waiting()
    return sorted(clients.records, key=lambda record: record.index)


def seconds(ns: int) -> float:
    return (ns - BEGAN_NS) / 1e9


def test_an_open_loop_sends_on_time_and_sees_what_came() -> None:
    first, second = run([request(0, 0.1), request(1, 0.115)])
    assert (seconds(first.scheduled_ns), seconds(first.sent_ns)) == (0.1, 0.1)
    assert [round(seconds(at), 3) for at in first.chunk_ns] == [0.11, 0.12, 0.13, 0.14, 0.15]
    assert round(seconds(second.first_token_ns), 3) == 0.13  # the step that it comes in goes on
    assert (first.prompt_tokens, first.output_tokens, first.finish_reason) == (40, 5, "length")
    assert first.ok and first.end_ns == first.chunk_ns[-1] == first.last_token_ns
    assert first.timings is not None
    assert sum(first.timings["phases_ns"].values()) == first.timings["e2e_ns"] == first.end_ns - first.sent_ns


def test_a_closed_loop_has_so_many_under_way() -> None:
    records = run([request(index) for index in range(6)], 2, LoadMode.CLOSED)
    assert [round(seconds(record.sent_ns), 3) for record in records] == [0, 0, 0.05, 0.05, 0.1, 0.1]


def test_classes_of_a_mix_may_be_closed_loops_of_their_own() -> None:
    requests = [request(0, 0.02), request(1, class_name="b"), request(2, class_name="b")]
    records = run(requests, users={"b": 1})
    assert [round(seconds(record.sent_ns), 3) for record in records] == [0.02, 0, 0.05]


def test_who_has_no_place_waits_for_one_until_the_time_is_up() -> None:
    records = run([request(index, 0.01 * index) for index in range(5)], most=1, duration_s=0.06)
    assert [record.sent_ns > 0 for record in records] == [True, True, False, False, False]
    assert round(seconds(records[1].scheduled_ns), 3) == 0.01 and round(seconds(records[1].sent_ns), 3) == 0.05
    assert {record.failure_kind for record in records[2:]} == {FailureKind.ABANDONED}
    assert len(run([request(index, 0.02 * index) for index in range(5)], duration_s=0.05)) == 3


@pytest.mark.parametrize("mode", [LoadMode.OPEN, LoadMode.CLOSED])
def test_a_conversation_goes_on_with_all_that_was_said(mode: LoadMode) -> None:
    at = 0.0 if mode is LoadMode.OPEN else None
    turns = [request(0, at), request(1, follows=0, think_s=0.5), request(2, follows=1, think_s=0.25)]
    records = run(turns, 1 if mode is LoadMode.CLOSED else None, mode)
    assert [record.prompt_tokens for record in records] == [40, 85, 130]
    assert [record.cached_tokens for record in records] == [0, 32, 80]  # whole blocks of what was said before
    gaps = [after.sent_ns - before.end_ns for before, after in itertools.pairwise(records)]
    assert gaps == [500 * MS, 250 * MS]


@pytest.mark.parametrize("mode", [LoadMode.OPEN, LoadMode.CLOSED])
def test_a_graph_is_sent_as_the_load_generator_sends_it(mode: LoadMode) -> None:
    at = 0.0 if mode is LoadMode.OPEN else None
    links: list[dict[str, Any]] = [
        {},
        {"after": (0,)},
        {"after": (0,), "think_s": 0.5},
        {"follows": 0, "after": (1, 2)},
    ]
    graph = [request(i, at if not i else None, graph=0, graph_size=4, **more) for i, more in enumerate(links)]
    records = run(graph, 1 if mode is LoadMode.CLOSED else None, mode)
    first, beside, late, joined = records
    assert [each.scheduled_ns for each in (beside, late)] == [first.end_ns, first.end_ns + 500 * MS]
    assert joined.scheduled_ns == late.end_ns and joined.prompt_tokens == 40 + 5 + 40
    records = run([graph[0], replace(graph[1], output_tokens=500), *graph[2:]], 1, mode)
    assert [record.ok for record in records] == [True, False, True, False]
    assert records[3].failure is not None and records[3].failure.message == "request 1, which it waited for, failed"


def test_a_turn_without_an_answer_ends_its_conversation() -> None:
    late = request(1, follows=0, output_tokens=500)
    records = run([request(0, 0.0), late, request(2, follows=1), request(3, 1.0)])
    assert [record.ok for record in records] == [True, False, False, True]
    assert (records[1].failure_kind, records[2].failure_kind) == (FailureKind.CLIENT_ERROR, FailureKind.ABANDONED)
    assert records[1].failure is not None and "max_tokens is 500" in records[1].failure.message


def test_clients_that_give_up_and_servers_that_refuse() -> None:
    limits = QueueLimits(choices=2)
    given_up, served, refused = run(
        [request(0, 0.0, cancel_after_s=0.025), request(1, 0.0), request(2, 0.01)], limits=limits
    )
    assert given_up.cancelled and not given_up.failed
    assert given_up.output_tokens == 2 and round(seconds(given_up.end_ns), 3) == 0.025
    assert served.ok
    assert refused.failure is not None and refused.failure.kind is FailureKind.REFUSED
    assert refused.failure.status == 429


def test_classes_come_by_body_tier_and_header() -> None:
    workload = Workload("", "", [], 0)
    clients = Clients(workload, BUILT_IN, LoadMode.OPEN, None, None)
    name = BUILT_IN.default_class.name
    for planned in (
        request(0, extra_body={"service_class": name}),
        request(0, extra_body={"service_tier": "auto"}),
        request(0, headers={"x-headway-service-class": name}),
        request(0),
    ):
        assert clients._class_of(planned) == name


def test_prompts_share_what_the_workload_says(tmp_path: Path) -> None:
    spec = WorkloadSpec(dataset_name="prefix_repetition", num_prompts=6, prefix_repetition_num_prefixes=2)
    workload = build_workload(replace(spec, users=4), SketchSource(), chat=False)
    prompts = [ids_of(each.prompt) for each in workload.requests]
    assert {len(prompt) for prompt in prompts} == {512}
    assert len({tuple(prompt[:256]) for prompt in prompts}) == 2 and len(set(map(tuple, prompts))) == 6


def test_texts_are_as_long_as_their_characters_say() -> None:
    source = SketchSource()
    one, other = (
        source.of_text("You are a helpful assistant. Hello!"),
        source.of_text("You are a helpful assistant. Bye."),
    )
    assert (one.tokens, source.count("12345")) == (9, 2)
    assert ids_of(one.prompt)[:7] == ids_of(other.prompt)[:7] != ids_of(one.prompt)[2:9]
