"""Embeddings equal transformers' last hidden states, pooled, however their prompts are computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from headway import LLM, SamplingParams
from headway.engine.messages import AddRequest
from headway.outputs.pooling import Pooler
from headway.policy.step.plan import StepPlan
from headway.policy.step.pooling import PoolingParams
from tests.models import tiny

SYSTEM = [(11 * i) % 120 + 3 for i in range(37)]
PROMPTS = [[(7 * i + 3 * j) % 120 + 5 for j in range(1 + 7 * i)] for i in range(9)]
PROMPTS += [SYSTEM + prompt[:15] for prompt in PROMPTS[:8]]
LAST, MEAN = PoolingParams("last", normalize=False), PoolingParams("mean", normalize=False)
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "kv_cache_memory": 8 << 20,
    "max_num_seqs": 5,
}


def load(folder: str, pooling: PoolingParams = LAST, **changes: Any) -> LLM:
    llm = LLM(folder, skip_tokenizer_init=True, **(SETTINGS | changes))
    llm._front.pooler = Pooler(pooling, width=48)
    return llm


def embedded(llm: LLM, prompts: list[list[int]], **asked: Any) -> list[list[float]]:
    found = [each.outputs.embedding for each in llm.embed([{"prompt_token_ids": p} for p in prompts], **asked)]
    llm.engine.core.scheduler.check()
    assert llm.engine.core.scheduler.blocks.usage == 0.0 and not llm.engine.core._pooled
    return found


def states(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model.model(torch.tensor([prompt])).last_hidden_state[0].double()
    return found


def same(ours: list[list[float]], theirs: list[Any], bound: float = 2e-5) -> bool:
    """Within a bound, relative to the vectors' lengths."""
    pairs = [(np.array(mine), np.array(their.tolist())) for mine, their in zip(ours, theirs, strict=True)]
    return all(np.linalg.norm(a - b) <= bound * np.linalg.norm(b) for a, b in pairs)


