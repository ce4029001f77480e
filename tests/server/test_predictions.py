"""OpenAI's predicted outputs: what reaches the engine, what usage says, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from headway.policy.step.speculative_config import SpeculativeConfig
from headway.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer

HELLO = [{"role": "user", "content": "Hello"}]
TEXT = "Once upon a time there was a fox."


def predicted(content: Any = TEXT, kind: str = "content") -> dict[str, Any]:
    return {"prediction": {"type": kind, "content": content}}


@pytest.fixture
def drafting(server: LiveServer, engine: FakeEngine) -> LiveServer:
    engine.config.speculative_config = SpeculativeConfig()
    return server


def test_a_prediction_reaches_the_engine_as_tokens(
    drafting: LiveServer, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    parts = [{"type": "text", "text": "Once upon"}, {"type": "text", "text": "a time"}]
    for content, text in ((TEXT, TEXT), (parts, "Once upon\na time"), ("fox " * 900, "fox " * 900)):
        answer = drafting.post("/v1/chat/completions", messages=HELLO, **predicted(content))
        assert answer.status_code == 200, answer.text
        assert (
            engine.requests[-1].prediction == tokenizer.encode(text, add_special_tokens=False)[: engine.max_model_len]
        )
        details = answer.json()["usage"]["completion_tokens_details"]
        assert details == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    answer = drafting.post("/v1/chat/completions", messages=HELLO)
    assert engine.requests[-1].prediction == [] and "completion_tokens_details" not in answer.json()["usage"]


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"response_format": {"type": "json_object"}},
        {"use_beam_search": True},
    ],
)
def test_a_prediction_that_could_do_nothing_is_a_400(
    drafting: LiveServer, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    answer = drafting.post("/v1/chat/completions", messages=HELLO, max_tokens=5, **predicted(), **fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prediction", answer.text
    engine.config.speculative_config = None
    answer = drafting.post("/v1/chat/completions", messages=HELLO, **predicted())
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prediction"
    assert "--speculative-config" in answer.text
    answer = drafting.post("/v1/completions", prompt="x", **predicted())
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prediction"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"prediction": "text"}, "prediction"),
        ({"prediction": {"content": "x"}}, "prediction.type"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        (predicted(kind="file"), "prediction.type"),
        (predicted(""), "prediction.content"),
        (predicted(None), "prediction.content"),
        (predicted([]), "prediction.content"),
        (predicted(5), "prediction.content"),
        (predicted([{"type": "image_url"}]), "prediction.content[0].type"),
        (predicted([{"type": "text", "text": "x", "y": 1}]), "prediction.content[0].y"),
        (predicted("x" * (4 << 20) + "x"), "prediction.content"),
    ],
)
def test_a_malformed_prediction_is_a_400(drafting: LiveServer, given: dict[str, Any], param: str) -> None:
    answer = drafting.post("/v1/chat/completions", messages=HELLO, **given)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
