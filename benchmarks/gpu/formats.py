"""Products with packed matrices, and mixtures of experts: beside exact ones, and beside the limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.limits import GIB, random
from benchmarks.gpu.part import Flaw, Machine, Row, Tasks
from headway.kernels.cuda.experts import CudaMixture
from headway.kernels.cuda.kernels import CudaKernels
from headway.kernels.cuda.packed import Packed, pack
from headway.kernels.cuda.product import multiply
from headway.kernels.weights import CLAMPED, Groups, Product, Weight

Measure = Callable[[str, Callable[[], object], int, float, float], Row]
DTYPE = torch.bfloat16
TOKENS = (1, 8, 64, 512)
# More of a result's norm than rounding it, and what experts hand on, explains.
_MOST_WRONG = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@dataclass(frozen=True)
class Format:
    """How a checkpoint packs matrices.

    Args:
        scheme: of `Weight`; none: it does not.
        size: inputs of a group; 0: all of a row.
        run: groups that share a scale.
        offsets: there are some.
        halves: scales are such as half precision can hold.
    """

    scheme: str
    size: int = 0
    run: int = 1
    offsets: bool = False
    halves: bool = True

    def weight(self, rows: int, inputs: int, device: str, dtype: torch.dtype = DTYPE) -> Weight:
        """Random numbers, about as large as those of weights."""
        if self.scheme == "none":
            return Weight((torch.randn(rows, inputs, device=device) * inputs**-0.5).to(dtype))
        size = self.size or inputs
        below = 16 if self.scheme in ("int4-weight-only", "float4-weight-only") else 256
        values = torch.randint(0, below, (rows, inputs), dtype=torch.uint8, device=device)
        if self.scheme == "float8-weight-only":  # without infinities
            values = values.where(values & 127 != 127, 0).view(torch.float8_e4m3fn)
        elif self.scheme == "int8-weight-only":
            values = values.view(torch.int8)
        count = inputs // size
        factors = torch.randint(1, 64 if self.run > 1 else 2, (rows, count), device=device).to(torch.int8)
        offsets = torch.randint(0, 16 if self.offsets else 1, (rows, count), device=device).to(torch.int8)
        scales = torch.rand(rows, count // self.run, device=device) * inputs**-0.5 / (below / 8) / self.run + 1e-5
        if self.halves:
            scales = scales.half().float()
        return Weight(values, self.scheme, groups=Groups(size, factors, offsets, scales, self.run), dtype=dtype)


FORMATS = {
    "int4, groups of 128 (AWQ, GPTQ)": Format("int4-weight-only", 128, offsets=True),
    "int4, groups of 32 in runs of 8 (Q4_K)": Format("int4-weight-only", 32, 8, offsets=True),
    "int8, rows": Format("int8-weight-only", halves=False),
    "int8, groups of 16 in runs of 16 (Q6_K)": Format("int8-weight-only", 16, 16),
    "FP8, rows": Format("float8-weight-only", halves=False),
    "FP8, groups of 128": Format("float8-weight-only", 128, halves=False),
    "MXFP4": Format("float4-weight-only", 32),
    "NVFP4": Format("float4-weight-only", 16, halves=False),
}
EXPERT_FORMATS = {"bfloat16": Format("none"), **{name: FORMATS[name] for name in ("MXFP4", "FP8, groups of 128")}}


@dataclass(frozen=True)
class Experts:
    """Sizes of a mixture."""

    count: int
    per_token: int
    hidden: int
    width: int

    def mixture(self, form: Format, device: str, kernels: CudaKernels, dtype: torch.dtype = DTYPE) -> CudaMixture:
        """Random experts with gpt-oss's gate and biases."""
        gate_up = self._products(form, 2 * self.width, self.hidden, device, dtype)
        down = self._products(form, self.hidden, self.width, device, dtype)
        return kernels.mixture(gate_up, down, self.count, CLAMPED)

    def _products(self, form: Format, rows: int, inputs: int, device: str, dtype: torch.dtype) -> Iterator[Product]:
        for _ in range(self.count):
            yield form.weight(rows, inputs, device, dtype), torch.randn(rows, device=device).to(dtype)

    def routed(self, tokens: int, device: str) -> tuple[Tensor, Tensor]:
        """Different experts for each token, and weights."""
        chosen = torch.rand(tokens, self.count, device=device).argsort(1)[:, : self.per_token].contiguous()
        return chosen, torch.rand(tokens, self.per_token, device=device).softmax(1)


def _selected(machine: Machine, forms: dict[str, Format]) -> dict[str, Format]:
    return dict(list(forms.items())[:2]) if machine.small else forms


GPT_OSS_20B, SMALL = Experts(32, 4, 2880, 2880), Experts(4, 2, 128, 128)


def agreement(machine: Machine) -> Tasks:
    """One for each format and type."""
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in _MOST_WRONG}
    found: Tasks = {}
    for short, dtype in dtypes.items():
        for name, form in _selected(machine, FORMATS).items():
            found[f"product {name}, {short}"] = partial(_exact_product, machine, form, dtype)
        for name, form in _selected(machine, EXPERT_FORMATS).items():
            found[f"experts {name}, {short}"] = partial(_exact_experts, machine, form, dtype)
    return found


