"""An engine of several ranks says what one of one rank says, and goes on when a rank dies, hangs or fails."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from headway import LLM, RequestOutput, SamplingParams
from headway.engine.client import EngineClient
from headway.engine.config import EngineConfig
from headway.engine.messages import AddRequest, SequenceOutput
from headway.engine.ranks import RankedExecutor
from headway.policy.step.plan import ScheduledSequence, StepPlan
from tests.engine.eager import Foreseeing, try_all_drafts
from tests.engine.grammar_models import save_grammar_model
from tests.engine.models import TINY_GEMMA, TINY_GEMMA4, TINY_LATENT, TINY_MIXTURE, TINY_OLMO

pytestmark = pytest.mark.timeout(300)

TOLERANCE = 1e-4  # of log-probabilities in float32: sums of ranks are added in another order
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # keys and values, 2 layers, 2 heads, 16 elements, of all ranks together
PROMPTS = [[(7 * i + 3 * j) % 250 + 5 for j in range(9 + 5 * i)] for i in range(16)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixture": TINY_MIXTURE,
    "gemma": TINY_GEMMA,
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "latent": TINY_LATENT,
    "gemma4": TINY_GEMMA4,
    "olmo": TINY_OLMO,
    "delta": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(
        lambda family: save_grammar_model(tmp_path_factory.mktemp(family) / "model", **FAMILIES[family])
    )


STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "num_threads": 2}
Build = Callable[..., LLM]


@pytest.fixture(scope="module")
def build(folders: Callable[[str], Path]) -> Build:
    """An engine with so many ranks; the same one for the same settings."""

    @functools.cache
    def make(ranks: int, family: str = "llama", **settings: Any) -> LLM:
        options: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "kv_cache_memory": 4 << 20}
        options |= {"num_threads": ranks, "device": "cpu", "max_num_batched_tokens": 64, "max_num_seqs": 16}
        return LLM(str(folders(family)), tensor_parallel_size=ranks, **(options | settings))

    return make


def ask(llm: LLM, prompts: list[list[int]] = PROMPTS, **params: Any) -> list[RequestOutput]:
    wanted = SamplingParams(**(GREEDY | params))
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted)
    llm.engine.core.scheduler.check()
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def logprobs_of(outputs: list[RequestOutput]) -> list[float]:
    found = []
    for output in outputs:
        of_prompt, of_answer = output.prompt_logprobs or [], output.outputs[0].logprobs or []
        for entry in [*of_prompt[1:], *of_answer]:
            assert entry is not None
            found += [entry.logprob, *entry.top_logprobs]
    return found


@pytest.mark.parametrize(
    ("ranks", "family", "settings"),
    [
        (2, "llama", {}),
        (2, "mixture", {}),
        (2, "mixture", {"enable_expert_parallel": True}),
        (2, "delta", {}),
        (1, "gemma", STAGES),
        pytest.param(2, "llama", STAGES | {"num_threads": 4}, marks=pytest.mark.slow),
        *(pytest.param(4, family, {}, marks=pytest.mark.slow) for family in FAMILIES if family != "delta"),
    ],
)
def test_tokens_and_log_probabilities_are_those_of_one_rank(
    build: Build, ranks: int, family: str, settings: dict[str, Any]
) -> None:
    """In chunks, since a step has 64 tokens. Two ranks of four have the same key/value head."""
    wanted = {"logprobs": 3, "prompt_logprobs": 2}
    expected, found = ask(build(1, family), **wanted), ask(build(ranks, family, **settings), **wanted)
    assert tokens_of(found) == tokens_of(expected)
    assert logprobs_of(found) == pytest.approx(logprobs_of(expected), abs=TOLERANCE)
    assert len({tuple(tokens) for tokens in tokens_of(expected)}) > 8, "it says the same to everything"


def test_prefixes_are_found_in_the_caches_of_all_ranks(build: Build) -> None:
    expected = tokens_of(ask(build(1)))
    llm = build(2)
    ask(llm)
    again = ask(llm)
    assert tokens_of(again) == expected
    assert sum(output.num_cached_tokens or 0 for output in again) > 200


@pytest.mark.parametrize("swaps", [False, True])
def test_preempted_sequences_go_on_in_all_ranks(build: Build, swaps: bool) -> None:
    room = 240 * TOKEN_BYTES
    llm = build(2, kv_cache_memory=room, swap_space=room / 2**30 if swaps else 0)
    assert tokens_of(ask(llm)) == tokens_of(ask(build(1)))
    assert llm.engine.core.scheduler.sequences.num_preemptions > 0


def test_drafts_are_tried_in_all_ranks(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens_of(ask(build(1)))
    llm = build(2)
    texts = [prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    counts = try_all_drafts(monkeypatch, llm, Foreseeing(texts))
    assert tokens_of(ask(llm)) == expected
    assert 0 < counts["accepted"] < counts["tried"]


def test_grammars_and_seeds_draw_the_same(build: Build) -> None:
    wanted = {
        "structured_outputs": {"regex": "[0-9]{3}(-[a-f]{4})+"},
        "temperature": 1.0,
        "seed": 3,
        "ignore_eos": False,
    }
    expected, found = (tokens_of(ask(build(ranks), PROMPTS[:4], **wanted)) for ranks in (1, 2))
    assert found == expected


def test_vectors_are_those_of_one_rank(build: Build) -> None:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:4]]
    one, two = (build(ranks).embed(prompts) for ranks in (1, 2))
    for expected, found in zip(one, two, strict=True):
        assert found.outputs.embedding == pytest.approx(expected.outputs.embedding, abs=TOLERANCE)


# --- faults -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "delta"])
def test_a_request_that_fails_in_rank_0_ends_alone(build: Build, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the others are in the middle of its step then, and have states that rank 0 does not have."""
    llm = build(2, family)
    expected = tokens_of(ask(llm))
    forward = llm.engine.runner._forward

    def failing(step: Any, scheduled: Any, sequences: Any) -> Any:
        if any(sequence.tokens[: len(PROMPTS[5])] == PROMPTS[5] for sequence in sequences):
            raise ValueError("no")
        return forward(step, scheduled, sequences)

    monkeypatch.setattr(llm.engine.runner, "_forward", failing)
    core, found, errors = llm.engine.core, dict[str, list[int]](), dict[str, str]()
    for number, prompt in enumerate(PROMPTS):
        core.add(AddRequest(str(number), prompt, SamplingParams(**GREEDY), []))
    while core.has_work:
        for output in core.advance():
            found.setdefault(output.request_id, []).extend(output.token_ids)
            errors |= {output.request_id: output.error} if output.error else {}
    assert errors == {"5": "the engine failed on this request (ValueError); see the server's log"}
    assert [found[str(n)] for n in range(16) if n != 5] == [*expected[:5], *expected[6:]]
    monkeypatch.undo()
    assert tokens_of(ask(llm)) == expected


