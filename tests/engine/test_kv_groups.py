"""Engines whose windowed layers keep their windows say what engines that keep everything say, in fewer bytes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import LLM, SamplingParams
from headway.cost.memory import kv_cache_bytes
from headway.engine import build as building
from headway.engine.messages import AddRequest
from headway.policy.cache.swap import SwapSpace
from headway.policy.step.options import SchedulingOptions
from headway.simulator.deployed import ServerOptions, deploy
from tests.engine.models import TINY_GEMMA, TINY_GEMMA4, TINY_GPT_OSS, write_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * j) % 500 + 5 for j in range(9 + 11 * i)] for i in range(12)]
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt-oss": TINY_GPT_OSS,
    # As in most sizes of Gemma 3, one group has fewer layers than it has room for.
    "gemma": TINY_GEMMA | {"num_hidden_layers": 11, "sliding_window_pattern": 4},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 37},
    "sinks": {"max_position_embeddings": 117},
    # Local layers are half as large as others, so two of them are in a place, and one alone; the last three have none.
    "gemma4": TINY_GEMMA4
    | {"num_hidden_layers": 10, "num_kv_shared_layers": 3}
    | {
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) + ["sliding_attention"] * 3 + ["full_attention"]
    },
    # Here the others are half as large.
    "gemma4-moe": TINY_GEMMA4
    | {"num_hidden_layers": 6, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "head_dim": 16}
    | {"num_key_value_heads": 4, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    | {"layer_types": ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] + ["full_attention"] * 2},
}
GROUPS = {
    "gpt-oss": [[1], [0]],
    "gemma": [[3, 7], [0, 1], [2, 4], [5, 6], [8, 9], [10]],
    "mistral": [[0, 1]],
    "sinks": [[0, 1]],
    "gemma4": [[5, 9], [0, 1], [2, 3], [4, 6, 7, 8]],
    "gemma4-moe": [[2, 4], [5], [0], [1], [3]],
}
# Half of the families are tested in each dtype, and the others in that with the slow tests: caches are divided alike.
DTYPES = dict(zip(FAMILIES, ("bfloat16", "float32") * 3, strict=True))
# Elements of a token's keys and values in a block: 2 heads of 16, in as many layers as a group has room for.
ELEMENTS = {"gpt-oss": 64, "gemma": 128, "mistral": 128, "sinks": 128, "gemma4": 128, "gemma4-moe": 128}
# Sinks that are as many in blocks of any size here.
SINKS = {"attention_sinks": 80, "max_model_len": 256}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@functools.lru_cache(maxsize=8)
def build(folder: str, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {"load_format": "dummy", "num_threads": 1, "kv_cache_memory": 8 << 20, "device": "cpu"}
    return LLM(folder, skip_tokenizer_init=True, **(defaults | sinks_of(folder) | settings))


def sinks_of(folder: str) -> dict[str, Any]:
    return SINKS if Path(folder).name.startswith("sinks") else {}


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_config(tmp_path_factory.mktemp(family), **FAMILIES[family])


@pytest.fixture(scope="module", params=["one dtype", pytest.param("the other", marks=pytest.mark.slow)])
def dtype(family: str, request: pytest.FixtureRequest) -> str:
    first = DTYPES[family]
    return first if request.param == "one dtype" else next(each for each in DTYPES.values() if each != first)


@pytest.fixture(scope="module")
def expected(folder: str, dtype: str) -> list[list[int]]:
    """What an engine says that keeps everything."""
    with pytest.MonkeyPatch.context() as patch:
        for name, nothing in (("seen_windows", []), ("kv_cache_groups", ())):
            patch.setattr(building, name, lambda *_, nothing=nothing: nothing)
        options = {"skip_tokenizer_init": True, "load_format": "dummy", "num_threads": 1, "dtype": dtype}
        llm = LLM(folder, device="cpu", **(options | sinks_of(folder)))  # type: ignore[arg-type]
    assert not llm.engine.core.scheduler.blocks.groups
    return tokens_of(llm)


def tokens_of(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """What comes of prompts, over memory that holds no numbers but where windows have passed."""
    core = llm.engine.core
    core.scheduler.blocks.reset_prefix_cache()
    for cache in core.executor._paged:  # type: ignore[attr-defined]
        for tensor in cache.tensors if core.scheduler.blocks.groups else ():
            assert not tensor[-1].any()
            tensor[:-1] = torch.nan
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY)
    core.scheduler.check()
    assert core.scheduler.blocks.usage == 0.0
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 7, "max_num_seqs": 4},
        {"block_size": 8, "max_num_batched_tokens": 64, "max_num_seqs": 8},
        {"block_size": 5},
    ],
    ids=str,
)
def test_nothing_changes_what_is_said(
    folder: str, dtype: str, expected: list[list[int]], settings: dict[str, Any]
) -> None:
    assert tokens_of(build(folder, dtype=dtype, **settings)) == expected


@pytest.mark.covering(1)
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_preempted(folder: str, family: str, dtype: str, expected: list[list[int]], swap: bool, caching: bool) -> None:
    least = {"gpt-oss": 20, "gemma": 52, "mistral": 12, "sinks": 15, "gemma4": 34, "gemma4-moe": 47}[family]
    block = ELEMENTS[family] * 16 * (4 if dtype == "float32" else 2)
    memory = (least + 8) * block
    sizes = {"kv_cache_memory": memory, "max_num_seqs": 12, "max_num_batched_tokens": 32}
    llm = build(folder, dtype=dtype, swap_space=memory / 2**30 if swap else 0.0, enable_prefix_caching=caching, **sizes)
    scheduler = llm.engine.core.scheduler
    if scheduler.host is not None:
        scheduler.host.space = SwapSpace(scheduler.host.space.num_blocks)  # as if copies took no time
    assert tokens_of(llm) == expected
    assert scheduler.sequences.num_preemptions > 0
    assert scheduler.host is None or scheduler.host.counts["in"] > 0


def test_prefixes_are_found(folder: str, dtype: str, expected: list[list[int]]) -> None:
    llm = build(folder, dtype=dtype)
    assert tokens_of(llm) == expected
    talks = [prompt + said for prompt, said in zip(PROMPTS, expected, strict=True)]
    again = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], GREEDY)
    assert [o.outputs[0].token_ids for o in again] == expected
    assert all(o.num_cached_tokens == (len(o.prompt_token_ids) - 1) // 16 * 16 for o in again)
    further = llm.generate([{"prompt_token_ids": [*talk[:-1], 7]} for talk in talks], GREEDY)
    assert all(o.num_cached_tokens == (len(o.prompt_token_ids) - 1) // 16 * 16 for o in further)
    alone = build(folder, dtype=dtype, enable_prefix_caching=False)
    anew = alone.generate([{"prompt_token_ids": [*talk[:-1], 7]} for talk in talks], GREEDY)
    assert [o.outputs[0].token_ids for o in further] == [o.outputs[0].token_ids for o in anew]


def test_all_choices_of_a_greedy_request_are_the_same(folder: str, dtype: str, expected: list[list[int]]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, n=3)
    for caching in (False, True):
        llm = build(folder, dtype=dtype, enable_prefix_caching=caching)
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS[3:6]], params)
        assert [[c.token_ids for c in o.outputs] for o in outputs] == [[tokens] * 3 for tokens in expected[3:6]]


def test_a_sequence_holds_the_bytes_that_the_cost_model_counts(folder: str, family: str) -> None:
    llm = build(folder, dtype="bfloat16", block_size=4)
    core = llm.engine.core
    shape = core.executor.model.config.shape  # type: ignore[attr-defined]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    core.add(AddRequest("one", PROMPTS[9], params, []))
    block = ELEMENTS[family] * 4 * 2
    while core.has_work:
        core.step()
        for sequence in core.scheduler.running:
            if sequence.output_len > 4:
                counted = kv_cache_bytes(shape, len(sequence.tokens) - 1, block_size=4, rolling=True)
                assert len(sequence.held_blocks) * block == counted


def test_the_pool_is_as_large_as_its_groups_say(folder: str, family: str) -> None:
    llm = build(folder, dtype="bfloat16", enable_prefix_caching=False)
    core = llm.engine.core
    executor, blocks = core.executor, core.scheduler.blocks
    groups = GROUPS[family]
    assert [cache.group for cache in executor.caches] == [  # type: ignore[attr-defined]
        next(number for number, group in enumerate(groups) if layer in group)
        for layer in range(len(executor.caches))  # type: ignore[attr-defined]
    ]
    held = sum(tensor.nbytes for cache in executor._paged for tensor in cache.tensors)  # type: ignore[attr-defined]
    assert held == (blocks.num_blocks + 1) * ELEMENTS[family] * 16 * 2


def test_sequences_are_longer_than_the_model_was_trained_for(tmp_path: Path) -> None:
    """This takes sinks; and sequences have no more blocks than the window has."""
    folder = write_config(tmp_path / "sinks", **FAMILIES["sinks"])
    with pytest.raises(ValueError, match="between 2 and 117; more needs --attention-sinks"):
        build(folder, attention_sinks=None)
    with pytest.raises(ValueError, match="no sequence has more than 117 tokens, and attention sees 117"):
        build(folder, max_model_len=None)
    with pytest.raises(ValueError, match="attention_window is 60, which needs --attention-sinks"):
        build(folder, attention_sinks=None, max_model_len=None, attention_window=60)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "kv_cache_memory": 1 << 19}
    llm = build(folder, attention_sinks=4, max_model_len=4096, **sizes)
    core, prompt = llm.engine.core, [(7 * i) % 500 + 5 for i in range(2000)]
    assert core.scheduler.blocks.most_blocks(4096) == 1 + -(-(100 + 32) // 16) + 1 + 7
    asked = ServerOptions(model=folder, hardware="H100-SXM", attention_sinks=4, max_model_len=4096)
    simulated = deploy(asked, SchedulingOptions(max_num_batched_tokens=32, max_num_seqs=4))
    assert simulated.scheduler.blocks.groups == core.scheduler.blocks.groups
    (output,) = llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=50, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 50
    core.scheduler.check()
