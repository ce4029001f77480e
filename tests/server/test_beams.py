"""Beam search in bodies: what reaches the engine, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def test_a_search_reaches_the_engine_without_the_defaults_for_drawing(server: LiveServer, engine: FakeEngine) -> None:
    server.service.defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 12}
    try:
        asked = {"use_beam_search": True, "best_of": 3, "n": 2, "length_penalty": 0, "early_stopping": "never"}
        answers = [
            server.post("/v1/completions", prompt="x", logprobs=1, temperature=0, **asked),
            server.post("/v1/chat/completions", messages=HELLO, **asked),
        ]
    finally:
        server.service.defaults = {}
    for answer, request in zip(answers, engine.requests, strict=True):
        assert answer.status_code == 200 and len(answer.json()["choices"]) == 2, answer.text
        params = request.params
        assert params.use_beam_search and (params.width, params.n, params.max_tokens) == (3, 2, 12)
        assert (params.length_penalty, params.early_stopping, params.top_k) == (0.0, "never", 0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"top_p": 0.5}, "top_p"),
        ({"top_k": 3}, "top_k"),
        ({"temperature": 0.5}, "temperature"),
        ({"stop": "x"}, "stop"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"n": 3, "best_of": 2}, "n"),
        ({"best_of": 65}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": "2"}, "best_of"),
        ({"length_penalty": 10.5}, "length_penalty"),
        ({"length_penalty": "long"}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"use_beam_search": "yes"}, "use_beam_search"),
        ({"use_beam_search": False, "best_of": 2}, "best_of"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
        ({"use_beam_search": None, "length_penalty": 0.5}, "length_penalty"),
    ],
)
def test_what_a_search_cannot_have_is_a_400(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": HELLO})):
        answer = server.post(path, **{**body, "max_tokens": 4, "use_beam_search": True, **fields})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param, answer.text


def test_tools_and_a_search_exclude_each_other(server: LiveServer) -> None:
    answer = server.post("/v1/chat/completions", messages=HELLO, max_tokens=4, use_beam_search=True, tools=[TOOL])
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"


def test_a_search_that_this_server_could_not_run_is_a_400(server: LiveServer, engine: FakeEngine) -> None:
    asked = {"prompt": "x", "use_beam_search": True, "max_tokens": 200}
    answer = server.post("/v1/completions", best_of=8, **asked)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens"
    assert "8 beams of up to 201 tokens need 1680 tokens of the KV cache, which has 1024" in answer.text
    assert server.post("/v1/completions", best_of=4, **asked).status_code == 200
    assert engine.ready is not None
    ready = engine.ready
    engine.ready = msgspec.structs.replace(ready, max_num_seqs=3)
    answer = server.post("/v1/completions", best_of=4, **asked)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "best_of"
    engine.ready = msgspec.structs.replace(ready, checkpoints=5)
    answer = server.post("/v1/completions", best_of=4, **asked)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "use_beam_search"
    engine.ready = ready
    engine.config.record_steps = "steps.jsonl"
    answer = server.post("/v1/completions", best_of=4, **asked)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "use_beam_search"
