"""Defines the operations that a model needs of a device, and where the tokens of a step stand.

Shapes: T tokens in the step (all sequences laid end to end), S sequences, H query heads, G key/value
heads, D head dimension, N blocks in the pool, B tokens in a block.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.kernels.adapters import Adapted, AdapterRows, AdapterSpec
from headway.kernels.families import CommonParts, Family
from headway.kernels.weights import SILU, SOFTMAX, DeltaRule, Gate, Product, Scores, Weight


@dataclass(slots=True)
class StepGeometry:
    """Where each token of a step stands; tensors are on the model's device, int32 unless said otherwise.

    Sequence i owns tokens query_start[i] .. query_start[i + 1] of the step. Its context, these included, is
    context_lens[i] long, and token j of that context lives in block block_tables[i, j // B] at offset j % B; or in none
    if windows have passed it: the table has a block of zeros. A query attends to earlier positions and to itself.
    """

    query_start: Tensor  # [S + 1]
    context_lens: Tensor  # [S]
    block_tables: Tensor  # [S, most blocks of any sequence], padded with 0
    slots: Tensor  # [T] int64: block * B + offset at which this step's keys and values are stored
    positions: Tensor  # [T] int64
    num_sequences: int
    max_query_len: int
    max_context_len: int
    query_lens_host: list[int]  # [S], the same lengths on the host, so that dispatch needs no sync
    context_lens_host: list[int]  # [S]
    groups: tuple[StepGeometry, ...] = ()  # with further KV cache groups: the same step with the tables of each
    spans: Tensor | None = None  # [1 + S or more, 7] int64, of recurrent layers, see Span; the first entry is S
    repeatable: bool = False  # whether steps of as many tokens have their tensors at these addresses too
    families: Sequence[Family] = ()  # no sequence is in two; kernels may read what is common once
    common: CommonParts | None = None  # the same for a GPU


@dataclass(slots=True)
class LayerCache:
    """Keys and values of one layer; each is [N, G, B, D] in the cache's dtype.

    Kernels may arrange them in another way within a block. An int8 cache has a float32 scale for each token and head
    beside it, [N, G, B]. Of a latent, which is kept once, values are the first elements of the keys.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    group: int = field(default=0, kw_only=True)  # whose block tables say where its blocks are
    is_latent: bool = field(init=False)

    def __post_init__(self) -> None:
        is_part = self.values.shape[3] < self.keys.shape[3]
        self.is_latent = is_part and self.values.data_ptr() == self.keys.data_ptr()

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the cache; each has a part of every block."""
        kept = self.keys, None if self.is_latent else self.values, self.key_scales, self.value_scales
        return [tensor for tensor in kept if tensor is not None]


@dataclass(slots=True)
class LayerState:
    """The states of one recurrent layer, in slots; float32."""

    inputs: Tensor  # [N, width - 1, channels], the last that the convolution has seen
    matrices: Tensor | None  # [N, H, key dimension, value dimension] of a delta net
    group: ClassVar[int] = 0

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the states."""
        return [self.inputs] if self.matrices is None else [self.inputs, self.matrices]


class Span(NamedTuple):
    """A sequence's part of a step: `tokens` from `first` on, and slots of its states. A row of `StepGeometry.spans`."""

    first: int
    tokens: int
    source: int  # the slot that has the state before them; -1: there is none before a sequence's first token
    target: int  # the slot for the state behind them
    kept_tokens: int = 0  # behind so many of them the state is copied to `kept`; 0: it is not
    kept: int = 0
    further: int = 0  # so many rows on are the `kept_tokens`, `kept` and `further` of a later copy; 0: there is none


class SinkQueries(NamedTuple):
    """Queries for the first keys of a sequence, in place of its other queries (StreamingLLM; Xiao et al., 2024).

    So a query sees these keys at another distance than that of their positions.
    """

    rows: Tensor  # [T, H, D], dense along heads and dimensions
    num_keys: int  # the first keys of a sequence, at most 512 (see AttentionSinks)


# None: the model's dtype.
KV_CACHE_DTYPES = {"auto": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


class AttentionShape(NamedTuple):
    """A kind of attention that layers have; the window sinks apart."""

    heads: int
    kv_heads: int
    width: int
    window: int | None


@dataclass(slots=True)
class RoutingCounts:
    """What mixtures of experts have done since the kernels were made, added up over layers and steps."""

    mixtures: int = 0  # times that a mixture was asked
    pairs: int = 0  # pairs of a token and an expert that it was sent to
    touched: int = 0  # experts that had any token
    busiest: int = 0  # tokens of the expert that had most

    def since(self, earlier: RoutingCounts) -> tuple[int, int, int, int]:
        """The increase of each count since `earlier`."""
        mixtures, pairs = self.mixtures - earlier.mixtures, self.pairs - earlier.pairs
        return mixtures, pairs, self.touched - earlier.touched, self.busiest - earlier.busiest


# The arguments of Draw for a row of logits; headway/engine/sampler.py says what is done with them, in which order.
DRAW = np.dtype(
    [
        ("inverse_temperature", "f8"),  # 0: the likeliest token
        ("log_min_p", "f8"),  # -inf keeps all
        ("top_k", "i8"),  # 0 keeps all
        ("top_p", "f8"),
        ("log_rest", "f8"),  # log((1 - top_p) / (2 * tokens)); read where top_p < 1
        ("seed", "u8"),  # of the random numbers
        ("position", "i8"),  # the token's position
        ("edits", "i8"),  # address of float64 [3, num_edits]: token ids, biases, first positions they may come at
        ("num_edits", "i8"),
        ("repetition", "f8"),
        ("frequency", "f8"),
        ("presence", "f8"),
        ("seen", "i8"),  # address of int64 [num_seen]: distinct tokens of prompt and output
        ("counts", "i8"),  # address of float32 [num_seen]: how often each is in the output
        ("num_seen", "i8"),  # 0: no penalties
        ("mask", "i8"),  # address of a bit for each token that is allowed, the first in the lowest; 0 allows all
    ]
)


# The name of a kernel, and when it began and ended: nanoseconds of time.monotonic_ns().
KernelTime = tuple[str, int, int]


class Draw(Protocol):
    """Chooses a token for each row of logits, each as if it were alone."""

    def __call__(self, logits: Tensor, rows: NDArray[np.void]) -> list[int]:
        """logits [R, V], left unchanged, rows [R] of DRAW -> a token of each, or -1.

        It is -1 where the logits, edited, hold NaN or +inf or nothing above -inf.
        """


class Forbid(Protocol):
    """Sets logits to -inf where tokens are not allowed."""

    def __call__(self, x: Tensor, marked: Tensor) -> None:
        """x [R, V] float32, V a multiple of 32; marked [H, 1 + V / 32] int32.

        A row of `marked` has the number of a row of x, then a bit for each of its tokens, the first in the lowest bit
        of a word, which is set where the token is allowed. Rows that are not marked keep all tokens.
        """


class Linear(Protocol):
    """A weight in the layout that the device multiplies fastest."""

    out_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out], in x's dtype unless it is wide."""

    def rows(self, numbers: Tensor) -> Tensor:
        """Rows [T] int64 of the weight -> [T, in]: the embedding of tokens where it shares the head's weight."""


class HeadLinear(Protocol):
    """A matrix for each head."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H, in] -> [T, H, out]; both may be strided along T and H."""


class Mixture(Protocol):
    """Experts in the layout that the device multiplies fastest."""

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
        """x [T, N] through the experts that are chosen for each token, [T, k], none twice: their weighted sum, [T, N].

        With a shared expert's result, [T, N], `chosen` and `weights` have a last column for it. An expert is given its
        tokens alone, and sums are in float32 and in one order, so that what a token gets depends on nothing else in
        the step. May wait for the device.
        """


RMSNorm = Callable[[Tensor, Tensor, float], Tensor]  # see Kernels
AddRMSNorm = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]  # see Kernels


