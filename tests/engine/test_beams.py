"""Beam search: the texts of transformers, whatever else runs; blocks that are shared; and one request to everybody."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from headway import LLM, BeamSearchParams, SamplingParams
from headway.engine.core import EngineCore
from headway.engine.messages import AddRequest, SequenceOutput
from headway.policy.step.request import Resumed
from tests.models import tiny

# Of six families: grouped heads, biases, windows in some layers, experts, latent attention, and windows with sinks.
CASES = ["llama_tied", "qwen2", "gemma2", "qwen3_moe_all_of_few", "deepseek_v3_dense", "gpt_oss"]
STOPS = [5, 9, 70]
SEARCHES: list[dict[str, Any]] = [
    {"best_of": 4, "n": 4, "max_tokens": 24},
    {"best_of": 3, "n": 2, "max_tokens": 16, "length_penalty": 0.0, "early_stopping": True},
    {"best_of": 4, "n": 3, "max_tokens": 20, "length_penalty": 2.0, "early_stopping": "never"},
    {"best_of": 5, "n": 5, "max_tokens": 12, "length_penalty": -1.0},
    {"n": 1, "max_tokens": 8},
]
PROMPTS = tiny.prompts([7, 19])


def search(**changes: Any) -> SamplingParams:
    given = {"use_beam_search": True, "stop_token_ids": STOPS, "ignore_eos": True, "logprobs": 1}
    return SamplingParams(**{**given, **changes})


def theirs(model: PreTrainedModel, prompt: list[int], asked: SamplingParams) -> tuple[list[list[int]], list[float]]:
    """Transformers' texts of a search, and what they are ranked by."""
    config = GenerationConfig(
        num_beams=asked.width, num_return_sequences=asked.n, max_new_tokens=asked.max_tokens, do_sample=False,
        length_penalty=asked.length_penalty, early_stopping=asked.early_stopping, eos_token_id=STOPS, pad_token_id=0,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    ids = torch.tensor([prompt])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    texts = [text[len(prompt) :] for text in found.sequences.tolist()]
    ends = [next((at + 1 for at, token in enumerate(text) if token in STOPS), len(text)) for text in texts]
    scores = [0.0] * len(texts) if asked.width == 1 else found.sequences_scores.tolist()
    return [text[:end] for text, end in zip(texts, ends, strict=True)], scores


Made = Callable[[str], tuple[PreTrainedModel, Path]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Made:
    @functools.cache
    def make(case: str) -> tuple[PreTrainedModel, Path]:
        folder = tmp_path_factory.mktemp(case)
        return tiny.save(case, folder), folder

    return make


def engine(folder: Path, **changes: Any) -> LLM:
    given = {"dtype": "float32", "kv_cache_memory": 4 << 20, "max_num_seqs": 16, "num_threads": 1, "block_size": 16}
    return LLM(str(folder), skip_tokenizer_init=True, **{**given, **changes})


def is_clean(core: EngineCore) -> bool:
    core.check()
    blocks = core.scheduler.blocks
    return blocks.num_free == blocks.num_blocks and not core.scheduler.sequences.seats and not core._sequences


@pytest.mark.parametrize("case", CASES)
def test_texts_are_those_of_transformers(models: Made, case: str) -> None:
    model, folder = models(case)
    llm = engine(folder)
    for changes in SEARCHES:
        asked = search(**changes)
        for prompt, answer in zip(PROMPTS, llm.generate(PROMPTS, asked), strict=True):
            texts, scores = theirs(model, prompt, asked)
            assert [choice.token_ids for choice in answer.outputs] == texts, changes
            for choice, score in zip(answer.outputs, scores, strict=True):
                assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids)
                assert choice.finish_reason == ("stop" if choice.token_ids[-1] in STOPS else "length")
                if score:
                    ranked = (choice.cumulative_logprob or 0.0) / len(choice.token_ids) ** asked.length_penalty
                    assert ranked == pytest.approx(score, rel=1e-4)
    assert is_clean(llm.engine.core)


def test_the_librarys_search_gives_all_beams_the_best_first(models: Made) -> None:
    llm = engine(models("llama_tied")[1])
    (answer,) = llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=3, max_tokens=9, ignore_eos=True))
    sums = [choice.cumulative_logprob or 0.0 for choice in answer.outputs]
    assert len(sums) == 3 and sums == sorted(sums, reverse=True)
    assert len({tuple(choice.token_ids) for choice in answer.outputs}) == 3
    with pytest.raises(ValueError, match="n is 0"):
        llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=0))


@pytest.mark.parametrize("case", ["qwen2", "gemma2"])
def test_neither_other_requests_nor_preemption_change_a_text(models: Made, case: str) -> None:
    """In a pool that all of them together do not fit in; plain requests have the tokens that they have alone."""
    model, folder = models(case)
    asked = [search(best_of=4, n=4, max_tokens=30), SamplingParams(max_tokens=30, seed=3, ignore_eos=True)]
    prompts = tiny.prompts([15, 9, 30, 12, 22, 17])
    alone = engine(folder)
    expected = [alone.generate(prompt, asked[at % 2])[0].outputs for at, prompt in enumerate(prompts)]
    assert [choice.token_ids for choice in expected[0]] == theirs(model, prompts[0], asked[0])[0]
    for caching in (True, False):
        llm = engine(folder, kv_cache_memory=200 << 10, block_size=16, enable_prefix_caching=caching)
        core = llm.engine.core
        answers = llm.generate(prompts, [asked[at % 2] for at in range(len(prompts))])
        assert core.scheduler.sequences.num_preemptions > 0, core.scheduler.blocks.num_blocks
        for answer, choices in zip(answers, expected, strict=True):
            assert [choice.token_ids for choice in answer.outputs] == [choice.token_ids for choice in choices]
        assert is_clean(core)


