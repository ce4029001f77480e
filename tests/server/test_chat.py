"""Chat completions through the `openai` client, against a live server."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from headway.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import MODEL, LiveServer, eventually
from tests.server.test_completions import TEXT, events

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


def prompt_of(engine: FakeEngine, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


def test_message_and_prompt(client: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert prompt_of(engine, tokenizer) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert engine.requests[0].params.max_tokens == 256 - len(engine.requests[0].prompt_token_ids)


def test_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 5


def test_several_choices_stream_with_a_role_each(client: openai.OpenAI) -> None:
    texts: dict[int, str] = {}
    for chunk in client.chat.completions.create(model=MODEL, messages=HELLO, n=3, stream=True):
        choice = chunk.choices[0]
        if choice.index not in texts:
            assert choice.delta.role == "assistant"
        texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    assert texts == {0: TEXT, 1: TEXT, 2: TEXT}


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, logprobs=True, top_logprobs=3, max_completion_tokens=4
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(token.token for token in logprobs.content) == answer.choices[0].message.content
    for token in logprobs.content:
        assert bytes(token.bytes or []).decode() == token.token
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token
    assert client.chat.completions.create(model=MODEL, messages=HELLO).choices[0].logprobs is None


def test_only_the_chosen_token_when_no_top_logprobs(server: LiveServer) -> None:
    choice = server.post("/v1/chat/completions", messages=HELLO, logprobs=True, max_tokens=2).json()["choices"][0]
    assert [token["top_logprobs"] for token in choice["logprobs"]["content"]] == [[], []]


def test_tokens_may_be_named_by_their_ids(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    """As tokens of a part of a character have no text that tells them apart."""
    named = {"return_tokens_as_token_ids": True}
    ids = tokenizer.encode(TEXT)[:3]
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=3, extra_body=named
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [token.token for token in logprobs.content] == [f"token_id:{each}" for each in ids]
    assert all(each.token.startswith("token_id:") for token in logprobs.content for each in token.top_logprobs)
    assert b"".join(bytes(token.bytes or []) for token in logprobs.content).decode() == tokenizer.decode(ids)
    found = client.completions.create(model=MODEL, prompt="x", max_tokens=3, logprobs=2, echo=True, extra_body=named)
    completion = found.choices[0].logprobs
    assert completion is not None and completion.tokens is not None and completion.top_logprobs is not None
    assert completion.tokens == [f"token_id:{each}" for each in [*tokenizer.encode("x"), *ids]]
    assert all(name.startswith("token_id:") for top in completion.top_logprobs[1:] for name in top)


def test_reasoning_effort_is_a_variable_of_the_template(
    start_server: Any, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    from headway.text.chat_template import ChatTemplate

    effort = ChatTemplate("{{ reasoning_effort }}: {{ messages[0].content }}", {})
    switch = ChatTemplate("{{ 'no ' if not enable_thinking }}thoughts: {{ messages[0].content }}", {})
    for template, asked, prompt in (
        (effort, {"reasoning_effort": "high"}, "high: Hello"),
        (effort, {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "x"}}, "x: Hello"),
        (switch, {"reasoning_effort": "none"}, "no thoughts: Hello"),
    ):
        server = start_server(template=template)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=asked)
            assert prompt_of(engine, tokenizer) == prompt
            if template is switch:
                with pytest.raises(openai.BadRequestError, match="the model's chat template does not know it"):
                    client.chat.completions.create(model=MODEL, messages=HELLO, reasoning_effort="high")


def test_stop_and_seed_and_limits(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, stop=" time", seed=7, max_tokens=50)
    assert answer.choices[0].message.content == "Once upon a"
    assert (engine.requests[0].params.seed, engine.requests[0].params.max_tokens) == (7, 50)
    eventually(lambda: not engine.running)


def test_an_answer_can_be_sent_back(client: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    message = client.chat.completions.create(model=MODEL, messages=HELLO).choices[0].message
    for sent_back in (message, message.model_dump()):
        conversation: Any = [*HELLO, sent_back, {"role": "user", "content": "Go on"}]
        client.chat.completions.create(model=MODEL, messages=conversation)
        assert f"<|im_start|>assistant\n{TEXT}<|im_end|>\n" in prompt_of(engine, tokenizer)


def test_parts_of_text_are_joined(client: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    parts: Any = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}])
    assert "user\none\ntwo<|im_end|>" in prompt_of(engine, tokenizer)


def test_developer_is_the_system(client: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    client.chat.completions.create(model=MODEL, messages=[{"role": "developer", "content": "Be brief"}, *HELLO])
    assert prompt_of(engine, tokenizer).startswith("<|im_start|>system\nBe brief")


def test_final_message_is_continued(server: LiveServer, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Once upon"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert server.post("/v1/chat/completions", messages=messages, **options).status_code == 200
    assert prompt_of(engine, tokenizer).endswith("assistant\nOnce upon")
    refused = server.post("/v1/chat/completions", messages=messages, continue_final_message=True)
    assert refused.json()["error"]["param"] == "continue_final_message"


def test_token_ids(server: LiveServer, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    answer = server.post("/v1/chat/completions", messages=HELLO, max_tokens=3, return_token_ids=True).json()
    assert answer["choices"][0]["token_ids"] == tokenizer.encode(TEXT)[:3]
    assert answer["prompt_token_ids"] == engine.requests[0].prompt_token_ids
    chunks = events(server, "/v1/chat/completions", messages=HELLO, max_tokens=3, return_token_ids=True)[:-1]
    assert chunks[0]["prompt_token_ids"] == engine.requests[0].prompt_token_ids
    assert [i for c in chunks for i in c["choices"][0]["token_ids"]] == tokenizer.encode(TEXT)[:3]


SCHEMA = {"name": "x", "schema": {"type": "object"}}


def test_text_is_a_response_format(server: LiveServer) -> None:
    good = {"response_format": {"type": "text"}, "modalities": ["text"], "tools": None, "tool_choice": None}
    assert server.post("/v1/chat/completions", messages=HELLO, **good).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"guided_json": {"not": {}}}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "((("}, "guided_grammar"),
        ({"guided_whitespace_pattern": "x"}, "guided_whitespace_pattern"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "response_format"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": [1], "guided_regex": "a"}, "allowed_token_ids"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"chat_template": "x"}, "chat_template"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"request_id": "x"}, "request_id"),
        ({"echo": True}, "echo"),
        ({"moderation": {}}, "moderation"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["audio"]}, "modalities[0]"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "json_schema": SCHEMA}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": SCHEMA}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**SCHEMA, "schema": {"not": {}}}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**SCHEMA, "strictly": True}}},
            "response_format.json_schema.strictly",
        ),
        ({"metadata": "x"}, "metadata"),
        ({"store": True}, "store"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]},
            "messages[0].content[0].y",
        ),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 10_000}, "max_completion_tokens"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_unsupported_and_bad_fields_are_named(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/chat/completions", **{"messages": HELLO, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_values_that_change_nothing_are_taken(server: LiveServer) -> None:
    """What clients send in every request: refused would be what changes the answer."""
    plain = {"messages": HELLO, "seed": 1, "max_tokens": 5}
    no_ops = {
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "functions": [],
        "function_call": "none",
        "store": False,
        "metadata": {"team": "a"},
        "user": "u-1",
        "safety_identifier": "u-1",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "use_beam_search": False,
        "length_penalty": 1.0,
        "early_stopping": False,
        "best_of": 1,
        "bad_words": [],
        "spaces_between_special_tokens": True,
        "include_reasoning": True,
        "vllm_xargs": {},
        "echo": False,
        "reasoning_effort": None,
        "response_format": {"type": "text"},
    }
    answers = [server.post("/v1/chat/completions", **{**plain, **extra}) for extra in ({}, no_ops)]
    texts = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
    assert texts[0] == texts[1]
    replayed = {
        "role": "assistant",
        "content": "x",
        "tool_calls": [],
        "annotations": [],
        "refusal": None,
        "parsed": {"a": 1},
    }
    assert server.post("/v1/chat/completions", messages=[*HELLO, replayed, *HELLO]).status_code == 200
    assert server.post("/v1/completions", prompt="x", suffix="", tools=[], store=False).status_code == 200
    assert server.post("/v1/completions", prompt="x", response_format={"type": "text"}).status_code == 200


def test_template_that_refuses(start_server: Any, tokenizer: Tokenizer) -> None:
    from headway.text.chat_template import ChatTemplate

    server = start_server(template=ChatTemplate("{{ raise_exception('roles must alternate') }}", {}))
    answer = server.post("/v1/chat/completions", messages=HELLO)
    assert answer.status_code == 400
    assert "roles must alternate" in answer.json()["error"]["message"]


def test_template_variables(start_server: Any, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    from headway.text.chat_template import ChatTemplate

    server = start_server(template=ChatTemplate("{{ mood }}", {}))
    server.post("/v1/chat/completions", messages=HELLO, chat_template_kwargs={"mood": "merry"})
    assert prompt_of(engine, tokenizer) == "merry"
    assert server.post("/v1/chat/completions", messages=HELLO).status_code == 400  # an empty prompt
