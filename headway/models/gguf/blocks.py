"""The blocks of GGUF's tensor types as numbers in groups, without loss (ggml-org/ggml, src/ggml-common.h).

A row of a matrix is blocks of 32 or 256 inputs, each a few bytes of scales and the packed numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headway.kernels.weights import Groups, Weight

# The values of four bits in IQ4_NL and IQ4_XS.
_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def packed_blocks(kind: str, blocks: Tensor, dtype: torch.dtype) -> Weight:
    """A matrix whose rows are blocks of a type, uint8 [out, bytes of a row], as one that is multiplied in `dtype`.

    Raises:
        KeyError: the type is not one of BLOCKS.
    """
    _, size, take = BLOCKS[kind]
    out = blocks.shape[0]
    values, groups = take(blocks.reshape(out, -1, size))
    values = values.reshape(out, -1)
    scheme = "int4-weight-only" if values.dtype == torch.uint8 else "int8-weight-only"
    scheme = "float4-weight-only" if kind == "MXFP4" else scheme
    return Weight(values, scheme, groups=groups, dtype=dtype)


def _halves(bytes_: Tensor) -> Tensor:
    """float16 [out, blocks] as float32, of two bytes in each block."""
    return bytes_.contiguous().view(torch.float16)[..., 0].float()


def _nibbles(bytes_: Tensor, width: int) -> Tensor:
    """Low halves of `width` bytes, then their high ones."""
    pieces = bytes_.unflatten(2, (-1, 1, width))
    return torch.cat([pieces & 15, pieces >> 4], dim=3).flatten(2)


def _bits(bytes_: Tensor, each: int) -> Tensor:
    """Numbers of `each` bits: the lowest of 32 bytes, then the next."""
    pieces = bytes_.unflatten(2, (-1, 1, 32))
    shifted = [pieces >> shift for shift in range(0, 8, each)]
    return (torch.cat(shifted, dim=3) & ((1 << each) - 1)).flatten(2)


def _groups(
    scales: Tensor, size: int, factors: Tensor | None = None, offsets: Tensor | int = 0, minima: Tensor | None = None
) -> Groups:
    """Groups of blocks whose scales are [out, blocks]; factors and offsets are [out, blocks, groups of a block]."""
    ones = torch.ones((*scales.shape, 1), dtype=torch.int8)
    factors = ones if factors is None else factors.to(torch.int8)
    offsets = torch.full_like(factors, offsets) if isinstance(offsets, int) else offsets.to(torch.int8)
    return Groups(size, factors.flatten(1), offsets.flatten(1), scales, factors.shape[2], minima)


def _q4_0(b: Tensor) -> tuple[Tensor, Groups]:
    return _nibbles(b[..., 2:], 16), _groups(_halves(b[..., :2]), 32, offsets=8)


def _q4_1(b: Tensor) -> tuple[Tensor, Groups]:
    return _nibbles(b[..., 4:], 16), _groups(_halves(b[..., :2]), 32, offsets=-1, minima=_halves(b[..., 2:4]))


def _fifth_bit(b: Tensor) -> Tensor:
    """Bit 4 of 32 numbers, of four bytes."""
    return (b.unsqueeze(3) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(2) << 4


def _q5_0(b: Tensor) -> tuple[Tensor, Groups]:
    numbers = _nibbles(b[..., 6:], 16) | _fifth_bit(b[..., 2:6])
    return numbers.view(torch.int8) - 16, _groups(_halves(b[..., :2]), 32)


def _q5_1(b: Tensor) -> tuple[Tensor, Groups]:
    numbers = _nibbles(b[..., 8:], 16) | _fifth_bit(b[..., 4:8])
    return numbers.view(torch.int8), _groups(_halves(b[..., :2]), 32, offsets=-1, minima=_halves(b[..., 2:4]))


def _q8_0(b: Tensor) -> tuple[Tensor, Groups]:
    return b[..., 2:].view(torch.int8), _groups(_halves(b[..., :2]), 32)


def _q2_k(b: Tensor) -> tuple[Tensor, Groups]:
    scales, least = _halves(b[..., 80:82]), _halves(b[..., 82:84])
    return _bits(b[..., 16:80], 2), _groups(scales, 16, b[..., :16] & 15, b[..., :16] >> 4, least)


def _q3_k(b: Tensor) -> tuple[Tensor, Groups]:
    """Scales of six bits, of which four stand in eight bytes and two in four; what is stored is 4 more."""
    high = _bits(b[..., :32], 1)
    numbers = _bits(b[..., 32:96], 2) | high << 2
    low = torch.cat([b[..., 96:104] & 15, b[..., 96:104] >> 4], dim=2)
    more = torch.cat([b[..., 104:108] >> shift & 3 for shift in (0, 2, 4, 6)], dim=2)
    factors = (low | more << 4).view(torch.int8) - 32
    return numbers, _groups(_halves(b[..., 108:110]), 16, factors, factors * 4)


def _six_bits(b: Tensor) -> tuple[Tensor, Tensor]:
    """Eight factors and eight offsets of six bits, of twelve bytes."""
    low, least, rest = b[..., :4], b[..., 4:8], b[..., 8:]
    factors = torch.cat([low & 63, (rest & 15) | (low >> 6) << 4], dim=2)
    offsets = torch.cat([least & 63, (rest >> 4) | (least >> 6) << 4], dim=2)
    return factors, offsets


def _q4_k(b: Tensor) -> tuple[Tensor, Groups]:
    groups = _groups(_halves(b[..., :2]), 32, *_six_bits(b[..., 4:16]), _halves(b[..., 2:4]))
    return _nibbles(b[..., 16:], 32), groups


def _q5_k(b: Tensor) -> tuple[Tensor, Groups]:
    numbers = _nibbles(b[..., 48:], 32) | _bits(b[..., 16:48], 1) << 4
    groups = _groups(_halves(b[..., :2]), 32, *_six_bits(b[..., 4:16]), _halves(b[..., 2:4]))
    return numbers.view(torch.int8), groups


def _q6_k(b: Tensor) -> tuple[Tensor, Groups]:
    numbers = _nibbles(b[..., :128], 64) | _bits(b[..., 128:192], 2) << 4
    return numbers.view(torch.int8) - 32, _groups(_halves(b[..., 208:210]), 16, b[..., 192:208].view(torch.int8))


def powers_of_two(bytes_: Tensor) -> Tensor:
    """Scales of MXFP4 (e8m0) as float32."""
    return torch.ldexp(torch.ones(bytes_.shape), bytes_.int() - 127)


def _looked_up(numbers: Tensor, codes: tuple[int, ...]) -> Tensor:
    return torch.tensor(codes, dtype=torch.int8)[numbers.int()]


def _iq4_nl(b: Tensor) -> tuple[Tensor, Groups]:
    return _looked_up(_nibbles(b[..., 2:], 16), _NONLINEAR), _groups(_halves(b[..., :2]), 32)


def _iq4_xs(b: Tensor) -> tuple[Tensor, Groups]:
    low = torch.stack([b[..., 4:8] & 15, b[..., 4:8] >> 4], dim=3).flatten(2)
    high = (b[..., 2:4].unsqueeze(3) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3).flatten(2)
    factors = (low | high << 4).view(torch.int8) - 32
    return _looked_up(_nibbles(b[..., 8:], 16), _NONLINEAR), _groups(_halves(b[..., :2]), 32, factors)


def _mxfp4(b: Tensor) -> tuple[Tensor, Groups]:
    """A power of two for each block."""
    return _nibbles(b[..., 1:], 16), _groups(powers_of_two(b[..., 0]), 32)


# Inputs and bytes of a block, and what makes numbers and groups of [out, blocks, bytes].
BLOCKS: dict[str, tuple[int, int, Callable[[Tensor], tuple[Tensor, Groups]]]] = {
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q5_0": (32, 22, _q5_0),
    "Q5_1": (32, 24, _q5_1),
    "Q8_0": (32, 34, _q8_0),
    "Q2_K": (256, 84, _q2_k),
    "Q3_K": (256, 110, _q3_k),
    "Q4_K": (256, 144, _q4_k),
    "Q5_K": (256, 176, _q5_k),
    "Q6_K": (256, 210, _q6_k),
    "IQ4_NL": (32, 18, _iq4_nl),
    "IQ4_XS": (256, 136, _iq4_xs),
    "MXFP4": (32, 17, _mxfp4),
}
