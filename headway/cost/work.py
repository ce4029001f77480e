"""What a step does, operation by operation: FLOPs, and bytes of weights, activations and cache.

A FLOP is half a multiply-add of a matrix product (2 each, as documents 001 to 003 count). Operations on single elements
(norms, rotary positions, activation functions, softmax) count their bytes and no FLOPs: every machine is bound by
bytes in them. Attention counts the query-key pairs that the causal mask and the window leave, and no traffic for
the scores, which tiled attention keeps on the chip (FlashAttention, Dao et al., 2022).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from headway.cost.shape import ModelShape


class Operation(StrEnum):
    """The operations of a decoder step, in order; those of a layer stand for all layers together."""

    EMBEDDING = "embedding"
    NORMS = "norms"  # two in each layer, with the residual additions, and those of queries and keys
    QKV = "qkv"
    ROTARY = "rotary"
    KV_STORE = "kv_store"
    SCORES = "scores"
    VALUES = "values"
    OUTPUT = "output"
    GATE_UP = "gate_up"
    ACTIVATION = "activation"
    DOWN = "down"
    FINAL_NORM = "final_norm"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class Precision:
    """Bits of an element, so that four-bit formats have a whole number; fine for any that fill whole bytes."""

    weight_bits: int = 16
    activation_bits: int = 16
    kv_bits: int = 16

    def __post_init__(self) -> None:
        if min(self.weight_bits, self.activation_bits, self.kv_bits) < 1:
            raise ValueError(f"{self} has a width below 1 bit")

    @classmethod
    def of(cls, dtype: str) -> Precision:
        """Everything in one dtype: float32, bfloat16 or float16. Raises ValueError for another name."""
        bits = {"float32": 32, "bfloat16": 16, "float16": 16}.get(dtype)
        if bits is None:
            raise ValueError(f"dtype is {dtype!r}; it must be float32, bfloat16 or float16")
        return cls(bits, bits, bits)


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs and bytes of an operation, or of many."""

    flops: int = 0
    weight_bytes: int = 0
    activation_bytes: int = 0
    kv_read_bytes: int = 0
    kv_write_bytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.weight_bytes + other.weight_bytes,
            self.activation_bytes + other.activation_bytes,
            self.kv_read_bytes + other.kv_read_bytes,
            self.kv_write_bytes + other.kv_write_bytes,
        )

    @property
    def kept_bytes(self) -> int:
        """Bytes of weights and cache: what must come from memory even if every activation stays in a cache."""
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes

    @property
    def bytes(self) -> int:
        return self.kept_bytes + self.activation_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved; 0 where nothing is moved."""
        return self.flops / self.bytes if self.bytes else 0.0


def total(parts: Iterable[Work]) -> Work:
    """The sum of all parts."""
    whole = Work()
    for part in parts:
        whole += part
    return whole


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's part of a step.

    Args:
        tokens: computed in this step, at least 1.
        context: computed in earlier steps.
        logit_rows: tokens whose logits are wanted: 1 for a decode and for the end of a prompt, 0 for a prompt
            that goes on.
    """

    tokens: int
    context: int = 0
    logit_rows: int = 1

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.context < 0 or not 0 <= self.logit_rows <= self.tokens:
            raise ValueError(f"{self} is no part of a step: tokens >= 1, context >= 0, 0 <= logit_rows <= tokens")


def attended_pairs(tokens: int, context: int, window: int | None = None) -> int:
    """Query-key pairs of `tokens` new tokens after `context` others: sum of min(context + i, window), i from 1 up."""
    if window is None:
        return tokens * context + tokens * (tokens + 1) // 2
    growing = min(tokens, max(0, window - context))
    return growing * context + growing * (growing + 1) // 2 + (tokens - growing) * window


def visible_keys(tokens: int, context: int, window: int | None = None) -> int:
    """Keys that at least one of the new tokens attends to, the new ones included."""
    whole = context + tokens
    return whole if window is None else min(whole, window + tokens - 1)


def step_work(shape: ModelShape, chunks: Sequence[Chunk], precision: Precision | None = None) -> dict[Operation, Work]:
    """The work of one step over all its sequences: whole prompts, chunks of them, decodes, or any mixture.

    Each weight is read once in a step; of the embedding only the rows of the step's tokens are. Each sequence's
    visible keys and values are read once in each layer.
    """
    precision = precision or Precision()
    tokens = sum(chunk.tokens for chunk in chunks)
    rows = sum(chunk.logit_rows for chunk in chunks)
    return _Counter(shape, precision, tokens, rows).count(chunks) if chunks else {}


