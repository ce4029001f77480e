"""Adapters in GGUF, as llama.cpp's convert_lora_to_gguf.py writes them: a tensor NAME has NAME.lora_a and .lora_b."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headway.files import not_a_file
from headway.models.config import ModelError
from headway.models.gguf.blocks import packed_blocks
from headway.models.gguf.checkpoint import PLAIN, in_halves
from headway.models.gguf.files import GGUFTensor, read_gguf
from headway.models.gguf.names import TENSORS, family_of, gguf_name, turns_neighbours
from headway.models.grouped import expanded

_MATRIX = re.compile(r"(?P<tensor>(?:blk\.(?P<block>\d+)\.)?(?P<part>.+))\.weight\.lora_(?P<matrix>[ab])")
_PARTS = {theirs: ours for ours, theirs in TENSORS.items()}


@dataclass(frozen=True, slots=True)
class GGUFAdapter:
    """What a file has."""

    alpha: float  # the scale is this by the rank, or 1 where it is 0
    base: str  # the model that it was trained on, as the file names it
    # A and B by the name of the base model's layer. What the base model has not comes under a name that a checkpoint
    # could have.
    layers: dict[str, dict[str, Tensor]]
    content: bytes  # of the whole file


def read_gguf_adapter(path: Path, layers: Iterable[str], heads: Mapping[str, int]) -> GGUFAdapter:
    """Read a file.

    Args:
        layers: the base model's.
        heads: of projections whose rows llama.cpp may have in another order, by the end of their names.

    Raises:
        ModelError: it is not GGUF, no adapter of LoRA, or damaged; one line.
    """
    if problem := not_a_file(path):
        raise ModelError(f"adapter {path}: {problem}")
    model = read_gguf(path)
    said = [model.values.get(key) for key in ("general.type", "adapter.type")]
    if said != ["adapter", "lora"]:
        raise ModelError(f"adapter {path}: is of type {said[0]!r}, {said[1]!r}; only adapters of lora are supported")
    if model.values.get("adapter.alora.invocation_tokens"):
        raise ModelError(f"adapter {path}: begins with an invocation (aLoRA), which is not supported")
    family, turned = family_of(model), turns_neighbours(model)
    known: dict[str, dict[int | None, str]] = {}  # by GGUF's name, and the number of an expert
    for layer in layers:
        try:
            name, expert = gguf_name(f"{layer}.weight", family)
        except KeyError:  # a layer that GGUF has no name for
            continue
        known.setdefault(name.removesuffix(".weight"), {})[expert] = layer
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelError(f"adapter {path}: cannot be read ({error})") from None
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in sorted(model.tensors.items()):
        match = _MATRIX.fullmatch(name)
        if match is None:
            raise ModelError(f"adapter {path}: {name} is no matrix of LoRA; adapters of norms are not supported")
        own, numbers = known.get(match["tensor"], {}), _numbers(content, tensor)
        if None in own or len(own) != len(numbers):
            own, numbers = {0: own.get(None) or _likely(match["block"], match["part"])}, numbers[None]
        for number, layer in own.items():
            of_layer = numbers[number or 0]
            of_heads = heads.get(layer.rpartition(".")[2], 0) if turned and match["matrix"] == "b" else 0
            if of_heads and len(of_layer) % (2 * of_heads) == 0:  # else it is of another model, which is said later
                of_layer = in_halves(of_layer, of_heads)
            found.setdefault(layer, {})[match["matrix"].upper()] = of_layer
    if not found:
        raise ModelError(f"adapter {path}: has no tensors")
    alpha, base = model.values.get("adapter.lora.alpha", 0.0), model.values.get("general.base_model.0.name")
    if not isinstance(alpha, int | float):
        raise ModelError(f"adapter {path}: adapter.lora.alpha is {alpha!r}; it must be a number")
    return GGUFAdapter(alpha, str(base or family), found, content)


def _likely(block: str | None, part: str) -> str:
    """The name that a checkpoint could have for a layer that the base model has not."""
    name = _PARTS.get(part, part)
    return name if block is None else f"model.layers.{block}.{name}"


def _numbers(content: bytes, tensor: GGUFTensor) -> Tensor:
    """A tensor's numbers, also where it is packed."""
    bytes_ = torch.frombuffer(bytearray(content[tensor.first : tensor.first + tensor.size]), dtype=torch.uint8)
    if tensor.kind in PLAIN:
        return bytes_.view(PLAIN[tensor.kind]).view(tensor.shape)
    rows = bytes_.view(math.prod(tensor.shape[:-1]), -1)
    return expanded(packed_blocks(tensor.kind, rows, torch.float32)).view(tensor.shape)
