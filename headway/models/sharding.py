"""A rank's part of a model that several ranks share, read from the checkpoint without the rest.

The projections that begin attention and a feed-forward layer are cut by rows, so that a rank has some of the heads and
some of the width, and those that end them by columns (Megatron-LM, Shoeybi et al., 2019). Experts are cut like that,
each by its width, or dealt out whole. Embedding and head are cut by tokens. Where ranks are more than key/value heads,
several have one. Of stages, each has some of the layers; the first has the embedding, the last the head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from headway.cost.layers import StateSpec
from headway.kernels.interface import Kernels, Mixture
from headway.kernels.ranks import Ranks, Share
from headway.kernels.weights import Groups, Weight
from headway.models.checkpoint import WeightSource
from headway.models.config import ModelConfig, ModelError
from headway.models.decoder import DenseMLP, MixtureMLP
from headway.models.grouped import smaller_groups, with_rows
from headway.models.layer_inputs import MLPBesideExperts
from headway.models.part import NUMBERED, Part, layers_of
from headway.models.quantization import EMBEDDING
from headway.models.tensors import Shapes, expected_tensors
from headway.models.weights import AttentionWeights, DecoderWeights, LayerWeights, Shared

_AFTER_SUM = (".o_proj.bias", ".out_proj.bias", ".down_proj.bias", ".down_proj_bias")  # which only one rank adds
_DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def part_of(config: ModelConfig, share: Share) -> ModelConfig:
    """The layers of one rank, or its part of them. The vocabulary stays whole.

    Raises:
        ModelError: so many ranks cannot share this model; one line that says why.
    """
    _check(config, share)
    shape, experts, count = config.shape, config.shape.experts, share.count
    if experts is not None:
        experts = replace(experts, shared_width=experts.shared_width // count)
        if share.whole_experts:
            experts = replace(experts, held=experts.count // count)
        else:
            experts = replace(experts, width=experts.width // count)
    heads = shape.heads // count
    shape = replace(
        shape,
        heads=heads,
        kv_heads=heads if shape.latent else max(1, shape.kv_heads // count),
        ffn=shape.ffn // count,
        experts=experts,
        state=shape.state and _part_of_state(shape.state, count),
        kinds=tuple(
            replace(kind, kv_heads=max(1, kind.kv_heads // count), ffn=kind.ffn // count) for kind in shape.kinds
        ),
    )
    return _of_layers(replace(config, shape=shape), layers_of(config, share))


def _part_of_state(state: StateSpec, count: int) -> StateSpec:
    sizes = state.channels, state.heads, state.key_heads
    channels, heads, key_heads = (size // count for size in sizes)
    return replace(state, channels=channels, heads=heads, key_heads=key_heads)


def _of_layers(config: ModelConfig, layers: range) -> ModelConfig:
    """The same with some of its layers, whose numbers begin with 0."""
    shape, routing, own = config.shape, config.routing, slice(layers.start, layers.stop)
    experts = shape.experts
    if routing is not None and experts is not None:
        routing = replace(routing, layers=tuple(each - layers.start for each in routing.layers if each in layers))
        experts = replace(experts, layers=len(routing.layers))
    if len(layers) < shape.layers:
        attending = [layer for layer in range(shape.layers) if layer not in shape.recurrent]
        windows = zip(attending, shape.sliding_windows, strict=True)
        shape = replace(
            shape,
            layers=len(layers),
            sliding_windows=tuple(window for layer, window in windows if layer in layers),
            recurrent=tuple(layer - layers.start for layer in shape.recurrent if layer in layers),
            experts=experts,
        )
    return replace(config, shape=shape, caches=shape.caches, rotated=config.rotated[own], routing=routing)


def _check(config: ModelConfig, share: Share) -> None:
    shape, routing, count = config.shape, config.routing, share.count
    if share.whole_experts and shape.experts is None:
        raise ModelError("enable_expert_parallel is set, but the model has no experts; leave it out")
    if share.whole_experts and routing is not None and routing.beside:
        raise ModelError(
            "enable_expert_parallel is set, but experts beside a feed-forward layer cannot be dealt out yet; leave it "
            "out"
        )
    if share.stages > 1 and shape.kinds:
        raise ModelError(
            f"pipeline_parallel_size is {share.stages}, but stages cannot share a model with layers of different sizes "
            "yet; leave it out"
        )
    if count > 1 and config.heads_by_turns:
        raise ModelError(
            f"tensor_parallel_size is {count}, but ranks cannot share recurrent layers whose heads come by turns, as "
            "in this GGUF file; leave it out, or take the checkpoint that it was made of"
        )
    if share.stages > shape.layers:
        raise ModelError(
            f"pipeline_parallel_size is {share.stages}, but the model has {shape.layers} layers; give at most as many"
        )
    sizes = [(shape.heads, "query heads"), *_widths(config, share.whole_experts)]
    if unequal := next((each for each in sizes if each[0] % count), None):
        fits = [str(n) for n in range(1, shape.heads + 1) if not any(size % n for size, _ in sizes)]
        raise ModelError(
            f"tensor_parallel_size is {count}, which does not divide {unequal[0]} {unequal[1]}; use {', '.join(fits)}"
        )
    for kv_heads in [kind.kv_heads for kind in shape.kinds] or [shape.kv_heads]:
        if shape.latent is None and max(kv_heads, count) % min(kv_heads, count):
            raise ModelError(
                f"tensor_parallel_size is {count}, which neither divides {kv_heads} key/value heads nor is a multiple "
                "of them"
            )


def _widths(config: ModelConfig, whole_experts: bool) -> list[tuple[int, str]]:
    shape, experts, packed = config.shape, config.shape.experts, config.packed
    dense = [kind.ffn for kind in shape.kinds] or [shape.ffn] * bool(shape.dense_layers)
    widths = [(width, "of intermediate_size") for width in dense]
    if shape.state is not None and shape.state.heads:
        widths.append((shape.state.key_heads, "key heads of recurrent layers"))
    elif shape.state is not None:
        widths.append((shape.state.channels, "channels of recurrent layers"))
    if experts is not None and whole_experts:
        widths.append((experts.count, "experts"))
    elif experts is not None and packed is not None and packed.layout == "mxfp4" and packed.group_size:
        size = packed.group_size
        widths.append((experts.width // size, f"groups of {size} in the experts' width"))
    elif experts is not None:
        widths.append((experts.width, "of the experts' width"))
    if experts is not None and experts.shared_width:
        widths.append((experts.shared_width, "of the shared expert's width"))
    return widths


def divided(
    source: WeightSource,
    config: ModelConfig,
    stacked: bool,
    ranks: Ranks,
    kernels: Kernels,
    dtype: torch.dtype,
    assemble: Callable[[WeightSource, Shapes, ModelConfig], DecoderWeights],
) -> tuple[ModelConfig, DecoderWeights]:
    """This rank's config and its weights, whose layers ask the other ranks.

    Args:
        source: has the whole model.
        stacked: see expected_tensors().
        dtype: of the residual stream.
        assemble: makes the weights of tensors of these shapes.

    Raises:
        ModelError: the model, or a packed matrix of it, cannot be shared.
    """
    part = part_of(config, ranks.share)
    own = PartSource(source, config, part, stacked, ranks.share)
    weights = assemble(own, own.shapes, part)

    def joined(layers: list[LayerWeights]) -> DecoderWeights:
        made = replace(weights, layers=layers)
        if ranks.share.count > 1:
            made = _joined(made, part, ranks, kernels)
        return _in_stages(made, part, ranks, kernels, dtype)

    shared = Shared(Part(config, part, ranks.share), weights.layers, lambda layers: joined(layers).layers)
    return part, replace(joined(weights.layers), shared=shared)


def _in_stages(
    weights: DecoderWeights, part: ModelConfig, ranks: Ranks, kernels: Kernels, dtype: torch.dtype
) -> DecoderWeights:
    """The same, where the residual stream comes from the stage before and goes to the next one."""

    def end(added: Tensor, residual: Tensor, inputs: Tensor | None) -> Tensor:
        residual = kernels.add(added, residual)
        ranks.hand_on(residual)
        return residual

    if ranks.share.stage > 0:
        weights = replace(weights, embedding=ranks.received(dtype))
    if ranks.share.is_last:
        return weights
    *layers, last = weights.layers
    return replace(
        weights, layers=[*layers, replace(last, end=end)], final_norm=None, lm_head=_NoHead(part.shape.vocab)
    )


class _NoHead:
    """What stands for the output layer in stages before the last."""

    def __init__(self, vocab: int) -> None:
        self.out_features = vocab

    def __call__(self, x: Tensor) -> Tensor:
        """x [R, hidden] -> [R, vocab] of any numbers."""
        return torch.empty((len(x), self.out_features))

    def rows(self, numbers: Tensor) -> Tensor:
        """Raise: there are no rows."""
        raise NotImplementedError("a stage before the last has no output layer")


def _joined(weights: DecoderWeights, part: ModelConfig, ranks: Ranks, kernels: Kernels) -> DecoderWeights:
    """The same, where each layer gives the result of all ranks that share it.

    Where every sum is only added to the residual stream and normed, parts are added up there.
    """
    in_parts = ranks.share.stages == 1 and all(map(_only_added, weights.layers))
    return replace(
        weights,
        add_rms_norm=ranks.joined(kernels.add_rms_norm) if in_parts else None,
        embedding=weights.embedding if ranks.share.stage else ranks.embedding(weights.embedding),
        lm_head=ranks.head(weights.lm_head) if ranks.share.is_last else weights.lm_head,
        layers=[_joined_layer(layer, part, ranks, in_parts) for layer in weights.layers],
    )


def _only_added(layer: LayerWeights) -> bool:
    others = layer.mixed_norm, layer.mlp_out_norm, layer.end
    is_normed = layer.mixer_norm is not None and layer.mlp_norm is not None
    return is_normed and not layer.beside and all(each is None for each in others)


def _joined_layer(layer: LayerWeights, part: ModelConfig, ranks: Ranks, in_parts: bool) -> LayerWeights:
    linear, layer_of = (ranks.part, ranks.part_of_layer) if in_parts else (ranks.summed, ranks.summed_layer)
    mixer = replace(layer.mixer, o=linear(layer.mixer.o, 0))
    if isinstance(mixer, AttentionWeights) and part.shape.qk_norm == "whole":
        mixer = replace(mixer, norms=(ranks.rms_norm(2), ranks.rms_norm(3)))
    if isinstance(layer.mlp, DenseMLP):
        return replace(layer, mixer=mixer, mlp=replace(layer.mlp, down=linear(layer.mlp.down, 1)))
    mlp, experts = layer.mlp, part.shape.experts
    if isinstance(mlp, MLPBesideExperts):
        assert isinstance(mlp.dense, DenseMLP)
        dense = replace(mlp.dense, down=ranks.summed(mlp.dense.down, 1))
        return replace(layer, mixer=mixer, mlp=replace(mlp, dense=dense, experts=_SummedMixture(mlp.experts, ranks)))
    if experts is not None and experts.held is not None:
        assert isinstance(mlp, MixtureMLP)
        mlp = replace(mlp, experts=ranks.dealt(mlp.experts, experts.count))
    return replace(layer, mixer=mixer, mlp=layer_of(mlp, 1))


class _SummedMixture:
    """A Mixture that gives the sum of what the experts of all ranks give, behind two other sums of its layer."""

    def __init__(self, experts: Mixture, ranks: Ranks) -> None:
        self._experts, self._ranks = experts, ranks

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
        return self._ranks.summed_layer(lambda rows: self._experts(rows, chosen, weights, shared), 2)(x)


class PartSource(Part):
    """Gives a rank's part of each tensor of a source. Of a mapped file only this part is read.

    Attributes:
        shapes: the tensors of the part.
    """

    def __init__(
        self, source: WeightSource, config: ModelConfig, part: ModelConfig, stacked: bool, share: Share
    ) -> None:
        super().__init__(config, part, share)
        self._source, own = source, self._own
        self._whole = expected_tensors(config, stacked)
        if config.packed is not None and config.packed.in_groups:  # their tensors are only read whole
            named = {self._here(name): shape for name, shape in self._whole.items()}
            of_own = {name: shape for name, shape in named.items() if name is not None}
            self.shapes = of_own | {name: self.plain_parts[name] for name in of_own.keys() & self.plain_parts}
        else:
            self.shapes = expected_tensors(own, stacked)
        left_out = tuple(_elsewhere(config, share))
        self.shapes = {name: shape for name, shape in self.shapes.items() if not name.startswith(left_out)}

    def lend(self, name: str, dtype: torch.dtype) -> Tensor | None:
        lent = self._source.lend(self.stored(name), dtype)
        return None if lent is None else self._cut(name, lent)

    def copy_into(self, name: str, out: Tensor) -> None:
        stored = self.stored(name)
        is_whole = self._whole_experts and ".experts." in name
        if name.endswith(_AFTER_SUM) and self._number > 0 and not is_whole:
            out.zero_()
            return
        if self._whole[stored] == self.shapes[name]:
            self._source.copy_into(stored, out)
            return
        for dtype in _DTYPES:
            if (lent := self._source.lend(stored, dtype)) is not None:
                out.copy_(self._cut(name, lent))
                return
        whole = torch.empty(self._whole[stored], dtype=out.dtype)
        self._source.copy_into(stored, whole)
        out.copy_(self._cut(name, whole))

    def packed(self, layer: str, dtype: torch.dtype) -> Weight | None:
        """See WeightSource. All of the matrix is read. Raises ModelError: a part would begin or end within a group."""
        stored = self.stored(f"{layer}.").removesuffix(".")
        weight = self._source.packed(stored, dtype)
        if weight is None:
            return None
        name = f"{layer}.weight"
        sizes = list(zip(self.plain[f"{stored}.weight"], self.plain_parts[name], strict=True))
        rows, ((start, size),) = (self.spans(name, *each) for each in sizes)
        numbers = torch.cat([torch.arange(start, start + size) for start, size in rows])
        if len(numbers) < weight.rows:
            weight, _ = with_rows((weight, None), numbers)
        if size == sizes[1][0]:
            return weight
        groups = weight.groups
        assert groups is not None, "what is packed has groups"
        assert isinstance(weight.values, Tensor)
        fits = math.gcd(groups.size, start, size)
        if groups.order is not None or (fits < groups.size and (fits % 8 or weight.scheme == "int4")):
            why = "an order of its inputs" if groups.order is not None else f"groups of {groups.size} inputs"
            raise ModelError(
                f"tensor_parallel_size is {self._count}, but {layer} has {why}, which cannot be cut into parts of "
                f"{size}; take the unquantised checkpoint, or leave it out"
            )
        return replace(
            weight,
            values=weight.values[:, start : start + size].contiguous(),
            groups=_cut_groups(smaller_groups(groups, fits), start, size),
        )

    def _here(self, stored: str) -> str | None:
        """This rank's name of a tensor of the whole model; None where it has nothing of it."""
        if any(int(number) not in self.numbers[of] for of, number in NUMBERED.findall(stored)):
            return None
        return NUMBERED.sub(lambda found: f".{found[1]}.{self.numbers[found[1]].index(int(found[2]))}.", stored)

    def _cut(self, name: str, tensor: Tensor) -> Tensor:
        """A rank's part of a tensor, where it lies if it is one piece."""
        stored = self._whole[self.stored(name)]
        tensor = tensor.view(stored)
        for along, (whole, part) in enumerate(zip(stored, self.shapes[name], strict=True)):
            if whole != part:
                pieces = [tensor.narrow(along, start, size) for start, size in self.spans(name, whole, part)]
                tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, along)
        return tensor


def _elsewhere(config: ModelConfig, share: Share) -> Iterator[str]:
    """How the names begin of tensors that only other stages have."""
    if share.stage > 0 and not (share.is_last and config.shape.tied_embeddings):
        yield f"{EMBEDDING}."
    if not share.is_last:
        yield from ("lm_head.", "model.norm.")


def _cut_groups(groups: Groups, start: int, size: int) -> Groups:
    """The groups of `size` inputs from `start` on, with a scale for each group if they have several a row."""
    first, count = start // groups.size, size // groups.size
    factors, offsets = (each[:, first : first + count].contiguous() for each in (groups.factors, groups.offsets))
    if groups.scales.shape[1] == 1:
        return replace(groups, factors=factors, offsets=offsets, run=count)
    each = [None if of is None else of.repeat_interleave(groups.run, 1) for of in (groups.scales, groups.minima)]
    scales, minima = (None if of is None else of[:, first : first + count].contiguous() for of in each)
    assert scales is not None
    return replace(groups, factors=factors, offsets=offsets, scales=scales, minima=minima, run=1)
