"""Adapters over HTTP: their names, how they come and go, and who may ask for that."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headway.config_files.tenants import key_digest, read_tenant_file
from headway.engine.config import EngineConfig
from headway.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import MODEL, LiveServer, eventually

TENANT = f"""
[[tenant]]
name = "acme"

[[key]]
tenant = "acme"
sha256 = "{key_digest(b"tenant").hex()}"
models = ["sql"]
"""


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    engine = FakeEngine(tokenizer)
    engine.config = EngineConfig(enable_lora=True)
    path = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    path.write_text(TENANT)
    tenants: dict[str, Any] = {"tenants": read_tenant_file(str(path)), "quota_journal": "none"}
    server = LiveServer(engine, tokenizer, api_keys=["secret"], lora_unload="abort", **tenants).start()
    yield server
    server.stop()


def post(server: LiveServer, path: str, key: str = "secret", **body: Any) -> tuple[int, dict[str, Any]]:
    answer = server.client.post(path, json=body, headers={"authorization": f"Bearer {key}"})
    return answer.status_code, answer.json()


def load(server: LiveServer, name: str, path: str, **more: Any) -> tuple[int, dict[str, Any]]:
    return post(server, "/v1/load_lora_adapter", lora_name=name, lora_path=path, **more)


def complete(server: LiveServer, model: str | None, key: str = "secret") -> tuple[int, dict[str, Any]]:
    return post(server, "/v1/completions", key, model=model, prompt="Once", max_tokens=2)


def test_an_adapter_is_a_model_with_a_parent_from_its_load_to_its_end(server: LiveServer) -> None:
    assert complete(server, "sql")[0] == 404
    status, card = load(server, "sql", "/adapters/sql")
    assert status == 200 and (card["id"], card["root"], card["parent"]) == ("sql", "/adapters/sql", MODEL)
    authorized = {"authorization": "Bearer secret"}
    cards = server.client.get("/v1/models", headers=authorized).json()["data"]
    assert [(each["id"], each["parent"]) for each in cards] == [(MODEL, None), ("sql", MODEL)]
    assert server.client.get("/v1/models/sql", headers=authorized).json() == card
    for model, digest in (("sql", server.engine.adapters["sql"].digest), (MODEL, ""), (None, "")):
        status, answer = complete(server, model)
        assert status == 200 and answer["model"] == (model or MODEL)
        assert server.engine.requests[-1].adapter == digest
    status, answer = load(server, "sql", "/adapters/other")
    assert status == 400 and "adapter 'sql' is loaded; unload it first" in answer["error"]["message"]
    assert load(server, "sql", "/adapters/other", load_inplace=True)[0] == 200
    complete(server, "sql")
    assert server.engine.requests[-1].adapter == server.engine.adapters["sql"].digest != digest
    # A tenant's key that may use it, and nothing else.
    assert complete(server, "sql", "tenant")[0] == 200
    assert complete(server, MODEL, "tenant")[1]["error"]["code"] == "model_not_allowed"
    assert post(server, "/v1/unload_lora_adapter", lora_name="sql") == (
        200,
        {"id": "sql", "object": "model", "deleted": True},
    )
    assert complete(server, "sql")[1]["error"]["code"] == "model_not_found"


def test_what_is_refused(server: LiveServer) -> None:
    status, answer = load(server, "bad", "/none")
    assert status == 400 and answer["error"]["message"] == "bad: adapter /none: there is no such folder"
    status, answer = load(server, MODEL, "/adapters/sql")
    assert status == 400 and "'tiny' is the base model; choose another name" in answer["error"]["message"]
    assert load(server, "", "/adapters/sql")[1]["error"]["param"] == "lora_name"
    status, answer = post(server, "/v1/unload_lora_adapter", lora_name="gone")
    assert status == 404 and answer["error"]["message"] == "adapter 'gone' is not loaded"
    for key, status in (("tenant", 403), ("wrong", 401)):
        assert post(server, "/v1/load_lora_adapter", key, lora_name="a", lora_path="/a")[0] == status
    server.engine.config = EngineConfig()
    status, answer = load(server, "a", "/a")
    server.engine.config = EngineConfig(enable_lora=True)
    assert status == 400 and "start the server with --enable-lora" in answer["error"]["message"]


def test_without_keys_nobody_loads_adapters(shared_server: LiveServer) -> None:
    answer = shared_server.post("/v1/load_lora_adapter", lora_name="a", lora_path="/a")
    assert answer.status_code == 403 and "start the server with --api-key" in answer.json()["error"]["message"]


def test_unloading_ends_requests_that_run_by_a_typed_error(server: LiveServer) -> None:
    load(server, "going", "/adapters/going")
    server.engine.open = False
    with ThreadPoolExecutor(2) as pool:
        going, other = pool.submit(complete, server, "going"), pool.submit(complete, server, None)
        eventually(lambda: len(server.engine.running) == 2)
        assert post(server, "/v1/unload_lora_adapter", lora_name="going")[0] == 200
        status, answer = going.result(10)
        assert status == 404 and answer["error"]["code"] == "adapter_unloaded" and not other.done()
        server.engine.open = True
        assert other.result(10)[0] == 200


def test_a_path_is_no_name(server: LiveServer, tmp_path: Path) -> None:
    assert complete(server, str(tmp_path))[0] == 404
