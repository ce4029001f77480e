"""The ledger of a request closes: its phases sum to its end-to-end time exactly."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.engine.messages import SequenceTimings
from headway.policy.objectives.service_class import ServiceClass
from headway.policy.step.ledger import Phase
from headway.server.classes import Terms
from headway.server.timings import ChoiceTimings, Stamps, with_timings
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer

ENGINE_PHASES = [str(phase) for phase in Phase if phase.name.startswith(("QUEUE", "PREFILL", "DECODE", "SAMPLING"))]
VOICE = ServiceClass(name="voice")
gaps = st.integers(0, 10**12)


@given(
    steps=st.lists(gaps, min_size=5, max_size=5),
    phases=st.dictionaries(st.sampled_from(ENGINE_PHASES), gaps),
    end=st.lists(gaps, min_size=3, max_size=3),
)
def test_chain_closes_whatever_the_lengths(steps: list[int], phases: dict[str, int], end: list[int]) -> None:
    arrived, checked, sent = itertools.accumulate(steps[:3])
    ended = sent + sum(phases.values())
    received, detokenized = ended + steps[3], ended + steps[3] + steps[4]
    stamps = Stamps(arrived, checked, sent, received, received, received, detokenized)
    timings = ChoiceTimings(stamps, SequenceTimings(phases, ended, 3, 1), 7)
    now = detokenized
    for phase, length in zip((Phase.SEND, Phase.SEND_BLOCKED, Phase.SEND), end, strict=True):
        now += length
        timings.ledger.mark(phase, now)
    found = timings.as_object()
    assert sum(found["phases_ns"].values()) == found["e2e_ns"] == now - arrived
    assert found["ttft_ns"] == received - arrived
    assert (found["tokens"], found["steps"], found["preemptions"]) == (7, 3, 1)
    assert all(found["phases_ns"][name] == length for name, length in phases.items() if length)


@pytest.mark.parametrize(
    ("terms", "tokens", "found"),
    [
        (Terms(VOICE, "priority", 0.5, 0.002), 5, (500_000, True, 2_000, True)),
        (Terms(VOICE, "priority", 0.4, 0.001), 5, (400_000, False, 1_000, False)),
        (Terms(VOICE, "priority", 0.5, 0.001), 1, (500_000, True, 1_000, None)),
        (Terms(VOICE), 5, (None, None, None, None)),
    ],
)
def test_objectives_and_whether_they_were_met(terms: Terms, tokens: int, found: tuple[Any, ...]) -> None:
    stamps = Stamps(0, 100, 200, first_token_ns=450_000, last_token_ns=458_000, received_ns=458_000)
    timings = ChoiceTimings(stamps, SequenceTimings({}, 0, 5, 0, "late"), tokens, terms).as_object()
    assert (timings["service_class"], timings["yielded"]) == ("voice", "late")
    names = ("ttft_objective_ns", "ttft_met", "tpot_objective_ns", "tpot_met")
    assert tuple(timings[name] for name in names) == found


@pytest.mark.parametrize(("e2e_ms", "found"), [(0.5, (500_000, True)), (0.4, (400_000, False)), (inf, (None, None))])
def test_an_objective_for_the_whole_is_judged_by_the_last_token(e2e_ms: float, found: tuple[Any, ...]) -> None:
    stamps = Stamps(0, 100, 200, first_token_ns=200_000, last_token_ns=458_000, received_ns=458_000)
    terms = Terms(replace(VOICE, e2e_ms=e2e_ms))
    timings = ChoiceTimings(stamps, SequenceTimings({}, 0, 5, 0), 5, terms).as_object()
    assert (timings["e2e_objective_ns"], timings["e2e_met"]) == found


def test_object_is_added_to_json_with_its_own_making_left_out() -> None:
    timings = ChoiceTimings(Stamps(10, 20, 30, 40, 40, 40, 41), SequenceTimings({"decode_compute": 5}, 35, 1, 0), 1)
    found = json.loads(with_timings(b'{"a":1}', timings, lambda: 50))
    assert found["a"] == 1
    assert found["timings"]["phases_ns"] == {
        "receive": 10,
        "tokenize": 10,
        "decode_compute": 5,
        "transport": 5,
        "detokenize": 1,
        "send": 9,
    }
    assert found["timings"]["e2e_ns"] == 40


def timings_of(server: LiveServer, path: str, **body: Any) -> tuple[dict[str, Any], Any]:
    """The timings of an answer, which must be in the last chunk of a stream and nowhere else."""
    answer = server.post(path, include_timings=True, **body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()["timings"], answer
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    if body.get("stream_options"):
        assert chunks.pop()["choices"] == []
    assert [i for i, chunk in enumerate(chunks) if "timings" in chunk] == [len(chunks) - 1]
    assert chunks[-1]["choices"][0]["finish_reason"] is not None
    return chunks[-1]["timings"], answer


@pytest.mark.parametrize("stream", [{}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}])
@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x"},
        {"prompt": "x", "n": 4},
        {"prompt": ["x", "y", "z"], "n": 2},
        {"prompt": "x", "stop": "time"},
        {"prompt": "x", "stop": "time", "n": 3},
        {"prompt": "x" * 200, "max_tokens": 1},
    ],
)
def test_every_answer_closes(
    server: LiveServer, engine: FakeEngine, stream: dict[str, Any], body: dict[str, Any]
) -> None:
    engine.step_s = 0.002
    began = time.monotonic_ns()
    timings, _ = timings_of(server, "/v1/completions", **body, **stream)
    elapsed = time.monotonic_ns() - began
    assert sum(timings["phases_ns"].values()) == timings["e2e_ns"]
    assert 0 < timings["ttft_ns"] <= timings["e2e_ns"] < elapsed
    assert {"receive", "tokenize", "prefill_compute", "transport", "send"} <= timings["phases_ns"].keys()
    assert timings["phases_ns"].keys() <= {str(phase) for phase in Phase}
    assert timings["tokens"] > 0
    assert timings["phases_ns"].get("detokenize", 0) <= timings["detokenize_ns"] < elapsed


def test_engine_part_is_exactly_the_engines(server: LiveServer, engine: FakeEngine) -> None:
    engine.step_s = 0.01
    timings, _ = timings_of(server, "/v1/completions", prompt="x", max_tokens=5)
    phases = timings["phases_ns"]
    engines = phases["queue_capacity"] + phases["prefill_compute"] + phases["decode_compute"]
    assert engines == next(iter(engine.phases_total_ns.values()))
    assert engines > 0.8 * timings["e2e_ns"]


def test_header_tells_the_same(server: LiveServer) -> None:
    timings, answer = timings_of(server, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
    entries = dict(entry.split(";dur=") for entry in answer.headers["server-timing"].split(", "))
    assert float(entries.pop("total")) == pytest.approx(timings["e2e_ns"] / 1e6, abs=0.001)
    assert entries.keys() == timings["phases_ns"].keys()
    for name, length in entries.items():
        assert float(length) == pytest.approx(timings["phases_ns"][name] / 1e6, abs=0.001)


def test_timings_are_off_by_default(server: LiveServer) -> None:
    answer = server.post("/v1/completions", prompt="x")
    assert "timings" not in answer.json()
    assert "server-timing" not in answer.headers
    assert "timings" not in server.post("/v1/completions", prompt="x", stream=True).text


def test_slow_body_is_receiving(server: LiveServer) -> None:
    def slowly() -> Any:
        yield b'{"prompt": "x", '
        time.sleep(0.2)
        yield b'"include_timings": true}'

    answer = server.client.post("/v1/completions", content=slowly())
    assert answer.json()["timings"]["phases_ns"]["receive"] > 150_000_000
