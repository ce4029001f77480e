"""A greedy request yields the same tokens however it is run, and a seeded one too, in any dtype of a CPU."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from headway import LLM, SamplingParams
from headway.engine import logprobs
from headway.engine.logprobs import prompt_logprobs
from headway.engine.messages import AddRequest, PromptLogprobs
from headway.kernels.cpu import choice as cpu_choice
from headway.policy.cache.swap import SwapSpace
from tests.engine.eager import Foreseeing, try_all_drafts
from tests.engine.models import (
    TINY_GEMMA,
    TINY_GEMMA2,
    TINY_GEMMA4,
    TINY_GPT_OSS,
    TINY_LATENT,
    TINY_MIXTURE,
    TINY_OLMO,
    write_config,
)

_FAMILIES = {
    "experts": TINY_MIXTURE,
    "gpt-oss": TINY_GPT_OSS,
    "gemma": TINY_GEMMA,
    "gemma2": TINY_GEMMA2,
    "gemma4": TINY_GEMMA4,
    "olmo": TINY_OLMO,
    "latent": TINY_LATENT,
    "ranks": {},
}

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * j) % 500 + 5 for j in range(9 + 5 * i)] for i in range(20)]


class Model(NamedTuple):
    folder: str
    device: str
    quantization: str
    kv_cache_dtype: str
    dtype: str = "float32"
    family: str = ""

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the cache: keys and values, 2 layers, 2 heads, 16 elements; int8 has a scale.

        A latent and its key have 48 and 16 elements in each layer. Gemma 4 has heads of 16 and of 32 in a layer each.
        """
        size = 4 if self.dtype == "float32" else 2
        if self.family == "gemma4":
            return 2 * 2 * (16 + 32) * size
        if self.family == "latent":
            return 2 * (48 + 16) * size
        return 2 * 2 * 2 * (16 * size if self.kv_cache_dtype == "auto" else 16 + 4)


