"""A rank's part of a model that several ranks share, read from the checkpoint without the rest.

The projections that begin attention and a feed-forward layer are cut by rows, so that a rank has some of the heads and
some of the width, and those that end them by columns (Megatron-LM, Shoeybi et al., 2019). Experts are cut like that,
each by its width. Embedding and head are cut by tokens. Where ranks are more than key/value heads, several have one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from headway.cost.shape import ModelShape
from headway.kernels.interface import Ranks
from headway.kernels.weights import Groups, Weight
from headway.models.checkpoint import WeightSource
from headway.models.config import ModelConfig, ModelError
from headway.models.decoder import AttentionWeights, DecoderWeights, DenseMLP, LayerWeights
from headway.models.grouped import smaller_groups, with_rows
from headway.models.quantization import EMBEDDING
from headway.models.tensors import Shapes, expected_tensors

_OF_TOKENS = (f"{EMBEDDING}.", "lm_head.")
_AFTER_SUM = (".o_proj.bias", ".down_proj.bias")  # which only one rank adds
_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
Span = tuple[int, int]  # the first of some rows or columns, and how many there are


def part_of(config: ModelConfig, number: int, count: int) -> ModelConfig:
    """The layers of one rank. The vocabulary stays whole.

    Raises:
        ModelError: so many ranks cannot share this model; one line that says why.
    """
    _check(config, count)
    shape, experts = config.shape, config.shape.experts
    if experts is not None:
        experts = replace(experts, width=experts.width // count, shared_width=experts.shared_width // count)
    shape = replace(
        shape,
        heads=shape.heads // count,
        kv_heads=max(1, shape.kv_heads // count),
        ffn=shape.ffn // count,
        experts=experts,
    )
    return replace(config, shape=shape, caches=shape.caches)


def _check(config: ModelConfig, count: int) -> None:
    shape, routing = config.shape, config.routing
    lacking = (
        (shape.latent is not None, "attention over latents"),
        (bool(shape.recurrent), "recurrent layers"),
        (bool(shape.kinds), "layers of different sizes"),
        (shape.qk_norm == "whole", "norms over the queries of all heads together"),
        (routing is not None and (routing.by_turns or routing.beside), "experts as this family has them"),
    )
    if named := next((name for has, name in lacking if has), None):
        raise ModelError(
            f"tensor_parallel_size is {count}, but ranks cannot share a model with {named} yet; leave it out"
        )
    sizes = [(shape.heads, "query heads"), *_widths(shape)]
    if unequal := next((each for each in sizes if each[0] % count), None):
        fits = [str(n) for n in range(1, shape.heads + 1) if not any(size % n for size, _ in sizes)]
        raise ModelError(
            f"tensor_parallel_size is {count}, which does not divide {unequal[0]} {unequal[1]}; use {', '.join(fits)}"
        )
    if max(shape.kv_heads, count) % min(shape.kv_heads, count):
        raise ModelError(
            f"tensor_parallel_size is {count}, which neither divides {shape.kv_heads} key/value heads nor is a "
            "multiple of them"
        )


def _widths(shape: ModelShape) -> list[tuple[int, str]]:
    dense = [(shape.ffn, "of intermediate_size")] if shape.dense_layers else []
    if shape.experts is None:
        return dense
    widths = (
        (shape.experts.width, "of the experts' width"),
        (shape.experts.shared_width, "of the shared expert's width"),
    )
    return dense + [each for each in widths if each[0]]


def divided(
    source: WeightSource,
    config: ModelConfig,
    stacked: bool,
    ranks: Ranks,
    assemble: Callable[[WeightSource, Shapes, ModelConfig], DecoderWeights],
) -> tuple[ModelConfig, DecoderWeights]:
    """This rank's config and its weights, whose layers ask the other ranks.

    Args:
        source: has the whole model.
        stacked: see expected_tensors().
        assemble: makes the weights of tensors of these shapes.

    Raises:
        ModelError: the model, or a packed matrix of it, cannot be shared.
    """
    part = part_of(config, ranks.number, ranks.count)
    own = PartSource(source, config, part, stacked, ranks)
    return part, _joined(assemble(own, own.shapes, part), ranks)


def _joined(weights: DecoderWeights, ranks: Ranks) -> DecoderWeights:
    """The same, where each layer gives the result of all ranks."""
    return replace(
        weights,
        embedding=ranks.embedding(weights.embedding),
        lm_head=ranks.head(weights.lm_head),
        layers=[_joined_layer(layer, ranks) for layer in weights.layers],
    )


def _joined_layer(layer: LayerWeights, ranks: Ranks) -> LayerWeights:
    assert isinstance(layer.mixer, AttentionWeights)
    mixer = replace(layer.mixer, o=ranks.summed(layer.mixer.o, 0))
    if isinstance(layer.mlp, DenseMLP):
        return replace(layer, mixer=mixer, mlp=replace(layer.mlp, down=ranks.summed(layer.mlp.down, 1)))
    return replace(layer, mixer=mixer, mlp=ranks.summed_layer(layer.mlp, 1))


class PartSource:
    """Gives a rank's part of each tensor of a source. Of a mapped file only this part is read.

    Attributes:
        shapes: the tensors of the part.
    """

    def __init__(
        self, source: WeightSource, config: ModelConfig, part: ModelConfig, stacked: bool, ranks: Ranks
    ) -> None:
        self._source, self._config, self._part = source, config, part
        self._number, self._count = ranks.number, ranks.count
        vocab = config.shape.vocab
        start, end = (vocab * number // self._count for number in (self._number, self._number + 1))
        self._tokens = start, end - start
        own = replace(part, shape=replace(part.shape, vocab=end - start))
        self._whole = expected_tensors(config, stacked)
        # The same with all matrices as if they were not packed.
        self._plain = expected_tensors(replace(config, packed=None), stacked)
        self._plain_parts = expected_tensors(replace(own, packed=None), stacked)
        if config.packed is not None and config.packed.in_groups:  # their tensors are only read whole
            self.shapes = self._whole | {name: self._plain_parts[name] for name in self._whole.keys() & self._plain}
        else:
            self.shapes = expected_tensors(own, stacked)

    def lend(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """See WeightSource."""
        lent = self._source.lend(name, dtype)
        return None if lent is None else self._cut(name, lent)

    def copy_into(self, name: str, out: Tensor) -> None:
        """See WeightSource."""
        if name.endswith(_AFTER_SUM) and self._number > 0:
            out.zero_()
            return
        if self._whole[name] == self.shapes[name]:
            self._source.copy_into(name, out)
            return
        for dtype in _DTYPES:
            if (lent := self._source.lend(name, dtype)) is not None:
                out.copy_(self._cut(name, lent))
                return
        whole = torch.empty(self._whole[name], dtype=out.dtype)
        self._source.copy_into(name, whole)
        out.copy_(self._cut(name, whole))

    def packed(self, layer: str, dtype: torch.dtype) -> Weight | None:
        """See WeightSource. All of the matrix is read.

        Raises:
            ModelError: a part would begin or end within a group.
        """
        weight = self._source.packed(layer, dtype)
        if weight is None:
            return None
        name = f"{layer}.weight"
        rows, columns = (self._spans(name, along, self._plain, self._plain_parts) for along in (0, 1))
        numbers = torch.cat([torch.arange(start, start + size) for start, size in rows])
        if len(numbers) < weight.rows:
            weight, _ = with_rows((weight, None), numbers)
        ((start, size),) = columns
        if size == self._plain[name][1]:
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

    def _cut(self, name: str, tensor: Tensor) -> Tensor:
        """A rank's part of a tensor, where it lies if it is one piece."""
        tensor = tensor.view(self._whole[name])
        for along, (whole, part) in enumerate(zip(self._whole[name], self.shapes[name], strict=True)):
            if whole != part:
                spans = self._spans(name, along, self._whole, self.shapes)
                pieces = [tensor.narrow(along, start, size) for start, size in spans]
                tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, along)
        return tensor

    def _spans(self, name: str, along: int, wholes: Shapes, parts: Shapes) -> list[Span]:
        """What a rank has of a dimension of a tensor; several pieces where that has several matrices in it."""
        whole, part = wholes[name][along], parts[name][along]
        if whole == part:
            return [(0, part)]
        if name.startswith(_OF_TOKENS):
            return [self._tokens]
        sizes = [(whole, part)]
        if ".qkv_proj." in name:
            of_all, own, width = self._config.shape, self._part.shape, self._config.shape.head_dim
            of_keys = of_all.kv_heads * width, own.kv_heads * width
            sizes = [(of_all.heads * width, own.heads * width), of_keys, of_keys]
        elif ".gate_up_proj" in name:
            sizes = [(whole // 2, part // 2)] * 2
        spans, begin = [], 0
        for size, own_size in sizes:
            pieces = size // own_size  # fewer than ranks where several have the same one
            spans.append((begin + self._number * pieces // self._count * own_size, own_size))
            begin += size
        return spans


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
