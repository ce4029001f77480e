"""Tests the part of checkpoints that reads text, if they read images too: logits equal those of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from headway.kernels.reference import ReferenceKernels
from headway.models.config import ModelConfig
from headway.models.loading import load_model
from tests.models import tiny
from tests.models.paging import EXECUTIONS

PROMPTS = tiny.prompts([29, 1, 17])
TEXT = tiny.BASE | {"pad_token_id": 0}
EYES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GEMMA_EYES = {each: EYES[each] for each in list(EYES)[:4]} | {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4}
QWEN_EYES = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 48}
SECTIONS = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [4, 2, 2]}

_QWEN3_VL_MOE: tuple[Any, Any, dict[str, Any], dict[str, Any]] = (
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    {"head_dim": 16, "rope_parameters": SECTIONS | {"mrope_interleaved": True}} | tiny.EXPERTS,
    QWEN_EYES | {"deepstack_visual_indexes": [0]},
)
CASES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (Gemma3Config, Gemma3ForConditionalGeneration, tiny.GEMMA3, EYES),
    "gemma4": (Gemma4Config, Gemma4ForConditionalGeneration, tiny.GEMMA4 | tiny.GEMMA4_SHARED, GEMMA_EYES),
    "mistral3": (Mistral3Config, Mistral3ForConditionalGeneration, {"model_type": "mistral"}, EYES),
    "ministral3": (
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        {"model_type": "ministral3", "rope_parameters": tiny.MINISTRAL},
        EYES,
    ),
    "llava": (LlavaConfig, LlavaForConditionalGeneration, {"model_type": "llama"}, EYES),
    "internvl": (InternVLConfig, InternVLForConditionalGeneration, {"model_type": "qwen2"}, EYES),
    "qwen2_5_vl": (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        {"rope_parameters": SECTIONS | {"mrope_section": [2, 2, 2]}},
        QWEN_EYES,
    ),
    "qwen3_vl": (
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        {"head_dim": 16, "rope_parameters": SECTIONS | {"mrope_interleaved": True}},
        QWEN_EYES | {"deepstack_visual_indexes": [0]},
    ),
    "qwen3_vl_moe": _QWEN3_VL_MOE,
    "qwen3_vl_moe_published": _QWEN3_VL_MOE,
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration, tiny.DELTA_NET, QWEN_EYES),
    "kimi_k25": (
        Kimi_K25Config,
        Kimi_K25ForConditionalGeneration,
        {"model_type": "deepseek_v3"} | tiny.LATENT,
        {each: EYES[each] for each in list(EYES)[:4]},
    ),
}


def save(case: str, folder: Path) -> Any:
    config_class, model_class, text, vision = CASES[case]
    config = config_class(text_config=TEXT | text, vision_config=vision)
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * noise)
            elif parameter.dim() < 2 or "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(0.4 * noise)
            else:
                parameter.copy_(noise * 1.2 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    if case == "kimi_k25":  # transformers gives the layers a name that published checkpoints do not have
        tensors = load_file(folder / "model.safetensors")
        save_file(
            {name.replace(".blocks.", ".layers."): each for name, each in tensors.items()}, folder / "model.safetensors"
        )
    if case == "qwen3_vl_moe_published":  # transformers turns the experts around that it loads
        tensors = load_file(folder / "model.safetensors")
        turned = {name: each.transpose(1, 2).contiguous() for name, each in tensors.items() if ".experts." in name}
        save_file(tensors | turned, folder / "model.safetensors")
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_hugging_face(case: str, tmp_path: Path) -> None:
    model = save(case, tmp_path)
    with torch.inference_mode():
        expected = torch.cat([model(input_ids=torch.tensor([prompt])).logits[0] for prompt in PROMPTS])
    assert expected.std() > 0.5
    ours = torch.cat(EXECUTIONS["mixed"](load_model(tmp_path, torch.float32, ReferenceKernels()), PROMPTS))
    assert (ours - expected).abs().max() <= 1e-4 * expected.std()


def test_matrices_that_are_not_packed_are_named_as_in_the_whole_checkpoint() -> None:
    """Kimi K2.5 is published like this: experts are in int4, but not the shared ones, nor attention."""
    plain = ["language_model.lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    text = TEXT | tiny.LATENT | {"model_type": "kimi_k2", "hidden_act": "silu"}
    text["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": plain,
    }
    raw = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    config = ModelConfig.from_dict(raw)
    assert config.packed is not None and not config.packed.covers("lm_head")
    assert config.packed.covers("model.layers.1.mlp.experts.0.up_proj")
    assert not config.packed.covers("model.layers.1.mlp.shared_experts.up_proj")
