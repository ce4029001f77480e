"""Tenants over HTTP: budgets, refusals and headers as in OpenAI's API, and what a restart keeps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headway.config_files.tenants import key_digest, read_tenant_file
from headway.policy.admission.quota import Meter
from headway.server.quotas import _duration
from headway.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer, eventually, settings
from tests.server.test_limits import parked

TENANTS = ("acme", "few", "small", "free")
FILE = """
[[tenant]]
name = "acme"
tokens_per_minute = 6000
requests_per_minute = 6000

[[tenant]]
name = "few"
requests_per_minute = 2

[[tenant]]
name = "small"
tokens_per_minute = 5

[[tenant]]
name = "free"
""" + "".join(f'\n[[key]]\ntenant = "{each}"\nsha256 = "{key_digest(each.encode()).hex()}"\n' for each in TENANTS)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    path.write_text(FILE)
    return path


@pytest.fixture
def server(tokenizer: Tokenizer, file: Path) -> Iterator[LiveServer]:
    server = LiveServer(
        FakeEngine(tokenizer), tokenizer, tenants=read_tenant_file(str(file)), quota_journal="none"
    ).start()
    yield server
    server.engine.open, server.engine.step_s = True, 0.0
    server.stop()


def ask(server: LiveServer, tenant: str, prompt: Any = "x", **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {tenant}"}
    return server.client.post("/v1/completions", json={"prompt": prompt, **body}, headers=headers)


def tokens(server: LiveServer, tenant: str) -> Meter:
    meter: Meter = server.service.quotas.quotas.of(tenant)[1]
    return meter


def test_what_was_used_is_charged_to_the_tenant_of_the_key(server: LiveServer) -> None:
    answer = ask(server, "acme", [1, 2, 3], max_tokens=4, ignore_eos=True)
    used = answer.json()["usage"]["total_tokens"]
    meter = tokens(server, "acme")
    assert (meter.settled, meter.outstanding) == (used, 0)
    assert answer.headers["x-ratelimit-limit-tokens"] == "6000"
    assert 6000 - used <= int(answer.headers["x-ratelimit-remaining-tokens"]) <= 6000
    assert answer.headers["x-ratelimit-remaining-requests"] == "5999"
    assert answer.headers["x-ratelimit-reset-requests"].endswith("ms")
    assert tokens(server, "free").settled == 0
    assert "x-ratelimit-limit-tokens" not in ask(server, "free").headers
    assert tokens(server, "free").settled > 0


def test_a_stream_has_the_headers_and_is_settled_at_its_end(server: LiveServer) -> None:
    streamed = ask(server, "acme", stream=True, max_tokens=5, stream_options={"include_usage": True})
    assert streamed.headers["x-ratelimit-limit-requests"] == "6000"
    eventually(lambda: tokens(server, "acme").outstanding == 0)
    assert f'"total_tokens":{tokens(server, "acme").settled}' in streamed.text


def test_too_many_requests_are_refused_as_openai_refuses_them(server: LiveServer) -> None:
    for _ in range(2):
        assert ask(server, "few").status_code == 200
    answer = ask(server, "few")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (429, "rate_limit_exceeded", "requests")
    assert "tenant 'few' on requests per min (RPM): limit 2, left 0, requested 1" in error["message"]
    assert 25 <= int(answer.headers["retry-after"]) <= 30
    assert 25_000 < int(answer.headers["retry-after-ms"]) <= 30_000
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    assert 45 < float(answer.headers["x-ratelimit-reset-requests"].rstrip("s").replace("1m", "6")) <= 60
    assert server.service.quotas.refused["few", "requests"] == 1
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="few", max_retries=0) as client:
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="tiny", prompt="x")
        assert refused.value.code == "rate_limit_exceeded"


def test_who_comes_back_when_told_is_let_in(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one whose limit is below one reservation works, too: one at a time, and pays for what it used."""
    quotas = server.service.quotas
    now = [quotas.clock()]
    monkeypatch.setattr(quotas, "clock", lambda: now[0])
    assert ask(server, "small", [1, 2, 3], max_tokens=6, ignore_eos=True).status_code == 200
    answer = ask(server, "small", [1, 2, 3], max_tokens=6)
    assert answer.status_code == 429 and answer.json()["error"]["type"] == "tokens"
    assert answer.headers["retry-after-ms"] == str(9 * 60_000 // 5), "9 tokens were used, of 5 a minute"
    now[0] += int(answer.headers["retry-after-ms"]) * 1_000_000 - 1_000_000
    assert ask(server, "small", [1, 2, 3], max_tokens=6).status_code == 429
    now[0] += 1_000_000
    assert ask(server, "small", [1, 2, 3], max_tokens=6).status_code == 200


def test_a_prompt_alone_is_paid_for(server: LiveServer) -> None:
    assert ask(server, "acme", [1, 2, 3], max_tokens=0, echo=True).status_code == 200
    assert tokens(server, "acme").settled == 3


def test_a_request_that_fails_is_refunded(server: LiveServer) -> None:
    server.engine.drops = "timeout"
    assert ask(server, "acme").status_code == 503
    meter = tokens(server, "acme")
    assert (meter.settled, meter.outstanding) == (0, 0) and meter.refunded > 0
    assert ask(server, "acme", [1] * 5000).status_code == 400
    assert tokens(server, "acme").outstanding == 0


def test_a_client_that_goes_away_pays_for_what_it_got(server: LiveServer) -> None:
    server.engine.step_s = 0.01
    headers = {"authorization": "Bearer acme"}
    body = {"prompt": [1, 2, 3], "max_tokens": 200, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body, headers=headers) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert tokens(server, "acme").outstanding == 203
    eventually(lambda: tokens(server, "acme").outstanding == 0)
    assert 4 <= tokens(server, "acme").settled < 200


async def _crowd(url: str, number: int) -> list[httpx.Response]:
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=200)) as client:
        headers = {"authorization": "Bearer acme"}
        asked = [
            client.post(
                "/v1/completions",
                json={"prompt": [1] * (1 + i % 7), "max_tokens": 10 + i % 40, "ignore_eos": i % 2 == 0},
                headers=headers,
            )
            for i in range(number)
        ]
        return await asyncio.gather(*asked)


