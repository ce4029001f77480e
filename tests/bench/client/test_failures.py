"""Each way in which a request can fail has its kind and one line, and what came before it is kept."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pytest

from headway.bench.client.answer import StreamedAnswer
from headway.bench.client.connection import Connection
from headway.bench.client.failures import RequestFailed, failure_of_status, one_line
from headway.bench.client.openai_client import OpenAIClient
from headway.load.endpoint import Endpoint
from headway.load.record import Failure, FailureKind, RequestRecord
from headway.load.request import PlannedRequest, Prompt
from tests.bench.client.sending import send
from tests.bench.scripted_server import ScriptedServer

CUT, MALFORMED = FailureKind.CUT, FailureKind.MALFORMED


def check(failure: Failure | None, kind: FailureKind, message: str) -> None:
    assert failure is not None
    assert failure.kind is kind, failure
    assert message in failure.message
    assert "\n" not in failure.message and len(failure.message) <= 300


@pytest.mark.covering(1)
@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize(
    ("fail", "kind", "message"),
    [
        ("cut", CUT, "closed by the server in the middle"),
        ("reset", CUT, "in the middle"),
        ("end", CUT, "without a finish_reason and without [DONE]"),
        ("malformed_sse", MALFORMED, "not server-sent events"),
        ("malformed_json", MALFORMED, "not a chunk of OpenAI's"),
        ("not_openai", MALFORMED, "not a chunk of OpenAI's"),
        ("bad_chunk", MALFORMED, "not HTTP"),
        ("error_event", FailureKind.STREAM_ERROR, "it broke"),
    ],
)
async def test_a_stream_that_fails_in_its_middle(
    server: ScriptedServer, api: Any, fail: str, kind: FailureKind, message: str
) -> None:
    endpoint = Endpoint(server.url, api=api, continuous_usage=True)
    async with OpenAIClient(endpoint, keep_text=True) as client:
        record = await send(client, chunks=5, tokens_per_chunk=2, gap_s=0.005, fail=fail, fail_at=3, message="it broke")
        check(record.failure, kind, message)
        assert not record.ok
        sent = server.log("0")["sent_ns"]
        # A reset may overtake what was sent before it.
        assert len(sent) == 3 and (len(record.chunk_ns) == 3 or fail == "reset")
        assert record.tokens == 2 * len(record.chunk_ns) and record.text == "tok " * len(record.chunk_ns)
        assert record.sent_ns <= record.headers_ns <= record.end_ns
        # The connection is not used again, and the client still works.
        assert (await send(client, 1, chunks=2)).ok
        assert server.log("1")["connection"] != server.log("0")["connection"] or fail == "end"


@pytest.mark.parametrize(
    ("fail", "kind", "message"),
    [
        ("garbage", MALFORMED, "not HTTP"),
        ("close", CUT, "before the response"),
        ("half_headers", CUT, "in the middle of the response's headers"),
        ("html", MALFORMED, "not server-sent events"),
        ("redirect", FailureKind.CLIENT_ERROR, "redirected to http://elsewhere.example/v1/completions"),
    ],
)
async def test_a_response_that_never_was_one(client: OpenAIClient, fail: str, kind: FailureKind, message: str) -> None:
    record = await send(client, fail=fail)
    check(record.failure, kind, message)
    assert not record.chunk_ns and record.end_ns >= record.sent_ns > 0
    assert (await send(client, 1, chunks=2)).ok


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, FailureKind.CLIENT_ERROR),
        (401, FailureKind.AUTH),
        (403, FailureKind.AUTH),
        (404, FailureKind.NOT_FOUND),
        (413, FailureKind.CLIENT_ERROR),
        (429, FailureKind.REFUSED),
        (500, FailureKind.SERVER_ERROR),
        (503, FailureKind.SERVER_ERROR),
    ],
)
async def test_a_status_that_is_not_200(client: OpenAIClient, status: int, kind: FailureKind) -> None:
    record = await send(client, fail="status", status=status, message="the reason", retry_after_s=7)
    check(record.failure, kind, f"HTTP {status}: the reason (Retry-After: 7)")
    assert record.failure is not None and record.failure.status == status
    assert record.headers_ns and not record.chunk_ns
    assert (await send(client, 1)).ok and client.http.opened == 1  # an error leaves the connection open


@pytest.mark.parametrize(
    ("status", "headers", "error", "kind"),
    [
        (429, {b"retry-after": b"2"}, {"type": "requests", "code": "rate_limit_exceeded"}, FailureKind.REFUSED),
        (429, {}, {"type": "requests", "code": "rate_limit_exceeded"}, FailureKind.RATE_LIMITED),
        (429, {b"retry-after": b"2"}, "slow down", FailureKind.RATE_LIMITED),
        (503, {b"retry-after": b"2"}, {"code": "deadline_unreachable"}, FailureKind.REFUSED),
        (503, {b"retry-after": b"2"}, {"code": "engine_dead"}, FailureKind.SERVER_ERROR),
    ],
)
def test_a_refusal_that_is_meant_is_typed_and_says_when_to_come_again(
    status: int, headers: dict[bytes, bytes], error: object, kind: FailureKind
) -> None:
    body = json.dumps({"error": error}).encode()
    assert failure_of_status(status, headers, body).kind is kind


async def test_an_answer_without_a_token(client: OpenAIClient) -> None:
    record = await send(client, chunks=0)
    check(record.failure, FailureKind.NO_TOKENS, "without a token")


@pytest.mark.parametrize("fail_at", [-1, 2])
async def test_a_server_that_hangs_ends_with_the_requests_own_limit(server: ScriptedServer, fail_at: int) -> None:
    async with OpenAIClient(Endpoint(server.url, timeout_s=0.3)) as client:
        record = await send(client, chunks=5, fail="hang", fail_at=fail_at)
        check(record.failure, FailureKind.TIMEOUT, "within 0.3 s")
        assert record.end_ns - record.sent_ns >= 0.29e9
        assert len(record.chunk_ns) == max(fail_at, 0)
        assert client.busy_sockets() == []


async def test_nobody_listens() -> None:
    async with OpenAIClient(Endpoint("http://127.0.0.1:1")) as client:
        record = await send(client)
        check(record.failure, FailureKind.CONNECT, "no connection to 127.0.0.1:1: connection refused")
        assert record.sent_ns and record.end_ns >= record.sent_ns and not record.headers_ns


async def test_a_name_that_does_not_exist() -> None:
    async with OpenAIClient(Endpoint("http://no-such-host.invalid:8000")) as client:
        for _ in range(2):
            check((await send(client)).failure, FailureKind.CONNECT, "the name no-such-host.invalid is not found")


async def test_a_plain_server_asked_for_tls(server: ScriptedServer) -> None:
    async with OpenAIClient(Endpoint(server.url.replace("http:", "https:"))) as client:
        check((await send(client)).failure, FailureKind.TLS, "TLS")


async def test_an_error_of_the_client_itself_is_not_taken_for_the_servers(
    client: OpenAIClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(StreamedAnswer, "body", broken)
    record = RequestRecord(0)
    with pytest.raises(ZeroDivisionError):
        await client.send(PlannedRequest(0, Prompt(text="x"), None, 2), record)


def test_messages_are_one_printable_line() -> None:
    assert one_line("a\r\n\tb\x1b[31m") == "a b\N{REPLACEMENT CHARACTER}[31m"
    assert len(one_line("x" * 1000)) == 300
    assert RequestFailed(CUT, "a\nb").failure.message == "a b"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "m"}}', "HTTP 500: m"),
        (b'{"error": "m"}', "HTTP 500: m"),
        (b'{"object": "error", "message": "m"}', "HTTP 500: m"),
        (b'{"detail": "m"}', "HTTP 500: m"),
        (b"plain\ntext", "HTTP 500: plain text"),
        (b"[1]", "HTTP 500: [1]"),
        (b"", "HTTP 500"),
    ],
)
def test_the_server_s_own_words_are_found_in_any_error_body(body: bytes, message: str) -> None:
    assert failure_of_status(500, {}, body).message == message


@pytest.mark.covering(1)
@pytest.mark.parametrize("fail", ["cut", "garbage", "error_event", ""])
def test_nothing_of_a_request_needs_the_garbage_collector(server: ScriptedServer, fail: str, run: Any) -> None:
    """It is off during a run: what is only freed by it, prompts among it, would pile up."""

    async def send_some() -> list[object]:
        for url in (server.url, "http://127.0.0.1:1"):
            async with OpenAIClient(Endpoint(url)) as client:
                for index in range(5):
                    record = await send(client, index, chunks=2, fail=fail, fail_at=1)
                    assert record.ok == (url == server.url and not fail)
        await asyncio.sleep(0.05)
        return [each for each in gc.get_objects() if type(each) in (RequestFailed, Connection)]

    gc.collect()
    gc.disable()
    try:
        assert run(send_some()) == []
    finally:
        gc.enable()
