"""Five problems, each of which `headway top` and the page tell apart: their signals, without a model."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from rich.console import Console

from headway.engine.messages import EngineStats
from headway.policy.objectives.service_class import ClassTable, ServiceClass
from headway.policy.step.ledger import Phase
from headway.server import live
from headway.server.metrics import process
from headway.server.metrics.metrics import Metrics, of_clients
from headway.server.metrics.process import Used
from headway.top import View, snapshot
from tests.server.browser import Browser, browser, missing
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer
from tests.server.readings import SIGNS, of_page, of_top

# Of the engine's time of a request: what it waits for, the cores that steps have, and clients that are behind.
PLANTED = {
    "none": ({}, 1.1, (0, 0)),
    "noisy-neighbour": ({"queue_capacity": 0.7}, 1.1, (0, 0)),
    "long-prompts": ({"decode_stall_prefill": 0.6, "prefill_stall": 0.1}, 1.1, (0, 0)),
    "thrashing-kv": ({"decode_stall_preempted": 0.3, "queue_blocks": 0.2, "queue_capacity": 0.3}, 1.1, (0, 0)),
    "slow-client": ({}, 1.1, (3, 200_000)),
    "throttled-cpu": ({"queue_capacity": 0.1}, 0.3, (0, 0)),
}
QUICK = ("none", "noisy-neighbour")


def test_every_problem_is_told_apart() -> None:
    assert {*SIGNS.values(), "slow-client", "throttled-cpu", "none"} == PLANTED.keys()


@pytest.mark.parametrize("name", PLANTED)
def test_top_shows_which_problem_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shares, cores, backlog = PLANTED[name]
    engine = SimpleNamespace(stats=EngineStats(8, 16, 0.5), ready=None, num_waiting=16, restarts=0, hangs=0, pid=1)
    metrics = Metrics("headway:", "m", engine)
    metrics.by_class.set_classes(ClassTable((ServiceClass(name="chat"), ServiceClass(name="crawler")), "chat"))
    metrics.add(lambda families: of_clients(families, backlog))
    used = Used(0.0, 1, 1, 1)
    monkeypatch.setattr(process, "used_by", lambda pid: used)
    view = View("http://there")
    view.add(snapshot(metrics.exposition().decode(), 0.0))
    for _ in range(100):
        metrics.on_step(EngineStats(8, 16, 0.5, step_ns=50_000_000, scheduled_tokens=8, scheduled_sequences=8))
    phases = {**shares, "decode_compute": 1 - sum(shares.values())}
    metrics.by_class.spent("chat", {Phase(phase): int(share * 1e9) for phase, share in phases.items()})
    metrics.by_class.spent("crawler", {Phase.QUEUE_CAPACITY: 10**9})
    used = Used(100 * 0.05 * cores, 1, 1, 1)
    view.add(snapshot(metrics.exposition().decode(), 5.0))
    console = Console(width=160, file=io.StringIO())
    console.print(view.render(console.width))
    assert isinstance(console.file, io.StringIO)
    assert of_top(console.file.getvalue()).problem(usual=1.0) == name


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as window:
        yield window


def ask(server: LiveServer) -> None:
    server.post("/v1/completions", model="tiny", prompt="x", max_tokens=60, ignore_eos=True)


@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
@pytest.mark.xdist_group("browser")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PLANTED]
)
def test_the_page_shows_which_problem_it_is(
    name: str, chromium: Browser, server: LiveServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.shares, cores, backlog = PLANTED[name]
    engine.step_s, began_ns = 0.005, server.service.activity.step_ns

    def used(pid: int | None) -> Used:
        return Used((server.service.activity.step_ns - began_ns) * cores / 1e9, 1, 1, 1)

    monkeypatch.setattr(live, "used_by", used)
    monkeypatch.setattr(server.service, "backlog", lambda: backlog)
    chromium.emulate()
    chromium.open(server.url + "/#live")
    chromium.until("document.querySelector('#live-said').textContent === 'Live'")
    ends = time.monotonic() + 20
    while "–" in (shown := chromium.text("#figures")) or "cores" not in shown:
        ask(server)
        assert time.monotonic() < ends, shown
    for _ in range(6):  # more than may have ended before this page was opened
        ask(server)
    chromium.until("parseInt(document.querySelector('#timelines-said').textContent.match(/(\\d+) have ended/)[1]) > 6")
    assert of_page(chromium, "median").problem(usual=1.0) == name
    if backlog[0]:
        assert "3 clients behind: 195 KiB of answers are not taken" in chromium.text("#timelines-said")
