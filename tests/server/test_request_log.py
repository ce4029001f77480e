"""The request log: a line for each choice, and warnings for slow ones with their cause."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from headway.engine.messages import SequenceTimings
from headway.policy.objectives.service_class import ServiceClass
from headway.policy.step.ledger import Phase
from headway.policy.step.sampling_params import SamplingParams
from headway.server.classes import Terms
from headway.server.ended import Ended, TraceParent
from headway.server.request_log import CAUSES, MOST_WARNINGS, RequestLog, cause
from headway.server.timings import Stamps
from tests.server.conftest import StartServer
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import MODEL, eventually

MS = 1_000_000
OF_A_GATEWAY = {Phase.ROUTE, Phase.NETWORK, Phase.BACKEND}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def ended(**changes: Any) -> Ended:
    """A choice that took 100 ms, of which 70 in the queue for KV blocks."""
    phases = {"queue_blocks": 70 * MS, "prefill_compute": 10 * MS, "decode_compute": 20 * MS}
    given: dict[str, Any] = {
        "parent": TraceParent(b"\xaa" * 16),
        "name": "ab12",
        "operation": "chat",
        "model": "m",
        "index": 0,
        "reason": "stop",
        "stamps": Stamps(arrived_ns=MS, first_token_ns=81 * MS, last_token_ns=101 * MS),
        "timings": SequenceTimings(phases, 101 * MS, 3, 0),
        "phases_ns": phases,
        "prompt_tokens": 7,
        "cached_tokens": 2,
        "tokens": 3,
        "params": SamplingParams(),
        "ended_ns": 101 * MS,
        "terms": Terms(ServiceClass(name="chat"), ttft_ms=50.0),
    }
    return Ended(**given | changes)


def test_each_choice_is_a_line_without_its_text(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(request_log=tmp_path / "log.jsonl")
    headers = {"traceparent": PARENT, "x-request-id": "mine-1"}
    body = {"model": MODEL, "prompt": "A secret", "n": 2, "include_timings": True}
    answer = server.client.post("/v1/completions", json=body, headers=headers).json()
    server.post("/v1/chat/completions", model=MODEL, messages=[{"role": "user", "content": "hush"}], max_tokens=2)
    eventually(lambda: (tmp_path / "log.jsonl").read_text().count("\n") == 3)
    text = (tmp_path / "log.jsonl").read_text()
    first, second, chat = map(json.loads, text.splitlines())
    assert [first["index"], second["index"]] == [0, 1] and answer["id"].endswith(first["id"])
    assert first["trace_id"] == PARENT[3:35] and first["client_request_id"] == "mine-1"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert (first["operation"], first["finish_reason"], first["error"]) == ("text_completion", "stop", "")
    assert (chat["operation"], chat["finish_reason"], chat["output_tokens"]) == ("chat", "length", 2)
    for line in (first, second, chat):
        assert sum(line["phases_ms"].values()) == pytest.approx(line["e2e_ms"])
        assert 0 < line["ttft_ms"] <= line["e2e_ms"] and line["cause"] in CAUSES.values()
    assert "secret" not in text and "hush" not in text and "Once upon" not in text


def test_the_log_may_be_moved_and_what_waits_is_written_at_the_end(start_server: StartServer, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    server = start_server(request_log=path)
    server.post("/v1/completions", model=MODEL, prompt="x")
    eventually(lambda: bool(path.read_text()))
    path.rename(tmp_path / "log.1")
    server.post("/v1/completions", model=MODEL, prompt="x")
    server.call(server.server.drain)
    eventually(lambda: path.exists() and path.read_text().count("\n") == 1)


def test_slow_requests_are_told_with_their_cause(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog(None, slow_ms=500.0)
    with caplog.at_level(logging.WARNING, "headway.server"):
        log.handle([ended(), ended(terms=Terms(ServiceClass(name="chat"), ttft_ms=90.0))])
    (told,) = caplog.messages  # the other one is neither slow nor late
    assert told == (
        "slow request ab12 of class chat: 100 ms; TTFT 80.0 ms missed its objective; most of it in "
        "queue_blocks 70 ms, decode_compute 20 ms, prefill_compute 10 ms; cause: the KV cache is full; "
        f"trace {'aa' * 16}"
    )


def test_a_storm_of_slow_requests_does_not_flood_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, now = RequestLog(None, slow_ms=1.0), [100.0]
    monkeypatch.setattr("headway.server.request_log.time.monotonic", lambda: now[0])
    with caplog.at_level(logging.WARNING, "headway.server"):
        log.handle([ended()] * 50)
        assert len(caplog.messages) == MOST_WARNINGS
        now[0] += 1.5
        log.handle([ended()])
    assert caplog.messages[-2] == f"{50 - MOST_WARNINGS} more requests were slow"


@pytest.mark.parametrize(
    ("phases", "was_late", "said"),
    [
        ({"decode_compute": 90, "queue_capacity": 30, "prefill_compute": 20}, False, "long answer"),
        ({"decode_compute": 90, "queue_capacity": 30, "prefill_compute": 20}, True, "more requests than seats"),
        ({"decode_compute": 30, "decode_stall_prefill": 60}, False, "prompts of others"),
        ({}, False, ""),
    ],
)
def test_the_cause_is_the_largest_phase_that_counts(phases: dict[str, int], was_late: bool, said: str) -> None:
    assert said in cause(phases, was_late)


def test_causes_are_known_for_every_phase_that_can_be_long() -> None:
    outgoing = Phase.DETOKENIZE, Phase.SEND, Phase.SEND_BLOCKED
    assert set(Phase) - CAUSES.keys() == {Phase.KV_TRANSFER, *outgoing, *OF_A_GATEWAY}


def test_a_log_that_cannot_be_written_is_an_error_at_the_start_and_a_warning_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=r"cannot write the request log .*nowhere.*--request-log"):
        RequestLog(tmp_path / "nowhere" / "log", None)
    log = RequestLog(tmp_path / "log", None)
    (tmp_path / "log").unlink()
    (tmp_path / "log").mkdir()
    with caplog.at_level(logging.WARNING, "headway.server"):
        log.handle([ended()])
        log.handle([ended()])
    assert log.dropped == 2 and len(caplog.messages) == 1 and "1 lines are missing" in caplog.messages[0]


def test_failures_and_aborts_are_lines_too(start_server: StartServer, engine: FakeEngine, tmp_path: Path) -> None:
    server = start_server(request_log=tmp_path / "log.jsonl")
    engine.drops = "timeout"
    assert server.post("/v1/completions", model=MODEL, prompt="x").status_code == 503
    eventually(lambda: bool((tmp_path / "log.jsonl").read_text()))
    line = json.loads((tmp_path / "log.jsonl").read_text())
    assert (line["finish_reason"], line["error"], line["ttft_ms"]) == ("timeout", "timeout", None)
