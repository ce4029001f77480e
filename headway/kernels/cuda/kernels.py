"""The Kernels protocol on CUDA: Triton for all but what TorchKernels has; products with plain matrices are cuBLAS's."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from headway.kernels.adapters import Adapted, AdapterRows, AdapterSpec
from headway.kernels.cuda import attention as cuda_attention
from headway.kernels.cuda import recurrent as cuda_recurrent
from headway.kernels.cuda import rows as cuda_rows
from headway.kernels.cuda.adapters import AdaptedLinear
from headway.kernels.cuda.experts import CudaMixture, Seen
from headway.kernels.cuda.graphs import GraphMemory, Graphs
from headway.kernels.cuda.packed import pack
from headway.kernels.cuda.product import multiply
from headway.kernels.interface import (
    AttentionShape,
    HeadLinear,
    KernelTime,
    LayerCache,
    LayerState,
    Linear,
    RoutingCounts,
    SinkQueries,
    StepGeometry,
    check_heads,
)
from headway.kernels.reference import ReferenceGatedLinear, TorchKernels
from headway.kernels.weights import SILU, DeltaRule, Gate, Product, Weight

if TYPE_CHECKING:
    from headway.kernels.cuda.times import KernelTimes

_GATE_BLOCK = 1024
_FORBID_BLOCK = 4096  # tokens
# Triton's interpreter has no device to ask. Its number of multiprocessors is small, so that splits occur in tests.
_INTERPRETED_MULTIPROCESSORS = 8


class PackedLinear:
    """A matrix in the form that its checkpoint has, with its gate if it has one."""

    def __init__(self, product: Product, gate: Gate | None, multiprocessors: int, wide: bool = False) -> None:
        self.packed = pack([product], 1, gated=gate is not None)
        self.out_features = self.packed.outputs
        self.gate, self._multiprocessors, self._wide = gate, multiprocessors, wide

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        return multiply(self.packed, x, self._multiprocessors, self.gate, wide=self._wide)

    def ungated(self, x: Tensor) -> Tensor:
        """x [T, in] -> the product's result before its gate, gate and up by turns."""
        return multiply(self.packed, x, self._multiprocessors)

    def rows(self, numbers: Tensor) -> Tensor:
        """Rows [T] of the weight -> [T, in]."""
        return self.packed.rows(numbers)


