"""How long a step takes: the roofline of each operation, with what programs reach of it, and what lies between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from headway.cost.attention import Chunk
from headway.cost.efficiency import TILE_ROWS, Efficiency
from headway.cost.hardware import PLAIN_NETWORK, Hardware, Link
from headway.cost.parallel import (
    Parallelism,
    Traffic,
    check,
    device_shape,
    device_weight_bytes,
    machines,
    stages,
    traffic,
)
from headway.cost.precision import Precision
from headway.cost.shape import ModelShape
from headway.cost.work import (
    NORMALISATION,
    Operation,
    Work,
    attention_work,
    compute_format,
    row_work,
    step_work,
    token_work,
    tokens_and_rows,
    weight_format,
)

WIDTHS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "fp4": 4, "int4": 4, "mxfp4": 4, "nvfp4": 4}
ATTENTION = (Operation.SCORES, Operation.VALUES)
LINEAR = (
    Operation.QKV,
    Operation.LATENT,
    Operation.OUTPUT,
    Operation.RECURRENT_IN,
    Operation.RECURRENT_OUT,
    Operation.GATE_UP,
    Operation.DOWN,
    Operation.ROUTER,
    Operation.SHARED_EXPERTS,
    Operation.EXPERTS,
    Operation.LAYER_INPUTS,
    Operation.HEAD,
)
OF_RECURRENT = (Operation.RECURRENT_IN, Operation.RECURRENT, Operation.RECURRENT_OUT)
OF_ATTENTION = (Operation.QKV, Operation.ROTARY, Operation.KV_STORE, Operation.LATENT, "attention", Operation.OUTPUT)
AFTER_LAYERS = (Operation.FINAL_NORM, Operation.HEAD, Operation.SAMPLING)
NO_WORK = Work()
MOST_KNOWN = 10_000  # steps of different sizes that a deployment remembers
ONE_DEVICE = Parallelism()
# Kernels that an operation takes in each layer, as fused engines have them; scores and values are one.
KERNELS_A_LAYER = {
    Operation.QKV: 1,
    Operation.ROTARY: 1,
    Operation.KV_STORE: 1,
    Operation.LATENT: 2,
    Operation.SCORES: 1,
    Operation.OUTPUT: 1,
    Operation.RECURRENT_IN: 2,
    Operation.RECURRENT: 2,
    Operation.RECURRENT_OUT: 1,
    Operation.GATE_UP: 1,
    Operation.ACTIVATION: 1,
    Operation.DOWN: 1,
    Operation.ROUTER: 2,
    Operation.SHARED_EXPERTS: 3,
    Operation.EXPERTS: 4,
    Operation.LAYER_INPUTS: 5,
}
KERNELS_A_STEP = {Operation.EMBEDDING: 1, Operation.FINAL_NORM: 1, Operation.HEAD: 1, Operation.SAMPLING: 3}


class PartTime(msgspec.Struct, frozen=True, gc=False):
    """One operation's time on one device, all layers together."""

    name: str  # name of the operation, or of what is sent
    seconds: float  # how long it takes
    # compute_s, memory_s, network_s, overhead_s: how long its arithmetic, its bytes, what it sends, and the start of
    # its kernels take alone.
    compute_s: float = 0.0
    memory_s: float = 0.0
    network_s: float = 0.0
    overhead_s: float = 0.0
    work: Work = NO_WORK  # the work of this device

    @property
    def bound(self) -> str:
        """What takes longest: compute, memory, network or overhead."""
        parts = {
            "compute": self.compute_s,
            "memory": self.memory_s,
            "network": self.network_s,
            "overhead": self.overhead_s,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, slots=True)
class TimeBreakdown:
    """A step's time, part by part; with several stages, the way through all of them."""

    parts: tuple[PartTime, ...]
    host_s: float

    @property
    def seconds(self) -> float:
        return self.device_s + self.host_s

    @property
    def device_s(self) -> float:
        """Seconds in which the device works, without those in which it waits for its host."""
        return sum(part.seconds for part in self.parts)

    @property
    def bound(self) -> str:
        """What takes the largest share of the step: compute, memory, network, overhead."""
        shares = {"compute": 0.0, "memory": 0.0, "network": 0.0, "overhead": self.host_s}
        for part in self.parts:
            shares[part.bound] += part.seconds
        return max(shares, key=lambda name: shares[name])