@pytest.fixture(
    scope="module",
    params=[
        ("cpu", "none", "auto"),
        pytest.param(("cpu", "int8", "auto"), marks=pytest.mark.slow),
        pytest.param(("cpu", "int4", "auto"), marks=pytest.mark.slow),
        pytest.param(("cpu", "none", "int8"), marks=pytest.mark.slow),
        ("cpu", "none", "auto", "bfloat16"),
        pytest.param(
            ("cpu", "none", "auto", "bfloat16", "vectors"),
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(
                    not cpu_choice.has_matrix_tiles(), reason="without matrix tiles, all are on vectors"
                ),
            ],
        ),
        ("cpu", "none", "auto", "float16"),
        ("cpu", "int8", "int8", "bfloat16"),
        ("cpu", "int4", "auto", "bfloat16"),
        ("cpu", "none", "auto", "float32", "experts"),
        pytest.param(("cpu", "none", "auto", "bfloat16", "experts"), marks=pytest.mark.slow),
        ("cpu", "int4", "auto", "bfloat16", "experts"),
        pytest.param(("cpu", "none", "auto", "float32", "gpt-oss"), marks=pytest.mark.slow),
        ("cpu", "none", "auto", "float32", "gemma"),
        pytest.param(("cpu", "none", "auto", "bfloat16", "gemma2"), marks=pytest.mark.slow),
        ("cpu", "none", "auto", "bfloat16", "gemma4"),
        pytest.param(("cpu", "none", "auto", "float32", "olmo"), marks=pytest.mark.slow),
        ("cpu", "none", "auto", "float32", "latent"),
        pytest.param(("cpu", "int8", "auto", "bfloat16", "latent"), marks=pytest.mark.slow),
        pytest.param(("cpu", "none", "auto", "bfloat16", "ranks"), marks=pytest.mark.slow),
        pytest.param(("cuda", "none", "auto"), marks=pytest.mark.gpu),
    ],
    ids="-".join,
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A model with these settings; "vectors" stands for a processor without matrix tiles, or a refusal of the system.

    The name of another family may come last.
    """
    settings, family = request.param, ""
    if settings[-1] in _FAMILIES:
        *settings, family = settings
    with pytest.MonkeyPatch.context() as patch:
        if settings[-1] == "vectors":
            patch.setattr(cpu_choice, "has_matrix_tiles", lambda: False)
            settings = settings[:-1]
        folder = write_config(tmp_path_factory.mktemp("tiny"), **_FAMILIES.get(family, {}))
        yield Model(folder, *settings, family=family)


@functools.lru_cache(maxsize=16)  # one model's
def build(model: Model, **settings: Any) -> LLM:
    """The same engine for the same settings: what it has cached or freed of other tests must not matter either."""
    defaults: dict[str, Any] = {
        "device": model.device,
        "quantization": model.quantization,
        "kv_cache_dtype": model.kv_cache_dtype,
        "dtype": model.dtype,
        "load_format": "dummy",
        "num_threads": 1,
        "kv_cache_memory": 4 << 20,
    }
    if model.family == "ranks":
        defaults |= {"tensor_parallel_size": 2, "num_threads": 2}
    return LLM(model.folder, skip_tokenizer_init=True, **(defaults | settings))


def tokens_of(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    llm.engine.core.scheduler.check()
    assert llm.engine.core.scheduler.blocks.usage == 0.0
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def alone(model: Model) -> list[list[int]]:
    """Each prompt on its own, in one step, without a prefix cache."""
    llm = build(model, enable_prefix_caching=False)
    return [tokens_of(llm, [prompt])[0] for prompt in PROMPTS]


def test_in_a_batch(model: Model, alone: list[list[int]]) -> None:
    assert tokens_of(build(model, max_num_batched_tokens=4096), PROMPTS) == alone
    assert len({tuple(tokens) for tokens in alone}) > 12, (
        "the model says the same to everything: the test shows nothing"
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("budget", [1, pytest.param(3, marks=pytest.mark.slow), 7, 64])
def test_chunked_at_any_size(model: Model, alone: list[list[int]], budget: int) -> None:
    llm = build(model, max_num_batched_tokens=budget, max_num_seqs=min(budget, 4))
    assert tokens_of(llm, PROMPTS[:12] if budget < 7 else PROMPTS) == alone[: 12 if budget < 7 else 20]


@pytest.mark.covering(1)
@pytest.mark.parametrize("block_size", [8, 32])
def test_with_other_block_sizes(model: Model, alone: list[list[int]], block_size: int) -> None:
    assert tokens_of(build(model, block_size=block_size), PROMPTS) == alone


@pytest.mark.covering(1)
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_and_recomputed(model: Model, alone: list[list[int]], caching: bool) -> None:
    # Room for 480 tokens where the batch wants 1,600.
    llm = build(model, kv_cache_memory=480 * model.token_bytes, max_num_seqs=32, enable_prefix_caching=caching)
    assert tokens_of(llm, PROMPTS) == alone
    assert llm.engine.core.scheduler.sequences.num_preemptions > 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_and_swapped(model: Model, alone: list[list[int]], caching: bool) -> None:
    memory = 480 * model.token_bytes
    llm = build(
        model, kv_cache_memory=memory, max_num_seqs=32, enable_prefix_caching=caching, swap_space=memory / 2**30
    )
    host = llm.engine.core.scheduler.host
    assert host is not None and host.space.copy_ns(1) > 0
    host.space = SwapSpace(host.space.num_blocks)  # as if copies took no time
    assert tokens_of(llm, PROMPTS) == alone
    assert 0 < host.counts["in"] <= host.counts["out"] and host.counts["recompute"] == 0


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "way", ["one by one", pytest.param("in a batch", marks=pytest.mark.slow), "preempted", "swapped"]
)
def test_with_drafts(model: Model, alone: list[list[int]], way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {}
    if way in ("preempted", "swapped"):
        settings |= {"kv_cache_memory": 480 * model.token_bytes, "max_num_seqs": 32}
    if way == "swapped":
        settings["swap_space"] = 480 * model.token_bytes / 2**30
    llm = build(model, **settings)
    scheduler = llm.engine.core.scheduler
    if way == "swapped":
        assert scheduler.host is not None
        scheduler.host.space = SwapSpace(scheduler.host.space.num_blocks)  # as if copies took no time
    texts = [prompt + tokens for prompt, tokens in zip(PROMPTS, alone, strict=True)]
    counts = try_all_drafts(monkeypatch, llm, drafter := Foreseeing(texts))
    batches = [[prompt] for prompt in PROMPTS] if way == "one by one" else [PROMPTS]
    assert [tokens for batch in batches for tokens in tokens_of(llm, batch)] == alone
    assert counts["tried"] > counts["accepted"] > 100
    assert tokens_of(llm, PROMPTS) == alone, "of blocks that were registered, all tokens had been accepted"
    assert not drafter.known, "it is told of all ends"


def test_prefix_cached(model: Model, alone: list[list[int]]) -> None:
    llm = build(model)
    assert tokens_of(llm, PROMPTS) == alone
    again = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], GREEDY)
    assert [o.outputs[0].token_ids for o in again] == alone
    assert all(o.num_cached_tokens >= (len(o.prompt_token_ids) - 1) // 16 * 16 for o in again)
    assert sum(o.num_cached_tokens for o in again) > 0


def test_prompt_logprobs_in_chunks(model: Model) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)
    prompts = [{"prompt_token_ids": p} for p in PROMPTS[8:12]]
    whole, parts = (
        build(model, max_num_batched_tokens=budget, max_num_seqs=4).generate(prompts, params) for budget in (64, 7)
    )
    for one, other in zip(whole, parts, strict=True):
        assert one.prompt_logprobs is not None and len(one.prompt_logprobs) == len(one.prompt_token_ids)
        if model.device == "cpu":
            assert one.prompt_logprobs == other.prompt_logprobs
        else:  # its products differ in their last bits with the number of rows
            pairs = zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True)
            assert all(abs(this.logprob - that.logprob) < 1e-4 for this, that in pairs)


def test_all_choices_of_a_greedy_request_are_the_same(model: Model, alone: list[list[int]]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, n=3)
    outputs = build(model).generate([{"prompt_token_ids": p} for p in PROMPTS[:8]], params)
    assert [[choice.token_ids for choice in o.outputs] for o in outputs] == [[tokens] * 3 for tokens in alone[:8]]


def test_a_seed_draws_the_same_whatever_else_is_in_the_batch(model: Model) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=24, ignore_eos=True, seed=42, n=2)
    prompt = {"prompt_token_ids": PROMPTS[3]}
    first = build(model).generate([prompt], params)[0]
    crowd = [{"prompt_token_ids": p} for p in PROMPTS]
    noise = SamplingParams(temperature=1.3, max_tokens=30, ignore_eos=True)
    llm = build(model, max_num_batched_tokens=16, max_num_seqs=16, kv_cache_memory=600 * model.token_bytes)
    mixed = llm.generate([*crowd, prompt], [*[noise] * len(crowd), params])[-1]
    assert [c.token_ids for c in mixed.outputs] == [c.token_ids for c in first.outputs]
    assert first.outputs[0].token_ids != first.outputs[1].token_ids


def test_unseeded_requests_differ(model: Model) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
    one, two = tokens_of(build(model), [PROMPTS[0], PROMPTS[0]], params)
    assert one != two


def test_prompt_logprobs_are_computed_in_their_own_request_s_time(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while all who sample wait for their tokens, and a bounded number of rows of logits at a time."""
    rows: list[int] = []

    def slowly(logits: torch.Tensor, *args: Any) -> PromptLogprobs:
        rows.append(len(logits))
        time.sleep(0.02)
        return prompt_logprobs(logits, *args)

    monkeypatch.setattr(logprobs, "prompt_logprobs", slowly)
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0)
    (output,) = build(model).generate([{"prompt_token_ids": list(range(1, 151))}], params)
    assert rows == [64, 64, 21]
    assert output.timings_ns["prefill_compute"] > 60e6
    assert output.timings_ns["sampling"] < 60e6


