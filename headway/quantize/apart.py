"""A checkpoint whose experts are stacked in one tensor of a layer, as if each of them had tensors of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.models.checkpoint import Checkpoint
from headway.models.config import ModelConfig
from headway.models.tensors import STACKED, MixtureNames, mixture_names


class TakenApart:
    """A source of the tensors that `expected_tensors` names where experts are not stacked.

    Args:
        checkpoint: opened with the names of stacked experts.
    """

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig) -> None:
        self._checkpoint = checkpoint
        self._inputs_first = config.traits.inputs_first
        self._names: dict[str, str] = {}
        self._experts: dict[str, tuple[str, int, slice]] = {}
        for layer in range(config.shape.layers):
            apart, stacked = (mixture_names(config, layer, stacked=each) for each in (False, True))
            if apart is not None and stacked is not None and config.shape.experts is not None:
                self._add(f"model.layers.{layer}", apart, stacked, config.shape.experts.width)
                if config.routing is not None and (bias := config.routing.bias):
                    self._names[f"{apart.block}.{bias}"] = f"{stacked.block}.{bias}"

    def _add(self, layer: str, apart: MixtureNames, stacked: MixtureNames, width: int) -> None:
        ours, theirs = ([*names.router, *(names.shared or ())] for names in (apart, stacked))
        self._names |= {f"{mine}.weight": f"{their}.weight" for mine, their in zip(ours, theirs, strict=True)}
        gate_up, down = (f"{layer}.{each}" for each in STACKED)
        for number, (gate, up, last) in enumerate(apart.experts):
            self._experts[f"{gate}.weight"] = gate_up, number, slice(0, width)
            self._experts[f"{up}.weight"] = gate_up, number, slice(width, None)
            self._experts[f"{last}.weight"] = down, number, slice(None)

    def stored(self, name: str) -> Tensor:
        """The mapped tensor, or an expert's part of one, in the file's dtype."""
        if name not in self._experts:
            return self._checkpoint.stored(self._names.get(name, name))
        of_all, number, rows = self._experts[name]
        matrix = self._checkpoint.stored(of_all)[number]
        return (matrix.T if self._inputs_first else matrix)[rows]

    def lend(self, name: str, dtype: torch.dtype) -> Tensor | None:
        mapped = self.stored(name)
        return mapped if mapped.dtype == dtype else None

    def copy_into(self, name: str, out: Tensor) -> None:
        out.copy_(self.stored(name).view(out.shape))
