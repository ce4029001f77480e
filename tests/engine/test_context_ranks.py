"""Ranks that each compute some rows of prompts say what one rank says, bit by bit, and go on as other ranks do."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway import LLM
from headway.engine.config import EngineConfig
from headway.engine.ranked import ContextExecutor
from headway.policy.step.context_shares import ContextShares
from headway.policy.step.plan import ScheduledSequence
from headway.policy.step.step_time import StepTimeModel, StepWork
from tests.engine import test_ranks
from tests.engine.eager import Foreseeing, try_all_drafts
from tests.engine.grammar_models import save_grammar_model
from tests.engine.models import TINY_GPT_OSS
from tests.engine.test_ranks import (
    TOKEN_BYTES,
    advanced,
    ask,
    followers,
    logprobs_of,
    running,
    tokens_from,
    tokens_of,
)

pytestmark = pytest.mark.timeout(300)

FAMILIES = {name: each for name, each in test_ranks.FAMILIES.items() if name != "delta"} | {"gpt_oss": TINY_GPT_OSS}
LONG = {"max_position_embeddings": 2048}  # contexts in which attention is split
PROMPTS = [[(7 * i + 3 * j) % 250 + 5 for j in range(25 + 11 * i)] for i in range(12)]
Build = Callable[..., LLM]


class Always(ContextShares):
    """Shares each step that can be, and counts them and their rows."""

    steps = most_rows = 0

    def _choice(self, whole: StepWork, part: StepWork) -> tuple[StepTimeModel, StepWork]:
        self.steps, self.most_rows = self.steps + 1, max(self.most_rows, whole.tokens - part.tokens)
        return self._shared, part


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(
        lambda family: save_grammar_model(tmp_path_factory.mktemp(family) / "model", **FAMILIES[family] | LONG)
    )


@pytest.fixture(scope="module")
def build(folders: Callable[[str], Path]) -> Build:
    """An engine with so many ranks, which share what can be; the same one for the same settings."""

    @functools.cache
    def make(ranks: int, family: str = "llama", **settings: Any) -> LLM:
        options: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "kv_cache_memory": 8 << 20}
        options |= {"num_threads": max(2, ranks), "device": "cpu", "max_num_batched_tokens": 64, "max_num_seqs": 16}
        llm = LLM(str(folders(family)), context_parallel_size=ranks, **(options | settings))
        if ranks > 1:
            executor_of(llm).shares = Always(ranks, llm.engine.ready.block_size)
        return llm

    return make


def executor_of(llm: LLM) -> ContextExecutor:
    executor = llm.engine.core.executor
    assert isinstance(executor, ContextExecutor)
    return executor


def shares_of(llm: LLM) -> Always:
    shares = executor_of(llm).shares
    assert isinstance(shares, Always)
    return shares


def check_same(one: LLM, ranks: LLM, prompts: list[list[int]] = PROMPTS, **wanted: Any) -> None:
    before = shares_of(ranks).steps
    expected, found = (ask(llm, prompts, **{"logprobs": 3} | wanted) for llm in (one, ranks))
    assert tokens_of(found) == tokens_of(expected) and logprobs_of(found) == logprobs_of(expected)
    assert len({tuple(tokens) for tokens in tokens_of(expected)}) > len(prompts) // 2, "it says the same to everything"
    assert shares_of(ranks).steps > before


@pytest.mark.parametrize(
    ("ranks", "family", "settings"),
    [
        (2, "gemma4", {"max_num_batched_tokens": 512}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (4, "llama", {"max_num_batched_tokens": 512}),
                *((2, family, {}) for family in FAMILIES if family not in ("llama", "gemma4")),
                (2, "latent", {"dtype": "bfloat16", "quantization": "int8"}),
                (2, "gemma", {"kv_cache_dtype": "int8", "max_num_batched_tokens": 512}),
                (2, "llama", {"kv_cache_dtype": "int8", "quantization": "int4", "dtype": "bfloat16"}),
                (2, "qwen2", {"kv_cache_dtype": "fp8", "quantization": "int8", "dtype": "bfloat16"}),
                (2, "mixture", {"quantization": "int4", "dtype": "float16", "max_num_batched_tokens": 512}),
            )
        ),
    ],
)
def test_tokens_and_log_probabilities_are_those_of_one_rank(
    build: Build, ranks: int, family: str, settings: dict[str, Any]
) -> None:
    """To the bit: also with windows, latents, scales, rounded weights, and contexts that attention splits."""
    prompts = [*PROMPTS, [(11 * j) % 250 + 5 for j in range(1100)]]
    check_same(build(1, family, **settings), build(ranks, family, **settings), prompts)


def test_what_else_takes_part_in_steps_does_as_before(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks; log-probabilities of prompts, prefixes that are cached, draws, grammars, beams, vectors and drafts."""
    one, two = build(1), build(2)
    grammar = {"structured_outputs": {"regex": "[0-9]{3}(-[a-f]{4})+"}, "temperature": 1.0, "seed": 3}
    for wanted in ({}, {"temperature": 1.0, "seed": 1}, grammar | {"ignore_eos": False}):
        check_same(one, two, [[9 + len(wanted), *prompt] for prompt in PROMPTS], **wanted)
    expected, found = (ask(llm, PROMPTS, prompt_logprobs=2) for llm in (one, two))
    assert logprobs_of(found) == logprobs_of(expected)
    again = ask(two, PROMPTS)
    assert tokens_of(again) == tokens_of(expected)
    assert sum(output.num_cached_tokens or 0 for output in again) > 500
    texts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    vectors = ([each.outputs.embedding for each in llm.embed(texts)] for llm in (one, two))
    assert next(vectors) == next(vectors)
    known = [prompt + tokens for prompt, tokens in zip(PROMPTS, tokens_of(expected), strict=True)]
    counts = try_all_drafts(monkeypatch, two, Foreseeing(known))
    assert tokens_of(ask(two, PROMPTS)) == tokens_of(expected)
    assert 0 < counts["accepted"] < counts["tried"]
    assert shares_of(two).most_rows >= 32 and not two.engine.runner._known


