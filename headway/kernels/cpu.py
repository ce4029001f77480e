"""The Kernels protocol on CPU: Numba over torch's memory, shared out to a team of threads."""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from headway.kernels import cpu_attention, cpu_rows
from headway.kernels.cpu_linear import linear_for
from headway.kernels.cpu_simd import BFLOAT16, FLOAT32, KINDS, has_bfloat16_dot
from headway.kernels.cpu_team import Team
from headway.kernels.heads import check_heads
from headway.kernels.interface import LayerCache, Linear, StepGeometry
from headway.kernels.threads import one_thread

# Below so many elements, waking the team costs more than it saves.
_ALONE = 32768


class CpuKernels:
    """Kernels for float32, bfloat16 and float16 on CPU.

    Threads are as many as `torch.get_num_threads()` says when the object is made. One thread at a time
    may call one object. Compiled code is kept on disk, so that only the first start on a machine compiles.
    """

    name = "cpu"

    def __init__(self) -> None:
        self._team = Team()
        self._plan: cpu_attention.AttentionPlan | None = None
        self._has_bfloat16_dot = has_bfloat16_dot()

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """A multiplier that shares the memory of weight [out, in] wherever weight is dense."""
        return linear_for(weight, bias, self._team)

    def take(self, table: Tensor, rows: Tensor) -> Tensor:
        """Copies of rows, by torch on this thread: no more than memory allows, and OpenMP stays asleep."""
        with one_thread():
            return table.index_select(0, rows)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension of x [T, D] or [T, H, D], strided along T and H or not."""
        if x.dim() != 3 or x.stride(2) != 1:
            x = x.contiguous()
        width = x.shape[-1]
        rows = x.numel() // width
        inner, outer_stride, inner_stride = 1, width, 0
        if x.dim() == 3:
            inner, outer_stride, inner_stride = x.shape[1], x.stride(0), x.stride(1)
        weight = _match(weight, x)
        out = torch.empty(x.shape, dtype=x.dtype)
        arguments = (
            x.data_ptr(), outer_stride, inner, inner_stride, width, weight.data_ptr(), out.data_ptr(), eps,
        )  # fmt: skip
        self._share(cpu_rows.rms_norm_job(KINDS[x.dtype]), cpu_rows.RMS_NORM, rows, x.numel(), arguments)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual), in the memory of x and residual."""
        x, residual, weight = x.contiguous(), residual.contiguous(), _match(weight, x)
        width = x.shape[-1]
        arguments = (x.data_ptr(), residual.data_ptr(), width, weight.data_ptr(), eps)
        rows = x.numel() // width
        self._share(cpu_rows.add_rms_norm_job(KINDS[x.dtype]), cpu_rows.ADD_RMS_NORM, rows, x.numel(), arguments)
        return x, residual

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        """RoPE in place on query [T, H, D] and key [T, G, D], strided along T or not."""
        check_heads("query", query)
        check_heads("key", key)
        tokens, heads, width = query.shape
        cos, sin = cos.contiguous(), sin.contiguous()
        arguments = (
            query.data_ptr(), query.stride(0), heads, key.data_ptr(), key.stride(0), key.shape[1], width,
            cos.shape[1], cos.data_ptr(), sin.data_ptr(), positions.data_ptr(),
        )  # fmt: skip
        size = query.numel() + key.numel()
        self._share(cpu_rows.rotate_both_job(KINDS[query.dtype]), cpu_rows.ROTATE, tokens, size, arguments)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 * F] -> [T, F]: silu of the first half times the second."""
        gate_up = gate_up.contiguous()
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((tokens, width), dtype=gate_up.dtype)
        arguments = (gate_up.data_ptr(), width, out.data_ptr())
        code = cpu_rows.silu_and_mul_job(KINDS[out.dtype])
        self._share(code, cpu_rows.SILU_AND_MUL, tokens, gate_up.numel(), arguments)
        return out

    def store(self, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """Write key and value [T, G, D], strided along T or not, to their slots [T]."""
        check_heads("key", key)
        check_heads("value", value)
        tokens, kv_heads, width = key.shape
        arguments = (
            key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0), cache.keys.data_ptr(),
            cache.values.data_ptr(), slots.data_ptr(), kv_heads, cache.keys.shape[2], width,
        )  # fmt: skip
        self._share(cpu_rows.store_job(KINDS[key.dtype]), cpu_rows.STORE, tokens, 2 * key.numel(), arguments)

    def attention(
        self, query: Tensor, cache: LayerCache, step: StepGeometry, scale: float, sliding_window: int | None
    ) -> Tensor:
        """Causal paged attention of query [T, H, D] over the stored context -> [T, H, D]."""
        check_heads("query", query)
        tokens, heads, width = query.shape
        kv_heads, block_size = cache.keys.shape[1:3]
        plan = self._plan
        if plan is None or plan.step is not step or plan.group != heads // kv_heads:
            plan = self._plan = cpu_attention.plan_attention(step, heads // kv_heads)
        kind = KINDS[query.dtype]
        compute = BFLOAT16 if query.dtype == torch.bfloat16 and self._has_bfloat16_dot else FLOAT32
        out = torch.empty((tokens, heads, width), dtype=query.dtype)
        partial_out = torch.empty(plan.partial_rows * heads * width)
        partial_sums = torch.empty(plan.partial_rows * heads * 2)
        geometry = (
            heads, kv_heads, width, block_size, query.element_size(), query.stride(0), step.block_tables.stride(0),
            sliding_window or 0, compute.itemsize, int(kind is compute),
        )  # fmt: skip
        arguments = (
            *geometry, plan.most_rows, plan.items.ctypes.data, len(plan.items), query.data_ptr(), cache.keys.data_ptr(),
            cache.values.data_ptr(), step.block_tables.data_ptr(), out.data_ptr(), partial_out.data_ptr(),
            partial_sums.data_ptr(), scale,
        )  # fmt: skip
        self._team.run(cpu_attention.attend_job(kind, compute), cpu_attention.ATTEND, arguments)
        if plan.partial_rows:
            cpu_attention.merge_parts(
                kind, plan.merges, heads, width, out.data_ptr(), partial_out.data_ptr(), partial_sums.data_ptr()
            )
        return out

    def copy_blocks(self, caches: list[LayerCache], sources: list[int], targets: list[int]) -> None:
        """Block sources[i] of every layer is copied to block targets[i]; all reads come before all writes.

        A block at a time, which torch copies on this thread: its indexing would wait for OpenMP's others.
        """
        for cache in caches:
            for blocks in (cache.keys, cache.values):
                copies = [blocks[source].clone() for source in sources]
                for target, copy in zip(targets, copies, strict=True):
                    blocks[target].copy_(copy)

    def _share(self, code: int, layout: struct.Struct, rows: int, size: int, arguments: tuple[Any, ...]) -> None:
        """Run a row operation on this thread or, from _ALONE elements on, by the team."""
        if size < _ALONE:
            self._team.run_alone(code, layout, (rows, rows, *arguments))
        else:
            step = max(1, rows // (4 * self._team.threads))
            self._team.run(code, layout, (step, rows, *arguments))


def _match(weight: Tensor, x: Tensor) -> Tensor:
    return weight if weight.dtype == x.dtype else weight.to(x.dtype)