@dataclass(frozen=True)
class Deployment:
    """A model on hardware: everything that decides how long a step takes.

    Raises:
        ShapeError: the model cannot be spread like this.
        ValueError: the hardware has no arithmetic for a format.
    """

    shape: ModelShape  # the whole model's
    precision: Precision
    hardware: Hardware
    efficiency: Efficiency
    parallelism: Parallelism = ONE_DEVICE
    flash: bool = True  # attention keeps its scores on the chip

    def __post_init__(self) -> None:
        check(self.shape, self.parallelism, self.hardware.link)
        for format_ in (
            self.precision.linear,
            self.precision.of_experts,
            self.precision.head,
            self.precision.activations,
        ):
            self.hardware.arithmetic(format_.compute)

    @cached_property
    def device(self) -> ModelShape:
        """What one device has of the model, as if it had all layers."""
        return device_shape(self.shape, self.parallelism)

    @cached_property
    def device_stages(self) -> list[ModelShape]:
        """The layers of each pipeline stage as one device has them, with equal ones once."""
        return stages(self.device, self.parallelism.pipeline)

    @cached_property
    def working_set(self) -> int:
        """Bytes of weights that a small step reads on a device."""
        return device_weight_bytes(self.shape, self.precision, self.parallelism)

    def ideal(self) -> Deployment:
        """The same deployment without any loss: what physics allows."""
        return replace(self, efficiency=Efficiency.ideal())

    def work(self, chunks: Sequence[Chunk]) -> dict[Operation, Work]:
        """The work of one device in a step, all layers together."""
        return step_work(self.device, chunks, self.precision, self.flash)

    def step(self, chunks: Sequence[Chunk]) -> TimeBreakdown:
        """The time of one step over the sequences of one data-parallel group; all groups do as much."""
        tokens, rows = tokens_and_rows(chunks)
        sequences = sum(chunk.sequences for chunk in chunks)
        work = attention_work(self.device, chunks, self.precision, self.flash)
        work[Operation.SCORES] += work.pop(Operation.VALUES)  # one kernel does both
        parts = tuple(self._part(op, each, tokens) for op, each in work.items())
        parts = self._by_token(tokens, rows) + parts
        host_s = self.efficiency.step_s + self.efficiency.sequence_s * sequences
        if self.efficiency.launch_s and any(chunk.tokens > 1 for chunk in chunks):
            host_s += max(0.0, self._launches_s - sum([part.seconds for part in parts]))
        return TimeBreakdown(parts, host_s)

    def step_s(self, chunks: Sequence[Chunk]) -> tuple[float, float, float]:
        """Seconds of the host, of the device, and for sampling among these, in the step that step() describes.

        It takes half of the time, and needs little memory where many steps are asked for.
        """
        if self.parallelism.devices > 1:
            step = self.step(chunks)
            return step.host_s, step.device_s, sum([p.seconds for p in step.parts if p.name == Operation.SAMPLING])
        (tokens, rows), known = tokens_and_rows(chunks), self._known_s
        if tokens not in known:
            known[tokens] = sum([part.seconds for part in self._by_token(tokens, 0)[:-2]])
        head, sampling = self._by_token(0, rows)[-2:]
        device_s = known[tokens] + head.seconds + sampling.seconds
        work = attention_work(self.device, chunks, self.precision, self.flash)
        work[Operation.SCORES] += work.pop(Operation.VALUES)
        for operation, each in work.items():
            device_s += self._part(operation, each, tokens).seconds
        host_s = self.efficiency.step_s + self.efficiency.sequence_s * sum([chunk.sequences for chunk in chunks])
        if self.efficiency.launch_s and any(chunk.tokens > 1 for chunk in chunks):
            host_s += max(0.0, self._launches_s - device_s)
        return host_s, device_s, sampling.seconds

    @cached_property
    def _launches_s(self) -> float:
        """Seconds in which the host launches all kernels of a step one by one: the device cannot end before."""
        return sum(map(self._kernels, self.work([Chunk(2)]))) * self.efficiency.launch_s

    def _by_token(self, tokens: int, rows: int) -> tuple[PartTime, ...]:
        """The parts of a step without attention. They are kept, as many steps of a run have equally many tokens."""
        known = self._known
        if len(known) > MOST_KNOWN:
            known.clear()
        if (tokens, None) not in known:
            work = token_work(self.device, tokens, self.precision)
            known[tokens, None] = tuple([self._part(op, each, tokens) for op, each in work.items()])
        if (None, rows) not in known:
            work = row_work(self.device, rows, self.precision)
            known[None, rows] = tuple([self._part(op, each, rows) for op, each in work.items()])
        parts = known[tokens, None] + known[None, rows]
        if self.parallelism.devices == 1:
            return parts
        if (tokens, rows) not in known:
            known[tokens, rows] = tuple(
                self._network(traffic(self.shape, self.parallelism, self.precision, tokens, rows))
            )
        return parts + known[tokens, rows]

    @cached_property
    def _known_s(self) -> dict[int, float]:
        """Seconds of what depends on a step's tokens alone, on one device."""
        return {}

    @cached_property
    def _known(self) -> dict[tuple[int | None, int | None], tuple[PartTime, ...]]:
        return {}

    def _part(self, operation: Operation, work: Work, tokens: int) -> PartTime:
        flops_per_s, overhead_s = self._constants[operation]
        compute_s = work.flops / flops_per_s
        if operation in LINEAR:
            compute_s = self.efficiency.overlapped(compute_s, self._widening_s(operation, work, tokens))
        if operation in ATTENTION:
            compute_s += self._scores(work) * self.efficiency.score_s
        memory_s = self._memory_s(operation, work)
        if operation in NORMALISATION and self.parallelism.sequence:
            compute_s, memory_s = compute_s / self.parallelism.tensor, memory_s / self.parallelism.tensor
        factor = self._linear_factor(operation, tokens) if operation in LINEAR else 1.0
        seconds = self.efficiency.overlapped(compute_s, memory_s) * factor + overhead_s
        name = "attention" if operation is Operation.SCORES else str(operation)
        return PartTime(name, seconds, compute_s * factor, memory_s * factor, 0.0, overhead_s, work)

    @cached_property
    def _constants(self) -> dict[Operation, tuple[float, float]]:
        """FLOPs a second of each operation, and seconds that its kernels take to start: the same in every step."""
        starts = {op: self._kernels(op) * self.efficiency.kernel_s for op in Operation}
        starts[Operation.SCORES] += self.shape.attention_layers * self.efficiency.attention_s
        return {op: (self._flops_per_s(op), seconds) for op, seconds in starts.items()}

    def _linear_factor(self, operation: Operation, tokens: int) -> float:
        format_ = self.hardware.arithmetic(compute_format(operation, self.precision))
        return self.efficiency.linear_factor(max(1, tokens), weight_format(operation, self.precision).name, format_)

    def _scores(self, work: Work) -> float:
        """Pairs of a query and a key in all heads: each has two products of the head's dimension."""
        return work.flops / (4 * self.device.head_dim)

    def _flops_per_s(self, operation: Operation) -> float:
        if operation in NORMALISATION:
            vectors = self.hardware.flops_per_s.get("fp32")
            return vectors or self.hardware.rate(self.precision.activations.compute)
        format_ = self.hardware.arithmetic(compute_format(operation, self.precision))
        peak = self.hardware.flops_per_s[format_]
        if operation in ATTENTION:
            return peak * self.efficiency.attention_flops
        share = self.efficiency.matmul(format_)
        return peak * share * (self.efficiency.expert_flops if operation is Operation.EXPERTS else 1.0)

    def _memory_s(self, operation: Operation, work: Work) -> float:
        """Seconds to move weights, cache and activations in turn, each at its own share of the bandwidth."""
        e, bandwidth = self.efficiency, self.hardware.bandwidth(self.working_set)
        weights = e.matmul_bytes if operation in LINEAR else e.element_bytes
        weights *= e.expert_bytes if operation is Operation.EXPERTS else 1.0
        return (
            work.weight_bytes / weights
            + (work.kv_read_bytes + work.kv_write_bytes) / e.kv_bytes
            + work.activation_bytes / e.element_bytes
        ) / bandwidth

    def _widening_s(self, operation: Operation, work: Work, tokens: int) -> float:
        """Seconds to widen weights that are narrower than what they are multiplied in, once for each tile of rows."""
        kept = weight_format(operation, self.precision)
        ops = self.efficiency.widening(
            kept.bits, WIDTHS[self.hardware.arithmetic(compute_format(operation, self.precision))]
        )
        if not ops:
            return 0.0
        experts = self.device.experts
        rows = float(tokens)
        if operation is Operation.EXPERTS and experts is not None:
            rows = experts.routed(tokens) / experts.touched(tokens)
        weights = work.weight_bytes * 8 / kept.bits_per_element
        return weights * math.ceil(rows / TILE_ROWS) * ops / self.hardware.rate("fp32")

    def _kernels(self, operation: Operation) -> int:
        s = self.shape
        if operation is Operation.NORMS:
            of_latent = (1 if s.latent.q_rank is None else 2) if s.latent else 0
            return s.layers * s.layer_norms + s.attention_layers * (bool(s.qk_norm) + of_latent)
        layers = s.attention_layers
        if operation in OF_RECURRENT:
            layers = len(s.recurrent)
        if operation in (Operation.GATE_UP, Operation.ACTIVATION, Operation.DOWN):
            layers = s.dense_layers
        if operation in (Operation.ROUTER, Operation.SHARED_EXPERTS, Operation.EXPERTS):
            layers = s.experts.layers if s.experts else 0
        return layers * KERNELS_A_LAYER.get(operation, 0) + KERNELS_A_STEP.get(operation, 0)

    @property
    def network(self) -> Link:
        """The link between machines: the hardware's own, or a plain one."""
        return self.hardware.network or PLAIN_NETWORK

    def _network(self, sent: Traffic) -> list[PartTime]:
        """The time of what is sent in rings.

        An all-reduce sends 2 (n - 1) / n of its tensor, and a gather (n - 1) / n (Patarasu and Yuan, 2009).

        Over several machines a ring goes round inside each, and then each device's share round the machines
        (hierarchical all-reduce, as in NCCL).
        """
        link, spread = self.hardware.link, self.parallelism
        assert link is not None  # check() saw to it
        calls = sent.all_reduces + (1 if sent.gather_bytes else 0)
        tensor, group = spread.tensor, spread.tensor * spread.data
        nodes = machines(tensor, link)
        inside = -(-tensor // nodes)
        reduced = float(2 * sent.all_reduce_bytes + sent.gather_bytes)
        far = max(0, group - link.max_devices) / max(1, group - 1)  # share of neighbours elsewhere
        beyond = machines(spread.devices, link) > 1
        parts = {
            "all_reduce": (calls, reduced * (inside - 1) / inside, reduced / inside * (nodes - 1) / nodes, nodes > 1),
            "all_to_all": (sent.all_to_alls, sent.all_to_all_bytes * (1 - far), sent.all_to_all_bytes * far, far > 0),
            "pipeline": (sent.hops, sent.hop_bytes * (not beyond), sent.hop_bytes * beyond, beyond),
        }
        found = []
        for name, (count, near_bytes, far_bytes, crosses) in parts.items():
            if count:
                rates = (link.bytes_per_s * self.efficiency.link, self.network.bytes_per_s * self.efficiency.link)
                wait = link.latency_s + (self.network.latency_s if crosses else 0.0)
                seconds = near_bytes / rates[0] + far_bytes / rates[1] + count * wait
                found.append(PartTime(name, seconds, network_s=seconds))
        return found

    def pace(self, step: TimeBreakdown) -> float:
        """Seconds that the slowest stage of the pipeline, or the host, is busy with this step: none comes faster.

        Each of `stages` has its layers' part of the step; the last one also has what comes after the layers. Without a
        pipeline it is the step.
        """
        count, layers = self.parallelism.pipeline, self.shape.layers
        if count == 1:
            return step.seconds
        after = sum(part.seconds for part in step.parts if part.name in AFTER_LAYERS)
        of_recurrent = sum(part.seconds for part in step.parts if part.name in OF_RECURRENT)
        of_attention = sum(part.seconds for part in step.parts if part.name in OF_ATTENTION)
        of_all = step.device_s - after - of_recurrent - of_attention
        busiest = max(
            of_all * stage.layers / layers
            + of_recurrent * len(stage.recurrent) / max(1, len(self.shape.recurrent))
            + of_attention * stage.attention_layers / max(1, self.shape.attention_layers)
            for stage in self._stages
        )
        return max(busiest, (step.device_s - after) * (layers // count) / layers + after, step.host_s)

    @cached_property
    def _stages(self) -> list[ModelShape]:
        return stages(self.shape, self.parallelism.pipeline)
