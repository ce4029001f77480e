"""The parts of layers that a model hands to kernels: matrices however they are packed, gates, routers, states.

Shapes use the symbols of `kernels.interface`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Schemes in which a weight is multiplied; docs/quantization.md says what each means.
QUANTIZATIONS = ("none", "int8", "int8-weight-only", "int4")
# The values of codes of four bits: e2m1, and quantiles of a normal distribution (Dettmers et al., 2023, appendix E).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
CODES = {"float4-weight-only": E2M1, "normal4-weight-only": NF4}


@dataclass(frozen=True, slots=True)
class Groups:
    """Scales of numbers that are packed in groups of inputs. A weight is scale * factor * number - minimum * offset."""

    size: int  # inputs of a group, a multiple of 8
    # factors, offsets: int8 [out, in / size].
    factors: Tensor
    offsets: Tensor
    scales: Tensor  # float32 [out, runs]; of `run` groups each, a power of two, or of all where there is one run
    run: int = 1
    minima: Tensor | None = None  # the same; None: they are the scales
    order: Tensor | None = None  # int32 [in], which input each column is multiplied with; None: its own

    @property
    def layout(self) -> tuple[int, int, int]:
        """The sizes in which matrices must agree to be kept in the same way."""
        return self.size, self.scales.shape[1], self.run


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [out, in], and the scheme in which it is to be multiplied."""

    # Its numbers, handed over as one tensor; or its rows in parts, one under the other, lent until the call returns.
    # Floating-point ones are rounded to the scheme; whole ones are packed, and have scales or groups.
    values: Tensor | list[Tensor]
    scheme: str = "none"  # one of QUANTIZATIONS, or one that some kernels have beside these
    # float32 [out, 1]: what 1 stands for in a row. None: values are not packed, or have groups.
    scales: Tensor | None = None
    # What packed values stand for where groups of inputs differ; they are one tensor then, of uint8 below 16
    # (int4-weight-only, and the schemes of CODES), int8 (int8-weight-only) or float8_e4m3fn (float8-weight-only).
    groups: Groups | None = None
    dtype: torch.dtype | None = None  # the dtype of what a packed weight is multiplied with; None: that of the values
    factor: float = 1.0  # what products are multiplied with, before a bias is added

    @property
    def parts(self) -> list[Tensor]:
        return [self.values] if isinstance(self.values, Tensor) else self.values

    @property
    def rows(self) -> int:
        return sum(map(len, self.parts))

    def to(self, device: torch.device | str) -> Weight:
        """The same on a device."""
        groups = self.groups
        if groups is not None:
            names = ("factors", "offsets", "scales", "minima", "order")
            parts = {name: part for name in names if (part := getattr(groups, name)) is not None}
            groups = replace(groups, **{name: part.to(device) for name, part in parts.items()})
        values = (
            self.values.to(device) if isinstance(self.values, Tensor) else [part.to(device) for part in self.values]
        )
        return replace(
            self, values=values, scales=None if self.scales is None else self.scales.to(device), groups=groups
        )

    @property
    def format(self) -> str:
        """The format that kernels must have for this weight, for messages."""
        if self.groups is not None:
            return f"{self.scheme} packed in groups"
        return self.scheme if self.scales is None else f"{self.scheme} packed in rows"


Product = tuple[Weight, Tensor | None]  # a matrix and its bias [out]


@dataclass(frozen=True, slots=True)
class Gate:
    """A gate on numbers u: f(g) * (u + shift), f(g) = g * sigmoid(slope * g + cubic * g^3).

    Before that, u is brought into -limit .. limit and g to at most limit.
    """

    slope: float = 1.0
    cubic: float = 0.0
    limit: float = math.inf
    shift: float = 0.0


SILU = Gate()
# 0.5 g (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))), as (1 + tanh z) / 2 is sigmoid(2 z) (Hendrycks and Gimpel, 2016).
GELU_TANH = Gate(2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715)
CLAMPED = Gate(slope=1.702, limit=7.0, shift=1.0)  # gpt-oss


@dataclass(frozen=True, slots=True)
class Scores:
    """How a router's logits become choices and weights of experts."""

    sigmoid: bool = False  # an expert's score is the sigmoid of its logit; else they are a softmax over all experts
    bias: Tensor | None = None  # float32 [E], added to scores where they choose, and not where they weigh
    # Parts of as many experts each, one after the other, of which only `best_groups` are chosen from: those of the
    # greatest score, or with sigmoids of the greatest sum of two.
    groups: int = 1
    best_groups: int = 1
    factor: float = 1.0  # the factor by which weights are multiplied
    gated: bool = True  # a shared expert has a logit of its own; else its weight is 1


SOFTMAX = Scores()


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """The parameters of a gated delta net beside its projections; all tensors are float32."""

    key_heads: int  # heads of queries and keys; each is that of as many heads of values, H together
    # rate, offset: [H]. A token's number a makes a head forget to exp(-rate * softplus(a + offset)).
    rate: Tensor
    offset: Tensor
    norm: Tensor  # [value dimension], of each head's result
    eps: float
    by_turns: bool = False  # heads of values with the same keys are `key_heads` apart (GGUF), not beside each other
