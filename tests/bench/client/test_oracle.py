"""What the client measures against the server's own log of what it sent, on the clock that both read.

A machine that runs other things too may delay either side for milliseconds. So what bounds a delay is tried again: a
client that is right meets it as soon as it is left alone, and one that is wrong never does. That nothing is seen before
it was sent holds always.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import uvloop

from headway.bench.client.openai_client import OpenAIClient
from headway.load.endpoint import Endpoint
from headway.load.record import RequestRecord
from tests.bench.client.sending import planned, send
from tests.bench.scripted_server import ScriptedServer

MS = 1_000_000
ATTEMPTS = 8
RUNNERS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


async def measured(
    url: str, count: int, script: dict[str, Any], *, apart_s: float = 0.0, **options: Any
) -> list[RequestRecord]:
    """`count` requests, one every `apart_s` seconds; when that is not 0, over connections that stand already."""
    async with OpenAIClient(Endpoint(url, **options)) as client:
        await asyncio.gather(*(send(client, 10**6 + i, ttft_s=0.03) for i in range(count if apart_s else 1)))
        records = [RequestRecord(index) for index in range(count)]

        async def one(record: RequestRecord) -> None:
            await asyncio.sleep(apart_s * record.index)
            await client.send(planned(record.index, **script), record)

        await asyncio.gather(*map(one, records))
    for record in records:
        assert record.ok, record.failure
    return records


def until_met(attempt: Callable[[], tuple[float, float]]) -> None:
    """`attempt` gives what it found and its bound."""
    found = []
    for _ in range(ATTEMPTS):
        value, bound = attempt()
        if value <= bound:
            return
        found.append(round(value, 3))
    pytest.fail(f"never within {bound}: {found}")


def p99_ms(differences: np.ndarray) -> float:
    return float(np.percentile(np.abs(differences), 99)) / MS


def differences(records: list[RequestRecord], server: ScriptedServer) -> dict[str, np.ndarray]:
    """What was measured less what the server says, in ns."""
    logs = server.logs()["requests"]
    found: dict[str, list[int]] = {"ttft": [], "itl": [], "e2e": []}
    for record in records:
        log = logs[str(record.index)]
        sent, came = np.array(log["sent_ns"]), np.array(record.chunk_ns)
        assert len(sent) == len(came)
        assert (came >= sent).all() and record.sent_ns <= log["received_ns"] <= log["headers_ns"] <= record.headers_ns
        assert record.end_ns >= record.last_token_ns
        found["ttft"].append(int(record.first_token_ns - record.sent_ns - (sent[0] - log["received_ns"])))
        found["itl"] += (np.diff(came) - np.diff(sent)).tolist()
        found["e2e"].append(int(record.last_token_ns - record.sent_ns - (sent[-1] - log["received_ns"])))
    return {name: np.array(values) for name, values in found.items()}


@RUNNERS
@pytest.mark.parametrize("api", ["completions", "chat"])
def test_ttft_itl_and_e2e_are_those_of_the_server_within_a_millisecond(
    server: ScriptedServer, run: Callable[..., Any], api: Any
) -> None:
    gaps = [0.002, 0.011, 0.0, 0.025, 0.004, 0.03, 0.001, 0.017, 0.002]
    script = {"ttft_s": 0.03, "chunks": 10, "gaps_s": gaps, "headers_delay_s": 0.01}
    attempts: list[dict[str, np.ndarray]] = []
    for _ in range(2 * ATTEMPTS):
        records = run(measured(server.url, 6, script, apart_s=0.007, api=api, continuous_usage=True))
        assert all(record.output_tokens == 10 and record.tokens_per_chunk_known for record in records)
        attempts.append(differences(records, server))
        if max(map(p99_ms, attempts[-1].values())) <= 1.0:
            return
    # A busy machine: of the same chunk in all attempts, the typical difference.
    for name in attempts[0]:
        typical = np.median([attempt[name] for attempt in attempts], axis=0)
        assert p99_ms(typical) <= 1.0, (name, [round(p99_ms(attempt[name]), 3) for attempt in attempts])


def test_the_oracle_keeps_its_own_script(server: ScriptedServer) -> None:
    """Its delays are never shorter, and with `precise` they are exact to the tenth of a millisecond."""

    def attempt() -> tuple[float, float]:
        script = {"ttft_s": 0.02, "chunks": 8, "gap_s": 0.005, "precise": True}
        asyncio.run(measured(server.url, 1, script))
        log = server.log("0")
        excess = [log["sent_ns"][0] - log["received_ns"] - 20 * MS, *(np.diff(log["sent_ns"]) - 5 * MS).tolist()]
        assert min(excess) >= -MS / 10
        return float(np.median(excess)) / MS, 0.1

    until_met(attempt)


def test_tokens_are_the_server_s_word_where_a_chunk_holds_several(server: ScriptedServer) -> None:
    script = {"chunks": 4, "tokens_per_chunk": [1, 5, 2, 4], "prompt_tokens": 77, "cached_tokens": 64}
    known = asyncio.run(measured(server.url, 1, script, continuous_usage=True))[0]
    assert list(known.chunk_tokens) == [1, 5, 2, 4] and known.tokens_per_chunk_known
    total = asyncio.run(measured(server.url, 1, script))[0]
    assert list(total.chunk_tokens) == [1, 1, 1, 1] and not total.tokens_per_chunk_known
    for record in (known, total):
        assert (record.tokens, record.output_tokens, record.prompt_tokens, record.cached_tokens) == (12, 12, 77, 64)
    none = asyncio.run(measured(server.url, 1, {**script, "usage": False}))[0]
    assert none.tokens == 4 and none.output_tokens is None


@pytest.mark.parametrize("continuous_usage", [True, False])
def test_a_role_alone_is_no_first_token(server: ScriptedServer, continuous_usage: bool) -> None:
    script = {"ttft_s": 0.05, "chunks": 2, "role_first": True}
    record = asyncio.run(measured(server.url, 1, script, api="chat", continuous_usage=continuous_usage))[0]
    log = server.log("0")
    assert len(record.chunk_ns) == 2
    assert record.headers_ns < log["sent_ns"][0] <= record.first_token_ns


@RUNNERS
def test_five_hundred_streams_at_once(server: ScriptedServer, run: Callable[..., Any]) -> None:
    script = {"ttft_s": 0.3, "chunks": 6, "gap_s": 0.05, "tokens_per_chunk": 2}

    def attempt() -> tuple[float, float]:
        server.forget()
        before = server.logs()["connections"]
        records = run(measured(server.url, 500, script, continuous_usage=True))
        logs = server.logs()
        assert 499 <= logs["connections"] - before - 1 <= 500  # the asking for the log is one
        assert all(record.tokens == 12 for record in records)
        late = []
        for record in records:
            sent = np.array(logs["requests"][str(record.index)]["sent_ns"])
            assert (np.array(record.chunk_ns) >= sent).all()
            late += (np.array(record.chunk_ns) - sent).tolist()
        # The server itself sends 500 chunks one after the other; what is bounded is only the client's part.
        return float(np.median(late)) / MS, 30.0

    until_met(attempt)


def test_a_freeze_is_seen_by_every_stream_as_long_as_it_was(server: ScriptedServer) -> None:
    async def frozen() -> list[RequestRecord]:
        server.freeze(at_s=0.15, for_s=0.3)
        return await measured(server.url, 5, {"ttft_s": 0.05, "chunks": 20, "gap_s": 0.02})

    records = asyncio.run(frozen())
    began_ns, ended_ns = server.logs()["freezes"][-1]
    assert ended_ns - began_ns >= 0.3e9
    for record in records:
        came = np.array(record.chunk_ns)
        assert not ((came > began_ns + 20 * MS) & (came < ended_ns)).any()
        assert max(np.diff(came)) >= 0.25e9
        # What was due in the meantime comes late, and not all at once.
        assert np.diff(came[came > ended_ns]).min() > MS


async def test_a_schedule_is_not_bent_by_the_requests_before(client: OpenAIClient, server: ScriptedServer) -> None:
    """Sixty requests, 5 ms apart, while each takes 100 ms: the client never waits for an answer to send the next."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    sending: list[Awaitable[RequestRecord]] = []
    for index in range(60):
        await asyncio.sleep(max(0.0, began + index * 0.005 - loop.time()))
        sending.append(asyncio.ensure_future(send(client, index, ttft_s=0.1, chunks=1)))
    records = await asyncio.gather(*sending)
    assert records[-1].sent_ns - records[0].sent_ns < 5e9
    in_flight = max(sum(1 for r in records if r.sent_ns <= t.sent_ns <= r.end_ns) for t in records)
    assert in_flight >= 10
