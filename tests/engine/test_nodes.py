"""Ranks of an engine on several machines, which share no memory: each is a process, or a thread, with its own board."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from headway import LLM, SamplingParams
from headway.engine.client import EngineClient
from headway.engine.config import EngineConfig
from headway.engine.local_ranks import linked_ranks
from headway.engine.messages import AddRequest
from headway.engine.node import run_node
from headway.engine.nodes import Hello, Message, Nodes, Refused, Wire, content_of
from headway.engine.ranked import RankedExecutor
from headway.policy.step.plan import ScheduledSequence, StepPlan
from headway.version import __version__
from tests.engine.clients import has_ended, started
from tests.engine.grammar_models import save_grammar_model
from tests.engine.models import TINY_MIXTURE
from tests.engine.test_ranks import GREEDY, PROMPTS, ask, logprobs_of, tokens_from, tokens_of, until

pytestmark = pytest.mark.timeout(300)

HERE = "127.0.0.1"
SETTINGS: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "kv_cache_memory": 4 << 20, "device": "cpu"}
SETTINGS |= {"max_num_batched_tokens": 64, "max_num_seqs": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_grammar_model(tmp_path_factory.mktemp("nodes") / "model", **TINY_MIXTURE)


def free_port() -> int:
    with socket.create_server((HERE, 0)) as listener:
        return int(listener.getsockname()[1])


def on_machines(machines: int, **settings: Any) -> dict[str, Any]:
    ranks = settings.get("tensor_parallel_size", 1) * settings.get("pipeline_parallel_size", 1)
    return SETTINGS | settings | {"nnodes": machines, "num_threads": ranks, "master_port": free_port()}


@contextlib.contextmanager
def engine_on(folder: Path, machines: int, **settings: Any) -> Iterator[LLM]:
    """An engine whose node 0 is this process, and whose other nodes are threads of it with ranks of their own."""
    options = on_machines(machines, **settings)
    said: list[str] = []
    nodes = [
        threading.Thread(
            target=run_node, args=(EngineConfig(str(folder), **options), number, said.append), kwargs={"rejoins": False}
        )
        for number in range(1, machines)
    ]
    for node in nodes:
        node.start()
    llm = LLM(str(folder), **options)
    yield llm
    executor = llm.engine.core.executor
    assert isinstance(executor, RankedExecutor)
    executor._followers.end()
    for node in nodes:
        node.join(30)
        assert not node.is_alive(), "a node ends with node 0"
    assert [line[:17] for line in sorted(said)] == [f"node {number} has joined"[:17] for number in range(1, machines)]


@pytest.mark.parametrize(
    ("machines", "settings"),
    [
        (2, {"pipeline_parallel_size": 2}),
        pytest.param(2, {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"tensor_parallel_size": 4, "enable_expert_parallel": True}, marks=pytest.mark.slow),
    ],
)
def test_all_bits_are_those_of_ranks_on_one_machine(folder: Path, machines: int, settings: dict[str, Any]) -> None:
    """Log-probabilities and tokens, also after a step that has failed in the middle in rank 0, and in another rank."""
    ranks = settings.get("tensor_parallel_size", 1) * settings.get("pipeline_parallel_size", 1)
    one = LLM(str(folder), **(SETTINGS | settings | {"num_threads": ranks}))
    wanted = {"logprobs": 3, "prompt_logprobs": 2}
    expected = ask(one, **wanted)
    with engine_on(folder, machines, **settings) as llm:
        for _ in range(2):
            found = ask(llm, **wanted)
            assert tokens_of(found) == tokens_of(expected) and logprobs_of(found) == logprobs_of(expected)
            _fail_one(llm, PROMPTS[5], tokens_of(expected))
        executor, run = llm.engine.core.executor, llm.engine.runner.run
        assert isinstance(executor, RankedExecutor)
        llm.engine.runner.run = lambda plan: time.sleep(0.5)  # type: ignore[method-assign,assignment]
        with pytest.raises(RuntimeError, match="raised; its traceback is above"):
            executor.run(StepPlan([ScheduledSequence(10**6, 0, [1], True, 1)]))
        llm.engine.runner.run = run  # type: ignore[method-assign]
        assert tokens_of(ask(llm)) == tokens_of(expected)


def _fail_one(llm: LLM, prompt: list[int], expected: list[list[int]]) -> None:
    """A request raises in rank 0 when it has some tokens, while other ranks are in the middle of its step."""
    forward, core = llm.engine.runner._forward, llm.engine.core

    def failing(step: Any, scheduled: Any, sequences: Any) -> Any:
        if any(s.tokens[: len(prompt)] == prompt and len(s.tokens) >= len(prompt) + 3 for s in sequences):
            raise ValueError("no")
        return forward(step, scheduled, sequences)

    llm.engine.runner._forward = failing  # type: ignore[method-assign]
    for number, each in enumerate(PROMPTS):
        core.add(AddRequest(str(number), each, SamplingParams(**GREEDY), []))
    found, errors = dict[str, list[int]](), list[str]()
    while core.has_work:
        for output in core.advance():
            found.setdefault(output.request_id, []).extend(output.token_ids)
            errors += [output.request_id] if output.error else []
    llm.engine.runner._forward = forward  # type: ignore[method-assign]
    failed = PROMPTS.index(prompt)
    assert errors == [str(failed)]
    assert all(found[str(n)] == tokens for n, tokens in enumerate(expected) if n != failed)


def test_ranks_are_linked_with_those_that_they_talk_to() -> None:
    """Stages of two ranks, on two machines and on four."""
    stages = [range(2), range(2, 4)]
    assert linked_ranks(stages, 2, 0) == [(0, 2), (1, 3)]
    assert linked_ranks(stages, 4, 0) == [(0, 2), (1, 3)]
    assert linked_ranks([range(3), range(3, 4)], 4, 1) == [(3, 0), (3, 1), (3, 2)]
    assert linked_ranks([range(n, n + 1) for n in range(4)], 2, 2) == [(2, 0), (2, 3)]


# --- joining ----------------------------------------------------------------------------------------


@pytest.fixture
def join(folder: Path) -> Callable[[Hello], tuple[str, Message | None]]:
    """Has a node say this, where node 0 waits for one; what node 0 says to its user, and to the node."""
    config = EngineConfig(str(folder), **on_machines(2, pipeline_parallel_size=2))

    def say(hello: Hello) -> tuple[str, Message | None]:
        said: list[str] = []
        door = HERE, free_port()

        def first() -> None:
            try:
                Nodes(config, content_of(folder), (64, 512), 1, [range(1), range(1, 2)], door, lambda address: None)
            except ValueError as error:
                said.append(str(error))

        waits = threading.Thread(target=first)
        waits.start()
        wire = None
        while wire is None and waits.is_alive():
            with contextlib.suppress(ConnectionRefusedError):
                wire = Wire(socket.create_connection(door))
        assert wire is not None
        if not hello.config:
            hello.config = msgspec.msgpack.encode(config)
        wire.send(hello)
        answers: list[Message] = []
        with contextlib.suppress(ConnectionError):
            while not answers:
                answers = wire.received()
                time.sleep(0.001)
        wire.close()
        waits.join(10)
        return said[0], answers[0] if answers else None

    return say


def test_nodes_that_do_not_fit_are_told_so_in_one_line(
    join: Callable[[Hello], tuple[str, Message | None]], folder: Path
) -> None:
    content = content_of(folder)
    other = EngineConfig(str(folder), **on_machines(2, pipeline_parallel_size=2, max_model_len=100))
    cases = {
        "has Headway 0.0.1, and node 0 has .*; install the same version on both": Hello("0.0.1", 1),
        "has another model: its config.json, or its files' names or sizes": Hello(__version__, 1, content="another"),
        "was started with max_model_len 100, and node 0 with None": Hello(
            __version__, 1, msgspec.msgpack.encode(other), content
        ),
        "is there twice; give each of 2 nodes a --node-rank of its own": Hello(__version__, 2, content=content),
        "cannot join: there is no such model": Hello(__version__, 1, problem="there is no such model"),
    }
    for expected, hello in cases.items():
        line, answer = join(hello)
        with pytest.raises(ValueError, match=rf"^node \d \(127\.0\.0\.1\) {expected}"):
            raise ValueError(line)
        assert isinstance(answer, Refused) and answer.why == line and "\n" not in line


def test_files_of_other_sizes_are_another_model(tmp_path: Path) -> None:
    folders = [save_grammar_model(tmp_path / name) for name in ("a", "b")]
    assert len({content_of(each) for each in folders}) == 1
    (folders[1] / "more.safetensors").write_bytes(b"12345")
    assert len({content_of(each) for each in folders}) == 2


def test_who_does_not_come_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever else connects is no node, and is left alone."""
    monkeypatch.setattr("headway.engine.nodes.JOIN_S", 1.0)
    monkeypatch.setattr("headway.engine.node.JOIN_S", 0.1)
    options = on_machines(2, pipeline_parallel_size=2)

    def scan() -> None:
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection((HERE, options["master_port"])).sendall(b"GET / HTTP/1.1\r\n\r\n")
                return

    scanning = threading.Thread(target=scan)
    scanning.start()
    with pytest.raises(ValueError, match=r"^node 1 of 2 has not joined within 1 s at 127.0.0.1:\d+; start it with"):
        LLM(str(folder), **options)
    scanning.join()
    with pytest.raises(ValueError, match=r"^node 0 cannot be reached at 127.0.0.1:\d+ for 0.1 s \(Connection refused"):
        run_node(EngineConfig(str(folder), **options), 1, print)
    taken = socket.create_server((HERE, options["master_port"]))
    with taken, pytest.raises(ValueError, match=r"master_port \d+, where this node cannot listen: Address already in"):
        LLM(str(folder), **options)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"nnodes": 2}, "nnodes is 2, which cannot have equally many of 1 ranks"),
        ({"nnodes": 2, "pipeline_parallel_size": 3}, "nnodes is 2, which cannot have equally many of 3 ranks"),
        ({"node_rank": 1}, "node_rank is 1, and nnodes 1; give 0 to 0"),
        ({"placement_strategy": "STRICT_PACK"}, "but Ray is not asked to place anything"),
        ({"master_addr": "10.0.0.1"}, "master_addr is '10.0.0.1', but there is one node"),
        ({"distributed_executor_backend": "ray"}, "but there is one rank and nothing to place"),
        (
            {"distributed_executor_backend": "ray", "pipeline_parallel_size": 2, "nnodes": 2},
            "nnodes is 2, but distributed_executor_backend is 'ray'",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_one_line(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineConfig("model", **settings)


# --- processes --------------------------------------------------------------------------------------


class CommandedNode:
    """`headway serve` as node 1."""

    def __init__(self, folder: Path, options: dict[str, Any], command: list[str] | None = None) -> None:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if name != "num_threads"]
        flags = [*flags, f"--threads={options['num_threads']}", "--node-rank=1"]
        words = [*(command or []), sys.executable, "-m", "headway", "serve", str(folder), *flags]
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)

    def ranks(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def end(self) -> str:
        """End it; what it has said."""
        self.process.terminate()
        _, said = self.process.communicate(timeout=20)
        return said


@pytest.mark.slow
async def test_requests_go_on_when_a_rank_or_a_machine_is_lost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank elsewhere is killed, and one is stopped; a whole node is killed, and the next one joins."""
    monkeypatch.setattr("headway.engine.client.RESTART_DELAYS_S", (0.0,))
    options = on_machines(2, pipeline_parallel_size=2, rank_timeout=1.0)
    nodes = [CommandedNode(folder, options)]
    try:
        async with started(EngineClient(EngineConfig(str(folder), **options))) as client:
            expected = [await tokens_from(client, f"alone{n}", PROMPTS[n]) for n in range(4)]
            for number, sent in enumerate((signal.SIGKILL, signal.SIGSTOP, None)):
                (rank,) = nodes[-1].ranks()
                answers = [asyncio.create_task(tokens_from(client, f"{number}{n}", PROMPTS[n])) for n in range(4)]
                await until(lambda: client.stats is not None and client.stats.num_running == 4)
                began = time.monotonic()
                if sent is None:
                    nodes[-1].process.kill()
                    nodes.append(CommandedNode(folder, options))
                else:
                    os.kill(rank.pid, sent)
                await until(lambda count=number: client.restarts == count + 1)  # type: ignore[misc]
                assert time.monotonic() - began < 6.0
                how = {
                    signal.SIGKILL: f"on node 1 (127.0.0.1), rank 1 (pid {rank.pid}) died: SIGKILL",
                    signal.SIGSTOP: f"on node 1 (127.0.0.1), rank 1 (pid {rank.pid}) is stopped and did not end its",
                    None: "node 1 (127.0.0.1) is gone",
                }[sent]
                assert how in client.last_error
                assert await asyncio.gather(*answers) == expected
                assert has_ended(rank)
            os.kill(nodes[-1].process.pid, signal.SIGSTOP)  # which no rank notices
            await until(lambda: client.restarts == 4)
            assert "node 1 (127.0.0.1) has said nothing for 1 s" in client.last_error
            os.kill(nodes[-1].process.pid, signal.SIGCONT)
            await client.wait_ready()
            assert await tokens_from(client, "after", PROMPTS[0]) == expected[0]
            (rank,) = nodes[-1].ranks()
        await until(lambda: has_ended(rank))
        said = nodes[-1].end()
        assert nodes[-1].process.returncode == 143
        assert said.count("node 1 has joined node 0 at 127.0.0.1:") == 2 and "Traceback" not in said
    finally:
        for node in nodes:
            node.process.kill()


# --- machines ---------------------------------------------------------------------------------------

NAMES = "headway-test-a", "headway-test-b"


@pytest.fixture
def machines() -> Iterator[Callable[[str], None]]:
    """Two network namespaces, 10.99.7.1 and 10.99.7.2, with one cable; sets that "up" or "down"."""
    if os.geteuid() != 0 or subprocess.run(["ip", "netns", "list"], capture_output=True).returncode:
        pytest.skip("network namespaces need root and ip")
    run = lambda *words: subprocess.run(["ip", *words], check=True)  # noqa: E731
    for name in NAMES:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        run("netns", "add", name)
    try:
        run("-n", NAMES[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", NAMES[1])
        for number, name in enumerate(NAMES, 1):
            run("-n", name, "address", "add", f"10.99.7.{number}/24", "dev", "cable")
            run("-n", name, "link", "set", "lo", "up")
            run("-n", name, "link", "set", "cable", "up")
        yield lambda state: run("-n", NAMES[1], "link", "set", "cable", state)
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name])


@pytest.mark.slow
async def test_a_cable_that_is_pulled(
    folder: Path, machines: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody closes a connection then. Requests go on with the same tokens when the machines see each other again."""
    monkeypatch.setattr("headway.engine.client.RESTART_DELAYS_S", (0.0,))
    launch = EngineClient.launch

    def launch_there(client: EngineClient) -> None:
        sys.executable = str(wrapper)
        launch(client)
        sys.executable = python

    python, wrapper = sys.executable, folder.parent / "python-there"
    wrapper.write_text(f'#!/bin/sh\nexec ip netns exec {NAMES[0]} {python} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr(EngineClient, "launch", launch_there)
    options = on_machines(2, pipeline_parallel_size=2, rank_timeout=1.0) | {"master_addr": "10.99.7.1"}
    node = CommandedNode(folder, options, ["ip", "netns", "exec", NAMES[1]])
    try:
        async with started(EngineClient(EngineConfig(str(folder), **options))) as client:
            expected = [await tokens_from(client, f"alone{n}", PROMPTS[n]) for n in range(4)]
            answers = [asyncio.create_task(tokens_from(client, f"{n}", PROMPTS[n])) for n in range(4)]
            await until(lambda: client.stats is not None and client.stats.num_running == 4)
            machines("down")
            await until(lambda: client.restarts == 1)
            assert "node 1 (10.99.7.2) has said nothing for 1 s" in client.last_error
            machines("up")
            assert await asyncio.gather(*answers) == expected
    finally:
        node.process.kill()
