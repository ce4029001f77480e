"""Structured outputs of the served bundled model, with the `openai` client, and over the death of an engine."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema_rs
import openai
import pytest
from pydantic import BaseModel, Field

from tests.live.conftest import Served

MODEL = "headway/story"
ASKED: Any = [{"role": "user", "content": "Tell me about an animal."}]


class Leg(BaseModel):
    length: int = Field(ge=1, le=99)


class Animal(BaseModel):
    name: str = Field(max_length=12)
    kind: Literal["cat", "dog", "horse"]
    legs: list[Leg] = Field(max_length=2)
    wild: bool | None


def test_parse_gives_objects(client: openai.OpenAI) -> None:
    for seed in range(3):
        answer = client.chat.completions.parse(
            model=MODEL, messages=ASKED, response_format=Animal, max_tokens=400, seed=seed, n=2
        )
        assert len(answer.choices) == 2
        for choice in answer.choices:
            assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Animal)


def test_a_stream_grows_into_the_same_object(client: openai.OpenAI) -> None:
    question: Any = {
        "model": MODEL, "messages": ASKED, "response_format": Animal, "max_tokens": 400, "seed": 5, "temperature": 1.0,
    }  # fmt: skip
    whole = client.chat.completions.parse(**question).choices[0].message
    with client.chat.completions.stream(**question) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion().choices[0].message
    assert final.parsed == whole.parsed and "".join(deltas) == final.content == whole.content
    assert len(deltas) > 5 and "\n" not in final.content


def test_an_answer_that_is_cut_is_not_parsed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=ASKED, response_format=Animal, max_tokens=5)


def test_refusals_are_bad_requests_that_name_the_keyword(client: openai.OpenAI) -> None:
    schema = {"name": "x", "schema": {"type": "array", "uniqueItems": True}, "strict": True}
    with pytest.raises(openai.BadRequestError, match="schema keyword uniqueItems is not supported") as refused:
        client.chat.completions.create(
            model=MODEL,
            messages=ASKED,
            response_format={"type": "json_schema", "json_schema": schema},  # type: ignore[typeddict-item]
        )
    assert refused.value.param == "response_format.json_schema.schema"


def test_the_other_kinds_in_both_routes(client: openai.OpenAI) -> None:
    for extra, form in (
        ({"guided_regex": "[A-Z]{3}-[0-9]{2}"}, "[A-Z]{3}-[0-9]{2}"),
        ({"structured_outputs": {"choice": ["red", "green or blue"]}}, "red|green or blue"),
        ({"guided_grammar": 'root ::= "<" [a-z]{1,5} ">"'}, "<[a-z]{1,5}>"),
        ({"response_format": {"type": "json_object"}, "max_tokens": 600}, r"\{.*\}"),
    ):
        more: Any = {"extra_body": {"max_tokens": 30, **extra}, "seed": 1}
        chat = client.chat.completions.create(model=MODEL, messages=ASKED, **more).choices[0]
        text = client.completions.create(model=MODEL, prompt="A word:", **more).choices[0]
        for found, reason in ((chat.message.content, chat.finish_reason), (text.text, text.finish_reason)):
            assert found is not None and (reason == "length" or re.fullmatch(form, found, re.DOTALL)), found


@pytest.mark.slow
def test_answers_go_on_when_the_engine_dies(serve: Callable[..., Served]) -> None:
    server = serve("--max-num-seqs", "8").until_ready()
    schema = {"type": "array", "items": Animal.model_json_schema(), "minItems": 12, "maxItems": 12}
    schema["$defs"] = schema["items"].pop("$defs")  # type: ignore[attr-defined]
    body = {"model": MODEL, "messages": ASKED, "seed": 3, "max_tokens": 900, "guided_json": schema, "n": 2}

    def post() -> dict[str, Any]:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    expected, found = post(), list[dict[str, Any]]()
    asking = threading.Thread(target=lambda: found.append(post()))
    asking.start()
    while server.metric("num_requests_running") < 2:
        time.sleep(0.02)
    os.kill(server.engine_pid(), signal.SIGKILL)
    asking.join()
    assert server.metric("engine_restarts") == 1
    texts = [[choice["message"]["content"] for choice in answer["choices"]] for answer in (expected, found[0])]
    assert texts[0] == texts[1]
    for choice in expected["choices"]:
        if choice["finish_reason"] == "stop":
            assert jsonschema_rs.is_valid(schema, json.loads(choice["message"]["content"]))


def test_lines_of_a_batch(serve: Callable[..., Served], tmp_path: Path) -> None:
    server = serve("--data-dir", str(tmp_path)).until_ready()
    schema = Leg.model_json_schema() | {"additionalProperties": False}
    format_ = {"type": "json_schema", "json_schema": {"name": "leg", "schema": schema}}
    bodies = [{"response_format": format_}, {"guided_choice": ["a", "b"]}, {"guided_json": {"not": {}}}]
    lines = [
        {"custom_id": str(at), "method": "POST", "url": "/v1/chat/completions",
         "body": {"model": MODEL, "messages": ASKED, "max_tokens": 400, "seed": 1, **body}}
        for at, body in enumerate(bodies)
    ]  # fmt: skip
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        content = "\n".join(map(json.dumps, lines)).encode()
        file = client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        deadline = time.monotonic() + 60
        while (batch := client.batches.retrieve(batch.id)).status not in ("completed", "failed"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert batch.output_file_id is not None and batch.error_file_id is not None
        done = {
            line["custom_id"]: line for line in map(json.loads, client.files.content(batch.output_file_id).iter_lines())
        }
        wrong = [json.loads(line) for line in client.files.content(batch.error_file_id).iter_lines()]
    content_of = {at: line["response"]["body"]["choices"][0]["message"]["content"] for at, line in done.items()}
    assert isinstance(Leg.model_validate_json(content_of["0"]), Leg) and content_of["1"] in ("a", "b")
    assert [line["custom_id"] for line in wrong] == ["2"] and wrong[0]["response"]["status_code"] == 400