def test_beams_share_their_prompt_and_copy_only_what_they_write(models: Made) -> None:
    llm = engine(models("qwen2")[1])
    core = llm.engine.core
    prompt = tiny.prompts([48])[0]
    core.add(AddRequest("a", prompt, search(best_of=8, n=1, max_tokens=14, stop_token_ids=[]), []))
    most = 0
    while core.has_work:
        core.advance()
        core.check()
        most = max(most, core.scheduler.blocks.num_blocks - core.scheduler.blocks.num_free)
    assert most <= 3 + 8, "three blocks of the prompt, and one of each beam"
    assert is_clean(core)


def run(core: EngineCore, until: Callable[[], bool] = lambda: False) -> list[SequenceOutput]:
    found: list[SequenceOutput] = []
    while core.has_work and not until():
        found += core.advance()
    return found


def test_a_search_takes_the_seats_of_all_its_beams(models: Made) -> None:
    core = engine(models("qwen2")[1], max_num_seqs=6).engine.core
    core.add(AddRequest("plain", PROMPTS[1], SamplingParams(max_tokens=4, ignore_eos=True), []))
    for name in "ab":
        core.add(AddRequest(name, PROMPTS[0], search(best_of=4, n=2, max_tokens=6), []))
    most = 0
    while core.has_work:
        core.advance()
        most = max(most, len(core.scheduler.running))
        assert len(core.scheduler.running) <= core.scheduler.sequences.seats <= 6
    assert most == 5, "a search and the plain request; the other search waits"
    admitted = [name for decision in core.scheduler.decisions for name in decision.admitted]
    assert admitted == ["plain", "a", "b"], "beams that fork are not admitted"
    assert is_clean(core)


def test_a_search_is_one_request_when_it_ends(models: Made) -> None:
    """All its choices end together, with one ledger that sums to its time."""
    core = engine(models("qwen2")[1]).engine.core
    core.add(AddRequest("a", PROMPTS[0], search(best_of=4, n=3, max_tokens=9), []))
    outputs = run(core)
    assert [output.index for output in outputs] == [0, 1, 2]
    timings = [output.timings for output in outputs]
    assert all(each is not None and each.phases_ns == timings[0].phases_ns for each in timings if timings[0])
    assert timings[0] is not None and timings[0].steps >= 8
    assert sum(timings[0].phases_ns.values()) == timings[0].ended_ns
    assert core.step().stats.num_running == 0


@pytest.mark.parametrize("index", [-1, 1])
def test_a_search_that_is_dropped_frees_all(models: Made, index: int) -> None:
    core = engine(models("qwen2")[1]).engine.core
    core.add(AddRequest("a", PROMPTS[0], search(best_of=4, n=2, max_tokens=30, stop_token_ids=[]), []))
    core.add(AddRequest("b", PROMPTS[1], SamplingParams(max_tokens=20, ignore_eos=True), []))
    run(core, lambda: len(core.scheduler.running) == 5)
    core.abort("a", index)
    assert len(core.scheduler.running) == 1
    outputs = run(core)
    told = [output for output in outputs if output.request_id == "a"]
    assert [(output.index, output.finish_reason) for output in told] == (
        [] if index < 0 else [(0, "abort"), (1, "abort")]
    )
    assert is_clean(core)


def test_a_search_that_goes_on_in_another_engine_has_the_same_texts(models: Made) -> None:
    core = engine(models("qwen2")[1]).engine.core
    request = AddRequest("a", PROMPTS[0], search(best_of=4, n=2, max_tokens=9), [])
    first = run_one(core, request)
    again = AddRequest("a", PROMPTS[0], request.params, [], resumed=[Resumed(0, []), Resumed(1, [])])
    assert run_one(core, again) == first


def run_one(core: EngineCore, request: AddRequest) -> list[list[int]]:
    core.add(request)
    return [output.token_ids for output in run(core)]


def test_logits_that_are_no_numbers_end_a_search_and_nobody_else(models: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine(models("qwen2")[1]).engine.core
    core.add(AddRequest("b", PROMPTS[1], SamplingParams(max_tokens=20, ignore_eos=True), []))
    core.add(AddRequest("a", PROMPTS[0], search(best_of=4, n=2, max_tokens=30, stop_token_ids=[]), []))
    run(core, lambda: len(core.scheduler.running) == 5)
    complete, fork = core.scheduler.complete, max(core.scheduler.sequences.by_id)

    def spoilt(plan: Any, tokens: Any, times: Any) -> Any:
        return complete(plan, {**tokens, fork: None}, times)

    monkeypatch.setattr(core.scheduler, "complete", spoilt)
    outputs = core.advance()
    monkeypatch.undo()
    told = [(output.index, output.finish_reason) for output in outputs if output.request_id == "a"]
    assert told == [(0, "error"), (1, "error")]
    outputs += run(core)
    assert outputs[-1].request_id == "b" and outputs[-1].finish_reason == "length"
    assert is_clean(core)


def test_searches_that_could_never_run_are_refused(models: Made) -> None:
    core = engine(models("qwen2")[1], max_num_seqs=4, kv_cache_memory=100 << 10).engine.core
    for asked, said in (
        (search(best_of=5, n=1), "5 beams takes as many seats; this server has 4"),
        (search(best_of=4, n=1, max_tokens=None), "KV blocks, the pool has"),
    ):
        core.add(AddRequest("a", PROMPTS[0], asked, []))
        (output,) = core.advance()
        assert output.finish_reason == "error" and said in (output.error or "")
    recurrent = engine(models("qwen3_next")[1]).engine.core
    recurrent.add(AddRequest("a", PROMPTS[0], search(), []))
    assert "recurrent layers" in (recurrent.advance()[0].error or "")
