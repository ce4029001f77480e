"""Answers of thousands of log-probabilities are written in a thread, and others are served meanwhile."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from headway.engine.messages import AddRequest
from headway.server.api import answers
from headway.server.api.answers import TOKENS_BETWEEN_PAUSES, Answer, written
from headway.server.api.choices import ServedChoice
from headway.server.generation import IN_ONE_TURN, Generation
from headway.server.text_work import THREADS
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer, eventually
from tests.server.test_faults import RawClient

StartServer = Callable[..., LiveServer]
FEW, MANY = [5] * 10, [5 + i % 200 for i in range(3000)]
ASKING: list[dict[str, Any]] = [
    {"prompt_logprobs": 3},
    {"echo": True, "logprobs": 3},
    {"prompt_logprobs": 0, "n": 3},
]


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that wrote answers."""
    names: list[str] = []
    render = Answer._render

    def noted(answer: Answer) -> bytes:
        names.append(threading.current_thread().name)
        return render(answer)

    monkeypatch.setattr(Answer, "_render", noted)
    return names


@pytest.mark.parametrize("asked", ASKING)
def test_long_answers_are_written_in_a_thread(
    start_server: StartServer, engine: FakeEngine, writers: list[str], asked: dict[str, Any]
) -> None:
    engine.max_model_len = 4000
    server = start_server(max_num_queued_tokens=math.inf)
    short = server.post("/v1/completions", prompt=FEW, max_tokens=1, **asked).json()["choices"][0]
    long = server.post("/v1/completions", prompt=MANY, max_tokens=1, include_timings=True, **asked).json()
    assert not writers[0].startswith("text") and writers[1].startswith("text")
    timings = long["timings"]
    assert sum(timings["phases_ns"].values()) == timings["e2e_ns"]
    for choice, prompt in ((short, FEW), (long["choices"][-1], MANY)):
        if "prompt_logprobs" in asked:
            found = choice["prompt_logprobs"]
            assert found[0] is None and len(found) == len(prompt)
            assert all(str(token) in one for token, one in zip(prompt[1:], found[1:], strict=True))
        else:
            found = choice["logprobs"]
            assert found["top_logprobs"][0] is None
            assert len(found["top_logprobs"]) == len(found["tokens"]) == len(prompt) + 1


def test_long_chat_answer_is_written_in_a_thread(
    start_server: StartServer, engine: FakeEngine, writers: list[str]
) -> None:
    engine.max_model_len = 4000
    server = start_server(max_num_queued_tokens=math.inf)
    messages = [{"role": "user", "content": "x"}]
    body = {"messages": messages, "max_tokens": 500, "logprobs": True, "top_logprobs": 2}
    engine.reply = lambda request, index: [5] * 1000
    answer = server.post("/v1/chat/completions", **body).json()["choices"][0]
    assert writers[0].startswith("text")
    assert [len(token["top_logprobs"]) for token in answer["logprobs"]["content"]] == [2] * 500


def test_others_are_served_while_long_answers_are_written(
    start_server: StartServer, engine: FakeEngine, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a long answer that is finished is not refused because texts wait."""
    engine.max_model_len = 4000
    server = start_server(max_queued_text=1, max_num_queued_tokens=math.inf)
    render = Answer._render

    def held_up(answer: Answer) -> bytes:
        if len(answer.generation.prompts[0].token_ids) == len(MANY):
            gate.wait()
        return render(answer)

    monkeypatch.setattr(Answer, "_render", held_up)
    clients = [RawClient(server) for _ in range(THREADS + 2)]
    for client in clients:
        client.ask(prompt=MANY, max_tokens=1, prompt_logprobs=1)
    eventually(lambda: len(engine.requests) == len(clients) and not engine.running)
    assert server.post("/v1/completions", prompt=FEW, max_tokens=3, prompt_logprobs=1).status_code == 200
    assert server.post("/v1/completions", prompt=FEW, stream=True).text.endswith("data: [DONE]\n\n")
    gate.set()
    for client in clients:
        received = b""
        while not received.endswith(b"}}"):
            received += client.socket.recv(1 << 20)
        assert received.startswith(b"HTTP/1.1 200 ")
        assert len(json.loads(received.partition(b"\r\n\r\n")[2])["choices"][0]["prompt_logprobs"]) == len(MANY)


def test_what_is_written_by_parts_is_the_same_and_lets_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(answers.time, "sleep", pauses.append)
    entries = [None, *({"a": i, "b": ["é", -0.5]} for i in range(3 * TOKENS_BETWEEN_PAUSES))]
    assert msgspec.json.encode(written(entries)) == msgspec.json.encode(entries)
    assert len(pauses) == 3


def test_many_prompts_are_handed_over_and_counted_in_turns(
    start_server: StartServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, handed, counted = start_server(max_num_queued_reqs=math.inf), list[int](), list[int]()
    submit, count = FakeEngine.submit, Generation._count

    def submitted(self: FakeEngine, requests: list[AddRequest], *others: Any) -> Any:
        handed.append(len(requests))
        return submit(self, requests, *others)

    def noted(self: Generation, choices: list[ServedChoice]) -> None:
        counted.append(len(choices))
        count(self, choices)

    monkeypatch.setattr(FakeEngine, "submit", submitted)
    monkeypatch.setattr(Generation, "_count", noted)
    answer = server.post("/v1/completions", prompt=["x"] * (2 * IN_ONE_TURN + 5), n=2, max_tokens=1).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(4 * IN_ONE_TURN + 10))
    assert handed == [IN_ONE_TURN, IN_ONE_TURN, 5]
    eventually(lambda: sum(counted) == len(answer["choices"]))
    assert max(counted) == IN_ONE_TURN
    assert server.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200
    assert (handed[-1], counted[-1]) == (1, 1)
