"""Beam search through the whole server: the texts of the library, also after a crash, and what is told of them."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from headway import LLM, BeamSearchParams
from headway.bundled import STORY
from tests.server.live.test_live_engine import Live
from tests.server.live_server import eventually

PROMPT = "The old house stood"
ASKED: dict[str, Any] = {"use_beam_search": True, "n": 3, "best_of": 4, "max_tokens": 40, "length_penalty": 0.8}


@pytest.fixture(scope="module")
def expected() -> list[str]:
    llm = LLM(str(STORY), dtype="float32", kv_cache_memory=16 << 20)
    params = BeamSearchParams(beam_width=4, max_tokens=40, length_penalty=0.8)
    return [choice.text for choice in llm.beam_search(PROMPT, params)[0].outputs][:3]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    server = Live(STORY, "--load-format", "auto", "--dtype", "float32", "--kv-cache-memory", "16M")
    eventually(server.is_ready, 90)
    yield server
    server.close()


def test_the_openai_client_gets_the_texts_of_the_library(live: Live, expected: list[str]) -> None:
    extra = {name: value for name, value in ASKED.items() if name not in ("n", "max_tokens", "best_of")}
    answer = live.openai.completions.create(
        model="random", prompt=PROMPT, n=3, best_of=4, max_tokens=40, logprobs=0, extra_body=extra
    )
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage is not None and 3 <= answer.usage.completion_tokens <= 120
    sums = []
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        found = [each for each in choice.logprobs.token_logprobs if each is not None]
        sums.append(sum(found) / len(found) ** 0.8)
    assert sums == sorted(sums, reverse=True)
    chat = live.openai.chat.completions.create(
        model="random", messages=[{"role": "user", "content": "Hello"}], n=2, max_tokens=12, extra_body=extra
    )
    assert len({choice.message.content for choice in chat.choices}) == 2
    assert live.metric("generation_tokens_total") == answer.usage.completion_tokens + chat.usage.completion_tokens  # type: ignore[union-attr]
    eventually(live.is_idle)


def test_a_search_is_one_request_in_the_ledger_and_in_a_crash(live: Live, expected: list[str]) -> None:
    body = {**ASKED, "best_of": 4, "prompt": PROMPT, "include_timings": True}
    phases: dict[str, int] = {}
    while "engine_lost" not in phases:  # a search may be over before the engine is killed
        eventually(live.is_ready, 90)
        answers: list[dict[str, Any]] = []
        asking = threading.Thread(target=lambda answers=answers: answers.append(live.complete(**body)))
        asking.start()
        eventually(lambda answers=answers: bool(answers) or live.metric("num_requests_running") >= 1)
        os.kill(live.engine_process().pid, signal.SIGKILL)
        asking.join(90)
        (answer,) = answers
        assert [choice["text"] for choice in answer["choices"]] == expected
        phases = answer["timings"]["phases_ns"]
        assert sum(phases.values()) == answer["timings"]["e2e_ns"]


def test_a_client_that_leaves_a_search_leaves_nothing_behind(live: Live) -> None:
    eventually(live.is_ready, 90)
    body = {**ASKED, "prompt": PROMPT, "max_tokens": 700, "ignore_eos": True}
    leaver = http.client.HTTPConnection(live.url.removeprefix("http://"))
    leaver.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    eventually(lambda: live.metric("num_requests_running") >= 1)
    leaver.close()
    eventually(live.is_idle)
