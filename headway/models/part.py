"""Which part a rank has of each tensor of a model that several ranks share; see models.sharding."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import Tensor

from headway.kernels.ranks import Share
from headway.models.config import ModelConfig
from headway.models.quantization import EMBEDDING
from headway.models.tensors import plain_tensors

_OF_TOKENS = (f"{EMBEDDING}.", "lm_head.")
NUMBERED = re.compile(r"\.(layers|heads|experts)\.(\d+)\.")  # in names of tensors of which a rank has some
Span = tuple[int, int]  # the first of some rows or columns, and how many there are


def layers_of(config: ModelConfig, share: Share) -> range:
    """The layers of a stage by their number."""
    first, end = (config.shape.layers * stage // share.stages for stage in (share.stage, share.stage + 1))
    return range(first, end)


class Part:
    """What a rank has of the tensors of a model.

    Where names have a number of what ranks have some of, a rank's own begin with 0.

    Attributes:
        config: of the whole model.
        plain, plain_parts: plain_tensors() of the whole model, and of what this rank has.
    """

    def __init__(self, config: ModelConfig, part: ModelConfig, share: Share) -> None:
        self.config, self._part = config, part
        self._number, self._count, self._whole_experts = share.number, share.count, share.whole_experts
        experts = part.shape.experts
        self.numbers = {"layers": layers_of(config, share), "heads": _own(part.shape.heads, self._number)}
        if experts is not None:
            self.numbers["experts"] = _own(experts.here, self._number if self._whole_experts else 0)
        self._by_turns = config.routing is not None and config.routing.by_turns
        vocab = config.shape.vocab
        start, end = (vocab * number // self._count for number in (self._number, self._number + 1))
        self._tokens = start, end - start
        self._own = replace(part, shape=replace(part.shape, vocab=end - start))
        self.plain, self.plain_parts = plain_tensors(config), plain_tensors(self._own)

    def cut_plain(self, name: str, tensor: Tensor, along: int) -> Tensor:
        """What a rank has of a dimension of a plain tensor, of a tensor that has the same one."""
        sizes = self.plain[self.stored(name)][along], self.plain_parts[name][along]
        return torch.cat([tensor.narrow(along, *span) for span in self.spans(name, *sizes)], along)

    def stored(self, name: str) -> str:
        """The whole model's name of a tensor."""
        return NUMBERED.sub(lambda found: f".{found[1]}.{self.numbers[found[1]][int(found[2])]}.", name)

    def spans(self, name: str, whole: int, part: int) -> list[Span]:
        """What a rank has of a dimension of a tensor; several pieces where that has several matrices in it."""
        if whole == part:
            return [(0, part)]
        if name.startswith(_OF_TOKENS):
            return [self._tokens]
        sizes = [(whole, part)]
        if ".qkv_proj." in name:
            of_all, own, width = self.config.shape, self._part.shape, self.config.shape.head_dim
            of_keys = of_all.kv_heads * width, own.kv_heads * width
            sizes = [(of_all.heads * width, own.heads * width), of_keys, of_keys]
        elif ".in_proj_qkv." in name or ".conv1d." in name:
            sizes = list(zip(*map(_convolved, (self.config, self._part)), strict=True))
        elif ".conv.in_proj." in name:
            sizes = [(whole // 3, part // 3)] * 3
        elif ".gate_up_proj" in name and not self._by_turns:
            sizes = [(whole // 2, part // 2)] * 2
        spans, begin = [], 0
        for size, own_size in sizes:
            pieces = size // own_size  # fewer than ranks where several have the same one
            spans.append((begin + self._number * pieces // self._count * own_size, own_size))
            begin += size
        return spans


def _own(count: int, number: int) -> range:
    """The numbers that a rank has of something of which each has `count`."""
    return range(number * count, (number + 1) * count)


def _convolved(config: ModelConfig) -> list[int]:
    """Channels of a delta net that are queries, keys and values."""
    state = config.shape.state
    assert state is not None
    return [state.key_heads * state.key_dim] * 2 + [state.heads * state.value_dim]
