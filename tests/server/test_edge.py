"""Who may come in: pages of other origins, and readers of metrics."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headway.config_files.tenants import parse_tenant_file
from headway.flags import listed
from tests.server.live_server import LiveServer

StartServer = Callable[..., LiveServer]
PAGE = {"origin": "https://chat.example"}
ASKS = {**PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
TENANTS = parse_tenant_file("tenants.toml", '[[tenant]]\nname = "acme"\n')


# --- CORS ---------------------------------------------------------------------------------------------


def test_pages_of_other_origins_are_not_let_in_unless_they_are_named(server: LiveServer) -> None:
    assert server.client.options("/v1/completions", headers=ASKS).status_code == 405
    assert "access-control-allow-origin" not in server.client.get("/health", headers=PAGE).headers


def test_a_named_origin_may_ask_and_read_also_what_is_refused(start_server: StartServer) -> None:
    server = start_server(allowed_origins=["https://chat.example"], api_keys=["sk"], allow_credentials=True)
    asked = server.client.options("/v1/chat/completions", headers=ASKS)  # browsers send no key with it
    assert asked.status_code == 200 and asked.headers["x-request-id"]
    assert asked.headers["access-control-allow-origin"] == "https://chat.example"
    assert asked.headers["access-control-allow-headers"] == "authorization"
    assert asked.headers["access-control-allow-credentials"] == "true"
    for key, status in (("sk", 200), ("no", 401)):
        answer = server.client.post(
            "/v1/completions", json={"prompt": "x"}, headers={**PAGE, "authorization": f"Bearer {key}"}
        )
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


def test_another_origin_gets_an_error_object(start_server: StartServer) -> None:
    server = start_server(allowed_origins=["https://chat.example"], allowed_methods=["GET"])
    refused = server.client.options("/v1/completions", headers={**ASKS, "origin": "https://evil.example"})
    assert refused.status_code == 400 and refused.headers["x-request-id"]
    error = refused.json()["error"]
    assert error["code"] == "cross_origin" and "origin, method" in error["message"]
    assert "access-control-allow-origin" not in refused.headers
    page = server.client.get("/version", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in page.headers


def test_lists_are_written_as_values_or_as_vllm_has_them() -> None:
    assert listed(["a", '["b", "c"]']) == ["a", "b", "c"]
    for wrong in ('["a"', "[1]", ""):
        with pytest.raises(ValueError, match=r"JSON list|empty"):
            listed([wrong])


# --- /metrics -------------------------------------------------------------------------------------------


def test_metrics_name_no_tenants_to_everybody(start_server: StartServer) -> None:
    text = start_server(tenants=TENANTS).client.get("/metrics").text
    assert "headway:num_requests_running" in text
    assert "acme" not in text and "tenant_" not in text


def test_metrics_with_a_key_are_for_who_has_it(start_server: StartServer) -> None:
    server = start_server(tenants=TENANTS, metrics_keys=["watch", "old"], api_keys=["sk"])

    def asked(key: str | None, path: str = "/metrics") -> int:
        headers = {} if key is None else {"authorization": f"Bearer {key}".strip()}
        return server.client.get(path, headers=headers).status_code

    assert [asked(key) for key in ("watch", "old", "sk", "other", "", None)] == [200, 200, 401, 401, 401, 401]
    assert [asked("watch", path) for path in ("/load", "/health")] == [401, 200]
    told = server.client.get("/metrics", headers={"authorization": "Bearer watch"}).text
    assert 'tenant="acme"' in told
    refused = server.client.get("/metrics")
    assert refused.json()["error"]["code"] == "invalid_api_key" and refused.headers["www-authenticate"] == "Bearer"
