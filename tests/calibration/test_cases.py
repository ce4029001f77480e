"""Pieces of a step: what they count is what their tensors are, they run, and nothing overlaps in the pool."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.calibration.cases import (
    BLOCK_SIZE,
    STREAM_ROW,
    AttentionLoad,
    Case,
    Pool,
    attention_case,
    element_case,
    geometry,
    linear_cases,
    stream_case,
)
from headway.calibration.efforts import EFFORTS
from headway.calibration.samples import Kind
from headway.cost.shape import ModelShape
from headway.cost.work import Work
from headway.kernels import kernels_for
from headway.kernels.cpu.team import Team
from headway.kernels.interface import AttentionShape, LayerCache, StepGeometry
from headway.kernels.weights import Weight

SIZE = 2**20
ODD = ModelShape(1, 96, 6, 3, 32, 160, 1)
PLAIN = ModelShape(1, 64, 4, 4, 16, 128, 1)
DTYPES = (torch.bfloat16, torch.float32)
LOADS = (AttentionLoad(1, 1, 1), AttentionLoad(1, 37, 5), AttentionLoad(7, 23, 2), AttentionLoad(16, 16, 1))


class CountingKernels:
    """The engine's kernels, which add up what the tensors that they are given hold, and check what comes out."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._kernels = kernels_for("cpu", dtype)
        self.flops = self.weight_bytes = self.activation_bytes = self.kv_bytes = self.calls = 0

    def _done(self, *tensors: Tensor) -> None:
        self.calls += 1
        self.activation_bytes += sum(each.nbytes for each in tensors)
        assert all(torch.isfinite(each).all() for each in tensors)

    def linear(self, weight: Weight, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        assert bias is None and weight.scheme == "none"
        (values,) = weight.parts
        inner = self._kernels.linear(weight, None)

        def call(x: Tensor) -> Tensor:
            out = inner(x)
            self._done(x, out)
            self.flops += 2 * len(x) * values.numel()
            self.weight_bytes += values.nbytes
            return out

        return call

    def gated_linear(self, weight: Weight, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """Counted as the product alone, whose result is twice as wide."""
        assert bias is None and weight.scheme == "none"
        (values,) = weight.parts
        inner = self._kernels.gated_linear(weight, None)

        def call(x: Tensor) -> Tensor:
            out = inner(x)
            self._done(x, out, out)
            self.flops += 2 * len(x) * values.numel()
            self.weight_bytes += values.nbytes
            return out

        return call

    def attention(
        self, query: Tensor, cache: LayerCache, step: StepGeometry, scale: float, window: int | None
    ) -> Tensor:
        out = self._kernels.attention(query, cache, step, scale, window)
        self._done(query, out)
        _, heads, width = query.shape
        token = (cache.keys[0, :, 0].nbytes, cache.values[0, :, 0].nbytes)
        for new, context in zip(step.query_lens_host, step.context_lens_host, strict=True):
            pairs = sum(context - new + i + 1 for i in range(new))
            self.flops += 2 * 2 * pairs * heads * width
            self.kv_bytes += context * sum(token)
        return out

    def repeat(
        self, key: object, step: StepGeometry, attentions: Sequence[AttentionShape], run: Callable[[], Tensor]
    ) -> Tensor:
        return run()

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        self._kernels.rotate(query, key, cos, sin, positions)
        self._done(query, key, query, key)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out = self._kernels.add_rms_norm(x, residual, weight, eps)
        self._done(x, residual, *out)
        return out


class CountingPool(Pool):
    """A pool whose kernels count."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size, "cpu")
        self.counting: dict[torch.dtype, CountingKernels] = {}

    def kernels(self, dtype: torch.dtype) -> CountingKernels:
        return self.counting.setdefault(dtype, CountingKernels(dtype))

    def run(self, case: Case, dtype: torch.dtype) -> Work:
        """What a call did, by its tensors."""
        counts = self.counting[dtype]
        counts.flops = counts.weight_bytes = counts.activation_bytes = counts.kv_bytes = counts.calls = 0
        case.call()
        assert counts.calls == case.runs * case.piece.kernels
        return Work(counts.flops, counts.weight_bytes, counts.activation_bytes, counts.kv_bytes)


def times(work: Work, runs: int) -> Work:
    return Work(
        work.flops * runs,
        work.weight_bytes * runs,
        work.activation_bytes * runs,
        work.kv_read_bytes * runs,
        work.kv_write_bytes * runs,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [ODD, PLAIN], ids=["odd", "plain"])
def test_the_work_of_linear_layers_is_that_of_their_tensors(shape: ModelShape, dtype: torch.dtype) -> None:
    pool = CountingPool()
    cases = list(linear_cases(pool, shape, dtype, (1, 3, 17), 1e9))
    assert [case.piece.tokens for case in cases] == [1, 3, 17]
    for case in cases:
        assert case.piece.kind is Kind.LINEAR and case.runs > 1
        assert pool.run(case, dtype) == times(case.piece.work, case.runs)


def test_linear_layers_keep_to_their_flops() -> None:
    """A run takes as many layers as fit, and numbers of tokens of which not one fits are left out."""
    pool = CountingPool()
    one = next(linear_cases(pool, ODD, torch.bfloat16, (1,), 1e12)).piece.work.flops
    cases = list(linear_cases(pool, ODD, torch.bfloat16, (1, 2, 3, 4, 100), 3.5 * one))
    assert [(case.piece.tokens, case.runs) for case in cases] == [(1, 3), (2, 1), (3, 1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("load", LOADS, ids=str)
def test_the_work_of_attention_is_that_of_its_tensors(load: AttentionLoad, dtype: torch.dtype) -> None:
    pool = CountingPool()
    for shape in (ODD, PLAIN):
        case = attention_case(pool, shape, dtype, load, SIZE // 3)
        assert pool.run(case, dtype) == times(case.piece.work, case.runs)
        pairs = sum(load.context - load.tokens + i + 1 for i in range(load.tokens)) * load.sequences
        assert case.piece.scores == shape.heads * pairs
        assert case.piece.kind is (Kind.DECODE if load.tokens == 1 else Kind.PROMPT)
        assert case.piece.tokens == load.tokens * load.sequences


def test_attention_runs_over_as_many_caches_as_it_may() -> None:
    pool, load = CountingPool(), AttentionLoad(1, 37, 5)
    block = 2 * PLAIN.kv_heads * BLOCK_SIZE * PLAIN.head_dim * 2
    cache = 5 * 3 * block
    assert attention_case(pool, PLAIN, torch.bfloat16, load, 0).runs == 1
    assert attention_case(pool, PLAIN, torch.bfloat16, load, 3 * cache + 1).runs == 3
    assert attention_case(pool, PLAIN, torch.bfloat16, load, 10 * SIZE).runs == SIZE // cache
    with pytest.raises(ValueError, match=f"does not fit into the pool of {SIZE}; make the pool larger"):
        attention_case(pool, PLAIN, torch.bfloat16, AttentionLoad(1, 8192, 8), 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 33])
def test_the_work_of_element_wise_operations_is_that_of_their_tensors(tokens: int, dtype: torch.dtype) -> None:
    pool = CountingPool()
    for shape in (ODD, PLAIN):
        case = element_case(pool, shape, dtype, tokens)
        for _ in range(3):
            assert pool.run(case, dtype) == case.piece.work
        assert (case.runs, case.piece.kind, case.piece.tokens) == (1, Kind.ELEMENTS, tokens)


def test_pieces_are_repeated_without_the_python_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As served decodes are; else threads would wait between the jobs of a piece, as they do not in a step."""
    pool, dtype = Pool(SIZE, "cpu"), torch.bfloat16
    attending = [attention_case(pool, PLAIN, dtype, load, SIZE // 3) for load in LOADS]
    cases = [stream_case(pool, dtype), *linear_cases(pool, ODD, dtype, (1, 3), 1e9), element_case(pool, ODD, dtype, 3)]
    for case in [*attending, *cases] * 2:  # attention's memory grows with the largest piece
        case.call()
    for name in ("run", "share", "run_alone"):
        monkeypatch.delattr(Team, name)
    for case in [*attending, *cases]:
        case.call()


@pytest.mark.parametrize("size", [SIZE, SIZE + 5000])
def test_a_stream_reads_all_of_the_pool_once(size: int) -> None:
    pool = CountingPool(size)
    case = stream_case(pool, torch.bfloat16)
    assert pool.run(case, torch.bfloat16) == case.piece.work
    assert size - 2 * STREAM_ROW < case.piece.work.weight_bytes <= size
    assert case.piece.kind is Kind.STREAM


shapes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4)


@settings(max_examples=50)
@given(shapes, st.sampled_from((*DTYPES, torch.float16)), st.integers(4000, 40_000))
def test_the_pool_cuts_tensors_that_do_not_overlap(
    wanted: list[tuple[int, int]], dtype: torch.dtype, size: int
) -> None:
    pool = Pool(size // 4 * 4, "cpu")
    groups = list(pool.tensors(wanted, dtype))
    spans = [(each.data_ptr(), each.data_ptr() + each.nbytes) for group in groups for each in group]
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert all([tuple(each.shape) for each in group] == wanted for group in groups)
    assert all(each.is_contiguous() and torch.isfinite(each).all() for group in groups for each in group)
    bytes_of_group = pool.bytes_of(wanted, dtype)
    assert len(groups) == pool.size // bytes_of_group
    if spans:
        assert spans[-1][1] - spans[0][0] == len(groups) * bytes_of_group <= pool.size


@pytest.mark.parametrize("load", LOADS, ids=str)
def test_every_sequence_has_blocks_of_its_own(load: AttentionLoad) -> None:
    step = geometry(load, "cpu")
    blocks = math.ceil(load.context / BLOCK_SIZE)
    assert tuple(step.block_tables.shape) == (load.sequences, blocks)
    assert sorted(step.block_tables.flatten().tolist()) == list(range(load.sequences * blocks))
    assert step.query_start.tolist() == [i * load.tokens for i in range(load.sequences + 1)]
    assert step.positions.tolist() == [*range(load.context - load.tokens, load.context)] * load.sequences
    assert step.context_lens.tolist() == step.context_lens_host == [load.context] * load.sequences
    assert step.query_lens_host == [load.tokens] * load.sequences
    assert (step.num_sequences, step.max_query_len, step.max_context_len) == (load.sequences, load.tokens, load.context)


@pytest.mark.parametrize("key", EFFORTS, ids="-".join)
def test_every_effort_measures_all_kinds(key: tuple[str, str]) -> None:
    effort = EFFORTS[key]
    assert any(load.tokens == 1 for load in effort.loads) and any(load.tokens > 1 for load in effort.loads)
    assert effort.rounds >= 3 and len(effort.depths) >= 2 and len(effort.batches) >= 2
    for tokens in (effort.tokens, effort.element_tokens):
        assert list(tokens) == sorted(set(tokens)) and tokens[0] >= 1
    names = [shape.hidden for shape in effort.layers]
    assert len(names) == len(set(names))
