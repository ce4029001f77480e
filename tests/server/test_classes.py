"""Which class a request is of, what it is promised, and what it may not ask for."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from headway.cli import command_of
from headway.config_files.classes import read_class_file
from headway.config_files.tenants import Access, read_tenant_file
from headway.policy.objectives.service_class import BUILT_IN
from headway.server.api.schemas import CompletionBody
from headway.server.app import create_app
from headway.server.classes import terms_of
from headway.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer, eventually, settings
from tests.server.test_limits import parked

NIGHT, DAY, ANY = "sk-night", "sk-day", "sk-any"
FILE = """
default = "chat"

[service_tiers]
priority = "voice"
flex = "night"

[[class]]
name = "voice"
ttft_ms = 100
tpot_ms = 40

[[class]]
name = "chat"
ttft_ms = 500
e2e_ms = 60000

[[class]]
name = "night"
max_queued = 2
max_prompt_tokens = 50
max_output_tokens = 20
"""
TENANTS = f"""
[[key]]
sha256 = "{hashlib.sha256(NIGHT.encode()).hexdigest()}"
best = "night"

[[key]]
sha256 = "{hashlib.sha256(DAY.encode()).hexdigest().upper()}"
default = "night"
best = "chat"
"""


def files_in(folder: Path) -> dict[str, Any]:
    """The settings of a server with both files."""
    (folder / "classes.toml").write_text(FILE)
    (folder / "tenants.toml").write_text(TENANTS)
    tenants = read_tenant_file(str(folder / "tenants.toml"))
    return {"service_classes": read_class_file(str(folder / "classes.toml")), "tenants": tenants}


@pytest.fixture(scope="module")
def classed_server(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    server = LiveServer(
        FakeEngine(tokenizer), tokenizer, **files_in(tmp_path_factory.mktemp("classes")), api_keys=[ANY]
    ).start()
    yield server
    server.stop()


@pytest.fixture
def server(classed_server: LiveServer) -> LiveServer:
    classed_server.engine.reset()
    return classed_server


def ask(
    server: LiveServer, key: str = ANY, headers: dict[str, str] | None = None, prompt: Any = "x", **body: Any
) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}", **(headers or {})}
    return server.client.post("/v1/completions", json={"prompt": prompt, **body}, headers=headers)


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize(
    ("key", "headers", "body", "name"),
    [
        (ANY, {}, {}, "chat"),
        (ANY, {}, {"service_tier": "auto"}, "chat"),
        (ANY, {}, {"service_tier": "default"}, "chat"),
        (ANY, {}, {"service_tier": "priority"}, "voice"),
        (ANY, {}, {"service_tier": "flex"}, "night"),
        (ANY, {}, {"service_class": "voice"}, "voice"),
        (ANY, {}, {"service_class": "night", "service_tier": "flex"}, "night"),
        (ANY, {}, {"service_class": "night", "service_tier": "auto"}, "night"),
        (ANY, {"x-headway-service-class": "night"}, {}, "night"),
        (ANY, {"x-headway-service-class": "night"}, {"service_tier": "auto"}, "night"),
        (NIGHT, {}, {}, "night"),
        (DAY, {}, {}, "night"),
        (DAY, {}, {"service_tier": "auto"}, "night"),
        (DAY, {}, {"service_class": "chat"}, "chat"),
    ],
)
def test_how_a_request_names_its_class(
    server: LiveServer, key: str, headers: dict[str, str], body: dict[str, Any], name: str
) -> None:
    answer = ask(server, key, headers, **body)
    assert answer.status_code == 200, answer.text
    assert server.engine.requests[0].service_class == name
    assert answer.json()["service_tier"] == {"voice": "priority", "chat": "default", "night": "flex"}[name]
    assert "x-headway-ignored-headers" not in answer.headers


@pytest.mark.parametrize(
    ("body", "name", "tier"),
    [
        ({}, "interactive", "default"),
        ({"service_tier": "auto"}, "interactive", "default"),
        ({"service_tier": "priority"}, "interactive", "priority"),
        ({"service_class": "batch"}, "batch", "flex"),
        ({"service_class": "offline"}, "offline", "default"),
    ],
)
def test_the_tier_of_an_answer_is_the_one_that_was_asked_for(body: dict[str, Any], name: str, tier: str) -> None:
    terms = terms_of(BUILT_IN, Access(), CompletionBody(prompt="x", **body), {}, [])
    assert (terms.service.name, terms.service_tier) == (name, tier)


def test_the_body_goes_before_the_header(server: LiveServer) -> None:
    for body in ({"service_class": "voice"}, {"service_tier": "priority"}):
        answer = ask(server, headers={"x-headway-service-class": "night"}, **body)
        assert server.engine.requests[-1].service_class == "voice"
        assert answer.headers["x-headway-ignored-headers"] == "x-headway-service-class"


@pytest.mark.parametrize(
    ("headers", "body", "param", "says"),
    [
        ({}, {"service_tier": "scale"}, "service_tier", "'auto', 'default', 'priority' or 'flex'"),
        ({}, {"service_tier": 1}, "service_tier", "service_tier is 1"),
        (
            {},
            {"service_class": "day"},
            "service_class",
            "'day', which is not a class here; there are voice, chat, night",
        ),
        (
            {},
            {"service_class": "night", "service_tier": "priority"},
            "service_tier",
            "service_tier 'priority' means class 'voice', but service_class is 'night'; give one",
        ),
        ({"x-headway-service-class": "day"}, {}, "x-headway-service-class", "x-headway-service-class is 'day'"),
        ({"x-llm-d-slo-ttft-ms": "soon"}, {}, "x-llm-d-slo-ttft-ms", "x-llm-d-slo-ttft-ms is 'soon'"),
        ({"x-llm-d-slo-ttft-ms": "0"}, {}, "x-llm-d-slo-ttft-ms", "must be milliseconds, more than 0"),
        ({"x-llm-d-slo-tpot-ms": "-1"}, {}, "x-llm-d-slo-tpot-ms", "x-llm-d-slo-tpot-ms is '-1'"),
        ({"x-llm-d-slo-tpot-ms": "inf"}, {}, "x-llm-d-slo-tpot-ms", "at most 1e9"),
        (
            {},
            {"service_class": "night", "prompt": [5] * 51},
            "prompt",
            "the prompt has 51 tokens; service class 'night' takes at most 50 (max_prompt_tokens)",
        ),
        (
            {},
            {"service_class": "night", "max_tokens": 21},
            "max_tokens",
            "max_tokens is 21; service class 'night' gives at most 20 (max_output_tokens)",
        ),
        ({}, {"service_class": "night", "min_tokens": 21}, "min_tokens", "min_tokens is 21; service class 'night'"),
        (
            {},
            {"service_class": "night", "n": 3},
            "n",
            "the request has 3 choices, more than the limit of 2 of class night",
        ),
    ],
)
def test_what_is_refused(
    server: LiveServer, headers: dict[str, str], body: dict[str, Any], param: str, says: str
) -> None:
    error = error_of(ask(server, headers=headers, **body), 400)
    assert error["param"] == param
    assert says in error["message"]
    assert server.engine.requests == []


def test_a_key_does_not_raise_itself_above_its_best_class(server: LiveServer) -> None:
    for key, body, best in ((NIGHT, {"service_tier": "default"}, "night"), (DAY, {"service_class": "voice"}, "chat")):
        error = error_of(ask(server, key, **body), 403)
        assert (error["type"], error["code"]) == ("permission_error", "service_class_not_allowed")
        assert f"may use service class {best!r} and less urgent ones" in error["message"]
    for key in ("sk", "sk-dawn"):
        assert ask(server, key).status_code == 401
    assert server.engine.requests == []


def test_a_request_tightens_its_own_objectives_only(server: LiveServer) -> None:
    def promised(ttft: str, tpot: str) -> tuple[float, float, str | None]:
        answer = ask(server, headers={"x-llm-d-slo-ttft-ms": ttft, "X-LLM-D-SLO-TPOT-MS": tpot}, service_class="voice")
        request = server.engine.requests[-1]
        return request.ttft_ms, request.tpot_ms, answer.headers.get("x-headway-ignored-headers")

    assert promised("50", "39.5") == (50, 39.5, None)
    assert promised("100", "40") == (100, 40, None)
    assert promised("101", "30") == (100, 30, "x-llm-d-slo-ttft-ms")
    assert promised("200", "1e3") == (100, 40, "x-llm-d-slo-ttft-ms, x-llm-d-slo-tpot-ms")
    ask(server, headers={"x-llm-d-slo-ttft-ms": "900", "x-llm-d-slo-tpot-ms": "70"}, service_class="night")
    request = server.engine.requests[-1]
    assert (request.ttft_ms, request.tpot_ms) == (900, 70)
    ask(server)
    assert (server.engine.requests[-1].ttft_ms, server.engine.requests[-1].tpot_ms) == (500, math.inf)


def test_max_tokens_that_nobody_gave_is_lowered_to_the_class(server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "service_class": "night"}
    server.client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {ANY}"})
    assert server.engine.requests[-1].params.max_tokens == 20
    ask(server, service_class="night", max_tokens=20)
    assert server.engine.requests[-1].params.max_tokens == 20


def test_a_class_has_a_queue_of_its_own(server: LiveServer) -> None:
    with parked(server, server.engine, key=NIGHT, n=2):
        refused = ask(server, DAY)
        error = error_of(refused, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert error["message"].startswith(
            "2 choices of class night are waiting or running, and this request has 1; the"
        )
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
        server.engine.open = True
        assert ask(server, DAY, service_class="chat").status_code == 200
    eventually(lambda: not server.service.admission.queues.of_class["night"].choices)
    assert ask(server, DAY).status_code == 200


def metric(server: LiveServer, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        for sample in family.samples:
            if sample.name == f"headway:class_{name}" and sample.labels.items() >= labels.items():
                return sample.value
    return 0.0


def test_each_class_has_metrics_of_its_own(server: LiveServer) -> None:
    of_class = {"service_class": "voice"}
    names = ("time_to_first_token", "inter_token_latency", "request_time_per_output_token", "e2e_request_latency")
    counts = [f"{name}_seconds_count" for name in names]
    before = [metric(server, name, **of_class) for name in counts]
    assert ask(server, service_class="voice", max_tokens=3, ignore_eos=True).status_code == 200
    eventually(lambda: metric(server, counts[-1], **of_class) == before[-1] + 1)
    grown = [metric(server, name, **of_class) - count for name, count in zip(counts, before, strict=True)]
    assert grown == [1, 2, 1, 1]
    assert metric(server, "requests_running", **of_class) == 2
    assert metric(server, "requests_waiting", **of_class) == 1
    assert metric(server, "requests_running", service_class="other") == 3, "of a class that is no longer there"
    assert metric(server, "requests_running", service_class="chat") == 0


def test_objectives_that_are_met_and_missed_are_counted(server: LiveServer) -> None:
    def counts() -> dict[tuple[str, str], float]:
        eventually(lambda: not server.service.in_flight and not server.service._background)
        return {
            (objective, result): metric(
                server, "objectives_total", service_class="voice", objective=objective, result=result
            )
            for objective in ("ttft", "tpot", "all")
            for result in ("met", "missed")
        }

    def grown(headers: dict[str, str], drops: str = "", **body: Any) -> set[str]:
        before, server.engine.drops = counts(), drops
        ask(server, headers=headers, service_class="voice", **body)
        after = counts()
        assert all(after[each] - before[each] in (0, 1) for each in after)
        return {f"{each[0]} {each[1]}" for each in after if after[each] > before[each]}

    server.engine.step_s = 0.001
    hopeless = {"x-llm-d-slo-ttft-ms": "1e-6", "x-llm-d-slo-tpot-ms": "1e-6"}
    assert grown(hopeless, max_tokens=3) == {"ttft missed", "tpot missed", "all missed"}
    assert grown(hopeless, max_tokens=1) == {"ttft missed", "all missed"}
    assert grown({}, drops="late") == {"ttft missed", "all missed"}
    server.engine.drops, server.engine.yielded = "", "overload"
    yielded = metric(server, "yielded_total", service_class="night", reason="overload")
    easy = ask(server, headers={"x-llm-d-slo-ttft-ms": "1e8"}, service_class="night", include_timings=True)
    eventually(lambda: metric(server, "yielded_total", service_class="night", reason="overload") == yielded + 1)
    timings = easy.json()["timings"]
    assert (timings["service_class"], timings["ttft_objective_ns"], timings["ttft_met"]) == ("night", 10**14, True)
    assert timings["yielded"] == "overload"
    before = metric(server, "objectives_total", service_class="chat", objective="e2e", result="met")
    assert ask(server, include_timings=True).json()["timings"]["e2e_met"] is True
    eventually(lambda: metric(server, "objectives_total", service_class="chat", objective="e2e", result="met") > before)


def test_requests_that_are_refused_are_counted_by_reason(server: LiveServer) -> None:
    def refused(reason: str, service_class: str) -> float:
        return metric(server, "requests_refused_total", service_class=service_class, reason=reason)

    reasons = [("deadline_unreachable", "voice"), ("queue_timeout", "chat"), ("service_class_not_allowed", "other")]
    reasons.append(("queue_full", "night"))
    before = [refused(*each) for each in reasons]
    server.engine.drops = "late"
    for stream in (False, True):
        assert ask(server, service_class="voice", stream=stream).status_code == 503
    server.engine.drops = "timeout"
    assert ask(server).status_code == 503
    assert ask(server, NIGHT, service_class="voice").status_code == 403
    server.engine.drops = ""
    with parked(server, server.engine, key=NIGHT, n=2):
        assert ask(server, NIGHT).status_code == 429
    assert ask(server, service_class="night", n=3).status_code == 400
    assert [refused(*each) - was for each, was in zip(reasons, before, strict=True)] == [2, 1, 1, 1]


def test_the_last_steps_in_words(server: LiveServer) -> None:
    key = {"authorization": f"Bearer {ANY}"}
    found = server.client.get("/debug/schedule?steps=2", headers=key).json()["steps"]
    assert [each["decision"] for each in found] == [f"step {number} of {'6f1f' * 8}-0." for number in (98, 99)]
    assert all(each["ago_ms"] >= 0 for each in found)
    text = server.client.get("/debug/schedule?format=text", headers=key)
    assert text.headers["content-type"].startswith("text/plain")
    assert len(text.text.splitlines()) == 50 and text.text.endswith(" ms ago: step 99 of 6f1f6f1f-0.\n")
    for query, says in (("steps=0", "steps is '0'"), ("steps=x", "1 to 256"), ("format=xml", "must be json or text")):
        assert says in error_of(server.client.get(f"/debug/schedule?{query}", headers=key), 400)["message"]
    assert server.client.get("/debug/schedule").status_code == 401


def test_a_file_that_would_let_everybody_in_is_not_taken(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(tokenizer)
    service = create_app(engine, tokenizer, settings(**files_in(tmp_path))).state.service
    path, tenants = tmp_path / "classes.toml", tmp_path / "tenants.toml"
    monkeypatch.setattr("headway.server.service.logger", logging.getLogger("classes"))
    tenants.write_text("")
    service.reload_files()
    assert len(service.keys) == 2
    assert "has no API key left, so everybody would have access" in caplog.text
    tenants.write_text(TENANTS)
    path.write_text(FILE.replace("max_queued = 2", "max_queued = 3").replace("chat", "talk"))
    service.reload_files()
    assert f"{tenants}, line 9: best is 'chat', which is not a class; there are voice, talk, night" in caplog.text
    assert service.admission.queues.of_class["night"].limits.choices == 2
    tenants.write_text(TENANTS.replace("chat", "talk"))
    service.reload_files()
    assert service.admission.queues.of_class["night"].limits.choices == 3
    assert [each.name for each in engine.classes] == [each.name for each in service.classes.table]
    assert engine.classes.default == "talk"


def test_openais_client_reads_the_tier(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=ANY, max_retries=0) as client:
        create = client.chat.completions.create
        messages: Any = [{"role": "user", "content": "x"}]
        assert create(model="tiny", messages=messages).service_tier == "default"
        assert create(model="tiny", messages=messages, service_tier="flex").service_tier == "flex"
        chunks = list(create(model="tiny", messages=messages, service_tier="priority", stream=True))
        assert len(chunks) > 2
        assert {chunk.service_tier for chunk in chunks} == {"priority"}
        with pytest.raises(openai.BadRequestError, match="service_tier is 'scale'"):
            create(model="tiny", messages=messages, service_tier="scale")
        with pytest.raises(openai.PermissionDeniedError) as refused:
            client.with_options(api_key=NIGHT).chat.completions.create(
                model="tiny", messages=messages, service_tier="priority"
            )
        assert refused.value.code == "service_class_not_allowed"


def test_completions_name_their_tier_in_every_chunk(server: LiveServer) -> None:
    lines = ask(server, stream=True, stream_options={"include_usage": True}).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert {chunk["service_tier"] for chunk in chunks} == {"default"}


def test_the_doctor_says_why_none_of_its_requests_was_answered(server: LiveServer) -> None:
    ran = CliRunner().invoke(command_of("doctor"), [server.url, "--api-key", DAY, "--no-local"])
    assert ran.exit_code == 2 and "none of the probe's requests was answered" in ran.output, ran.output
    assert "service class 'night'" in " ".join(ran.output.split())
