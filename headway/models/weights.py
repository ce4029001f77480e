"""What a decoder is made of: the weights of its layers, laid out by the kernels of a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from headway.cost.layers import CacheSpec
from headway.kernels.adapters import AdaptableMixture
from headway.kernels.interface import AddRMSNorm, Linear, RMSNorm
from headway.models.latent_attention import LatentWeights
from headway.models.layer_inputs import LayerInputs
from headway.models.recurrent import DeltaNet, ShortConvolution

if TYPE_CHECKING:
    from headway.models.part import Part


@dataclass(slots=True)
class AttentionWeights:
    """The layers that make queries, keys and values, and that project the result; qkv stacks the rows of all three.

    If results have gates, the rows of these come last.
    """

    qkv: Linear
    query_norm: Tensor | None  # [head_dim], or of all heads together
    key_norm: Tensor | None
    o: Callable[[Tensor], Tensor]
    cache: CacheSpec
    rotated: bool = True  # whether queries and keys have rotary positions
    norms_behind: bool = False  # their norms come behind these
    sinks: Tensor | None = None  # [heads] float32
    value_norm: Tensor | None = None  # [head_dim]
    projected_kv: int = 2  # see ModelShape
    norms: tuple[RMSNorm, RMSNorm] | None = None  # of queries and keys whose heads other ranks have, too


@dataclass(slots=True)
class Placed:
    """A product as it was made of a checkpoint's layers: what adapters of these must know."""

    product: Callable[..., Tensor]
    layers: tuple[str, ...]  # the names of the layers whose rows are one under the other in it
    rows: Tensor | None = None  # int64, which of these rows each of its outputs is; None: they are in their order
    factor: float = 1.0  # what it was multiplied with
    centred: bool = False  # each input's outputs have a mean of 0


@dataclass(slots=True)
class PlacedExperts:
    """A mixture as it was made of a checkpoint's layers."""

    mixture: AdaptableMixture
    layers: tuple[tuple[str, ...], ...]  # the names of each expert's layers, of gate, up and down
    factors: list[float]  # what each expert's down was multiplied with


@dataclass(slots=True)
class LayerWeights:
    """One layer, laid out by the device's kernels."""

    mixer_norm: Tensor | None  # [hidden]; None where its input is the residual stream itself
    mixer: AttentionWeights | LatentWeights | DeltaNet | ShortConvolution
    mlp_norm: Tensor | None  # [hidden]; None likewise
    mlp: Callable[[Tensor], Tensor]  # [T, hidden] -> [T, hidden]
    mixed_norm: Tensor | None = None  # [hidden], of what the mixer adds to the residual stream
    mlp_out_norm: Tensor | None = None  # [hidden], of what the MLP adds to it
    end: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None  # as LayerEnd, instead of an addition
    beside: bool = False  # the MLP reads what the mixer reads
    placed: list[Placed] = field(default_factory=list)
    placed_experts: PlacedExperts | None = None


@dataclass(slots=True)
class Shared:
    """What is known of a model of which this process has a part."""

    part: Part  # says which part of each tensor
    layers: list[LayerWeights]  # this process's own, which ask no other rank
    join: Callable[[list[LayerWeights]], list[LayerWeights]]  # makes layers that ask the other ranks of such layers


@dataclass(slots=True)
class DecoderWeights:
    """All weights of a decoder; with tied embeddings `embedding` takes rows of lm_head's weight."""

    embedding: Callable[[Tensor], Tensor]  # [T] int64 -> [T, hidden]
    layers: list[LayerWeights]
    final_norm: Tensor | None  # [hidden]; None where layers of another stage follow, or the residual stream is wanted
    lm_head: Linear
    inputs: LayerInputs | None = None
    add_rms_norm: AddRMSNorm | None = None  # instead of that of the kernels, for layers that give parts of sums
    shared: Shared | None = None
