"""What becomes of requests when backends fail: a table of faults in real processes, and what clients see of each."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest

from headway.config_files.gateway import parse_gateway_file
from headway.gateway.upstream import Pool, UpstreamFailed
from tests.bench.script import Script
from tests.bench.scripted_server import ScriptedServer
from tests.gateway.live_gateway import FAST, LiveGateway, events_of, file_text, raw_backend
from tests.server.live_server import eventually

PATHS = ("/v1/chat/completions", "/v1/completions")


def script(**fields: Any) -> dict[str, Any]:
    made: dict[str, Any] = msgspec.to_builtins(Script(**fields))
    return made


def ask(gateway: LiveGateway, path: str = PATHS[0], stream: bool = True, **fields: Any) -> Any:
    content = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    body = {"model": "scripted", "max_tokens": 6, "stream": stream} | content
    return gateway.client.post(path, json=body | ({"script": script(**fields)} if fields else {}))


@pytest.fixture(scope="module")
def backend() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def gateway(backend: ScriptedServer) -> Iterator[LiveGateway]:
    patient = FAST.replace("failures = 2", "failures = 1000")
    with LiveGateway(file_text({"a": backend.url}, tables=patient)) as running:
        yield running


# --- faults in the middle of a stream -------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fail", "said"),
    [
        ("cut", "closed the connection in the middle"),
        ("reset", "closed the connection in the middle"),
        ("end", "its stream ended before its last event"),
        ("malformed_sse", "is no field of an event"),
        ("malformed_json", "is no part of an answer"),
        ("not_openai", "is no part of an answer"),
        ("bad_chunk", "is not HTTP"),
        ("hang", "nothing came of its answer for 2 s"),
        ("error_event", "scripted"),
    ],
)
def test_a_stream_that_breaks_ends_with_an_error_and_counts_as_a_failure(
    gateway: LiveGateway, path: str, fail: str, said: str
) -> None:
    answer = ask(gateway, path, fail=fail, fail_at=3)
    events = events_of(answer)
    assert answer.status_code == 200 and "[DONE]" not in events
    error = json.loads(events[-1])["error"]
    assert said in error["message"] and error["type"] in ("backend_error", "server_error")
    texts = [json.loads(each) for each in events[:-1]]
    came = sum("sent_ns" in each for each in texts)  # all that had come, and nothing broken
    assert came == 3 or (fail == "reset" and came < 3)
    eventually(lambda: bool(gateway.outcomes()["a"]))
    outcomes = gateway.outcomes()["a"]
    assert "ok" not in outcomes and sum(outcomes.values()) == 1, outcomes
    assert gateway.gateway.retries.left == 20  # nothing was sent again


def test_a_client_of_openai_sees_an_error(gateway: LiveGateway) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="scripted",
            messages=[{"role": "user", "content": "x"}],
            stream=True,
            extra_body={"script": script(fail="cut", fail_at=2), "max_tokens": 5},
        )
        with pytest.raises(openai.APIError, match="closed the connection"):
            list(stream)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"newline": "\r\n"},
        {"newline": "\r"},
        {"comments": True},
        {"write_bytes": 7},
        {"framing": "length"},
        {"framing": "close"},
        {"finish_apart": True},
        {"done": False},
        {"interim": True},
        {"close": True},
    ],
    ids=str,
)
def test_a_stream_that_is_whole_passes_as_it_is(gateway: LiveGateway, fields: dict[str, Any]) -> None:
    text = ask(gateway, chunks=4, **fields).text.replace("\r\n", "\n").replace("\r", "\n")
    events = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data:")]
    contents = [json.loads(each)["choices"][0] for each in events if each != "[DONE]"]
    assert [each["delta"].get("content") for each in contents if each["delta"].get("content")] == ["tok "] * 4
    assert contents[-1]["finish_reason"] == "length" and ("[DONE]" in events) == fields.get("done", True)
    eventually(lambda: gateway.outcomes()["a"].get("ok") == 1)


# --- faults before anything has come ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "stream"),
    [
        ({"fail": "close"}, True),
        ({"fail": "garbage"}, True),
        ({"fail": "half_headers"}, True),
        ({"fail": "status", "status": 502}, True),
        ({"fail": "status", "status": 503}, False),
        ({"fail": "status", "status": 429}, True),
        ({"fail": "hang", "fail_at": -1}, True),
        ({"fail": "cut", "fail_at": 0, "role_first": False}, True),
    ],
    ids=str,
)
def test_a_request_of_which_nothing_came_is_answered_by_another_backend(
    backend: ScriptedServer, fields: dict[str, Any], stream: bool
) -> None:
    with ScriptedServer(script=json.dumps(script(**fields))) as bad:
        text = file_text({"bad": bad.url, "good": backend.url}, 'routing = "round-robin"')
        with LiveGateway(text) as gateway:
            for _ in range(4):
                answer = ask(gateway, stream=stream)
                assert answer.status_code == 200 and answer.headers["x-headway-backend"] == "good"
            found = gateway.outcomes()
            assert found["good"]["ok"] == 4 and "ok" not in found["bad"] and found["bad"]


def test_where_all_fail_the_error_is_typed_and_says_which(gateway: LiveGateway) -> None:
    answer = ask(gateway, fail="close")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (502, "backend_failed", "backend_error")
    assert error["message"].startswith("backend a: it closed the connection")
    assert ask(gateway, fail="hang", fail_at=-1).status_code == 504
    assert ask(gateway, fail="html").json()["error"]["code"] == "backend_failed"
    assert ask(gateway, fail="redirect").status_code == 502


@pytest.mark.parametrize("status", [400, 404, 422, 500])
def test_other_errors_of_a_backend_are_passed_on_as_they_are(gateway: LiveGateway, status: int) -> None:
    answer = ask(gateway, fail="status", status=status, message="no such thing")
    assert answer.status_code == status and answer.json()["error"]["message"] == "no such thing"
    assert gateway.outcomes()["a"] == {f"status_{status}": 1}


def test_a_kept_connection_that_was_closed_meanwhile_is_no_failure(
    gateway: LiveGateway, backend: ScriptedServer
) -> None:
    for _ in range(5):
        assert "[DONE]" in ask(gateway, fail="close_if_reused").text
    outcomes = gateway.outcomes()["a"]
    assert outcomes["ok"] == 5 and outcomes["resent"] == 4


# --- processes ------------------------------------------------------------------------------------------


def test_a_backend_that_is_killed_loses_its_streams_with_an_error_and_no_other_request(
    backend: ScriptedServer,
) -> None:
    with (
        ScriptedServer() as doomed,
        LiveGateway(file_text({"doomed": doomed.url, "other": backend.url}, 'routing = "round-robin"')) as gateway,
    ):
        body = {"model": "scripted", "prompt": "x", "stream": True, "script": script(chunks=400, gap_s=0.01)}
        with gateway.client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.headers["x-headway-backend"] == "doomed"
            lines = answer.iter_lines()
            next(lines)
            doomed.process.kill()
            last = [line for line in lines if line][-1]
        assert "closed the connection" in json.loads(last.removeprefix("data: "))["error"]["message"]
        for _ in range(8):
            assert ask(gateway).headers["x-headway-backend"] == "other"
        eventually(lambda: gateway.gateway.members["doomed"].breaker.is_down)
        assert gateway.client.get("/health").status_code == 200
        before = dict(gateway.outcomes()["doomed"])
        assert all("[DONE]" in ask(gateway).text for _ in range(8))
        assert gateway.outcomes()["doomed"] == before  # it is not even tried


def test_a_frozen_backend_hangs_nobody_and_gets_requests_again_when_it_thaws(backend: ScriptedServer) -> None:
    tables = FAST.replace("first_byte_s = 3", "first_byte_s = 600")
    with ScriptedServer() as frozen:
        text = file_text({"frozen": frozen.url, "other": backend.url}, 'routing = "round-robin"', tables)
        with LiveGateway(text) as gateway:
            os.kill(frozen.process.pid, signal.SIGSTOP)
            try:
                began = time.monotonic()
                answers = [ask(gateway) for _ in range(4)]
                assert time.monotonic() - began < 20
                assert {each.headers["x-headway-backend"] for each in answers} == {"other"}
            finally:
                os.kill(frozen.process.pid, signal.SIGCONT)
            eventually(lambda: not gateway.gateway.members["frozen"].breaker.is_down)
            names = {ask(gateway).headers["x-headway-backend"] for _ in range(8)}
            assert names == {"frozen", "other"}


def test_a_backend_that_has_become_slow_gets_no_more_once_that_is_learnt() -> None:
    with (
        ScriptedServer(script=json.dumps(script(ttft_s=0.15))) as slow,
        ScriptedServer(script=json.dumps(script(ttft_s=0.005))) as quick,
        LiveGateway(file_text({"slow": slow.url, "quick": quick.url}, 'routing = "predicted-ttft"')) as gateway,
    ):
        names = [ask(gateway).headers["x-headway-backend"] for _ in range(50)]
        assert names.count("slow") < 25 and set(names[-12:]) == {"quick"}


def test_who_fails_is_ejected_and_tried_again_by_one_request() -> None:
    with (
        ScriptedServer(script=json.dumps(script(fail="status", status=500))) as server,
        LiveGateway(file_text({"a": server.url}, health_path="", models=["scripted"])) as gateway,
    ):
        assert [ask(gateway).status_code for _ in range(3)] == [500, 500, 503]
        refused = ask(gateway)
        assert refused.json()["error"]["code"] == "no_backend" and int(refused.headers["retry-after"]) >= 1
        assert gateway.client.get("/health").status_code == 503
        eventually(lambda: gateway.gateway.members["a"].breaker.allows(time.monotonic_ns()))
        assert [ask(gateway).status_code for _ in range(2)] == [500, 503]  # the one that tried, and the next
        assert gateway.gateway.members["a"].breaker.ejections == 2
        eventually(lambda: gateway.gateway.members["a"].breaker.allows(time.monotonic_ns()))
        assert ask(gateway, chunks=2).status_code == 200
        assert ask(gateway, chunks=2).status_code == 200


def test_a_client_that_leaves_is_noticed_by_the_backend_at_once(gateway: LiveGateway, backend: ScriptedServer) -> None:
    body = {"model": "scripted", "prompt": "x", "stream": True}
    with gateway.client.stream(
        "POST", "/v1/completions", json=body | {"script": script(id="left", chunks=900, gap_s=0.01)}
    ) as answer:
        next(answer.iter_lines())
        left_ns = time.monotonic_ns()
    eventually(lambda: "left_ns" in backend.log("left"))
    assert backend.log("left")["left_ns"] - left_ns < 1e9
    eventually(lambda: gateway.outcomes()["a"].get("cancelled") == 1)
    assert not gateway.gateway.in_flight and not gateway.gateway.members["a"].in_flight
    assert not gateway.gateway.members["a"].seen.queues.of_all.choices


def test_a_client_that_leaves_before_the_answer_is_noticed_too(gateway: LiveGateway, backend: ScriptedServer) -> None:
    body = {"model": "scripted", "prompt": "x", "stream": True, "script": script(id="early", headers_delay_s=5.0)}
    with pytest.raises(Exception, match="timed out"):
        gateway.client.post("/v1/completions", json=body, timeout=0.3)
    eventually(lambda: "left_ns" in backend.log("early"), 3)
    eventually(lambda: not gateway.gateway.in_flight)


async def test_a_connection_of_a_question_is_nobody_elses() -> None:
    """Another request that took it would wait for ever, as the question drops it when it has its answer."""

    class Reader:
        def __init__(self, pool: Pool) -> None:
            self.pool, self.found = pool, asyncio.get_running_loop().create_future()

        def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
            return

        def on_piece(self, data: bytes) -> None:
            return

        def on_end(self, failure: UpstreamFailed | None) -> None:
            self.found.set_result((failure, self.pool.idle()))

    async def answer(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        raise AssertionError(head)

    with raw_backend(answer) as url:
        file = parse_gateway_file("gateway.toml", file_text({"a": url}))
        pool = Pool(file.backends[0], file.timeouts)
        for is_kept in (False, True):
            connection, reader = await pool.connect(is_kept), Reader(pool)
            connection.ask(b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n", reader, 5.0)
            failure, idle = await reader.found
            assert failure is None and idle is (connection if is_kept else None)
        pool.close()
