"""Attention sinks beyond the trained length: what Hugging Face's layers give over a cache as StreamingLLM keeps it."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from headway.cost.layers import AttentionSinks
from headway.kernels import kernels_for
from headway.kernels.reference import ReferenceKernels
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.loading import load_model
from headway.models.rope import rope_tables
from tests.models import tiny
from tests.models.paging import EXECUTIONS

SINKS = AttentionSinks(4, 17)
PROMPTS = tiny.prompts([90, 3, 17, 41])
TOLERANCE = 2e-4
# Whose layers see all; some have windows; some have no positions; frequencies that are scaled; and latents.
CASES = ["llama_tied", "gemma2", "smollm3", "llama_llama3", "qwen3_moe_all_of_few", "deepseek_v3_dense"]


def streamed(model: PreTrainedModel, prompt: list[int], sinks: AttentionSinks) -> Tensor:
    """Token after token: a full cache gives up the entry behind the sinks, and those after it move up by a place."""
    cache, rows = DynamicCache(), []
    frequencies = model.model.rotary_emb.inv_freq.double()
    rotated = [getattr(layer.self_attn, "use_rope", True) for layer in model.model.layers]
    is_latent = hasattr(model.config, "kv_lora_rank")  # which stands for the keys, and keys with positions for values
    with torch.inference_mode():
        for token in prompt:
            length = cache.get_seq_length()
            if length == sinks.window:
                for layer, is_rotated in zip(cache.layers, rotated, strict=True):
                    parts = []
                    for part, has_positions in ((layer.keys, not is_latent), (layer.values, is_latent)):
                        moved = part[:, :, sinks.sinks + 1 :]
                        moved = turned_back(moved, frequencies) if is_rotated and has_positions else moved
                        parts.append(torch.cat([part[:, :, : sinks.sinks], moved], 2))
                    layer.keys, layer.values = parts
                length -= 1
            at = torch.tensor([[length]])
            rows.append(model(torch.tensor([[token]]), past_key_values=cache, position_ids=at).logits[0, 0].float())
    return torch.stack(rows)


def turned_back(keys: Tensor, frequencies: Tensor) -> Tensor:
    """Rotated keys [..., D] one position earlier."""
    first, second = keys.double().chunk(2, -1)
    cos, sin = frequencies.cos(), frequencies.sin()
    return torch.cat([first * cos + second * sin, second * cos - first * sin], -1).to(keys.dtype)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Case name -> (folder, Hugging Face's logits), made once."""

    @functools.cache
    def make(case: str) -> tuple[Path, list[Tensor]]:
        folder = tmp_path_factory.mktemp(case)
        model = tiny.save(case, folder)
        return folder, [streamed(model, prompt, SINKS) for prompt in PROMPTS]

    return make


def decoder(folder: Path, device: str | None = None) -> Decoder:
    kernels = ReferenceKernels() if device is None else kernels_for(device, torch.float32)
    return load_model(folder, torch.float32, kernels, device or "cpu", max_model_len=128, attention_sinks=SINKS)


def worst(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return (torch.cat(ours) - torch.cat(theirs)).abs().max().item()


@pytest.mark.covering(1)
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_rolling_cache(models: Any, case: str, execution: str) -> None:
    folder, expected = models(case)
    assert expected[0].std() > 0.5
    assert worst(EXECUTIONS[execution](decoder(folder), PROMPTS), expected) <= TOLERANCE


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", CASES)
def test_logits_of_the_kernels_that_serve(models: Any, case: str, device: str) -> None:
    folder, expected = models(case)
    for execution in ("mixed", "token_by_token"):
        assert worst(EXECUTIONS[execution](decoder(folder, device), PROMPTS), expected) <= TOLERANCE


def test_sinks_and_their_positions_matter(models: Any) -> None:
    """Beyond the window; within it the model is as it was."""
    folder, (long, short, *_) = models("llama_tied")
    plain = load_model(folder, torch.float32, ReferenceKernels(), max_model_len=128)
    shape = plain.config.shape
    window = replace(plain.config, caches=replace(shape, sliding_windows=(17,) * shape.layers).caches)
    for each, cache in zip(plain.weights.layers, window.caches, strict=True):
        each.mixer.cache = cache  # type: ignore[union-attr, assignment]
    windowed = Decoder(window, plain.kernels, plain.dtype, plain.device, plain.weights, 128)
    ours = EXECUTIONS["whole"](windowed, PROMPTS[:2])
    assert worst(ours[:1], [long]) > 0.1
    assert worst([ours[0][:17], ours[1]], [long[:17], short]) <= TOLERANCE


def test_scaling_is_that_of_what_a_query_sees(models: Any) -> None:
    """Dynamic scaling, whose base else is that of the context."""
    dynamic = ModelConfig.from_folder(models("llama_tied")[0]).rope
    dynamic = replace(dynamic, kind="dynamic", factor=4.0, original_max_position=64)
    torch.testing.assert_close(rope_tables(dynamic, 4096, seen=64)[0][:64], rope_tables(dynamic, 64)[0])
    assert not torch.allclose(rope_tables(dynamic, 4096)[0][:64], rope_tables(dynamic, 64)[0])


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("gpt_oss", "learnt sinks"),
        ("lfm2", "recurrent layers, which keep no tokens"),
        ("gemma4", "layers of different sizes"),
        ("ministral3", "queries that grow with their position"),
    ],
)
def test_models_without_a_meaning_for_sinks_are_refused(case: str, named: str, tmp_path: Path) -> None:
    tiny.save(case, tmp_path)
    with pytest.raises(ValueError, match=named) as caught:
        ModelConfig.from_folder(tmp_path).with_attention_sinks(SINKS)
    assert "\n" not in str(caught.value) and "attention_sinks" in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((None, 64, 16, 256, 512), "attention_window is 64, which needs --attention-sinks"),
        ((4, None, 1024, 256, 512), "attention_sinks is 4, in whole blocks 1024; it must be between 1 and 512"),
        ((4, 300, 16, 256, 512), "attention_window is 300, but the model was trained for 256 positions"),
        ((20, 32, 16, 256, 512), "attention_window is 32, and sinks take 32 of it"),
        ((4, None, 16, 0, 512), "attention_window is 0, and sinks take 16 of it"),
        (
            (4, None, 16, 256, 256),
            "no sequence has more than 256 tokens, and attention sees 256; raise --max-model-len",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(asked: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        AttentionSinks.of(*asked)


def test_sinks_are_whole_blocks_and_the_window_is_the_trained_length() -> None:
    assert AttentionSinks.of(4, None, 16, 256, 512) == AttentionSinks(16, 256)
    assert AttentionSinks.of(17, 100, 16, 256, 101) == AttentionSinks(32, 100)
    assert AttentionSinks.of(None, None, 16, 256, 512) is None
