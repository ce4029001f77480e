"""Completions through the `openai` client, against a live server."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import openai
import pytest

from headway.engine.messages import AddRequest
from headway.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import MODEL, LiveServer, eventually

TEXT = "Once upon a time there was a fox."


def events(server: LiveServer, path: str, **body: Any) -> list[Any]:
    """Every event of a stream, decoded; the last is "[DONE]" when it ended well."""
    response = server.post(path, stream=True, **body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_text_usage_and_finish_reason(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    answer = client.completions.create(model=MODEL, prompt="Hello", max_tokens=100)
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokenizer.encode("Hello"))
    assert answer.usage.completion_tokens == len(tokenizer.encode(TEXT)) + 1  # the eos token is counted
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.object == "text_completion"
    assert answer.model == MODEL


def test_max_tokens_is_16_unless_given(client: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    engine.reply = lambda request, index: tokenizer.encode(TEXT) * 10
    answer = client.completions.create(model=MODEL, prompt="Hello")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_choices_are_told_apart(
    client: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer, stream: bool
) -> None:
    engine.reply = lambda request, index: tokenizer.encode(f"{tokenizer.decode(request.prompt_token_ids)}-{index}")
    asked: dict[str, Any] = {"model": MODEL, "prompt": ["red", "green", "blue"], "n": 2, "max_tokens": 50}
    if stream:
        texts = [""] * 6
        for chunk in client.completions.create(**asked, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        texts = [c.text for c in sorted(client.completions.create(**asked).choices, key=lambda c: c.index)]
    assert texts == ["red-0", "red-1", "green-0", "green-1", "blue-0", "blue-1"]


def test_choices_stream_interleaved(server: LiveServer, engine: FakeEngine) -> None:
    indexes = [e["choices"][0]["index"] for e in events(server, "/v1/completions", prompt="x", n=3)[:-1]]
    assert indexes[:6] == [0, 1, 2, 0, 1, 2]


def test_token_id_prompts(client: openai.OpenAI, engine: FakeEngine) -> None:
    client.completions.create(model=MODEL, prompt=[50, 60, 511])
    client.completions.create(model=MODEL, prompt=[[50], [60, 61]])
    assert [r.prompt_token_ids for r in engine.requests] == [[50, 60, 511], [50], [60, 61]]


@pytest.mark.parametrize("stream", [False, True])
def test_streamed_text_equals_the_whole(
    client: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer, stream: bool
) -> None:
    text = "ça va? 日本語 👩‍👩‍👧 — naïve café ½"
    engine.reply = lambda request, index: tokenizer.encode(text)
    if stream:
        pieces = [
            c.choices[0].text for c in client.completions.create(model=MODEL, prompt="x", stream=True, max_tokens=99)
        ]
        assert len(pieces) > 5
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)
    else:
        assert client.completions.create(model=MODEL, prompt="x", max_tokens=99).choices[0].text == text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_ends_the_choice_and_frees_the_engine(
    server: LiveServer, engine: FakeEngine, stream: bool, include: bool
) -> None:
    asked = {"prompt": "x", "max_tokens": 99, "stop": ["time there", "nothing"], "include_stop_str_in_output": include}
    expected = "Once upon a " + ("time there" if include else "")
    if stream:
        chunks = [e for e in events(server, "/v1/completions", **asked) if e != "[DONE]"]
        assert "".join(c["choices"][0]["text"] for c in chunks) == expected
        last = chunks[-1]["choices"][0]
    else:
        last = server.post("/v1/completions", **asked).json()["choices"][0]
        assert last["text"] == expected
    assert last["finish_reason"] == "stop"
    assert last["stop_reason"] == "time there"
    eventually(lambda: not engine.running)


def test_stop_string_is_not_looked_for_before_min_tokens(server: LiveServer, engine: FakeEngine) -> None:
    asked = {"prompt": "x", "max_tokens": 99, "stop": ["a"], "min_tokens": 6}
    assert server.post("/v1/completions", **asked).json()["choices"][0]["text"] == "Once upon a time there w"
    assert engine.requests[0].params.min_tokens == 6


def test_stop_token_is_counted_but_not_shown(server: LiveServer, tokenizer: Tokenizer) -> None:
    token = tokenizer.encode(TEXT)[3]
    asked = {"prompt": "x", "max_tokens": 99, "stop_token_ids": [token], "return_token_ids": True}
    answer = server.post("/v1/completions", **asked).json()
    choice = answer["choices"][0]
    assert choice["token_ids"] == tokenizer.encode(TEXT)[:4]
    assert choice["text"] == tokenizer.decode(tokenizer.encode(TEXT)[:3])
    assert choice["stop_reason"] == token
    assert answer["usage"]["completion_tokens"] == 4
    shown = server.post("/v1/completions", **asked, include_stop_str_in_output=True).json()["choices"][0]
    assert shown["text"] == tokenizer.decode(tokenizer.encode(TEXT)[:4])


def test_echo_logprobs_and_token_ids(server: LiveServer, tokenizer: Tokenizer) -> None:
    asked = {"prompt": "Hi 日", "max_tokens": 3, "echo": True, "logprobs": 2, "return_token_ids": True}
    choice = server.post("/v1/completions", **asked).json()["choices"][0]
    prompt, output = tokenizer.encode("Hi 日"), tokenizer.encode(TEXT)[:3]
    assert choice["prompt_token_ids"] == prompt
    assert choice["token_ids"] == output
    assert choice["text"] == "Hi 日" + tokenizer.decode(output)
    logprobs = choice["logprobs"]
    assert {len(values) for values in logprobs.values()} == {len(prompt) + 3}
    assert logprobs["token_logprobs"][:2] == [None, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["tokens"][-3:] == [tokenizer.token_text(i) for i in output]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)


def test_unlikely_tokens_have_a_number_that_json_can_hold(server: LiveServer) -> None:
    answer = server.post("/v1/completions", prompt="x", max_tokens=1, logprobs=2)
    assert min(answer.json()["choices"][0]["logprobs"]["top_logprobs"][0].values()) == -9999.0


def test_prompt_logprobs_by_token_id(server: LiveServer, tokenizer: Tokenizer) -> None:
    choice = server.post("/v1/completions", prompt="Hello", max_tokens=1, prompt_logprobs=1).json()["choices"][0]
    ids = tokenizer.encode("Hello")
    assert choice["prompt_logprobs"][0] is None
    assert [next(iter(one)) for one in choice["prompt_logprobs"][1:]] == [str(i) for i in ids[1:]]
    assert choice["prompt_logprobs"][1][str(ids[1])] == {
        "logprob": -0.5,
        "rank": 1,
        "decoded_token": tokenizer.token_text(ids[1]),
    }
    single = server.post("/v1/completions", prompt=[50], max_tokens=1, echo=True, logprobs=1).json()["choices"][0]
    assert single["logprobs"]["token_logprobs"] == [None, -0.5]


def test_a_prompt_alone(server: LiveServer) -> None:
    """As evaluation tools ask for its log-probabilities."""
    asked = {"prompt": "Hello", "echo": True, "return_token_ids": True}
    longer, alone = (
        server.post("/v1/completions", **asked, max_tokens=most, logprobs=1, n=2, prompt_logprobs=1).json()
        for most in (1, 0)
    )
    for before, choice in zip(longer["choices"], alone["choices"], strict=True):
        assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("Hello", [], "length")
        assert choice["logprobs"] == {name: values[:-1] for name, values in before["logprobs"].items()}
        assert choice["prompt_logprobs"] == before["prompt_logprobs"]
    prompt_tokens = longer["usage"]["prompt_tokens"]
    assert alone["usage"] == longer["usage"] | {"completion_tokens": 0, "total_tokens": prompt_tokens}
    unseen = server.post("/v1/completions", prompt="Hello", max_tokens=0, prompt_logprobs=1, stop="Once").json()
    assert (unseen["choices"][0]["text"], unseen["choices"][0]["finish_reason"]) == ("", "length")
    assert unseen["choices"][0]["prompt_logprobs"] == alone["choices"][0]["prompt_logprobs"]
    usage = {"stream_options": {"include_usage": True}}
    *chunks, last, _ = events(server, "/v1/completions", **asked, **usage, max_tokens=0, include_timings=True)
    assert [c["choices"][0]["text"] for c in chunks] == ["Hello", ""]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, "length"]
    assert last["usage"]["completion_tokens"] == 0


def test_an_end_at_once_is_no_end_of_a_prompt_alone(server: LiveServer, engine: FakeEngine) -> None:
    engine.reply = lambda request, index: []
    choice = server.post("/v1/completions", prompt="Hello", echo=True, max_tokens=0).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Hello", "length", None)


def test_streamed_echo_token_ids_and_logprobs(server: LiveServer, tokenizer: Tokenizer) -> None:
    chunks = events(server, "/v1/completions", prompt="Hello", max_tokens=4, echo=True, return_token_ids=True)[:-1]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == tokenizer.encode("Hello")
    assert [i for c in chunks for i in c["choices"][0]["token_ids"]] == tokenizer.encode(TEXT)[:4]
    assert "".join(c["choices"][0]["text"] for c in chunks) == "Hello" + tokenizer.decode(tokenizer.encode(TEXT)[:4])
    scored = events(server, "/v1/completions", prompt="Hello", max_tokens=4, logprobs=1)[:-1]
    assert [c["choices"][0]["logprobs"]["token_logprobs"] for c in scored] == [[-0.5]] * 4


def test_tokens_come_several_at_a_time(server: LiveServer, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    """As with speculative decoding: what follows the stop string in one output is dropped, and not counted."""
    engine.tokens_per_step = 5
    answer = server.post("/v1/completions", prompt="x", max_tokens=99, stop=" upon", logprobs=0, return_token_ids=True)
    choice = answer.json()["choices"][0]
    assert choice["text"] == "Once"
    assert choice["token_ids"] == tokenizer.encode("Once upon")
    assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
    assert answer.json()["usage"]["completion_tokens"] == len(choice["token_ids"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_chunks_of_a_stream_differ_in_the_text_alone(server: LiveServer, engine: FakeEngine, path: str) -> None:
    """Byte for byte, whatever is in the text: all that the first chunk with a text says, the others say too."""
    text = 'a\0"\\ü\n{"text":"\0"}🧿 end'
    engine.reply = lambda request, index: engine.tokenizer.encode(text)
    prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    answer = server.post(path, stream=True, n=2, max_tokens=200, **prompt)
    raw = [event.removeprefix("data: ") for event in answer.text.split("\n\n")][:-2]
    said, texts = set(), ["", ""]
    for chunk in raw:
        (entry,) = json.loads(chunk)["choices"]
        piece = entry["text"] if "text" in entry else entry["delta"].get("content", "")
        texts[entry["index"]] += piece
        if piece and entry["finish_reason"] is None:
            before, _, after = chunk.rpartition(msgspec.json.encode(piece).decode())
            said.add((entry["index"], before, after))
    assert texts == [text] * 2 and len(raw) > 20
    assert len(said) == 2


def test_usage_in_a_stream(server: LiveServer) -> None:
    chunks = events(server, "/v1/completions", prompt="x", stream_options={"include_usage": True})
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"]["completion_tokens"] > 5
    assert all(chunk["usage"] is None for chunk in chunks[:-2])
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        c["usage"]["completion_tokens"]
        for c in events(server, "/v1/completions", prompt="x", stream_options=options)[:-1]
    ]
    assert counts[:3] == [1, 2, 3]
    assert "usage" not in events(server, "/v1/completions", prompt="x")[0]


def test_cached_tokens_are_reported_once_a_prompt(server: LiveServer) -> None:
    answer = server.post("/v1/completions", prompt=[list(range(40, 80)), [50]], n=2, max_tokens=2)
    assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
    assert answer.json()["usage"]["prompt_tokens"] == 41


def test_parameters_reach_the_engine(server: LiveServer, engine: FakeEngine) -> None:
    asked = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "seed": 42,
        "min_tokens": 2,
        "max_tokens": 9,
        "stop_token_ids": [77],
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    server.post(
        "/v1/completions", prompt="x", logit_bias={"50": -100, "60": 2.5}, cache_salt="tenant", user="u", **asked
    )
    request: AddRequest = engine.requests[0]
    assert {name: getattr(request.params, name) for name in asked} == asked
    assert request.params.logit_bias == {50: -100.0, 60: 2.5}
    assert request.cache_salt == "tenant"
    assert request.eos_token_ids == [0, 2]
    assert 0 < request.arrival_ns < request.sent_ns


def test_special_tokens_are_skipped_unless_asked_for(server: LiveServer) -> None:
    asked = {"prompt": "x", "max_tokens": 99, "include_stop_str_in_output": True}
    assert server.post("/v1/completions", **asked).json()["choices"][0]["text"] == TEXT
    kept = server.post("/v1/completions", **asked, skip_special_tokens=False).json()["choices"][0]["text"]
    assert kept == TEXT + "<|im_end|>"


def test_top_k_above_the_vocabulary_is_all_of_it(server: LiveServer, engine: FakeEngine) -> None:
    assert server.post("/v1/completions", prompt="x", top_k=10**9).status_code == 200
    assert engine.requests[0].params.top_k == 0


def test_error_raises_the_right_exception(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-9", prompt="x")
    assert unknown.value.code == "model_not_found"


def test_infer_is_a_prompt_and_a_text(server: LiveServer, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    """The id is the body's, else the header's, which is repeated in any case; what is wrong is named."""
    answer = server.client.post("/infer", json={"prompt": "Hello"}, headers={"X-Request-Id": "abc-1"})
    assert answer.json() == {"text": TEXT, "request_id": "abc-1"} and answer.headers["x-request-id"] == "abc-1"
    assert (engine.requests[-1].params.max_tokens, engine.requests[-1].params.temperature) == (100, 0.7)
    answer = server.post("/infer", prompt="Hello", max_tokens=2, temperature=0, request_id="mine")
    assert answer.json()["request_id"] == "mine" and answer.headers["x-request-id"] not in ("", "mine")
    assert engine.requests[-1].params.max_tokens == 2
    for body, param in (({}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": "a", "max_tokens": 0}, "max_tokens")):
        refused = server.post("/infer", **body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
