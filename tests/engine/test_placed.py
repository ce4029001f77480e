"""Ranks that Ray places, on a cluster of several nodes on this machine, where Ray is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headway import LLM
from headway.engine.client import EngineClient
from headway.engine.config import EngineConfig
from tests.engine.clients import started
from tests.engine.grammar_models import save_grammar_model
from tests.engine.test_nodes import SETTINGS
from tests.engine.test_ranks import PROMPTS, ask, tokens_from, tokens_of, until

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
SETTINGS_OF_RAY = SETTINGS | {"distributed_executor_backend": "ray", "pipeline_parallel_size": 2, "num_threads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_grammar_model(tmp_path_factory.mktemp("placed") / "model")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one processor each."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    made.add_node(num_cpus=1)
    os.environ["RAY_ADDRESS"] = made.address
    yield made
    del os.environ["RAY_ADDRESS"]
    made.shutdown()


def test_without_ray_or_a_cluster_it_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("ray") is None:
        expected = r"^distributed_executor_backend is 'ray', which needs the package ray; install it with: pip install"
    else:
        expected = r"^there is no Ray cluster at 127.0.0.1:9 \(RAY_ADDRESS\): .*Connection refused"
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(ValueError, match=expected):
        LLM(str(folder), **SETTINGS_OF_RAY)


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_stage_on_another_node_is_replaced(folder: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are those of one machine. Its rank is killed, and then its actor; each time Ray starts another."""
    monkeypatch.setattr("headway.engine.client.RESTART_DELAYS_S", (0.0,))
    one = LLM(str(folder), **SETTINGS)
    expected = tokens_of(ask(one))[0]
    async with started(EngineClient(EngineConfig(str(folder), **SETTINGS_OF_RAY))) as client:
        assert await tokens_from(client, "one", PROMPTS[0], 24) == expected
        whole = await tokens_from(client, "whole", PROMPTS[0])
        for number in range(2):
            (rank,) = _followers()
            answer = asyncio.create_task(tokens_from(client, f"again{number}", PROMPTS[0]))
            await until(lambda: client.stats is not None and client.stats.num_running == 1)
            os.kill(rank.ppid() if number else rank.pid, signal.SIGKILL)
            await until(lambda count=number: client.restarts == count + 1)  # type: ignore[misc]
            said = "is gone" if number else f", rank 1 (pid {rank.pid}) died: SIGKILL"
            assert client.last_error.startswith("on node 1" if not number else "node 1") and said in client.last_error
            assert await answer == whole
    began = time.monotonic()
    while _followers():
        assert time.monotonic() - began < 20, "actors end with the engine"
        time.sleep(0.1)


def _followers() -> list[psutil.Process]:
    """Ranks whose parent is an actor."""
    found = []
    for process in psutil.process_iter(["cmdline", "ppid"]):
        words = process.info["cmdline"] or []
        if "headway.engine" in words and len(words) > 5 and "Ray" in psutil.Process(process.info["ppid"]).name():
            found.append(process)
    return found


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fewer_processors_than_ranks_need_are_one_line(
    folder: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.engine.placed.PLACED_S", 2.0)
    with pytest.raises(ValueError, match=r"^the Ray cluster has no room for 2 ranks of 2 CPUs each \(SPREAD"):
        LLM(str(folder), **(SETTINGS_OF_RAY | {"num_threads": 4}))
    import ray

    ray.shutdown()


def test_ray_chooses_the_machines_itself() -> None:
    assert EngineConfig("model", **SETTINGS_OF_RAY).machines == 2
    assert EngineConfig("model", **(SETTINGS_OF_RAY | {"placement_strategy": "STRICT_PACK"})).machines == 1
