"""The engine process behind its client: results, aborts, crashes, failures to start, and stopping."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from headway.engine.client import EngineClient, EngineDead
from headway.engine.config import EngineConfig
from headway.engine.messages import AddRequest, EngineOutputs, EngineStats, Explain, SequenceOutput, TokenLogprobs
from headway.policy.cache.preload import PreloadedPrompt
from headway.policy.objectives.service_class import BUILT_IN, ClassTable, ServiceClass
from headway.policy.step.recording import Arrival, End
from headway.policy.step.sampling_params import SamplingParams
from headway.simulator.recording import read_recordings
from headway.simulator.replay import replay
from tests.engine.clients import started
from tests.engine.faulty_process import KILLER, RAISER
from tests.engine.models import write_config

pytestmark = pytest.mark.asyncio(loop_scope="module")


def config(tmp_path: Path, **changes: object) -> EngineConfig:
    folder = write_config(tmp_path / "model", max_position_embeddings=4096)
    settings = {"dtype": "float32", "load_format": "dummy", "num_threads": 1, "kv_cache_memory": 8 << 20}
    return EngineConfig(folder, **(settings | changes))  # type: ignore[arg-type]


def request(name: str, max_tokens: int = 8, n: int = 1, prompt: list[int] | None = None) -> AddRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, n=n)
    return AddRequest(name, prompt or [5, 6, 7], params, [0])


def running(tmp_path: Path, replay: bool = True, **changes: object) -> AbstractAsyncContextManager[EngineClient]:
    return started(EngineClient(config(tmp_path, **changes), replay=replay))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineClient]:
    """The client that tests share if they leave it with an engine that serves, be it another one."""
    async with running(tmp_path_factory.mktemp("shared")) as client:
        yield client


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start engines without a pause, however often engines have died in the tests before."""
    monkeypatch.setattr("headway.engine.client.RESTART_DELAYS_S", (0.0,))


async def collect(outputs: AsyncIterator[SequenceOutput]) -> list[SequenceOutput]:
    return [output async for output in outputs]


async def until_idle(client: EngineClient) -> EngineStats:
    async with asyncio.timeout(60):
        while client.stats is None or client.stats.kv_cache_usage > 0 or client.stats.num_running:
            await asyncio.sleep(0.01)
    return client.stats


async def test_results_and_timings_come_back(client: EngineClient) -> None:
    steps: list[EngineStats] = []
    client.subscribe(steps.append)
    outputs = await collect(client.generate(request("a", max_tokens=8, n=2)))
    for index in (0, 1):
        mine = [o for o in outputs if o.index == index]
        assert sum(len(o.token_ids) for o in mine) == 8
        assert mine[-1].finish_reason == "length"
        timings = mine[-1].timings
        assert timings is not None and timings.steps == 8 and timings.phases_ns["decode_compute"] > 0
    assert sum(s.generation_tokens for s in steps) == 16
    assert all(s.step_ns > 0 for s in steps if s.scheduled_tokens)
    assert client.ready is not None and set(client.ready.startup_ns) >= {"import", "kv_allocation", "warm_up", "layout"}
    assert client.ready.num_blocks == (8 << 20) // client.ready.block_bytes  # of the memory in config()


async def test_leaving_a_stream_frees_its_blocks(client: EngineClient) -> None:
    stream = client.generate(request("long", max_tokens=4000))
    await anext(stream)
    assert client.stats is not None and client.stats.kv_cache_usage > 0
    await stream.aclose()  # type: ignore[attr-defined]
    await until_idle(client)
    assert [o.finish_reason for o in await collect(client.generate(request("next")))][-1] == "length"


async def test_one_choice_can_be_stopped(client: EngineClient) -> None:
    finished: dict[int, SequenceOutput] = {}
    tokens = {0: 0, 1: 0}
    async for output in client.generate(request("two", max_tokens=60, n=2)):
        tokens[output.index] += len(output.token_ids)
        if output.finish_reason:
            finished[output.index] = output
        elif output.index == 1 and tokens[1] == 5:
            client.abort("two", 1)
    assert finished[0].finish_reason == "length" and tokens[0] == 60
    assert finished[1].finish_reason == "abort" and tokens[1] < 60
    assert finished[1].timings is not None


