"""Clients that go away or do not read, and engines that die; see docs/faults.md."""

from __future__ import annotations

import json
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from headway.engine.messages import AddRequest, SequenceOutput
from headway.server.edge.behind import BEHIND
from headway.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine, Take
from tests.server.live_server import MODEL, LiveServer, eventually

StartServer = Callable[..., LiveServer]
NAMES = ("clients_behind", "clients_unread_bytes")
LONG = {"prompt": "x", "max_tokens": 900_000, "ignore_eos": True, "stream": True}


class RawClient:
    """A client that does just what a test wants with its connection."""

    def __init__(self, server: LiveServer, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(10)
        self.socket.connect(("127.0.0.1", server.port))

    def ask(self, path: str = "/v1/completions", **body: Any) -> None:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
        self.socket.sendall(head.encode() + content)

    def read_to_end(self, pause_s: float = 0.0) -> tuple[bytes, bool]:
        """Everything until the server closes or resets the connection, and whether it was a reset."""
        received = bytearray()
        while True:
            time.sleep(pause_s)
            try:
                chunk = self.socket.recv(65536)
            except ConnectionResetError:
                return bytes(received), True
            if not chunk:
                return bytes(received), False
            received += chunk
            if b"data: [DONE]" in received[-100:]:
                return bytes(received), False

    def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


@pytest.fixture
def long_talker(engine: FakeEngine) -> FakeEngine:
    """Talks for a million tokens, fast."""
    engine.max_model_len = 1_000_000
    engine.tokens_per_step = 20
    engine.step_s = 0.0005
    return engine


def is_free(server: LiveServer) -> bool:
    service = server.service
    queue = service.admission.queues.of_all
    return not (server.engine.running or service.in_flight or service.generations or queue.choices or queue.tokens)


# --- a client that stops reading ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "bounds", [{"max_stream_buffer": 50_000, "send_timeout": 60.0}, {"max_stream_buffer": 10**9, "send_timeout": 0.5}]
)
def test_slow_reader_is_cancelled_and_cut_off(
    start_server: StartServer, long_talker: FakeEngine, bounds: dict[str, Any]
) -> None:
    server = start_server(**bounds)
    client = RawClient(server, receive_buffer=4096)
    client.ask(**LONG)
    eventually(lambda: len(long_talker.aborted) == 1)
    eventually(lambda: is_free(server))
    received, was_reset = client.read_to_end()
    assert was_reset, "the connection must not linger with what the client does not read"
    assert b"[DONE]" not in received
    eventually(lambda: not server.server.server_state.connections)


def test_a_client_that_does_not_read_can_be_seen(start_server: StartServer, long_talker: FakeEngine) -> None:
    server = start_server(max_stream_buffer=10**9, send_timeout=60.0)

    def behind() -> tuple[float, float]:
        text = server.client.get("/metrics").text
        values = [re.search(rf"^headway:{name}{{.*}} (.*)$", text, re.MULTILINE) for name in NAMES]
        clients, unread = (float(value[1]) for value in values if value is not None)
        return clients, unread

    assert behind() == (0, 0)
    slow, fast = RawClient(server, receive_buffer=4096), RawClient(server)
    slow.ask(**LONG)
    fast.ask(**LONG | {"max_tokens": 200})
    assert b"[DONE]" in fast.read_to_end()[0]
    eventually(lambda: behind()[0] == 1)
    assert behind()[1] > BEHIND
    slow.reset()
    eventually(lambda: behind() == (0, 0))
    fast.reset()


def test_reader_that_only_pauses_is_served_and_the_pause_is_accounted(
    start_server: StartServer, long_talker: FakeEngine
) -> None:
    server = start_server(max_stream_buffer=10**8)
    client = RawClient(server, receive_buffer=4096)
    long_talker.step_s = 0.0
    client.ask(**{**LONG, "max_tokens": 60_000, "include_timings": True})
    eventually(lambda: bool(long_talker.requests) and not long_talker.running)
    time.sleep(1.0)  # in which the server may still be writing what the engine has sent
    received, _ = client.read_to_end()
    last = next(line for line in reversed(received.split(b"data: ")) if b'"timings"' in line)
    timings = json.loads(last[: last.rindex(b"}") + 1])["timings"]
    assert timings["phases_ns"]["send_blocked"] > 4e8
    assert sum(timings["phases_ns"].values()) == timings["e2e_ns"]
    assert timings["tokens"] == 60_000


# --- a client that goes away ----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("state", ["waiting", "generating"])
def test_client_that_goes_away_frees_the_engine_at_once(
    server: LiveServer, engine: FakeEngine, stream: bool, how: str, state: str
) -> None:
    engine.open = state != "waiting"
    engine.step_s = 0.005
    client = RawClient(server)
    client.ask(prompt=["x", "y"], n=2, max_tokens=250, ignore_eos=True, stream=stream)
    eventually(lambda: len(engine.running) == 4)
    if how == "close":
        client.socket.close()
    else:
        client.reset()
    eventually(lambda: is_free(server))
    assert len(engine.aborted) == 2


