"""What layers of a decoder are made of and keep, beside the sizes that all have in common.

Symbols are those of `cost.shape`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# Matrices that are alike: how many, rows (outputs), and numbers in a row (inputs).
Matrix = tuple[int, int, int]


class ShapeError(ValueError):
    """A shape that can't be costed or divided; one line that names the value and the limit."""


MOST_SINKS = 512


class AttentionSinks(NamedTuple):
    """Layers that see the first tokens of a sequence and its last ones (StreamingLLM; Xiao et al., 2024)."""

    sinks: int  # how many of the first, in whole blocks
    window: int  # positions that a query sees, the sinks and itself included. Layers with this window have sinks.

    @classmethod
    def of(
        cls, sinks: int | None, window: int | None, block_size: int, max_positions: int, max_model_len: int
    ) -> AttentionSinks | None:
        """The sinks and the window that are asked for, the sinks in whole blocks; None where no sinks are.

        Args:
            window: positions that a query sees; None stands for the length that the model was trained for.
            max_positions: the length that the model was trained for; 0 where it is not known.

        Raises:
            ValueError: they do not go together, or no sequence has more tokens than the window.
        """
        if sinks is None:
            if window is not None:
                raise ValueError(f"attention_window is {window}, which needs --attention-sinks; 4 is usual")
            return None
        rounded, window = -(-sinks // block_size) * block_size, window or max_positions
        if not 1 <= rounded <= MOST_SINKS:
            raise ValueError(
                f"attention_sinks is {sinks}, in whole blocks {rounded}; it must be between 1 and {MOST_SINKS}"
            )
        if max_positions and window > max_positions:
            raise ValueError(
                f"attention_window is {window}, but the model was trained for {max_positions} positions; lower it"
            )
        if window <= rounded:
            raise ValueError(
                f"attention_window is {window}, and sinks take {rounded} of it; raise it or lower --block-size"
            )
        if max_model_len <= window:
            raise ValueError(
                f"attention_sinks is {sinks}, but no sequence has more than {max_model_len} tokens, and attention sees "
                f"{window}; raise --max-model-len or lower --attention-window"
            )
        return cls(rounded, window)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What one layer keeps of each token: a key and a value for each of some heads."""

    heads: int  # key/value heads; 1 for a latent
    # key_dim, value_dim: elements of a head's key and value; value_dim is 0 where values are made of what is kept as
    # the key, as of a latent.
    key_dim: int
    value_dim: int
    window: int | None = None  # how many positions a query sees, itself included; None for all
    sinks: int = 0  # how many of them are always the first ones
    latent: int = 0  # how many of the first elements of a latent values are made of; 0 where there are values
    source: int | None = None  # the layer whose keys and values this one attends to; None: its own

    @property
    def sees_all(self) -> bool:
        """Whether the layer was trained to see all positions."""
        return self.window is None or self.sinks > 0

    @property
    def recent(self) -> int | None:
        """How many positions a query sees behind the sinks."""
        return None if self.window is None else self.window - self.sinks

    @property
    def elements(self) -> int:
        """Elements that the layer keeps of a token; 0 where it attends to another layer's."""
        return 0 if self.source is not None else self.heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What one recurrent layer keeps of each sequence, however long it is, in float32.

    A causal convolution of each channel sees the last `width` tokens, and keeps the inputs of all but one. Gated
    DeltaNet (Yang et al., 2024) has a matrix [key_dim, value_dim] for each head beside it.
    """

    channels: int  # how many channels are convolved
    width: int
    heads: int = 0  # heads of values; 0 for a layer that is nothing but a convolution (LFM2)
    key_heads: int = 0  # heads of queries and keys, each of which serves equally many heads of values
    key_dim: int = 0
    value_dim: int = 0
    bias: bool = False  # the convolution and the projections around it have one

    @property
    def elements(self) -> int:
        return self.channels * (self.width - 1) + self.heads * self.key_dim * self.value_dim

    @property
    def bytes(self) -> int:
        return 4 * self.elements

    @property
    def mixed(self) -> int:
        """Elements of the layer's result for a token, before the last projection."""
        return self.heads * self.value_dim or self.channels

    @property
    def numbers(self) -> int:
        """Outputs of the first projections that are numbers for a head, two each; their matrix is never quantised."""
        return 2 * self.heads

    @property
    def projected(self) -> int:
        """Outputs of the first projections.

        They are what is convolved and two gates, or in a delta net what is convolved, a gate and two numbers a head.
        """
        return self.channels + self.mixed + self.numbers if self.heads else 3 * self.channels

    def parameters(self, hidden: int) -> int:
        """Parameters of a layer: two projections, the convolution, and in a delta net two numbers a head and a norm."""
        of_heads = 2 * self.heads + self.value_dim
        biases = (self.projected + hidden + self.channels) * self.bias
        return hidden * (self.projected + self.mixed) + self.channels * self.width + of_heads + biases


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values are made of one short vector for each token."""

    q_rank: int | None  # elements of the compressed queries; None where queries are not compressed
    kv_rank: int  # elements of the cached vector
    # nope_dim, rope_dim: elements of a head's query and key without and with positions. The part with positions is
    # cached once for all heads.
    nope_dim: int
    rope_dim: int
    value_dim: int  # elements of a head's value
    # Prompts are computed in the space of latents too, as this engine does, and not in the cheaper of both ways.
    always_absorbed: bool = False

    @property
    def norm_parameters(self) -> int:
        return (self.q_rank or 0) + self.kv_rank

    def projections(self, layers: int, hidden: int, heads: int) -> list[Matrix]:
        """The matrices that make all queries, and what is cached, from the hidden state."""
        rows, cached = heads * (self.nope_dim + self.rope_dim), self.kv_rank + self.rope_dim
        matrices = [(layers, (self.q_rank or rows) + cached, hidden)]
        return matrices if self.q_rank is None else [*matrices, (layers, rows, self.q_rank)]

    def of_heads(self, layers: int, heads: int) -> list[Matrix]:
        """The matrices that make the keys and the values of each head from what is cached."""
        return [(layers * heads, self.kv_rank, self.nope_dim), (layers * heads, self.value_dim, self.kv_rank)]


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of the feed-forward layer."""

    count: int  # experts that the router chooses from
    per_token: int  # experts that it chooses for each token
    width: int  # F of each expert
    layers: int  # how many layers have experts; the others have the plain feed-forward layer
    shared_width: int = 0  # F of what every token goes through beside them; 0 for nothing
    # The router has a row for it too, whose logit says how much of its result counts (Qwen2-MoE).
    shared_gate: bool = False
    bias: bool = False  # the experts' matrices have a bias
    router_bias: bool = False  # the router has a bias, one number for each expert
    held: int | None = None  # experts that this device has; None for all
    # Devices whose tokens the experts here serve, each with a batch like this one's (expert parallelism beside
    # data-parallel attention).
    senders: int = 1

    @property
    def here(self) -> int:
        return self.held or self.count

    @property
    def router_rows(self) -> int:
        return self.count + self.shared_gate

    def touched(self, tokens: int) -> float:
        """Expected number of distinct experts, of those here, that a batch of tokens goes to: E (1 - (1 - k/E)^n).

        Each token takes k different experts, all sets of k being as likely, tokens independent of each other. Real
        routers are less even, and touch fewer.
        """
        return self.here * (1.0 - (1.0 - self.per_token / self.count) ** (tokens * self.senders))

    def routed(self, tokens: int) -> float:
        """Pairs of a token and an expert that are computed here, expected."""
        return tokens * self.senders * self.per_token * self.here / self.count


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that have sizes of their own (Gemma 4)."""

    layers: tuple[int, ...]  # their numbers
    kv_heads: int
    head_dim: int
    ffn: int
    window: int | None = None
    keys_are_values: bool = False  # there is no projection to values, which are made of what becomes the keys
    source: int | None = None  # the layer whose keys and values these attend to; None: their own


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """A second embedding of tokens, of which each layer gets a part (Gemma 4, Gemma 3n)."""

    width: int  # elements of a layer's part
    vocab: int  # rows of this embedding

    def parameters(self, layers: int, hidden: int) -> int:
        """Parameters of the embedding, the projection of the first one and its norm, and in each layer two projections
        and a norm."""
        whole = layers * self.width
        return self.vocab * whole + whole * hidden + self.width + layers * hidden * (2 * self.width + 1)