async def test_a_duplicate_id_is_refused_without_harm_to_the_first(client: EngineClient) -> None:
    first = client.generate(request("same", max_tokens=2000))
    await anext(first)
    with pytest.raises(ValueError, match="'same' is in use"):
        await collect(client.generate(request("same")))
    assert (await anext(first)).token_ids
    await first.aclose()  # type: ignore[attr-defined]


async def test_a_prompt_beyond_the_context_ends_with_an_error(client: EngineClient) -> None:
    outputs = await collect(client.generate(request("big", prompt=[5] * 5000)))
    assert [o.finish_reason for o in outputs] == ["error"]
    assert outputs[0].error is not None and "the prompt has 5000 tokens" in outputs[0].error


def crowd(prefix: str, max_tokens: int = 60) -> list[AddRequest]:
    """32 requests that choose their tokens in every way there is; the last 4 without a seed."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 5, "top_p": 0.9, "n": 2},
        {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "min_tokens": 50},
        {"seed": 8, "top_k": 40, "logprobs": 2, "prompt_logprobs": 0},
    ]
    requests = []
    for number in range(32):
        way = {} if number >= 28 else ways[number % 4]
        params = SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, **way})
        prompt = [5 + (7 * number + j) % 490 for j in range(4 + 3 * number)]
        requests.append(AddRequest(f"{prefix}{number}", prompt, params, [0], sent_ns=time.monotonic_ns()))
    return requests


Choices = dict[tuple[int, int], list[SequenceOutput]]


async def ask_all(client: EngineClient, requests: list[AddRequest]) -> Choices:
    """The outputs of every choice, by its request's place in the list and its index."""
    everything = await asyncio.gather(*(collect(client.generate(one)) for one in requests))
    return {
        (number, index): [output for output in outputs if output.index == index]
        for number, (one, outputs) in enumerate(zip(requests, everything, strict=True))
        for index in range(one.params.n)
    }


