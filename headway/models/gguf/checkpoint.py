"""Reads weights from GGUF files: plain tensors as they are, packed ones as numbers in groups."""

from __future__ import annotations

import mmap
import re
import warnings
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from headway.kernels.weights import Weight
from headway.models.checkpoint import StageClock
from headway.models.config import ModelConfig, ModelError
from headway.models.gguf.blocks import BLOCKS, packed_blocks
from headway.models.gguf.config import gguf_files
from headway.models.gguf.files import GGUFTensor, read_gguf
from headway.models.gguf.names import as_stored, family_of, gguf_name, left_over, turns_neighbours
from headway.models.tensors import Shapes

# The halves of a tensor that holds the gate rows of experts and then their up rows.
_HALVES = {"ffn_gate_exps": 0, "ffn_up_exps": 1}
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFCheckpoint:
    """The GGUF files of a folder, memory-mapped. A WeightSource; use as a context manager.

    Args:
        is_whole: the files have nothing but the model that is expected, and the layers behind its last.

    Raises:
        ModelError: a tensor is missing, has another shape, or no place in the model; or see read_gguf.
    """

    def __init__(
        self, folder: Path, expected: Shapes, config: ModelConfig, clock: StageClock, is_whole: bool = True
    ) -> None:
        self._clock, self._config, self._stack = clock, config, ExitStack()
        model = read_gguf(gguf_files(folder)[0])
        self._model, self._turned, family = model, turns_neighbours(model), family_of(model)
        self._tensors: dict[str, GGUFTensor] = {}
        used: set[str] = set()
        for name, shape in expected.items():
            theirs, expert = gguf_name(name, family)
            half = _HALVES.get(theirs.split(".")[-2]) if theirs not in model.tensors else None
            if half is not None:
                theirs = re.sub("ffn_(gate|up)_exps", "ffn_gate_up_exps", theirs)
            if theirs not in model.tensors:
                raise ModelError(f"{model.path}: tensor {theirs} is missing; use a file that holds a whole model")
            used.add(theirs)
            self._tensors[name] = tensor = _part(model.tensors[theirs], expert, half)
            if _squeezed(tensor.shape) != _squeezed(shape):
                said = f"has shape {list(model.tensors[theirs].shape)}, but {list(shape)} is needed"
                raise ModelError(f"{model.path}: tensor {theirs} {said}{'' if expert is None else ' of each expert'}")
        for name in left_over(model, used, config.shape.layers) if is_whole else ():
            raise ModelError(f"{model.path}: tensor {name} has no place in the model that the file describes")
        try:
            self._mapped = {path: self._map(path) for path in {tensor.path for tensor in self._tensors.values()}}
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> GGUFCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._mapped.clear()
        self._stack.close()

    def _map(self, path: Path) -> mmap.mmap:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def lend(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """The mapped tensor, if it is plain, of this dtype and in the order of a Hugging Face checkpoint."""
        tensor = self._tensors[name]
        if PLAIN.get(tensor.kind) != dtype or self._heads(name):
            return None
        with self._clock.measure("storage_read"):
            return self._plain(name)

    def copy_into(self, name: str, out: Tensor) -> None:
        """Fill `out` with a tensor that is plain. Raises ModelError: it is packed."""
        tensor = self._tensors[name]
        if tensor.kind not in PLAIN:
            raise ModelError(f"{tensor.path}: {name} is stored as {tensor.kind}, where plain numbers are needed")
        with self._clock.measure("convert"):
            plain = self._in_halves(name, self._plain(name)).view(out.shape)
            stored = as_stored(self._model, name)
            if stored:
                plain = plain.float() - 1 if stored == "plus one" else (-plain.float()).log()
            out.copy_(plain)

    def packed(self, layer: str, dtype: torch.dtype) -> Weight | None:
        """The matrix of a linear layer, to be multiplied in `dtype`; None if it is plain."""
        name = f"{layer}.weight"
        tensor = self._tensors[name]
        if tensor.kind not in BLOCKS:
            return None
        with self._clock.measure("convert"):
            return packed_blocks(tensor.kind, self._in_halves(name, self._bytes(name)), dtype)

    def _plain(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        return self._bytes(name).view(PLAIN[tensor.kind])

    def _bytes(self, name: str) -> Tensor:
        """The tensor's rows as bytes, where they lie: [out, bytes of a row], or one row of a vector."""
        tensor = self._tensors[name]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            content = torch.frombuffer(self._mapped[tensor.path], dtype=torch.uint8)
        return content[tensor.first : tensor.first + tensor.size].view(*tensor.shape[:-1], -1)

    def _heads(self, name: str) -> int:
        """Heads of a query or key projection whose rows stand in another order; 0 for any other."""
        shape = self._config.shape
        by_part = {"q_proj": shape.heads, "k_proj": shape.kv_heads}
        return by_part.get(name.split(".")[-2], 0) if self._turned else 0

    def _in_halves(self, name: str, rows: Tensor) -> Tensor:
        """Rows of a head that llama.cpp turns as neighbours, with the first of all pairs before the second."""
        heads = self._heads(name)
        return in_halves(rows, heads) if heads else rows


def in_halves(rows: Tensor, heads: int) -> Tensor:
    """Rows [out, ...] of heads that have neighbours together, with the first of all pairs before the second."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _part(tensor: GGUFTensor, expert: int | None, half: int | None) -> GGUFTensor:
    """An expert's part of a tensor, or the half of its rows that is its gate, or what that lets through.

    A tensor of too few experts stays as it is, and has not the shape that one of them has.
    """
    if expert is None or expert >= tensor.shape[0]:
        return tensor
    size = tensor.size // tensor.shape[0]
    part = replace(tensor, shape=tensor.shape[1:], first=tensor.first + expert * size, size=size)
    if half is None or part.shape[0] % 2:
        return part
    rows = part.shape[0] // 2
    return replace(part, shape=(rows, *part.shape[1:]), first=part.first + half * size // 2, size=size // 2)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
