"""A stream of a Headway server that breaks is gone on with at another one, and the client sees one stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from headway.config_files.tenants import key_digest, parse_tenant_file
from tests.gateway.live_gateway import LiveGateway, events_of, file_text, raw_backend
from tests.server.conftest import model_folder, tokenizer  # noqa: F401
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer, eventually

TEXT = "Once upon a time there was a fox, and a crow — größer als du, 狐と烏。 The end."
PATHS = ["/v1/completions", "/v1/chat/completions"]


class Cutter:
    """Stands before a server, and cuts the connection behind the event of an answer that has this number."""

    def __init__(self, port: int, after: int) -> None:
        self.after, self._port = after, port
        self.cuts = 0
        self._loop, ready = asyncio.new_event_loop(), threading.Event()

        async def run() -> None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
            ready.set()
            with contextlib.suppress(asyncio.CancelledError):
                await self._server.serve_forever()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for each in left:
                each.cancel()
            await asyncio.gather(*left, return_exceptions=True)

        self._task = self._loop.create_task(run())
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._task,), daemon=True)
        self._thread.start()
        assert ready.wait(10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._port)

        async def ask() -> None:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(65536):
                    to_server.write(data)

        asking, events = asyncio.create_task(ask()), 0
        while data := await from_server.read(65536):
            for line in data.splitlines(keepends=True):
                events += line.startswith(b"data: ")
                if events > self.after:
                    break
                writer.write(line)
            if events > self.after:
                self.cuts += 1
                break
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        asking.cancel()
        for each in (writer, to_server):
            each.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(10)


@pytest.fixture
def servers(tokenizer: Any) -> Iterator[list[LiveServer]]:  # noqa: F811
    """Two whose answer is one text; each goes on with it, where the prompt has its beginning already."""
    output, prompts = tokenizer.encode(TEXT), dict[tuple[int, ...], int]()

    def rest(request: Any, index: int) -> list[int]:
        ids = request.prompt_token_ids
        first = next((length for known, length in prompts.items() if tuple(ids[:length]) == known), len(ids))
        prompts.setdefault(tuple(ids[:first]), first)
        assert ids[first:] == output[: len(ids) - first]
        return list(output[len(ids) - first :])

    found = []
    for _ in range(2):
        engine = FakeEngine(tokenizer)
        engine.reply, engine.step_s = rest, 0.003
        found.append(LiveServer(engine, tokenizer).start())
    yield found
    for each in found:
        each.stop()


@contextlib.contextmanager
def gateway(
    servers: list[LiveServer], after: int, top: str = "continue_streams = true\n", **more: Any
) -> Iterator[Any]:
    cutter = Cutter(servers[0].port, after)
    text = file_text({"a": cutter.url, "b": servers[1].url}, 'routing = "round-robin"\n' + top, kind="headway")
    with LiveGateway(text, **more) as running:
        running.cutter = cutter  # type: ignore[attr-defined]
        yield running
    cutter.close()


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": "hello"}]} if "chat" in path else {"prompt": "hello"}
    return {"model": "tiny", "stream": True, "max_tokens": 200, **asked, **fields}


def chunks_of(answer: Any) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    events = events_of(answer)
    assert events[-1] == "[DONE]", events[-1]
    return [json.loads(each) for each in events[:-1]]


def text_of(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(each["delta"].get("content") or "" if "delta" in each else each["text"] for each in choices)


@pytest.mark.covering(1)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("after", [1, 2, 3, 7, 15, 22, 28, 33, 38])
def test_the_client_sees_one_whole_stream(servers: list[LiveServer], path: str, after: int) -> None:
    """Wherever it breaks, also within a character; chunks have one id, and usage counts the client's prompt."""
    body = body_of(path, stream_options={"include_usage": True})
    whole = chunks_of(servers[1].client.post(path, json=body))
    with gateway(servers, after) as running:
        chunks = chunks_of(running.client.post(path, json=body))
        assert running.cutter.cuts == 1 and running.outcomes()["b"] == {"ok": 1}
        assert running.outcomes()["a"] in ({"stream_cut": 1}, {"cut": 1})  # where nothing had come for the client
    assert text_of(chunks) == text_of(whole) == TEXT
    assert len({chunk["id"] for chunk in chunks}) == len({chunk["created"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {chunk["object"] for chunk in whole}
    assert chunks[-1]["usage"]["completion_tokens"] == whole[-1]["usage"]["completion_tokens"]
    assert chunks[-1]["usage"]["prompt_tokens"] == whole[-1]["usage"]["prompt_tokens"]
    assert chunks[-1]["usage"]["total_tokens"] == whole[-1]["usage"]["total_tokens"]
    assert [c["finish_reason"] for each in chunks for c in each["choices"] if c["finish_reason"]] == ["stop"]
    keys = {key for chunk in chunks for choice in chunk["choices"] for key in choice} | {k for c in chunks for k in c}
    assert not keys & {"token_ids", "prompt_token_ids"}


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_does_not_break_is_as_it_is_without_it(servers: list[LiveServer], path: str) -> None:
    with gateway(servers, 10**6) as running:
        for _ in range(2):
            direct = chunks_of(servers[1].client.post(path, json=body_of(path)))
            through = chunks_of(running.client.post(path, json=body_of(path)))
            for chunk in (*direct, *through):
                chunk.pop("id"), chunk.pop("created")
            assert through == direct
        assert running.gateway.retries.left == 20


@pytest.mark.covering(1)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"stop": ["xyz"]},
        {"presence_penalty": 0.5},
        {"logprobs": True},
        {"min_tokens": 3},
    ],
    ids=str,
)
def test_what_cannot_be_replayed_ends_with_the_error(servers: list[LiveServer], path: str, fields: Any) -> None:
    if path == PATHS[0] and "logprobs" in fields:
        fields = {"logprobs": 1}
    with gateway(servers, 9) as running:
        events = events_of(running.client.post(path, json=body_of(path, **fields)))
        assert json.loads(events[-1])["error"]["type"] == "backend_error" and running.outcomes()["b"] == {}


