"""Calls of tools and reasoning through the `openai` client, against a live server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from headway.engine.messages import AddRequest
from headway.text.calls.families import CALLS, CallFamily, family_of
from headway.text.calls.syntaxes import JsonCalls
from headway.text.chat_template import ChatTemplate
from headway.text.tokenizer import Tokenizer
from tests.server.conftest import StartServer
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import MODEL, LiveServer

TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
ASKED: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
ARGUMENTS = '{"city":  "Paris", "days": 2}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
ANSWER = f"<think>\nThe user wants weather.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"


def says(engine: FakeEngine, tokenizer: Tokenizer, *texts: str) -> None:
    """Let each choice, or each request, say one of the texts."""

    def reply(request: AddRequest, index: int) -> list[int]:
        return tokenizer.encode(texts[(index + len(engine.requests) - 1) % len(texts)])

    engine.reply = reply


@pytest.fixture
def served(start_server: StartServer, engine: FakeEngine) -> LiveServer:
    engine.max_model_len = 4096
    return start_server(template=ChatTemplate(TEMPLATE, {}), reasoning_parser="qwen3")


@pytest.fixture(scope="module")
def refusing(tokenizer: Tokenizer) -> Iterator[LiveServer]:
    """A server like `served`, for all requests that are refused."""
    engine = FakeEngine(tokenizer)
    engine.max_model_len = 4096
    server = LiveServer(engine, tokenizer, ChatTemplate(TEMPLATE, {}), reasoning_parser="qwen3").start()
    yield server
    server.stop()


@pytest.fixture
def asker(served: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_calls_reasoning_and_content(asker: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    says(engine, tokenizer, ANSWER)
    answer = asker.chat.completions.create(model=MODEL, messages=ASKED, tools=[WEATHER])
    (choice,) = answer.choices
    message: Any = choice.message
    assert choice.finish_reason == "tool_calls" and message.content == "Let me see."
    assert message.reasoning_content == message.reasoning == "The user wants weather."
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("get_weather", ARGUMENTS)
    ] * 2
    assert len({call.id for call in message.tool_calls}) == 2
    usage = answer.usage
    assert usage and usage.completion_tokens_details and usage.completion_tokens_details.reasoning_tokens
    thought = len(tokenizer.encode("<think>\nThe user wants weather.\n</think>"))
    assert abs(usage.completion_tokens_details.reasoning_tokens - thought) < len("</think>")
    prompt = tokenizer.decode(engine.requests[0].prompt_token_ids, False)
    assert '"name": "get_weather"' in prompt and "strict" not in prompt


@pytest.mark.parametrize("per_step", [1, 3, 500])
def test_a_stream_has_them_as_openai_streams_them(
    asker: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer, per_step: int
) -> None:
    says(engine, tokenizer, ANSWER)
    engine.tokens_per_step = per_step
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks: Any = list(asker.chat.completions.create(model=MODEL, messages=ASKED, tools=[WEATHER], **options))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant" and not any(delta.role for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "The user wants weather."
    parts = [delta.tool_calls for delta in deltas if delta.tool_calls]
    assert all(len(each) == 1 for each in parts)
    for index in range(2):
        first, *rest = [each[0] for each in parts if each[0].index == index]
        assert first.id and first.type == "function" and first.function.name == "get_weather"
        assert first.function.arguments == "" and not any(part.id or part.function.name for part in rest)
        assert "".join(part.function.arguments for part in rest) == ARGUMENTS
        assert per_step > 1 or len(rest) > 3, "arguments come in pieces"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == "tool_calls" and not any(reasons[:-1])
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens > 3


def test_the_clients_stream_helper_understands_it(
    asker: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    says(engine, tokenizer, ANSWER)
    with asker.chat.completions.stream(model=MODEL, messages=ASKED, tools=[WEATHER]) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final: Any = stream.get_final_completion().choices[0]
    assert [(each.name, each.arguments) for each in done] == [("get_weather", ARGUMENTS)] * 2
    assert final.message.tool_calls[1].function.arguments == ARGUMENTS and final.finish_reason == "tool_calls"


def test_a_conversation_of_three_turns(asker: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    """What a message of an answer says goes back as it is, and so do the results of its calls."""
    says(engine, tokenizer, ANSWER, '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>', "It rains.")
    conversation = list(ASKED)
    for turn in range(3):
        message: Any = (
            asker.chat.completions.create(model=MODEL, messages=conversation, tools=[WEATHER, CLOCK]).choices[0].message
        )
        conversation.append(message if turn else message.model_dump())
        for call in message.tool_calls or ():
            result = json.dumps({"of": call.function.name} | json.loads(call.function.arguments))
            conversation.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert message.content == "It rains." and not message.tool_calls
    prompt = tokenizer.decode(engine.requests[-1].prompt_token_ids, False)
    written = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
    assert prompt.count(written) == 2 and "<think>The user wants weather.</think>Let me see." in prompt
    assert '<|im_start|>tool\n{"of": "get_weather", "city": "Paris", "days": 2}<|im_end|>' in prompt
    assert '<|im_start|>tool\n{"of": "clock"}<|im_end|>' in prompt


def test_each_choice_has_its_own_calls(asker: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    says(engine, tokenizer, ANSWER, "Just text.")
    choices: Any = asker.chat.completions.create(model=MODEL, messages=ASKED, tools=[WEATHER], n=2).choices
    assert {choice.finish_reason for choice in choices} == {"tool_calls", "stop"}
    assert {choice.message.content for choice in choices} == {"Let me see.", "Just text."}
    whole: dict[int, str] = {}
    for chunk in asker.chat.completions.create(model=MODEL, messages=ASKED, tools=[WEATHER], n=2, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            assert call.function
            whole[chunk.choices[0].index] = whole.get(chunk.choices[0].index, "") + (call.function.arguments or "")
    assert list(whole.values()) == [ARGUMENTS * 2]


def test_logprobs_and_token_ids_cover_all_tokens(
    served: LiveServer, asker: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    says(engine, tokenizer, ANSWER)
    ids = tokenizer.encode(ANSWER)
    asked: Any = {"messages": ASKED, "tools": [WEATHER], "logprobs": True, "return_token_ids": True}
    whole = served.post("/v1/chat/completions", **asked).json()["choices"][0]
    assert whole["token_ids"][: len(ids)] == ids and len(whole["logprobs"]["content"]) == len(whole["token_ids"])
    chunks = asker.chat.completions.create(
        model=MODEL, messages=ASKED, tools=[WEATHER], logprobs=True, stream=True, extra_body={"return_token_ids": True}
    )
    tokens, streamed = [], list[int]()
    for chunk in chunks:
        choice: Any = chunk.choices[0]
        tokens += [token.token for token in (choice.logprobs.content if choice.logprobs else [])]
        streamed += choice.token_ids
    assert "".join(tokens).startswith(ANSWER) and streamed == whole["token_ids"]


def test_one_call_at_most(asker: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    says(engine, tokenizer, ANSWER)
    asked: Any = {"model": MODEL, "messages": ASKED, "tools": [WEATHER], "parallel_tool_calls": False}
    calls = asker.chat.completions.create(**asked).choices[0].message.tool_calls
    assert calls is not None and len(calls) == 1


def test_no_calls_and_no_reasoning_where_they_are_not_wanted(
    asker: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    says(engine, tokenizer, ANSWER)
    asked: Any = {"model": MODEL, "messages": ASKED, "extra_body": {"include_reasoning": False}}
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice: Any = asker.chat.completions.create(**asked, **more).choices[0]
        assert choice.message.content == f"Let me see.\n{CALL}\n{CALL}" and choice.finish_reason == "stop"
        assert choice.message.tool_calls is None and not hasattr(choice.message, "reasoning")
        assert "get_weather" not in tokenizer.decode(engine.requests[-1].prompt_token_ids, False)
    chunks: Any = asker.chat.completions.create(**asked, stream=True)
    assert not any(hasattr(chunk.choices[0].delta, "reasoning_content") for chunk in chunks)


def test_an_answer_that_is_cut_off_in_a_call(asker: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    says(engine, tokenizer, CALL)
    cut = len(tokenizer.encode(CALL.partition("days")[0]))
    answer = asker.chat.completions.create(model=MODEL, messages=ASKED, tools=[WEATHER], max_completion_tokens=cut)
    message: Any = answer.choices[0].message
    assert answer.choices[0].finish_reason == "length" and message.content is None
    assert ARGUMENTS.startswith(message.tool_calls[0].function.arguments)


def test_an_unknown_tool_is_passed_on(asker: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    says(engine, tokenizer, '<tool_call>{"name": "launch it", "arguments": {"at": null}}</tool_call>')
    message: Any = asker.chat.completions.create(model=MODEL, messages=ASKED, tools=[WEATHER]).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("launch it", '{"at": null}')


def test_what_is_no_call_is_content(asker: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    text = "<tool_call>get_weather of Paris</tool_call> and <tool_call>"
    says(engine, tokenizer, text)
    choice = asker.chat.completions.create(model=MODEL, messages=ASKED, tools=[WEATHER]).choices[0]
    assert (choice.message.content, choice.finish_reason, choice.message.tool_calls) == (text, "stop", None)


def test_metrics_tell_what_came_of_calls(
    served: LiveServer, asker: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    says(engine, tokenizer, ANSWER, "Text.", "<tool_call>none</tool_call>", CALL.removesuffix("}}\n</tool_call>"))
    for _ in range(4):
        asker.chat.completions.create(model=MODEL, messages=ASKED, tools=[WEATHER])
    lines = [line for line in served.client.get("/metrics").text.splitlines() if line.startswith("headway:tool_calls")]
    found = {line.partition('result="')[2].partition('"')[0]: float(line.split()[-1]) for line in lines}
    assert found == {"complete": 2, "malformed": 1, "broken": 1}


def test_reasoning_that_the_prompt_begins(start_server: StartServer, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ messages[0].content.split('</think>')[0] }}<think>\n", {})
    says(engine, tokenizer, "Hm.\n</think>\n\nYes.")
    server = start_server(template=template)
    message = server.post("/v1/chat/completions", messages=ASKED).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Yes.")
    begun = [*ASKED, {"role": "assistant", "content": "<think>Well,"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    continued = start_server(template=ChatTemplate("{{ messages[-1].content }}", {}), reasoning_parser="think")
    for messages, thought in ((begun, "Hm."), ([*ASKED, {"role": "assistant", "content": "Well,"}], None)):
        answer = continued.post("/v1/chat/completions", messages=messages, **options).json()
        assert answer["choices"][0]["message"].get("reasoning") == thought
    assert server.service.family == family_of(template.source, "none", "think")


def test_special_tokens_can_be_tags(
    start_server: StartServer, engine: FakeEngine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then they are read, while others are left out of the text as ever."""
    tag, other = "<|im_start|>", tokenizer.special_tokens["bos_token"]
    assert tokenizer.decode(tokenizer.encode(tag + other)) == ""
    monkeypatch.setitem(CALLS, "hermes", CallFamily(JsonCalls((tag,))))
    engine.max_model_len = 4096
    says(engine, tokenizer, other + "Hi " + other + tag + '{"name": "clock", "arguments": {}}')
    server = start_server(template=ChatTemplate("{{ tools }}", {}), tool_call_parser="hermes")
    message = server.post("/v1/chat/completions", messages=ASKED, tools=[CLOCK]).json()["choices"][0]["message"]
    assert (message["content"], message["tool_calls"][0]["function"]["name"]) == ("Hi", "clock")
    assert len(message["tool_calls"][0]["id"]) == len("call_") + 24


