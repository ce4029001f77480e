"""Hostile clients at the gateway's edge, which is the server's; and whatever schemathesis makes up."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest
import schemathesis

from benchmarks.hostile.client import Talk, converse
from benchmarks.hostile.messages import COMPLETIONS, endless, get, head, post
from headway.gateway.asked import OF_BATCHES, POSTS
from tests.gateway.live_gateway import LiveGateway, file_text
from tests.gateway.test_gateway import gateway, headway  # noqa: F401
from tests.server.conftest import model_folder, tokenizer  # noqa: F401
from tests.server.live_server import LiveServer
from tests.server.test_openapi import try_operation

HALF = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
FINE = post(COMPLETIONS, '{"model":"tiny","prompt":"hello","max_tokens":2}')


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_schemathesis_finds_nothing(gateway: LiveGateway, headway: LiveServer) -> None:  # noqa: F811
    """No 5xx, and only answers that the server's own description has."""
    schema = schemathesis.openapi.from_dict(headway.client.get("/openapi.json").json())
    schema.config.update(base_url=gateway.url)
    statuses: dict[str, set[int]] = {}
    for found in schema.get_all_operations():
        operation = found.ok()
        api = POSTS.get(operation.path)
        if api is not None and operation.method == "post" and api.stores not in OF_BATCHES:
            try_operation(operation, statuses.setdefault(operation.path, set()), 20)
    assert len(statuses) >= 10 and all({200, 400} <= seen for seen in statuses.values()), statuses


def test_floods_and_slow_clients_end_with_an_error_and_keep_nobody_out(headway: LiveServer) -> None:  # noqa: F811
    changes = {"request_read_timeout": 2.0, "max_body_size": 100_000}
    chunk = b"%x\r\n%b\r\n" % (50_000, b" " * 50_000)
    large = head(COMPLETIONS, "Content-Length: 100001") + b" " * 100_001
    floods = {
        408: [*[Talk([HALF])] * 100, *[Talk(endless(HALF, b"a: b\r\n", 180), 0.1) for _ in range(100)]],
        413: [Talk([head(COMPLETIONS, "Transfer-Encoding: chunked") + chunk * 3]), *[Talk([large])] * 20],
        431: [Talk([HALF + b"a: b\r\n" * 101]), *[Talk([HALF + b"a: " + b"b" * 70_000])] * 20],
        414: [Talk([get("/" + "a" * 9000)])] * 20,
    }
    with LiveGateway(file_text({"h": headway.url}), **changes) as attacked:
        port, began = int(attacked.url.rpartition(":")[2]), time.monotonic()
        answers = converse(port, [*itertools.chain(*floods.values()), *[Talk([FINE])] * 20], 8.0)
        found = sum((each.statuses for each in answers), Counter[int]())
        assert found == {status: len(talks) for status, talks in floods.items()} | {200: 20}, found
        served = [each.seconds for each in answers[-20:] if each.seconds is not None]
        assert len(served) == 20 and max(served) < 2.0 and time.monotonic() - began < 7  # nobody had to be broken off
        assert not attacked.gateway.in_flight and attacked.outcomes()["h"] == {"ok": 20}
