"""Body size, queue length, API keys, request ids."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.live_server import MODEL, LiveServer, eventually

StartServer = Callable[..., LiveServer]


def test_body_above_the_limit(server: LiveServer, engine: FakeEngine) -> None:
    answer = server.post("/v1/completions", prompt="x" * 10 * 2**20)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"
    assert "8388608" in answer.json()["error"]["message"]
    assert engine.requests == []


def test_chunked_body_is_cut_while_it_is_read(server: LiveServer) -> None:
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(40):
            sent += 2**18
            yield b" " * 2**18

    answer = server.client.post("/v1/completions", content=chunks())
    assert answer.status_code == 413
    assert sent == 40 * 2**18  # it was sent to its end, so that the client heard the answer


def test_body_limit_is_a_setting(start_server: StartServer) -> None:
    server = start_server(max_body_size=100)
    assert server.post("/v1/completions", prompt="x" * 50).status_code == 200
    assert server.post("/v1/completions", prompt="x" * 100).status_code == 413
    assert server.post("/tokenize", prompt="x" * 100).status_code == 413


@contextmanager
def parked(server: LiveServer, engine: FakeEngine, key: str = "none", **body: Any) -> Iterator[None]:
    """A request that has come in and gets no token."""
    engine.open = False
    headers = {"authorization": f"Bearer {key}"}
    asker = threading.Thread(
        target=lambda: httpx.post(
            f"{server.url}/v1/completions", json={"prompt": "x", **body}, headers=headers, timeout=20
        )
    )
    there = len(engine.requests)
    asker.start()
    eventually(lambda: len(engine.requests) > there)
    yield
    engine.open = True
    asker.join()


def is_empty(server: LiveServer) -> bool:
    queue = server.service.admission.queues.of_all
    return not (queue.choices or queue.tokens or server.service.in_flight)


def test_full_queue(start_server: StartServer, engine: FakeEngine) -> None:
    server = start_server(max_num_queued_reqs=3)
    with parked(server, engine, n=2):
        refused = server.post("/v1/completions", prompt="x", n=2)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
        error = refused.json()["error"]
        assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
        assert error["message"].startswith(
            "2 choices are waiting or running, and this request has 2; the limit is 3 (--max"
        )
        with parked(server, engine):
            assert server.client.post("/v1/completions", content=b"{").status_code == 429  # it is not even read
    assert server.post("/v1/completions", prompt="x", n=3).status_code == 200
    assert server.client.post("/v1/completions", content=b"{").status_code == 400
    eventually(lambda: is_empty(server))


def test_queue_full_of_tokens(start_server: StartServer, engine: FakeEngine) -> None:
    server = start_server(max_num_queued_tokens=100)
    with parked(server, engine, prompt=[5] * 60, n=4):  # computed once for its four choices
        refused = server.post("/v1/completions", prompt=[[5] * 30, [6] * 30])
        assert refused.status_code == 429
        assert "60 prompt tokens wait for their first output, and this request has 60; the limit is 100" in refused.text
        assert server.service.admission.queues.of_all.tokens == 60
        engine.open = True
        assert server.post("/v1/completions", prompt=[5] * 40).status_code == 200
    eventually(lambda: is_empty(server))


def test_tokens_count_until_the_first_output_and_choices_until_the_end(
    start_server: StartServer, engine: FakeEngine
) -> None:
    server = start_server(max_num_queued_tokens=100, max_num_queued_reqs=2)
    body = {"prompt": [5] * 60, "stream": True, "n": 2, "max_tokens": 100, "ignore_eos": True}
    engine.step_s = 0.01
    queue = server.service.admission.queues.of_all
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=20) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith('data: {"id"')
        assert (queue.choices, queue.tokens) == (2, 0)
        assert server.post("/v1/completions", prompt="x").status_code == 429
    eventually(lambda: is_empty(server))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "x", "n": 9}, "the request has 9 choices, more than the limit of 8 (--max-num-queued-reqs)"),
        ({"prompt": ["x"] * 3, "n": 3}, "the request has 9 choices, more than the limit of 8"),
        (
            {"prompt": [5] * 101},
            "the request has 101 prompt tokens, more than the limit of 100 (--max-num",
        ),
        ({"prompt": ["x"] * 512, "n": 9}, "512 prompts with n = 9 make 4608 choices; at most 4096 are allowed"),
    ],
)
def test_what_no_empty_queue_would_hold_is_a_bad_request(
    start_server: StartServer, body: dict[str, Any], message: str
) -> None:
    server = start_server(max_num_queued_reqs=8, max_num_queued_tokens=100)
    refused = server.post("/v1/completions", **body)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(message)
    assert is_empty(server)


def test_the_queue_is_bounded_by_default(start_server: StartServer) -> None:
    server = start_server()
    assert server.post("/v1/completions", prompt="x").status_code == 200
    limits = server.service.admission.queues.of_all.limits
    assert (limits.choices, limits.tokens) == (8 * 256, 8 * 64 * 16)


def test_requests_that_arrive_together_count_each_other(start_server: StartServer, engine: FakeEngine) -> None:
    """They count from the moment they are let in: there is no gap to slip through."""
    server = start_server(max_num_queued_reqs=4)
    engine.open = False
    codes: list[int] = []

    def ask() -> None:
        codes.append(httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "n": 2}, timeout=20).status_code)

    askers = [threading.Thread(target=ask) for _ in range(8)]
    for asker in askers:
        asker.start()
    eventually(lambda: len(codes) == 6)
    engine.open = True
    for asker in askers:
        asker.join()
    assert sorted(codes) == [200, 200, 429, 429, 429, 429, 429, 429]
    eventually(lambda: is_empty(server))


@pytest.mark.parametrize(
    ("drops", "retry_after", "dropped", "code", "says"),
    [
        ("timeout", "1", "rejected-ttl-expired", "queue_timeout", "--max-queue-time"),
        ("late", "7", "rejected-saturated", "deadline_unreachable", "the first token can't be there"),
    ],
)
def test_who_is_not_begun_is_told_so(
    start_server: StartServer, engine: FakeEngine, drops: str, retry_after: str, dropped: str, code: str, says: str
) -> None:
    server = start_server()
    engine.drops = drops
    for number, stream in enumerate((False, True), 1):
        refused = server.post("/v1/completions", prompt="x", stream=stream)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == retry_after
        assert refused.headers["x-llm-d-request-dropped-reason"] == dropped
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("service_unavailable_error", code)
        assert says in error["message"]
        eventually(lambda: is_empty(server))
        assert f'request_success_total{{engine="0",finished_reason="{drops}",model_name="tiny"}} {number}.0' in (
            server.client.get("/metrics").text
        )


def test_headers_without_effect_are_named(client: openai.OpenAI) -> None:
    ask = client.completions.with_raw_response.create
    given = {"X-LLM-D-Inference-Fairness-Id": "me", "x-request-id": "r1"}
    for stream in (False, True):
        answer = ask(model="tiny", prompt="x", stream=stream, extra_headers=given)
        assert answer.headers["x-headway-ignored-headers"] == "x-llm-d-inference-fairness-id"
        assert answer.headers["x-request-id"] == "r1"
    assert "x-headway-ignored-headers" not in ask(model="tiny", prompt="x").headers


def test_api_key(start_server: StartServer) -> None:
    server = start_server(api_keys=["sk-one", "sk-two"])
    places = server.client.get("/").json()
    assert places.pop("server").startswith("headway ") and len(places) == 4
    assert all(server.client.get(place).status_code != 404 for place in places.values())
    for path in ("/v1/models", "/tokenize", "/load", "/debug/schedule", "/v1/completions", "/nothing"):
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "sk-one"},
            {"authorization": "Bearer"},
        ):
            answer = server.client.request("GET", path, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["x-request-id"]
    for key in ("sk-one", "sk-two"):
        assert server.client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
    for path in ("/health", "/metrics", "/version"):
        assert server.client.get(path).status_code == 200


@pytest.mark.parametrize("given", ["abc-123", "x" * 128])
def test_request_id_is_echoed(server: LiveServer, given: str) -> None:
    for path in ("/health", "/nothing"):
        assert server.client.get(path, headers={"x-request-id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "caf\xe9"])
def test_unfit_request_id_is_replaced(server: LiveServer, given: str) -> None:
    answer = server.client.get("/health", headers={b"x-request-id": given.encode("latin-1")})
    assert answer.headers["x-request-id"] not in ("", given)


def test_same_request_id_twice_at_once(server: LiveServer, engine: FakeEngine) -> None:
    """The client's id is a label; two requests with one label do not disturb each other."""
    engine.open = False
    texts = []

    def ask() -> None:
        answer = httpx.post(
            f"{server.url}/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "same"}, timeout=20
        )
        texts.append(answer.json()["choices"][0]["text"])

    askers = [threading.Thread(target=ask) for _ in range(2)]
    for asker in askers:
        asker.start()
    eventually(lambda: len(engine.requests) == 2)
    engine.open = True
    for asker in askers:
        asker.join()
    assert texts == ["Once upon a time there was a fox."] * 2


