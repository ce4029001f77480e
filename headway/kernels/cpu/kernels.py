"""The Kernels protocol on CPU: Numba over torch's memory, shared out to a team of threads."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.kernels.cpu import attention as cpu_attention
from headway.kernels.cpu import cache as cpu_cache
from headway.kernels.cpu import rows as cpu_rows
from headway.kernels.cpu import sampling as cpu_sampling
from headway.kernels.cpu.arithmetic import FLOAT8, FLOAT8_UNIT, WIDE_INT8, arithmetic_of
from headway.kernels.cpu.attention_plan import AttentionPlan
from headway.kernels.cpu.cache import is_arranged
from headway.kernels.cpu.chain import MOST_GROWING, MOST_ROWS, Chains
from headway.kernels.cpu.choice import Way, choice_for
from headway.kernels.cpu.chunks import ARRANGED, LATENT, PLAIN
from headway.kernels.cpu.further import SCATTERED, FurtherKernels
from headway.kernels.cpu.matrix import STEP_WORDS, configurations
from headway.kernels.cpu.memory import LargePages
from headway.kernels.cpu.simd import BFLOAT16, KINDS
from headway.kernels.cpu.team import Program, Team
from headway.kernels.interface import AttentionShape, Chain, LayerCache, Linear, SinkQueries, StepGeometry, check_heads
from headway.kernels.weights import SILU, Gate, Weight

# Steps that are kept as programs; each has a different number of tokens.
_MOST_PROGRAMS = 128
CACHE_KINDS = {**KINDS, torch.int8: WIDE_INT8, torch.float8_e4m3fn: FLOAT8}


class CpuKernels(FurtherKernels):
    """Kernels for float32, bfloat16 and float16 on CPU.

    Threads are as many as `torch.get_num_threads()` says when the object is made. One thread at a time
    may call one object. Compiled code is kept on disk, so that only the first start on a machine compiles.

    Args:
        memory: see LargePages.
        tiles: whether there are matrix tiles; None where the processor has them and the system permits it.

    Raises:
        ValueError: see choice_for.
    """

    name = "cpu"
    # A loop over tokens is the same code for one as for many; with two, the last is taken out of them.
    warm_up_tokens: int | None = 2

    def __init__(self, memory: mmap.mmap | None = None, tiles: bool | None = None) -> None:
        super().__init__(Team(), choice_for(tiles), LargePages(memory))
        # Keys are the number of query heads to each key/value head, and the window.
        self._plans: dict[tuple[int, int | None], AttentionPlan] = {}
        self._programs: dict[Hashable, Program] = {}
        # Jobs by the dtypes of queries and cache, and whether they are on matrix tiles.
        self._attending: dict[tuple[torch.dtype, torch.dtype], tuple[int, bool]] = {}
        self._drawing = np.empty(0, np.uint8)  # memory of the rows that are drawn at once
        self._chains: Chains | None = None

    def linear(self, weight: Weight, bias: Tensor | None, wide: bool = False) -> Linear:
        """Pack weight [out, in]; its memory is not needed afterwards."""
        return self._packed([(weight, bias)], wide=wide)

    def gated_linear(self, weight: Weight, bias: Tensor | None, gate: Gate = SILU) -> Callable[[Tensor], Tensor]:
        """Pack weight [2 * F, in], gate rows beside the up rows that they let through."""
        return self._packed([(weight, bias)], gate)

    def take(self, table: Tensor, rows: Tensor) -> Tensor:
        """Copies of rows [T] of table [N, D]; a job of the team, as torch would wake OpenMP's threads."""
        table, rows = table.contiguous(), rows.contiguous()
        width = table.shape[1]
        out = self._team.empty((rows.shape[0], width), table.dtype)
        arguments = (table.data_ptr(), rows.data_ptr(), out.data_ptr(), width, table.element_size())
        self._team.share(cpu_rows.take_job(), cpu_rows.TAKE, rows.shape[0], SCATTERED * out.numel(), arguments)
        return out

    def repeat(
        self, key: Hashable, step: StepGeometry, attentions: Sequence[AttentionShape], run: Callable[[], Tensor]
    ) -> Tensor:
        """The jobs of `run` without the Python around them, from the second time on."""
        for heads, kv_heads, width, window in attentions:
            self._plan_of(step, heads, kv_heads, window).reserve(heads, width)
        # A program that was recorded before attention's memory moved is of no use.
        name = key, *(plan.places for plan in self._plans.values())
        program = self._programs.get(name)
        if program is not None:
            return self._team.replay(program)
        program = self._team.record(run)
        if len(self._programs) >= _MOST_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        self._programs[name] = program
        return program.result

    def chain(
        self,
        key: Hashable,
        step: StepGeometry,
        attentions: Sequence[AttentionShape],
        token_ids: Tensor,
        run: Callable[[], Tensor],
        chain: Chain,
    ) -> list[list[tuple[int, float]]]:
        """See Kernels. There are none where jobs are timed, and where more changes with each token than places."""
        has_more = step.groups or step.families or any(each.window for each in attentions)
        if self._team.is_timed or has_more or len(token_ids) > MOST_ROWS:
            return []
        chains = self._chains = self._chains or Chains(self._team)

        def whole() -> Tensor:
            logits = run()
            self.write_likeliest(logits, chain.size, chains.tokens, chains.masses)
            return logits

        plans = dict[int, AttentionPlan]()
        for heads, kv_heads, width, _ in attentions:
            plan = self._plan_of(step, heads, kv_heads, None)
            plan.reserve(heads, width)
            plans[id(plan)] = plan
        growing = [address for each in plans.values() for address in each.growing()]
        growing += [
            place.data_ptr() + 8 * row for place in (step.positions, step.slots) for row in range(len(token_ids))
        ]
        if len(growing) > MOST_GROWING:
            return []
        name = (key, chain.size), *(each.places for each in self._plans.values())
        if name not in self._programs:
            self.repeat((key, chain.size), step, attentions, whole)  # this pass is the chain's first, which is repeated
        return chains.run(self._programs[name], chain, token_ids.data_ptr(), step.context_lens.data_ptr(), growing)

    def _plan_of(self, step: StepGeometry, heads: int, kv_heads: int, window: int | None) -> AttentionPlan:
        """How the step is cut where so many query heads share as many key/value heads."""
        group = heads // kv_heads
        plan = self._plans.get((group, window))
        if plan is None:
            plan = self._plans[group, window] = AttentionPlan(group, window, -(-self._team.threads // kv_heads))
        plan.make(step)
        return plan

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension of x [T, D] or [T, H, D], strided along T and H or not."""
        if x.dim() != 3 or x.stride(2) != 1:
            x = x.contiguous()
        width = x.shape[-1]
        rows = x.numel() // width
        inner, outer_stride, inner_stride = 1, width, 0
        if x.dim() == 3:
            inner, outer_stride, inner_stride = x.shape[1], x.stride(0), x.stride(1)
        weight = weight.to(x.dtype)
        out = self._team.empty(tuple(x.shape), x.dtype)
        arguments = (
            x.data_ptr(), outer_stride, inner, inner_stride, width, weight.data_ptr(), out.data_ptr(), eps,
        )  # fmt: skip
        self._team.share(cpu_rows.rms_norm_job(KINDS[x.dtype]), cpu_rows.RMS_NORM, rows, x.numel(), arguments)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual), in the memory of x and residual."""
        x, residual, weight = x.contiguous(), residual.contiguous(), weight.to(x.dtype)
        width = x.shape[-1]
        arguments = (x.data_ptr(), residual.data_ptr(), width, weight.data_ptr(), eps)
        rows = x.numel() // width
        self._team.share(cpu_rows.add_rms_norm_job(KINDS[x.dtype]), cpu_rows.ADD_RMS_NORM, rows, x.numel(), arguments)
        return x, residual

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        """RoPE in place on query [T, H, D] and key [T, G, D], strided along T or not."""
        at_query, at_key = _start("query", query), _start("key", key)
        tokens, heads, width = query.shape
        cos, sin = cos.contiguous(), sin.contiguous()
        arguments = (
            *at_query, heads, *at_key, key.shape[1], width,
            cos.shape[1], cos.data_ptr(), sin.data_ptr(), positions.data_ptr(), cos.shape[0] - 1,
        )  # fmt: skip
        size = query.numel() + key.numel()
        self._team.share(cpu_rows.rotate_both_job(KINDS[query.dtype]), cpu_rows.ROTATE, tokens, size, arguments)

    def store(self, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """Write key and value [T, G, D], strided along T or not, to their slots [T]."""
        at_key = _start("key", key)
        at_value = at_key if cache.is_latent else _start("value", value)  # the same numbers in the same places
        tokens, kv_heads, width = key.shape
        layout = _layout_of(cache.keys.dtype, *cache.keys.shape[2:], cache.is_latent)
        arguments = (
            *at_key, *at_value, cache.keys.data_ptr(),
            cache.values.data_ptr(), slots.data_ptr(), kv_heads, layout[3], width, int(layout[0] == ARRANGED),
            layout[4], *_scale_addresses(cache),
        )  # fmt: skip
        code = cpu_cache.store_job(KINDS[key.dtype], CACHE_KINDS[cache.keys.dtype])
        self._team.share(code, cpu_cache.STORE, tokens, SCATTERED * key.numel(), arguments)

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
        """Causal paged attention of query [T, H, D] over the stored context -> [T, H, D]."""
        at_query, stride = _start("query", query)
        tokens, heads, width = query.shape
        kv_heads, value_width = cache.keys.shape[1], cache.values.shape[3]
        layout = _layout_of(cache.keys.dtype, *cache.keys.shape[2:], cache.is_latent)
        plan = self._plan_of(step, heads, kv_heads, sliding_window)
        plan.reserve(heads, width)
        address, *partials = plan.places
        out = self._team.empty((tokens, heads, value_width), query.dtype)
        dtypes = query.dtype, cache.keys.dtype
        if dtypes not in self._attending:
            self._attending[dtypes] = self._attend_job(*dtypes)
        code, on_tiles = self._attending[dtypes]
        arguments = (
            address, heads, kv_heads, stride, step.block_tables.stride(0), sliding_window or 0,
            *layout, value_width, at_query, step.block_tables.data_ptr(), cache.keys.data_ptr(),
            cache.values.data_ptr(), *_scale_addresses(cache), out.data_ptr(),
            *partials, 0 if sinks is None else sinks.data_ptr(),
            *((0, 0, 0) if first is None else _sink_queries(first)), *(_tiles_of(width) if on_tiles else (0, 0)),
            scale * (float(FLOAT8_UNIT) if dtypes[1] == torch.float8_e4m3fn else 1.0), softcap or 0.0,
        )  # fmt: skip
        self._team.run(code, cpu_attention.ATTEND, arguments)
        return out

    def _attend_job(self, dtype: torch.dtype, cache_dtype: torch.dtype) -> tuple[int, bool]:
        """The job, and whether its products are on matrix tiles."""
        way = Way(CACHE_KINDS[cache_dtype])
        if way.kind is BFLOAT16:
            way = self._choice.way(BFLOAT16, "attention")
        on_tiles = way.least_on_tiles > 0
        return cpu_attention.attend_job(KINDS[dtype], way.kind, on_tiles), on_tiles

    def draw(self, logits: Tensor, rows: NDArray[np.void]) -> list[int]:
        logits = logits.contiguous()
        count, size = logits.shape
        each = cpu_sampling.row_memory(size)
        needed = each * min(count, self._team.threads)
        if len(self._drawing) < needed:
            self._drawing = np.empty(needed, np.uint8)
        tokens = np.empty(count, np.int64)
        arguments = (
            logits.data_ptr(), size * logits.element_size(), size, rows.ctypes.data, tokens.ctypes.data,
            self._drawing.ctypes.data, each,
        )  # fmt: skip
        code = cpu_sampling.draw_job(KINDS[logits.dtype])
        self._team.share(code, cpu_sampling.DRAW_ROWS, count, logits.numel() if count > 1 else 0, arguments)
        return tokens.tolist()  # type: ignore[no-any-return]


def _start(name: str, x: Tensor) -> tuple[int, int]:
    """Where x [T, H, D] begins, and the elements from one token to the next. Raises ValueError as check_heads()."""
    if x.stride()[1:] != (x.shape[-1], 1):
        check_heads(name, x)
    return x.data_ptr(), x.stride(0)


@functools.cache
def _layout_of(dtype: torch.dtype, block_size: int, width: int, is_latent: bool) -> tuple[int, int, int, int, int]:
    """(arranged, inputs of a word, head dimension, block size, bytes of an element), as cpu.attention has it."""
    arranged = LATENT if is_latent else ARRANGED if is_arranged(block_size, width) else PLAIN
    return arranged, arithmetic_of(CACHE_KINDS[dtype]).inputs, width, block_size, dtype.itemsize


@functools.cache
def _tiles_of(width: int) -> tuple[int, int]:
    """How matrix tiles are laid out for keys of so many bfloat16 and for values, and the words of a step of keys."""
    words = -(-width // 2)
    step_words = next(each for each in range(STEP_WORDS, 0, -1) if words % each == 0)
    return configurations(0, step_words, STEP_WORDS), step_words


def _scale_addresses(cache: LayerCache) -> tuple[int, int]:
    if cache.key_scales is None or cache.value_scales is None:
        return 0, 0
    return cache.key_scales.data_ptr(), cache.value_scales.data_ptr()


def _sink_queries(first: SinkQueries) -> tuple[int, int, int]:
    """(address, elements between tokens, how many keys they are for)."""
    check_heads("query of sinks", first.rows)
    return first.rows.data_ptr(), first.rows.stride(0), first.num_keys
