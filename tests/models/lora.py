"""Adapters of tiny models in peft's format, and the models with them merged into their weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from headway.models.gguf.names import gguf_name
from tests.models import gguf_files


def weights(model: PreTrainedModel, experts: bool = False) -> dict[str, Tensor]:
    """The weights of a decoder that can have adapters, by their layer; not what makes keys of latents.

    Args:
        experts: also those of single experts, which models of transformers 5 have stacked.
    """
    linear = {name: module.weight for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    found = {name: each for name, each in linear.items() if ".layers." in name and "kv_b_proj" not in name}
    for name, each in model.named_parameters() if experts else ():
        block, _, last = name.rpartition(".")
        for number, matrix in enumerate(each) if block.endswith(".experts") else ():
            parts = zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)
            of_expert = dict(parts) if last == "gate_up_proj" else {last: matrix}
            found |= {f"{block}.{number}.{part}": rows for part, rows in of_expert.items()}
    return found


def save(
    folder: Path,
    model: PreTrainedModel,
    rank: int = 4,
    seed: int = 0,
    only: str = "",
    experts: bool = False,
    **settings: Any,
) -> dict[str, Tensor]:
    """Write a random adapter; returns what it adds to the weight of each layer.

    Args:
        only: a part of the names of the layers that it has.
        experts: see weights().
    """
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "use_rslora": False} | settings
    generator = torch.Generator().manual_seed(seed)
    tensors, deltas = {}, {}
    for name, weight in weights(model, experts).items():
        if only not in name:
            continue
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
        of_layers = weights(model, experts=True)
        for name, delta in deltas.items():
            of_layers[name].add_(sign * delta)
    return model


def as_gguf(path: Path, folder: Path, model: PreTrainedModel, kind: str) -> dict[str, Tensor]:
    """Write an adapter of a llama as llama.cpp's converter does; returns what the file adds to each weight."""
    writer = gguf.GGUFWriter(path, "llama")
    settings = json.loads((folder / "adapter_config.json").read_text())
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", settings["lora_alpha"])
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    matrices: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        layer, _, matrix = name.removesuffix(".weight").removeprefix("base_model.model.").rpartition(".lora_")
        theirs, _ = gguf_name(f"{layer}.weight")
        count = heads.get(layer.rpartition(".")[2], 0) if matrix == "B" else 0
        stored = (gguf_files.neighbours(tensor, count) if count else tensor).numpy()
        kept = gguf.quants.quantize(stored, gguf.GGMLQuantizationType[kind])
        writer.add_tensor(f"{theirs}.lora_{matrix.lower()}", kept, raw_dtype=gguf.GGMLQuantizationType[kind])
        numbers = torch.from_numpy(gguf.quants.dequantize(kept, gguf.GGMLQuantizationType[kind]))
        matrices.setdefault(layer, {})[matrix] = gguf_files.halves(numbers, count) if count else numbers
    finish(writer)
    scale = settings["lora_alpha"] / settings["r"]
    return {layer: scale * each["B"] @ each["A"] for layer, each in matrices.items()}


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
