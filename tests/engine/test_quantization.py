"""Weights that are rounded while a checkpoint is loaded."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from headway import LLM, SamplingParams
from headway.bundled import STORY
from headway.engine.build import EngineError, build_engine
from headway.engine.config import EngineConfig
from headway.models.values import ModelError
from tests.engine.models import write_config

TEXT = (
    "The old house stood at the end of the lane, and nobody had lived in it for many years. In the evening the "
    "children came home from the fields, and their mother told them of the time when she was young."
)
# How much of the plain model's perplexity on this text may be added.
ADDED = {"int8": 0.015, "int8-weight-only": 0.002, "int4": 0.05}


def perplexity(**settings: str) -> float:
    """Of TEXT under the bundled model."""
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


def test_an_unknown_scheme(tmp_path: Path) -> None:
    config = EngineConfig(write_config(tmp_path), quantization="int3", load_format="dummy", device="cpu")
    message = "quantization is 'int3'; it must be one of none, int8, int8-weight-only, int4"
    with pytest.raises(ModelError, match=message):
        build_engine(config)


def test_a_gpu_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    config = EngineConfig(write_config(tmp_path), quantization="int8", load_format="dummy", device="cuda")
    with pytest.raises(EngineError, match="quantization is int8; on cuda there is none yet, leave it out"):
        build_engine(config)
