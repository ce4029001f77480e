"""Budgets that several gateways share, in a real Redis: exact to the token, whatever dies and when."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headway.config_files.gateway import Shared, parse_gateway_file
from headway.config_files.tenants import key_digest, parse_tenant_file
from headway.policy.admission.quota import MINUTE_US, Meter, Quotas
from headway.policy.admission.tenants import Limits, Tenant, TenantTable
from headway.server.errors import ApiError
from tests.gateway.live_gateway import LiveGateway, file_text, raw_backend, whole
from tests.server.live_server import eventually

pytest.importorskip("redis", reason="the package redis is not installed (headway[redis])")
pytestmark = pytest.mark.skipif(shutil.which("redis-server") is None, reason="there is no redis-server")

from headway.gateway.shared.quotas import SharedQuotas  # noqa: E402
from headway.gateway.shared.store import BudgetStore, StoreFailed, packed  # noqa: E402

TABLE = TenantTable(
    (Tenant(name="t", requests_per_minute=600, tokens_per_minute=6000), Tenant(name="free")),
    Limits(tokens_per_minute=100_000),
)


class Redis:
    """A server whose every answer is on the disk before it is given."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as trial:
            trial.bind(("127.0.0.1", 0))
            self.port: int = trial.getsockname()[1]
        self._folder = folder
        self.start()

    def shared(self, **changes: Any) -> Shared:
        return Shared(f"redis://127.0.0.1:{self.port}", **{"timeout_s": 2.0, "lease_s": 1.0, **changes})

    def start(self) -> None:
        options = ["--appendonly", "yes", "--appendfsync", "always", "--save", "", "--dir", str(self._folder)]
        self.process = subprocess.Popen(
            ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", *options], stdout=subprocess.DEVNULL
        )
        until = time.monotonic() + 20
        while time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as trial:
                trial.sendall(b"PING\r\n")
                if trial.recv(64).startswith(b"+PONG"):
                    return
            time.sleep(0.02)
        raise AssertionError("redis-server did not start")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    server = Redis(tmp_path)
    yield server
    server.kill()


@contextlib.asynccontextmanager
async def gateways(shared: Shared, count: int = 1, table: TenantTable = TABLE) -> AsyncIterator[list[SharedQuotas]]:
    found = [SharedQuotas(table, shared) for _ in range(count)]
    keeping = [asyncio.create_task(each.keep(lambda: True)) for each in found]
    try:
        yield found
    finally:
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)


async def all_told(quotas: SharedQuotas) -> None:
    async with asyncio.timeout(60):
        await quotas._idle.wait()


async def meters(quotas: SharedQuotas, tenant: str = "t") -> tuple[Meter, Meter]:
    """What Redis has now of a tenant, when all that this gateway knows has been told, however long that takes."""
    await all_told(quotas)
    quotas._unreserved[tenant, "requests"] += 0
    quotas._wake_up()
    await all_told(quotas)
    return quotas.quotas.of(tenant)


async def reserved_by(quotas: SharedQuotas, tokens: int, tenant: str = "t") -> Any:
    return await quotas.reserved(tenant, tokens, ())