def test_a_rank_that_raises_holds_up_nobody(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = build(2)
    expected = tokens_of(ask(llm))
    executor = llm.engine.core.executor
    assert isinstance(executor, RankedExecutor)
    monkeypatch.setattr(llm.engine.runner, "run", lambda plan: time.sleep(0.5))
    with pytest.raises(RuntimeError, match="rank 1 raised"):
        executor.run(StepPlan([ScheduledSequence(10**6, 0, [1], True, 1)]))
    monkeypatch.undo()
    assert tokens_of(ask(llm)) == expected


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0, and this process may use"),
        ({"tensor_parallel_size": 99}, "tensor_parallel_size is 99, and this process may use"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel is set, but no layer is shared"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size is 0, and this process may use"),
        ({"tensor_parallel_size": 2, "num_threads": 1}, "num_threads is 1, which cannot be divided among 2 ranks"),
    ],
)
def test_settings_that_contradict_each_other_are_one_line(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineConfig("model", **settings)


def test_a_model_that_ranks_cannot_share_starts_no_process(tmp_path: Path) -> None:
    folder = save_grammar_model(tmp_path / "model", num_attention_heads=3, num_key_value_heads=3)
    before = psutil.Process().children(recursive=True)
    with pytest.raises(ValueError, match=r"tensor_parallel_size is 2, which does not divide 3 query heads; use 1$"):
        LLM(str(folder), tensor_parallel_size=2, load_format="dummy", device="cpu")
    assert psutil.Process().children(recursive=True) == before


def test_a_rank_that_dies_while_it_loads_is_one_line(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.engine.ranks.Followers.assign", lambda self, length: self._processes[0].kill())
    with pytest.raises(ValueError, match=r"rank 1 \(pid \d+\) died: SIGKILL, while it loaded its part of the model"):
        LLM(str(folders("llama")), tensor_parallel_size=2, load_format="dummy", device="cpu")


# --- processes --------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def running(folder: Path, **changes: Any) -> AsyncIterator[EngineClient]:
    settings = {"dtype": "float32", "load_format": "dummy", "num_threads": 2, "kv_cache_memory": 8 << 20}
    client = EngineClient(EngineConfig(str(folder), **({"tensor_parallel_size": 2} | settings | changes)))
    await client.start()
    try:
        await client.wait_ready()
        yield client
    finally:
        await client.stop()


def followers(client: EngineClient) -> list[psutil.Process]:
    assert client.pid is not None
    return psutil.Process(client.pid).children()


async def tokens_from(client: EngineClient, name: str, prompt: list[int], max_tokens: int = 200) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    request = AddRequest(name, prompt, params, [0], sent_ns=time.monotonic_ns())
    outputs: list[SequenceOutput] = [output async for output in client.generate(request)]
    assert outputs[-1].finish_reason == "length", outputs[-1].error
    return [token for output in outputs for token in output.token_ids]


async def test_a_stage_that_is_stopped_is_named(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has nothing to do with meetings: rank 0 waits for what it hands on."""
    monkeypatch.setattr("headway.engine.client.RESTART_DELAYS_S", (0.0,))
    stages = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "rank_timeout": 1.0}
    async with running(folders("llama"), **stages) as client:
        expected = await tokens_from(client, "alone", PROMPTS[0])
        (follower,) = followers(client)
        answer = asyncio.create_task(tokens_from(client, "again", PROMPTS[0]))
        await until(lambda: client.stats is not None and client.stats.num_running == 1)
        os.kill(follower.pid, signal.SIGSTOP)
        await until(lambda: client.restarts == 1)
        assert f"rank 1 (pid {follower.pid}) is stopped and did not end its part" in client.last_error
        assert await answer == expected


async def until(check: Callable[[], object], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not check():
            await asyncio.sleep(0.005)


async def test_requests_go_on_when_a_rank_is_killed_stopped_or_dies_idle(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time the reason names the rank, all ranks are replaced, and nobody is left at the end."""
    monkeypatch.setattr("headway.engine.client.RESTART_DELAYS_S", (0.0,))
    everyone: list[psutil.Process] = []
    async with running(folders("llama"), rank_timeout=1.0, max_model_len=256) as client:
        expected = [await tokens_from(client, f"alone{n}", PROMPTS[n]) for n in range(4)]
        for number, sent in enumerate((signal.SIGKILL, signal.SIGSTOP)):
            (follower,) = followers(client)
            everyone.append(follower)
            answers = [asyncio.create_task(tokens_from(client, f"{sent}{n}", PROMPTS[n])) for n in range(4)]
            await until(lambda: client.stats is not None and client.stats.num_running == 4)
            began = time.monotonic()
            os.kill(follower.pid, sent)
            await until(lambda count=number: client.restarts == count + 1)  # type: ignore[misc]
            assert time.monotonic() - began < (5.0 if sent is signal.SIGSTOP else 2.0)
            how = "is stopped and did not end its part" if sent is signal.SIGSTOP else "died: SIGKILL"
            assert f"rank 1 (pid {follower.pid}) {how}" in client.last_error
            assert await asyncio.gather(*answers) == expected
            assert not follower.is_running() or follower.status() == psutil.STATUS_ZOMBIE
        (follower,) = followers(client)
        everyone.append(follower)
        os.kill(follower.pid, signal.SIGKILL)
        await until(lambda: client.restarts == 3)
        assert f"rank 1 (pid {follower.pid}) died: SIGKILL" in client.last_error
        await client.wait_ready()
        assert await tokens_from(client, "after", PROMPTS[0]) == expected[0]
        # An engine that dies takes its ranks along, even one that is stopped.
        (follower,) = followers(client)
        everyone.append(follower)
        os.kill(follower.pid, signal.SIGSTOP)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: not psutil.pid_exists(follower.pid) or follower.status() == psutil.STATUS_ZOMBIE)
        await client.wait_ready()
        everyone += followers(client)
    assert not [each for each in everyone if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    assert not [name for name in os.listdir("/dev/shm") if "headway" in name]
