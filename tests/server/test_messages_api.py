"""Anthropic's API through the `anthropic` client, against a live server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from headway.text.tokenizer import Tokenizer
from tests.server.conftest import StartServer
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import MODEL, LiveServer
from tests.server.test_chat import prompt_of
from tests.server.test_completions import TEXT

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def claude(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_a_message(claude: anthropic.Anthropic, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    answer = claude.messages.create(
        model=MODEL, max_tokens=50, messages=HELLO, system="Be kind.", extra_body={"temperature": 0.5}
    )
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == TEXT  # type: ignore[union-attr]
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("end_turn", None, "assistant")
    prompt = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_of(engine, tokenizer) == prompt
    params = engine.requests[-1].params
    assert (params.max_tokens, params.temperature) == (50, 0.5)
    usage = answer.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(engine.requests[-1].prompt_token_ids)
    assert usage.output_tokens == len(tokenizer.encode(TEXT)) + 1


def test_a_stream_has_the_true_number_of_input_tokens_at_its_beginning(claude: anthropic.Anthropic) -> None:
    counted = claude.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens
    with claude.messages.stream(model=MODEL, max_tokens=50, messages=HELLO) as stream:
        events = list(stream)
        final = stream.get_final_message()
    kinds = [event.type for event in events if event.type != "text"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    usage = events[0].message.usage  # type: ignore[union-attr]
    assert usage.input_tokens + usage.cache_read_input_tokens == counted > 0
    assert final.content[0].text == TEXT and final.stop_reason == "end_turn"  # type: ignore[union-attr]
    assert final.usage.output_tokens > 5


def test_content_blocks_and_earlier_answers(
    claude: anthropic.Anthropic, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Three", "citations": None}]},
        {"role": "user", "content": [{"type": "text", "text": "four", "cache_control": {"type": "ephemeral"}}]},
    ]
    system: list[Any] = [{"type": "text", "text": "Count."}]
    claude.messages.create(model=MODEL, max_tokens=5, messages=messages, system=system)
    turns = [("system", "Count."), ("user", "One\ntwo"), ("assistant", "Three"), ("user", "four")]
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    assert prompt_of(engine, tokenizer) == f"{text}<|im_start|>assistant\n"
    claude.messages.create(model=MODEL, max_tokens=5, messages=messages[:2], system=system)
    before, _, _ = text.partition("<|im_end|>\n<|im_start|>user\nfour")
    assert prompt_of(engine, tokenizer) == before  # which the answer goes on with


def test_how_an_answer_ends(claude: anthropic.Anthropic) -> None:
    cut = claude.messages.create(model=MODEL, max_tokens=3, messages=HELLO)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    stopped = claude.messages.create(model=MODEL, max_tokens=50, messages=HELLO, stop_sequences=["time"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "time")
    assert stopped.content[0].text == "Once upon a "  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"model": "other"}, "other"),
        ({"thinkin": {}}, "thinking"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0] is of type 'image'"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is missing"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"system": [{"type": "text", "text": 3}]}, "system[0].text"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences has 17 strings"),
    ],
)
def test_errors_have_anthropic_s_shape(server: LiveServer, body: dict[str, Any], said: str) -> None:
    given = {"model": MODEL, "max_tokens": 5, "messages": HELLO} | body
    answer = httpx.post(f"{server.url}/v1/messages", json=given)
    error = answer.json()
    assert error["type"] == "error" and said in error["error"]["message"], error
    expected = (404, "not_found_error") if "model" in body else (400, "invalid_request_error")
    assert (answer.status_code, error["error"]["type"]) == expected


def test_an_engine_that_fails_ends_the_stream_with_an_error(server: LiveServer, engine: FakeEngine) -> None:
    engine.step_s = 0.01
    with httpx.stream(
        "POST",
        f"{server.url}/v1/messages",
        json={"model": MODEL, "max_tokens": 50, "messages": HELLO, "stream": True},
    ) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: message_start"
        engine.die()
        rest = list(lines)
    assert "event: error" in rest and '"type":"error"' in rest[rest.index("event: error") + 1]


def test_the_key_may_be_in_the_header_of_anthropic_s_clients(start_server: StartServer) -> None:
    server = start_server(api_keys=["sk-one"])
    with anthropic.Anthropic(base_url=server.url, api_key="sk-one", max_retries=0) as client:
        assert client.messages.create(model=MODEL, max_tokens=5, messages=HELLO).usage.output_tokens == 5
    with (
        anthropic.Anthropic(base_url=server.url, api_key="sk-two", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError) as refused,
    ):
        client.messages.create(model=MODEL, max_tokens=5, messages=HELLO)
    assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


def test_more_tokens_than_the_context_has_are_as_many_as_it_has(
    claude: anthropic.Anthropic, engine: FakeEngine
) -> None:
    claude.messages.create(model=MODEL, max_tokens=20_000, messages=HELLO)
    request = engine.requests[-1]
    assert request.params.max_tokens == 256 - len(request.prompt_token_ids)