def test_models_version_load(server: LiveServer, engine: FakeEngine) -> None:
    assert server.client.get("/v1/models").json()["data"][0]["max_model_len"] == 256
    assert server.client.get("/v1/models/tiny").json()["id"] == "tiny"
    assert server.client.get("/version").json() == {"version": "0.1.0"}
    engine.open = False
    asker = threading.Thread(target=lambda: server.post("/v1/completions", prompt="x"))
    asker.start()
    eventually(lambda: httpx.get(f"{server.url}/load").json() == {"server_load": 1})
    engine.open = True
    asker.join()
    eventually(lambda: httpx.get(f"{server.url}/load").json() == {"server_load": 0})


def test_what_other_servers_have_is_here_or_said_to_be_elsewhere(server: LiveServer) -> None:
    assert server.client.get("/ping").json() == server.client.post("/ping").json() == {"status": "ready"}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        (card,) = client.models.list().data
        assert (card.id, card.model_extra) == (MODEL, {"root": MODEL, "parent": None, "max_model_len": 256})
        with pytest.raises(openai.NotFoundError, match="there is no POST /v1/images/generations; only text is served"):
            client.images.generate(model=MODEL, prompt="Hello")


def test_tokenize_and_back(server: LiveServer) -> None:
    found = server.post("/tokenize", prompt="Hello 日本", return_token_strs=True).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 256
    assert server.post("/detokenize", tokens=found["tokens"]).json() == {"prompt": "Hello 日本"}
    chat = server.post("/tokenize", messages=[{"role": "user", "content": "Hello"}]).json()
    text = server.post("/detokenize", tokens=chat["tokens"]).json()["prompt"]
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert server.post("/tokenize", prompt="").json()["tokens"] == []