def test_200_clients_at_once_get_what_there_is_to_the_token(server: LiveServer) -> None:
    began = time.monotonic()
    answers = [each for _ in range(2) for each in asyncio.run(_crowd(server.url, 200))]
    elapsed = time.monotonic() - began
    served = [each.json()["usage"]["total_tokens"] for each in answers if each.status_code == 200]
    refused = [each for each in answers if each.status_code == 429]
    meter = tokens(server, "acme")
    assert len(served) + len(refused) == 400 and served and refused
    assert meter.settled == sum(served)
    assert meter.reserved == meter.settled + meter.refunded
    assert sum(served) <= 6000 + elapsed * 100 + 50, "the budget, what refilled, and one prediction that was short"
    assert all(each.json()["error"]["code"] == "rate_limit_exceeded" for each in refused)


def test_a_restart_keeps_what_was_used(tokenizer: Tokenizer, file: Path, tmp_path: Path) -> None:
    journal = str(tmp_path / "kept.journal")

    def start() -> LiveServer:
        return LiveServer(
            FakeEngine(tokenizer), tokenizer, tenants=read_tenant_file(str(file)), quota_journal=journal
        ).start()

    server = start()
    for _ in range(2):
        assert ask(server, "few").status_code == 200
    with pytest.raises(ValueError, match="another server uses"):
        start()
    server.stop()
    server = start()
    answer = ask(server, "few")
    server.stop()
    assert answer.status_code == 429