def test_without_the_key_or_another_backend_it_ends_with_the_error(servers: list[LiveServer]) -> None:
    for top in ("", "continue_streams = true\n"):
        with gateway(servers, 9, top) as running:
            if top:
                other = running.gateway.members["b"]
                other.entry = replace(other.entry, drain=True)
            events = events_of(running.client.post(PATHS[0], json=body_of(PATHS[0])))
            assert json.loads(events[-1])["error"]["code"] == "backend_failed"


def test_usage_in_every_chunk_and_the_ledger_are_those_of_the_whole_stream(servers: list[LiveServer]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = body_of(PATHS[0], stream_options=options, include_timings=True)
    whole = chunks_of(servers[1].client.post(PATHS[0], json=body))
    with gateway(servers, 15) as running:
        chunks = chunks_of(running.client.post(PATHS[0], json=body))
        assert running.outcomes()["b"] == {"ok": 1} and text_of(chunks) == TEXT
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == whole[-1]["usage"]["completion_tokens"]
    (timings,) = (chunk["timings"] for chunk in chunks if chunk.get("timings"))
    (alone,) = (chunk["timings"] for chunk in whole if chunk.get("timings"))
    assert sum(timings["phases_ns"].values()) == timings["e2e_ns"] and timings["phases_ns"]["engine_lost"] > 0
    assert 0 < timings["ttft_ns"] < timings["phases_ns"]["engine_lost"] + timings["phases_ns"]["route"] + 10**9
    assert timings["tokens"] == alone["tokens"]


def test_a_stream_that_its_server_ends_to_shut_down_is_gone_on_with(servers: list[LiveServer]) -> None:
    body = body_of(PATHS[0])
    direct = servers[1].client.post(PATHS[0], json=body | {"return_token_ids": True})
    said = [f"data: {each}\n\n".encode() for each in events_of(direct)[:4]]
    said.append(b'data: {"error":{"message":"it shuts down","type":"server_error","code":"shutting_down"}}\n\n')

    async def handler(head: bytes, _: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + b"".join(said))
        writer.close()

    with raw_backend(handler) as url:
        text = file_text({"a": url, "b": servers[1].url}, 'routing = "round-robin"\ncontinue_streams = true\n')
        text = text.replace('"\nurl', '"\nkind = "headway"\nmodels = ["tiny"]\nurl')
        with LiveGateway(text) as running:
            assert text_of(chunks_of(running.client.post(PATHS[0], json=body))) == TEXT
            assert running.outcomes()["b"] == {"ok": 1}


def test_it_is_charged_once_and_for_all_that_came(servers: list[LiveServer]) -> None:
    digest = key_digest(b"sk").hex()
    tenants = parse_tenant_file(
        "",
        f'[[tenant]]\nname = "t"\ntokens_per_minute = 100000\n[[key]]\ntenant = "t"\nsha256 = "{digest}"\n',
    )
    key = {"authorization": "Bearer sk"}
    whole = servers[1].client.post(PATHS[0], json=body_of(PATHS[0], stream=False)).json()["usage"]
    with gateway(servers, 12, tenants=tenants) as running:
        chunks = chunks_of(running.client.post(PATHS[0], json=body_of(PATHS[0]), headers=key))
        assert text_of(chunks) == TEXT and not any("usage" in chunk for chunk in chunks)
        tokens = running.gateway.quotas.quotas.of("t")[1]
        eventually(lambda: tokens.outstanding == 0)
        assert tokens.settled == whole["total_tokens"]
        assert running.gateway.quotas.quotas.of("t")[0].settled == 1


def test_a_client_that_goes_while_it_is_gone_on_with_leaves_nothing_behind(servers: list[LiveServer]) -> None:
    servers[1].engine.step_s = 0.2
    with gateway(servers, 5) as running:
        with running.client.stream("POST", PATHS[0], json=body_of(PATHS[0])) as answer:
            lines = answer.iter_lines()
            while sum("data:" in next(lines) for _ in range(1)) < 1:
                pass
            eventually(lambda: running.gateway.members["b"].in_flight == 1)
        eventually(lambda: all(each.in_flight == 0 for each in running.gateway.members.values()))
        eventually(lambda: not running.gateway.in_flight)
        assert running.outcomes()["b"] == {"cancelled": 1}
