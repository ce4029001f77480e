"""What is found out about a server, and what the user is told when there is none that can be used."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from headway.bench.client.openai_client import OpenAIClient
from headway.bench.client.probe import Server, count_tokens, probe
from headway.load.endpoint import Endpoint
from headway.load.errors import BenchError
from headway.load.request import Prompt
from tests.bench.client.sending import send
from tests.bench.scripted_server import ScriptedServer
from tests.bench.served_kinds import KINDS

SCRIPT = '{"timings": {"e2e_ns": 1}}'


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, ScriptedServer]]:
    running: dict[str, ScriptedServer] = {}
    try:
        for kind in KINDS:
            running[kind] = ScriptedServer(kind=kind, script=SCRIPT).__enter__()
        yield running
    finally:
        for server in running.values():
            server.__exit__()


EXPECTED: dict[str, dict[str, Any]] = {
    "headway": {"name": "Headway", "version": "0.1.0", "max_model_len": 32768, "metrics": True, "tokenize": True},
    "vllm": {"name": "vLLM", "version": "0.32.0", "max_model_len": 32768, "metrics": True, "tokenize": True},
    "sglang": {"name": "SGLang", "version": "0.5.0", "max_model_len": 32768, "metrics": True, "tokenize": False},
    "llamacpp": {"name": "llama.cpp", "version": "b1-scripted", "max_model_len": 4096, "metrics": True,
                 "tokenize": True},
    "openai": {"name": "unknown", "version": None, "max_model_len": None, "metrics": False, "tokenize": False},
    "unknown": {"name": "unknown", "version": None, "max_model_len": None, "metrics": False, "tokenize": False},
}  # fmt: skip


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("kind", KINDS)
async def test_each_kind_of_server_is_known_and_then_asked_as_it_likes(
    servers: dict[str, ScriptedServer], kind: str, api: Any
) -> None:
    found = await probe(Endpoint(servers[kind].url, api=api), may_ignore_eos=True)
    assert {name: getattr(found, name) for name in EXPECTED[kind]} == EXPECTED[kind]
    assert found.token_id_prompts is (api == "completions")
    asked = found.endpoint
    newer = kind == "openai" and api == "chat"
    assert asked.max_tokens_field == ("max_completion_tokens" if newer else "max_tokens")
    assert asked.model == "scripted" and asked.include_usage and asked.include_timings is (kind == "headway")
    assert asked.ignore_eos is (kind in ("headway", "vllm", "sglang", "llamacpp"))
    if kind != "llamacpp":
        assert asked.continuous_usage is (kind != "openai")

    async with OpenAIClient(asked) as client:
        record = await send(client, chunks=3, tokens_per_chunk=2, timings={"e2e_ns": 5, "phases_ns": {}})
        assert record.ok and record.tokens == 6, record.failure
        assert record.tokens_per_chunk_known is asked.continuous_usage
        assert (record.timings is not None) is (kind == "headway")
    prompts = [Prompt(text="one two three"), Prompt(text="one")]
    assert await count_tokens(found, prompts) == [3, 1]


async def test_the_end_token_is_only_ignored_where_that_is_wanted(servers: dict[str, ScriptedServer]) -> None:
    assert not (await probe(Endpoint(servers["vllm"].url))).endpoint.ignore_eos
    assert (await probe(Endpoint(servers["unknown"].url, ignore_eos=True))).endpoint.ignore_eos


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_a_refused_ignore_eos_is_said_before_the_run(servers: dict[str, ScriptedServer], api: Any) -> None:
    with pytest.raises(BenchError, match="--ignore-eos was given, and the server refuses"):
        await probe(Endpoint(servers["openai"].url, api=api, ignore_eos=True))


async def test_a_field_of_the_users_that_is_refused_is_named(servers: dict[str, ScriptedServer]) -> None:
    with pytest.raises(BenchError, match=r"refuses a request for two tokens .*nonsense"):
        await probe(Endpoint(servers["headway"].url, extra_body={"nonsense": 1}))


async def test_more_tokens_at_least_than_the_trial_asks_for(servers: dict[str, ScriptedServer]) -> None:
    await probe(Endpoint(servers["headway"].url, extra_body={"min_tokens": 100}))


async def test_models() -> None:
    names = ["meta/llama-3-8b", "qwen/qwen-7b", "other"]
    with ScriptedServer(model=names) as server:
        assert (await probe(Endpoint(server.url))).endpoint.model == names[0]
        assert (await probe(Endpoint(server.url, model="other"))).endpoint.model == "other"
        with pytest.raises(BenchError, match=r"--model is 'Qwen-7b'; the server serves qwen/qwen-7b, .*llama"):
            await probe(Endpoint(server.url, model="Qwen-7b"))


async def test_keys() -> None:
    with ScriptedServer(api_key="right") as server:
        assert (await probe(Endpoint(server.url, api_key="right"))).endpoint.include_usage
        for key in (None, "wrong"):
            with pytest.raises(BenchError, match="--api-key, OPENAI_API_KEY or HEADWAY_API_KEY"):
                await probe(Endpoint(server.url, api_key=key))


async def test_nobody_listens() -> None:
    with pytest.raises(BenchError, match=r"no server at http://127.0.0.1:1 .*wait with --ready-check-timeout-sec"):
        await probe(Endpoint("http://127.0.0.1:1"))


@pytest.mark.parametrize("kind", ["headway", "vllm"])
async def test_a_server_that_loads_is_waited_for_where_asked(kind: str) -> None:
    with ScriptedServer(kind=kind, loading_for=3600) as server:
        with pytest.raises(BenchError, match=r"is not ready .*the model is loading.*--ready-check-timeout-sec"):
            await probe(Endpoint(server.url))
        server.ready(at_s=0.3)
        assert (await probe(Endpoint(server.url), ready_timeout_s=60)).endpoint.model == "scripted"


async def test_a_server_that_is_not_there_yet_is_waited_for() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    probing = asyncio.ensure_future(probe(Endpoint(f"http://127.0.0.1:{port}"), ready_timeout_s=60))
    await asyncio.sleep(0.1)
    assert not probing.done()
    with ScriptedServer(port=port):
        assert isinstance(await probing, Server)


async def test_tls_that_is_not_there(servers: dict[str, ScriptedServer]) -> None:
    with pytest.raises(BenchError, match="--insecure"):
        await probe(Endpoint(servers["vllm"].url.replace("http:", "https:")))


async def test_what_is_no_server_of_this_kind(servers: dict[str, ScriptedServer]) -> None:
    with pytest.raises(BenchError, match="does not answer on /v1/chat/completions"):
        await probe(Endpoint(servers["unknown"].url + "/not/here", api="chat"))
    failing = ScriptedServer(script='{"fail": "status", "status": 500, "message": "out of memory"}')
    with failing as server, pytest.raises(BenchError, match=r"fails on a request for two tokens .*out of memory"):
        await probe(Endpoint(server.url))
    with ScriptedServer(script='{"fail": "garbage"}') as server, pytest.raises(BenchError, match="malformed: not HTTP"):
        await probe(Endpoint(server.url))


async def test_a_server_that_ends_at_once_is_still_one() -> None:
    with ScriptedServer(script='{"chunks": 0}') as server:
        assert (await probe(Endpoint(server.url))).endpoint.include_usage


async def test_without_usage_and_tokenize_nothing_can_be_counted() -> None:
    with ScriptedServer(script='{"usage": false, "continuous_usage": false}') as server:
        found = await probe(Endpoint(server.url))
        assert not found.endpoint.include_usage
        with pytest.raises(BenchError, match="reports no token counts"):
            await count_tokens(found, [Prompt(text="a")])
