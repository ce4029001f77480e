"""Drafts of a checkpoint's own head: those that the reference makes, and the same tokens as without."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import LLM, SamplingParams
from headway.engine.draft_head import DraftHead
from headway.engine.drafter import Speculator
from headway.engine.prepare import EngineError
from headway.policy.step.drafting import Drafting
from headway.policy.step.request import Sequence
from headway.policy.step.speculation import Proposal
from tests.engine.eager import check_same, draft_always, try_all_drafts
from tests.models import test_eagle as eagle
from tests.models import tiny
from tests.models.test_heads import Reference, save

PROMPTS = [[(7 * i + 3 * j) % 120 + 5 for j in range(5 + 9 * i)] for i in range(10)]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "seed": 7, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.7, "seed": 5, "logit_bias": {9: 5.0}, "stop_token_ids": list(range(0, 130, 29))},
]
WANTED = [SamplingParams(max_tokens=30, **{"ignore_eos": True, **KINDS[i % 4]}) for i in range(10)]
CONFIG = {"method": "mtp", "num_speculative_tokens": 3}


def build(folder: Path, **options: Any) -> LLM:
    given: dict[str, Any] = {
        "device": "cpu", "skip_tokenizer_init": True, "dtype": "float32", "num_threads": 1, "max_num_seqs": 8,
        "kv_cache_memory": 8 << 20, "max_num_batched_tokens": 48, "speculative_config": CONFIG,
    }  # fmt: skip
    return LLM(str(folder), **given | options)


def saved(case: str, folder: Path) -> tuple[Any, dict[str, Any], list[int]]:
    """The reference of a model and head that are saved, what asks for it, and the model's ids of its tokens."""
    if case != "eagle3":
        reference = Reference(case, *save(case, folder, max_position_embeddings=256, eos_token_id=0))
        return reference, CONFIG, list(range(131))
    model = tiny.save("llama", folder, eagle.MODEL)
    of_eagle = eagle.Reference(model, eagle.save(folder / "head"))
    return of_eagle, CONFIG | {"method": "eagle3", "model": str(folder / "head")}, of_eagle.ids.tolist()


@pytest.mark.parametrize(
    ("case", "device"),
    [
        ("deepseek_v3", "cpu"),
        ("qwen3_next", "cpu"),
        ("eagle3", "cpu"),
        pytest.param("qwen3_next", "cuda", marks=pytest.mark.gpu),
        pytest.param("eagle3", "cuda", marks=pytest.mark.gpu),
    ],
)
@torch.inference_mode()
def test_drafts_are_those_of_the_reference_and_tokens_those_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, device: str
) -> None:
    reference, wanted, ids = saved(case, tmp_path)
    # With a prefix cache, results of prompts would be missing the second time.
    llm = build(tmp_path, enable_prefix_caching=False, speculative_config=wanted, device=device)
    core, prompts = llm.engine.core, [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    (speculator,) = core.hooks
    assert isinstance(speculator, Speculator) and speculator.model is not None
    core.hooks = []
    plain = llm.generate(prompts, WANTED)
    core.hooks, model, made = [speculator], speculator.model, dict[tuple[int, ...], list[int]]()
    propose = model.propose

    def noting(sequences: list[Sequence], drafting: Drafting) -> dict[int, Proposal]:
        found, tokens = propose(sequences, drafting), {each.seq_id: tuple(each.tokens) for each in sequences}
        made.update({tokens[seq_id]: proposal.token_ids for seq_id, proposal in found.items()})
        return found

    monkeypatch.setattr(model, "propose", noting)
    counts = try_all_drafts(monkeypatch, llm)
    draft_always(monkeypatch, 3)
    check_same(plain, llm.generate(prompts, WANTED), exact=device == "cpu")
    assert counts["tried"] > 300 and len(made) > 100 and model.kind == wanted["method"]
    for tokens, drafts in list(made.items())[::7]:
        hidden, behind = reference.hidden(list(tokens[:-1])), list(tokens[1:])
        for draft in drafts:
            logits, carried = reference(hidden, behind)
            assert logits[-1].max() - logits[-1][ids.index(draft)] < 1e-3
            hidden, behind = torch.cat([hidden, carried[-1:]]), [*behind, draft]
    core.check()
    assert not model._known and model._blocks.num_free == model._blocks.num_blocks
    assert isinstance(model, DraftHead) and not model.results._of and not model._own
    assert core.scheduler.blocks.usage == 0.0


def test_a_prefix_that_is_known_and_a_pool_that_is_too_small_change_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("glm4_moe", tmp_path, max_position_embeddings=256, eos_token_id=0)
    prompts = [{"prompt_token_ids": PROMPTS[-1][:64] + prompt} for prompt in PROMPTS]
    wanted = [dataclasses.replace(each, n=1 + at % 2) for at, each in enumerate(WANTED)]
    plain = build(tmp_path, speculative_config=None).generate(prompts, wanted)
    llm = build(tmp_path, kv_cache_memory=400 << 10, block_size=4, max_model_len=192)
    counts = try_all_drafts(monkeypatch, llm)
    draft_always(monkeypatch, 3)
    for _ in range(2):
        check_same(plain, llm.generate(prompts, wanted), exact=True)
    assert counts["tried"] > 300
    assert llm.engine.core.scheduler.sequences.num_preemptions > 0
    llm.engine.core.check()


def test_a_checkpoint_without_a_head_ends_the_start_with_one_line(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    with pytest.raises(EngineError, match=r"^speculative_config: method 'mtp': [^\n]* no head for multi-token [^\n]*$"):
        build(tmp_path)
    with pytest.raises(ValueError, match=r"method 'mtp' does not go with several stages \(2\)"):
        build(tmp_path, pipeline_parallel_size=2, num_threads=2)
    with pytest.raises(ValueError, match=r"method 'eagle3' does not go with several ranks \(2\)"):
        build(tmp_path, tensor_parallel_size=2, num_threads=2, speculative_config={"method": "eagle3", "model": "x"})


@pytest.mark.slow
def test_ranks_have_the_drafts_of_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank has the head whole, also where each rank has normed some of the rows that it reads."""
    save("mimo", tmp_path, max_position_embeddings=1024, eos_token_id=0)
    long = [(11 * at) % 120 + 5 for at in range(800)]
    prompts = [{"prompt_token_ids": prompt} for prompt in [*PROMPTS[:3], long]]
    draft_always(monkeypatch, 3)
    found = []
    for ranks in (1, 2):
        options = {"tensor_parallel_size": ranks, "num_threads": ranks, "max_num_batched_tokens": 1024}
        llm = build(tmp_path, enable_prefix_caching=False, **options)
        (speculator,) = llm.engine.core.hooks
        assert isinstance(speculator, Speculator) and speculator.model is not None
        propose, made = speculator.model.propose, dict[tuple[int, ...], list[int]]()

        def noting(
            sequences: list[Sequence],
            drafting: Drafting,
            propose: Any = propose,
            made: dict[tuple[int, ...], list[int]] = made,
        ) -> dict[int, Proposal]:
            tokens, drafts = {each.seq_id: tuple(each.tokens) for each in sequences}, propose(sequences, drafting)
            made.update({tokens[seq_id]: proposal.token_ids for seq_id, proposal in drafts.items()})
            return drafts

        monkeypatch.setattr(speculator.model, "propose", noting)
        try_all_drafts(monkeypatch, llm)
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        found.append(([output.outputs[0].token_ids for output in outputs], made))
        llm.engine.core.check()
    assert found[0] == found[1] and len(found[0][1]) > 20
