"""Parts that Gemma 4 has beside those of other families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from headway.kernels.interface import Kernels, Linear, Mixture
from headway.kernels.weights import GELU_TANH


@dataclass(slots=True)
class LayerInputs:
    """The input that layers get of a token beside the residual stream."""

    kernels: Kernels
    table: Callable[[Tensor], Tensor]  # rows of a second embedding, [T] int64 -> [T, layers * width]
    projection: Linear  # the product of the first embedding
    norm: Tensor  # [width], of each layer's part of that, divided by what the table is to be multiplied with
    eps: float  # the epsilon of the norm

    def __call__(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """token_ids [T] int64 and their first embedding [T, hidden] -> [T, layers, width]."""
        projected = self.projection(embedded).unflatten(1, (-1, len(self.norm)))
        normed = self.kernels.rms_norm(projected, self.norm, self.eps)
        return self.kernels.add(normed.flatten(1), self.table(token_ids)).view(normed.shape)


@dataclass(slots=True)
class LayerEnd:
    """Behind the feed-forward layer: what the layer's input adds to the residual stream, which is then scaled."""

    kernels: Kernels
    scalar: float  # what the residual stream is multiplied with
    # gate, projection, norm: the layers of the input; None where there is none.
    gate: Linear | None = None
    projection: Linear | None = None
    norm: Tensor | None = None
    eps: float = 0.0

    def __call__(self, added: Tensor, residual: Tensor, inputs: Tensor | None) -> Tensor:
        """residual and what the feed-forward layer adds [T, hidden], and the layer's inputs [T, width] -> [T, hidden].

        It may reuse the memory of residual; inputs may be strided along T.
        """
        if inputs is not None and self.gate is not None and self.projection is not None and self.norm is not None:
            residual = self.kernels.add(added, residual)
            gated = self.kernels.gated(self.gate(residual), inputs, GELU_TANH)
            added = self.kernels.rms_norm(self.projection(gated), self.norm, self.eps)
        return self.kernels.add(added, residual, self.scalar)


@dataclass(slots=True)
class MLPBesideExperts:
    """A plain feed-forward layer and experts beside it, with norms around both; its input is the residual stream."""

    kernels: Kernels
    dense: Callable[[Tensor], Tensor]
    router: Linear
    experts: Mixture
    per_token: int
    norms: tuple[Tensor, ...]  # [hidden] each: before the plain layer and behind it, before the experts and behind them
    router_norm: Tensor  # [hidden], before the router
    eps: float  # the epsilon of the norms behind; `residual_eps`: of those before
    residual_eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        kernels, (before, behind, before_experts, behind_experts) = self.kernels, self.norms
        plain = kernels.rms_norm(self.dense(kernels.rms_norm(x, before, self.residual_eps)), behind, self.eps)
        logits = self.router(kernels.rms_norm(x, self.router_norm, self.residual_eps))
        chosen, weights = kernels.route(logits, self.per_token, True, False)
        routed = kernels.rms_norm(x, before_experts, self.residual_eps)
        routed = self.experts(routed, chosen, weights, None)
        return kernels.add(kernels.rms_norm(routed, behind_experts, self.eps), plain)