@pytest.mark.parametrize("swaps", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_preempted_sequences_go_on(build: Build, swaps: bool) -> None:
    """Blocks are swapped in and copied before others write to them."""
    room = 400 * TOKEN_BYTES
    llm = build(2, kv_cache_memory=room, max_model_len=300, swap_space=room / 2**30 if swaps else 0)
    check_same(build(1), llm, [prompt[:90] for prompt in PROMPTS])
    assert llm.engine.core.scheduler.sequences.num_preemptions > 0


def test_a_request_that_fails_in_any_rank_ends_alone(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rank 0 while the other waits for its keys, and in the other one, whose steps are then run by both again."""
    llm = build(2)
    expected, executor = tokens_of(ask(llm, PROMPTS)), executor_of(llm)
    forward, send, blocks = llm.engine.runner._forward, executor._send, llm.engine.core.scheduler.blocks
    blocks.reset_prefix_cache()
    shared: list[bool] = []

    def failing(step: Any, scheduled: Any, sequences: Any) -> Any:
        if any(sequence.tokens[:30] == PROMPTS[5][:30] for sequence in sequences):
            while llm.engine.runner.kernels.shares and not executor._followers.board.awaits(1):  # type: ignore[attr-defined]
                time.sleep(0.001)
            shared.append(llm.engine.runner.kernels.shares)  # type: ignore[attr-defined]
            raise ValueError("no")
        return forward(step, scheduled, sequences)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "_forward", failing)
        found, errors = advanced(llm, PROMPTS)
    assert errors == {"5": "the engine failed on this request (ValueError); see the server's log"} and any(shared)
    assert [found[str(n)] for n in range(12) if n != 5] == [*expected[:5], *expected[6:]]

    blocks.reset_prefix_cache()
    raised = []

    def unknown(plan: Any, parts: Any) -> None:
        """Name a sequence that the other rank does not know, once."""
        broken = [[ScheduledSequence(10**6, 0, [1], True, 1)]] if not raised else parts
        raised.append(broken)
        send(plan, parts=broken)

    monkeypatch.setattr(executor, "_send", unknown)
    assert tokens_of(ask(llm, PROMPTS)) == expected and len(raised) > 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"context_parallel_size": 0}, "context_parallel_size is 0, and this process may use"),
        ({"context_parallel_size": 99}, "context_parallel_size is 99, and this process may use"),
        (
            {"context_parallel_size": 2, "tensor_parallel_size": 2},
            r"context_parallel_size is 2, whose ranks have the whole model, and 2 ranks share it .* leave one of them",
        ),
        ({"context_parallel_size": 2, "pipeline_parallel_size": 2}, "whose ranks have the whole model, and 2 ranks"),
        (
            {"context_parallel_size": 2, "num_threads": 1},
            r"num_threads is 1, which cannot be divided among 2 ranks \(context_parallel_size\); give a multiple",
        ),
        (
            {"context_parallel_size": 2, "speculative_config": {"method": "mtp"}},
            r"method 'mtp' does not go with several ranks \(2\)",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_one_line(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineConfig("model", **settings)


def test_recurrent_layers_are_refused_in_one_line(tmp_path: Path) -> None:
    folder = save_grammar_model(tmp_path / "model", **test_ranks.FAMILIES["delta"])
    with pytest.raises(ValueError, match="context_parallel_size is 2, but a recurrent layer computes each token from"):
        LLM(str(folder), context_parallel_size=2, load_format="dummy", device="cpu")


@pytest.mark.slow
async def test_requests_go_on_when_a_rank_is_stopped_or_killed(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one is noticed in a step that it has rows of, the other at once; a server that is idle starts again, too."""
    monkeypatch.setattr("headway.engine.client.RESTART_DELAYS_S", (0.0,))
    settings: dict[str, Any] = {"tensor_parallel_size": 1, "context_parallel_size": 2, "rank_timeout": 1.0}
    settings |= {"enable_prefix_caching": False, "max_num_batched_tokens": 64, "max_num_seqs": 16}
    async with running(folders("llama"), **settings) as client:
        prompt = [(11 * j) % 250 + 5 for j in range(1100)]
        expected = await tokens_from(client, "alone", prompt, 20)
        for number, (sent, how) in enumerate(
            ((signal.SIGSTOP, "is stopped and did not end its part"), (signal.SIGKILL, "died: SIGKILL"))
        ):
            (follower,) = followers(client)
            os.kill(follower.pid, sent)
            answer = asyncio.create_task(tokens_from(client, f"again{number}", prompt, 20))
            await test_ranks.until(lambda count=number: client.restarts == count + 1)  # type: ignore[misc]
            assert f"rank 1 (pid {follower.pid}) {how}" in client.last_error
            assert await answer == expected
