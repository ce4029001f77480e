"""The checkpoint of benchmarks.weights in AWQ's layout, so that Headway and vLLM read the same packed weights.

Weights are rounded to the nearest in groups of 128 inputs with zero points. In a word, AWQ has the numbers of eight
neighbouring outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on (AutoAWQ's GEMM version).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.weights import WEIGHTS
from headway.quantize.rounding import nearest
from headway.quantize.schemes import SCHEMES

_SCHEME = SCHEMES["W4A16_ASYM"]
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_SAID = {"quant_method": "awq", "bits": 4, "group_size": _SCHEME.group_size, "zero_point": True, "version": "gemm"}


def _words(numbers: Tensor) -> Tensor:
    """Numbers 0 .. 15 [rows, columns] -> int32 [rows, columns / 8]."""
    parts = numbers.to(torch.int32).unflatten(1, (-1, 8))[..., _ORDER]
    return sum((parts[..., place] << 4 * place for place in range(8)), torch.zeros_like(parts[..., 0]))


def _packed(name: str, weight: Tensor) -> dict[str, Tensor]:
    rounded = nearest(weight.float(), _SCHEME, torch.float16)
    assert rounded.zeros is not None
    return {
        f"{name}.qweight": _words(rounded.codes.T + 8).contiguous(),
        f"{name}.qzeros": _words(rounded.zeros.T + 8).contiguous(),
        f"{name}.scales": rounded.scales.T.contiguous(),
    }


def write_awq(checkpoint: Path) -> Path:
    """Write the folder `awq` in a checkpoint's, unless it is there already; return its path."""
    target = checkpoint / "awq"
    if target.exists():
        return target
    partial = target.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for file in checkpoint.glob("*.json"):
        shutil.copy(file, partial)
    config = json.loads((checkpoint / "config.json").read_text()) | {"quantization_config": _SAID}
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors: dict[str, Tensor] = {}
    for name, values in load_file(checkpoint / WEIGHTS).items():
        layer = name.removesuffix(".weight")
        tensors |= _packed(layer, values) if layer.endswith("_proj") else {name: values}
    save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
    return partial.replace(target)
