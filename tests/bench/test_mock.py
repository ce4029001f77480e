"""The mock server: what a load generator sees of it is what it was told."""

from __future__ import annotations

import statistics

import httpx
import pytest

from headway.bench.client.load import LoadMode, Pace, run_load
from headway.bench.client.openai_client import OpenAIClient
from headway.bench.client.probe import probe
from headway.bench.mock import MockOptions, MockServer
from headway.load.endpoint import Endpoint
from headway.load.errors import BenchError
from headway.load.record import FailureKind, RequestRecord
from headway.load.request import PlannedRequest, Prompt


async def answered(options: MockOptions, count: int, tokens: int, api: str = "completions") -> list[RequestRecord]:
    requests = [PlannedRequest(index, Prompt(text="a b c"), 3, tokens) for index in range(count)]
    async with MockServer(options).listening() as url:
        found = await probe(Endpoint(url, api=api))  # type: ignore[arg-type]
        async with OpenAIClient(found.endpoint) as client:
            outcome = await run_load(client, requests, Pace(LoadMode.CLOSED, count))
    return outcome.records


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_delays_and_lengths_are_those_it_was_told(api: str) -> None:
    records = await answered(MockOptions(port=0, ttft_ms="60", itl_ms="20"), 4, 6, api)
    for record in records:
        assert record.ok and (record.prompt_tokens, record.output_tokens) == (3, 6)
        assert len(record.chunk_ns) == 6 and record.finish_reason == "length"
    ttft = statistics.median((record.first_token_ns - record.sent_ns) / 1e6 for record in records)
    whole = statistics.median((record.last_token_ns - record.first_token_ns) / 1e6 for record in records)
    assert 60 <= ttft < 200 and 95 <= whole < 250  # a busy machine is late, and never early


async def test_faults_are_as_many_as_asked_and_the_same_each_time() -> None:
    faulty = MockOptions(port=0, ttft_ms="1", itl_ms="0", error_share=0.3, cut_share=0.3, seed=3)
    kinds = [[record.failure and record.failure.kind for record in await answered(faulty, 40, 4)] for _ in range(2)]
    assert sorted(map(str, kinds[0])) == sorted(map(str, kinds[1]))
    assert 4 <= kinds[0].count(FailureKind.SERVER_ERROR) <= 22 and 2 <= kinds[0].count(FailureKind.CUT) <= 20


async def test_seats_make_others_wait() -> None:
    records = await answered(MockOptions(port=0, ttft_ms="50", itl_ms="0", max_num_seqs=1), 4, 1)
    ends = sorted((record.first_token_ns - records[0].sent_ns) / 1e6 for record in records)
    assert ends[-1] >= 4 * 50 - 5


async def test_what_it_does_not_understand_has_an_answer() -> None:
    server = MockServer(MockOptions(port=0, ttft_ms="1", itl_ms="0"))
    async with server.listening() as url, httpx.AsyncClient(trust_env=False) as client:
        for content in (b"{", b'{"prompt": 3}', b'{"prompt": "a", "max_tokens": 0.5}', b'{"messages": []}'):
            reply = await client.post(f"{url}/v1/completions", content=content)
            assert reply.status_code == 400 and "no request" in reply.json()["error"]["message"]
        assert (await client.get(f"{url}/nothing")).status_code == 404
        assert (await client.get(f"{url}/health")).json() == {"status": "ok"}
        whole = await client.post(f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "a b"}]})
        assert whole.json()["usage"]["prompt_tokens"] == 2
        assert whole.json()["choices"][0]["message"]["content"].split() == ["word"] * 16
        port = int(url.rpartition(":")[2])
        with pytest.raises(BenchError, match="cannot listen on"):
            async with MockServer(MockOptions(port=port)).listening():
                pass
    assert server.answered == 1
    with pytest.raises(BenchError, match="is not a number"):
        MockServer(MockOptions(ttft_ms="fast"))
