"""Budgets of tenants under 200 clients of a real server, whose engine is killed, and which is killed itself.

What was charged is held against three things: the answers that clients got, buckets of this file's own which are fed
with the journal, and the metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from headway.config_files.tenants import key_digest
from headway.policy.admission.quota import TOTAL, UNITS, Record, Reserve, Settle, State
from tests.live.conftest import Served

# Clients of each tenant, and its limits of requests and tokens a minute; 0 for none. A request of `small` is more than
# its whole limit. Those of `free` are long, so that some are always under way.
TENANTS = {
    "fast": (70, 0, 90_000),
    "capped": (60, 0, 3000),
    "counted": (40, 120, 0),
    "small": (1, 0, 40),
    "free": (29, 0, 0),
}
LIMITS = {name: limits for name, (_, *limits) in TENANTS.items()} | {TOTAL: [0, 200_000]}
LATE_NS = 20_000_000  # at most, between what the server decides and what a client notes
NEARLY = 0.01  # tokens


@dataclass
class Asked:
    """A request as its client saw it; times are Unix nanoseconds.

    Args:
        most: tokens that it can use.
        status: 0 where no answer began.
        tokens: of `usage`; None where the answer was not complete.
    """

    tenant: str
    most: int
    sent_ns: int = field(default_factory=time.time_ns)
    ended_ns: int = 0
    status: int = 0
    tokens: int | None = None
    error: dict[str, Any] = field(default_factory=dict)

    @property
    def is_cut(self) -> bool:
        return self.tokens is None and not self.error


class Crowd:
    """Clients who go on until they are stopped, whatever happens to the server. Some do not wait for their answers."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[Asked] = []
        self._stopped = False

    async def __aenter__(self) -> Crowd:
        self._http = httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None))
        names = [name for name, (clients, *_) in TENANTS.items() for _ in range(clients)]
        self._clients = [asyncio.create_task(self._client(name, random.Random(at))) for at, name in enumerate(names)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopped = True
        await asyncio.gather(*self._clients)
        await self._http.aclose()

    async def _client(self, tenant: str, rng: random.Random) -> None:
        while not self._stopped:
            tokens = rng.randrange(300, 500) if tenant == "free" else rng.randrange(40, 60)
            choices, streams = rng.choice([1, 1, 1, 2]), rng.random() < 0.7
            body = {"prompt": "once " * rng.randrange(1, 9), "max_tokens": tokens, "n": choices, "ignore_eos": True}
            body |= {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
            patience_s = rng.choice([math.inf, math.inf, math.inf, rng.random()])
            said = Asked(tenant, 100 + choices * tokens)
            self.asked.append(said)
            with contextlib.suppress(httpx.TransportError, TimeoutError):
                await self._ask(said, body, patience_s)
            said.ended_ns = time.time_ns()
            await asyncio.sleep(rng.random() if said.tokens else 1.0)

    async def _ask(self, said: Asked, body: dict[str, Any], patience_s: float) -> None:
        headers = {"authorization": f"Bearer {said.tenant}"}
        url = f"{self.url}/v1/completions"
        async with asyncio.timeout(None if math.isinf(patience_s) else patience_s):
            async with self._http.stream("POST", url, json=body, headers=headers) as answer:
                said.status = answer.status_code
                text = (await answer.aread()).decode()
        if said.status != 200:
            said.error = answer.json()["error"]
        elif not body.get("stream") or text.endswith("data: [DONE]\n\n"):
            said.tokens = int(re.findall(r'"total_tokens":(\d+)', text)[-1])


@dataclass
class Bucket:
    """A budget that refills: what `headway.policy.admission.quota.Meter` is to be, written once more."""

    limit: int
    at_ns: int
    level: float = 0.0

    def at(self, now: int) -> float:
        return min(self.limit, self.level + self.limit * (now - self.at_ns) / 60e9) if self.limit else math.inf

    def add(self, count: float, now: int) -> None:
        self.level, self.at_ns = min(self.limit, self.at(now) + count) if self.limit else 0.0, now


class Account:
    """What the journals of servers that followed each other come to.

    Attributes:
        levels: by whose budget it is and its unit: what it had left after each change.
        settled: tokens that were charged for each request, by tenant.
        lost: requests under way when a server was killed.
    """

    def __init__(self, journals: list[list[Record]]) -> None:
        began = journals[0][0].at_ns
        self.buckets = {
            (whose, unit): Bucket(limit, began, limit)
            for whose, limits in LIMITS.items()
            for unit, limit in zip(UNITS, limits, strict=True)
        }
        self.levels: dict[tuple[str, str], list[tuple[int, float]]] = {key: [] for key in self.buckets}
        self.settled: dict[str, list[int]] = {name: [] for name in TENANTS}
        self.open: dict[int, Reserve] = {}
        self.lost = 0
        for records in journals:
            for record in records:
                self._take(record)

    def _take(self, record: Record) -> None:
        now = record.at_ns
        if isinstance(record, State):
            self.lost += len(self.open)
            for number in list(self.open):
                self._settle(Settle(now, number))
            for whose, meters in record.meters.items():
                for unit, meter in zip(UNITS, meters, strict=True):
                    if (bucket := self.buckets.get((whose, unit))) is not None and bucket.limit:
                        assert abs(bucket.at(now) - meter.level_at(now) / 60e6) < NEARLY, (whose, unit)
        elif isinstance(record, Reserve):
            self.open[record.number] = record
            for whose in (record.tenant, TOTAL):
                for unit, count in zip(UNITS, (1, record.tokens), strict=True):
                    assert self.buckets[whose, unit].at(now) > count - NEARLY, f"{record} is above the limit"
                    self._add(whose, unit, -count, now)
        else:
            self._settle(record)

    def _settle(self, record: Settle) -> None:
        was = self.open.pop(record.number)
        if record.tokens is not None:
            self.settled[was.tenant].append(record.tokens)
        for whose in (was.tenant, TOTAL):
            self._add(whose, "requests", record.tokens is None, record.at_ns)
            self._add(whose, "tokens", was.tokens - (record.tokens or 0), record.at_ns)

    def _add(self, whose: str, unit: str, count: float, now: int) -> None:
        bucket = self.buckets[whose, unit]
        bucket.add(count, now)
        self.levels[whose, unit].append((now, bucket.level))

    def least(self, whose: str, unit: str, since: int, until: int) -> float:
        """What a budget had at the least in this time."""
        changes = self.levels[whose, unit]
        before = max((at for at in changes if at[0] <= since), default=(since, float(self.buckets[whose, unit].limit)))
        return min(
            [Bucket(self.buckets[whose, unit].limit, *before).at(since)]
            + [level for at, level in changes if since <= at <= until]
        )


def until(check: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


def start(folder: Path) -> Served:
    return Served(
        *("--tenants", str(folder / "tenants.toml"), "--max-num-seqs", "64", "--threads", "1"),
        *("--max-num-queued-reqs", "none", "--max-num-queued-tokens", "none"),
    ).until_ready()


def kinds(asked: list[Asked]) -> tuple[list[Asked], list[Asked], list[Asked]]:
    """The requests that were answered, refused, and cut. A refusal that was given up within the answer is none."""
    answered = [each for each in asked if each.tokens is not None]
    refused = [each for each in asked if each.status == 429 and each.error]
    return answered, refused, [each for each in asked if each.ended_ns and each.is_cut]


def is_enough(asked: list[Asked]) -> bool:
    """A machine with other work answers fewer in the same time."""
    answered, refused, cut = kinds(asked)
    return len(answered) > 200 and len(refused) > 200 and len(cut) > 100


async def load(folder: Path, servers: list[Served], seconds: float) -> tuple[list[Asked], list[list[Record]]]:
    """A crowd at a server whose engine is killed, and which is killed itself; and then at the next one."""
    journal = folder / "tenants.toml.journal"

    def records() -> list[Record]:
        decoder = msgspec.json.Decoder(Record)
        return [decoder.decode(line) for line in journal.read_bytes().splitlines()]

    servers.append(await asyncio.to_thread(start, folder))
    async with Crowd(servers[0].url) as crowd:
        await asyncio.sleep(seconds)
        os.kill(servers[0].engine_pid(), signal.SIGKILL)
        await asyncio.to_thread(until, lambda: servers[0].health() == 200)
        await asyncio.sleep(seconds)
        engine = psutil.Process(servers[0].engine_pid())
        servers[0].popen.kill()
        servers[0].popen.wait()
        journals = [records()]
        await asyncio.to_thread(engine.wait, 30)
        servers.append(await asyncio.to_thread(start, folder))
        crowd.url = servers[1].url
        await asyncio.sleep(seconds)
        await asyncio.to_thread(until, lambda: is_enough(crowd.asked), 120)
    await asyncio.to_thread(servers[1].until_idle)
    return crowd.asked, [*journals, records()]


def sums(server: Served) -> dict[tuple[str, str], Counter[str]]:
    """What was reserved, settled and refunded by the metrics, for each tenant and unit."""
    text, found = httpx.get(f"{server.url}/metrics").text, dict[tuple[str, str], Counter[str]]()
    pattern = r'^headway:tenant_(\w+)_total{[^}]*tenant="(\w+)",unit="(\w+)"} (\S+)$'
    for name, tenant, unit, value in re.findall(pattern, text, re.MULTILINE):
        found.setdefault((tenant, unit), Counter())[name] = int(float(value))
    return found


@pytest.mark.slow
def test_nothing_is_lost_or_charged_twice_when_servers_are_killed(tmp_path: Path) -> None:
    file = [f"[total]\ntokens_per_minute = {LIMITS[TOTAL][1]}"]
    for name, (_, *limits) in TENANTS.items():
        keys = [f"{unit}_per_minute = {limit}" for unit, limit in zip(UNITS, limits, strict=True) if limit]
        digest = key_digest(name.encode()).hex()
        file += ["[[tenant]]", f'name = "{name}"', *keys, "[[key]]", f'tenant = "{name}"', f'sha256 = "{digest}"']
    (tmp_path / "tenants.toml").write_text("\n".join(file))
    servers: list[Served] = []
    try:
        asked, journals = asyncio.run(load(tmp_path, servers, 6.0))
        metrics = sums(servers[1])
    finally:
        for server in servers:
            server.stop()
    account = Account(journals)

    answered, refused, cut = kinds(asked)
    assert is_enough(asked) and account.lost > 5
    assert {each.error["code"] for each in asked if each.error} <= {
        "rate_limit_exceeded",
        "engine_loading",
        "engine_dead",
    }
    assert not account.open
    for tenant, (_, *limits) in TENANTS.items():
        own = [each for each in asked if each.tenant == tenant]
        used = Counter(each.tokens for each in own if each.tokens is not None)
        charged = Counter(account.settled[tenant])
        assert not used - charged, f"{tenant} was not charged for what it got"
        others = charged - used
        most = [each.most for each in cut if each.tenant == tenant]
        assert others.total() <= len(most) and max(others, default=0) <= max(most, default=0)
        assert metrics[tenant, "tokens"]["settled"] == sum(account.settled[tenant])
        assert metrics[tenant, "requests"]["settled"] == len(account.settled[tenant])
        for unit, limit in zip(UNITS, limits, strict=True):
            counts = metrics[tenant, unit]
            assert counts["reserved"] == counts["settled"] + counts["refunded"] > 0
            assert limit or not any(each.tenant == tenant and each.error["type"] == unit for each in refused)
    assert 1 <= len([each for each in answered if each.tenant == "small"]) <= 2
    for each in refused:
        whose, wanted = re.findall(
            r"for (?:tenant '(\w+)'|all tenants together) .* requested (\d+)\.", each.error["message"]
        )[0]
        left = account.least(whose, each.error["type"], each.sent_ns - LATE_NS, each.ended_ns + LATE_NS)
        assert left < int(wanted), f"refused with {left} left: {each.error['message']}"
    for tenant, unit in (("counted", "requests"), ("capped", "tokens")):
        _no_window_has_more_than_the_limit([each for each in answered if each.tenant == tenant], unit)


def _no_window_has_more_than_the_limit(answered: list[Asked], unit: str) -> None:
    """Check by the clients' own clocks what was sent and answered in any window. Predictions may be a bit short."""
    limit = dict(zip(UNITS, LIMITS[answered[0].tenant], strict=True))[unit]
    spare = 1 if unit == "requests" else 2 * max(each.tokens or 0 for each in answered)
    for first in answered:
        total = 0
        for last in sorted(
            (each for each in answered if each.sent_ns >= first.sent_ns), key=lambda each: each.ended_ns
        ):
            total += 1 if unit == "requests" else last.tokens or 0
            assert total <= limit * (1 + (last.ended_ns - first.sent_ns) / 60e9) + spare