def test_client_that_goes_away_within_its_body(server: LiveServer, engine: FakeEngine) -> None:
    client = RawClient(server)
    client.socket.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{"prompt": "')
    time.sleep(0.05)
    client.socket.close()
    eventually(lambda: is_free(server) and not server.server.server_state.connections)
    assert engine.requests == []


def test_client_that_goes_away_while_its_prompt_is_tokenized(
    start_server: StartServer, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    engine.max_model_len = 10**7
    server = start_server()
    client = RawClient(server)
    client.ask(prompt="The quick brown fox. " * 100_000)
    eventually(lambda: server.service.in_flight == 1)
    client.reset()
    eventually(lambda: is_free(server))
    assert engine.requests == []


def test_crowd_of_which_a_third_leaves(start_server: StartServer, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    """64 streams at once; those who stay get their whole text, and nothing is left behind."""
    server = start_server()
    engine.step_s = 0.002
    engine.reply = lambda request, index: tokenizer.encode(f"{tokenizer.decode(request.prompt_token_ids)} " * 8)
    draw = random.Random(1)
    leavers = set(draw.sample(range(64), 21))
    texts: dict[int, str] = {}

    def talk(number: int, stay_for: int) -> None:
        body = {"prompt": f"client {number}", "max_tokens": 200, "stream": True}
        text, count = "", 0
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    count += 1
                if number in leavers and count >= stay_for:
                    return
        texts[number] = text

    talkers = [threading.Thread(target=talk, args=(i, draw.randrange(12))) for i in range(64)]
    for talker in talkers:
        talker.start()
    for talker in talkers:
        talker.join()
    assert texts == {i: f"client {i} " * 8 for i in range(64) if i not in leavers}
    eventually(lambda: is_free(server))
    assert len(engine.aborted) == len(leavers)


# --- an engine that fails ---------------------------------------------------------------------------------


def test_engine_that_dies_ends_streams_with_an_error(server: LiveServer, engine: FakeEngine) -> None:
    engine.step_s = 0.002
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    stream = client.completions.create(
        model=MODEL, prompt="x", max_tokens=250, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    engine.die()
    with pytest.raises(openai.APIError, match="engine process died"):
        for _ in stream:
            pass
    assert server.client.get("/health").status_code == 503
    refused = server.post("/v1/completions", prompt="x")
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "engine_loading"
    assert refused.headers["retry-after"]
    engine.finish_loading()
    assert server.client.get("/health").status_code == 200
    assert server.post("/v1/completions", prompt="x").status_code == 200


@pytest.mark.parametrize("prompts", ["x", ["x", "y"]])
def test_engine_that_dies_ends_whole_answers_with_503(server: LiveServer, engine: FakeEngine, prompts: Any) -> None:
    engine.open = False
    answers: list[httpx.Response] = []
    asker = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", prompt=prompts)))
    asker.start()
    eventually(lambda: len(engine.running) == (1 if prompts == "x" else 2))
    engine.die()
    asker.join()
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "engine_dead"
    eventually(lambda: is_free(server))


@pytest.mark.parametrize("reason", ["error", "abort"])
@pytest.mark.parametrize("stream", [True, False])
def test_request_that_fails_in_the_engine(
    server: LiveServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, reason: str, stream: bool
) -> None:
    def failing(requests: list[AddRequest], take: Take) -> Callable[[], None]:
        name = requests[0].request_id
        take(SequenceOutput(name, 0, [50]))
        take(SequenceOutput(name, 0, [], finish_reason=reason, error="logits were not numbers"))
        return lambda: None

    monkeypatch.setattr(engine, "submit", failing)
    answer = server.post("/v1/completions", prompt="x", stream=stream)
    if stream:
        assert answer.status_code == 200
        last = json.loads(answer.text.split("data: ")[-1])
        assert "[DONE]" not in answer.text
    else:
        assert answer.status_code == (500 if reason == "error" else 503)
        last = answer.json()
    expected = "logits were not numbers" if reason == "error" else "the engine dropped this request"
    assert last["error"]["message"] == expected
    kind = ("engine_error", "request_failed") if reason == "error" else ("service_unavailable_error", "aborted")
    assert (last["error"]["type"], last["error"]["code"]) == kind
    eventually(lambda: is_free(server))


def test_bug_in_the_server_is_a_500_without_details(
    server: LiveServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(requests: list[AddRequest], take: Take) -> Callable[[], None]:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(engine, "submit", broken)
    answer = server.post("/v1/completions", prompt="x")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    streamed = server.post("/v1/completions", prompt="x", stream=True)
    assert json.loads(streamed.text.split("data: ")[-1])["error"]["code"] == "internal_error"
    assert "secret" not in answer.text + streamed.text
    eventually(lambda: is_free(server))


def test_loading_and_dead_engines(start_server: StartServer, engine: FakeEngine) -> None:
    engine.loads = False
    server = start_server()
    answer = server.client.get("/health")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_loading"
    assert answer.headers["retry-after"]
    assert server.client.get("/version").status_code == 200
    assert server.client.get("/metrics").status_code == 200
    assert server.client.get("/v1/models").status_code == 503
    assert server.post("/tokenize", prompt="x").status_code == 503
    engine.finish_loading()
    assert server.client.get("/health").json() == {"status": "ready"}
    engine.stalled_s = 41.5
    for answer in (server.client.get("/health"), server.post("/v1/completions", prompt="x")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stalled")
        assert "has ended no step for 41.5 s" in answer.json()["error"]["message"]
    engine.stalled_s = 0.0
    assert server.client.get("/health").status_code == 200
    engine.state, engine.last_error = "dead", "the device is gone"
    answer = server.client.get("/health")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
    assert "the device is gone" in answer.json()["error"]["message"]
