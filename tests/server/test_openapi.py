"""The OpenAPI document is right: schemathesis finds no 5xx, and no answer that it does not describe."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis
import msgspec
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from headway.config_files.tenants import Access
from headway.server import app
from headway.server.api.api_page import api_page
from headway.server.api.routes import BODIES
from headway.text.chat_template import ChatTemplate
from tests.server.live_server import LiveServer
from tests.text.tiny_tokenizers import TEMPLATE

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
# Few examples of these are requests that can be answered.
ANSWERED = {
    "/v1/completions": {"prompt": "Once"},
    "/v1/embeddings": {"input": "Once"},
    "/v1/score": {"text_1": "Once", "text_2": "upon"},
    "/v1/rerank": {"query": "Once", "documents": ["upon"]},
}
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "think"}


@pytest.fixture
def server(start_server: Callable[..., LiveServer], tmp_path: Path) -> LiveServer:
    return start_server(data_dir=tmp_path, template=ChatTemplate(f"{{{{ tools }}}}{TEMPLATE}", {}), **PARSERS)


@pytest.fixture(scope="module")
def written() -> dict[str, bytes]:
    """What a server of this file has written, which takes it half a second, and which all of them would."""
    return {}


@pytest.fixture
def document(server: LiveServer, written: dict[str, bytes]) -> dict[str, Any]:
    text = written.get("") or written.setdefault("", server.client.get("/openapi.json").content)
    found: dict[str, Any] = msgspec.json.decode(text)
    return found


@pytest.mark.parametrize("examples", [6, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_schemathesis_finds_nothing(server: LiveServer, document: dict[str, Any], examples: int) -> None:
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=server.url)
    statuses: dict[str, set[int]] = {}
    for found in schema.get_all_operations():
        operation = found.ok()
        seen = statuses.setdefault(f"{operation.method.upper()} {operation.path}", set())
        try_operation(operation, seen, examples)
    assert len(statuses) == 34
    assert {name for name, seen in statuses.items() if 200 not in seen} <= {
        name for name in statuses if "_id}" in name or name == "POST /v1/batches" or "lora_adapter" in name
    }
    locked = {name: statuses.pop(name) for name in [*statuses] if "lora_adapter" in name}
    assert all(seen <= {403, 413, 415} for seen in locked.values()), "no key, so no paths of this server's disk"
    assert all(400 in seen for name, seen in statuses.items() if name.startswith("POST") and "_id}" not in name)


def try_operation(operation: Any, seen: set[int], examples: int) -> None:
    if operation.path in ANSWERED:
        case = operation.Case(body=ANSWERED[operation.path], media_type="application/json")
        assert case.call_and_validate(checks=CHECKS).status_code == 200
        seen.add(200)
    modes = [schemathesis.GenerationMode.POSITIVE]
    if operation.body:
        modes.append(schemathesis.GenerationMode.NEGATIVE)
    for mode in modes:

        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        @hypothesis.settings(
            max_examples=examples, deadline=None, suppress_health_check=list(hypothesis.HealthCheck), derandomize=True
        )
        def run(case: Any) -> None:
            seen.add(case.call_and_validate(checks=CHECKS).status_code)

        run()


@pytest.mark.parametrize(
    ("path", "asked"),
    [("completions", {"prompt": "Once"}), ("chat/completions", {"messages": [{"role": "user", "content": "Once"}]})],
)
def test_events_of_a_stream_are_as_described(
    server: LiveServer, document: dict[str, Any], path: str, asked: dict[str, Any]
) -> None:
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=server.url)
    body = {**asked, "stream": True, "max_tokens": 2}
    answer = (
        schema[f"/v1/{path}"]["POST"].Case(body=body, media_type="application/json").call_and_validate(checks=CHECKS)
    )
    assert answer.status_code == 200 and answer.headers["content-type"][0].startswith("text/event-stream")


def fields_of(schema: dict[str, Any], schemas: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """All fields of an object, and those of objects within it."""
    schema = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    for inner in (*schema.get("anyOf", ()), schema.get("items", {})):
        if "type" in inner or "$ref" in inner:  # others only narrow a field
            yield from fields_of(inner, schemas, path)
    for name, field in schema.get("properties", {}).items():
        yield f"{path}.{name}", field
        yield from fields_of(field, schemas, f"{path}.{name}")


def test_no_two_objects_of_requests_have_one_name() -> None:
    """One would be described by the other's fields."""
    found = dict[str, Any]()
    for body in BODIES:
        for name, schema in body.model_json_schema().get("$defs", {}).items():
            assert found.setdefault(name, schema) == schema, name


def test_every_field_of_a_request_is_described(document: dict[str, Any]) -> None:
    """By one sentence that is on the page too."""
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["required"] == ["prompt"] and body["additionalProperties"] is False
    found = dict[str, str]()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            for each in operation.get("parameters", ()):
                found[f"{path}?{each['name']}"] = each.get("description", "")
            for content in operation.get("requestBody", {}).get("content", {}).values():
                for name, field in fields_of(content["schema"], document["components"]["schemas"], path):
                    found[name] = field.get("description", "")
    expected = {"messages.content", "stream_options.include_usage", "top_logprobs", "response_format.type"}
    assert {f"/v1/chat/completions.{name}" for name in expected} <= found.keys() and len(found) > 150
    wrong = {name: text for name, text in found.items() if not re.fullmatch(r"[A-Z-][^\n]{5,118}[^.]\.", text)}
    assert not wrong
    page = html.unescape(api_page(document))
    assert {text for name, text in found.items() if name.count(".") < 2 and text not in page} == set()


def test_no_answer_is_fastapis_own_422(document: dict[str, Any]) -> None:
    assert not any("422" in op["responses"] for path in document["paths"].values() for op in path.values())


def test_docs_page_shows_every_route_and_fetches_nothing(server: LiveServer, document: dict[str, Any]) -> None:
    page = server.client.get("/docs")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    for path, methods in document["paths"].items():
        for method in methods:
            assert f"<code>{method.upper()} {path}</code>" in page.text
    assert "cache_salt" in page.text and "max_completion_tokens" in page.text
    assert "http://" not in page.text and "https://" not in page.text and "<script" not in page.text
    assert server.client.get("/redoc").status_code == 404


def test_pages_are_written_once(start_server: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks; but with keys another time than without."""
    written = list[int]()

    def page(document: dict[str, Any]) -> str:
        written.append(1)
        return api_page(document)

    monkeypatch.setattr(app, "api_page", page)
    server = start_server()
    with ThreadPoolExecutor(8) as clients:
        pages = list(clients.map(lambda number: server.client.get(("/docs", "/openapi.json")[number % 2]), range(40)))
    assert len(written) == 1 and {each.status_code for each in pages} == {200}
    assert {each.content for each in pages[::2]} == {pages[0].content}
    assert "security" not in pages[1].json()
    server.service.keys = {b"digest": Access()}
    assert server.client.get("/openapi.json").json()["security"] and len(written) == 2
