"""The page at /docs: what /openapi.json says, as one HTML file that fetches nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; vertical-align: top; padding: .2rem .6rem;
border-bottom: 1px solid #8884; overflow-wrap: break-word; }
td:first-child { white-space: nowrap; } code { font-size: .9em; } summary { cursor: pointer; }
h2 { margin: 2rem 0 .3rem; overflow-wrap: anywhere; } :root { color-scheme: light dark; }
"""


def api_page(document: Mapping[str, Any]) -> str:
    """HTML of an OpenAPI document: each route with the fields of its body, its parameters and its answers."""
    schemas = document["components"]["schemas"]
    routes = [
        "".join(_route(method, path, operation, schemas))
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body><h1>{title}</h1>'
        '<p>The same as <a href="openapi.json">openapi.json</a>. What '
        f"is OpenAI's or vLLM's has their names and meanings.</p>{''.join(routes)}</body></html>"
    )


def _route(method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
    if said := operation.get("description"):
        yield f"<p>{escape(said)}</p>"
    if parameters := operation.get("parameters"):
        rows = [(each["name"], {**each, **each["schema"]}, each.get("required", False)) for each in parameters]
        yield _fields("Parameters", rows, is_open=True)
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        schema = content["schema"]
        for each in schema.get("anyOf", [schema]):
            body = schemas.get(each.get("$ref", "").rpartition("/")[2], each)
            required = body.get("required", ())
            rows = [(name, kind, name in required) for name, kind in body.get("properties", {}).items()]
            yield _fields(f"Body: {body.get('title', media)}", rows, is_open=False)
    answers = "".join(
        f"<tr><td>{escape(status)}</td><td>{escape(answer['description'])}</td><td>{_answer(answer, schemas)}</td></tr>"
        for status, answer in operation["responses"].items()
    )
    yield f"<details><summary>Answers</summary><table>{answers}</table></details>"


def _fields(title: str, rows: Sequence[tuple[str, Mapping[str, Any], bool]], *, is_open: bool) -> str:
    cells = "".join(
        f"<tr><td><code>{escape(name)}</code></td>"
        f"<td>{escape(_kind(kind))}{', required' if required else escape(_default(kind))}</td>"
        f"<td>{escape(kind.get('description', ''))}</td></tr>"
        for name, kind, required in sorted(rows, key=lambda row: not row[2])
    )
    return f"<details{' open' * is_open}><summary>{escape(title)}</summary><table>{cells}</table></details>"


def _answer(answer: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    kinds = []
    for media, content in answer.get("content", {}).items():
        name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
        fields = ", ".join(schemas.get(name, {}).get("properties", {}))
        kinds.append(f"{escape(media)} <code>{escape(fields)}</code>" if fields else escape(media))
    return "; ".join(kinds)


def _default(kind: Mapping[str, Any]) -> str:
    return "" if kind.get("default") is None else f", default {json.dumps(kind['default'])}"


def _kind(schema: Mapping[str, Any]) -> str:
    """A JSON schema in a few words, as "integer from 1 or null"."""
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(map(str, schema.get("enum", [schema.get("const")])))
    if "$ref" in schema:
        return "object " + schema["$ref"].rpartition("/")[2]
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    low, high = schema.get("minimum"), schema.get("maximum")
    bounds = (f" from {low:g}" if low is not None and low > -(2**31) else "") + (
        f" to {high:g}" if high is not None and high < 2**31 - 1 else ""
    )
    return str(schema.get("type", "any value")) + bounds
