"""Reasoning and calls of tools through /v1/messages and /v1/responses: loops of two turns with a scripted model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from headway.text.chat_template import ChatTemplate
from headway.text.tokenizer import Tokenizer
from tests.server.conftest import StartServer
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import MODEL, LiveServer
from tests.server.test_tools import ANSWER, ARGUMENTS, CALL, TEMPLATE, says

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
QUESTION = "How is the weather in Paris?"
PARSED = {"city": "Paris", "days": 2}
THOUGHT, WORDS = "The user wants weather.", "Let me see."


@pytest.fixture
def served(start_server: StartServer, engine: FakeEngine, tokenizer: Tokenizer) -> LiveServer:
    engine.max_model_len = 4096
    says(engine, tokenizer, ANSWER, "It is sunny.")
    return start_server(template=ChatTemplate(TEMPLATE, {}), reasoning_parser="qwen3")


@pytest.fixture
def claude(served: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def asker(served: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("streams", [False, True])
def test_a_loop_of_messages(
    claude: anthropic.Anthropic, engine: FakeEngine, tokenizer: Tokenizer, streams: bool
) -> None:
    tools: Any = [{"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    asked: Any = {"model": MODEL, "max_tokens": 2000, "tools": tools, "messages": messages}
    if streams:
        with claude.messages.stream(**asked) as stream:
            answer = stream.get_final_message()
    else:
        answer = claude.messages.create(**asked)
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, first, second = (block.model_dump() for block in answer.content)
    assert (thinking["thinking"], text["text"], answer.stop_reason) == (THOUGHT, WORDS, "tool_use")
    assert first["name"] == "get_weather" and first["input"] == second["input"] == PARSED
    assert first["id"] != second["id"]
    details: Any = answer.usage.output_tokens_details
    assert details.thinking_tokens > 3
    results = [{"type": "tool_result", "tool_use_id": each["id"], "content": "sunny"} for each in (first, second)]
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    assert claude.messages.create(**asked).content[0].text == "It is sunny."  # type: ignore[union-attr]
    prompt = tokenizer.decode(engine.requests[-1].prompt_token_ids, False)
    assert f"<think>{THOUGHT}</think>{WORDS}<tool_call>" in prompt and prompt.count("<|im_start|>tool\nsunny") == 2
    assert '"arguments": {"city": "Paris", "days": 2}' in prompt and '"description": "The weather."' in prompt


@pytest.mark.parametrize("streams", [False, True])
def test_a_loop_of_responses(asker: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer, streams: bool) -> None:
    tools: Any = [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": None}]
    asked: Any = {"model": MODEL, "tools": tools}
    if streams:
        with asker.responses.stream(input=QUESTION, **asked) as stream:
            events: list[Any] = list(stream)
            answer: Any = stream.get_final_response()
        done = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert [event.arguments for event in done] == [ARGUMENTS] * 2
        deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == 2 * ARGUMENTS and len(deltas) > 4
        assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == THOUGHT
        ids = [event.item.id for event in events if event.type == "response.output_item.added"]
        assert ids == [item.id for item in answer.output]
    else:
        answer = asker.responses.create(input=QUESTION, **asked)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, *calls = answer.output
    assert reasoning.content[0].text == THOUGHT and message.content[0].text == WORDS
    assert {(call.name, call.arguments) for call in calls} == {("get_weather", ARGUMENTS)}
    assert answer.usage.output_tokens_details.reasoning_tokens > 3
    outputs: list[Any] = [{"type": "function_call_output", "call_id": c.call_id, "output": "sunny"} for c in calls]
    second = asker.responses.create(input=outputs, previous_response_id=answer.id, **asked)
    assert second.output_text == "It is sunny."
    by_id = tokenizer.decode(engine.requests[-1].prompt_token_ids, False)
    assert f"<think>{THOUGHT}</think>{WORDS}<tool_call>" in by_id and by_id.count("<|im_start|>tool\nsunny") == 2
    history: list[Any] = [{"role": "user", "content": QUESTION}, *(item.model_dump() for item in answer.output)]
    asker.responses.create(input=[*history, *outputs], **asked)
    assert tokenizer.decode(engine.requests[-1].prompt_token_ids, False) == by_id, "as items of the request"


@pytest.mark.parametrize("spread", [1, 3])
def test_logprobs_of_a_text_are_those_of_its_own_tokens(
    asker: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer, spread: int
) -> None:
    """Held back because it could begin a tag, or not; and none of reasoning, of tags or of calls."""
    words = "Is 1 < 2, <tool? <"
    says(engine, tokenizer, f"<think>{THOUGHT}</think>{words}", f"<think>{THOUGHT}</think>\n\n{words}\n{CALL}")
    tools: Any = [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": None}]
    asked: Any = {"model": MODEL, "input": QUESTION, "tools": tools, "include": ["message.output_text.logprobs"]}
    for _ in range(2):
        engine.tokens_per_step = spread
        with asker.responses.stream(**asked) as stream:
            deltas: list[Any] = [event for event in stream if event.type == "response.output_text.delta"]
            streamed: Any = stream.get_final_response()
        for part in (streamed.output[1], asker.responses.create(**asked).output[1]):
            written = "".join(each.token for each in part.content[0].logprobs)
            assert part.content[0].text == words in written and THOUGHT not in written and "Paris" not in written
        assert [token.token for event in deltas for token in event.logprobs] == [
            token.token for token in streamed.output[1].content[0].logprobs
        ]


def test_thinking_that_is_omitted_has_no_events(claude: anthropic.Anthropic) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 2000, "messages": [{"role": "user", "content": QUESTION}]}
    hidden: Any = {"type": "adaptive", "display": "omitted"}
    with claude.messages.stream(**asked, thinking=hidden) as stream:
        kinds = [event.delta.type for event in stream if event.type == "content_block_delta"]
        answer = stream.get_final_message()
    assert "text_delta" in kinds and "thinking_delta" not in kinds
    assert answer.content[0].type == "thinking" and answer.content[0].thinking == ""


def test_choices_of_tools_reach_the_chat(claude: anthropic.Anthropic, asker: openai.OpenAI) -> None:
    tools: Any = [{"name": "get_weather", "input_schema": SCHEMA}]
    asked: Any = {"model": MODEL, "max_tokens": 2000, "messages": [{"role": "user", "content": QUESTION}]}
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    answer = claude.messages.create(**asked, tools=tools, tool_choice=choice)
    assert [block.type for block in answer.content].count("tool_use") == 1
    with pytest.raises(anthropic.BadRequestError, match=r"tool_choice\.name is missing"):
        claude.messages.create(**asked, tools=tools, tool_choice={"type": "tool"})  # type: ignore[arg-type, typeddict-item]
    functions: Any = [{"type": "function", "name": "get_weather", "parameters": SCHEMA}]
    single = asker.responses.create(model=MODEL, input=QUESTION, tools=functions, parallel_tool_calls=False)
    assert [item.type for item in single.output].count("function_call") <= 1
    with pytest.raises(openai.BadRequestError) as refused:
        asker.responses.create(model=MODEL, input=QUESTION, tools=functions, tool_choice={"type": "mcp"})  # type: ignore[arg-type]
    assert refused.value.param == "tool_choice"


def test_ids_are_those_that_the_family_s_templates_take(
    start_server: StartServer, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    """Mistral's take nine letters and digits."""
    engine.max_model_len = 4096
    says(engine, tokenizer, '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]')
    server = start_server(template=ChatTemplate(TEMPLATE, {}), reasoning_parser="none", tool_call_parser="mistral")
    tools = [{"name": "get_weather", "input_schema": SCHEMA}]
    asked = {"model": MODEL, "max_tokens": 500, "messages": [{"role": "user", "content": QUESTION}], "tools": tools}
    (block,) = server.post("/v1/messages", **asked).json()["content"]
    assert block["type"] == "tool_use" and re.fullmatch(r"[a-zA-Z0-9]{9}", block["id"])