def tokens_of(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def prompt_logprobs_of(output: SequenceOutput) -> list[TokenLogprobs]:
    return [entry for part in output.prompt_logprobs or [] for entry in part.unpack()]


def check_as_if_nothing_had_happened(found: Choices, expected: Choices, requests: list[AddRequest]) -> None:
    assert found.keys() == expected.keys()
    for (number, index), outputs in found.items():
        alone, request = expected[number, index], requests[number]
        last = outputs[-1]
        assert last.finish_reason == "length" and last.timings is not None
        assert sum(last.timings.phases_ns.values()) == last.timings.ended_ns - request.sent_ns
        assert len(tokens_of(outputs)) == request.params.max_tokens
        if number >= 28:
            continue
        assert tokens_of(outputs) == tokens_of(alone)
        assert [o.logprobs for o in outputs] == [o.logprobs for o in alone]
        assert [prompt_logprobs_of(o) for o in outputs] == [prompt_logprobs_of(o) for o in alone]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(client: EngineClient) -> Choices:
    """Each request of the crowd on its own."""
    everything: Choices = {}
    for number, one in enumerate(crowd("alone")):
        found = await ask_all(client, [one])
        everything |= {(number, index): outputs for (_, index), outputs in found.items()}
    return everything


async def test_requests_go_on_when_the_engine_is_killed(client: EngineClient, expected: Choices) -> None:
    client.set_classes(ClassTable((ServiceClass(name="any"), ServiceClass(name="hasty", queue_timeout_s=1e-9))), {})
    restarts, requests = client.restarts, crowd("killed")
    leaver = client.generate(request("leaver", max_tokens=4000))
    await anext(leaver)
    killed: list[int] = []

    def kill(stats: EngineStats) -> None:
        """Hear of each step, of which several may come at once."""
        if stats.num_running >= 20 and not killed:
            assert client.pid is not None
            killed.append(client.pid)
            os.kill(client.pid, signal.SIGKILL)

    client.subscribe(kill)
    answers = asyncio.create_task(ask_all(client, requests))
    while client.state == "ready":
        await asyncio.sleep(0.001)
    assert (client.state, client.stats) == ("loading", None)
    with pytest.raises(EngineDead, match="loading"):
        await collect(client.generate(request("too early")))
    with pytest.raises(EngineDead, match="the engine process died"):
        await client.explain(Explain(1))
    client.abort("leaver", 0)  # as for a stop string
    assert [o.finish_reason for o in await collect(leaver)][-1] == "abort"
    await answers
    await check_classes(client)
    await check_explained(client)
    check_as_if_nothing_had_happened(answers.result(), expected, requests)
    phases = [outputs[-1].timings.phases_ns for outputs in answers.result().values() if outputs[-1].timings]
    assert all({"engine_lost", "engine_restart"} <= of_one.keys() for of_one in phases)
    assert client.restarts == restarts + 1
    assert (await until_idle(client)).num_waiting == client.num_waiting == 0


async def until(check: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not check():
            await asyncio.sleep(0.005)


async def test_an_engine_that_ends_no_step_is_replaced(
    client: EngineClient, expected: Choices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped, which nobody notices before there are requests; and the next one while it loads."""
    restarts, hangs, requests = client.restarts, client.hangs, crowd("hung")
    monkeypatch.setattr(client._watchdog, "_timeout_s", 0.2)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGSTOP)
    await asyncio.sleep(0.7)
    assert (client.state, client.stalled_s) == ("ready", 0.0)
    answers = asyncio.create_task(ask_all(client, requests))
    await until(lambda: client.stalled_s)
    await until(lambda: client.restarts == restarts + 1 and client.pid is not None)
    assert client.pid is not None and client.hangs == hangs + 1
    assert client.state == "loading" and "ended no step" in client.last_error
    os.kill(client.pid, signal.SIGSTOP)
    await until(lambda: client.hangs == hangs + 2)
    client._watchdog._timeout_s = None
    client._watchdog._fired.clear()
    check_as_if_nothing_had_happened(await answers, expected, requests)
    timings = [outputs[-1].timings for outputs in answers.result().values()]
    assert all(each is not None and each.phases_ns["engine_lost"] >= 0.3e9 for each in timings)
    assert client.restarts == restarts + 2


async def check_explained(client: EngineClient) -> None:
    told = await asyncio.gather(client.explain(Explain(1)), client.explain(Explain(3)))
    first, second = (each.steps for each in told)
    assert len(first) == 1 and first == second[-1:] and len(second) == 3
    assert "1 sequence decodes" in first[0].words
    assert 0 < first[0].planned_ns < time.monotonic_ns()


async def check_classes(client: EngineClient) -> None:
    """The next engine has the classes that the last one was told of, and new ones reach it."""
    hasty = msgspec.structs.replace(request("hasty"), service_class="hasty")
    (refused,) = await collect(client.generate(hasty))
    assert refused.finish_reason == "timeout" and "queue_timeout_s of class 'hasty'" in str(refused.error)
    client.set_classes(BUILT_IN, {})
    assert (await collect(client.generate(hasty)))[-1].finish_reason == "length"


async def next_engine(client: EngineClient) -> None:
    """Kill the one that serves, and wait for the next."""
    restarts = client.restarts
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    await until(lambda: client.restarts > restarts and client.state == "ready")


async def test_preloaded_prompts_are_computed_again_by_the_next_engine_as_far_as_they_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The third engine finds less memory."""
    prompts = [PreloadedPrompt("p.toml, line 1", list(range(3, 53))), PreloadedPrompt("p.toml, line 5", [7] * 400)]
    settings: dict[str, Any] = {"preloaded": prompts, "max_model_len": 512, "protected_kv": 0.5}
    with caplog.at_level("INFO", logger="headway.engine"):
        async with running(tmp_path, **settings) as client:
            assert client.ready is not None and not client.ready.left_out and "preload" in client.ready.startup_ns
            first = await collect(client.generate(request("first", prompt=[*prompts[0].token_ids, 60])))
            await next_engine(client)
            again = await collect(client.generate(request("again", prompt=[*prompts[0].token_ids, 60])))
            assert first[0].cached_tokens == again[0].cached_tokens == 48
            assert tokens_of(first) == tokens_of(again)
            assert (await until_idle(client)).kv_cache_usage == 0.0
            for_40_blocks = -(-40 * (8 << 20) // client.ready.num_blocks)
            client.config = replace(client.config, kv_cache_memory=for_40_blocks)
            await next_engine(client)
            (why,) = client.ready.left_out
            assert "line 5: with this prompt of 400 tokens, 28 blocks must stay, but only 20 of 40 may" in why
            last = await collect(client.generate(request("last", prompt=[*prompts[0].token_ids, 60])))
            assert last[0].cached_tokens == 48
    assert caplog.text.count("2 prompts are preloaded: 448 tokens stay in the cache") == 2
    assert f"1 prompts are not preloaded any more: {why}" in caplog.text


async def test_without_replay_a_killed_engine_ends_its_requests(tmp_path: Path) -> None:
    async with running(tmp_path, replay=False) as client:
        streams = [client.generate(request(str(i), max_tokens=4000)) for i in range(3)]
        for stream in streams:
            await anext(stream)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDead, match="died"):
                async with asyncio.timeout(60):
                    await collect(stream)
        assert client.state == "loading"


async def test_an_engine_that_is_killed_leaves_a_recording_and_the_next_goes_on_with_it(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    async with running(tmp_path, record_steps=str(path)) as client:
        await collect(client.generate(request("done", max_tokens=20)))
        streams = [client.generate(request(str(i), max_tokens=800)) for i in range(3)]
        for stream in streams:
            await anext(stream)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        for stream in streams:
            await collect(stream)
    killed, ended = read_recordings(path)
    assert sum(isinstance(record, Arrival) for record in killed.records) >= 1
    arrived = [record for record in ended.records if isinstance(record, Arrival)]
    assert [record.prompt_len for record in arrived] == [3, 3, 3] and arrived[0].known > 3
    assert {record.length for record in ended.records if isinstance(record, End)} == {803}
    assert replay(killed) >= 20 and replay(ended) > 700


async def test_an_engine_that_fails_to_start_again_is_tried_on(client: EngineClient, tmp_path: Path) -> None:
    expected = tokens_of(await collect(client.generate(request("alone", max_tokens=500))))
    waits = client.generate(request("waits", max_tokens=500))
    outputs = [await anext(waits)]
    config_file = Path(client.config.model) / "config.json"
    config_file.rename(tmp_path / "aside")
    assert client.pid is not None
    restarts = client.restarts
    os.kill(client.pid, signal.SIGKILL)
    while client.restarts < restarts + 2:  # the first start has failed
        await asyncio.sleep(0.01)
    (tmp_path / "aside").rename(config_file)
    outputs += await collect(waits)
    assert tokens_of(outputs) == expected


async def test_requests_do_not_wait_for_ever_for_an_engine_and_the_server_does(
    client: EngineClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.engine.client.MOST_FAILED_STARTS", 1)
    waits = client.generate(request("waits too long", max_tokens=4000))
    await anext(waits)
    config_file = Path(client.config.model) / "config.json"
    config_file.rename(tmp_path / "aside")
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineDead, match=r"config\.json"):
        await collect(waits)
    (tmp_path / "aside").rename(config_file)
    await client.wait_ready()
    assert len(tokens_of(await collect(client.generate(request("after", max_tokens=50))))) == 50


async def test_requests_that_raise_or_kill_the_engine_are_ended_and_no_others_and_stopping_ends_all(
    tmp_path: Path, expected: Choices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One death less than usual is enough: tests of requests have all of them."""
    monkeypatch.setattr("headway.engine.client.ENGINE_MODULE", "tests.engine.faulty_process")
    monkeypatch.setattr("headway.engine.requests.MOST_DEATHS", 2)
    async with running(tmp_path) as client:
        await check_faults(client, expected)
        pid = client.pid
        stream = client.generate(request("long", max_tokens=4000))
        await anext(stream)
    with pytest.raises(EngineDead, match="shutting down"):
        await collect(stream)
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def check_faults(client: EngineClient, expected: Choices) -> None:
    raises = asyncio.create_task(collect(client.generate(request("raises", prompt=[RAISER, 5], n=2))))
    kills = asyncio.create_task(collect(client.generate(request("kills", prompt=[KILLER, 5], max_tokens=20))))
    requests = crowd("beside")
    check_as_if_nothing_had_happened(await ask_all(client, requests), expected, requests)
    for last in (await raises)[-2:]:
        assert last.finish_reason == "error" and last.error is not None
        assert "the engine failed on this request (RuntimeError)" in last.error
    killed = (await kills)[-1]
    assert killed.finish_reason == "error" and killed.error is not None
    assert "times with this request running" in killed.error
    assert client.restarts in (2, 3)


async def test_a_signal_to_the_whole_group_leaves_the_end_to_the_server(client: EngineClient) -> None:
    restarts, stream = client.restarts, client.generate(request("long", max_tokens=100))
    await anext(stream)
    assert client.pid is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        os.kill(client.pid, number)
    assert (await collect(stream))[-1].finish_reason == "length"
    assert client.restarts == restarts


async def test_a_request_that_cannot_be_sent_leaves_nothing_behind(client: EngineClient) -> None:
    for _ in range(2):  # the same id twice: the first is forgotten
        with pytest.raises(OverflowError):
            await collect(client.generate(request("huge", prompt=[2**70])))
    assert client.num_waiting == 0
    assert (await collect(client.generate(request("huge"))))[-1].finish_reason == "length"
    stream = client.generate(request("next", max_tokens=4000))
    await anext(stream)
    assert client.num_waiting == 0
    await stream.aclose()  # type: ignore[attr-defined]


async def test_a_report_does_not_hide_requests_still_on_their_way(client: EngineClient) -> None:
    assert (await collect(client.generate(request("before"))))[-1].finish_reason == "length"
    report = client.stats
    assert report is not None and report.received == client._requests._sent and client.num_waiting == 0
    streams = [client.generate(request(str(i), max_tokens=4000, n=2)) for i in range(3)]
    waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
    await asyncio.sleep(0)
    client._deliver(EngineOutputs([], report, 0))  # as from a step that began before they came
    assert client.num_waiting == 6  # choices, as the engine counts them
    await asyncio.gather(*waiting)
    async with asyncio.timeout(60):
        while client.num_waiting:  # the second choices begin a step after the first
            await asyncio.sleep(0)
    for stream in streams:
        await stream.aclose()  # type: ignore[attr-defined]


async def test_a_failing_subscriber_harms_nobody(client: EngineClient, caplog: pytest.LogCaptureFixture) -> None:
    def fail(stats: EngineStats) -> None:
        raise ValueError("no more paper")

    seen: list[EngineStats] = []
    restarts = client.restarts
    client.subscribe(fail)
    client.subscribe(seen.append)
    assert len(tokens_of(await collect(client.generate(request("a", max_tokens=200))))) == 200
    assert (client.state, client.restarts) == ("ready", restarts)
    assert len(seen) >= 200
    assert caplog.text.count("a listener to the engine failed") == 1


async def test_a_message_that_cannot_be_read_is_a_death_like_any_other(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    restarts, stream = client.restarts, client.generate(request("a", max_tokens=300))
    outputs = [await anext(stream)]
    deliver, broken = client._deliver, [True]

    def fail_once(message: EngineOutputs) -> None:
        if broken.pop() if broken else False:
            raise ValueError("not a message")
        deliver(message)

    monkeypatch.setattr(client, "_deliver", fail_once)
    outputs += await collect(stream)
    assert len(tokens_of(outputs)) == 300
    assert client.restarts == restarts + 1
