"""A draft model beside the model: the same tokens in fewer steps, a cache that leaks nothing, and what is refused."""

from __future__ import annotations

import json
import logging
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway import LLM, SamplingParams
from headway.bundled import DRAFT, STORY
from headway.engine.draft_model import DraftModel
from headway.engine.drafter import Speculator
from headway.engine.layout import StepLayout
from headway.engine.messages import AddRequest, SequenceOutput
from headway.kernels.interface import Chain, StepGeometry
from headway.kernels.reference import ReferenceKernels
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.step.drafting import BESIDE, Drafting
from headway.policy.step.request import Resumed, Sequence
from headway.policy.step.speculation import Proposal
from tests.engine.eager import check_same, check_same_texts, draft_always, try_all_drafts
from tests.engine.models import write_config
from tests.engine.test_drafts import PROMPTS, WANTED
from tests.policy.simulation import make_sequence

SAID = "Tell me a story about a fox and a lost key."
BLOCK, SEATS, LONGEST, VOCAB = 4, 3, 40, 97


class Contexts:
    """A model whose next token is a function of all tokens that it finds in its cache, and so of nothing else."""

    def __init__(self, num_blocks: int) -> None:
        self.memory = [-1] * (num_blocks * BLOCK)

    def forward(self, token_ids: Tensor, step: StepGeometry, caches: Any) -> Tensor:
        for slot, token in zip(step.slots.tolist(), token_ids.tolist(), strict=True):
            self.memory[slot] = token
        found: list[int] = []
        rows = zip(step.block_tables.tolist(), step.context_lens.tolist(), step.query_lens_host, strict=False)
        for table, context, count in rows:
            slots = [table[at // BLOCK] * BLOCK + at % BLOCK for at in range(context)]
            found += [
                follows([self.memory[slot] for slot in slots[:end]]) for end in range(context - count + 1, context + 1)
            ]
        return torch.tensor(found).unsqueeze(1)

    def chain(self, token_ids: Tensor, step: StepGeometry, caches: Any, chain: Chain) -> list[list[tuple[int, float]]]:
        tokens, made = token_ids.tolist(), list[list[tuple[int, float]]]([] for _ in token_ids)
        for at in range(chain.most):
            for row, (slot, table) in enumerate(zip(step.slots.tolist(), step.block_tables.tolist(), strict=False)):
                self.memory[slot + at] = tokens[row]
                context = range(int(step.context_lens[row]) + at)
                tokens[row] = follows([self.memory[table[each // BLOCK] * BLOCK + each % BLOCK] for each in context])
                made[row].append((tokens[row], 0.9))
        return made

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden[:, 0], VOCAB) * 5.0


def follows(tokens: list[int]) -> int:
    return hash(tuple(tokens)) % (VOCAB - 1)


def draft_model(num_blocks: int) -> tuple[DraftModel, KVBlocks]:
    model = Contexts(num_blocks)
    runner: Any = SimpleNamespace(
        model=model, device=torch.device("cpu"), decodes=None, caches=None, vocab_size=VOCAB, recover=lambda: None,
        layout=StepLayout(torch.device("cpu"), BLOCK, SEATS, LONGEST),
        kernels=SimpleNamespace(take=lambda table, rows: table[rows], likeliest=ReferenceKernels().likeliest),
    )  # fmt: skip
    blocks = KVBlocks(num_blocks, BLOCK)
    return DraftModel(runner, blocks, LONGEST, VOCAB - 1), blocks


class Wanting(Drafting):
    """Drafts for some sequences of those that are there, some tokens in advance."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(8)
        self.rng = rng

    def begin(self, lacks: Any, output_lens: Any) -> tuple[dict[int, int], list[int]]:
        rng = self.rng
        advance = {n: rng.randrange(1, count) for n, count in lacks.items() if count > BESIDE and rng.random() < 0.8}
        return advance, [n for n, count in lacks.items() if count - advance.get(n, 0) <= BESIDE and rng.random() < 0.8]

    def chain(self, seq_ids: Any) -> tuple[int, float, float, list[float]]:
        return self.rng.randrange(8), 0.0, 0.0, [1.0] * len(seq_ids)

    def chained(self, confidences: Any, took_ns: int) -> None:
        assert all(len(each) > 1 for each in confidences.values())

    def goes_on(self, confidences: Any) -> list[int]:
        assert all(0.5 < confidence < 1 for confidence in confidences.values())
        return [n for n in confidences if self.rng.random() < 0.7]


@given(st.integers(0, 2**32), st.integers(3, 40))
def test_drafts_follow_from_the_tokens_alone_and_no_block_leaks(seed: int, num_blocks: int) -> None:
    """Whichever drafts are accepted, whoever shares a prefix, is left out, ends or is out of blocks."""
    rng = random.Random(seed)
    model, blocks = draft_model(num_blocks)
    drafting = Wanting(rng)
    sequences: list[Sequence] = []
    number, made = 0, 0
    for _ in range(60):
        if len(sequences) < SEATS and rng.random() < 0.5:
            prompt = [at % 5 for at in range(rng.randrange(1, LONGEST - 4))] + [rng.randrange(9)]
            sequence = make_sequence(str(number), prompt, 8)
            sequence.seq_id, sequence.cache_salt = number, rng.choice(["", "salt"])
            sequence.tokens.append(rng.randrange(VOCAB - 1))
            sequences.append(sequence)
            number += 1
        asked = [each for each in sequences if rng.random() < 0.8]
        proposals = model.propose(asked, drafting)
        for sequence in asked:
            tokens, proposal = sequence.tokens, proposals.get(sequence.seq_id)
            if proposal is not None:
                made += 1
                assert len(tokens) + len(proposal.token_ids) <= LONGEST
                for at, draft in enumerate(proposal.token_ids):
                    assert draft == follows(tokens + proposal.token_ids[:at])
                assert len(proposal.confidences) == len(proposal.token_ids)
                tokens += proposal.token_ids[: rng.randrange(len(proposal.token_ids) + 1)]
            tokens.append(rng.randrange(VOCAB - 1))
        for _ in model.check_by_parts():
            pass
        for sequence in list(sequences):
            if rng.random() < 0.1:
                sequences.remove(sequence)
                model.forget(sequence.seq_id)
    assert made or num_blocks < 12
    for sequence in sequences:
        model.forget(sequence.seq_id)
    model.forget(10_000)
    assert blocks.num_free == num_blocks
    for _ in model.check_by_parts():
        pass


def test_a_token_that_the_draft_does_not_know_has_no_drafts() -> None:
    model, _ = draft_model(8)
    sequences = [make_sequence("0", [1, VOCAB - 1, 3], 8), make_sequence("1", [1] * LONGEST, 8)]
    for number, sequence in enumerate(sequences):
        sequence.seq_id = number
    assert model.propose(sequences, Wanting(random.Random(1))) == {}


# --- a whole engine ---------------------------------------------------------------------------------


def pair(tmp_path: Path, draft: dict[str, Any] | None = None, longest: int = 256, **options: Any) -> LLM:
    """A random model, and a draft: the same model, or another."""
    folders = [tmp_path / "model", tmp_path / "draft"]
    for folder, changes in zip(folders, ({}, draft or {}), strict=True):
        folder.mkdir(exist_ok=True)
        write_config(folder, max_position_embeddings=longest, **changes)
    given: dict[str, Any] = {
        "device": "cpu", "skip_tokenizer_init": True, "load_format": "dummy", "dtype": "float32", "num_threads": 1,
        "kv_cache_memory": 8 << 20, "max_num_seqs": 16, "max_num_batched_tokens": 48,
    }  # fmt: skip
    wanted = {"method": "draft_model", "model": str(folders[1]), "num_speculative_tokens": 5}
    return LLM(str(folders[0]), **given | options, speculative_config=wanted)


SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}


@pytest.mark.parametrize(
    ("draft", "options"),
    [
        ({}, {}),
        (SMALL, {}),
        ({}, {"enable_prefix_caching": False}),
        ({}, {"quantization": "int8", "dtype": "bfloat16"}),
        ({}, {"quantization": "int4"}),
        ({}, {"kv_cache_dtype": "int8"}),
        ({"sliding_window": 20, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}, {}),
        ({}, {"kv_cache_memory": 400 << 10, "block_size": 4, "max_model_len": 128}),
        pytest.param({}, {"device": "cuda"}, marks=pytest.mark.gpu),
    ],
    ids=["itself", "small", "uncached", "int8", "int4", "int8-cache", "windows", "preempted", "cuda"],
)
def test_tokens_and_logprobs_are_those_without_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draft: dict[str, Any], options: dict[str, Any]
) -> None:
    llm = pair(tmp_path, draft, **options)
    core = llm.engine.core
    (speculator,) = core.hooks
    assert isinstance(speculator, Speculator)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    core.hooks = []
    plain = llm.generate(prompts, WANTED)
    core.hooks = [speculator]
    counts = try_all_drafts(monkeypatch, llm)
    draft_always(monkeypatch)
    drafted = llm.generate(prompts, WANTED)
    check_same(plain, drafted, exact=options.get("device") != "cuda")
    assert all("draft" in output.timings_ns for output in drafted)
    assert counts["tried"] > 100
    if not draft and "quantization" not in options:
        assert counts["accepted"] > 90, "drafts of the model itself are right where tokens are the likeliest"
    core.check()
    model = speculator.model
    assert model is not None and not model._known and model._blocks.num_free == model._blocks.num_blocks
    assert core.scheduler.blocks.usage == 0.0


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "int8", "block_size": 32}], ids=str)
def test_a_chain_makes_the_drafts_that_passes_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Also beyond the tokens that attention takes as one part, and at the ends of blocks."""
    llm = pair(tmp_path, SMALL, 640, max_num_batched_tokens=512, **options)
    (speculator,) = llm.engine.core.hooks
    assert isinstance(speculator, Speculator) and speculator.model is not None
    model, chains = speculator.model, list[tuple[int, int]]()
    assert model._has_chains
    try_all_drafts(monkeypatch, llm)
    draft_always(monkeypatch, 5)
    propose, chain, made = model.propose, model._chain, dict[tuple[int, ...], Proposal]()

    def noting(sequences: list[Sequence], drafting: Drafting) -> dict[int, Proposal]:
        tokens, found = {each.seq_id: tuple(each.tokens) for each in sequences}, propose(sequences, drafting)
        made.update({tokens[seq_id]: proposal for seq_id, proposal in found.items()})
        return found

    def counting(*given: Any) -> list[list[tuple[int, float]]]:
        drafts = chain(*given)
        chains.append((len(drafts), len(drafts[0]) if drafts else 0))
        return drafts

    monkeypatch.setattr(model, "propose", noting)
    monkeypatch.setattr(model, "_chain", counting)
    prompts = [{"prompt_token_ids": [(7 * at) % 90 + first for at in range(490)]} for first in (5, 11, 17)]
    for has_chains in (True, False):
        model._has_chains = has_chains
        for count in (1, 3):
            wanted = [SamplingParams(temperature=0.0, max_tokens=50 - at, ignore_eos=True) for at in range(count)]
            llm.generate(prompts[:count], wanted)
        if has_chains:
            by_chain, made = made, {}
    assert by_chain.keys() == made.keys() and len(made) > 30 and {(1, 5), (3, 5)} <= set(chains)
    for tokens, proposal in made.items():
        assert by_chain[tokens].token_ids == proposal.token_ids
        assert by_chain[tokens].confidences == pytest.approx(proposal.confidences, rel=1e-6)


@pytest.fixture(scope="module")
def stories() -> tuple[LLM, LLM]:
    """The bundled model without drafts, and with those of the bundled draft."""
    options: dict[str, Any] = {"device": "cpu", "kv_cache_memory": 32 << 20, "num_threads": 1, "max_num_seqs": 8}
    wanted = {"method": "draft_model", "model": "headway/story-draft", "num_speculative_tokens": 6}
    return LLM(str(STORY), **options), LLM(str(STORY), speculative_config=wanted, **options)


@pytest.mark.parametrize("stop", [[" the"], [". The"], ["fox was", "a little"]])
def test_stop_strings_and_choices(stories: tuple[LLM, LLM], stop: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, drafted = stories
    params = SamplingParams(temperature=0.0, max_tokens=60, stop=stop, n=2)
    before = plain.generate([SAID, SAID[8:]], params)
    counts = try_all_drafts(monkeypatch, drafted)
    draft_always(monkeypatch)
    check_same_texts(before, drafted.generate([SAID, SAID[8:]], params))
    assert counts["accepted"] > 0


def test_a_request_that_goes_on_after_a_crash_has_the_same_tokens(
    stories: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, drafted = stories
    assert plain.tokenizer is not None
    prompt = plain.tokenizer.encode(SAID)
    params = SamplingParams(temperature=0.8, max_tokens=40, seed=5, ignore_eos=True)
    expected = plain.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0].token_ids
    try_all_drafts(monkeypatch, drafted)
    draft_always(monkeypatch)
    core = drafted.engine.core
    for known in (0, 1, 13, 39):
        core.add(AddRequest("one", prompt, params, [], resumed=[Resumed(0, expected[:known])]))
        outputs: list[SequenceOutput] = []
        while core.has_work:
            outputs += core.step().outputs
        assert expected[:known] + [token for each in outputs for token in each.token_ids] == expected
    core.check()


def test_a_draft_that_fails_ends_no_request(
    stories: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, drafted = stories
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    (expected,) = plain.generate(SAID, params)
    (speculator,) = drafted.engine.core.hooks
    assert isinstance(speculator, Speculator)
    model = speculator.model
    assert model is not None
    try_all_drafts(monkeypatch, drafted)
    draft_always(monkeypatch)
    monkeypatch.setattr(speculator, "model", model)
    runs = iter(range(100))

    def laid_out(plan: Any) -> Any:
        if next(runs) == 7:
            raise RuntimeError("broken")
        return DraftModel._laid_out(model, plan)

    monkeypatch.setattr(model, "_laid_out", laid_out)
    with caplog.at_level(logging.ERROR, "headway.engine"):
        (output,) = drafted.generate(SAID, params)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert caplog.messages == ["the draft model failed, and is used no more; answers go on without it"]
    assert speculator.model is None and model._blocks.num_free == model._blocks.num_blocks


def test_an_engine_drafts_where_it_pays(stories: tuple[LLM, LLM]) -> None:
    """Whether it does depends on the machine; the tokens, the ledger and the pool do not."""
    plain, drafted = stories
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    (expected,) = plain.generate(SAID, params)
    for _ in range(3):
        (output,) = drafted.generate(SAID, params)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    drafted.engine.core.check()


# --- what is refused --------------------------------------------------------------------------------


def refused(draft: Path | str, model: Path = STORY) -> str:
    with pytest.raises(ValueError, match=r"^speculative_config: model ") as error:
        LLM(str(model), kv_cache_memory=8 << 20, speculative_config={"model": str(draft)})
    assert "\n" not in str(error.value)
    return str(error.value)


def test_another_tokenizer_is_refused_by_what_differs(tmp_path: Path) -> None:
    shutil.copytree(DRAFT, tmp_path, dirs_exist_ok=True)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    token = next(token for token, at in content["model"]["vocab"].items() if at == 700)
    del content["model"]["vocab"][token]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    said = refused(tmp_path)
    assert f"it has another tokenizer: {token!r} is no token in it, and token 700 in the model; give a draft" in said
    (tmp_path / "tokenizer.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 500}))
    assert "it has a vocabulary of 500 tokens and the model one of 8192" in refused(tmp_path)


def test_what_is_no_draft_model_is_refused(tmp_path: Path) -> None:
    assert "no such folder" in refused("/nowhere/at all")
    (tmp_path / "config.json").write_text("{")
    assert "config.json" in refused(tmp_path)