class _Counter:
    """Counts the operations of a step of `tokens` tokens, of which `rows` want logits."""

    def __init__(self, shape: ModelShape, precision: Precision, tokens: int, rows: int) -> None:
        self.shape = shape
        self.precision = precision
        self.tokens = tokens
        self.rows = rows

    def count(self, chunks: Sequence[Chunk]) -> dict[Operation, Work]:
        s, tokens = self.shape, self.tokens
        attended = s.heads * s.head_dim
        stored = s.layers * tokens * 2 * s.kv_heads * s.head_dim
        embedded = min(tokens, s.vocab) * s.hidden
        scores, values = self._attention(chunks)
        return {
            Operation.EMBEDDING: self._elements(weights=embedded, activations=tokens * s.hidden),
            Operation.NORMS: self._norms(),
            Operation.QKV: self._linear(s.layers, tokens, s.hidden, s.qkv_rows, s.qkv_bias),
            Operation.ROTARY: self._elements(activations=2 * s.layers * tokens * (s.heads + s.kv_heads) * s.head_dim),
            Operation.KV_STORE: Work(
                activation_bytes=_bytes(stored, self.precision.activation_bits),
                kv_write_bytes=_bytes(stored, self.precision.kv_bits),
            ),
            Operation.SCORES: scores,
            Operation.VALUES: values,
            Operation.OUTPUT: self._linear(s.layers, tokens, attended, s.hidden, s.o_bias),
            Operation.GATE_UP: self._linear(s.layers, tokens, s.hidden, 2 * s.ffn, s.mlp_bias),
            Operation.ACTIVATION: self._elements(activations=s.layers * tokens * 3 * s.ffn),
            Operation.DOWN: self._linear(s.layers, tokens, s.ffn, s.hidden, s.mlp_bias),
            Operation.FINAL_NORM: self._elements(weights=s.hidden, activations=4 * tokens * s.hidden),
            Operation.HEAD: self._linear(1, self.rows, s.hidden, s.vocab, False) if self.rows else Work(),
        }

    def _norms(self) -> Work:
        """The first norm reads one tensor and writes one; each later one reads and writes the residual as well."""
        s = self.shape
        weights = s.layers * (2 * s.hidden + 2 * s.head_dim * s.qk_norm)
        activations = (2 + (2 * s.layers - 1) * 4) * self.tokens * s.hidden
        of_heads = 2 * s.layers * self.tokens * (s.heads + s.kv_heads) * s.head_dim * s.qk_norm
        return self._elements(weights, activations + of_heads)

    def _linear(self, layers: int, tokens: int, inputs: int, outputs: int, bias: bool) -> Work:
        work = self._elements(layers * outputs * (inputs + bias), layers * tokens * (inputs + outputs))
        return Work(2 * layers * tokens * inputs * outputs, work.weight_bytes, work.activation_bytes)

    def _attention(self, chunks: Sequence[Chunk]) -> tuple[Work, Work]:
        """Scores read the queries and the keys; values read the values and write the result."""
        s = self.shape
        pairs = keys = 0
        for window in set(s.sliding_windows):
            layers = s.sliding_windows.count(window)
            pairs += layers * sum(attended_pairs(chunk.tokens, chunk.context, window) for chunk in chunks)
            keys += layers * sum(visible_keys(chunk.tokens, chunk.context, window) for chunk in chunks)
        half = Work(
            flops=2 * s.heads * s.head_dim * pairs,
            activation_bytes=_bytes(s.layers * self.tokens * s.heads * s.head_dim, self.precision.activation_bits),
            kv_read_bytes=_bytes(keys * s.kv_heads * s.head_dim, self.precision.kv_bits),
        )
        return half, half

    def _elements(self, weights: int = 0, activations: int = 0) -> Work:
        return Work(
            weight_bytes=_bytes(weights, self.precision.weight_bits),
            activation_bytes=_bytes(activations, self.precision.activation_bits),
        )


def _bytes(elements: int, bits: int) -> int:
    return -(-elements * bits // 8)
