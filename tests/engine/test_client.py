"""The engine process behind its client: results, aborts, crashes, failures to start, and stopping."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from headway.engine.client import EngineClient, EngineDead
from headway.engine.config import EngineConfig
from headway.engine.messages import AddRequest, SequenceOutput, StepOutputs, StepStats
from headway.policy.sampling_params import SamplingParams
from tests.engine.models import write_config


def config(tmp_path: Path, **changes: object) -> EngineConfig:
    folder = write_config(tmp_path / "model", max_position_embeddings=4096)
    settings = {"dtype": "float32", "load_format": "dummy", "num_threads": 1, "kv_cache_memory": 8 << 20}
    return EngineConfig(folder, **(settings | changes))  # type: ignore[arg-type]


def request(name: str, max_tokens: int = 8, n: int = 1, prompt: list[int] | None = None) -> AddRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, n=n)
    return AddRequest(name, prompt or [5, 6, 7], params, [0])


@contextlib.asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[EngineClient]:
    client = EngineClient(config(tmp_path))
    await client.start()
    await client.wait_ready()
    yield client
    await client.stop()


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[EngineClient]:
    async with running(tmp_path) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineClient]:
    """Of the tests that leave an engine as it was, in an event loop of theirs."""
    async with running(tmp_path_factory.mktemp("shared")) as client:
        yield client


async def collect(outputs: AsyncIterator[SequenceOutput]) -> list[SequenceOutput]:
    return [output async for output in outputs]


async def until_idle(client: EngineClient, seconds: float = 10.0) -> StepStats:
    async with asyncio.timeout(seconds):
        while client.stats is None or client.stats.kv_cache_usage > 0 or client.stats.num_running:
            await asyncio.sleep(0.01)
    return client.stats


@pytest.mark.asyncio(loop_scope="module")
async def test_results_and_timings_come_back(shared: EngineClient) -> None:
    steps: list[StepStats] = []
    shared.subscribe(steps.append)
    outputs = await collect(shared.generate(request("a", max_tokens=8, n=2)))
    for index in (0, 1):
        mine = [o for o in outputs if o.index == index]
        assert sum(len(o.token_ids) for o in mine) == 8
        assert mine[-1].finish_reason == "length"
        timings = mine[-1].timings
        assert timings is not None and timings.steps == 8 and timings.phases_ns["decode_compute"] > 0
    assert sum(s.generation_tokens for s in steps) == 16
    assert all(s.step_ns > 0 for s in steps if s.scheduled_tokens)
    assert shared.ready is not None and set(shared.ready.startup_ns) >= {"import", "kv_allocation", "warm_up", "layout"}


@pytest.mark.asyncio(loop_scope="module")
async def test_leaving_a_stream_frees_its_blocks(shared: EngineClient) -> None:
    stream = shared.generate(request("long", max_tokens=4000))
    await anext(stream)
    assert shared.stats is not None and shared.stats.kv_cache_usage > 0
    await stream.aclose()  # type: ignore[attr-defined]
    await until_idle(shared)
    assert [o.finish_reason for o in await collect(shared.generate(request("next")))][-1] == "length"


@pytest.mark.asyncio(loop_scope="module")
async def test_one_choice_can_be_stopped(shared: EngineClient) -> None:
    finished: dict[int, SequenceOutput] = {}
    tokens = {0: 0, 1: 0}
    async for output in shared.generate(request("two", max_tokens=60, n=2)):
        tokens[output.index] += len(output.token_ids)
        if output.finish_reason:
            finished[output.index] = output
        elif output.index == 1 and tokens[1] == 5:
            shared.abort("two", 1)
    assert finished[0].finish_reason == "length" and tokens[0] == 60
    assert finished[1].finish_reason == "abort" and tokens[1] < 60
    assert finished[1].timings is not None


@pytest.mark.asyncio(loop_scope="module")
async def test_a_duplicate_id_is_refused_without_harm_to_the_first(shared: EngineClient) -> None:
    first = shared.generate(request("same", max_tokens=2000))
    await anext(first)
    with pytest.raises(ValueError, match="'same' is in use"):
        await collect(shared.generate(request("same")))
    assert (await anext(first)).token_ids
    await first.aclose()  # type: ignore[attr-defined]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_prompt_beyond_the_context_ends_with_an_error(shared: EngineClient) -> None:
    outputs = await collect(shared.generate(request("big", prompt=[5] * 5000)))
    assert [o.finish_reason for o in outputs] == ["error"]
    assert outputs[0].error is not None and "the prompt has 5000 tokens" in outputs[0].error


async def test_a_killed_engine_ends_its_requests_and_is_started_again(client: EngineClient) -> None:
    streams = [client.generate(request(str(i), max_tokens=4000)) for i in range(3)]
    for stream in streams:
        await anext(stream)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(EngineDead, match="died"):
            async with asyncio.timeout(10):
                await collect(stream)
    assert client.state == "loading"
    with pytest.raises(EngineDead):
        await collect(client.generate(request("too early")))
    await client.wait_ready()
    assert client.restarts == 1
    outputs = await collect(client.generate(request("after")))
    assert sum(len(o.token_ids) for o in outputs) == 8


async def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    client = EngineClient(config(tmp_path, kv_cache_memory=1024, max_model_len=2048))
    await client.start()
    with pytest.raises(EngineDead, match="raise --kv-cache-memory or lower --max-model-len"):
        await client.wait_ready()
    assert client.state == "dead"
    await client.stop()


async def test_stopping_ends_the_process_and_what_it_was_doing(tmp_path: Path) -> None:
    client = EngineClient(config(tmp_path))
    await client.start()
    await client.wait_ready()
    pid = client.pid
    stream = client.generate(request("long", max_tokens=4000))
    await anext(stream)
    await client.stop()
    with pytest.raises(EngineDead, match="shutting down"):
        await collect(stream)
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_stopping_while_loading_is_clean_and_prompt(tmp_path: Path) -> None:
    client = EngineClient(config(tmp_path))
    await client.start()
    await asyncio.sleep(0.3)
    async with asyncio.timeout(3):
        await client.stop()
    assert client.pid is None
    assert (client.state, client.restarts) == ("stopped", 0)


async def test_a_signal_to_the_whole_group_leaves_the_end_to_the_server(client: EngineClient) -> None:
    stream = client.generate(request("long", max_tokens=100))
    await anext(stream)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGTERM)
    assert (await collect(stream))[-1].finish_reason == "length"
    assert client.restarts == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_that_cannot_be_sent_leaves_nothing_behind(shared: EngineClient) -> None:
    for _ in range(2):  # the same id twice: the first is forgotten
        with pytest.raises(OverflowError):
            await collect(shared.generate(request("huge", prompt=[2**70])))
    assert shared.num_waiting == 0
    assert (await collect(shared.generate(request("huge"))))[-1].finish_reason == "length"
    stream = shared.generate(request("next", max_tokens=4000))
    await anext(stream)
    assert shared.num_waiting == 0
    await stream.aclose()  # type: ignore[attr-defined]


async def test_a_report_does_not_hide_requests_still_on_their_way(client: EngineClient) -> None:
    assert (await collect(client.generate(request("before"))))[-1].finish_reason == "length"
    report = client.stats
    assert report is not None and report.received == 1 and client.num_waiting == 0
    streams = [client.generate(request(str(i), max_tokens=4000, n=2)) for i in range(3)]
    waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
    await asyncio.sleep(0)
    client._deliver(StepOutputs([], report, 0))  # as from a step that began before they came
    assert client.num_waiting == 6  # choices, as the engine counts them
    await asyncio.gather(*waiting)
    async with asyncio.timeout(10):
        while client.num_waiting:  # the second choices begin a step after the first
            await asyncio.sleep(0)
    for stream in streams:
        await stream.aclose()  # type: ignore[attr-defined]


async def test_a_failing_subscriber_ends_requests_instead_of_leaving_them_to_wait(client: EngineClient) -> None:
    def fail(stats: StepStats) -> None:
        raise ValueError("no more paper")

    client.subscribe(fail)
    with pytest.raises(EngineDead, match="no more paper"):
        async with asyncio.timeout(10):
            await collect(client.generate(request("a", max_tokens=2000)))
    assert (client.state, client.pid) == ("dead", None)


async def test_a_busy_engine_ends_with_its_parent(tmp_path: Path) -> None:
    code = """
import asyncio, sys
from pathlib import Path
from headway.engine.client import EngineClient
from tests.engine.test_client import config, request

async def main():
    client = EngineClient(config(Path(sys.argv[1])))
    await client.start()
    await client.wait_ready()
    streams = [client.generate(request(str(i), max_tokens=4000)) for i in range(8)]
    await asyncio.gather(*(anext(stream) for stream in streams))
    print(client.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    async with asyncio.timeout(5):
        while os.path.exists(f"/proc/{pid}"):
            await asyncio.sleep(0.05)
