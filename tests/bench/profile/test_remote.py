"""`headway bench profile --base-url`: a server that runs already."""

from __future__ import annotations

import json

import pytest

from headway.bench.profile.remote import stages_of_metrics
from tests.bench.command_line import CommandLine
from tests.bench.records import request, run
from tests.bench.scripted_server import ScriptedServer


def test_stages_are_the_means_of_the_servers_metrics() -> None:
    done = [request(index, [60.0, 100.0], end=110.0) for index in range(4)]
    times = {"queue": {"mean_ms": 5.0}, "prefill": {"mean_ms": 40.0}, "decode": {"mean_ms": 50.0}}
    found = stages_of_metrics(run(done, server={"metrics": times}), done)
    assert {name: ms for name, ms in found.items() if ms} == pytest.approx(
        {"schedule": 5.0, "prefill": 40.0, "decode": 50.0, "network": 15.0}
    )
    llama_cpp = {"prompt_seconds": 0.16, "predicted_seconds": 0.2}
    found = stages_of_metrics(run(done, server={"metrics": llama_cpp}), done)
    assert (found["prefill"], found["decode"], found["network"]) == pytest.approx((40.0, 50.0, 20.0))
    assert stages_of_metrics(run(done), done) == {} == stages_of_metrics(run([]), [])


def test_a_running_server_is_profiled(headway: CommandLine, scripted: ScriptedServer) -> None:
    asked = ("bench", "profile", "--base-url", scripted.url, "--prompt-lens", "5,40", "--output-len", 4, "--repeats", 3)
    ran = headway(*asked)
    assert ran.code == 0, ran.err
    assert "Latency, one request at a time" in ran.out and "Report: " in ran.out
    (path,) = ran.files("profile.json")
    saved = json.loads(path.read_text())
    assert [each["completed"] for each in saved["prompt_lengths"]] == [3, 3]
    assert all(each["medians_ms"]["ttft_ms"] >= 10 for each in saved["prompt_lengths"])
    assert (path.parent / "profile.html").stat().st_size > 10_000
    said = headway(*asked, "--load-format", "dummy").error()
    assert "--load-format is for a server that the profile starts" in said
    assert "--dtype is for a server" in headway(*asked, "--dtype", "float32").error()
    assert "no server at" in headway("bench", "profile", "--base-url", "http://127.0.0.1:9").error()
