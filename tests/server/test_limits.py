"""Body size, queue length, API keys, request ids."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer, eventually

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


def test_full_queue(start_server: StartServer, engine: FakeEngine) -> None:
    server = start_server(max_num_queued_reqs=2)
    engine.num_waiting = 1
    assert server.post("/v1/completions", prompt="x").status_code == 200
    engine.num_waiting = 2
    refused = server.post("/v1/completions", prompt="x")
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "queue_full"
    assert "--max-num-queued-reqs" in refused.json()["error"]["message"]
    engine.num_waiting = 0
    assert server.post("/v1/completions", prompt="x").status_code == 200
    assert server.service.handing_over == 0


def test_requests_that_arrive_together_count_each_other(start_server: StartServer, engine: FakeEngine) -> None:
    """Between the check and the engine's own count there must be no gap to slip through."""
    server = start_server(max_num_queued_reqs=3)
    engine.open = False
    codes: list[int] = []

    def ask() -> None:
        codes.append(httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "n": 2}, timeout=20).status_code)

    askers = [threading.Thread(target=ask) for _ in range(8)]
    inner = engine.generate

    def counted(request):  # type: ignore[no-untyped-def]
        engine.num_waiting += request.params.n
        return inner(request)

    engine.generate = counted  # type: ignore[method-assign]
    for asker in askers:
        asker.start()
    eventually(lambda: len(codes) == 6)
    engine.open = True
    for asker in askers:
        asker.join()
    assert sorted(codes) == [200, 200, 503, 503, 503, 503, 503, 503]


def test_api_key(start_server: StartServer) -> None:
    server = start_server(api_keys=["sk-one", "sk-two"])
    for path in ("/v1/models", "/tokenize", "/load", "/v1/completions", "/nothing"):
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


def test_priority_where_the_policy_has_it(start_server: StartServer, engine: FakeEngine) -> None:
    server = start_server(priority_allowed=True)
    assert server.post("/v1/completions", prompt="x", priority=-5).status_code == 200
    assert engine.requests[0].priority == -5