def test_what_experts_do_is_counted_whether_a_step_is_recorded_or_not(tmp_path: Path) -> None:
    """Two layers, three of eight experts for a token; a decode at batch 1 reads three in each, and no others."""
    llm = LLM(write_config(tmp_path, **TINY_MIXTURE), skip_tokenizer_init=True, load_format="dummy", device="cpu")
    core, found = llm.engine.core, []
    core.add(AddRequest("one", list(range(2, 12)), SamplingParams(max_tokens=6, ignore_eos=True), []))
    while core.has_work:
        stats = core.step().stats
        found.append((stats.moe_mixtures, stats.moe_expert_tokens, stats.moe_experts_touched))
        assert stats.moe_expert_tokens / 8 <= stats.moe_busiest_expert_tokens <= stats.moe_expert_tokens
    assert found[0][:2] == (2, 60) and 6 <= found[0][2] <= 16
    assert found[1:] == [(2, 6, 6)] * 5


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_ledgers_close_and_name_the_phases(device: str, tmp_path: Path) -> None:
    llm = build(Model(write_config(tmp_path), device, "none", "auto"), max_num_batched_tokens=7, max_num_seqs=4)
    for output in llm.generate([{"prompt_token_ids": p} for p in PROMPTS], GREEDY):
        assert output.timings_ns["decode_compute"] > 0
        assert output.timings_ns["prefill_compute"] > 0
        assert all(ns > 0 for ns in output.timings_ns.values())
