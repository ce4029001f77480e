"""Five problems, planted beside a real server, as the page, `headway top` and queries in Prometheus show them: each
view tells which one it is."""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from benchmarks.planted import HEALTHY, PROBLEMS, Problem, planted, serving, watched
from headway.server.metrics.dashboards import dashboard
from headway.top import View
from tests.server.browser import Browser, browser, keep, missing
from tests.server.live.test_live_prometheus import Prometheus
from tests.server.live_server import eventually
from tests.server.readings import CORES, PHASES, UNREAD, of_page, of_queries, of_top
from tests.server.test_lifecycle import _free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.quiet,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus (Debian: prometheus)"),
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
]
LASTS_S, SETTLES_S = 15.0, 4.0


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int, int]]:
    port = _free_port()
    with serving(port) as (url, pid):
        yield url, port, pid


@pytest.fixture(scope="module")
def prometheus(server: tuple[str, int, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), server[0].removeprefix("http://"))
    eventually(prometheus.is_ready, 30)
    yield prometheus
    prometheus.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as window:
        window.emulate()
        yield window


@pytest.fixture(scope="module")
def usual(server: tuple[str, int, int]) -> float:
    """The cores that steps have where nothing is planted: fewer than one on a machine that others use."""
    url, port, pid = server
    with planted(HEALTHY, port, pid):
        time.sleep(SETTLES_S)
        return of_top(_screen(watched(url, LASTS_S))).cores


def _screen(view: View) -> str:
    console = Console(width=160, file=io.StringIO())
    console.print(view.render(console.width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("problem", [HEALTHY, *PROBLEMS], ids=lambda each: each.name)
def test_each_view_shows_which_problem_it_is(
    problem: Problem, server: tuple[str, int, int], usual: float, prometheus: Prometheus, chromium: Browser
) -> None:
    url, port, pid = server
    with planted(problem, port, pid):
        time.sleep(SETTLES_S)  # what was before has ended
        chromium.open(url + "/#live")
        screen = _screen(watched(url, LASTS_S))
        panels = {
            panel["title"]: prometheus.ask("query", query=_expr(panel))["result"]
            for panel in json.loads(dashboard("headway:"))["panels"]
            if panel["title"] in (PHASES, CORES, UNREAD)
        }
        page = of_page(chromium)
        keep(chromium, f"planted-{problem.name}")
        if problem.name == "noisy-neighbour":
            (row,) = [line for line in screen.splitlines() if "crawler" in line]
            running, waiting = (int(each) for each in row.replace("│", " ").split()[1:3])
            assert running >= 5 and waiting > 0, "the class that takes the seats can be seen"
    said = {"top": of_top(screen), "page": page, "dashboard": of_queries(panels)}
    assert {where: reading.problem(usual) for where, reading in said.items()} == dict.fromkeys(said, problem.name), said


def _expr(panel: dict[str, Any]) -> str:
    expr: str = panel["targets"][0]["expr"]
    return expr.replace("$__rate_interval", f"{LASTS_S:.0f}s").replace("$model", ".*")
