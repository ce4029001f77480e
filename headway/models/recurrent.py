"""Mixers with a state of fixed size for each sequence, in place of the keys and values of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from headway.kernels.interface import Kernels, LayerState, Linear, StepGeometry
from headway.kernels.weights import DeltaRule


@dataclass(slots=True)
class DeltaNet:
    """Gated DeltaNet (Yang et al., 2024): a short convolution, then each head's matrix, which tokens write and read."""

    kernels: Kernels
    projection: Linear  # rows of queries, keys and values, which are convolved, then of the gate of the result
    heads_projection: Linear  # the product of each head's two numbers, first how much a token writes for all heads
    taps: Tensor  # [width, channels] float32, of the convolution
    rule: DeltaRule
    o: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, state: LayerState, step: StepGeometry) -> Tensor:
        """x [T, hidden] -> [T, hidden]; the states of the step's sequences go on."""
        channels = self.taps.shape[1]
        projected = self.projection(x)
        mixed, gate = projected[:, :channels], projected[:, channels:]
        mixed = self.kernels.convolve(mixed, None, self.taps, None, state, step)
        return self.o(self.kernels.delta_rule(mixed, gate, self.heads_projection(x), self.rule, state, step))


@dataclass(slots=True)
class ShortConvolution:
    """LFM2's: a gate, a convolution of each channel, and another gate."""

    kernels: Kernels
    projection: Linear  # rows of the gate before, of the gate behind, and of what is convolved
    taps: Tensor  # [width, channels] float32
    bias: Tensor | None  # [channels] float32
    o: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, state: LayerState, step: StepGeometry) -> Tensor:
        """x [T, hidden] -> [T, hidden]; the states of the step's sequences go on."""
        before, behind, mixed = self.projection(x).chunk(3, 1)
        return self.o(self.kernels.convolve(mixed, (before, behind), self.taps, self.bias, state, step))
