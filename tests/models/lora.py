"""Adapters of tiny models in peft's format, and the models with them merged into their weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel


def targets(model: PreTrainedModel) -> list[str]:
    """The linear layers of a decoder that can have adapters: not experts, and not what makes keys of latents."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [name for name in names if ".layers." in name and ".experts." not in name and "kv_b_proj" not in name]


def save(
    folder: Path, model: PreTrainedModel, rank: int = 4, seed: int = 0, only: str = "", **settings: Any
) -> dict[str, Tensor]:
    """Write a random adapter; returns what it adds to the weight of each layer.

    Args:
        only: a part of the names of the layers that it has.
    """
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "use_rslora": False} | settings
    generator = torch.Generator().manual_seed(seed)
    tensors, deltas = {}, {}
    for name in targets(model):
        if only not in name:
            continue
        weight = model.get_submodule(name).weight
        own = next((r for key, r in config.get("rank_pattern", {}).items() if name.endswith(key)), rank)
        alpha = next(
            (a for key, a in config.get("alpha_pattern", {}).items() if name.endswith(key)), config["lora_alpha"]
        )
        down = torch.randn(own, weight.shape[1], generator=generator) / weight.shape[1] ** 0.5
        up = torch.randn(weight.shape[0], own, generator=generator) * weight.std() / (2 * own)
        scale = alpha / (math.sqrt(own) if config["use_rslora"] else own)
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up.detach()
        deltas[name] = (scale * up @ down).detach()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return deltas


def merge(model: PreTrainedModel, deltas: dict[str, Tensor], sign: float = 1.0) -> PreTrainedModel:
    """Add an adapter to the weights of a model."""
    with torch.no_grad():
        for name, delta in deltas.items():
            model.get_submodule(name).weight.add_(sign * delta)
    return model