def test_server_names(start_server: StartServer) -> None:
    server = start_server(served_model_names=["first", "org/second"])
    assert [card["id"] for card in server.client.get("/v1/models").json()["data"]] == ["first", "org/second"]
    assert server.client.get("/v1/models/org/second").status_code == 200
    assert server.post("/v1/completions", model="org/second", prompt="x").json()["model"] == "org/second"
    assert server.post("/v1/completions", prompt="x").json()["model"] == "first"


def test_a_model_answers_to_its_name_and_to_the_folder_it_was_started_with(
    start_server: StartServer,
) -> None:
    folder = "/models/Tiny-1B"
    server = start_server(served_model_names=["Tiny-1B"], root=folder)
    assert [(card["id"], card["root"]) for card in server.client.get("/v1/models").json()["data"]] == [
        ("Tiny-1B", folder)
    ]
    assert server.post("/v1/completions", prompt="x").json()["model"] == "Tiny-1B"
    assert server.post("/v1/completions", model=folder, prompt="x").json()["model"] == folder
    refused = server.post("/v1/completions", model="Tiny", prompt="x")
    assert refused.status_code == 404 and refused.json()["error"]["message"].endswith("the server has Tiny-1B")


def test_priority_where_the_policy_has_it(start_server: StartServer, engine: FakeEngine) -> None:
    server = start_server(priority_allowed=True)
    assert server.post("/v1/completions", prompt="x", priority=-5).status_code == 200
    assert engine.requests[0].priority == -5
