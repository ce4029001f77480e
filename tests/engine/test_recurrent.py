"""Models with recurrent layers say the same however they are run: the states of sequences are where they should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway import LLM, SamplingParams
from headway.engine.prepare import EngineError
from tests.engine.eager import Foreseeing, try_all_drafts
from tests.models import tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
LONG = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True, logprobs=1)
SYSTEM = [(11 * i) % 120 + 3 for i in range(37)]
PROMPTS = [[(7 * i + 3 * j) % 120 + 5 for j in range(9 + 5 * i)] for i in range(16)]
PROMPTS += [SYSTEM + prompt[:15] for prompt in PROMPTS[:8]]


@pytest.fixture(
    scope="module",
    params=[("qwen3_5", "float32"), ("qwen3_next", "bfloat16"), ("lfm2", "float32"), ("lfm2_moe", "float32")],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    case, dtype = request.param
    folder: Path = tmp_path_factory.mktemp(case)
    tiny.save(case, folder, {"max_position_embeddings": 256, "eos_token_id": 0})
    return str(folder), dtype


def build(model: tuple[str, str], **settings: Any) -> LLM:
    folder, dtype = model
    defaults: dict[str, Any] = {"device": "cpu", "dtype": dtype, "num_threads": 1, "kv_cache_memory": 16 << 20}
    return LLM(folder, skip_tokenizer_init=True, **(defaults | {"max_num_seqs": 32} | settings))


class Said(list[tuple[list[int], list[float]]]):
    """Tokens of every choice, with their log-probabilities, which may differ in their last bits."""

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, list)
        return [tokens for tokens, _ in self] == [tokens for tokens, _ in other] and all(
            mine == pytest.approx(theirs, abs=1e-4) for (_, mine), (_, theirs) in zip(self, other, strict=True)
        )


def said(
    llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY, held: list[int] | None = None
) -> list[Said]:
    """Held blocks are given back at the end."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    llm.engine.core.scheduler.blocks.release(held or [])
    llm.engine.core.scheduler.check()
    return [of_choices(output) for output in outputs]


def of_choices(output: Any) -> Said:
    return Said((each.token_ids, [entry.logprob for entry in each.logprobs]) for each in output.outputs)


@pytest.fixture(scope="module")
def alone(model: tuple[str, str]) -> list[Said]:
    llm = build(model, enable_prefix_caching=False)
    found = [said(llm, [prompt])[0] for prompt in PROMPTS]
    assert len({tuple(choices[0][0]) for choices in found}) > 16, "the model says the same to everything"
    return found


