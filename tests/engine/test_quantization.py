"""Weights that are rounded while a checkpoint is loaded, and keys and values that are rounded as they are stored."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import LLM, SamplingParams
from headway.bundled import STORY
from headway.cost.values import ModelError
from headway.engine.build import build_engine
from headway.engine.config import EngineConfig
from headway.engine.prepare import EngineError
from headway.flags import flags_of
from headway.kernels.weights import QUANTIZATIONS
from headway.models.quantization import FORMATS
from tests.engine.models import TINY_LATENT, write_config
from tests.models.test_packed_checkpoints import W8A16, save

TEXT = (
    "Once upon a time there was a little fox named Tilly who lived beside a quiet lake. Tilly had a red hat, and she "
    "loved it very much. One morning, Tilly woke up, and the red hat was gone. She looked under the bed. She looked "
    "behind the door. She looked in every corner of the house, but she could not find it.\n\n"
    'Then she went to the garden and met Max, the owl. "Max, have you seen my red hat?" she asked. "No," said Max, '
    '"but I will help you to look for it. Do not be sad." So they looked together, here and there and everywhere.\n\n'
    'At last, Max stopped and pointed. "Look there!" said he. The red hat was lying in the grass, near the barn.'
)
# How much of the plain model's perplexity on this text may be added.
ADDED = {"int8": 0.015, "int8-weight-only": 0.002, "int4": 0.05}
ADDED_BY_CACHE = {("none", "int8"): 0.002, ("int8", "int8"): 0.005, ("none", "fp8"): 0.01}


def perplexity(**settings: str) -> float:
    """The perplexity of TEXT under the bundled model."""
    llm = LLM(str(STORY), dtype="float32", kv_cache_memory=16 << 20, device="cpu", **settings)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([TEXT], params)
    assert output.prompt_logprobs is not None
    logs = [entry.logprob for entry in output.prompt_logprobs if entry is not None]
    assert len(logs) > 30
    return math.exp(-sum(logs) / len(logs))


@pytest.fixture(scope="module")
def plain() -> float:
    return perplexity()


@pytest.mark.parametrize("quantization", ADDED)
def test_the_bundled_model_still_knows_its_text(plain: float, quantization: str) -> None:
    rounded = perplexity(quantization=quantization)
    assert rounded != plain
    assert abs(rounded / plain - 1) < ADDED[quantization]


@pytest.mark.parametrize(("quantization", "cache"), ADDED_BY_CACHE)
def test_the_bundled_model_with_a_rounded_cache(quantization: str, cache: str) -> None:
    exact, rounded = (perplexity(quantization=quantization, kv_cache_dtype=dtype) for dtype in ("auto", cache))
    assert rounded != exact
    assert abs(rounded / exact - 1) < ADDED_BY_CACHE[quantization, cache]


@pytest.mark.parametrize(("dtype", "element"), [("float32", 4), ("bfloat16", 2)])
def test_a_cache_of_8_bits_has_room_for_more(tmp_path: Path, dtype: str, element: int) -> None:
    """A token of TINY_LLAMA: keys and values, 2 layers, 2 heads, 16 elements and the scale of an int8 head."""
    settings: dict[str, Any] = {"dtype": dtype, "load_format": "dummy", "device": "cpu", "kv_cache_memory": 1 << 20}
    folder = write_config(tmp_path)
    dtypes = "auto", "int8", "fp8"
    plain, narrow, float8 = (build_engine(EngineConfig(folder, kv_cache_dtype=d, **settings)) for d in dtypes)
    assert plain.ready.num_blocks == (1 << 20) // (16 * 2 * 2 * 2 * 16 * element)
    assert narrow.ready.num_blocks == (1 << 20) // (16 * 2 * 2 * 2 * (16 + 4))
    assert float8.ready.num_blocks == (1 << 20) // (16 * 2 * 2 * 2 * 16)
    engines = plain, narrow, float8
    assert [engine.ready.kv_cache_dtype for engine in engines] == [dtype, "int8", "float8_e4m3fn"]
    for engine in engines:
        held = sum(t.numel() * t.element_size() for cache in engine.runner.caches for t in cache.tensors)
        assert 0.98 * 2**20 < held <= 2**20
        assert all(t.data_ptr() % 64 == 0 for cache in engine.runner.caches for t in cache.tensors)


def test_an_unknown_scheme(tmp_path: Path) -> None:
    config = EngineConfig(write_config(tmp_path), quantization="int3", load_format="dummy", device="cpu")
    message = (
        "quantization is 'int3'; it must be one of none, int8, int8-weight-only, int4; "
        "the format of a quantised checkpoint is found without it"
    )
    with pytest.raises(ModelError, match=message):
        build_engine(config)


def test_a_checkpoint_s_own_format_may_be_named(tmp_path: Path) -> None:
    """vLLM takes the name too. Any other format is refused."""
    saved = tmp_path / "saved"
    saved.mkdir()
    save(saved, W8A16)
    options: dict[str, Any] = {"device": "cpu", "kv_cache_memory": 2**20, "weight_cache": False}
    named = build_engine(EngineConfig(str(saved), quantization="compressed-tensors", **options))
    unnamed = build_engine(EngineConfig(str(saved), **options))
    for mine, other in zip(named.runner.model.weights.layers, unnamed.runner.model.weights.layers, strict=True):
        assert torch.equal(mine.mixer.o.rows(torch.arange(4)), other.mixer.o.rows(torch.arange(4)))
    with pytest.raises(ModelError, match="quantization is awq, but the checkpoint is in the format compressed-tensors"):
        build_engine(EngineConfig(str(saved), quantization="awq", **options))
    plain = EngineConfig(write_config(tmp_path), quantization="awq", load_format="dummy", device="cpu")
    with pytest.raises(ModelError, match="quantization is awq, but the checkpoint is not quantised; leave it out"):
        build_engine(plain)
    flags = {field.name: flag for field, _, flag in flags_of(EngineConfig)}
    assert flags["quantization"] is not None and flags["quantization"].choices == (*QUANTIZATIONS, *FORMATS)


def test_an_unknown_cache(tmp_path: Path) -> None:
    config = EngineConfig(write_config(tmp_path), kv_cache_dtype="fp4", load_format="dummy", device="cpu")
    with pytest.raises(EngineError, match="kv_cache_dtype is 'fp4'; it must be one of auto, int8, fp8"):
        build_engine(config)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_latents_are_not_kept_in_8_bits(tmp_path: Path, name: str) -> None:
    folder = write_config(tmp_path, **TINY_LATENT)
    config = EngineConfig(folder, kv_cache_dtype=name, load_format="dummy", device="cpu")
    with pytest.raises(EngineError, match=f"kv_cache_dtype is {name}, which attention over latents does not support;"):
        build_engine(config)
