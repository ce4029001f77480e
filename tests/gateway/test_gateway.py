"""The gateway's own promises: routes, models, headers, deadlines, the ledger, quotas, reloads and limits."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from headway.config_files.classes import parse_class_file
from headway.config_files.tenants import parse_tenant_file
from tests.bench.scripted_server import ScriptedServer
from tests.gateway.live_gateway import LiveGateway, events_of, file_text, raw_backend, whole
from tests.gateway.test_faults import ask, script
from tests.server.conftest import model_folder, tokenizer  # noqa: F401
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer, eventually

CLASSES = parse_class_file(
    "classes.toml",
    'default = "chat"\n[[class]]\nname = "chat"\nttft_ms = 900\ntpot_ms = 70\n'
    '[[class]]\nname = "bulk"\nmax_queued = 1\n',
)


@pytest.fixture(scope="module")
def headway(tokenizer: Any) -> Iterator[LiveServer]:  # noqa: F811
    server = LiveServer(FakeEngine(tokenizer), tokenizer).start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def gateway(headway: LiveServer) -> Iterator[LiveGateway]:
    with LiveGateway(file_text({"h": headway.url}, kind="headway", labels={"tier": "bf16"})) as running:
        yield running


# --- routes -----------------------------------------------------------------------------------------------


def test_all_apis_pass(gateway: LiveGateway) -> None:
    base, key = f"{gateway.url}/v1", "none"
    messages: Any = [{"role": "user", "content": "hello"}]
    with openai.OpenAI(base_url=base, api_key=key, max_retries=0) as client:
        assert client.chat.completions.create(model="tiny", messages=messages, max_tokens=4).choices[0].message.content
        stream = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4, stream=True)
        assert "".join(each.choices[0].delta.content or "" for each in stream if each.choices)
        assert client.completions.create(model="tiny", prompt="hello", max_tokens=4).usage
        assert [each.id for each in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").id == "tiny"
        stored = client.responses.create(model="tiny", input="hello", max_output_tokens=16)
        assert client.responses.retrieve(stored.id).id == stored.id
        again = client.responses.create(
            model="tiny", input="more", previous_response_id=stored.id, max_output_tokens=16
        )
        assert again.previous_response_id == stored.id
        kinds = [
            each.type for each in client.responses.create(model="tiny", input="a", max_output_tokens=16, stream=True)
        ]
        assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    with anthropic.Anthropic(base_url=gateway.url, api_key=key, max_retries=0) as other:
        assert other.messages.create(model="tiny", max_tokens=8, messages=messages).usage.output_tokens
        with other.messages.stream(model="tiny", max_tokens=8, messages=messages) as told:
            assert told.get_final_message().stop_reason
        assert other.messages.count_tokens(model="tiny", messages=messages).input_tokens
    assert gateway.client.post("/tokenize", json={"prompt": "hello"}).json()["count"] > 0
    found = gateway.outcomes()["h"]
    assert set(found) == {"ok"}, found


def test_own_routes(gateway: LiveGateway) -> None:
    get = gateway.client.get
    assert get("/health").json() == {"status": "ready"} and get("/ping").status_code == 200
    assert get("/").json()["models"] == "/v1/models" and "version" in get("/version").json()
    metrics = get("/metrics").text
    assert 'headway_gateway:backend_state{backend="h",state="closed"} 1.0' in metrics
    assert get("/v1/models/none").status_code == 404
    assert get("/v1/responses/resp_unknown").json()["error"]["code"] == "response_not_found"


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "said"),
    [
        ("POST", "/v1/completions", b"{", 400, "not valid JSON"),
        ("POST", "/v1/completions", b"[1]", 400, "the body is not as it should be"),
        ("POST", "/v1/completions", b"\xff\xfe", 400, "not valid JSON"),
        ("POST", "/v1/completions", b"[" * 100_000, 400, "the body is not"),
        ("POST", "/v1/completions", b'{"model":"tiny","n":"2"}', 400, "Expected `int | null`"),
        ("POST", "/v1/completions", b'{"model":"tiny","n":0}', 400, "n is 0"),
        ("POST", "/v1/completions", b'{"model":"tiny","max_tokens":-1}', 400, "max_tokens is -1"),
        ("POST", "/v1/completions", b'{"model":"other","prompt":"a"}', 404, "there are tiny"),
        ("POST", "/v1/completions", b'{"model":"tiny"}', 400, "prompt"),  # the backend's own answer
        ("GET", "/v1/completions", None, 405, "use POST"),
        ("POST", "/v1/models", b"{}", 405, "use GET"),
        ("POST", "/v1/nothing", b"{}", 404, "there is no POST"),
        ("POST", "/v1/batches", b"{}", 404, "no file '' is known here"),
    ],
)
def test_bad_requests(
    gateway: LiveGateway, method: str, path: str, content: bytes | None, status: int, said: str
) -> None:
    answer = gateway.client.request(method, path, content=content)
    assert answer.status_code == status and said in answer.json()["error"]["message"], answer.text


def test_large_and_slow_bodies_meet_the_limits_of_the_servers_edge(headway: LiveServer) -> None:
    changes = {"max_body_size": 5000, "request_read_timeout": 0.3}
    with LiveGateway(file_text({"h": headway.url}), **changes) as gateway:
        answer = gateway.client.post("/v1/completions", json={"model": "tiny", "prompt": "x" * 6000})
        assert answer.json()["error"]["code"] == "request_too_large"
        with httpx.Client(base_url=gateway.url) as client:
            slow = client.post("/v1/completions", content=(time.sleep(0.2) or b"{" for _ in range(9)))
            assert slow.status_code == 408
        assert gateway.client.get("/v1/models", headers={"x": "y" * 70_000}).status_code == 431


def test_keys_are_needed_and_never_passed_on() -> None:
    heads: list[bytes] = []

    async def handler(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        heads.append(head.lower())
        writer.write(whole(b'{"choices":[]}'))

    with raw_backend(handler) as url, LiveGateway(file_text({"m": url}, key="upstream"), api_keys=["own"]) as gateway:
        assert gateway.client.post("/v1/completions", json={"model": "m"}).status_code == 401
        for given in ({"authorization": "Bearer own"}, {"x-api-key": "own"}):
            headers = given | {"cookie": "secret", "x-request-id": "id-1", "x-session-id": "s"}
            answer = gateway.client.post("/v1/completions?a=b", json={"model": "m"}, headers=headers)
            assert answer.status_code == 200 and answer.headers["x-request-id"] == "id-1"
    assert len(heads) == 2
    for head in heads:
        assert b"authorization: bearer upstream" in head and b"own" not in head and b"secret" not in head
        assert b"x-request-id: id-1" in head and b"x-session-id: s" in head and b"/v1/completions?a=b" in head


def test_models_of_all_backends_are_joined_and_requests_go_where_theirs_is() -> None:
    with (
        ScriptedServer(model=["one", "both"]) as first,
        ScriptedServer(model=["two", "both"]) as second,
        LiveGateway(file_text({"a": first.url, "b": second.url}, 'routing = "round-robin"')) as gateway,
    ):
        names = [each["id"] for each in gateway.client.get("/v1/models").json()["data"]]
        assert sorted(names) == ["both", "one", "two"]
        where: dict[str, set[str]] = {}
        for name in names * 3:
            answer = gateway.client.post("/v1/completions", json={"model": name, "prompt": "x", "max_tokens": 1})
            where.setdefault(name, set()).add(answer.headers["x-headway-backend"])
        assert where == {"one": {"a"}, "two": {"b"}, "both": {"a", "b"}}
        missing = gateway.client.post("/v1/completions", json={"prompt": "x"})
        assert missing.status_code == 400 and "model is missing" in missing.json()["error"]["message"]


def test_prompts_go_to_the_backends_meant_for_their_length() -> None:
    with ScriptedServer() as short, ScriptedServer() as long:
        text = (
            f'[[backend]]\nname = "short"\nurl = "{short.url}"\nmax_prompt_tokens = 100\n'
            f'[[backend]]\nname = "long"\nurl = "{long.url}"\nmin_prompt_tokens = 101\nmax_prompt_tokens = 1000\n'
        )
        with LiveGateway(text) as gateway:
            for words, name in (("x" * 200, "short"), ("x" * 2000, "long")):
                answer = gateway.client.post("/v1/completions", json={"model": "scripted", "prompt": words})
                assert answer.headers["x-headway-backend"] == name
            refused = gateway.client.post("/v1/completions", json={"model": "scripted", "prompt": "x" * 9000})
            assert refused.status_code == 400 and "no backend takes that many" in refused.json()["error"]["message"]


def test_a_conversation_stays_where_its_prefix_is() -> None:
    with (
        ScriptedServer() as first,
        ScriptedServer() as second,
        LiveGateway(file_text({"a": first.url, "b": second.url}, 'routing = "prefix-hits"')) as gateway,
    ):

        def turn(messages: list[dict[str, str]]) -> str:
            body = {"model": "scripted", "messages": messages, "max_tokens": 1}
            answer = gateway.client.post("/v1/chat/completions", json=body)
            return answer.headers["x-headway-backend"]

        old = [{"role": "user", "content": "old " * 400}]
        home = turn(old)
        long = {"model": "scripted", "prompt": "x", "stream": True, "script": script(chunks=300, gap_s=0.01)}
        with gateway.client.stream("POST", "/v1/completions", json=long) as held:
            assert held.headers["x-headway-backend"] == home  # nobody knows this one, and none has anything to do
            for _ in range(3):
                old += [{"role": "assistant", "content": "tok "}, {"role": "user", "content": "more " * 30}]
                assert turn(old) == home  # although the other has less to do
            assert turn([{"role": "user", "content": "new " * 400}]) != home


# --- deadlines and the ledger ---------------------------------------------------------------------------------


def test_the_deadline_stands_since_the_first_byte_and_what_is_left_of_it_is_forwarded() -> None:
    heads: list[dict[str, str]] = []

    async def handler(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        lines = [line.split(": ", 1) for line in head.decode().strip().split("\r\n")[1:]]
        heads.append({name.lower(): value for name, value in lines})
        writer.write(whole(b'{"choices":[]}'))

    with raw_backend(handler) as url:
        text = file_text({"m": url}, kind="headway")
        with LiveGateway(text, service_classes=CLASSES) as gateway:
            body = json.dumps({"model": "m"}).encode()

            def parts() -> Iterator[bytes]:
                yield body[:3]
                time.sleep(0.2)
                yield body[3:]

            assert gateway.client.post("/v1/completions", content=parts()).status_code == 200
            given = {"x-llm-d-slo-ttft-ms": "500", "x-headway-service-class": "chat"}
            assert gateway.client.post("/v1/completions", json={"model": "m"}, headers=given).status_code == 200
            unknown = gateway.client.post("/v1/completions", json={"model": "m", "service_class": "none"})
            assert unknown.status_code == 400 and "is not a class here" in unknown.json()["error"]["message"]
    slow, own = heads
    assert 100 < float(slow["x-llm-d-slo-ttft-ms"]) < 701 and slow["x-headway-service-class"] == "chat"
    assert 100 < float(own["x-llm-d-slo-ttft-ms"]) < 500 and own["x-llm-d-slo-tpot-ms"] == "70"


def test_backends_that_know_no_classes_are_told_none() -> None:
    heads: list[bytes] = []

    async def handler(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        heads.append(head)
        writer.write(whole(b'{"choices":[]}'))

    with raw_backend(handler) as url, LiveGateway(file_text({"m": url}), service_classes=CLASSES) as gateway:
        headers = {"x-headway-service-class": "bulk"}
        assert gateway.client.post("/v1/completions", json={"model": "m"}, headers=headers).status_code == 200
    assert b"service-class" not in heads[0] and b"slo" not in heads[0]


@pytest.mark.parametrize("stream", [True, False])
def test_the_ledger_is_joined_across_the_hop_and_sums_exactly(gateway: LiveGateway, stream: bool) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 5, "stream": stream, "include_timings": True}
    answer = gateway.client.post("/v1/completions", json=body)
    parts = [json.loads(each) for each in events_of(answer) if each != "[DONE]"] if stream else [answer.json()]
    (timings,) = [each["timings"] for each in parts if "timings" in each]
    phases = timings["phases_ns"]
    assert sum(phases.values()) == timings["e2e_ns"] and min(phases.values()) >= 0
    assert {"receive", "route", "network", "decode_compute"} <= set(phases) and "backend" not in phases
    assert 0 < timings["ttft_ns"] <= timings["e2e_ns"] and timings["tokens"] == 5
    assert answer.headers["x-headway-backend"] == "h; tier=bf16"
    header = dict(each.split(";dur=") for each in answer.headers["server-timing"].split(", "))
    assert float(header.pop("total")) == pytest.approx(sum(map(float, header.values())), abs=0.02)
    assert ("network" in header) == (not stream)


def test_a_backend_that_tells_more_time_than_passed_is_one_phase() -> None:
    told = {"e2e_ns": 10**12, "ttft_ns": 1, "phases_ns": {"decode_compute": 10**12}}
    answer_body = json.dumps({"choices": [], "timings": told}).encode()

    async def handler(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(answer_body, b"server-timing: decode_compute;dur=1000000"))

    with raw_backend(handler) as url, LiveGateway(file_text({"m": url}, kind="headway")) as gateway:
        answer = gateway.client.post("/v1/completions", json={"model": "m", "include_timings": True})
        timings = answer.json()["timings"]
        assert sum(timings["phases_ns"].values()) == timings["e2e_ns"] < 1e11 and "backend" in timings["phases_ns"]


# --- who may come in ----------------------------------------------------------------------------------------------


def test_quotas_are_charged_once_and_exactly(headway: LiveServer) -> None:
    entry = '[[tenant]]\nname = "{0}"\ntokens_per_minute = {1}\n[[key]]\ntenant = "{0}"\nsha256 = "{2}"\n'
    limits = {"k": 90_000, "s": 20}
    texts = [entry.format(f"of-{key}", most, hashlib.sha256(key.encode()).hexdigest()) for key, most in limits.items()]
    tenants = parse_tenant_file("", "".join(texts))
    with LiveGateway(file_text({"h": headway.url}, kind="headway"), tenants=tenants) as gateway:
        headers, used = {"authorization": "Bearer k"}, 0
        assert gateway.client.post("/v1/completions", json={"model": "tiny"}).status_code == 401

        def one(number: int) -> int:
            body = {"model": "tiny", "prompt": "hello " * (number % 7 + 1), "max_tokens": number % 5 + 1}
            if number % 2:
                answer = gateway.client.post("/v1/completions", json=body, headers=headers)
                return int(answer.json()["usage"]["total_tokens"])
            options = {"stream": True, "stream_options": {"include_usage": True}}
            answer = gateway.client.post("/v1/completions", json=body | options, headers=headers)
            assert answer.status_code == 200 and len(events_of(answer)) > 2, answer.text
            return int(json.loads(events_of(answer)[-2])["usage"]["total_tokens"])

        with ThreadPoolExecutor(40) as pool:
            used = sum(pool.map(one, range(80)))
        hidden = {"model": "tiny", "prompt": "hello", "max_tokens": 3, "stream": True}
        answer = gateway.client.post("/v1/completions", json=hidden, headers=headers)
        assert "usage" not in answer.text and "[DONE]" in answer.text
        meter = gateway.gateway.quotas.quotas.of("of-k")[1]
        eventually(lambda: not gateway.gateway.in_flight and not meter.outstanding)
        tokens = gateway.client.post("/tokenize", json={"prompt": "hello"}, headers=headers).json()["count"]
        assert meter.settled == used + tokens + 3
        small = {"model": "tiny", "prompt": "hello", "max_tokens": 18}, {"authorization": "Bearer s"}
        for status in (200, 429):
            answer = gateway.client.post("/v1/completions", json=small[0], headers=small[1])
            assert answer.status_code == status, answer.text
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"


def test_classes_bound_who_is_in_flight() -> None:
    with ScriptedServer() as server, LiveGateway(file_text({"a": server.url}), service_classes=CLASSES) as gateway:
        body = {"model": "scripted", "prompt": "x", "stream": True, "service_class": "bulk"}
        long = body | {"script": script(chunks=300, gap_s=0.01)}
        with gateway.client.stream("POST", "/v1/completions", json=long) as first:
            next(first.iter_lines())
            refused = gateway.client.post("/v1/completions", json=body)
            assert refused.status_code == 429 and "of class bulk" in refused.json()["error"]["message"]
            chat = gateway.client.post("/v1/completions", json=body | {"service_class": "chat", "max_tokens": 1})
            assert chat.status_code == 200
        eventually(lambda: not gateway.gateway.in_flight)
        assert gateway.client.post("/v1/completions", json=body | {"max_tokens": 1}).status_code == 200


def test_backends_are_bounded_each() -> None:
    with ScriptedServer() as server, LiveGateway(file_text({"a": server.url}, max_requests=1)) as gateway:
        body = {"model": "scripted", "prompt": "x", "stream": True}
        long = body | {"script": script(chunks=300, gap_s=0.01)}
        with gateway.client.stream("POST", "/v1/completions", json=long) as first:
            next(first.iter_lines())
            refused = gateway.client.post("/v1/completions", json=body)
            assert refused.status_code == 429 and "max_requests" in refused.json()["error"]["message"]


# --- streams ------------------------------------------------------------------------------------------------------


def test_a_client_that_reads_nothing_holds_the_backend_back_and_costs_bounded_memory() -> None:
    sent, total = 0, 200_000_000
    piece = b'data: {"choices":[{"text":"' + b"x" * 20_000 + b'"}]}\n\n'

    async def handler(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        while sent < total:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)

    with raw_backend(handler) as url, LiveGateway(file_text({"m": url}), send_timeout=4.0) as gateway:
        request = b'POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 27\r\n\r\n{"model":"m","stream":true}'
        with socket.create_connection(("127.0.0.1", int(gateway.url.rpartition(":")[2]))) as client:
            client.sendall(request)
            held = -1
            while held != sent:
                held = sent
                time.sleep(0.5)
            assert 0 < held < 40_000_000 < total  # what the kernels hold
            eventually(lambda: not gateway.gateway.in_flight)  # it is cut for not reading


@pytest.mark.quiet
def test_chunks_pass_when_they_come(gateway: LiveGateway) -> None:
    with ScriptedServer() as server, LiveGateway(file_text({"a": server.url})) as own:
        body = {"model": "scripted", "prompt": "x", "stream": True, "script": script(chunks=5, gap_s=0.1)}
        with own.client.stream("POST", "/v1/completions", json=body) as answer:
            late = [
                time.monotonic_ns() - json.loads(line[6:])["sent_ns"]
                for line in answer.iter_lines()
                if line.startswith("data: {") and "sent_ns" in line
            ]
            assert answer.headers["x-accel-buffering"] == "no"
    assert len(late) == 5 and sorted(late)[2] < 30e6


# --- changes while it runs -----------------------------------------------------------------------------------------


def test_a_changed_file_is_taken_and_no_request_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    with ScriptedServer() as first, ScriptedServer() as second:
        gateway = LiveGateway(file_text({"a": first.url}), path).start()
        try:
            results: list[bool] = []

            def run() -> None:
                body = {"model": "scripted", "prompt": "x", "stream": True, "script": script(chunks=600, gap_s=0.01)}
                results.append("[DONE]" in gateway.client.post("/v1/completions", json=body).text)

            thread = threading.Thread(target=run)
            thread.start()
            eventually(lambda: gateway.gateway.members["a"].in_flight == 1)
            path.write_text(file_text({"b": second.url}))
            eventually(lambda: "b" in gateway.gateway.members and gateway.gateway.members["b"].is_known)
            assert ask(gateway).headers["x-headway-backend"] == "b"
            assert gateway.gateway.members["a"].is_leaving
            path.write_text("routing = 5")
            time.sleep(0.1)
            gateway.call(gateway.gateway.reload_files)
            assert ask(gateway).headers["x-headway-backend"] == "b"  # a file that is wrong changes nothing
            thread.join()
            assert results == [True]
            eventually(lambda: set(gateway.gateway.members) == {"b"})
        finally:
            gateway.stop()


def test_a_gateway_that_ends_lets_streams_finish() -> None:
    with ScriptedServer() as server:
        gateway = LiveGateway(file_text({"a": server.url})).start()
        body = {"model": "scripted", "prompt": "x", "stream": True, "script": script(chunks=60, gap_s=0.01)}
        with gateway.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert gateway.server is not None
            gateway.call(gateway.server.drain)
            assert "data: [DONE]" in list(lines)
        gateway._thread.join(10)
        assert not gateway._thread.is_alive()
        gateway.client.close()
        gateway.loop.close()


def test_streams_that_do_not_end_in_time_are_ended_with_an_error() -> None:
    with ScriptedServer() as server:
        gateway = LiveGateway(file_text({"a": server.url}), shutdown_timeout=0.2).start()
        body = {"model": "scripted", "prompt": "x", "stream": True, "script": script(chunks=900, gap_s=0.01)}
        with gateway.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert gateway.server is not None
            gateway.call(gateway.server.drain)
            last = [line for line in lines if line][-1]
        assert json.loads(last[6:])["error"]["code"] == "shutting_down"
        gateway.stop()


def test_each_address_of_a_name_is_a_backend_and_they_may_change() -> None:
    found = ["127.0.0.1"]

    async def look_up(host: str) -> list[str]:
        if not found:
            raise OSError("no such name")
        return list(found)

    with ScriptedServer(host="0.0.0.0") as server:
        text = file_text({"a": f"http://name.example:{server.port}"}, 'routing = "round-robin"', resolve=True)
        gateway = LiveGateway(text)
        gateway.look_up = look_up
        gateway.start()
        try:

            def names() -> set[str]:
                return {ask(gateway).headers.get("x-headway-backend", "") for _ in range(4)}

            eventually(lambda: names() == {"a@127.0.0.1"})
            body = {"model": "scripted", "prompt": "x", "stream": True, "script": script(chunks=250, gap_s=0.01)}
            with gateway.client.stream("POST", "/v1/completions", json=body) as held:
                lines = held.iter_lines()
                next(lines)
                found[:] = ["127.0.0.2", "127.0.0.3"]
                eventually(lambda: names() == {"a@127.0.0.2", "a@127.0.0.3"})
                found.clear()
                assert "data: [DONE]" in list(lines)
            assert names() == {"a@127.0.0.2", "a@127.0.0.3"}
        finally:
            gateway.stop()