async def test_redis_counts_as_one_process_does(redis: Redis) -> None:
    """The same random changes, at the times that Redis had, make the same budgets and the same refusals."""
    rng, store = random.Random(5), BudgetStore(redis.shared())
    limits = [600, 6000, 0, 100_000]
    own: Quotas | None = None
    numbers: dict[int, int | None] = {}
    for batch in range(1, 200):
        number = batch
        kind = rng.choice(["reserve", "reserve", "settle", "wait"])
        operations: list[list[Any]] = []
        if kind == "reserve":
            tokens = rng.randrange(1, 3000)
            operations = [["reserve", number, "t", tokens, *limits]]
        elif kind == "settle" and numbers:
            number = rng.choice(list(numbers))
            used = rng.choice([-1, rng.randrange(0, 4000)])
            operations = [["settle", number, "t", used]]
        else:
            await asyncio.sleep(rng.random() * 0.02)
        now_us, results, states = await store.apply(batch, packed(operations))
        now = now_us * 1000
        own = own or Quotas(TABLE, now)
        if kind == "reserve":
            made = own.reserve("t", tokens, now)
            assert (results == [[]]) == isinstance(made, int), (results, made)
            if isinstance(made, int):
                numbers[number] = made
            else:
                assert results[0][2:] == [made.left, made.wait_ns // 1000]
                assert results[0][:2] == [1 + (made.tenant == ""), 1 + (made.unit == "tokens")]
        elif operations:
            its = numbers.pop(number)
            assert its is not None
            own.settle(its, None if used < 0 else used, now)
        for tenant, *both in states:
            for meter, seen in zip(own.of(tenant), both, strict=True):
                assert [meter.reserved, meter.settled, meter.refunded] == seen[3:]
                if meter.limit:
                    refilled = seen[1] + seen[0] * (now_us - seen[2])
                    assert meter.level_at(now) == min(refilled, seen[0] * MINUTE_US)
    await store.close()


async def test_a_batch_whose_answer_was_lost_is_done_once(redis: Redis) -> None:
    store = BudgetStore(redis.shared())
    content = packed([["reserve", 1, "t", 100, 600, 6000, 0, 0], ["use", "t", 2, 50]])
    first = await store.apply(1, content)
    assert await store.apply(1, content) == first
    *_, states = await store.apply(2, packed([["settle", 1, "t", 70]]))
    assert {name: tokens[3:] for name, _, tokens in states}["t"] == [150, 120, 30]
    await store.close()


async def test_three_gateways_and_two_hundred_clients_are_exact_to_the_token(redis: Redis) -> None:
    """Nothing is let in that budgets do not have, and what is left is what was there less what was used."""
    rng, used, let_in, refused = random.Random(1), 0, 0, set[str | None]()
    async with gateways(redis.shared(lease_s=30.0), 3) as three:

        async def client(number: int) -> None:
            nonlocal used, let_in
            for _ in range(5):
                try:
                    charge = await reserved_by(three[number % 3], 40)
                except ApiError as error:
                    refused.add(error.code)
                    return
                let_in += 1
                await asyncio.sleep(rng.random() * 0.01)
                tokens = rng.choice([None, rng.randrange(1, 41)])
                used += tokens or 0
                charge.settle(tokens)

        await asyncio.gather(*[client(number) for number in range(200)])
        assert refused == {"rate_limit_exceeded"}
        for each in three:
            await all_told(each)
        for each in three:
            requests, tokens = await meters(each)
            assert tokens.outstanding == requests.outstanding == 0
            assert tokens.settled == used and tokens.reserved == 40 * let_in
        spent = 6000 * MINUTE_US - tokens.level
        refilled_us = spent and (used * MINUTE_US - spent) / 6000
        assert 0 <= refilled_us < 60e6 and 0 < used <= 6000 + refilled_us / 1e4
        before, told = three[0].quotas.of("t")[1].left(three[0].clock()), three[0].headers("t")
        assert before <= int(told["x-ratelimit-remaining-tokens"]) <= three[0].quotas.of("t")[1].left(three[0].clock())


async def test_no_more_is_let_in_at_once_than_there_is(redis: Redis) -> None:
    table = TenantTable((Tenant(name="t", tokens_per_minute=6),))
    async with gateways(redis.shared(lease_s=30.0), 3, table) as three:
        made = await asyncio.gather(*[reserved_by(three[n % 3], 1) for n in range(200)], return_exceptions=True)
        refused = [each for each in made if isinstance(each, ApiError)]
        assert len(made) - len(refused) == 6
        assert {each.status for each in refused} == {429} and "retry-after-ms" in refused[0].headers


async def test_what_a_dead_gateway_had_reserved_is_given_back_and_what_it_has_used_is_not(redis: Redis) -> None:
    shared = redis.shared(lease_s=1.0)
    async with gateways(shared) as (other,):
        async with gateways(shared) as (dead,):
            charge = await reserved_by(dead, 1000)
            await reserved_by(dead, 500)
            charge.settle(900)
            await dead.drained()
        assert (await meters(other))[1].outstanding == 500
        await asyncio.sleep(1.2)
        requests, tokens = await meters(other)
        assert (tokens.outstanding, tokens.settled, tokens.refunded) == (0, 900, 600)
        assert (requests.reserved, requests.settled, requests.refunded) == (2, 1, 1)


async def test_a_gateway_that_was_away_for_longer_than_its_lease_still_charges_what_was_used(redis: Redis) -> None:
    shared = redis.shared(lease_s=1.0)
    frozen = SharedQuotas(TABLE, shared)
    keeping = asyncio.create_task(frozen.keep(lambda: True))
    charge = await reserved_by(frozen, 1000)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    async with gateways(shared) as (other,):
        await asyncio.sleep(1.2)
        assert (await meters(other))[1].refunded == 1000
        frozen._batches = iter(range(10, 20))
        keeping = asyncio.create_task(frozen.keep(lambda: True))
        charge.settle(700)
        _, tokens = await meters(frozen)
        assert (tokens.outstanding, tokens.settled, tokens.reserved) == (0, 700, 1700)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


@pytest.mark.parametrize("when_down", ["refuse", "allow"])
async def test_a_restart_of_redis_loses_and_doubles_nothing(redis: Redis, when_down: str) -> None:
    rng, used, let_in, refused = random.Random(2), 0, 0, list[tuple[int, str | None]]()
    shared = redis.shared(timeout_s=0.1, lease_s=30.0, when_down=when_down)
    async with gateways(shared, 3, TenantTable((Tenant(name="t", tokens_per_minute=10**7),))) as three:
        is_over = False

        async def client(number: int) -> None:
            nonlocal used, let_in
            while not is_over:
                try:
                    charge = await reserved_by(three[number % 3], 40)
                except ApiError as error:
                    refused.append((error.status, error.code))
                    await asyncio.sleep(0.02)
                    continue
                let_in += 1
                await asyncio.sleep(rng.random() * 0.05)
                tokens = rng.randrange(1, 100)
                used += tokens
                charge.settle(tokens)

        clients = [asyncio.create_task(client(number)) for number in range(200)]
        await asyncio.sleep(0.3)
        await asyncio.to_thread(redis.kill)
        await asyncio.sleep(0.5)
        assert not any(each.is_up for each in three)
        await asyncio.to_thread(redis.start)
        async with asyncio.timeout(20):
            while not all(each.is_up for each in three):
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        is_over = True
        await asyncio.gather(*clients)
        assert set(refused) == ({(503, "quotas_unavailable")} if when_down == "refuse" else set())
        for each in three:
            await each.drained()
        for each in three:
            requests, tokens = await meters(each)
            assert (tokens.settled, tokens.outstanding) == (used, 0)
            assert (requests.settled, requests.outstanding) == (let_in, 0)


async def test_one_who_has_waited_too_long_for_a_frozen_redis_is_not_charged(redis: Redis) -> None:
    async with gateways(redis.shared(timeout_s=0.1)) as (one,):
        await meters(one)
        redis.process.send_signal(signal.SIGSTOP)
        with pytest.raises(ApiError, match="cannot be asked") as caught:
            await reserved_by(one, 100)
        assert caught.value.code == "quotas_unavailable" and caught.value.headers["retry-after"] == "1"
        redis.process.send_signal(signal.SIGCONT)
        requests, tokens = await meters(one)
        assert tokens.outstanding == tokens.settled == requests.settled == 0


async def test_what_is_no_redis_is_named(redis: Redis) -> None:
    store = BudgetStore(Shared("redis://127.0.0.1:1"))
    with pytest.raises(StoreFailed, match=r"127\.0\.0\.1:1"):
        await store.apply(1, packed([]))
    await store.close()


# --- whole gateways ---------------------------------------------------------------------------------------


async def answer(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(0.5 if b"slow" in body else 0.01)
    content = b'{"choices":[{"finish_reason":"stop"}],"usage":{"prompt_tokens":6,"completion_tokens":5}}'
    writer.write(whole(content))


def files_of(folder: Path, redis: Redis, url: str) -> tuple[str, str]:
    """The text of a gateway's file, and the path of the tenants'."""
    tenants = folder / "tenants.toml"
    digest = key_digest(b"sk-t").hex()
    tenants.write_text(
        f'[[tenant]]\nname = "t"\ntokens_per_minute = 6000\n[[key]]\ntenant = "t"\nsha256 = "{digest}"\n'
    )
    shared = f'[shared]\nredis = "redis://127.0.0.1:{redis.port}"\nlease_s = 1\ntimeout_s = 5\n'
    return file_text({"a": url}, tables=shared, models=["m"]), str(tenants)


def ask_in_vain(url: str, body: dict[str, Any], headers: dict[str, str]) -> None:
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(f"{url}/v1/completions", json=body, headers=headers)


def test_gateways_share_and_one_that_is_killed_takes_nothing_along(redis: Redis, tmp_path: Path) -> None:
    key, body = {"authorization": "Bearer sk-t"}, {"prompt": "some words", "max_tokens": 20}
    with raw_backend(answer) as url:
        text, path = files_of(tmp_path, redis, url)
        tenants = parse_tenant_file(path, Path(path).read_text())
        file = tmp_path / "gateway.toml"
        file.write_text(text)
        with socket.socket() as trial:
            trial.bind(("127.0.0.1", 0))
            port = trial.getsockname()[1]
        command = [sys.executable, "-m", "headway", "gateway", str(file), f"--port={port}", f"--tenants={path}"]
        other = subprocess.Popen([*command, "--host=127.0.0.1"], stderr=subprocess.DEVNULL, env=dict(os.environ))
        try:
            with LiveGateway(text, tenants=tenants) as live:
                until = time.monotonic() + 30
                while time.monotonic() < until:
                    with contextlib.suppress(httpx.HTTPError):
                        httpx.get(f"http://127.0.0.1:{port}/health")
                        break
                    time.sleep(0.1)
                for _ in range(3):
                    assert live.client.post("/v1/completions", json=body, headers=key).status_code == 200
                    there = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, headers=key)
                    assert there.status_code == 200
                slow = {"prompt": "slow " * 1000, "max_tokens": 20}
                asking = threading.Thread(target=ask_in_vain, args=(f"http://127.0.0.1:{port}", slow, key))
                asking.start()
                time.sleep(0.2)
                other.kill()
                asking.join()
                other.wait()
                time.sleep(1.5)
                last = live.client.post("/v1/completions", json=body, headers=key)
                assert last.status_code == 200
                assert int(last.headers["x-ratelimit-remaining-tokens"]) > 5900
                eventually(lambda: live.gateway.quotas.quotas.of("t")[1].settled == 7 * 11)
                tokens = live.gateway.quotas.quotas.of("t")[1]
                assert tokens.outstanding == 0 and tokens.refunded > 1000
        finally:
            other.kill()
            other.wait()


def test_the_address_of_redis_is_not_shown(tmp_path: Path, redis: Redis) -> None:
    text, _ = files_of(tmp_path, redis, "http://h")
    file = parse_gateway_file("gateway.toml", text.replace("redis://", "redis://:secret@"))
    assert "secret" not in repr(file) and file.shared.lease_s == 1


async def test_the_end_is_not_taken_for_a_failure_of_redis(redis: Redis) -> None:
    """The client may make an error of its own of a cancellation, where its connection breaks at that moment."""
    for quotas in [SharedQuotas(TABLE, redis.shared(lease_s=30.0)) for _ in range(8)]:
        keeping = asyncio.create_task(quotas.keep(lambda: True))
        charge = await reserved_by(quotas, 40)
        redis.kill()
        charge.settle(3)
        await asyncio.sleep(0)
        keeping.cancel()
        _, pending = await asyncio.wait([keeping], timeout=20)
        assert not pending
        redis.start()