@torch.inference_mode()
def _exact_product(machine: Machine, form: Format, dtype: torch.dtype) -> Iterable[Row]:
    """Raises Flaw where a result is not that of the numbers in float64."""
    rows, inputs, tokens = (64, 512, (1, 3)) if machine.small else (1536, 4096, (1, 3, 17, 300))
    kernels, packed = CudaKernels(), pack([(form.weight(rows, inputs, machine.device, dtype), None)], 1)
    dense = _plain(packed)
    for count in tokens:
        x = random(machine, count, inputs, dtype=dtype)
        got = multiply(packed, x, kernels._multiprocessors)
        yield _held({"tokens": count}, got, x.double() @ dense.T, dtype)


@torch.inference_mode()
def _exact_experts(machine: Machine, form: Format, dtype: torch.dtype) -> Iterable[Row]:
    """Compare a mixture with exact products, expert by expert."""
    sizes, tokens = (SMALL, (1, 3)) if machine.small else (Experts(16, 4, 1024, 768), (1, 3, 200))
    mixture = sizes.mixture(form, machine.device, CudaKernels(), dtype)
    for count in tokens:
        x, (chosen, weights) = random(machine, count, sizes.hidden, dtype=dtype), sizes.routed(count, machine.device)
        expected = torch.zeros(count, sizes.hidden, dtype=torch.float64, device=machine.device)
        for number in range(sizes.count):
            of_expert, place = torch.where(chosen == number)
            up = x[of_expert].double() @ _plain(mixture.gate_up, number).T + _bias(mixture.gate_up, number)
            gate, up = up[:, ::2].clamp(max=CLAMPED.limit), up[:, 1::2].clamp(-CLAMPED.limit, CLAMPED.limit)
            opened = gate * torch.sigmoid(CLAMPED.slope * gate) * (up + CLAMPED.shift)
            result = opened @ _plain(mixture.down, number).T + _bias(mixture.down, number)
            expected[of_expert] += weights[of_expert, place, None].double() * result
        yield _held({"tokens": count}, mixture(x, chosen, weights, None), expected, dtype)


def _plain(packed: Packed, number: int = 0) -> Tensor:
    return packed.rows(torch.arange(packed.outputs, device=packed.numbers.device), number, torch.float64)


def _bias(packed: Packed, number: int) -> Tensor:
    assert packed.bias is not None
    return packed.bias[number].double()


def _held(row: Row, got: Tensor, expected: Tensor, dtype: torch.dtype) -> Row:
    error = float((got.double() - expected).norm() / expected.norm())
    if not error < _MOST_WRONG[dtype]:
        raise Flaw(f"{row}: the result is {error:.2g} off, of its norm; {_MOST_WRONG[dtype]:.2g} is allowed")
    return row | {"dtype": str(dtype).removeprefix("torch."), "rms_error": error}


def kernels(machine: Machine, measure: Measure) -> Tasks:
    """One for each format, and experts of gpt-oss-20b's shape."""
    found: Tasks = {}
    for name, form in _selected(machine, FORMATS).items():
        found[f"packed product {name}"] = partial(_products, machine, form, measure)
    for name, form in _selected(machine, EXPERT_FORMATS).items():
        found[f"experts {name}"] = partial(_experts, machine, form, measure)
    return found


@torch.inference_mode()
def _products(machine: Machine, form: Format, measure: Measure) -> Iterable[Row]:
    """Time products with matrices that no cache holds together, one after the other."""
    rows, inputs, most = (64, 512, 0) if machine.small else (4096, 14336, GIB // 2)
    first = pack([(form.weight(rows, inputs, machine.device), None)], 1)
    copies = max(2, most // first.nbytes)
    weights = [first, *(pack([(form.weight(rows, inputs, machine.device), None)], 1) for _ in range(copies - 1))]
    kernels = CudaKernels()
    for tokens in TOKENS[:2] if machine.small else TOKENS:
        x = random(machine, tokens, inputs)

        def call(x: Tensor = x) -> None:
            for packed in weights:
                multiply(packed, x, kernels._multiprocessors)

        moved, flops = first.nbytes + x.nbytes + 2.0 * tokens * rows, 2.0 * tokens * rows * inputs
        yield measure(f"{tokens} tokens", call, len(weights), moved, flops)


@torch.inference_mode()
def _experts(machine: Machine, form: Format, measure: Measure) -> Iterable[Row]:
    """Only the experts that have tokens are read; the bytes of a call are those."""
    sizes = SMALL if machine.small else GPT_OSS_20B
    mixture = sizes.mixture(form, machine.device, CudaKernels())
    per_expert = (mixture.gate_up.nbytes + mixture.down.nbytes) / sizes.count
    for tokens in TOKENS[:2] if machine.small else TOKENS:
        x = random(machine, tokens, sizes.hidden)
        routed = [sizes.routed(tokens, machine.device) for _ in range(1 if machine.small else 8)]
        touched = sum(len(chosen.unique()) for chosen, _ in routed) / len(routed)

        def call(x: Tensor = x, routed: list[tuple[Tensor, Tensor]] = routed) -> None:
            for chosen, weights in routed:
                mixture(x, chosen, weights, None)

        flops = 6.0 * tokens * sizes.per_token * sizes.hidden * sizes.width
        yield measure(f"{tokens} tokens", call, len(routed), touched * per_expert + 2 * x.nbytes, flops)
