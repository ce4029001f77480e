"""The pieces of a step, made ready to run with the engine's own kernels.

Weights and caches are cut out of one large pool, piece after piece through all of it, so that nothing is in a cache
when it is read, as in a real step. What an operation hands to the next one is small and still in a cache, as there. On
a CPU, pieces are repeated as served decodes are: without the Python around their jobs, between which threads would
wait. On a GPU, the stopwatch captures them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.calibration.measure import filled
from headway.calibration.samples import Kind, Piece
from headway.cost.attention import Chunk
from headway.cost.precision import Precision
from headway.cost.shape import ModelShape
from headway.cost.work import Operation, Work, attention_work, row_work, token_work, total
from headway.kernels import kernels_for
from headway.kernels.interface import AttentionShape, Kernels, LayerCache, StepGeometry
from headway.kernels.weights import Weight

FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
BLOCK_SIZE = 16
LINEAR = (Operation.QKV, Operation.OUTPUT, Operation.GATE_UP, Operation.DOWN)
STREAM_ROW = 4096
FILL = 0x3C24  # the fill on a CPU: 0.01 as bfloat16 and as float32 in pairs, 1.04 as float16


@dataclass(frozen=True, slots=True)
class Case:
    """A piece to time. `call` does it `runs` times."""

    piece: Piece
    call: Callable[[], object]
    runs: int


@dataclass(frozen=True, slots=True)
class AttentionLoad:
    """Sequences that are alike: new tokens of each, and the context they end up with."""

    tokens: int
    context: int
    sequences: int


class Pool:
    """One piece of memory that all weights and caches of a calibration are cut from.

    Args:
        size: bytes; more than any cache holds.
        device: cpu or cuda.
    """

    def __init__(self, size: int, device: str) -> None:
        self.device = device
        self._kernels: dict[torch.dtype, Kernels] = {}
        self.size = size // 2 * 2
        if device == "cpu":
            self._halves = torch.full((self.size // 2,), FILL, dtype=torch.int16)
        else:
            self._halves = filled((self.size // 2,), torch.bfloat16, device).view(torch.int16)

    def tensors(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> Iterator[list[Tensor]]:
        """Tensors of these shapes, again and again until the pool is used up; none where it has no room for them."""
        flat = self._halves.view(dtype)
        counts = [torch.Size(shape).numel() for shape in shapes]
        start = 0
        while start + sum(counts) <= len(flat):
            group = []
            for shape, count in zip(shapes, counts, strict=True):
                group.append(flat[start : start + count].view(shape))
                start += count
            yield group

    def kernels(self, dtype: torch.dtype) -> Kernels:
        """One team of threads for all pieces of a dtype."""
        if dtype not in self._kernels:
            self._kernels[dtype] = kernels_for(self.device, dtype)
        return self._kernels[dtype]

    def repeated(
        self,
        run: Callable[[], Tensor],
        dtype: torch.dtype,
        attentions: Sequence[AttentionShape] = (),
        step: StepGeometry | None = None,
    ) -> Callable[[], object]:
        """`run` as steps repeat it; see Kernels.repeat(). The step may be left out where nothing attends."""
        if self.device != "cpu":
            return run
        kernels, key, place = self.kernels(dtype), object(), step or geometry(AttentionLoad(1, 1, 1), self.device)
        return lambda: kernels.repeat(key, place, attentions, run)

    def bytes_of(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> int:
        return sum(torch.Size(shape).numel() for shape in shapes) * dtype.itemsize


def stream_case(pool: Pool, dtype: torch.dtype) -> Case:
    """All of the pool read once, by a linear layer with one token."""
    rows = pool.size // dtype.itemsize // STREAM_ROW
    (weight,) = next(pool.tensors([(rows, STREAM_ROW)], dtype))
    linear = pool.kernels(dtype).linear(Weight(weight), None)
    token = filled((1, STREAM_ROW), dtype, pool.device)
    shape = ModelShape(1, STREAM_ROW, 1, 1, 1, 1, rows)
    work = row_work(shape, 1, Precision.of(_name(dtype)))[Operation.HEAD]
    return Case(Piece(Kind.STREAM, FORMATS[dtype], "stream", 1, work), pool.repeated(lambda: linear(token), dtype), 1)


def linear_cases(
    pool: Pool,
    shape: ModelShape,
    dtype: torch.dtype,
    tokens: Sequence[int],
    most_flops: float,
    quantization: str = "none",
) -> Iterator[Case]:
    """A layer's products for each number of tokens, over as many layers as the pool has and `most_flops` allow.

    Numbers of tokens for which a single layer takes more are left out, and all where the pool has no room for a layer.
    """
    kernels = pool.kernels(dtype)
    sizes = _matrices(shape)
    layers: list[list[Callable[[Tensor], Tensor]]] = [
        [
            kernels.linear(Weight(qkv, quantization), None),
            kernels.linear(Weight(out, quantization), None),
            kernels.gated_linear(Weight(gate_up, quantization), None),
            kernels.linear(Weight(down, quantization), None),
        ]
        for qkv, out, gate_up, down in pool.tensors(sizes, dtype)
    ]
    kind = "cpu" if pool.device == "cpu" else "gpu"
    precision = Precision.of_engine(_name(dtype), quantization, "auto", shape.head_dim, kind)
    format_ = FORMATS[dtype] if quantization == "none" else quantization
    for count in tokens:
        parts = token_work(shape, count, precision)
        work = total(parts[op] for op in LINEAR)
        piece = Piece(Kind.LINEAR, format_, f"width {shape.hidden}", count, work, kernels=len(LINEAR))
        fitting = min(len(layers), int(most_flops / piece.work.flops))
        if fitting:
            inputs = [filled((count, width), dtype, pool.device) for _, width in sizes]
            yield Case(piece, pool.repeated(_through(layers[:fitting], inputs), dtype), fitting)


def _through(layers: list[list[Callable[[Tensor], Tensor]]], inputs: list[Tensor]) -> Callable[[], Tensor]:
    def call() -> Tensor:
        for layer in layers:
            for linear, x in zip(layer, inputs, strict=True):
                out = linear(x)
        return out

    return call


def _matrices(shape: ModelShape) -> list[tuple[int, int]]:
    """(out, in) of a layer's four products, queries, keys and values stacked, gate and up too."""
    return [
        ((shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.hidden),
        (shape.hidden, shape.heads * shape.head_dim),
        (2 * shape.ffn, shape.hidden),
        (shape.hidden, shape.ffn),
    ]


def attention_case(pool: Pool, shape: ModelShape, dtype: torch.dtype, load: AttentionLoad, most_bytes: int) -> Case:
    """Paged attention of one layer, over as many layers' caches as the pool has and `most_bytes` allow; at least one.

    Raises:
        ValueError: the pool is too small for one layer's cache.
    """
    kernels = pool.kernels(dtype)
    step = geometry(load, pool.device)
    blocks = (step.block_tables.numel(), shape.kv_heads, BLOCK_SIZE, shape.head_dim)
    size = pool.bytes_of([blocks, blocks], dtype)
    if size > pool.size:
        raise ValueError(f"a cache of {size} bytes does not fit into the pool of {pool.size}; make the pool larger")
    wanted = max(1, most_bytes // size)
    caches = [LayerCache(*pair) for _, pair in zip(range(wanted), pool.tensors([blocks, blocks], dtype), strict=False)]
    rows = load.tokens * load.sequences
    query = filled((rows, shape.heads, shape.head_dim), dtype, pool.device)
    chunk = Chunk(load.tokens, load.context - load.tokens, 0, load.sequences)
    parts = attention_work(shape, [chunk], Precision.of(_name(dtype)))
    work = parts[Operation.SCORES] + parts[Operation.VALUES]
    kind = Kind.DECODE if load.tokens == 1 else Kind.PROMPT
    label = f"{shape.heads}/{shape.kv_heads} heads of {shape.head_dim}, {load.sequences} x {load.context}"
    piece = Piece(kind, FORMATS[dtype], label, rows, work, work.flops // (4 * shape.head_dim))

    def call() -> Tensor:
        for cache in caches:
            out = kernels.attention(query, cache, step, shape.head_dim**-0.5, None)
        return out

    attentions = [AttentionShape(shape.heads, shape.kv_heads, shape.head_dim, None)]
    return Case(piece, pool.repeated(call, dtype, attentions, step), len(caches))


def geometry(load: AttentionLoad, device: str) -> StepGeometry:
    """A step of such sequences, whose blocks lie interleaved in the cache."""
    n, blocks = load.sequences, -(-load.context // BLOCK_SIZE)
    return StepGeometry(
        query_start=torch.arange(n + 1, dtype=torch.int32, device=device) * load.tokens,
        context_lens=torch.full((n,), load.context, dtype=torch.int32, device=device),
        block_tables=torch.arange(blocks * n, dtype=torch.int32, device=device).view(blocks, n).T.contiguous(),
        slots=torch.zeros(0, dtype=torch.int64, device=device),
        positions=torch.arange(load.context - load.tokens, load.context, device=device).repeat(n),
        num_sequences=n,
        max_query_len=load.tokens,
        max_context_len=load.context,
        query_lens_host=[load.tokens] * n,
        context_lens_host=[load.context] * n,
    )


def element_case(pool: Pool, shape: ModelShape, dtype: torch.dtype, tokens: int) -> Case:
    """A layer's norms and rotary positions; the activation function is part of a linear case."""
    kernels, device = pool.kernels(dtype), pool.device
    hidden, residual = (filled((tokens, shape.hidden), dtype, device) for _ in range(2))
    weight = filled((shape.hidden,), dtype, device)
    heads = filled((tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim), dtype, device)
    query, key, _ = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
    # A rotation, lest the numbers fade to denormal ones over thousands of calls.
    cos, sin = (torch.full((tokens, shape.head_dim // 2), each, device=device) for each in (0.8, 0.6))
    positions = torch.arange(tokens, device=device)
    precision, deeper = Precision.of(_name(dtype)), replace(shape, layers=2, sliding_windows=())
    one, two = (token_work(each, tokens, precision) for each in (shape, deeper))
    # The first norm of all has nothing to add; those of the second layer are like all others.
    norms = Work(activation_bytes=two[Operation.NORMS].activation_bytes - one[Operation.NORMS].activation_bytes)
    work = total([norms, one[Operation.ROTARY]])

    def call() -> Tensor:
        kernels.rotate(query, key, cos, sin, positions)
        kernels.add_rms_norm(hidden, residual, weight, 1e-6)
        return kernels.add_rms_norm(hidden, residual, weight, 1e-6)[0]

    piece = Piece(Kind.ELEMENTS, FORMATS[dtype], f"width {shape.hidden}", tokens, work, 0, 3)
    return Case(piece, pool.repeated(call, dtype), 1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