class CudaKernels(TorchKernels):
    """Kernels for float32, bfloat16 and float16 on a CUDA device.

    No operation waits for the device or reads back from it but `routing_counts`. Every grid follows from tensor
    shapes and the host-side sizes of StepGeometry, so a step of fixed sizes can be captured in a graph.
    """

    name = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self._multiprocessors = _INTERPRETED_MULTIPROCESSORS
        if torch.cuda.is_available():
            self._multiprocessors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        self._seen = Seen()
        self._graphs: Graphs | None = None
        self._times: KernelTimes | None = None

    def linear(self, weight: Weight, bias: Tensor | None, wide: bool = False) -> Linear:
        """Lay out a packed weight [out, in]; a plain one is kept, and is never wide."""
        if weight.format == "none":
            return super().linear(weight, bias)
        return PackedLinear((weight, bias), None, self._multiprocessors, wide)

    def gated_linear(self, weight: Weight, bias: Tensor | None, gate: Gate = SILU) -> Callable[[Tensor], Tensor]:
        """Lay out a packed weight [2 * F, in]; with a plain one the gate is an operation of its own."""
        if weight.format == "none":
            return super().gated_linear(weight, bias, gate)
        return PackedLinear((weight, bias), gate, self._multiprocessors)

    def adapted(self, product: Callable[[Tensor], Tensor], spec: AdapterSpec, rows: AdapterRows) -> Adapted:
        if isinstance(product, ReferenceGatedLinear):
            return AdaptedLinear(product.linear, spec, rows, product.through)
        if not isinstance(product, PackedLinear) or (gate := product.gate) is None:
            return AdaptedLinear(product, spec, rows)

        def through(by_turns: Tensor) -> Tensor:
            return self.apply_gate(by_turns.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1), gate)

        order = torch.arange(len(spec.part_of), device=spec.device).view(2, -1).T.flatten()
        return AdaptedLinear(product.ungated, spec, rows, through, order)

    def mixture(
        self, gate_up: Iterable[Product], down: Iterable[Product], count: int, gate: Gate = SILU
    ) -> CudaMixture:
        """Lay out experts, plain or packed, one behind the other."""
        return CudaMixture(gate_up, down, count, gate, self._multiprocessors, self._seen)

    def head_linear(self, weights: Iterable[Weight], count: int) -> HeadLinear:
        """Stack the matrices of heads, a small part of a model: packed ones are made plain, and none is rounded."""
        plain = []
        for weight in weights:
            values = torch.cat(weight.parts)
            if not values.is_floating_point() or weight.groups is not None:
                values = pack([(weight, None)], 1).rows(torch.arange(weight.rows, device=values.device))
            plain.append(Weight(values))
        return super().head_linear(plain, count)

    def routing_counts(self) -> RoutingCounts:
        """The counts of all mixtures of these kernels so far."""
        return self._seen.counts()

    def timed(self, wanted: bool | None) -> list[KernelTime]:
        if wanted and self._times is None:
            from headway.kernels.cuda.times import KernelTimes  # torch's profiler is large

            self._times = KernelTimes()
        if self._times is None:
            return []
        if wanted is False:
            self._times.stop()
            self._times = None
            return []
        return self._times.taken()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension of x [T, D] or [T, H, D], strided along T and H or not."""
        if x.dim() != 3 or x.stride(2) != 1:
            x = x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel() == 0:
            return out
        width = x.shape[-1]
        inner, outer_stride, inner_stride = 1, width, 0
        if x.dim() == 3:
            inner, outer_stride, inner_stride = x.shape[1], x.stride(0), x.stride(1)
        cuda_rows.rms_norm_kernel[(x.numel() // width,)](
            x, outer_stride, inner, inner_stride, weight, out, eps, WIDTH=width, PADDED=triton.next_power_of_2(width)
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual), in the memory of x and residual."""
        x, residual = x.contiguous(), residual.contiguous()
        if x.numel() == 0:
            return x, residual
        width = x.shape[-1]
        cuda_rows.add_rms_norm_kernel[(x.numel() // width,)](
            x, residual, weight, eps, WIDTH=width, PADDED=triton.next_power_of_2(width)
        )
        return x, residual

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        """RoPE in place on query [T, H, D] and key [T, G, D], strided along T or not."""
        check_heads("query", query)
        check_heads("key", key)
        tokens, heads, width = query.shape
        if tokens == 0:
            return
        half = cos.shape[1]
        cuda_rows.rotate_kernel[(tokens, heads + key.shape[1])](
            query, query.stride(0), key, key.stride(0), cos.contiguous(), sin.contiguous(), positions, len(cos) - 1,
            HEADS=heads, WIDTH=width, HALF=half, PADDED=triton.next_power_of_2(half), num_warps=1,
        )  # fmt: skip

    def apply_gate(self, gate_up: Tensor, gate: Gate) -> Tensor:
        """[T, 2 * F] -> [T, F]; see Gate."""
        gate_up = gate_up.contiguous()
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
        if tokens:
            grid = (tokens, triton.cdiv(width, _GATE_BLOCK))
            cuda_rows.gate_kernel[grid](
                gate_up, out, width, gate.slope, gate.cubic, gate.limit, gate.shift, BLOCK=_GATE_BLOCK
            )
        return out

    def forbid(self, x: Tensor, marked: Tensor) -> None:
        """See Forbid; x is dense."""
        rows, tokens = len(marked), x.shape[1]
        if rows:
            grid = (rows, triton.cdiv(tokens, _FORBID_BLOCK))
            cuda_rows.forbid_kernel[grid](x, tokens, marked, marked.shape[1], BLOCK=_FORBID_BLOCK)

    def store(self, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """Write key and value [T, G, D], strided along T or not, to their slots [T]."""
        check_heads("key", key)
        check_heads("value", value)
        tokens, kv_heads, width = key.shape
        if tokens == 0:
            return
        sizes = {"KV_HEADS": kv_heads, "BLOCK_SIZE": cache.keys.shape[2], "WIDTH": width}
        sizes |= {"PADDED": triton.next_power_of_2(width), "num_warps": 1}
        kind, keys, values, *scales = cuda_attention.numbers_of(cache)
        if kind != "plain":
            cuda_rows.store_rounded_kernel[(tokens, kv_heads)](
                key, key.stride(0), value, value.stride(0), keys, values, *scales, slots, CACHE=kind, **sizes
            )
            return
        value = key if cache.is_latent else value  # which is then the same numbers in the same places
        cuda_rows.store_kernel[(tokens, kv_heads)](
            key, key.stride(0), value, value.stride(0), keys, values, slots, **sizes
        )

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
        check_heads("query", query)
        if first is not None:
            check_heads("query of sinks", first.rows)
        return cuda_attention.attention(
            query, cache, step, scale, sliding_window, sinks, softcap, first, self._multiprocessors
        )

    def convolve(
        self,
        x: Tensor,
        gates: tuple[Tensor, Tensor] | None,
        taps: Tensor,
        bias: Tensor | None,
        state: LayerState,
        step: StepGeometry,
    ) -> Tensor:
        return cuda_recurrent.convolve(x, gates, taps, bias, state, step)

    def delta_rule(
        self, mixed: Tensor, gate: Tensor, numbers: Tensor, rule: DeltaRule, state: LayerState, step: StepGeometry
    ) -> Tensor:
        return cuda_recurrent.delta_rule(mixed, gate, numbers, rule, state, step)

    def repeat(
        self, key: Hashable, step: StepGeometry, attentions: Sequence[AttentionShape], run: Callable[[], Tensor]
    ) -> Tensor:
        """See Kernels; a CUDA graph, from the second time on."""
        if self._graphs is None:
            self._graphs = Graphs(self._seen, GraphMemory())
        return self._graphs.repeat((key, 0 if step.common is None else len(step.common.parts)), run)

    def copy_blocks(self, caches: list[LayerCache], sources: list[int], targets: list[int]) -> None:
        """Block sources[i] of every layer is copied to block targets[i]; all reads come before all writes."""
        if not sources or not caches:
            return
        pair = torch.tensor([sources, targets], dtype=torch.int64)
        device = caches[0].keys.device
        if device.type == "cuda":
            pair = pair.pin_memory()
        read, write = pair.to(device, non_blocking=True)
        for blocks in (tensor.view(torch.uint8) for cache in caches for tensor in cache.tensors):
            blocks.index_copy_(0, write, blocks.index_select(0, read))
