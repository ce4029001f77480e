"""Finds where the scales of a product's inputs can go, so that the model stays the same."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headway.cost.layers import CacheSpec
from headway.models.config import ModelConfig
from headway.models.tensors import Shapes, attention_names, dense_names, mixture_names, recurrent_names


@dataclass(frozen=True, slots=True)
class Feeder:
    """Rows of a layer that another one's inputs are proportional to: an input for each of `times` rows' heads."""

    layer: str
    first: int  # the first of the rows
    heads: int  # heads that the rows are of, each as long; inputs have `times` heads for each
    times: int

    def alike(self, inputs: Tensor) -> Tensor:
        """Replace the numbers of all inputs that come from one row by their mean."""
        if self.times == 1:
            return inputs
        grouped = inputs.view(self.heads, self.times, -1)
        return grouped.mean(1, keepdim=True).expand_as(grouped).reshape(-1)

    def outputs(self, inputs: Tensor) -> Tensor:
        """The numbers of the rows, from those of the inputs, which are equal for each row."""
        return inputs.view(self.heads, self.times, -1)[:, 0].reshape(-1)


class Folds:
    """Finds where the scales of inputs go: into the norm before a product, or into rows of the product before.

    Args:
        norms: the norm that makes the input of layers, by the names of layers that share an input.
        experts: the layers of experts that share the input of a router, by its name.
        plain: names of layers that are not quantised and have an input that others have.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self.norms: dict[tuple[str, ...], str] = {}
        self.experts: dict[tuple[str, ...], list[str]] = {}
        self._feeds: dict[str, str] = {}
        self.plain: set[str] = set()
        for index in range(config.shape.layers):
            layer, norms = f"model.layers.{index}", config.traits.norms
            first: tuple[tuple[str, ...], ...] = (attention_names(config, index),)
            if index in config.shape.recurrent:
                first = recurrent_names(config, index)
                self.plain |= set(first[1])
            for names in filter(None, first if norms.attention else ()):
                self.norms[names] = f"{layer}.{norms.attention}"
            mixture = mixture_names(config, index, stacked=False)
            blocks = [dense_names(f"{layer}.mlp", config.traits.fused)]
            if mixture is not None:
                blocks = [*mixture.experts, *([mixture.shared] if mixture.shared else [])]
                self.norms[mixture.router] = f"{layer}.{norms.mlp}"
                self.experts[mixture.router] = [name for *gated, _ in blocks for name in gated]
                self.plain |= set(mixture.router)
            for *gated, down in blocks:
                if norms.mlp:
                    self.norms[tuple(gated)] = f"{layer}.{norms.mlp}"
                self._feeds[down] = gated[-1]

    def feeder(self, names: tuple[str, ...], shapes: Shapes) -> Feeder | None:
        """The rows that feed the layer with these names; None where no scale can be moved to any."""
        if len(names) > 1:
            return None
        if (up := self._feeds.get(names[0])) is not None:
            inputs = shapes[names[0]][1]
            return Feeder(up, shapes[up][0] - inputs, 1, 1)
        attention, _, part = names[0].rpartition(".")
        if part != "o_proj":
            return None
        value = f"{attention}.{'qkv' if 'qkv_proj' in self._config.traits.fused else 'v'}_proj"
        if value not in shapes:
            return None
        cache = self._config.caches[int(attention.split(".")[2])]
        assert isinstance(cache, CacheSpec)
        rows = cache.heads * cache.value_dim
        return Feeder(value, shapes[value][0] - rows, cache.heads, self._config.shape.heads // cache.heads)
