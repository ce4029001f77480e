"""What layers of one decoder have of their own, where they are not alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that have sizes of their own (Gemma 4).

    Args:
        layers: their numbers.
        keys_are_values: there is no projection to values, which are made of what becomes the keys.
        source: the layer whose keys and values these attend to; None: their own.
    """

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    ffn: int
    window: int | None = None
    keys_are_values: bool = False
    source: int | None = None


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """A second embedding of tokens, of which each layer gets a part (Gemma 4, Gemma 3n).

    Args:
        width: of a layer's part.
        vocab: of this embedding.
    """

    width: int
    vocab: int

    def parameters(self, layers: int, hidden: int) -> int:
        """The embedding, the projection of the first one and its norm; and in each layer two projections and a norm."""
        whole = layers * self.width
        return self.vocab * whole + whole * hidden + self.width + layers * hidden * (2 * self.width + 1)
