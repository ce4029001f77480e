"""Makes the weights of a decoder from the tensors of a checkpoint. The kernels of a device lay each out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headway.cost.layers import CacheSpec, Experts, Latent, StateSpec
from headway.kernels.adapters import AdaptableMixture
from headway.kernels.interface import HeadLinear, Kernels, Linear
from headway.kernels.weights import CLAMPED, GELU_TANH, SILU, DeltaRule, Product, Scores, Weight
from headway.models.checkpoint import StageClock, WeightSource
from headway.models.config import ModelConfig, ModelError
from headway.models.decoder import DenseMLP, MixtureMLP
from headway.models.grouped import expanded, grouped_rows, stacked_groups, with_rows
from headway.models.latent_attention import LatentWeights
from headway.models.layer_inputs import LayerEnd, LayerInputs, MLPBesideExperts
from headway.models.packed_layers import mxfp4_matrix
from headway.models.quantization import EMBEDDING, scheme_of
from headway.models.recurrent import DeltaNet, ShortConvolution
from headway.models.routing import Routing
from headway.models.tensors import (
    NORMS_BESIDE,
    STACKED,
    Parts,
    Shapes,
    attention_names,
    dense_names,
    mixture_names,
    projected_kv,
    recurrent_names,
)
from headway.models.weights import AttentionWeights, DecoderWeights, LayerWeights, Placed, PlacedExperts

_CENTRED_AT_ONCE = 4096  # rows
GATES = {"silu": SILU, "gelu_tanh": GELU_TANH, "clamped": CLAMPED}


class Assembler:
    """Lays out tensors of a source for the kernels of a device."""

    def __init__(
        self,
        source: WeightSource,
        shapes: Shapes,
        config: ModelConfig,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        clock: StageClock,
        quantization: str,
    ) -> None:
        self._source, self._shapes, self._config = source, shapes, config
        self._kernels, self._dtype, self._device = kernels, dtype, device
        self._clock, self._quantization = clock, quantization
        self._placed: list[Placed] = []  # the products of the layer that is being made
        self._placed_experts: PlacedExperts | None = None  # and its mixture

    def decoder_weights(self) -> DecoderWeights:
        embedding, lm_head = self.ends()
        layers = [self._layer(i, cache) for i, cache in enumerate(self._config.caches)]
        self._placed = []
        factor = self._config.multipliers.logits
        final_norm = self._norm("model.norm", factor) if self._has("model.norm") else None
        return DecoderWeights(embedding, layers, final_norm, lm_head, self._inputs())

    def ends(self) -> tuple[Any, Any]:
        """The embedding and the output layer; None for what another stage of the model has."""
        tied, centred = self._config.shape.tied_embeddings, self._config.traits.centred
        if not tied and not centred:
            return self._table(EMBEDDING) if self._has(EMBEDDING) else None, self._head("lm_head")
        lm_head, embedding = self._head(EMBEDDING if tied else "lm_head"), None
        if self._has(EMBEDDING):
            embedding = self._centred_table() if centred else lm_head.rows
        return embedding, lm_head

    def _has(self, layer: str) -> bool:
        return any(name.startswith(f"{layer}.") for name in self._shapes)

    def _head(self, layer: str) -> Any:
        return self._linear(layer, wide=True) if self._has(layer) else None

    def _centred_table(self) -> Callable[[Tensor], Tensor]:
        self._refuse_packed(EMBEDDING)
        rows = self._stack(f"{EMBEDDING}.weight")
        for part in rows.split(_CENTRED_AT_ONCE):
            part.sub_(part.float().mean(1, keepdim=True))
        return partial(self._kernels.take, rows)

    def _inputs(self) -> LayerInputs | None:
        inputs = self._config.shape.inputs
        if inputs is None:
            return None
        table = self._table("model.embed_tokens_per_layer")
        projection = self._linear("model.per_layer_model_projection")  # its factor is undone by that of the embedding
        norm = self._norm("model.per_layer_projection_norm", inputs.width**-0.5)
        return LayerInputs(self._kernels, table, projection, norm, self._config.rms_norm_eps)

    def _end(self, index: int) -> LayerEnd | None:
        layer, shape, multipliers = f"model.layers.{index}", self._config.shape, self._config.multipliers
        if not shape.layer_scalars:
            return None
        scalar = float(self._stack(f"{layer}.layer_scalar", dtype=torch.float32))
        if shape.inputs is None:
            return LayerEnd(self._kernels, scalar)
        gate = self._linear(f"{layer}.per_layer_input_gate", factor=multipliers.embedding)
        projection = self._linear(f"{layer}.per_layer_projection", factor=(shape.inputs.width / 2) ** 0.5)
        norm = self._norm(f"{layer}.post_per_layer_input_norm", multipliers.added)
        return LayerEnd(self._kernels, scalar, gate, projection, norm, self._config.rms_norm_eps)

    def _table(self, name: str) -> Callable[[Tensor], Tensor]:
        """A function that takes rows of a matrix which is used for nothing else."""
        packed = self._packed(name)
        if packed is None:
            return partial(self._kernels.take, self._stack(f"{name}.weight"))
        with self._clock.measure("layout"):
            return self._kernels.linear(packed, None).rows

    def _layer(self, index: int, cache: CacheSpec | StateSpec) -> LayerWeights:
        layer, norms, added = f"model.layers.{index}", self._config.traits.norms, self._config.multipliers.added
        placed: list[Placed] = []
        self._placed, self._placed_experts = placed, None
        made = LayerWeights(
            mixer_norm=self._norm(f"{layer}.{norms.attention}") if norms.attention else None,
            mixer=self._mixer(index, cache),
            mixed_norm=self._norm(f"{layer}.{norms.attended}", added) if norms.attended else None,
            mlp_norm=self._norm(f"{layer}.{norms.mlp}") if norms.mlp and not self._is_beside(index) else None,
            mlp_out_norm=self._norm(f"{layer}.{norms.mlp_out}", added) if norms.mlp_out else None,
            mlp=self._beside_experts(index) if self._is_beside(index) else self._mlp(index),
            end=self._end(index),
            beside=self._config.traits.beside,
            placed=placed,
        )
        made.placed_experts = self._placed_experts
        return made

    def _is_beside(self, index: int) -> bool:
        """Whether a layer has a plain feed-forward layer beside experts, with norms around each."""
        routing = self._config.routing
        return routing is not None and routing.beside and index in routing.layers

    def _mixer(
        self, index: int, cache: CacheSpec | StateSpec
    ) -> AttentionWeights | LatentWeights | DeltaNet | ShortConvolution:
        if isinstance(cache, StateSpec):
            return self._delta_net(index, cache) if cache.heads else self._short_convolution(index, cache)
        if self._config.shape.latent is not None:
            return self._latent_attention(index, cache)
        return self._attention(index, cache)

    def _attention(self, index: int, cache: CacheSpec) -> AttentionWeights:
        attention, shape = f"model.layers.{index}.self_attn", self._config.shape
        ones = torch.ones(cache.value_dim, dtype=self._dtype, device=self._device)
        factor = 1.0 if self._config.traits.norms.attended else self._config.multipliers.added
        return AttentionWeights(
            qkv=self._qkv(index, cache),
            query_norm=self._norm(f"{attention}.q_norm") if shape.qk_norm else None,
            key_norm=self._norm(f"{attention}.k_norm") if shape.qk_norm and cache.source is None else None,
            o=self._linear(f"{attention}.o_proj", factor=factor),
            cache=cache,
            rotated=self._config.rotated[index],
            norms_behind=self._config.traits.norms_behind,
            sinks=self._stack(f"{attention}.sinks", dtype=torch.float32) if shape.sinks else None,
            value_norm=ones if shape.kinds and cache.source is None else None,
            projected_kv=projected_kv(shape, index),
        )

    def _latent_attention(self, index: int, cache: CacheSpec) -> LatentWeights:
        name, heads, latent = f"model.layers.{index}.self_attn", self._config.shape.heads, self._config.shape.latent
        assert latent is not None
        turned = self._turned(latent.rope_dim)
        head = latent.nope_dim + latent.rope_dim
        of_heads = torch.arange(heads).unsqueeze(1) * head
        queries = torch.cat(
            [(of_heads + torch.arange(latent.nope_dim)).flatten(), (of_heads + latent.nope_dim + turned).flatten()]
        )
        of_queries = queries if latent.q_rank is None else torch.arange(latent.q_rank)
        kept = torch.cat([torch.arange(latent.kv_rank), latent.kv_rank + turned])
        lowered = self._rows_of(torch.cat([of_queries, len(of_queries) + kept]), *attention_names(self._config, index))
        to_keys, to_values = self._latent_heads(name, latent, heads)
        return LatentWeights(
            lowered=lowered,
            query_norm=None if latent.q_rank is None else self._norm(f"{name}.q_a_layernorm"),
            raised=None if latent.q_rank is None else self._rows_of(queries, f"{name}.q_b_proj"),
            latent_norm=self._norm(f"{name}.kv_a_layernorm"),
            to_keys=to_keys,
            to_values=to_values,
            o=self._linear(f"{name}.o_proj"),
            cache=cache,
        )

    def _latent_heads(self, attention: str, latent: Latent, heads: int) -> tuple[HeadLinear, HeadLinear]:
        """The matrices that make keys and values of latents, that of keys transposed. Packed ones are made plain."""
        if self._config.by_heads:
            each = [[self._weight(f"{attention}.heads.{n}.{x}_b_proj") for n in range(heads)] for x in "kv"]
            with self._clock.measure("layout"):
                return self._kernels.head_linear(each[0], heads), self._kernels.head_linear(each[1], heads)
        name = f"{attention}.kv_b_proj"
        plain = expanded(self._weight(name)).view(heads, latent.nope_dim + latent.value_dim, latent.kv_rank)
        covered = self._config.packed is not None and self._config.packed.covers(name)
        scheme = "none" if covered else scheme_of(name, self._quantization, None)
        keys, values = plain.split([latent.nope_dim, latent.value_dim], 1)
        with self._clock.measure("layout"):
            return (
                self._kernels.head_linear((Weight(each.T.contiguous(), scheme) for each in keys), heads),
                self._kernels.head_linear((Weight(each.contiguous(), scheme) for each in values), heads),
            )

    def _short_convolution(self, index: int, state: StateSpec) -> ShortConvolution:
        block = f"model.layers.{index}.conv"
        return ShortConvolution(
            self._kernels,
            projection=self._linear(f"{block}.in_proj"),
            taps=self._taps(f"{block}.conv"),
            bias=self._stack(f"{block}.conv.bias", dtype=torch.float32) if state.bias else None,
            o=self._linear(f"{block}.out_proj", factor=self._config.multipliers.added),
        )

    def _delta_net(self, index: int, state: StateSpec) -> DeltaNet:
        (mixed, rest), block = recurrent_names(self._config, index), f"model.layers.{index}.linear_attn"
        groups, each = state.key_heads, state.heads // state.key_heads
        sizes = (state.key_dim, state.key_dim, each * state.value_dim, each * state.value_dim)
        # If there is one tensor, the rows of each key head are together in it.
        projection, heads_projection = (
            self._linear(*names) if len(names) > 1 else self._rows_of(grouped_rows(groups, *rows), *names)
            for names, rows in ((mixed, sizes), (rest, (each, each)))
        )
        rule = DeltaRule(
            key_heads=state.key_heads,
            rate=self._stack(f"{block}.A_log", dtype=torch.float32).exp_(),
            offset=self._stack(f"{block}.dt_bias", dtype=torch.float32),
            norm=self._stack(f"{block}.norm.weight", dtype=torch.float32),
            eps=self._config.rms_norm_eps,
            by_turns=self._config.heads_by_turns,
        )
        o = self._linear(f"{block}.out_proj", factor=self._config.multipliers.added)
        return DeltaNet(self._kernels, projection, heads_projection, self._taps(f"{block}.conv1d"), rule, o)

    def _taps(self, name: str) -> Tensor:
        """The taps of a convolution, [width, channels]."""
        return self._stack(f"{name}.weight", dtype=torch.float32).squeeze(1).T.contiguous()

    def _norm(self, name: str, factor: float = 1.0) -> Tensor:
        return self._stack(f"{name}.weight").add_(self._config.traits.norm_offset).mul_(factor)

    def _qkv(self, index: int, cache: CacheSpec) -> Linear:
        names, shape = attention_names(self._config, index), self._config.shape
        if shape.output_gate:  # beside the query of each head: behind everything
            width, others = cache.key_dim, 2 * cache.heads * cache.key_dim
            queries, gates = grouped_rows(shape.heads, width, width).chunk(2)
            return self._rows_of(torch.cat([queries, torch.arange(others) + 2 * len(queries), gates]), *names)
        if self._config.traits.turns_neighbours:
            return self._rows_of(self._in_halves(self._config.shape.heads, cache), *names)
        return self._linear(*names)

    def _in_halves(self, heads: int, cache: CacheSpec) -> Tensor:
        """Rows of queries, keys and values such that what is turned has the first of all pairs before the second."""
        turned = self._config.rope.dim
        order = torch.cat([self._turned(turned), torch.arange(turned, cache.key_dim)])
        of_heads = torch.arange(heads + cache.heads).unsqueeze(1) * cache.key_dim + order
        values = torch.arange(cache.heads * cache.value_dim) + of_heads.numel()
        return torch.cat([of_heads.flatten(), values])

    def _turned(self, size: int) -> Tensor:
        """Rows that positions turn, in the order in which the kernels turn them: in halves."""
        rows = torch.arange(size)
        return torch.cat([rows[::2], rows[1::2]]) if self._config.traits.turns_neighbours else rows

    def _rows_of(self, rows: Tensor, *layers: str) -> Linear:
        """The product of the matrices one under the other, with its rows in this order."""
        product = with_rows(self._product(*layers), rows)
        with self._clock.measure("layout"):
            made = self._kernels.linear(*product)
        self._placed.append(Placed(made, layers, rows))
        return made

    def _beside_experts(self, index: int) -> MLPBesideExperts:
        mlp, layer, config = self._mlp(index), f"model.layers.{index}", self._config
        assert isinstance(mlp, MixtureMLP) and mlp.shared is not None
        norms = tuple(self._norm(f"{layer}.{name}") for name in NORMS_BESIDE)
        before_router = self._stack(f"{layer}.router.scale").mul_(config.shape.hidden**-0.5)
        parts = mlp.shared, mlp.router, mlp.experts, mlp.per_token, norms, before_router
        return MLPBesideExperts(self._kernels, *parts, config.rms_norm_eps, config.residual_eps)

    def _mlp(self, index: int) -> Callable[[Tensor], Tensor]:
        layer, experts, routing = f"model.layers.{index}", self._config.shape.experts, self._config.routing
        stacked = f"{layer}.{STACKED[0]}" in self._shapes
        names = mixture_names(self._config, index, stacked)
        if names is None or experts is None or routing is None:
            return self._dense(dense_names(f"{layer}.mlp", self._config.traits.fused))
        factors = [1.0] * experts.here
        if routing.beside:
            factors = self._stack(f"{layer}.router.per_expert_scale", dtype=torch.float32).tolist()
        gate_up: Iterator[Product]
        down: Iterator[Product]
        if routing.by_turns:
            gate_up, down = (self._interleaved_experts(f"{layer}.{each}", gated=each == STACKED[0]) for each in STACKED)
        elif stacked:
            gate_up, down = self._matrices(f"{layer}.{STACKED[0]}"), self._matrices(f"{layer}.{STACKED[1]}", factors)
        else:
            gate_up = (self._product(*gated) for *gated, _ in names.experts)
            down = (self._product(last, factor=by) for (*_, last), by in zip(names.experts, factors, strict=True))
        with self._clock.measure("layout"):
            mixture = self._kernels.mixture(gate_up, down, experts.here, GATES[self._config.traits.gate])
        one_by_one = mixture_names(self._config, index, stacked=False)
        if isinstance(mixture, AdaptableMixture) and one_by_one is not None and one_by_one.experts:
            self._placed_experts = PlacedExperts(mixture, one_by_one.experts, factors)
        shared = self._dense(names.shared) if names.shared is not None else None
        router = self._linear(*names.router)
        scores = self._scores(names.block, routing, experts)
        return MixtureMLP(self._kernels, router, mixture, experts.per_token, routing.normalized, shared, scores)

    def _scores(self, block: str, routing: Routing, experts: Experts) -> Scores:
        bias = None if routing.bias is None else self._stack(f"{block}.{routing.bias}", dtype=torch.float32)
        limits = routing.groups, routing.best_groups
        added = 1.0 if self._config.traits.norms.mlp_out else self._config.multipliers.added
        return Scores(routing.sigmoid, bias, *limits, routing.factor * added, gated=experts.shared_gate)

    def _dense(self, parts: Parts) -> DenseMLP:
        *gated, down = parts
        factor = 1.0 if self._config.traits.norms.mlp_out else self._config.multipliers.added
        return DenseMLP(self._gated(*gated), self._linear(down, factor=factor))

    def _matrices(self, name: str, factors: Sequence[float] | None = None) -> Iterator[Product]:
        """The matrices of a layer's experts, which one tensor [E, out, in] holds; with factors of their products."""
        scheme = scheme_of(name, self._quantization, None)
        if self._config.traits.inputs_first:
            yield from ((Weight(matrix.T.contiguous(), scheme), None) for matrix in self._stack(name))
            return
        lent = self._lent([name], self._dtype) if self._device.type == "cpu" else None
        for number, matrix in enumerate(self._stack(name) if lent is None else lent[0]):
            factor = 1.0 if factors is None else factors[number]
            yield Weight(matrix if lent is None else [matrix], scheme, factor=factor), None

    def _interleaved_experts(self, name: str, gated: bool) -> Iterator[Product]:
        """gpt-oss's experts of a layer (see Routing), gate rows above up rows."""
        scheme, biases = scheme_of(name, self._quantization, None), self._stack(f"{name}_bias")
        turns = torch.arange(biases.shape[1], device=self._device)
        rows = torch.cat([turns[::2], turns[1::2]]) if gated else turns
        packed = self._lent([f"{name}_blocks", f"{name}_scales"], torch.uint8) if self._config.packed else None
        if packed is not None:
            on = rows.cpu()
            for blocks, exponents, bias in zip(*packed, biases, strict=True):
                yield mxfp4_matrix(blocks[on], exponents[on], self._dtype).to(self._device), bias[rows]
            return
        for matrix, bias in zip(self._stack(name), biases, strict=True):
            yield Weight(matrix.T[rows], scheme), bias[rows]

    def _product(self, *layers: str, factor: float = 1.0) -> Product:
        """The matrices one under the other and their biases, times the factor."""
        weight, bias = (
            self._centred(*layers) if self._is_centred(*layers) else (self._weight(*layers), self._bias(*layers))
        )
        if factor != 1.0:
            weight, bias = replace(weight, factor=factor), None if bias is None else bias * factor
        return weight, bias

    def _is_centred(self, *layers: str) -> bool:
        """Whether a product is added to the residual stream of a model whose norms subtract the mean."""
        return self._config.traits.centred and layers[-1].endswith((".o_proj", ".down_proj"))

    def _centred(self, layer: str) -> Product:
        """The matrix and bias of a layer, such that the mean of its outputs is 0."""
        self._refuse_packed(layer)
        weight, bias = self._stack(f"{layer}.weight"), self._bias(layer)
        weight.sub_(weight.float().mean(0))
        return Weight(weight, scheme_of(layer, self._quantization, None)), None if bias is None else bias - bias.mean()

    def _refuse_packed(self, layer: str) -> None:
        if f"{layer}.weight" not in self._shapes or f"{layer}.weight_scale" in self._shapes:
            raise ModelError(
                f"{layer} is packed, and weights of this family change while loading; take a checkpoint that is not"
            )

    def _linear(self, *layers: str, factor: float = 1.0, wide: bool = False) -> Linear:
        product = self._product(*layers, factor=factor)
        with self._clock.measure("layout"):
            made = self._kernels.linear(*product, wide)
        self._placed.append(Placed(made, layers, None, factor, self._is_centred(*layers)))
        return made

    def _gated(self, *layers: str) -> Callable[[Tensor], Tensor]:
        product = self._product(*layers)
        with self._clock.measure("layout"):
            made = self._kernels.gated_linear(*product, GATES[self._config.traits.gate])
        self._placed.append(Placed(made, layers))
        return made

    def _bias(self, *layers: str) -> Tensor | None:
        return self._stack(*(f"{layer}.bias" for layer in layers)) if f"{layers[0]}.bias" in self._shapes else None

    def _weight(self, *layers: str) -> Weight:
        """The matrices one under the other: where they lie in the file, if the kernels can read them there."""
        grouped = [self._packed(layer) for layer in layers]
        if any(grouped):
            parts = [each or self._stack(f"{layer}.weight") for layer, each in zip(layers, grouped, strict=True)]
            with self._clock.measure("convert"):
                return stacked_groups(parts)
        names = [f"{layer}.weight" for layer in layers]
        scheme = scheme_of(layers[0], self._quantization, self._config.packed)
        scales = [f"{name}_scale" for name in names if f"{name}_scale" in self._shapes]
        if scales and len(scales) < len(names):
            raise ModelError(
                f"quantization_config packs some of {', '.join(layers)}, which are one product, and not all"
            )
        packed = self._lent(names, torch.int8) if scales else None
        if packed is not None:
            weight = Weight(packed, scheme, self._stack(*scales, dtype=torch.float32), dtype=self._dtype)
            return weight.to(self._device)
        lent = self._lent(names, self._dtype) if self._device.type == "cpu" else None
        return Weight(self._stack(*names) if lent is None else lent, scheme)

    def _packed(self, layer: str) -> Weight | None:
        """The matrix of a layer that is packed in groups, on the device."""
        packed = self._source.packed(layer, self._dtype)
        return None if packed is None else packed.to(self._device)

    def _lent(self, names: list[str], dtype: torch.dtype) -> list[Tensor] | None:
        """All of the named tensors where they lie in memory, or None."""
        parts = [part for part in (self._source.lend(name, dtype) for name in names) if part is not None]
        return parts if len(parts) == len(names) else None

    def _stack(self, *names: str, dtype: torch.dtype | None = None) -> Tensor:
        """The named tensors one under the other, in the model's dtype unless another is named, on its device."""
        shapes = [self._shapes[name] for name in names]
        rows = [shape[0] for shape in shapes]
        stacked = torch.empty((sum(rows), *shapes[0][1:]), dtype=dtype or self._dtype, device=self._device)
        for name, part in zip(names, stacked.split(rows), strict=True):
            self._source.copy_into(name, part)
        return stacked
