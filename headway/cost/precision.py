"""How numbers are kept: bits of an element, scales of a group, and the kind of arithmetic that multiplies them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from headway.cost.layers import Matrix


@dataclass(frozen=True, slots=True)
class Format:
    """A number format."""

    name: str
    bits: int  # bits of an element
    compute: str  # the arithmetic of matrix products in this format, a key of `Hardware.flops_per_s`
    group: int = 0  # elements that share a scale; 0 where there are no scales, or so few that nobody counts them
    scale_bits: int = 0  # bits of a group's scale, and of its zero point where it has one
    row_bits: int = 0  # bits of a scale that each row of a matrix has besides
    # rows, inputs: rows of a matrix, and the numbers in each, are filled up to multiples of these.
    rows: int = 1
    inputs: int = 1

    def bytes_of(self, elements: int) -> int:
        """Bytes of so many elements with their scales, rounded up to a whole byte."""
        groups = -(-elements // self.group) if self.group else 0
        return -(-(elements * self.bits + groups * self.scale_bits) // 8)

    def bytes_of_matrices(self, matrices: Iterable[Matrix]) -> int:
        """Bytes of these matrices as they are kept, with what they are filled up with."""
        if self.rows == self.inputs == 1 and not self.row_bits:
            return self.bytes_of(sum(count * rows * width for count, rows, width in matrices))
        full = map(self.filled_up, matrices)
        return sum(count * (self.bytes_of(rows * width) + rows * self.row_bits // 8) for count, rows, width in full)

    def filled_up(self, matrix: Matrix) -> Matrix:
        """The matrix with as many rows, and numbers in a row, as are stored."""
        count, rows, width = matrix
        return count, -(-rows // self.rows) * self.rows, -(-width // self.inputs) * self.inputs

    @property
    def bits_per_element(self) -> float:
        """Scales included: 4.25 for MXFP4 (document 000)."""
        return self.bits + (self.scale_bits / self.group if self.group else 0.0)


FP32 = Format("fp32", 32, "fp32")
BF16 = Format("bf16", 16, "bf16")
FP16 = Format("fp16", 16, "fp16")
FP8 = Format("fp8", 8, "fp8")
INT8 = Format("int8", 8, "int8")

_DTYPES = {"float32": FP32, "fp32": FP32, "bfloat16": BF16, "bf16": BF16, "float16": FP16, "fp16": FP16, "half": FP16}

# Weights of each scheme, by the name that `--quantization` takes; `compute` None multiplies in the activations' dtype,
# after widening the weights. Groups and scales are those of the usual checkpoints: AWQ and GPTQ with 128 weights to a
# 16-bit scale, blocks of 32 with an 8-bit exponent for MXFP4 (OCP Microscaling Formats, 2023), which devices with units
# for it multiply with 8-bit activations, and blocks of 16 with an 8-bit float for NVFP4 (NVIDIA's introduction of it,
# 2025), which Blackwell multiplies with activations in the same format. FP8 in blocks has a scale for 128 rows and
# inputs (DeepSeek-V3), and NF4 one of 8 bits for 64 (QLoRA, double quantisation). GGUF's types are as its files have
# them (ggml-org/ggml, src/ggml-common.h).
_WEIGHTS: dict[str, tuple[int, int, int, str | None]] = {
    "fp8": (8, 0, 0, "fp8"),
    "fp8-weight-only": (8, 0, 0, None),
    "fp8-block": (8, 128 * 128, 32, "fp8"),
    "int8": (8, 0, 0, "int8"),
    "int8-weight-only": (8, 0, 0, None),
    "int4": (4, 128, 16, None),
    "int4-weight-only": (4, 128, 16, None),
    "w4a8": (4, 128, 16, "int8"),
    "q4_k": (4, 256, 128, None),
    "q6_k": (6, 256, 144, None),
    "q8_0": (8, 32, 16, None),
    "mxfp4": (4, 32, 8, "mxfp4"),
    "nvfp4": (4, 16, 8, "nvfp4"),
    "nf4": (4, 64, 8, None),
}
# Schemes for mixtures of experts: the experts' matrices alone have the format, everything else has the plain dtype.
_EXPERTS_ONLY = {"int4-experts": "int4", "nvfp4-experts": "nvfp4"}
QUANTIZATIONS = ("none", *_WEIGHTS, *_EXPERTS_ONLY)
# What this engine packs (docs/quantization.md): a float32 scale for each row, and in int4 a byte for each row and 32
# inputs besides; on a CPU panels of 64 rows, whose inputs are filled up to a multiple of the fifth number. Its head has
# no fewer than 8 bits. Compute None as above.
_ENGINE_WEIGHTS: dict[str, tuple[int, int, int, int, str | None]] = {
    "int8": (8, 0, 0, 4, "int8"),
    "int8-weight-only": (8, 0, 0, 2, None),
    "int4": (4, 32, 8, 32, "int8"),
}
_ENGINE_HEAD = {"int4": "int8"}
_AS_ROUNDED = {"w4a8": "int4"}  # checkpoints that are kept as what the engine rounds, but for the head
# How this engine keeps packed checkpoints. The numbers are: bits of a weight; inputs of a group; bits of a group's
# factor and offset, 8 each, and of its scale and minimum, 32 each, or a part of those where a longer run shares them;
# the same on a GPU, where factors of 1, offsets of 0 and half of the scales' bits are left out if nothing is lost; the
# format of the head. AWQ and GPTQ have groups of 128, and FP8 a scale for each row, or in blocks for each row and 128
# inputs.
_ENGINE_PACKED: dict[str, tuple[int, int, int, int, str | None]] = {
    "int4-weight-only": (4, 128, 16 + 32, 8 + 16, None),
    "fp8-weight-only": (8, 128, 16, 0, None),
    "fp8-block": (8, 128, 16 + 32, 32, None),
    "mxfp4": (4, 32, 16 + 32, 16, None),
    "nvfp4": (4, 16, 16 + 32, 32, None),
    "nf4": (4, 64, 16 + 32, 32, None),
    "q4_k": (4, 32, 16 + 64 // 8, 16 + 32 // 8, "q6_k"),
    "q6_k": (8, 16, 16 + 32 // 16, 8 + 16 // 16, "q6_k"),
    "q8_0": (8, 32, 16 + 32, 16, "q8_0"),
}
# On a GPU, inputs are filled up to a multiple of those that are multiplied together.
_GPU_INPUTS = 64
_GGUF_TYPES = ("q4_k", "q6_k", "q8_0")
_ROW_SCALES = {"fp8-weight-only": 32}  # bits of a row; on a CPU each has 32 more
ENGINE_QUANTIZATIONS = ("none", *_ENGINE_WEIGHTS)
ENGINE_CHECKPOINTS = (*_ENGINE_PACKED, *_AS_ROUNDED)
ENGINE_KV_DTYPES = ("auto", "int8", "fp8")
KV_DTYPES = ("auto", "fp8", "int8", "bf16", "fp16", "fp32")


@dataclass(frozen=True, slots=True)
class Precision:
    """The formats of a model's parts."""

    linear: Format = BF16  # format of the layers' matrices
    experts: Format | None = None  # format of the experts' matrices; None stands for `linear`
    head: Format = BF16  # format of the output projection; an embedding that is tied to it is kept like it
    rest: Format = BF16  # format of norms, biases, routers and the embedding
    activations: Format = BF16  # format of what layers hand to each other; it is also the dtype of attention's products
    kv: Format = BF16  # format of cached keys and values
    # Format of the matrices between latents and the keys and values of heads; None stands for `linear`.
    latent: Format | None = None

    @classmethod
    def of(cls, dtype: str) -> Precision:
        """Everything in one dtype. Raises ValueError unless it is float32, bfloat16 or float16."""
        format_ = _DTYPES.get(dtype.lower())
        if format_ is None:
            raise ValueError(f"dtype is {dtype!r}; it must be float32, bfloat16 or float16")
        return cls(format_, None, format_, format_, format_, format_)

    @classmethod
    def named(cls, dtype: str = "bfloat16", quantization: str = "none", kv_cache_dtype: str = "auto") -> Precision:
        """The formats that `--dtype`, `--quantization` and `--kv-cache-dtype` name.

        The head, the embedding and the norms stay in `dtype`, as the usual checkpoints have them; mxfp4 is for the
        experts where a model has them (`ModelShape.experts`), and for the layers' matrices where it has none.

        Raises:
            ValueError: a name is not known.
        """
        base = cls.of(dtype)
        if quantization not in QUANTIZATIONS:
            raise ValueError(f"quantization is {quantization!r}; it must be one of {', '.join(QUANTIZATIONS)}")
        if kv_cache_dtype not in KV_DTYPES:
            raise ValueError(f"kv_cache_dtype is {kv_cache_dtype!r}; it must be one of {', '.join(KV_DTYPES)}")
        kv = {"auto": base.kv, "fp8": FP8, "int8": INT8}.get(kv_cache_dtype) or _DTYPES[kv_cache_dtype]
        if quantization == "none":
            return replace(base, kv=kv)
        scheme = _EXPERTS_ONLY.get(quantization, quantization)
        bits, group, scale_bits, compute = _WEIGHTS[scheme]
        weights = Format(scheme, bits, compute or base.activations.compute, group, scale_bits)
        found = replace(base, linear=weights, kv=kv)
        return found.for_experts_only() if quantization in _EXPERTS_ONLY else found

    @classmethod
    def of_engine(
        cls, dtype: str, quantization: str, kv_cache_dtype: str, head_dim: int, kind: str = "cpu"
    ) -> Precision:
        """The formats in which `headway serve` keeps a model. For what it does not have, they are those of `named`.

        It has ENGINE_QUANTIZATIONS, which it makes itself, ENGINE_CHECKPOINTS and ENGINE_KV_DTYPES.

        Args:
            head_dim: elements of a head's key, which has a float32 scale of its own in a cache of int8.
            kind: kind of the hardware, cpu or gpu.

        Raises:
            ValueError: a name is not known.
        """
        found = cls.named(dtype, quantization, kv_cache_dtype)
        if kv_cache_dtype == "int8":
            found = replace(found, kv=replace(INT8, group=head_dim, scale_bits=32))
        if quantization in _ENGINE_PACKED:
            head_format = _ENGINE_PACKED[quantization][4]
            head_ = found.head if head_format is None else _in_groups(head_format, found.activations, kind)
            # GGUF's files have a matrix for each head. That of other files is divided by heads, and no longer packed.
            latent = None if quantization in _GGUF_TYPES and kind == "cpu" else found.activations
            return replace(found, linear=_in_groups(quantization, found.activations, kind), head=head_, latent=latent)
        latent = None if kind == "cpu" else found.activations
        if quantization in _AS_ROUNDED:
            linear = _packed(_AS_ROUNDED[quantization], found.activations, kind)
            on_gpu = replace(linear, row_bits=linear.row_bits // 2)  # scales that 16 bits hold
            return replace(found, linear=linear if kind == "cpu" else on_gpu, latent=found.activations)
        if quantization not in _ENGINE_WEIGHTS:
            return found
        linear, head = (
            _packed(each, found.activations, kind)
            for each in (quantization, _ENGINE_HEAD.get(quantization, quantization))
        )
        return replace(found, linear=linear, head=head, latent=latent)

    def for_experts_only(self) -> Precision:
        """The same, with `linear` kept for experts and all other matrices in the plain dtype (gpt-oss, MXFP4)."""
        return replace(self, linear=self.rest, experts=self.linear)

    @property
    def of_experts(self) -> Format:
        return self.experts or self.linear

    @property
    def of_latent(self) -> Format:
        return self.latent or self.linear


def is_for_experts(quantization: str) -> bool:
    """Whether a scheme quantises experts alone, so that a model without any has no use for it."""
    return quantization in _EXPERTS_ONLY


def _packed(quantization: str, activations: Format, kind: str) -> Format:
    bits, group, scale_bits, inputs, compute = _ENGINE_WEIGHTS[quantization]
    own = compute or activations.compute
    if kind == "gpu":  # a group has an offset as it has a scale
        both = 2 if group else 1
        return Format(quantization, bits, own, group, both * scale_bits, both * 32, inputs=_GPU_INPUTS)
    return Format(quantization, bits, own, group, scale_bits, 32, 64, inputs)


def _in_groups(quantization: str, activations: Format, kind: str) -> Format:
    bits, group, on_cpu, on_gpu, _ = _ENGINE_PACKED[quantization]
    of_row = _ROW_SCALES.get(quantization, 0)
    if kind == "gpu":
        return Format(quantization, bits, activations.compute, group, on_gpu, of_row, inputs=_GPU_INPUTS)
    return Format(quantization, bits, activations.compute, group, on_cpu, of_row + 32, rows=64)