def test_the_journal_has_a_home(
    tokenizer: Tokenizer, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the data folder, or beside the file of tenants; tenants of no file leave nothing where they are."""
    monkeypatch.chdir(tmp_path)
    tenants, data = read_tenant_file(str(file)), tmp_path / "made" / "data"
    assert settings(tenants=tenants).journal == f"{file}.journal"
    assert settings(tenants=tenants, data_dir=data, quota_journal="none").journal == ""
    assert settings(tenants=tenants, data_dir=data, quota_journal="there").journal == "there"
    LiveServer(FakeEngine(tokenizer), tokenizer, tenants=tenants, data_dir=data).start().stop()
    assert (data / "quotas.journal").stat().st_size > 0
    LiveServer(FakeEngine(tokenizer), tokenizer, tenants=replace(tenants, path="")).start().stop()
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    with pytest.raises(ValueError, match=r"cannot keep quotas in .*/tenants.toml/.*; choose another place"):
        LiveServer(FakeEngine(tokenizer), tokenizer, tenants=tenants, data_dir=file / "data")


def test_a_reload_takes_other_limits(server: LiveServer, file: Path) -> None:
    assert ask(server, "few").status_code == 200
    try:
        file.write_text(FILE.replace("requests_per_minute = 2", "requests_per_minute = 0"))
        server.service.reload_files()
        assert server.service.quotas.quotas.of("few")[0].limit == 2, "a bad file changes nothing"
        file.write_text(FILE.replace("requests_per_minute = 2", "requests_per_minute = 3"))
        server.service.reload_files()
        left = [ask(server, "few").headers["x-ratelimit-remaining-requests"] for _ in range(2)]
        assert left == ["1", "0"] and ask(server, "few").status_code == 429
    finally:
        file.write_text(FILE)


def test_each_tenant_has_metrics_and_those_beyond_some_are_other(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.server.metrics.tenants.MOST_LABELS", 2)
    server.service.metrics.by_tenant.set_tenants(server.service.tenants.table)
    server.engine.passed_over = 3
    for tenant in ("few", "few", "few", "free", "small"):
        ask(server, tenant, [1, 2], max_tokens=2, ignore_eos=True)

    def value(name: str, tenant: str, **unit: str) -> float | None:
        families = text_string_to_metric_families(server.service.metrics.exposition(with_tenants=True).decode())
        samples = (each for family in families for each in family.samples)
        labels = {"model_name": "tiny", "engine": "0", "tenant": tenant, **unit}
        found = [each.value for each in samples if (each.name, each.labels) == (f"headway:tenant_{name}", labels)]
        return found[0] if found else None

    assert value("settled_total", "few", unit="tokens") == 8
    assert value("settled_total", "other", unit="tokens") == 8, "of two tenants"
    assert value("budget_left", "few", unit="requests") == 0
    assert value("budget_left", "all", unit="requests") is None, "it has no limit"
    assert value("refused_total", "few", unit="requests") == 1
    reserved, refunded = (
        value("reserved_total", "other", unit="tokens"),
        value("refunded_total", "other", unit="tokens"),
    )
    assert reserved == 8 + (refunded or 0)
    assert value("settled_total", "free", unit="tokens") is None
    assert (value("passed_over_total", "few"), value("passed_over_total", "other")) == (6, 6)
    assert ask(server, "free", include_timings=True).json()["timings"]["passed_over"] == 3


@pytest.mark.parametrize(
    ("length_ns", "text"),
    [(0, "0ms"), (1, "1ms"), (999_000_000, "999ms"), (7_250_000_000, "7.25s"), (360_000_000_000, "6m0s")],
)
def test_durations_are_written_as_openai_writes_them(length_ns: int, text: str) -> None:
    assert _duration(length_ns) == text


def test_a_tenant_that_fills_its_share_of_the_queue_leaves_room(tokenizer: Tokenizer, file: Path) -> None:
    tenants = read_tenant_file(str(file))
    engine = FakeEngine(tokenizer)
    server = LiveServer(engine, tokenizer, tenants=tenants, quota_journal="none", max_num_queued_reqs=10).start()
    with parked(server, engine, key="acme", n=8):
        refused = ask(server, "acme")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert "8 choices of tenant acme are waiting or running" in refused.json()["error"]["message"]
        assert "(its share of --max-num-queued-reqs)" in refused.json()["error"]["message"]
        with parked(server, engine, key="free"):
            assert server.service.admission.queues.of_all.choices == 9
    server.stop()
