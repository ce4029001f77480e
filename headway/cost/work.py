"""What a step does, operation by operation: FLOPs, and bytes of weights, activations and cache.

A FLOP is half a multiply-add of a matrix product (2 each, as documents 001 to 003 count), or an operation of a norm on
an element. Other operations on single elements (rotary positions, activation functions, softmax, sampling) count their
bytes and no FLOPs: every machine is bound by bytes in them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from headway.cost.attention import SCORE_PASSES, Chunk, attention
from headway.cost.layers import Experts, LayerInputs
from headway.cost.precision import Format, Precision
from headway.cost.shape import ModelShape


class Operation(StrEnum):
    """The operations of a decoder step, in order; those of a layer stand for all layers together."""

    EMBEDDING = "embedding"
    NORMS = "norms"  # norms of all layers, with the residual additions, and norms of queries, keys and latents
    QKV = "qkv"
    ROTARY = "rotary"
    KV_STORE = "kv_store"
    LATENT = "latent"  # products between latents and keys and values; only in latent attention
    SCORES = "scores"
    VALUES = "values"
    OUTPUT = "output"
    RECURRENT_IN = "recurrent_in"  # the first projections of recurrent layers
    RECURRENT = "recurrent"  # their convolutions and matrices
    RECURRENT_OUT = "recurrent_out"
    GATE_UP = "gate_up"
    ACTIVATION = "activation"
    DOWN = "down"
    ROUTER = "router"
    SHARED_EXPERTS = "shared_experts"
    LAYER_INPUTS = "layer_inputs"  # projections of the second embedding, of which each layer gets a part
    EXPERTS = "experts"
    FINAL_NORM = "final_norm"
    HEAD = "head"
    SAMPLING = "sampling"


NORMALISATION = (Operation.NORMS, Operation.FINAL_NORM)
# FLOPs of an element: the square and its sum, then times the root and the weight (RMSNorm, Zhang and Sennrich, 2019);
# LayerNorm (Ba et al., 2016) sums and takes off the mean, and adds a bias.
RMS_NORM_FLOPS, LAYER_NORM_FLOPS = 4, 7

# Operations that only models of some kinds have; they are left out of a step where they do nothing.
_OF_SOME_KINDS = (
    Operation.RECURRENT_IN,
    Operation.RECURRENT_OUT,
    Operation.GATE_UP,
    Operation.ACTIVATION,
    Operation.DOWN,
    Operation.ROUTER,
    Operation.SHARED_EXPERTS,
    Operation.EXPERTS,
)
_LINEAR = (
    Operation.QKV,
    Operation.OUTPUT,
    Operation.RECURRENT_IN,
    Operation.RECURRENT_OUT,
    Operation.GATE_UP,
    Operation.DOWN,
    Operation.SHARED_EXPERTS,
    Operation.LAYER_INPUTS,
)


class Work(msgspec.Struct, frozen=True, gc=False):
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


def compute_format(operation: Operation, precision: Precision) -> str:
    """The arithmetic that an operation's products are done in: a key of `Hardware.flops_per_s`."""
    if operation in _LINEAR:
        return precision.linear.compute
    if operation is Operation.EXPERTS:
        return precision.of_experts.compute
    if operation in NORMALISATION:
        return "fp32"
    return precision.head.compute if operation is Operation.HEAD else precision.activations.compute


def weight_format(operation: Operation, precision: Precision) -> Format:
    """The format in which an operation's matrices are kept."""
    if operation is Operation.EXPERTS:
        return precision.of_experts
    if operation is Operation.LATENT:
        return precision.of_latent
    if operation in (Operation.HEAD, Operation.ROUTER, Operation.RECURRENT):
        return precision.head if operation is Operation.HEAD else precision.rest
    return precision.linear


def step_work(
    shape: ModelShape, chunks: Sequence[Chunk], precision: Precision | None = None, flash: bool = True
) -> dict[Operation, Work]:
    """The work of one step over all its sequences: whole prompts, chunks of them, decodes, or any mixture.

    Each weight is read once in a step. Of the embedding, only the rows of the step's tokens are read, and as many
    experts as so many tokens touch on average. Each sequence's visible keys and values are read once in each layer.

    Args:
        flash: attention keeps its scores on the chip.
    """
    if not chunks:
        return {}
    tokens, rows = tokens_and_rows(chunks)
    counter = _Counter(shape, precision or Precision(), tokens, rows)
    work = counter.by_token() | counter.by_row() | counter.attention(chunks, flash)
    return {op: work[op] for op in Operation if op in work}


