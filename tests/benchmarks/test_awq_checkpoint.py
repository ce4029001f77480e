"""Checkpoints in AWQ's layout mean what their weights were rounded to."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.awq_checkpoint import write_awq
from headway.cost.values import ConfigValues
from headway.models.grouped import expanded
from headway.models.packed_layers import packed_layer
from headway.models.quantization import read_packed
from headway.quantize.rounding import nearest
from headway.quantize.schemes import SCHEMES


def test_packed_weights_are_those_that_were_rounded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 256}')
    name, weight = "model.layers.0.mlp.up_proj", torch.randn(16, 256).to(torch.bfloat16)
    norm = torch.ones(256, dtype=torch.bfloat16)
    save_file({f"{name}.weight": weight, "model.norm.weight": norm}, tmp_path / "model.safetensors")
    folder = write_awq(tmp_path)
    assert write_awq(tmp_path) == folder, "made once"
    config = json.loads((folder / "config.json").read_text())
    packed = read_packed(ConfigValues(config, "config.json"))
    tensors = load_file(folder / "model.safetensors")
    assert packed is not None and torch.equal(tensors["model.norm.weight"], norm)
    parts = {part: tensors[f"{name}.{part}"] for part in packed.parts}
    read = expanded(packed_layer(packed, name, parts, torch.float32))
    assert torch.allclose(read, nearest(weight.float(), SCHEMES["W4A16_ASYM"], torch.float16).dense, rtol=1e-6)
