"""How an endpoint is asked: addresses, headers, bodies, and what is refused before anything is sent."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from headway.bench.client.openai_client import OpenAIClient
from headway.bench.client.request_body import BodyBuilder
from headway.load.endpoint import Address, Endpoint, parse_base_url
from headway.load.errors import BenchError
from headway.load.record import RequestRecord
from headway.load.request import PlannedRequest, Prompt
from tests.bench.client.sending import send
from tests.bench.scripted_server import ScriptedServer

URL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:8000", Address("http", "h", 8000, "h:8000", "")),
        ("https://h", Address("https", "h", 443, "h", "")),
        ("http://h:80/v1/", Address("http", "h", 80, "h", "")),
        ("https://h:444/openai/v1", Address("https", "h", 444, "h:444", "/openai")),
        ("http://[::1]:8000", Address("http", "::1", 8000, "[::1]:8000", "")),
        ("https://[::1]", Address("https", "::1", 443, "[::1]", "")),
    ],
)
def test_addresses(url: str, expected: Address) -> None:
    assert parse_base_url(url) == expected


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("localhost:8000", "must begin with http"),
        ("ftp://h", "must begin with http"),
        ("http://", "has no host"),
        ("http://h:99999", "out of range"),
        ("http://h:0", "port 0"),
        ("http://h:x", "Port could not be cast"),
        ("http://h/v1?key=1", "before [?]"),
        ("http://h\r\nx: y", "ASCII without blanks"),
        ("http://[::1", "IPv6"),
        ("https://user:secret@h", "--api-key"),
        ("", "must begin with http"),
    ],
)
def test_addresses_that_are_none(url: str, message: str) -> None:
    with pytest.raises(BenchError, match=message) as caught:
        Endpoint(url)
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "v1/x"}, "must begin with /"),
        ({"path": "/v1/x y"}, "no blanks"),
        ({"timeout_s": 0}, "above 0"),
        ({"timeout_s": math.nan}, "above 0"),
        ({"connect_timeout_s": -1}, "above 0"),
        ({"api_key": "a\nb"}, "cannot carry"),
        ({"headers": {"x": "a\r\ny: b"}}, "cannot be sent"),
        ({"headers": {"x y": "a"}}, "cannot be sent"),
        ({"headers": {"Content-Length": "3"}}, "client's own"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        Endpoint(URL, **options)


def test_the_key_is_not_shown() -> None:
    assert "secret" not in repr(Endpoint(URL, api_key="secret", headers={"x-key": "secret"}))


def body(endpoint: Endpoint, prompt: Prompt, **extra: Any) -> dict[str, Any]:
    content: dict[str, Any] = msgspec.json.decode(
        BodyBuilder(endpoint).body(PlannedRequest(0, prompt, None, 9, extra_body=extra))
    )
    return content


def test_the_plain_body_has_only_what_openai_knows() -> None:
    assert body(Endpoint(URL), Prompt(text="hi")) == {
        "prompt": "hi",
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_every_option_is_in_the_body() -> None:
    endpoint = Endpoint(
        URL,
        model="m",
        api="chat",
        ignore_eos=True,
        include_timings=True,
        continuous_usage=True,
        max_tokens_field="max_completion_tokens",
        extra_body={"top_p": 0.5, "seed": 1},
    )
    assert body(endpoint, Prompt(text="hi"), seed=2, priority=-1) == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "ignore_eos": True,
        "include_timings": True,
        "top_p": 0.5,
        "seed": 2,
        "priority": -1,
    }
    assert "stream_options" not in body(Endpoint(URL, include_usage=False), Prompt(text="hi"))


def test_the_forms_of_a_prompt() -> None:
    messages = ({"role": "system", "content": "a"}, {"role": "user", "content": "b"})
    assert body(Endpoint(URL), Prompt(token_ids=(1, 2)))["prompt"] == [1, 2]
    assert body(Endpoint(URL), Prompt(messages=messages))["prompt"] == "a\nb"
    assert body(Endpoint(URL, api="chat"), Prompt(messages=messages))["messages"] == list(messages)


async def test_what_is_sent_is_what_was_asked_for(server: ScriptedServer) -> None:
    endpoint = Endpoint(server.url, model="scripted", headers={"X-Api": "y", "x-request-id": "run-7"}, api_key="k")
    async with OpenAIClient(endpoint) as client:
        record = RequestRecord(7)
        planned = PlannedRequest(7, Prompt(text="planned"), 3, 5, extra_body={"seed": 1})
        await client.send(planned, record, Prompt(text="said instead"))
    assert record.ok and len(record.chunk_ns) == 5
    sent = server.log("run-7")["body"]
    assert sent["prompt"] == "said instead" and sent["seed"] == 1 and sent["max_tokens"] == 5
    keyed = replace(endpoint, tenant_keys={"acme": "of-acme"})
    assert [keyed.all_headers(each)["authorization"] for each in ("", "acme")] == ["Bearer k", "Bearer of-acme"]
    assert endpoint.all_headers()["authorization"] == "Bearer k" and endpoint.all_headers()["x-api"] == "y"


async def test_another_path(server: ScriptedServer) -> None:
    async with OpenAIClient(Endpoint(server.url, path="/elsewhere")) as client:
        record = await send(client)
        assert record.failure is not None and record.failure.status == 404
