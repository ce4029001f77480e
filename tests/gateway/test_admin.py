"""Keys that are made and revoked while the gateway runs, and what a key may be limited to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.config_files.tenants import key_digest, read_tenant_file
from tests.bench.scripted_server import ScriptedServer
from tests.gateway.live_gateway import LiveGateway, file_text

ADMIN = {"authorization": "Bearer boss"}
ASKED = {"model": "m", "prompt": "x", "max_tokens": 2}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "tenants.toml"
    digest = key_digest(b"first").hex()
    found.write_text(f'# ours\n[[tenant]]\nname = "acme"\n[[key]]\ntenant = "acme"\nsha256 = "{digest}"\n')
    return found


@pytest.fixture
def gateway(path: Path) -> Iterator[LiveGateway]:
    with ScriptedServer(model=["m", "other"]) as server:
        text = file_text({"a": server.url})
        with LiveGateway(text, tenants=read_tenant_file(str(path)), admin_keys=["boss"], metrics_keys=["w"]) as running:
            yield running


def made(gateway: LiveGateway, **fields: Any) -> dict[str, Any]:
    answer = gateway.client.post("/admin/keys", json={"tenant": "acme", **fields}, headers=ADMIN)
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


def status(gateway: LiveGateway, key: str, route: str = "/v1/completions", **fields: Any) -> tuple[int, str | None]:
    answer = gateway.client.post(route, json=ASKED | fields, headers={"authorization": f"Bearer {key}"})
    return answer.status_code, None if answer.status_code == 200 else answer.json()["error"]["code"]


def test_keys_come_and_go_at_once(gateway: LiveGateway, path: Path) -> None:
    key = made(gateway, note="the shop", best="batch")
    assert status(gateway, key["key"]) == (200, None)
    text = path.read_text()
    assert text.startswith("# ours\n") and key["key"] not in text and key_digest(key["key"].encode()).hex() in text
    listed = gateway.client.get("/admin/keys", headers=ADMIN).json()["data"]
    assert [each["tenant"] for each in listed] == ["acme", "acme"] and listed[1]["note"] == "the shop"
    assert listed[1] == {name: value for name, value in key.items() if name != "key"}
    assert gateway.client.delete(f"/admin/keys/{key['id']}", headers=ADMIN).json()["deleted"]
    assert status(gateway, key["key"]) == (401, "invalid_api_key")
    assert status(gateway, "first") == (200, None)
    fresh = made(gateway, tenant="fresh", new_tenant=True)
    assert status(gateway, fresh["key"]) == (200, None)
    assert 'tenant="fresh"' in gateway.client.get("/metrics", headers={"authorization": "Bearer w"}).text


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tenant": "nobody"}, "no tenant 'nobody'"),
        ({"tenant": "acme", "new_tenant": True}, "has tenant 'acme' already"),
        ({"best": "golden"}, "best is 'golden', which is not a class"),
        ({"scopes": ["fly"]}, "scopes has 'fly'; choose of generate, embed, batches"),
        ({"colour": 1}, "unknown field `colour`"),
        ({"models": "m"}, "Expected `array"),
    ],
)
def test_what_is_wrong_changes_nothing(gateway: LiveGateway, path: Path, fields: dict[str, Any], said: str) -> None:
    before = path.read_text()
    answer = gateway.client.post("/admin/keys", json={"tenant": "acme", **fields}, headers=ADMIN)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text
    assert path.read_text() == before and len(gateway.gateway.keys) == 1


def test_only_who_has_its_key_may_use_it_and_the_last_key_stays(gateway: LiveGateway) -> None:
    for headers in ({}, {"authorization": "Bearer first"}, {"authorization": "Bearer w"}):
        for method, route in (("GET", "/admin/keys"), ("POST", "/admin/keys"), ("DELETE", "/admin/keys/abc")):
            assert gateway.client.request(method, route, headers=headers).status_code == 401
    assert status(gateway, "boss") == (401, "invalid_api_key")
    assert gateway.client.delete("/admin/keys/abc", headers=ADMIN).status_code == 400
    assert gateway.client.put("/admin/keys", headers=ADMIN).status_code == 404
    last = gateway.client.delete(f"/admin/keys/{key_digest(b'first').hex()}", headers=ADMIN)
    assert last.status_code == 400 and "everybody would have access" in last.json()["error"]["message"]
    assert status(gateway, "first") == (200, None)


def test_without_a_key_of_its_own_there_is_no_such_route(path: Path) -> None:
    with ScriptedServer(model=["m"]) as server:
        text, tenants = file_text({"a": server.url}), read_tenant_file(str(path))
        with LiveGateway(text, tenants=tenants) as running:
            assert running.client.get("/admin/keys").status_code == 401
            assert running.client.get("/admin/keys", headers={"authorization": "Bearer first"}).status_code == 404
        with LiveGateway(text, admin_keys=["boss"]) as running:
            answer = running.client.post("/admin/keys", json={"tenant": "a"}, headers=ADMIN)
            assert answer.status_code == 404 and answer.json()["error"]["code"] == "no_tenants"


def test_a_key_may_be_limited_to_models_and_scopes(gateway: LiveGateway) -> None:
    one = made(gateway, models=["m"])["key"]
    assert status(gateway, one) == (200, None)
    assert status(gateway, one, model="other") == (403, "model_not_allowed")
    assert status(gateway, one, model=None) == (403, "model_not_allowed")
    assert status(gateway, one, "/v1/batches") == (403, "scope_not_allowed")
    shown = gateway.client.get("/v1/models", headers={"authorization": f"Bearer {one}"}).json()["data"]
    assert [each["id"] for each in shown] == ["m"]
    hidden = gateway.client.get("/v1/models/other", headers={"authorization": f"Bearer {one}"})
    assert hidden.status_code == 404
    embeds = made(gateway, scopes=["embed", "batches"])["key"]
    assert status(gateway, embeds) == (403, "scope_not_allowed")
    assert status(gateway, embeds, "/v1/responses") == (403, "scope_not_allowed")
    assert status(gateway, embeds, "/v1/embeddings")[1] != "scope_not_allowed"
    assert status(gateway, embeds, "/v1/batches", input_file_id="file-x") == (404, "file_not_found")
    assert gateway.client.get("/v1/models", headers={"authorization": f"Bearer {embeds}"}).status_code == 200
