"""What only some models or steps need: experts, heads with matrices, recurrent layers, drafts, ranks. And choices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.kernels.adapters import Adapted, AdapterRows, AdapterSpec
from headway.kernels.cpu import experts as cpu_experts
from headway.kernels.cpu import recurrent as cpu_recurrent
from headway.kernels.cpu import rows as cpu_rows
from headway.kernels.cpu import sampling as cpu_sampling
from headway.kernels.cpu.arithmetic import ALL_KINDS
from headway.kernels.cpu.choice import Choice
from headway.kernels.cpu.experts import HeadPlan, PackedHeads
from headway.kernels.cpu.linear import PackedLinear
from headway.kernels.cpu.memory import LargePages
from headway.kernels.cpu.simd import KINDS
from headway.kernels.cpu.team import Team
from headway.kernels.interface import (
    Forbid,
    HeadLinear,
    KernelTime,
    LayerCache,
    LayerState,
    Mixture,
    RoutingCounts,
    StepGeometry,
    check_heads,
)
from headway.kernels.reference import forbid
from headway.kernels.weights import SILU, SOFTMAX, DeltaRule, Gate, Product, Scores, Weight

if TYPE_CHECKING:
    from headway.kernels.cpu.rank_board import RankBoard
    from headway.kernels.cpu.ranks import CpuRanks
    from headway.kernels.ranks import Connection, Share

# An element of a key or value costs as much as so many of others: it goes where nothing is in a cache.
SCATTERED = 16
_MOST_PLANS = 128  # plans of steps with different numbers of tokens


class FurtherKernels:
    """These operations, for the kernels that have all others."""

    def __init__(self, team: Team, choice: Choice, memory: LargePages) -> None:
        self._team, self._choice, self._memory = team, choice, memory
        self._counts = np.zeros(4, np.int64)  # the fields of RoutingCounts
        self._head_plans: dict[tuple[int, ...], HeadPlan] = {}

    def choose(self, dtype: torch.dtype, scheme: str) -> str:
        products = [*(("bfloat16", "attention") if dtype is torch.bfloat16 else ()), scheme]
        if scheme == "int4":  # the head has 8 bits
            products.append("int8")
        chosen = {product: self._choice.name(product) for product in products if self._choice.is_open(product)}
        return ", ".join(f"{product} {name}" for product, name in chosen.items())

    @property
    def named(self) -> dict[str, object]:
        kinds = {f"kind {type(kind).__name__}": kind for kind in ALL_KINDS}
        return {
            f"cpu kernels, tiles: {self._choice.tiles}": self,
            "team": self._team,
            "counts": self._counts,
            "choice": self._choice,
            **kinds,
        }

    def _packed(
        self, products: Iterable[Product], gate: Gate | None = None, count: int = 1, wide: bool = False
    ) -> PackedLinear:
        return PackedLinear(products, self._team, self._memory, gate, self._choice, count, wide)

    def mixture(self, gate_up: Iterable[Product], down: Iterable[Product], count: int, gate: Gate = SILU) -> Mixture:
        """Pack the weights of experts one under the other."""
        packed = self._packed(gate_up, gate, count), self._packed(down, None, count)
        return cpu_experts.PackedExperts(*packed, count, self._team, self._counts)

    def adapted(self, product: Callable[[Tensor], Tensor], spec: AdapterSpec, rows: AdapterRows) -> Adapted:
        from headway.kernels.cpu.adapters import AdaptedLinear

        assert isinstance(product, PackedLinear), "linear and gated layers are packed here"
        return AdaptedLinear(self._team, product, spec, rows)

    def head_linear(self, weights: Iterable[Weight], count: int) -> HeadLinear:
        """Pack the matrices of heads one under the other."""
        return PackedHeads(self._packed(((weight, None) for weight in weights), None, count), self._head_plan)

    def _head_plan(self, tokens: int, *sizes: int) -> HeadPlan:
        """The plan of heads for a step. Plans of short steps are kept, as programs use them; of long ones, the last."""
        key = tokens if tokens <= _MOST_PLANS else 0, *sizes
        found = self._head_plans.get(key)
        if found is None or found.tokens != tokens:
            found = self._head_plans[key] = HeadPlan(tokens, *sizes)
        return found

    def join(self, first: Tensor, second: Tensor | None = None) -> Tensor:
        """[T, H, D] and [T, H, E], strided along T and H or not, side by side -> dense [T, H, D + E]."""
        tokens, heads, width = first.shape
        other = first[..., :0] if second is None else second
        out = self._team.empty((tokens, heads, width + other.shape[2]), first.dtype)
        arguments = (
            out.data_ptr(), heads, first.element_size(), first.data_ptr(), first.stride(0), first.stride(1), width,
            other.data_ptr(), other.stride(0), other.stride(1), other.shape[2],
        )  # fmt: skip
        self._team.share(cpu_rows.join_job(), cpu_rows.JOIN, tokens * heads, out.numel(), arguments)
        return out

    def routing_counts(self) -> RoutingCounts:
        """The counts of all mixtures of these kernels so far."""
        return RoutingCounts(*self._counts.tolist())

    def add(self, x: Tensor, residual: Tensor, factor: float = 1.0) -> Tensor:
        """(x + residual) * factor, in the memory of residual."""
        x, residual = x.contiguous(), residual.contiguous()
        size, arguments = x.numel(), (x.data_ptr(), residual.data_ptr(), factor)
        self._team.share(cpu_rows.add_job(KINDS[x.dtype]), cpu_rows.ADD, size, size, arguments)
        return residual

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap), in the memory of x."""
        x = x.contiguous()
        size, arguments = x.numel(), (x.data_ptr(), cap)
        self._team.share(cpu_rows.soft_cap_job(KINDS[x.dtype]), cpu_rows.SOFT_CAP, size, size, arguments)
        return x

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """x * sigmoid(gate), both [T, H, D], in the memory of x."""
        x = x.contiguous()
        check_heads("gate", gate)
        arguments = (x.data_ptr(), gate.data_ptr(), gate.stride(0), x[0].numel())
        self._team.share(cpu_recurrent.gate_job(KINDS[x.dtype]), cpu_recurrent.GATE, len(x), x.numel(), arguments)
        return x

    def gated(self, x: Tensor, up: Tensor, gate: Gate) -> Tensor:
        """The gate's f(x) * up, both [T, F], in the memory of x."""
        x = x.contiguous()
        arguments = (x.data_ptr(), up.data_ptr(), up.stride(0), x.shape[1], gate.slope, gate.cubic)
        self._team.share(cpu_recurrent.gated_job(KINDS[x.dtype]), cpu_recurrent.GATED, len(x), x.numel(), arguments)
        return x

    def convolve(
        self,
        x: Tensor,
        gates: tuple[Tensor, Tensor] | None,
        taps: Tensor,
        bias: Tensor | None,
        state: LayerState,
        step: StepGeometry,
    ) -> Tensor:
        """See Kernels; a thread takes some channels of a sequence."""
        width, channels = taps.shape
        out = self._team.empty(tuple(x.shape), x.dtype)
        before = behind = gate_stride = 0
        if gates is not None:
            before, behind, gate_stride = gates[0].data_ptr(), gates[1].data_ptr(), gates[0].stride(0)
        arguments = (
            _spans(step).data_ptr(), x.data_ptr(), x.stride(0), before, behind, gate_stride, taps.data_ptr(), width,
            channels, 0 if bias is None else bias.data_ptr(), state.inputs.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        self._team.run(cpu_recurrent.convolve_job(KINDS[x.dtype]), cpu_recurrent.CONVOLVE, arguments)
        return out

    def delta_rule(
        self, mixed: Tensor, gate: Tensor, numbers: Tensor, rule: DeltaRule, state: LayerState, step: StepGeometry
    ) -> Tensor:
        """See Kernels; a thread takes a head of a sequence."""
        matrices = state.matrices
        if matrices is None:
            raise ValueError("a layer whose state has no matrices has no delta rule")
        heads, key_dim, value_dim = matrices.shape[1:]
        out = self._team.empty((len(mixed), heads * value_dim), mixed.dtype)
        arguments = (
            _spans(step).data_ptr(), heads, rule.key_heads, key_dim, value_dim, mixed.data_ptr(), gate.data_ptr(),
            gate.stride(0), numbers.data_ptr(), rule.rate.data_ptr(), rule.offset.data_ptr(), rule.norm.data_ptr(),
            matrices.data_ptr(), out.data_ptr(), rule.eps, rule.by_turns,
        )  # fmt: skip
        self._team.run(cpu_recurrent.delta_rule_job(KINDS[mixed.dtype]), cpu_recurrent.DELTA_RULE, arguments)
        return out

    def route(
        self, logits: Tensor, per_token: int, normalized: bool, shared: bool, scores: Scores = SOFTMAX
    ) -> tuple[Tensor, Tensor]:
        logits = logits.contiguous()
        rows, columns = logits.shape
        width = per_token + shared
        chosen, weights = self._team.empty((rows, width), torch.int64), self._team.empty((rows, width), torch.float32)
        arguments = (
            logits.data_ptr(), logits.element_size(), columns - (shared and scores.gated), per_token, int(normalized),
            int(shared), chosen.data_ptr(), weights.data_ptr(), int(scores.gated),
            int(scores.sigmoid), 0 if scores.bias is None else scores.bias.data_ptr(), scores.groups,
            scores.best_groups, scores.factor,
        )  # fmt: skip
        code = cpu_experts.route_job(KINDS[logits.dtype])
        self._team.share(code, cpu_experts.ROUTE, rows, SCATTERED * logits.numel(), arguments)
        return chosen, weights

    @property
    def forbid(self) -> Forbid:
        """For a sampler without `draw`."""
        return forbid

    def likeliest(self, logits: Tensor, size: int) -> tuple[list[float], list[int]]:
        count = len(logits)
        tokens, masses = np.zeros(count, np.int64), np.full(count, np.inf)
        self.write_likeliest(logits.contiguous(), size, tokens, masses)
        return (1.0 / masses).tolist(), tokens.tolist()

    def write_likeliest(
        self, logits: Tensor, size: int, tokens: NDArray[np.int64], masses: NDArray[np.float64]
    ) -> None:
        """Write the likeliest token of each row, and the sum of all probabilities relative to it, but of no bad row."""
        count, stride = logits.shape
        row_bytes = stride * logits.element_size()
        arguments = logits.data_ptr(), row_bytes, size, tokens.ctypes.data, masses.ctypes.data
        code = cpu_sampling.likeliest_job(KINDS[logits.dtype])
        work = logits.numel() if count > 1 else 0
        self._team.share(code, cpu_sampling.LIKELIEST_ROWS, count, work, arguments)

    def timed(self, wanted: bool | None) -> list[KernelTime]:
        if wanted is not None:
            self._team.time_jobs(wanted)
        return self._team.times

    def copy_blocks(self, caches: list[LayerCache], sources: list[int], targets: list[int]) -> None:
        """Block sources[i] of every layer is copied to block targets[i]; all reads come before all writes.

        A block at a time, which torch copies on this thread: its indexing would wait for OpenMP's others.
        """
        for cache in caches:
            for blocks in cache.tensors:
                copies = [blocks[source].clone() for source in sources]
                for target, copy in zip(targets, copies, strict=True):
                    blocks[target].copy_(copy)

    def ranks(
        self,
        board: RankBoard,
        share: Share,
        hidden: int,
        vocab: int,
        connections: Mapping[int, Connection] | None = None,
    ) -> CpuRanks:
        """What this process, as a rank of a model with these sizes, says to the others. See CpuRanks.

        Args:
            connections: see Links; of ranks on one machine there are none.
        """
        from headway.kernels.cpu.ranks import CpuRanks

        if not connections:
            return CpuRanks(self._team, board, share, hidden, vocab)
        from headway.kernels.cpu.rank_links import LinkedRanks, Links

        links, is_apart = Links(connections, board), any(each.receives for each in connections.values())
        return LinkedRanks(self._team, board, share, hidden, vocab, links, is_apart)


def _spans(step: StepGeometry) -> Tensor:
    if step.spans is None:
        raise ValueError("a step of a model with recurrent layers has no spans")
    return step.spans
