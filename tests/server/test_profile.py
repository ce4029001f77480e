"""Profiles of the steps that have been, in Chrome's format."""

from __future__ import annotations

from typing import Any

import pytest

from headway.engine.explaining import explanation
from headway.engine.messages import Explain, ExplainedStep, Explanation, LiveSequence, StepPart
from headway.server.profile import profile
from tests.engine.test_core import MS, ask, engine
from tests.server.conftest import StartServer
from tests.server.live_server import LiveServer


def test_steps_and_their_parts_are_on_one_axis() -> None:

    core, clock = engine()
    before = core.scheduler.decisions[-1].planned_ns
    ask(core, clock, "100", 8, 4)
    ask(core, clock, "101", 20, 9, "offline")
    for _ in range(6):
        core.step()
    told = explanation(core.scheduler, Explain(100, before, 100, True), clock())
    events = profile(told)["traceEvents"]
    spans = [each for each in events if each["ph"] == "X"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["pid"] == 2 and e["tid"]}
    assert sorted(threads.values()) == ["100", "101"]  # the first has ended, and is known still
    steps = [each for each in spans if each["name"] == "step"]
    assert len(steps) == 6 and all("predicted" in each["args"]["decision"] for each in steps)
    for step in steps:
        inside = [
            s
            for s in spans
            if s["pid"] == 1 and s["name"] != "step" and step["ts"] <= s["ts"] < step["ts"] + step["dur"]
        ]
        assert sum(each["dur"] for each in inside) == step["dur"]
    parts = [each for each in spans if each["pid"] == 2]
    assert [each["name"] for each in parts if threads[each["tid"]] == "100"] == ["prompt, 8 tokens", *["decode"] * 3]
    assert all(each["dur"] >= 10 * MS / 1e3 for each in parts)
    (arrival,) = [each for each in events if each["ph"] == "i"]
    assert arrival["name"] == "101 arrives" and sum(arrival["args"]["ledger_ms"].values()) > 0
    assert {each["args"]["running"] for each in events if each["ph"] == "C"} <= {1, 2}


def test_steps_that_did_not_run_and_sequences_without_a_name_are_no_trouble() -> None:
    parts = [StepPart(7, "", 3, 1, True)]
    ran = ExplainedStep(10, "It ran.", launched_ns=20, computed_ns=30, sampled_ns=40, parts=parts)
    events = profile(Explanation([ExplainedStep(5, "Nothing runs."), ran]))["traceEvents"]
    assert [each["name"] for each in events if each["ph"] == "X"] == [
        "step",
        "plan and tensors",
        "forward pass",
        "sampling",
        "decode",
    ]
    assert any(each["args"].get("name") == "ended before" for each in events)


def named(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [each for each in trace["traceEvents"] if each["name"] == name]


def test_kernels_are_spans_and_told_apart_by_step() -> None:
    kernels = [("rms_norm", 21, 22), ("product", 22, 25), ("attend", 25, 27), ("product", 27, 30), ("attend", 41, 43)]
    steps = [
        ExplainedStep(at, "It ran.", prompt_tokens=at, launched_ns=at + 10, computed_ns=at + 25, sampled_ns=at + 30)
        for at in (10, 40, 90)
    ]
    trace = profile(Explanation(steps, kernels=kernels))
    found = [{key: value for key, value in each["args"].items() if key != "decision"} for each in named(trace, "step")]
    assert found[0] == {
        "prompt_tokens": 10, "decoding": 0, "other_ms": 1e-6, "products_ms": 6e-6, "attention_ms": pytest.approx(2e-6)
    }  # fmt: skip
    assert found[1:] == [{"prompt_tokens": at, "decoding": 0} for at in (40, 90)], "no kernel of theirs was timed"
    (thread,) = {(each["pid"], each["tid"]) for each in named(trace, "attend")}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names[thread] == "kernels" and [each["dur"] for each in named(trace, "product")] == [0.003, 0.003]


def test_a_profile_of_the_next_steps_has_kernels_timed_meanwhile(server: LiveServer) -> None:
    assert not named(server.client.get("/debug/profile?steps=3").json(), "attend")
    assert named(server.client.get("/debug/profile?steps=3&kernels=true").json(), "attend")
    assert not server.engine.times_kernels
    server.client.post("/start_profile")
    assert named(server.client.get("/debug/profile?steps=3&kernels=true").json(), "attend")
    assert server.engine.times_kernels, "the other profile goes on"
    assert named(server.client.post("/stop_profile").json(), "attend") and not server.engine.times_kernels


def test_the_route_and_those_of_vllm(start_server: StartServer, server: LiveServer) -> None:
    server.engine.sequences = [LiveSequence("aa-0", 0, "batch", 5, "schedule", {"schedule": 3}, 1, 1, 1, 1, None)]
    trace = server.client.get("/debug/profile?steps=3").json()
    assert trace["displayTimeUnit"] == "ms" and len(trace["traceEvents"]) >= 5
    for query, status in (("steps=0", 400), ("steps=257", 400), ("steps=x", 400), ("kernels=1", 400)):
        assert server.client.get(f"/debug/profile?{query}").status_code == status
    refused = server.client.post("/stop_profile")
    assert refused.status_code == 400 and "/start_profile" in refused.json()["error"]["message"]
    assert server.client.post("/start_profile").status_code == 200
    assert server.engine.times_kernels
    assert named(server.client.post("/stop_profile").json(), "attend")
    assert not server.engine.times_kernels
    assert server.client.post("/stop_profile").status_code == 400
    locked = start_server(api_keys=["sk-one"])
    for method, path in (("GET", "/debug/profile"), ("POST", "/start_profile"), ("POST", "/stop_profile")):
        assert locked.client.request(method, path).status_code == 401
