"""A decoder whose linear layers are exchanged as a step comes to them, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels import kernels_for
from headway.kernels.interface import HeadLinear, Kernels, LayerState, StepGeometry
from headway.kernels.reference import ReferenceKernels
from headway.kernels.weights import SILU, DeltaRule, Gate, Weight
from headway.models.checkpoint import Checkpoint
from headway.quantize.apart import TakenApart

_ROWS = 1024  # tokens that are multiplied at once: a gated product is several times as large as its result


class NamedWeights:
    """The tensors of a checkpoint, and the names of the layers that were asked for last."""

    def __init__(self, checkpoint: Checkpoint | TakenApart) -> None:
        self._checkpoint = checkpoint
        self._names: list[str] = []

    def taken(self) -> tuple[str, ...]:
        """The layers that were asked for since the last call."""
        names, self._names = tuple(self._names), []
        return names

    def lend(self, name: str, dtype: torch.dtype) -> Tensor | None:
        return self._checkpoint.lend(name, dtype)

    def copy_into(self, name: str, out: Tensor) -> None:
        self._checkpoint.copy_into(name, out)

    def packed(self, layer: str, dtype: torch.dtype) -> None:
        """Note the layer and return None: its matrix is not packed."""
        self._names.append(layer)


class WatchedLinear:
    """A product that asks for its matrix when it first has inputs.

    Args:
        names: the names of the layers whose rows stand one under the other.
        weight: as it was read; where the file is mapped, it takes no memory.
    """

    def __init__(
        self, names: tuple[str, ...], weight: Weight, bias: Tensor | None, gate: Callable[[Tensor], Tensor] | None
    ) -> None:
        self.names, self.weight = names, weight
        self._bias, self._gate = bias, gate
        self.out_features = weight.rows // (2 if gate else 1)
        self.exchange: Callable[[WatchedLinear, Tensor], Tensor] | None = None

    @property
    def matrix(self) -> Tensor:
        """The matrix [out, in], in the order of rows that the decoder wants."""
        return torch.cat(self.weight.parts)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        matrix = self.matrix if self.exchange is None else self.exchange(self, x).to(x.dtype)
        out = x.new_empty(len(x), self.out_features)
        for some, result in zip(x.split(_ROWS), out.split(_ROWS), strict=True):
            product = F.linear(some, matrix) * self.weight.factor
            product = product if self._bias is None else product + self._bias
            result.copy_(product if self._gate is None else self._gate(product))
        return out

    def rows(self, numbers: Tensor) -> Tensor:
        """Rows [T] of the weight -> [T, in]."""
        return self.matrix.index_select(0, numbers)


class WatchedKernels(ReferenceKernels):
    """Plain torch, with the linear layers in the order in which they were made.

    Recurrent layers, which plain torch computes token after token, run on the CPU kernels.
    """

    def __init__(self, weights: NamedWeights) -> None:
        super().__init__()
        self._weights = weights
        self.layers: list[WatchedLinear] = []

    def linear(self, weight: Weight, bias: Tensor | None, wide: bool = False) -> WatchedLinear:
        """See Kernels. None is wide: nothing is drawn."""
        return self._made(weight, bias, None)

    def gated_linear(self, weight: Weight, bias: Tensor | None, gate: Gate = SILU) -> WatchedLinear:
        return self._made(weight, bias, lambda product: self.apply_gate(product, gate))

    def head_linear(self, weights: Iterable[Weight], count: int) -> HeadLinear:
        """See Kernels. These are not exchanged."""
        made = super().head_linear(weights, count)
        self._weights.taken()
        return made

    def convolve(
        self,
        x: Tensor,
        gates: tuple[Tensor, Tensor] | None,
        taps: Tensor,
        bias: Tensor | None,
        state: LayerState,
        step: StepGeometry,
    ) -> Tensor:
        return self._quick.convolve(x, gates, taps, bias, state, step).clone()

    def delta_rule(
        self, mixed: Tensor, gate: Tensor, numbers: Tensor, rule: DeltaRule, state: LayerState, step: StepGeometry
    ) -> Tensor:
        return self._quick.delta_rule(mixed, gate, numbers, rule, state, step).clone()

    @cached_property
    def _quick(self) -> Kernels:
        return kernels_for("cpu", torch.float32)

    def _made(self, weight: Weight, bias: Tensor | None, gate: Callable[[Tensor], Tensor] | None) -> WatchedLinear:
        self.layers.append(WatchedLinear(self._weights.taken(), weight, bias, gate))
        return self.layers[-1]
