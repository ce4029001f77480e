"""Loops of agents against a server: `python agent_loops.py CLIENT URL`, by a Python that has the client's package.

Each client asks three times at least, has its tools called with what it has parsed and validated by itself, and gives
the results back. Printed are the calls, as a JSON list of [name, arguments].
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

MODEL = "headway/story"
QUESTION = "How is the weather in Paris?"
TURNS, MAX_TOKENS = 3, 100
CALLS: list[tuple[str, dict[str, Any]]] = []

City = Annotated[str, Field(max_length=8)]
Unit = Literal["C", "F"]
Days = Annotated[int, Field(ge=0, le=6)]


class Weather(BaseModel):
    """The weather in a city."""

    city: City
    unit: Unit
    days: Days


def get_weather(city: City, unit: Unit, days: Days) -> str:
    """The weather in a city."""
    CALLS.append(("get_weather", {"city": city, "unit": unit, "days": days}))
    return "sunny"


def clock(zone: Literal["UTC", "CET"]) -> str:
    """The time."""
    CALLS.append(("clock", {"zone": zone}))
    return "noon"


FUNCTIONS: dict[str, Callable[..., str]] = {"get_weather": get_weather, "clock": clock}


def langchain(url: str, **options: Any) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL, max_tokens=MAX_TOKENS, **options)
    tools = {name: tool(function) for name, function in FUNCTIONS.items()}
    held = model.bind_tools(list(tools.values()), tool_choice="required", strict=True, parallel_tool_calls=False)
    messages: list[Any] = [HumanMessage(QUESTION)]
    for turn in range(TURNS):
        if turn % 2:
            answer = held.invoke(messages)
        else:
            pieces = list(held.stream(messages))
            answer = sum(pieces[1:], start=pieces[0])
        messages.append(answer)
        assert answer.tool_calls and not answer.invalid_tool_calls, answer
        for call in answer.tool_calls:
            said = tools[call["name"]].invoke(call["args"])
            messages.append(ToolMessage(said, tool_call_id=call["id"]))
    parsed = model.with_structured_output(Weather, method="json_schema").invoke(QUESTION)
    assert isinstance(parsed, Weather)


def langchain_responses(url: str) -> None:
    langchain(url, use_responses_api=True)


def pydantic_ai(url: str) -> None:
    from pydantic_ai import Agent, ModelRetry
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    def patient() -> Callable[[Weather], Weather]:
        before = len(CALLS)

        def enough(output: Weather) -> Weather:
            CALLS.append(("get_weather", output.model_dump()))
            if len(CALLS) < before + TURNS:
                raise ModelRetry("Look again.")
            return output

        return enough

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    for model in (OpenAIChatModel(MODEL, provider=provider), OpenAIResponsesModel(MODEL, provider=provider)):
        agent = Agent(
            model,
            output_type=Weather,
            tools=list(FUNCTIONS.values()),
            retries=5,
            model_settings={"max_tokens": MAX_TOKENS, "parallel_tool_calls": False},
        )
        agent.output_validator(patient())
        assert isinstance(agent.run_sync(QUESTION).output, Weather)


def openai_agents(url: str) -> None:
    from agents import (
        Agent,
        MaxTurnsExceeded,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    async def run() -> None:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
                agent = Agent(
                    name="weather",
                    model=kind(model=MODEL, openai_client=client),
                    tools=[function_tool(function) for function in FUNCTIONS.values()],
                    model_settings=ModelSettings(
                        tool_choice="required", parallel_tool_calls=False, max_tokens=MAX_TOKENS
                    ),
                    reset_tool_choice=False,
                )
                before = len(CALLS)
                with suppress(MaxTurnsExceeded):
                    await Runner.run(agent, QUESTION, max_turns=TURNS)
                assert len(CALLS) == before + TURNS, CALLS

    asyncio.run(run())


def litellm(url: str) -> None:
    import os

    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm as lite

    tools = [{"type": "function", "function": openai_function(name)} for name in FUNCTIONS]
    for route in (
        {"model": f"openai/{MODEL}", "api_base": f"{url}/v1"},
        {"model": f"anthropic/{MODEL}", "api_base": url},
    ):
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        for turn in range(TURNS):
            asked: dict[str, Any] = {"messages": messages, "tools": tools, "tool_choice": "required"}
            asked |= {"max_tokens": MAX_TOKENS, "parallel_tool_calls": False, "stream": bool(turn % 2)}
            answer = lite.completion(**route, **asked, api_key="none")
            if turn % 2:
                answer = lite.stream_chunk_builder(list(answer), messages=messages)
            messages.append(answer.choices[0].message.model_dump())
            for call in answer.choices[0].message.tool_calls:
                said = called(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": said})


def openai(url: str) -> None:
    from openai import OpenAI, pydantic_function_tool

    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        chat = client.chat.completions
        asked: Any = {"model": MODEL, "max_tokens": MAX_TOKENS, "messages": [{"role": "user", "content": QUESTION}]}
        parsed = chat.parse(**asked, response_format=Weather).choices[0].message.parsed
        assert isinstance(parsed, Weather)
        tool = pydantic_function_tool(Weather, name="get_weather")
        messages: list[Any] = asked.pop("messages")
        forced: Any = {**asked, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
        for turn in range(TURNS):
            if turn % 2:
                message: Any = chat.parse(messages=messages, **forced).choices[0].message
            else:
                with chat.stream(messages=messages, **forced) as stream:
                    message = stream.get_final_completion().choices[0].message
            (call,) = message.tool_calls
            assert isinstance(call.function.parsed_arguments, Weather)
            messages += [
                message,
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "content": called(call.function.name, call.function.arguments),
                },
            ]
        responses = client.responses
        held: Any = {"model": MODEL, "max_output_tokens": MAX_TOKENS}
        assert isinstance(responses.parse(**held, input=QUESTION, text_format=Weather).output_parsed, Weather)
        functions: Any = [{"type": "function", "strict": True, **openai_function(name)} for name in FUNCTIONS]
        held |= {"tools": functions, "tool_choice": "required", "parallel_tool_calls": False}
        given: Any = QUESTION
        previous: str | None = None
        for _ in range(TURNS):
            with responses.stream(**held, input=given, **({"previous_response_id": previous} if previous else {})) as s:
                answer: Any = s.get_final_response()
            (item,) = answer.output
            previous = answer.id
            given = [
                {"type": "function_call_output", "call_id": item.call_id, "output": called(item.name, item.arguments)}
            ]


def openai_function(name: str) -> dict[str, Any]:
    """A function as OpenAI describes it, by pydantic."""
    from pydantic import TypeAdapter

    schema = TypeAdapter(FUNCTIONS[name]).json_schema()
    return {"name": name, "description": FUNCTIONS[name].__doc__, "parameters": schema}


def called(name: str, arguments: str) -> str:
    """Call a function with a JSON text, checked."""
    from pydantic import validate_call

    return validate_call(FUNCTIONS[name])(**json.loads(arguments))


def anthropic(url: str) -> None:
    from anthropic import Anthropic

    tools = [{"name": name, "input_schema": openai_function(name)["parameters"]} for name in FUNCTIONS]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        for _ in range(TURNS):
            with client.messages.stream(
                model=MODEL,
                max_tokens=MAX_TOKENS,
                messages=messages,
                tools=tools,
                tool_choice={"type": "any", "disable_parallel_tool_use": True},
            ) as stream:
                answer = stream.get_final_message()
            (block,) = answer.content
            said = called(block.name, json.dumps(block.input))
            result = {"type": "tool_result", "tool_use_id": block.id, "content": said}
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]


CLIENTS = {
    "langchain_openai": (langchain, langchain_responses),
    "pydantic_ai": (pydantic_ai,),
    "agents": (openai_agents,),
    "litellm": (litellm,),
    "openai": (openai,),
    "anthropic": (anthropic,),
}

if __name__ == "__main__":
    for loop in CLIENTS[sys.argv[1]]:
        loop(sys.argv[2])
    print(json.dumps(CALLS))