def tokens_and_rows(chunks: Sequence[Chunk]) -> tuple[int, int]:
    """Tokens of a step, and those whose logits are wanted."""
    tokens = sum(chunk.tokens * chunk.sequences for chunk in chunks)
    return tokens, sum(chunk.logit_rows * chunk.sequences for chunk in chunks)


def token_work(shape: ModelShape, tokens: int, precision: Precision) -> dict[Operation, Work]:
    """The work of a step that depends on its number of tokens alone."""
    return _Counter(shape, precision, tokens, 0).by_token()


def row_work(shape: ModelShape, rows: int, precision: Precision) -> dict[Operation, Work]:
    """The work of a step that depends on how many of its tokens have their logits wanted: head and sampling."""
    return _Counter(shape, precision, 0, rows).by_row()


def attention_work(
    shape: ModelShape, chunks: Sequence[Chunk], precision: Precision, flash: bool = True
) -> dict[Operation, Work]:
    """The work of a step that depends on contexts: scores, values, latents, and the states of recurrent layers."""
    return _Counter(shape, precision, *tokens_and_rows(chunks)).attention(chunks, flash)


class _Counter:
    """Counts the operations of a step of `tokens` tokens, of which `rows` want logits."""

    def __init__(self, shape: ModelShape, precision: Precision, tokens: int, rows: int) -> None:
        self.shape = shape
        self.precision = precision
        self.tokens = tokens
        self.rows = rows

    def by_token(self) -> dict[Operation, Work]:
        s = self.shape
        first = {
            Operation.EMBEDDING: self._embedding(),
            Operation.FINAL_NORM: self._norm(
                s.hidden * (1 + s.norm_bias), 4 * self.tokens * s.hidden, self.tokens * s.hidden
            ),
        }
        parts = [_Counter(part, self.precision, self.tokens, 0)._of_layers() for part in s.parts]
        if s.inputs is not None:
            parts.append(self._inputs(s.inputs))
        return first | {op: total(part[op] for part in parts if op in part) for part in parts for op in part}

    def _embedding(self) -> Work:
        s, width = (
            self.shape,
            self.shape.hidden + (self.shape.inputs.width * self.shape.layers if self.shape.inputs else 0),
        )
        return self._elements(min(self.tokens, s.vocab) * width, self.tokens * width)

    def _inputs(self, inputs: LayerInputs) -> dict[Operation, Work]:
        """The work for the second embedding: one projection for all layers, two in each layer, and norms."""
        s, width = self.shape, inputs.width
        whole = self._linear(1, self.tokens, s.hidden, s.layers * width, False)
        norms = self._norm(s.layers * s.hidden + width, 2 * self.tokens * s.layers * (s.hidden + width), 0)
        each = self._linear(s.layers, self.tokens, s.hidden, width, False)
        back = self._linear(s.layers, self.tokens, width, s.hidden, False)
        return {Operation.LAYER_INPUTS: total([whole, norms, each, back])}

    def _of_layers(self) -> dict[Operation, Work]:
        s, tokens, p = self.shape, self.tokens, self.precision
        stored = tokens * s.kv_elements_per_token
        turned = s.heads * (s.latent.rope_dim if s.latent else s.head_dim)
        turned += s.latent.rope_dim if s.latent else s.kv_heads * s.head_dim * (s.projected_kv > 0)
        work = {
            Operation.NORMS: self._norms(),
            Operation.QKV: self._qkv(),
            Operation.ROTARY: self._elements(activations=2 * s.attention_layers * tokens * turned),
            Operation.KV_STORE: Work(
                activation_bytes=p.activations.bytes_of(stored), kv_write_bytes=p.kv.bytes_of(stored)
            ),
            Operation.OUTPUT: self._linear(s.attention_layers, tokens, s.attended, s.hidden, s.o_bias),
            **self._recurrent_projections(),
            **self._feed_forward(s.dense_layers, s.ffn, s.mlp_bias),
            **self._experts(),
        }
        return {op: part for op, part in work.items() if op not in _OF_SOME_KINDS or part.bytes}

    def by_row(self) -> dict[Operation, Work]:
        return {Operation.HEAD: self._head(), Operation.SAMPLING: self._sampling()}

    def _norms(self) -> Work:
        """The work of norms: the first reads one tensor and writes one, later ones read and write the residual too."""
        s = self.shape
        norms = s.layer_norms * s.layers
        of_heads = (s.heads + s.kv_heads * (s.projected_kv > 0)) * s.head_dim if s.qk_norm else 0
        of_latent = s.latent.norm_parameters if s.latent else 0
        weights = (
            norms * s.hidden * (1 + s.norm_bias)
            + s.layers * s.layer_scalars
            + s.attention_layers * (s.qk_norm_parameters + of_latent)
        )
        activations = (2 + (norms - 1) * 4) * self.tokens * s.hidden
        inner = s.attention_layers * self.tokens * (of_heads + of_latent)
        return self._norm(weights, activations + 2 * inner, norms * self.tokens * s.hidden + inner)

    def _norm(self, weights: int, activations: int, normalised: int) -> Work:
        flops = (LAYER_NORM_FLOPS if self.shape.norm_bias else RMS_NORM_FLOPS) * normalised
        moved = self._elements(weights, activations)
        return Work(flops, moved.weight_bytes, moved.activation_bytes)

    def _qkv(self) -> Work:
        s = self.shape
        if s.latent is None:
            return self._linear(s.attention_layers, self.tokens, s.hidden, s.qkv_rows, s.qkv_bias)
        matrices = s.latent.projections(s.layers, s.hidden, s.heads)
        between = 2 * (s.latent.q_rank or 0)
        elements = self.tokens * (s.hidden + between + s.qkv_rows)
        return Work(
            2 * self.tokens * sum(map(math.prod, matrices)),
            self.precision.linear.bytes_of_matrices(matrices),
            self.precision.activations.bytes_of(s.layers * elements),
        )

    def _recurrent_projections(self) -> dict[Operation, Work]:
        s = self.shape
        if (state := s.state) is None:
            return {}
        layers = len(s.recurrent)
        projections = self._linear(layers, self.tokens, s.hidden, state.projected - state.numbers, state.bias)
        inputs, outputs = layers * self.tokens * s.hidden, layers * self.tokens * state.numbers
        plain = self._elements(layers * s.hidden * state.numbers, outputs)
        return {
            Operation.RECURRENT_IN: projections + Work(2 * inputs * state.numbers) + plain,
            Operation.RECURRENT_OUT: self._linear(layers, self.tokens, state.mixed, s.hidden, state.bias),
        }

    def _recurrence(self, chunks: Sequence[Chunk]) -> dict[Operation, Work]:
        """The work of recurrent layers between their projections.

        A head's matrix is read with the key and with the query, and written: three products for each token. States are
        read and written once for each sequence; between its tokens they stay on the chip.
        """
        s, p = self.shape, self.precision
        if (state := s.state) is None:
            return {}
        layers, sequences = len(s.recurrent), sum(chunk.sequences for chunk in chunks)
        products = state.channels * state.width + 3 * state.heads * state.key_dim * state.value_dim
        elements = state.projected + state.mixed + 2 * state.channels * (state.heads > 0)
        kept = state.parameters(s.hidden) - s.hidden * (state.projected + state.mixed)
        kept -= (state.projected + s.hidden) * state.bias
        moved = sequences * s.state_bytes
        return {
            Operation.RECURRENT: Work(
                2 * layers * self.tokens * products,
                p.rest.bytes_of(layers * kept),
                p.activations.bytes_of(layers * self.tokens * elements),
                kv_read_bytes=moved,
                kv_write_bytes=moved,
            )
        }

    def _linear(self, layers: int, tokens: int, inputs: int, outputs: int, bias: bool) -> Work:
        p = self.precision
        return Work(
            2 * layers * tokens * inputs * outputs,
            p.linear.bytes_of_matrices([(layers, outputs, inputs)]) + p.rest.bytes_of(layers * outputs * bias),
            p.activations.bytes_of(layers * tokens * (inputs + outputs)),
        )

    def _feed_forward(self, layers: int, width: int, bias: bool) -> dict[Operation, Work]:
        s, rows = self.shape, (self.shape.ffn_matrices - 1) * width
        return {
            Operation.GATE_UP: self._linear(layers, self.tokens, s.hidden, rows, bias),
            Operation.ACTIVATION: self._elements(activations=layers * self.tokens * (rows + width)),
            Operation.DOWN: self._linear(layers, self.tokens, width, s.hidden, bias),
        }

    def _experts(self) -> dict[Operation, Work]:
        if (experts := self.shape.experts) is None:
            return {}
        return {
            Operation.ROUTER: self._router(experts),
            Operation.SHARED_EXPERTS: total(
                self._feed_forward(experts.layers, experts.shared_width, self.shape.mlp_bias).values()
                if experts.shared_width
                else ()
            ),
            Operation.EXPERTS: self._routed(experts),
        }

    def _router(self, experts: Experts) -> Work:
        inputs, layers = self.shape.hidden, experts.layers
        rows = experts.router_rows
        weights = layers * rows * (inputs + experts.router_bias)
        work = self._elements(weights, layers * self.tokens * (inputs + rows))
        return Work(2 * layers * self.tokens * inputs * rows, work.weight_bytes, work.activation_bytes)

    def _routed(self, experts: Experts) -> Work:
        """The work of the experts.

        Each pair of token and expert reads the token, writes what is between the matrices twice, and its result.
        """
        s = self.shape
        pairs, touched = experts.routed(self.tokens), experts.touched(self.tokens)
        between = 2 * s.ffn_matrices * experts.width
        matrices = s.ffn_matrices * s.hidden * experts.width
        biases = s.expert_parameters() - matrices
        kept = self.precision.of_experts.bytes_of_matrices(s.projections()["experts"])
        return Work(
            round(2 * experts.layers * pairs * matrices),
            round(kept * touched / experts.here)
            + self.precision.rest.bytes_of(round(experts.layers * touched * biases)),
            self.precision.activations.bytes_of(round(experts.layers * pairs * (2 * s.hidden + between))),
        )

    def attention(self, chunks: Sequence[Chunk], flash: bool) -> dict[Operation, Work]:
        """The work of attention: scores read the queries and the keys; values read the values and write the result."""
        s, p = self.shape, self.precision
        if s.kinds:
            parts = [_Counter(part, p, self.tokens, 0).attention(chunks, flash) for part in s.parts]
            return {op: total(part[op] for part in parts) for op in parts[0]}
        done = attention(s, chunks, flash)
        half = SCORE_PASSES // 2 * done.score_elements
        # With a gate, the result is read with it and written again.
        written = s.attention_layers * s.attended * (1 + 3 * s.output_gate)
        of_heads = s.latent.of_heads(s.layers, s.heads) if s.latent else []
        turned = Work(
            done.latent_flops,
            p.of_latent.bytes_of_matrices(of_heads),
            p.activations.bytes_of(2 * done.expanded_elements),
        )
        return {
            **({Operation.LATENT: turned} if s.latent else {}),
            **self._recurrence(chunks),
            Operation.SCORES: Work(
                flops=done.score_flops,
                weight_bytes=p.rest.bytes_of(s.attention_layers * s.heads * s.sinks),
                activation_bytes=p.activations.bytes_of(s.attention_layers * self.tokens * s.heads * s.head_dim + half),
                kv_read_bytes=p.kv.bytes_of(done.key_elements),
            ),
            Operation.VALUES: Work(
                flops=done.value_flops,
                activation_bytes=p.activations.bytes_of(written * self.tokens + half),
                kv_read_bytes=p.kv.bytes_of(done.value_elements),
            ),
        }

    def _head(self) -> Work:
        if not self.rows:
            return Work()
        s, p = self.shape, self.precision
        return Work(
            2 * self.rows * s.hidden * s.vocab,
            p.head.bytes_of_matrices([(1, s.vocab, s.hidden)]) + p.rest.bytes_of(s.vocab * s.head_bias),
            p.activations.bytes_of(self.rows * (s.hidden + s.vocab)),
        )

    def _sampling(self) -> Work:
        """The least work of any sampler: logits are widened to float32, and read once more to choose."""
        logits = self.rows * self.shape.vocab
        return Work(activation_bytes=self.precision.activations.bytes_of(logits) + 2 * 4 * logits)

    def _elements(self, weights: int = 0, activations: int = 0) -> Work:
        rest: Format = self.precision.rest
        return Work(
            weight_bytes=rest.bytes_of(weights), activation_bytes=self.precision.activations.bytes_of(activations)
        )
