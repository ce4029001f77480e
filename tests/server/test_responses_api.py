"""The Responses API through the `openai` client, against a live server."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from headway.config_files.tenants import key_digest, read_tenant_file
from headway.server.api.responses_store import Kept, ResponseStore
from headway.server.errors import ApiError
from headway.text.tokenizer import Tokenizer
from tests.server.conftest import StartServer
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import MODEL, LiveServer
from tests.server.test_chat import prompt_of
from tests.server.test_completions import TEXT


def chat(*turns: tuple[str, str]) -> str:
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    return f"{text}<|im_start|>assistant\n"


def test_a_response(client: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    answer = client.responses.create(
        model=MODEL, input="Hello", instructions="Be kind.", max_output_tokens=50, temperature=0.5, metadata={"a": "b"}
    )
    assert (answer.status, answer.output_text, answer.error) == ("completed", TEXT, None)
    assert answer.id.startswith("resp_") and [item.type for item in answer.output] == ["message"]
    assert prompt_of(engine, tokenizer) == chat(("system", "Be kind."), ("user", "Hello"))
    assert (answer.temperature, answer.metadata, answer.max_output_tokens) == (0.5, {"a": "b"}, 50)
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(engine.requests[-1].prompt_token_ids)
    assert answer.usage.output_tokens == len(tokenizer.encode(TEXT)) + 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_a_stream_has_every_event_with_the_same_ids(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="Hello") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == TEXT and final.status == "completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    ids = {event.item_id for event in events if hasattr(event, "item_id")}
    assert ids == {final.output[0].id}
    assert {event.response.id for event in events if hasattr(event, "response")} == {final.id}


def test_a_conversation_goes_on(client: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    first = client.responses.create(model=MODEL, input="One", instructions="Be kind.", max_output_tokens=3)
    assert first.status == "incomplete" and first.incomplete_details is not None
    assert first.incomplete_details.reason == "max_output_tokens"
    second = client.responses.create(model=MODEL, input="Two", previous_response_id=first.id)
    turns = ("user", "One"), ("assistant", first.output_text), ("user", "Two")
    assert prompt_of(engine, tokenizer) == chat(*turns), "instructions hold for one response"
    with client.responses.stream(model=MODEL, input="Three", previous_response_id=second.id) as stream:
        stream.until_done()
    assert prompt_of(engine, tokenizer) == chat(*turns, ("assistant", second.output_text), ("user", "Three"))
    assert second.previous_response_id == first.id


def test_items_of_all_kinds(client: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    items: list[Any] = [
        {"role": "developer", "content": "Count."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "One"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Two", "annotations": []}],
        },
        {"role": "user", "content": "Three"},
    ]
    client.responses.create(model=MODEL, input=items, store=False)
    turns = ("system", "Count."), ("user", "One"), ("assistant", "Two"), ("user", "Three")
    assert prompt_of(engine, tokenizer) == chat(*turns)


def test_what_was_kept_is_found_listed_and_deleted(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input=[{"role": "user", "content": c} for c in "abc"])
    assert client.responses.retrieve(answer.id).output_text == answer.output_text
    listed = client.responses.input_items.list(answer.id, order="asc", limit=2)
    assert [item.content for item in listed.data] == ["a", "b"] and listed.has_more  # type: ignore[union-attr]
    rest = client.responses.input_items.list(answer.id, order="asc", after=listed.data[-1].id)
    assert [item.content for item in rest.data] == ["c"] and not rest.has_more  # type: ignore[union-attr]
    assert [item.content for item in client.responses.input_items.list(answer.id).data] == ["c", "b", "a"]  # type: ignore[union-attr]
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input="a", previous_response_id=answer.id)
    assert refused.value.code == "previous_response_not_found" and refused.value.param == "previous_response_id"


def test_what_is_not_to_be_stored_is_not(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="a", store=False)
    assert answer.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_one_that_is_under_way_can_be_cancelled(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.step_s = 0.01
    engine.reply = lambda request, index: [5] * 200
    events: list[Any] = []
    begun = threading.Event()

    def read() -> None:
        for event in client.responses.create(model=MODEL, input="a", stream=True):
            events.append(event)
            begun.set()

    reading = threading.Thread(target=read)
    reading.start()
    assert begun.wait(10)
    name = events[0].response.id
    assert client.responses.cancel(name).status == "cancelled"
    reading.join(10)
    assert not reading.is_alive() and events[-1].type == "response.failed"
    assert events[-1].response.error.code == "cancelled" and len(events) < 150
    ended = client.responses.create(model=MODEL, input="a", max_output_tokens=2)
    with pytest.raises(openai.BadRequestError, match="has ended"):
        client.responses.cancel(ended.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_none")


def test_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model=MODEL, input="a", max_output_tokens=4, include=["message.output_text.logprobs"], top_logprobs=2
    )
    content = answer.output[0].content[0]  # type: ignore[union-attr]
    assert [len(each.top_logprobs) for each in content.logprobs] == [2] * 4  # type: ignore[union-attr]
    assert "".join(each.token for each in content.logprobs) == answer.output_text  # type: ignore[union-attr]


def test_a_token_that_is_part_of_a_character_has_its_log_probability_in_a_stream(
    client: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    token_ids = tokenizer.encode("𓀀")
    assert len(token_ids) > 2
    engine.reply = lambda request, index: token_ids
    options: Any = {"include": ["message.output_text.logprobs"], "max_output_tokens": len(token_ids)}
    events: list[Any] = list(client.responses.create(model=MODEL, input="a", stream=True, **options))
    final, deltas = events[-1].response, [event for event in events if event.type == "response.output_text.delta"]
    assert sum(len(event.logprobs) for event in deltas) == len(token_ids)
    assert final.output_text == "𓀀" and len(final.output[0].content[0].logprobs) == len(token_ids)


def test_the_oldest_messages_are_dropped_where_that_is_wished(
    client: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    items: list[Any] = [{"role": "system", "content": "Be kind."}]
    items += [{"role": "user", "content": f"{number} " + "word " * 20} for number in range(12)]
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input=items, max_output_tokens=8)
    assert refused.value.param == "input"
    client.responses.create(model=MODEL, input=items, max_output_tokens=8, truncation="auto")
    prompt = prompt_of(engine, tokenizer)
    assert "Be kind." in prompt and "11 word" in prompt and "user\n0 word" not in prompt


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"input": []}, "input", "empty"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type", "computer_call"),
        ({"input": [{"role": "robot", "content": "a"}]}, None, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "image"),
        ({"background": True}, "background", "background"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"top_logprobs": 3}, "top_logprobs", "include"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "message"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "template"),
        ({"stream_options": {"include_usage": True}}, "stream_options.include_usage", "unknown field"),
        ({"imput": "a"}, "imput", "did you mean input?"),
        ({"model": "other"}, "model", "other"),
    ],
)
def test_what_is_wrong_is_named(server: LiveServer, body: dict[str, Any], param: str | None, said: str) -> None:
    answer = httpx.post(f"{server.url}/v1/responses", json={"model": MODEL, "input": "a"} | body)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404) and said in error["message"] and error["param"] == param, error


def test_nobody_finds_what_is_another_tenant_s(start_server: StartServer, tmp_path: Any) -> None:
    tenants = tmp_path / "tenants.toml"
    entries = '[[tenant]]\nname = "{0}"\n[[key]]\ntenant = "{0}"\nsha256 = "{1}"\n'
    tenants.write_text("".join(entries.format(each, key_digest(b"sk-" + each.encode()).hex()) for each in "ab"))
    server = start_server(tenants=read_tenant_file(str(tenants)), quota_journal="none")
    mine, other = (openai.OpenAI(base_url=f"{server.url}/v1", api_key=f"sk-{name}", max_retries=0) for name in "ab")
    with mine, other:
        answer = mine.responses.create(model=MODEL, input="a")
        assert mine.responses.retrieve(answer.id).id == answer.id
        for ask in (other.responses.retrieve, other.responses.delete, other.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(answer.id)


def kept(size: int) -> Kept:
    return Kept("", b"x" * size, b"", b"")


def test_the_store_is_bounded() -> None:
    store = ResponseStore(None, most=3, most_bytes=100)
    for number in range(5):
        store.keep(str(number), kept(10))
    with pytest.raises(ApiError):
        store.find("1", "")
    assert store.find("2", "").size == 10
    store.keep("large", kept(95))
    with pytest.raises(ApiError):
        store.find("4", "")
    store.keep("too large", kept(101))
    with pytest.raises(ApiError):
        store.find("too large", "")
    store.delete("large", "")
    store.keep("small", kept(100))
    assert store.find("small", "").size == 100


def test_a_conversation_goes_on_after_a_restart(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path, engine = tmp_path / "responses.sqlite", FakeEngine(tokenizer)
    server = LiveServer(engine, tokenizer, response_store=path).start()
    asked: dict[str, Any] = {"model": MODEL, "input": "One"}
    first, deleted = (server.post("/v1/responses", **asked).json() for _ in range(2))
    assert server.client.delete(f"/v1/responses/{deleted['id']}").status_code == 200
    server.stop()
    assert path.stat().st_mode & 0o077 == 0
    server = LiveServer(engine, tokenizer, response_store=path).start()
    assert server.client.get(f"/v1/responses/{first['id']}").json() == first
    assert server.client.get(f"/v1/responses/{deleted['id']}").status_code == 404
    second = server.post("/v1/responses", model=MODEL, input="Two", previous_response_id=first["id"])
    assert second.status_code == 200
    text = first["output"][0]["content"][0]["text"]
    assert prompt_of(engine, tokenizer) == chat(("user", "One"), ("assistant", text), ("user", "Two"))
    server.stop()


def test_the_file_is_bounded_and_a_killed_server_loses_nothing_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    store = ResponseStore(path, most=3)
    for number in range(5):
        store.keep(str(number), kept(10))
    store.delete("3", "")
    with pytest.raises(ValueError, match="another server uses it"):
        ResponseStore(path)
    store.close()
    again = ResponseStore(path, most=1)
    assert again.find("4", "").size == 10
    with pytest.raises(ApiError):
        again.find("2", "")
    again.close()
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT name FROM responses").fetchall() == [("4",)]


def test_a_disk_that_is_full_loses_no_answer_of_this_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = ResponseStore(tmp_path / "responses.sqlite")
    assert store._db is not None
    store._db.execute("PRAGMA max_page_count = 4")
    store.keep("a", kept(100_000))
    assert store.find("a", "").size == 100_000
    store.close()
    assert "full" in caplog.text and "response a ends with the server" in caplog.text
    ResponseStore(tmp_path / "responses.sqlite").close()


@pytest.mark.parametrize("what", ["no folder", "no database", "another database", "newer"])
def test_a_file_that_cannot_be_used_is_one_line(tmp_path: Path, what: str) -> None:
    path = tmp_path / "missing" / "file" if what == "no folder" else tmp_path / "file"
    if what == "no database":
        path.write_text("a text" * 1000)
    elif what != "no folder":
        with closing(sqlite3.connect(path)) as db:
            db.execute("CREATE TABLE other (a)" if what == "another database" else "PRAGMA user_version = 9")
    with pytest.raises(ValueError, match=f"^--response-store {path}: [^\n]+$"):
        ResponseStore(path)


def test_an_engine_that_fails_ends_the_stream(server: LiveServer, engine: FakeEngine) -> None:
    engine.step_s = 0.01
    body = {"model": MODEL, "input": "a", "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/responses", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: response.created"
        engine.die()
        rest = list(lines)
    failed = msgspec.json.decode(rest[rest.index("event: response.failed") + 1].removeprefix("data: "))
    assert failed["response"]["status"] == "failed" and failed["response"]["error"]["code"] == "engine_dead"


def test_a_client_that_goes_away_leaves_nothing_behind(server: LiveServer, engine: FakeEngine) -> None:
    engine.step_s = 0.01
    engine.reply = lambda request, index: [5] * 200
    body = {"model": MODEL, "input": "a", "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/responses", json=body) as answer:
        next(answer.iter_lines())
    for _ in range(200):
        if engine.aborted:
            break
        time.sleep(0.01)
    assert engine.aborted
