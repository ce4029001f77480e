"""Every query of the dashboard and the rules against a real Prometheus that scrapes a live server under load."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from headway.bundled import STORY
from headway.calibration.machine import processor_name
from headway.calibration.store import save
from headway.server.metrics.dashboards import dashboard, rules
from headway.server.metrics.telemetry import METRICS
from tests.calibration.machines import a_machine
from tests.server.live.test_live_engine import Live
from tests.server.live_server import eventually
from tests.server.test_lifecycle import _free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus (Debian: prometheus)"),
]
LOAD_S = 25.0
OPTIONS = [
    *("--load-format", "auto", "--kv-cache-memory", "3M", "--max-num-seqs", "12", "--max-num-queued-reqs", "14"),
    *("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}'),
]


class Prometheus:
    """A server that scrapes another one each second."""

    def __init__(self, folder: Path, target: str) -> None:
        (folder / "headway-rules.yml").write_text(rules("headway:"))
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["headway-rules.yml"],
            "scrape_configs": [{"job_name": "headway", "static_configs": [{"targets": [target]}]}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.url = f"http://127.0.0.1:{(port := _free_port())}"
        self._popen = subprocess.Popen(
            ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
            + [f"--web.listen-address=127.0.0.1:{port}"],
            stderr=subprocess.DEVNULL,
        )

    def is_ready(self) -> bool:
        assert self._popen.poll() is None, "Prometheus ended"
        try:
            return httpx.get(self.url + "/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def ask(self, path: str, **params: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=params).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def close(self) -> None:
        self._popen.terminate()
        self._popen.wait(20)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        machine = a_machine("mine")
        save(replace(machine, hardware=replace(machine.hardware, name=processor_name())))
        live = Live(STORY, *OPTIONS)
        eventually(live.is_ready, 120)
    prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), live.url.removeprefix("http://"))
    eventually(prometheus.is_ready, 30)
    ends = time.monotonic() + LOAD_S

    def client(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < ends:
            begins = [50 + rng.randrange(4)] * 32 + [60 + number, 7, 8, 9] * rng.choice([4, 40])
            body = {"prompt": begins, "max_tokens": rng.choice([8, 120]), "temperature": 0, "ignore_eos": True}
            classes = ("interactive", "batch")
            answer = httpx.post(
                live.url + "/v1/completions", json={**body, "service_class": classes[number % 2]}, timeout=60
            )
            if answer.status_code == 429:
                time.sleep(0.1)

    with ThreadPoolExecutor(18) as pool:
        list(pool.map(client, range(18)))
    time.sleep(1.0)
    yield prometheus
    prometheus.close()
    live.close()


def test_no_panel_is_empty(prometheus: Prometheus) -> None:
    empty, there = (
        [],
        {
            each["metric"]["source"]: float(each["value"][1])
            for each in prometheus.ask("query", query="headway:telemetry_available")["result"]
        },
    )
    assert there["steal"] and there["status"], "what each Linux tells"
    for panel in json.loads(dashboard("headway:"))["panels"]:
        for target in panel.get("targets", ()):
            expr = target["expr"].replace("$__rate_interval", f"{LOAD_S:.0f}s").replace("$model", ".*")
            found = prometheus.ask("query", query=expr)["result"]
            sources = {told.source for name, told in METRICS.items() if f"headway:{name}" in expr}
            is_told = all(there[each] for each in sources)
            if is_told != any(math.isfinite(float(each["value"][1])) for each in found):
                empty.append(f"{panel['title']}: {target['legendFormat']}: {expr}")
    assert not empty, "\n".join(empty)


def test_rules_are_evaluated_without_errors(prometheus: Prometheus) -> None:
    (group,) = prometheus.ask("rules")["groups"]
    assert len(group["rules"]) == len(re.findall("- alert:", rules("headway:")))
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    (target,) = prometheus.ask("targets")["activeTargets"]
    assert target["health"] == "up", target["lastError"]