def test_ids_of_mistral_have_nine_letters(start_server: StartServer, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    engine.max_model_len = 4096
    says(engine, tokenizer, "[TOOL_CALLS]clock[ARGS]{}")
    server = start_server(template=ChatTemplate("{{ tools }}[TOOL_CALLS]", {}))
    message = server.post("/v1/chat/completions", messages=ASKED, tools=[CLOCK]).json()["choices"][0]["message"]
    assert len(message["tool_calls"][0]["id"]) == 9 and message["tool_calls"][0]["id"].isalnum()


def _function(**fields: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"tools": {}}, "tools", "must be a valid list"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing"),
        ({"tools": _function(name="a b")}, "tools[0].function.name", "'a b'"),
        ({"tools": _function(name="")}, "tools[0].function.name", "at least 1"),
        ({"tools": _function(parameter={})}, "tools[0].function.parameter", "unknown field"),
        ({"tools": _function(parameters="x")}, "tools[0].function.parameters", "dictionary"),
        ({"tools": _function(parameters={"type": "array"})}, "tools[0].function.parameters.type", '"object"'),
        ({"tools": _function(parameters={"properties": []})}, "tools[0].function.parameters.properties", "schema for"),
        ({"tools": _function() * 2}, "tools[1].function.name", "an earlier tool"),
        ({"tools": _function() * 513}, "tools", "at most 512"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice", "required"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            None,
            "one of the tools",
        ),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "something else",
        ),
        ({"tools": [WEATHER], "parallel_tool_calls": 1}, "parallel_tool_calls", "boolean"),
        ({"chat_template_kwargs": {"tools": [WEATHER]}}, "chat_template_kwargs.tools", "a field of its own"),
        ({"functions": [{"name": "f"}]}, "functions", "tools"),
    ],
)
def test_bad_tools_are_refused_by_field(refusing: LiveServer, fields: Any, param: str | None, said: str) -> None:
    answer = refusing.post("/v1/chat/completions", messages=ASKED, **fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and said in error["message"], error
    assert param is None or error["param"] == param


def called(arguments: Any) -> Any:
    return {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id"),
        ({"role": "tool", "tool_call_id": "a", "content": None}, "messages[1].content"),
        ({"role": "tool", "tool_call_id": "a"}, "messages[1].content"),
        ({"role": "assistant"}, "messages[1].content"),
        ({"role": "user", "content": "x", "tool_calls": [called("")]}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[1].tool_calls[0].id"),
        ({"role": "assistant", "tool_calls": [called({})]}, "messages[1].tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [called("[" * 40000)]}, "messages"),
    ],
)
def test_bad_calls_in_the_history_are_refused_by_field(refusing: LiveServer, message: Any, param: str) -> None:
    answer = refusing.post("/v1/chat/completions", messages=[*ASKED, message])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_arguments_that_do_not_parse_go_back_as_text(
    served: LiveServer, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    for arguments in ('{"city": "Par', "", "[" * 2500, "5"):
        calls = [called(arguments)]
        answer = served.post("/v1/chat/completions", messages=[*ASKED, {"role": "assistant", "tool_calls": calls}])
        assert answer.status_code == 200, answer.json()
        assert json.dumps(arguments) in tokenizer.decode(engine.requests[-1].prompt_token_ids, False)


def test_a_model_whose_template_knows_no_tools(server: LiveServer, start_server: StartServer) -> None:
    refused = server.post("/v1/chat/completions", messages=ASKED, tools=[WEATHER])
    assert refused.status_code == 400 and "--chat-template" in refused.json()["error"]["message"]
    unknown = start_server(template=ChatTemplate("{{ tools }}{{ messages[0].content }}", {}))
    refused = unknown.post("/v1/chat/completions", messages=ASKED, tools=[WEATHER])
    assert refused.status_code == 400 and "--tool-call-parser" in refused.json()["error"]["message"]
    named = start_server(template=ChatTemplate("{{ tools }}", {}), tool_call_parser="hermes")
    assert named.post("/v1/chat/completions", messages=ASKED, tools=[CLOCK]).status_code == 200


def test_tokenize_counts_tools(served: LiveServer) -> None:
    plain, more = (served.post("/tokenize", messages=ASKED, **each).json() for each in ({}, {"tools": [WEATHER]}))
    assert more["count"] > plain["count"] + 20


def test_a_plain_chat_is_answered_as_before(server: LiveServer) -> None:
    """No parser stands in its way, and its answer has no new field."""
    answer = server.post("/v1/chat/completions", messages=ASKED).json()
    assert answer["choices"][0]["message"].keys() == {"role", "content", "refusal", "annotations"}
    assert "completion_tokens_details" not in answer["usage"]
    assert server.service.family.is_plain


@pytest.mark.parametrize("name", CALLS)
def test_every_family_is_found_by_its_signs(name: str) -> None:
    for signs in CALLS[name].signs:
        source = "{{ tools }}" + "".join(signs)
        found = family_of(source)
        assert (
            found.calls in (CALLS[name], CALLS["llama4_pythonic"]) if name == "openai" else found.calls is CALLS[name]
        )


def test_an_answer_is_held_to_its_schema_behind_what_the_model_thinks(
    asker: openai.OpenAI, engine: FakeEngine, start_server: StartServer, tokenizer: Tokenizer
) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 1}, "strict": True}}
    says(engine, tokenizer, "<think>Hm.</think>1")
    answer: Any = asker.chat.completions.create(model=MODEL, messages=ASKED, response_format=schema)
    assert (answer.choices[0].message.content, answer.choices[0].message.reasoning_content) == ("1", "Hm.")
    held = engine.requests[-1].params.structured_outputs
    assert held is not None and "@answer" in held.text and "<think>" in held.text
    plain = start_server(template=ChatTemplate(TEMPLATE, {}), reasoning_parser="none")
    plain.post("/v1/chat/completions", messages=ASKED, response_format=schema)
    held = engine.requests[-1].params.structured_outputs
    assert held is not None and "@answer" not in held.text


def strict(name: str = "f", **keywords: Any) -> Any:
    parameters = {"type": "object", "properties": {"a": {"type": "array", **keywords}}, "required": ["a"]}
    return {"type": "function", "function": {"name": name, "strict": True, "parameters": parameters}}


def test_calls_of_strict_tools_are_held_to_their_schemas_without_being_required(
    served: LiveServer, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    """What cannot be kept of them is no error, as no call has to come; a header names it."""
    says(engine, tokenizer, "Text.")

    def ask(*tools: Any, **fields: Any) -> tuple[Any, str | None]:
        answer = served.post("/v1/chat/completions", messages=ASKED, tools=tools, **fields)
        assert answer.status_code == 200, answer.json()
        return engine.requests[-1].params.structured_outputs, answer.headers.get("x-headway-relaxed")

    for held, relaxed in (ask(strict()), ask(strict(), CLOCK, tool_choice="auto")):
        assert held is not None and "<tool_call>" in held.text and relaxed is None
    held, relaxed = ask(strict(uniqueItems=True))
    assert held is not None and relaxed == "tools[0].function.parameters/properties/a/uniqueItems"
    held, relaxed = ask(strict(pattern="(?=a)", items={"type": "string", "pattern": "(?=a)a"}))
    assert held is None and relaxed is not None and relaxed.startswith("tools (") and "look" in relaxed
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 1}}}
    for held, _ in (ask(strict(), response_format=schema), ask(strict(), allowed_token_ids=[5])):
        assert held is None or "<tool_call>" not in held.text
    for tools, choice in (([WEATHER], "auto"), ([strict()], "none")):
        assert ask(*tools, tool_choice=choice) == (None, None)
    refused = served.post(
        "/v1/chat/completions", messages=ASKED, tools=[strict(uniqueItems=True)], tool_choice="required"
    )
    assert refused.status_code == 400


def test_a_syntax_that_cannot_be_held_to_a_strict_schema_is_free(
    start_server: StartServer, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    engine.max_model_len = 4096
    server = start_server(template=ChatTemplate(TEMPLATE, {}), tool_call_parser="pythonic")
    for choice in ("auto", "required"):
        assert (
            server.post("/v1/chat/completions", messages=ASKED, tools=[strict()], tool_choice=choice).status_code == 200
        )
        assert engine.requests[-1].params.structured_outputs is not None
    answer = server.post("/v1/chat/completions", messages=ASKED, tools=[strict(maxItems=3)])
    assert answer.status_code == 200 and engine.requests[-1].params.structured_outputs is None
    assert "maxItems is not supported in the syntax" in answer.headers["x-headway-relaxed"]