@pytest.fixture(scope="module", params=["qwen3", "gemma2", "granite", "qwen3_5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, PreTrainedModel]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    return str(folder), tiny.save(request.param, folder, {"max_position_embeddings": 128, "eos_token_id": 0})


@pytest.mark.covering(1)
@pytest.mark.parametrize("pooling", [LAST, MEAN], ids=["last", "mean"])
def test_they_equal_hugging_face_in_whatever_steps(model: tuple[str, PreTrainedModel], pooling: PoolingParams) -> None:
    folder, reference = model
    of = [states(reference, prompt) for prompt in PROMPTS]
    theirs = [each[-1] if pooling is LAST else each.mean(0) for each in of]
    whole = load(folder, pooling, max_num_batched_tokens=4096)
    first = embedded(whole, PROMPTS)
    assert same(first, theirs)
    outputs = whole.embed([{"prompt_token_ids": prompt} for prompt in PROMPTS])
    assert same([each.outputs.embedding for each in outputs], theirs)
    found = sum(each.num_cached_tokens for each in outputs)
    assert (found > 100) == (pooling is LAST), "the last state is that of a cached prefix; a mean needs all states"
    chunked = load(folder, pooling, max_num_batched_tokens=13)
    assert same(embedded(chunked, PROMPTS), theirs)
    assert same([embedded(chunked, [prompt])[0] for prompt in PROMPTS[:4]], theirs[:4])


def test_a_preempted_prompt_begins_again(model: tuple[str, PreTrainedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, reference = model
    llm = load(folder, MEAN, max_num_batched_tokens=16, enable_prefix_caching=False)
    core, planned = llm.engine.core, 0
    schedule = core.scheduler.schedule

    def preempting(now: int) -> StepPlan:
        nonlocal planned
        planned += 1
        ahead = StepPlan()
        if planned == 3:
            for sequence in list(core.scheduler.running):
                assert sequence.num_computed > 0
                core.scheduler.sequences.preempt(sequence, ahead, now)
        plan = schedule(now)
        plan.preempted[:0] = ahead.preempted
        return plan

    monkeypatch.setattr(core.scheduler, "schedule", preempting)
    assert same(embedded(llm, [PROMPTS[8]]), [states(reference, PROMPTS[8]).mean(0)])
    assert core.scheduler.sequences.num_preemptions == 1


def test_a_step_that_fails_leaves_the_others_as_they_are(
    model: tuple[str, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reference = model
    llm = load(folder, MEAN, max_num_batched_tokens=64)
    run = llm.engine.runner.run

    def failing(plan: StepPlan) -> Any:
        outcome = run(plan)
        if any(sequence.tokens == PROMPTS[3] for sequence in llm.engine.runner._known.values()):
            scheduled = {item.seq_id for item in plan.scheduled}
            known = llm.engine.runner._known
            if any(known[seq_id].tokens == PROMPTS[3] for seq_id in scheduled):
                raise RuntimeError("made to fail")
        return outcome

    monkeypatch.setattr(llm.engine.runner, "run", failing)
    with pytest.raises(ValueError, match="the engine failed on this request"):
        llm.embed([{"prompt_token_ids": PROMPTS[3]}])
    now, core = 0, llm.engine.core
    for number, prompt in enumerate(PROMPTS[:6]):
        core.add(AddRequest(f"r{number}", prompt, SamplingParams(), [], sent_ns=now, pooling=MEAN))
    vectors: dict[str, list[float]] = {}
    failed: list[str] = []
    while core.has_work:
        for output in core.step().outputs:
            if output.vector is None:
                failed.append(output.request_id)
            else:
                vectors[output.request_id] = np.frombuffer(output.vector, np.float32).tolist()
    assert failed == ["r3"]
    others = [number for number in range(6) if number != 3]
    assert same([vectors[f"r{n}"] for n in others], [states(reference, PROMPTS[n]).mean(0) for n in others])


def test_beside_streams_and_with_the_ledger_closed(model: tuple[str, PreTrainedModel]) -> None:
    """Generated tokens are those without embeddings beside them; every phase of both sums to the whole."""
    folder, reference = model
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    llm = load(folder, LAST, max_num_batched_tokens=32)
    expected = [each.outputs[0].token_ids for each in llm.generate([{"prompt_token_ids": p} for p in PROMPTS], greedy)]
    core = load(folder, LAST, max_num_batched_tokens=32).engine.core
    began = core._clock()
    for number, prompt in enumerate(PROMPTS):
        core.add(AddRequest(f"t{number}", prompt, greedy, [], arrival_ns=began, sent_ns=began))
        core.add(AddRequest(f"e{number}", prompt, greedy, [], arrival_ns=began, sent_ns=began, pooling=LAST))
    tokens: dict[str, list[int]] = {}
    vectors: dict[str, list[float]] = {}
    while core.has_work:
        for output in core.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.vector is not None:
                vectors[output.request_id] = np.frombuffer(output.vector, np.float32).tolist()
                assert output.finish_reason == "stop" and output.stop_token_id is None
            if output.timings is not None:
                assert sum(output.timings.phases_ns.values()) == output.timings.ended_ns - began
    assert [tokens[f"t{number}"] for number in range(len(PROMPTS))] == expected
    assert not any(tokens[f"e{number}"] for number in range(len(PROMPTS)))
    of = [vectors[f"e{number}"] for number in range(len(PROMPTS))]
    assert same(of, [states(reference, prompt)[-1] for prompt in PROMPTS])
    core.scheduler.check()


def test_a_cut_is_normalised_behind_it(model: tuple[str, PreTrainedModel]) -> None:
    folder, reference = model
    llm = load(folder, PoolingParams())
    last = states(reference, PROMPTS[5])[-1]
    assert same(embedded(llm, [PROMPTS[5]]), [last / last.norm()])
    assert same(embedded(llm, [PROMPTS[5]], dimensions=10), [last[:10] / last[:10].norm()])
    with pytest.raises(ValueError, match="dimensions is 49; it must be at least 1 and at most 48"):
        llm.embed([1], dimensions=49)


def test_logits_of_named_tokens(model: tuple[str, PreTrainedModel]) -> None:
    folder, reference = model
    llm = load(folder, PoolingParams(token_ids=(17, 5)))
    theirs = [tiny.logits(reference, prompt)[-1][[17, 5]] for prompt in PROMPTS]
    assert same(embedded(llm, PROMPTS), theirs, 1e-4)
    bad = load(folder, PoolingParams(token_ids=(131,)))
    with pytest.raises(ValueError, match="token_ids has token id 131; the model's vocabulary has ids 0 to 130"):
        bad.embed([1, 2])


def test_a_prompt_may_fill_the_context_and_no_more(model: tuple[str, PreTrainedModel]) -> None:
    folder, reference = model
    llm = load(folder, LAST, max_num_batched_tokens=50)
    whole = [(5 * j) % 120 + 3 for j in range(128)]
    assert same(embedded(llm, [whole]), [states(reference, whole)[-1]])
    with pytest.raises(ValueError, match="so a prompt may have at most 128"):
        llm.embed([[*whole, 1]])


def test_states_that_are_no_numbers_end_that_request_alone(
    model: tuple[str, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reference = model
    llm = load(folder, MEAN, max_num_batched_tokens=16)
    forward = llm.engine.runner._forward

    def poisoned(step: Any, scheduled: Any, sequences: Any) -> torch.Tensor:
        hidden = forward(step, scheduled, sequences).clone()
        if sequences[0].tokens == PROMPTS[6]:
            hidden[0] = float("nan")
        return hidden

    monkeypatch.setattr(llm.engine.runner, "_forward", poisoned)
    with pytest.raises(ValueError, match="were not numbers"):
        llm.embed([PROMPTS[6]])
    assert same(embedded(llm, [PROMPTS[5]]), [states(reference, PROMPTS[5]).mean(0)])


# --- checkpoints as embedders are published ---------------------------------------------------------


def without_head(source: Path, folder: Path, architecture: str | None) -> Path:
    """The same model as sentence-transformers saves it: no output layer, and no `model.` in names."""
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    kept = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(kept, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    if architecture is not None:
        config["architectures"] = [architecture]
    else:
        (folder / "modules.json").write_text("[]")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("architecture", ["MistralModel", None])
def test_a_model_without_output_layer_embeds_and_does_not_generate(tmp_path: Path, architecture: str | None) -> None:
    reference = tiny.save("mistral", tmp_path / "whole")
    llm = load(str(without_head(tmp_path / "whole", tmp_path / "bare", architecture)))
    prompts = [prompt for prompt in PROMPTS if len(prompt) < 60]
    assert same(embedded(llm, prompts), [states(reference, prompt)[-1] for prompt in prompts])
    with pytest.raises(ValueError, match="no output layer; it gives embeddings only"):
        llm.generate([prompts[3]])
