"""Bodies of many values: counted before they are parsed and before they are validated, and refused in few words."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic_core import from_json

from headway.server.api import prompts, request_body
from headway.server.api.request_body import MAX_VALUES, PIECE_BYTES, BodyReader, check_body
from headway.server.api.schemas import ChatBody, CompletionBody, TokenIds
from headway.server.edge import bodies
from headway.server.edge.bodies import SMALL_BYTES
from headway.server.errors import ApiError, bad_request
from headway.text import process
from headway.text.chat_template import ChatTemplate
from headway.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer

MANY = 60_000


def joined(entry: str, count: int = MANY) -> str:
    return ",".join([entry] * count)


def numbered(entry: str, count: int = MANY) -> str:
    return ",".join(entry % number for number in range(count))


@pytest.mark.parametrize(
    ("path", "body", "entries", "says"),
    [
        ("/v1/completions", "{@}", numbered('"%d": 1'), "values or more"),
        ("/v1/completions", "{@}", numbered('"%d": 1', 5000), "unknown field 0"),
        ("/v1/completions", '{"@": 1}', "a" * 500_000, "unknown field aaa"),
        ("/v1/completions", '{"prompt": [@]}', joined("[1]"), f"prompt has {MANY + 1} lists"),
        ("/v1/completions", '{"prompt": [@]}', joined("1.5"), "values or more"),
        ("/v1/completions", '{"prompt": "x", "stop": [@]}', joined('""', 5000), "stop has 5000 strings"),
        ("/v1/completions", '{"prompt": "x", "stop": "@"}', joined("a"), "at most 1024"),
        ("/v1/completions", '{"prompt": "x", "logit_bias": {@}}', numbered('"%d": "a"', 5000), "5000 token ids"),
        ("/v1/completions", '{"prompt": "x", "stream_options": {@}}', numbered('"%d": 1', 5000), "stream_options.0"),
        (
            "/v1/chat/completions",
            '{"messages": [@]}',
            joined('{"role": "user", "content": ""}', 5000),
            "at most 4096",
        ),
        ("/v1/chat/completions", '{"messages": [{@}]}', numbered('"%d": 1', 5000), "messages[0].0"),
        ("/v1/chat/completions", '{"messages": [@]}', joined('{"role": 1, "content": 1}', 4096), "messages[0].role"),
        (
            "/v1/chat/completions",
            '{"messages": [], "chat_template_kwargs": {"a": [@]}}',
            joined("[]"),
            "values or more",
        ),
        (
            "/v1/chat/completions",
            '{"messages": [{"role": "user", "content": ""}], "model": "@"}',
            "\\u0001" * MANY,
            "is not served here",
        ),
        ("/tokenize", '{"prompt": [@]}', joined('"a"'), "values or more"),
        ("/detokenize", '{"tokens": [@]}', joined("99999999999999999999"), "huge number"),
        ("/v1/rerank", '{"query": "a", "documents": [@]}', joined('""'), "values or more"),
    ],
)
def test_what_is_too_much_is_counted_and_refused_in_few_words(
    server: LiveServer, path: str, body: str, entries: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed, body = list[int](), body.replace("@", entries)

    def counting(raw: Any, **options: Any) -> Any:
        parsed.append(len(raw))
        return from_json(raw, **options)

    monkeypatch.setattr(request_body, "from_json", counting)
    answer = server.client.post(path, content=body, headers={"content-type": "application/json"})
    assert says in answer.json()["error"]["message"]
    assert (answer.status_code in (400, 404), len(answer.content) <= 2048) == (True, True)
    # What was not worth it never became objects: these keep the interpreter's lock.
    assert sum(parsed) == (0 if "or more" in says or "lists" in says or "huge" in says else len(body))


def test_an_error_is_short_whatever_it_repeats() -> None:
    for text in ("\x00" * 5000, "é" * 5000, "x" * 10**6, '"' * 5000):
        error = bad_request(text, text)
        assert len(error.response().body) <= 2048
        assert error.message.endswith("...") and text.startswith(error.message[:-3])
    assert bad_request("x" * 1000, "a.b").message == "x" * 1000


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": list(range(MAX_VALUES + 5))},
        {"prompt": [[1, 2], [], list(range(100_000))], "seed": 5, "stop": ["a,b"]},
        {"input": [[5] * 20_000, [6] * 20_000], "model": "[,{"},
        {"prompt": 'a, [b] {c}: \\ " é, \\\\' * (MAX_VALUES // 2)},
        {"prompt": ['\\",' * 30_000, "\\" * (2 * PIECE_BYTES + 1) + '"']},
        {"tokens": [-(2**63), 2**63 - 1] * MAX_VALUES},
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_a_large_body_means_what_it_says(body: dict[str, Any], indent: int | None) -> None:
    raw = bytearray(json.dumps(body, indent=indent).encode())
    found = request_body._object_in(raw)

    def listed(value: Any) -> Any:
        return list(map(listed, value)) if isinstance(value, (list, TokenIds)) else value

    assert {name: listed(value) for name, value in found.items()} == body
    for name in ("prompt", "tokens"):
        if isinstance(found.get(name), TokenIds):
            assert (found[name].lowest, found[name].highest) == (min(0, min(body[name])), max(body[name]))


@pytest.mark.parametrize(
    "text",
    ["[1,]", "[,1]", "[1 2]", "[[1],2]", "[[[1]]]", "[1", "[1]]", "[01]", "[-]", "[1,,2]"],
)
def test_a_large_body_is_as_strict_as_a_small_one(text: str) -> None:
    raw = f'{{"input": [{joined("1")}], "prompt": {text}}}'.encode()
    assert len(raw) > SMALL_BYTES
    with pytest.raises(ApiError) as refused:
        check_body(CompletionBody, {"prompt": request_body._object_in(bytearray(raw))["prompt"]})
    assert refused.value.status == 400


def test_long_lists_of_ids_reach_the_engine(
    start_server: Callable[..., LiveServer], engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    server = start_server()
    ids = [5, 7] * MAX_VALUES
    assert server.post("/detokenize", tokens=ids).json()["prompt"] == tokenizer.decode(ids, False)
    for prompt in (ids, [[5], ids]):
        message = server.post("/v1/completions", prompt=prompt).json()["error"]["message"]
        assert f"the prompt has {len(ids)} tokens" in message
    refused = server.post("/v1/completions", prompt=[*ids, 10**6]).json()["error"]["message"]
    assert f"1000000 at position {len(ids)}" in refused


def test_many_ids_are_decoded_in_another_process(
    server: LiveServer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = list[str]()
    decode = process.TextProcess.decode

    def noted(self: process.TextProcess, *asked: Any) -> str:
        decoded.append(decode(self, *asked))
        return decoded[-1]

    monkeypatch.setattr(process.TextProcess, "decode", noted)
    few, many = [5, 7] * 100, [5, 7] * MAX_VALUES
    assert server.post("/detokenize", tokens=few).json()["prompt"] == tokenizer.decode(few, False)
    assert not decoded
    assert server.post("/detokenize", tokens=many).json()["prompt"] == decoded[0] == tokenizer.decode(many, False)
    for wrong, shown in ((10**6, "1000000"), (-1, "-1"), (10**30, "a huge number"), (-(10**30), "a huge number")):
        refused = server.post("/detokenize", tokens=[*many, wrong, 5]).json()["error"]["message"]
        assert f"tokens has {shown} at position {len(many)}" in refused


def test_a_text_that_is_only_tokenized_has_a_limit_of_its_own(
    server: LiveServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "MOST_CUT", 20_000)
    assert server.post("/tokenize", prompt="x" * 20_000).status_code == 200
    assert server.post("/tokenize", prompt="é" * 10_000).status_code == 200
    for text in ("x" * 20_001, "é" * 10_001):
        for path in ("/tokenize", "/v1/completions"):
            cut = {} if path == "/tokenize" else {"truncate_prompt_tokens": 5}
            answer = server.post(path, prompt=text, **cut)
            assert answer.status_code == 400 and "20000" in answer.json()["error"]["message"]


def test_large_bodies_share_a_bound(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_HELD", 0)
    answer = server.post("/v1/completions", prompt="x" * 2 * SMALL_BYTES)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_large_bodies")
    assert answer.headers["retry-after"] == "1"
    assert server.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200
    monkeypatch.undo()
    assert server.post("/tokenize", prompt="x" * 2 * SMALL_BYTES).status_code == 200
    assert server.service.bodies.held == 0


def test_a_message_without_content_is_an_empty_one(
    server: LiveServer, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    """Agents repeat an answer that had no text."""
    asked: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": None}]
    for content in (None, ""):
        asked[1]["content"] = content
        answer = server.post("/v1/chat/completions", messages=[*asked, {"role": "user", "content": "So"}])
        assert answer.status_code == 200
    first, second = (request.prompt_token_ids for request in engine.requests[-2:])
    assert first == second
    assert "None" not in tokenizer.decode(first)


def test_numbers_of_a_query_are_read_whole(start_server: Callable[..., LiveServer], tmp_path: Any) -> None:
    server = start_server(data_dir=tmp_path)
    for given in ("1000000000", "1" * 30, "1" * 5000, "0", "-1", "1.0", "²"):
        for path, name in (("/debug/schedule", "steps"), ("/v1/files", "limit"), ("/v1/batches", "limit")):
            answer = server.client.get(path, params={name: given})
            assert answer.status_code == 400, (path, given)
            assert answer.json()["error"]["param"] == name


def test_fields_of_chats_are_counted_where_they_are_known() -> None:
    """`metadata` has no effect in a chat, and so no limit."""
    many = {str(number): "x" for number in range(100)}
    body = check_body(ChatBody, {"messages": [{"role": "user", "content": "x"}], "metadata": many})
    assert body.messages[0].content == "x"


def test_reader_of_small_bodies_takes_no_thread() -> None:
    assert BodyReader(10)._thread._threads == set()


def test_a_prompt_that_no_context_holds_is_refused_without_being_encoded(server: LiveServer) -> None:
    text = "once upon a time " * 200_000
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        began = time.monotonic()
        answer = server.post(path, **body)
        assert answer.status_code == 400 and "characters" in answer.json()["error"]["message"], answer.text
        assert time.monotonic() - began < 3


def test_variables_of_a_template_bring_no_tools(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    answer = server.post("/v1/chat/completions", messages=messages, chat_template_kwargs={"tools": [{"a": 1}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "chat_template_kwargs.tools"
    assert server.post("/v1/chat/completions", messages=messages, chat_template_kwargs={"tools": []}).status_code == 200


def test_a_template_that_loops_for_a_request_is_ended_while_others_go_on(
    start_server: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "RENDER_S", 1.0)
    looping = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    source = "{% if loop_for_ever is defined %}" + looping + "{% endif %}{{ messages[0].content }}"
    server = start_server(template=ChatTemplate(source, {}))
    messages = [{"role": "user", "content": "Hello"}]
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(
            server.post, "/v1/chat/completions", messages=messages, chat_template_kwargs={"loop_for_ever": True}
        )
        worst = 0.0
        while not slow.done():
            began = time.monotonic()
            assert server.client.get("/health").status_code == 200
            worst = max(worst, time.monotonic() - began)
    assert worst < 1.0
    answer = slow.result()
    assert answer.status_code == 400 and "took more than 1 s" in answer.json()["error"]["message"]
    assert server.post("/v1/chat/completions", messages=messages).status_code == 200