def test_in_a_batch_and_again_from_checkpoints(model: tuple[str, str], alone: list[Said]) -> None:
    llm = build(model, max_num_batched_tokens=4096)
    checkpoints = llm.engine.core.scheduler.blocks.checkpoints
    assert checkpoints is not None and checkpoints.num_slots == 64
    assert said(llm, PROMPTS) == alone
    assert len(checkpoints) > 0
    again = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY)
    assert [of_choices(output) for output in again] == alone
    assert all(o.num_cached_tokens == (len(o.prompt_token_ids) - 1) // 16 * 16 for o in again)


def test_the_next_turn_computes_less_than_the_spacing_of_the_last_answer_again(model: tuple[str, str]) -> None:
    """Together, so that sequences that decode keep their states in different steps and with others' prompts."""
    llm, plain = build(model), build(model, enable_prefix_caching=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], LONG)
    turns = [[*prompt, *each.outputs[0].token_ids, 9, 8, 7] for prompt, each in zip(PROMPTS, outputs, strict=True)]
    again = llm.generate([{"prompt_token_ids": turn} for turn in turns], GREEDY)
    assert [each.num_cached_tokens for each in again] == [(len(turn) - 4) // 32 * 32 for turn in turns]
    assert [of_choices(each) for each in again] == said(plain, turns)
    llm.engine.core.scheduler.check()


def test_a_beginning_that_comes_again_is_found_from_the_third_prompt_on(
    model: tuple[str, str], alone: list[Said]
) -> None:
    llm = build(model)
    cached = []
    for prompt, expected in zip(PROMPTS[17:], alone[17:], strict=True):
        (output,) = llm.generate([{"prompt_token_ids": prompt}], GREEDY)
        assert of_choices(output) == expected
        cached.append(output.num_cached_tokens)
    assert cached[:2] == [0, 0] and set(cached[2:]) == {32}


@pytest.mark.covering(1)
@pytest.mark.parametrize("budget", [1, 7, 20])
def test_in_chunks(model: tuple[str, str], alone: list[Said], budget: int) -> None:
    some = slice(0, 6) if budget == 1 else slice(None)
    llm = build(model, max_num_batched_tokens=budget, max_num_seqs=min(budget, 4))
    assert said(llm, PROMPTS[some]) == alone[some]
    assert said(llm, PROMPTS[some]) == alone[some]


@pytest.mark.covering(1)
@pytest.mark.parametrize("caching", [True, False])
def test_preempted(model: tuple[str, str], alone: list[Said], caching: bool) -> None:
    llm = build(model, max_num_seqs=16, enable_prefix_caching=caching)
    blocks = llm.engine.core.scheduler.blocks
    held = blocks.allocate(blocks.num_blocks - 30)  # as if the pool were so small
    assert said(llm, PROMPTS, held=held) == alone
    assert llm.engine.core.scheduler.sequences.num_preemptions > 0


def test_more_prompts_than_slots_for_checkpoints(model: tuple[str, str], alone: list[Said]) -> None:
    llm = build(model, max_num_seqs=3)
    assert said(llm, PROMPTS) == alone and said(llm, PROMPTS) == alone
    checkpoints = llm.engine.core.scheduler.blocks.checkpoints
    assert checkpoints is not None and len(checkpoints) <= 6 < checkpoints.made


def test_all_choices_of_a_request(model: tuple[str, str], alone: list[Said]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1, n=3)
    assert said(build(model), PROMPTS[4:10], params) == [Said(choices * 3) for choices in alone[4:10]]


def test_after_a_step_that_failed(model: tuple[str, str], alone: list[Said], monkeypatch: pytest.MonkeyPatch) -> None:
    """States that the step has changed are computed again."""
    llm = build(model)
    sample, steps = llm.engine.runner.sampler.sample, iter(range(1_000_000))

    def fail_now_and_then(*arguments: Any) -> Any:
        if next(steps) in (3, 10, 11):
            raise RuntimeError("as it happens")
        return sample(*arguments)

    monkeypatch.setattr(llm.engine.runner.sampler, "sample", fail_now_and_then)
    assert said(llm, PROMPTS) == alone


def test_states_take_their_part_of_the_memory(model: tuple[str, str]) -> None:
    llm = build(model, kv_cache_memory=1 << 20)
    runner, scheduler = llm.engine.runner, llm.engine.core.scheduler
    held = sum(tensor.nbytes for cache in runner.caches for tensor in cache.tensors)
    assert 0.97 * (1 << 20) < held <= 1 << 20
    checkpoints, seats = scheduler.blocks.checkpoints, scheduler.config.max_num_seqs
    assert checkpoints is not None and (seats, checkpoints.num_slots) in [(16, 16), (32, 64)]
    of_blocks = sum(tensor.nbytes for cache in runner._paged for tensor in cache.tensors)
    assert held == of_blocks + (seats + checkpoints.num_slots) * runner.model.config.shape.state_bytes


def test_drafts_that_are_refused_leave_no_trace_in_states(
    model: tuple[str, str], alone: list[Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch, where a step fails and sequences are preempted; and states are kept behind answers as ever."""
    llm = build(model, speculative_config={"method": "ngram"})
    plain = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], LONG)
    blocks, sample, steps = llm.engine.core.scheduler.blocks, llm.engine.runner.sampler.sample, iter(range(1_000_000))
    texts = [[*prompt, *each.outputs[0].token_ids] for prompt, each in zip(PROMPTS, plain, strict=True)]
    counts = try_all_drafts(monkeypatch, llm, Foreseeing(texts))
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], LONG)
    assert [of_choices(each) for each in outputs] == [of_choices(each) for each in plain]
    assert counts["tried"] > counts["accepted"] > 300
    turns = [[*text, 9, 8, 7] for text in texts]
    again = llm.generate([{"prompt_token_ids": turn} for turn in turns], SamplingParams(max_tokens=1))
    assert [each.num_cached_tokens for each in again] == [(len(turn) - 4) // 32 * 32 for turn in turns]

    def fail_now_and_then(*arguments: Any) -> Any:
        if next(steps) in (3, 10, 11):
            raise RuntimeError("as it happens")
        return sample(*arguments)

    monkeypatch.setattr(llm.engine.runner.sampler, "sample", fail_now_and_then)
    held = blocks.allocate(blocks.num_blocks - 30)  # as if the pool were so small
    assert said(llm, PROMPTS, held=held) == alone
    assert llm.engine.core.scheduler.sequences.num_preemptions > 0


def test_too_little_memory_and_swapping_are_refused(model: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=r"the state of one sequence takes .* raise --kv-cache-memory"):
        build(model, kv_cache_memory=1 << 10)
    with pytest.raises(EngineError, match=r"swap_space is 1 GiB, but states of recurrent layers are not swapped"):
        build(model, swap_space=1.0)
