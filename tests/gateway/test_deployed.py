"""Replicas come and go as their deployment says, on a cluster that is not there: servers of this process stand in."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.cli import deploy as command
from headway.gateway.deployed.cluster import Absent, Gone, RayCluster, Where
from headway.gateway.deployed.file import Deployment, read_deploy_file
from headway.gateway.deployed.replicas import Controller
from headway.policy.fleet.backend import LEARNT_ALL, Ask, alone
from headway.policy.fleet.scaling import JUDGED_LEAST, JUDGED_S, Promises, Scaler, ScalingRule
from headway.policy.step.step_time import StepWork
from headway.version import __version__
from tests.gateway.live_gateway import FAST, LiveGateway, file_text
from tests.server.conftest import model_folder, tokenizer  # noqa: F401
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer, eventually

TEXT = '[[deployment]]\nname = "tiny"\nmodel = "m"\nreplicas = 2\nmax_replicas = 3\nscale_at = 4\nscale_down_s = 0.2\n'


class FakeCluster:
    """Each replica is a server in a thread. What is in `absent`, `gone` or `versions` is said of a handle."""

    def __init__(self, tokenizer: Any) -> None:  # noqa: F811
        self._tokenizer = tokenizer
        self.running: dict[str, LiveServer] = {}
        self.started: list[tuple[str, Deployment, list[str]]] = []
        self.stopped: list[str] = []
        self.restarted: list[str] = []
        self.absent: set[str] = set()
        self.gone: set[str] = set()
        self.versions: dict[str, str] = {}

    def start(self, deployment: Deployment, name: str, key: str, more: list[str]) -> str:
        self.started.append((name, deployment, more))
        self.running[name] = LiveServer(FakeEngine(self._tokenizer), self._tokenizer, api_keys=[key]).start()
        return name

    async def where(self, handle: str) -> Where:
        if handle in self.gone:
            raise Gone("the actor died")
        if handle in self.absent:
            raise Absent("it waits for a node")
        return Where(self.running[handle].url, "running", 0, "node", self.versions.get(handle, __version__))

    async def restart(self, handle: str) -> None:
        self.restarted.append(handle)

    async def stop(self, handle: str, timeout_s: float) -> None:
        self.stopped.append(handle)
        await asyncio.to_thread(self.running.pop(handle).stop)

    def close(self) -> None:
        for each in self.running.values():
            each.stop()


class Deployed:
    """A gateway and a controller, whose ticks a test makes."""

    def __init__(self, path: Path, cluster: FakeCluster, text: str = TEXT) -> None:
        self.path, self.cluster = path / "deploy.toml", cluster
        self.path.write_text(FAST + text)
        self.lines: list[str] = []
        self.file = read_deploy_file(str(self.path))
        self.running = LiveGateway(file_text({"none": "http://127.0.0.1:1"}))
        self.running._settings.file = self.file.gateway

    def __enter__(self) -> Deployed:
        self.running.start()

        async def made() -> Controller:
            return Controller(self.cluster, self.running.gateway, self.file, ["--more"], self.lines.append)

        self.controller = self.run(made())
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self.controller.end(1.0))
        self.running.stop()

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.running.loop).result(30)

    def take(self, text: str) -> None:
        self.path.write_text(FAST + text)
        file = read_deploy_file(str(self.path))
        self.running.call(lambda: self.controller.take(file))

    def until(self, *well: str) -> None:
        """Ticks until exactly these are well."""

        def are() -> bool:
            self.run(self.controller.tick())
            members = self.running.gateway.members.values()
            found = {each.entry.name for each in members if each.is_known and not each.entry.drain}
            return found == set(well) and not any(each.is_leaving for each in members)

        eventually(are)

    def ask(self, **more: Any) -> Any:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 3, **more}
        return self.running.client.post("/v1/completions", json=body)


@pytest.fixture
def cluster(tokenizer: Any) -> Iterator[FakeCluster]:  # noqa: F811
    found = FakeCluster(tokenizer)
    yield found
    found.close()


def test_replicas_are_placed_grow_with_what_comes_and_are_drained(tmp_path: Path, cluster: FakeCluster) -> None:
    with Deployed(tmp_path, cluster) as deployed:
        assert deployed.ask().status_code in (404, 503)
        deployed.until("tiny-1", "tiny-2")
        assert [more for _, _, more in cluster.started] == [["--more"]] * 2
        assert deployed.ask().status_code == 200
        members = deployed.running.gateway.members
        places = [members[name].seen.queues.of_all for name in ("tiny-1", "tiny-2")]
        for each in places:
            each.choices += 5  # ten requests, and four for a replica
        deployed.until("tiny-1", "tiny-2", "tiny-3")
        members["tiny-3"].in_flight += 1  # it answers something still
        for each in places:
            each.choices -= 5
        eventually(lambda: deployed.run(deployed.controller.tick()) or members["tiny-3"].entry.drain)
        assert not cluster.stopped and deployed.ask().status_code == 200
        members["tiny-3"].in_flight -= 1
        deployed.until("tiny-1", "tiny-2")
        assert cluster.stopped == ["tiny-3"] and "tiny-3: ended" in deployed.lines


def test_one_that_does_not_come_back_is_replaced_and_one_that_may_is_waited_for(
    tmp_path: Path, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Deployed(tmp_path, cluster) as deployed:
        deployed.until("tiny-1", "tiny-2")
        cluster.absent.add("tiny-1")
        deployed.run(deployed.controller.tick())
        assert len(cluster.started) == 2 and deployed.ask().status_code == 200
        assert "tiny-1: it waits for a node" in deployed.lines
        cluster.gone.add("tiny-1")
        monkeypatch.setattr("headway.gateway.deployed.replicas.RESTS_S", 0.3)
        deployed.run(deployed.controller.tick())
        assert len(cluster.started) == 2  # not at once, as the next might be gone too
        deployed.until("tiny-2", "tiny-3")
        monkeypatch.setattr("headway.gateway.deployed.replicas.REPLACED_AFTER_S", 0.2)
        deployed.running.gateway.members["tiny-2"].breaker.is_down = True
        member = deployed.running.gateway.members["tiny-2"]
        member.breaker.asked = lambda *_: None  # it is frozen
        eventually(lambda: deployed.run(deployed.controller.tick()) or cluster.restarted == ["tiny-2"])


def test_a_new_version_replaces_one_after_the_other(tmp_path: Path, cluster: FakeCluster) -> None:
    with Deployed(tmp_path, cluster) as deployed:
        deployed.until("tiny-1", "tiny-2")
        deployed.take(TEXT + "flags = { max-num-seqs = 9 }\n")
        cluster.absent.add("tiny-3")  # nobody leaves before a new one is well
        for _ in range(3):
            deployed.run(deployed.controller.tick())
        assert [name for name, _, _ in cluster.started[2:]] == ["tiny-3"] and not cluster.stopped
        cluster.absent.clear()
        deployed.until("tiny-3", "tiny-4")
        assert cluster.stopped == ["tiny-2", "tiny-1"] and cluster.started[-1][1].flags == ("--max-num-seqs=9",)
        deployed.take('[[deployment]]\nname = "other"\nmodel = "m"\n')
        deployed.until("other-1")
        assert sorted(cluster.stopped[2:]) == ["tiny-3", "tiny-4"]


def test_a_node_with_another_version_gets_nothing(tmp_path: Path, cluster: FakeCluster) -> None:
    cluster.versions["tiny-2"] = "0.0.0"
    with Deployed(tmp_path, cluster) as deployed:
        deployed.until("tiny-1")
        assert f"tiny-2: node node has Headway 0.0.0, and this is {__version__}" in deployed.lines


def test_late_first_tokens_add_a_replica(tmp_path: Path, cluster: FakeCluster) -> None:
    with Deployed(tmp_path, cluster, TEXT.replace("scale_down_s = 0.2", "scale_down_s = 60")) as deployed:
        deployed.until("tiny-1", "tiny-2")
        for _ in range(JUDGED_LEAST + 1):
            headers = {"x-llm-d-slo-ttft-ms": "0.01"}
            answer = deployed.running.client.post(
                "/v1/completions",
                json={"model": "tiny", "prompt": "a", "max_tokens": 2, "stream": True},
                headers=headers,
            )
            assert answer.status_code == 200
        deployed.until("tiny-1", "tiny-2", "tiny-3")


# --- policy -------------------------------------------------------------------------------------------------


def test_promises_are_missed_when_too_many_are_late_or_the_next_one_would_be() -> None:
    promises, quick, now = Promises(0.9), alone("a"), 10**12
    assert not promises.are_missed([quick], now)
    for _ in range(9):
        promises.first_token(Ask(), 100.0, 50.0, now)
    promises.first_token(Ask(), 100.0, 101.0, now)
    promises.first_token(Ask(), float("inf"), 1e9, now)  # nothing was promised
    assert not promises.are_missed([quick], now)  # one of ten may be
    promises.first_token(Ask(), 100.0, 150.0, now)
    assert promises.are_missed([quick], now)
    assert not promises.are_missed([quick], now + round((JUDGED_S + 1) * 1e9))
    for tokens in range(LEARNT_ALL):
        quick.answered(StepWork(tokens, 0), round(1e6 * (1 + tokens)))
    promises.first_token(Ask(list(range(85))), 100.0, 50.0, 2 * now)
    assert promises.are_missed([quick], 2 * now)  # 86 of 100 ms are predicted
    assert not promises.are_missed([quick, alone("b")], 2 * now)  # another one would be quicker, or is not known


def test_a_scaler_follows_the_least_that_is_needed_for_another_reason() -> None:
    scaler = Scaler(ScalingRule(1, 3, 10, 5.0))
    assert scaler.wanted(0, 0) == 1 and scaler.wanted(0, 10**9, 2) == 2 and scaler.wanted(0, 2 * 10**9, 9) == 3
    assert scaler.wanted(0, 6 * 10**9) == 3 and scaler.wanted(0, 8 * 10**9) == 1


# --- the file and the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there are no deployments"),
        ('[[deployment]]\nname = "a"', "line 1: a deployment has no model"),
        ('[[deployment]]\nname = "a b"\nmodel = "m"', "line 2: name is 'a b'"),
        ('[[deployment]]\nname = "a"\nmodel = "m"\nreplicas = 0', "line 4: replicas is 0"),
        ('[[deployment]]\nname = "a"\nmodel = "m"\nreplicas = 3\nmax_replicas = 2', "line 5: max_replicas is 2"),
        ('[[deployment]]\nname = "a"\nmodel = "m"\nflags = { port = 1 }', "which the gateway sets itself"),
        ('[[deployment]]\nname = "a"\nmodel = "m"\nresources = { x = "y" }', "x is 'y'"),
        ('[[deployment]]\nname = "a"\nmodel = "m"\nrole = "decode"', "no backend has the role prefill"),
        ('[[deployment]]\nname = "a"\nmodel = "m"\n' * 2, "two deployments have one name and role"),
        ('[[deployment]]\nname = "a"\nmodel = "m"\ncolour = 1', "'colour' is unknown"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "deploy.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        read_deploy_file(str(path))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_without_ray_or_a_cluster_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("ray") is not None:
        with pytest.raises(ValueError, match=r"there is no Ray cluster at 127\.0\.0\.1:1: "):
            RayCluster("127.0.0.1:1", {})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package ray; install it with: pip install 'headway\[serve,ray\]'"):
        RayCluster(None, {})


def test_the_simulator_is_told_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "deploy.toml"
    path.write_text(TEXT + "flags = { max-num-seqs = 9, enable-prefix-caching = false, grammar-timeout = 3 }\n")
    file = read_deploy_file(str(path))
    arguments, left_out = command._arguments(file.deployments[0], file.gateway.routing)
    assert arguments == [
        *("m", "--replicas=2", f"--routing={file.gateway.routing}", "--max-replicas=3", "--scale-at=4"),
        *("--scale-down-seconds=0.2", "--max-num-seqs=9", "--no-enable-prefix-caching"),
    ]
    assert left_out == ["--grammar-timeout=3"]
    with_role = [replace(each, entry=replace(each.entry, role="decode")) for each in file.deployments]
    with pytest.raises(ValueError, match="simulate it with headway simulate --fleet"):
        command._simulate(replace(file, deployments=tuple(with_role)), [])