class Chain(NamedTuple):
    """How long a chain of drafts becomes: none more once what a pass wins is `cost` at most, or a row of it `each`.

    `worths` are what right drafts of the rows win; each pass multiplies them with the chances that its own are right.
    Drafts are below `size`. One of a probability below the first of the bounds is right by the first chance, and so on.
    """

    most: int
    cost: float
    each: float
    worths: Sequence[float]
    size: int
    bounds: Sequence[float]
    chances: Sequence[float]


class Kernels(Protocol):
    """The operations of a decoder layer on one device.

    warm_up_tokens: a prompt of so many tokens runs the same code as any longer one; None where that is not known.
    """

    name: str
    warm_up_tokens: int | None

    def linear(self, weight: Weight, bias: Tensor | None, wide: bool = False) -> Linear:
        """Lay out weight [out, in] for repeated use; the caller drops its own reference afterwards.

        Wide, it gives its sums in float32, unrounded; or in x's dtype, where the device's library gives nothing else.

        Raises:
            ValueError: these kernels do not have the weight's format; it names the format.
        """

    def gated_linear(self, weight: Weight, bias: Tensor | None, gate: Gate = SILU) -> Callable[[Tensor], Tensor]:
        """Lay out weight [2 * F, in], gate rows above up rows, as x [T, in] -> the gate's f(gate x) * up x [T, F].

        Raises as `linear`.
        """

    def mixture(self, gate_up: Iterable[Product], down: Iterable[Product], count: int, gate: Gate = SILU) -> Mixture:
        """Lay out `count` experts, each a gated linear layer and one behind it, all alike. Raises as `linear`."""

    def adapted(self, product: Callable[[Tensor], Tensor], spec: AdapterSpec, rows: AdapterRows) -> Adapted:
        """A linear or gated linear layer of these kernels, as it is, with slots for adapters beside it."""

    def choose(self, dtype: torch.dtype, scheme: str) -> str:
        """Settle which of several ways a model's products take, which may need measuring; say which, or nothing."""

    @property
    def named(self) -> Mapping[str, object]:
        """The objects that laid-out weights refer to beside tensors, by name; empty if they cannot be kept on disk."""

    def head_linear(self, weights: Iterable[Weight], count: int) -> HeadLinear:
        """Lay out the matrices [out, in] of `count` heads, all alike. Raises as `linear`."""

    def join(self, first: Tensor, second: Tensor | None = None) -> Tensor:
        """first [T, H, D] and second [T, H, E], strided along T and H or not, side by side -> dense [T, H, D + E]."""

    def take(self, table: Tensor, rows: Tensor) -> Tensor:
        """Copies of the rows [T] int64 of table [N, D] -> [T, D]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension, computed in float32, returned in x's dtype."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual); may reuse the memory of both arguments."""

    def add(self, x: Tensor, residual: Tensor, factor: float = 1.0) -> Tensor:
        """(x + residual) * factor; may reuse the memory of residual."""

    def gated(self, x: Tensor, up: Tensor, gate: Gate) -> Tensor:
        """The gate's f(x) * up, both [T, F], up strided along T; may reuse the memory of x."""

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap) in float32, returned in x's dtype; may reuse the memory of x."""

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        """Apply RoPE in place to query [T, H, D] and key [T, G, D], half-split layout.

        cos and sin are float32 tables [context, R // 2], R <= D the rotated part of the head. A position behind their
        end counts as their last.
        """

    def store(self, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """Write key and value [T, G, D] to their slots [T].

        A cache of float8_e4m3fn holds numbers up to 448, the largest that it has, for greater ones.

        Raises:
            ValueError: an int8 cache, which these kernels do not have.
        """

    def attention(
        self,
        query: Tensor,
        cache: LayerCache,
        step: StepGeometry,
        scale: float,
        sliding_window: int | None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
        first: SinkQueries | None = None,
    ) -> Tensor:
        """Causal paged attention of query [T, H, D] over the stored context -> [T, H, D], or as wide as values are.

        This step's keys and values are already stored. With a sliding window of w, position p attends
        to positions p - w + 1 .. p. Sinks, a float32 logit [H] for each head, take part in the softmax's denominator
        as a key of no value that every query sees (gpt-oss); they are not scaled. With a softcap, a scaled product s
        becomes softcap * tanh(s / softcap) (Gemma 2). With sink queries, every query sees the first keys, too.
        """

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """x * sigmoid(gate), both [T, H, D], gate strided along T; may reuse the memory of x."""

    def convolve(
        self,
        x: Tensor,
        gates: tuple[Tensor, Tensor] | None,
        taps: Tensor,
        bias: Tensor | None,
        state: LayerState,
        step: StepGeometry,
    ) -> Tensor:
        """The causal convolution of each channel of x [T, C] with taps [width, C] -> [T, C], and its states go on.

        With gates, x is multiplied with the first before, and the result with the second; without, the result y is
        y * sigmoid(y). x and gates may be strided along T. What a token gets depends on its sequence alone, however
        steps divide it.
        """

    def delta_rule(
        self, mixed: Tensor, gate: Tensor, numbers: Tensor, rule: DeltaRule, state: LayerState, step: StepGeometry
    ) -> Tensor:
        """The gated delta rule (Yang et al., 2024), its result normed and gated -> [T, H * value dimension].

        For each token a head's matrix S becomes f S + k (beta (v - f S^T k))^T, and its result is S^T q, with f what
        it keeps (see DeltaRule), beta = sigmoid(b), and q and k of length 1, q divided by the root of their dimension.
        That is normed, and multiplied with the gate g as g * sigmoid(g). What a token gets depends on its sequence
        alone, however steps divide it.

        Args:
            mixed: [T, C], dense: queries, keys and values of all heads.
            gate: [T, H * value dimension], strided along T or not.
            numbers: [T, 2 * H], dense: b of all heads, then a.
        """

    def route(
        self, logits: Tensor, per_token: int, normalized: bool, shared: bool, scores: Scores = SOFTMAX
    ) -> tuple[Tensor, Tensor]:
        """The experts that a router's logits [T, E] choose, and their weights: int64 and float32, each [T, per_token].

        The greatest come first, the lowest of equals. Weights are scores in float32; normalized, divided by the sum of
        those that are chosen. With a shared expert, the result has a column more: expert E, of weight 1; or, if it is
        gated, of the sigmoid of its logit, which logits have as another column, [T, E + 1]. A row with a NaN has NaN
        as weights.
        """

    def routing_counts(self) -> RoutingCounts:
        """The counts of all mixtures of these kernels so far."""

    def timed(self, wanted: bool | None) -> list[KernelTime]:
        """The last kernels that were timed, oldest first: True begins to time them, False ends it, None does neither.

        The list is empty where nothing is timed, as with kernels that cannot be.
        """

    @property
    def draw(self) -> Draw | None:
        """Chooses the next tokens; None where the sampler's own tensor work is to."""

    @property
    def forbid(self) -> Forbid:
        """Applies masks of allowed tokens where no kernel draws."""

    def likeliest(self, logits: Tensor, size: int) -> tuple[list[float], list[int]]:
        """The likeliest of the first `size` tokens of each row [R, V], the first of equals, and its probability.

        Of a row with NaN or +inf among these, the probability is 0 or NaN.
        """

    def repeat(
        self, key: Hashable, step: StepGeometry, attentions: Sequence[AttentionShape], run: Callable[[], Tensor]
    ) -> Tensor:
        """Call run(), or repeat what it did: with the same key it does the same operations on the same addresses.

        Only what stands at these addresses, and the step's sequences, may differ. The result may be at the same
        address each time. `attentions` are those of `run`, which
        must leave its tensors alone but for kernels' own operations.
        """

    def copy_blocks(self, caches: list[LayerCache], sources: list[int], targets: list[int]) -> None:
        """Copy whole blocks inside every layer's cache, for copy-on-write."""

    def chain(
        self,
        key: Hashable,
        step: StepGeometry,
        attentions: Sequence[AttentionShape],
        token_ids: Tensor,
        run: Callable[[], Tensor],
        chain: Chain,
    ) -> list[list[tuple[int, float]]]:
        """Drafts behind each sequence's one token of a repeatable step, the likeliest, with their probabilities.

        There is at least one, but none where the kernels have no chains. Keys and values of all but the last are
        stored; their slots must follow one another. `run` gives the logits [T, V]; see repeat() for the rest.
        """


def check_heads(name: str, x: Tensor) -> None:
    """Raise ValueError unless x [T, H, D] is dense along heads and dimensions; tokens may be strided."""
    if x.dim() != 3 or x.stride(2) != 1 or (x.shape[1] > 1 and x.stride(1) != x.shape[2]):
        raise ValueError(
            f"{name} of shape {tuple(x.shape)} has strides {x.stride()}; its heads and dimensions must be dense: "
            "pass a view of shape [tokens, heads, head_dim] or call .contiguous()"
        )
