"""Linear layers as AWQ, GPTQ, compressed-tensors, bitsandbytes and FP8 checkpoints hold them, as numbers in groups."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from headway.kernels.weights import NF4, Groups, Weight
from headway.models.config import ModelError
from headway.models.gguf.blocks import powers_of_two
from headway.models.quantization import BLOCK_NUMBERS, BLOCK_SCALES, INT4_GROUP, MOST_STEPS, STATE, PackedMatrices

# AWQ's order of the eight numbers in a word.
_INTERLEAVED = (0, 4, 1, 5, 2, 6, 3, 7)
# Sizes of a group with its own activation scale; and the most inputs whose products surely fit into an int32.
_SIZES, _MOST_INPUTS = (128, 64, 32, 16, 8), 512

_THIRDS = (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25)
_OF_BLOCKS = {"nf4": NF4, "fp4": (*_THIRDS, *(-each for each in _THIRDS))}  # bitsandbytes' quant_map


def packed_layer(packed: PackedMatrices, layer: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weight:
    """The matrix of a layer of these tensors (see PackedMatrices.tensors), to be multiplied in `dtype`.

    Raises:
        ModelError: the tensors contradict each other, or its inputs cannot be cut into groups of a multiple of 8.
    """
    order: Tensor | None = None
    if packed.scheme == "float4-weight-only":
        return _float4(packed, layer, tensors, dtype)
    if packed.layout in ("nf4", "fp4"):
        return _bitsandbytes_matrix(packed, layer, tensors, dtype)
    if packed.layout == "llm.int8":
        scales = tensors["SCB"].float().view(-1, 1) / 127
        values, zeros = tensors["weight"].view(torch.uint8) ^ 128, torch.full(scales.shape, 128, dtype=torch.uint8)
    elif packed.scheme == "int4":
        return _in_steps(packed, layer, tensors, dtype)
    elif packed.layout == "int-quantized":
        values, scales = (tensors["weight"] + 8).view(torch.uint8), tensors["weight_scale"]
        zeros = torch.full(scales.shape, 8, dtype=torch.uint8)
    elif packed.layout == "fp8":
        values, scales, zeros = _float8(packed, layer, tensors)
    elif packed.layout == "awq":
        values = _unpacked(tensors["qweight"], 4)[:, :, _INTERLEAVED].flatten(1).T.contiguous()
        zeros = _unpacked(tensors["qzeros"], 4)[:, :, _INTERLEAVED].flatten(1).T
        scales = tensors["scales"].T
    elif packed.layout.startswith("gptq"):
        values = _unpacked(tensors["qweight"], packed.bits).permute(1, 0, 2).flatten(1)
        zeros = _unpacked(tensors["qzeros"], packed.bits).flatten(1).T
        if packed.layout == "gptq":  # which stores one less
            zeros = (zeros + 1) & ((1 << packed.bits) - 1)
        scales, order = tensors["scales"].T, tensors["g_idx"]
    else:
        values, scales = _unpacked(tensors["weight_packed"], packed.bits).flatten(1), tensors["weight_scale"]
        zeros = torch.full(scales.shape, 1 << (packed.bits - 1), dtype=torch.uint8)
        if packed.zero_points:
            zeros = _unpacked(tensors["weight_zero_point"].T.contiguous(), packed.bits).flatten(1).T
        order = tensors.get("weight_g_idx")
    if packed.scheme == "int8-weight-only":  # signed, as the kernels have them
        values, zeros = ((each ^ 128).view(torch.int8) for each in (values, zeros.contiguous()))
    size = packed.group_size or values.shape[1]
    order = None if order is None else _order(order, size, layer)
    if order is not None:
        values = values[:, order.long()]
    return Weight(
        values, packed.scheme, groups=_groups(layer, values.shape[1], size, scales, zeros, order), dtype=dtype
    )


def _in_steps(packed: PackedMatrices, layer: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weight:
    """A matrix of int4, whose scales are whole multiples of one in each row, its unit."""
    scales = tensors["weight_scale"].float()
    largest = scales.amax(1, keepdim=True)
    units = torch.zeros_like(largest)
    for steps in range(1, MOST_STEPS + 1):  # if several units fit, the least is taken
        unit = largest / steps
        factors = (scales / unit).round()
        units = torch.where((factors * unit == scales).all(1, keepdim=True), unit, units)
    if not (scales > 0).all() or not (units > 0).all():
        raise ModelError(
            f"{layer}.weight_scale is not made of whole multiples up to {MOST_STEPS} of one scale for each row, as "
            "scale_steps of quantization_config says; quantise the model again, or remove scale_steps"
        )
    inputs = tensors["weight"].shape[1]
    factors = (scales / units).round().to(torch.int8).repeat_interleave(inputs // INT4_GROUP // scales.shape[1], 1)
    groups = Groups(INT4_GROUP, factors, -8 * factors, units, run=inputs // INT4_GROUP, minima=-units)
    return Weight((tensors["weight"] + 8).view(torch.uint8), packed.scheme, groups=groups, dtype=dtype)


def mxfp4_matrix(blocks: Tensor, exponents: Tensor, dtype: torch.dtype) -> Weight:
    """A matrix of MXFP4, as gpt-oss holds experts: uint8 [out, groups, 16], the first of two in the low bits, and
    uint8 [out, groups].
    """
    return _float4_matrix(blocks.flatten(1), powers_of_two(exponents), dtype)


def _float4(packed: PackedMatrices, layer: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weight:
    """A matrix of e2m1, two in a byte, the first in the low bits."""
    codes, scales = tensors["weight" if packed.layout == "nvfp4-modelopt" else "weight_packed"], tensors["weight_scale"]
    if packed.layout == "mxfp4-packed":
        return _float4_matrix(codes, powers_of_two(scales), dtype)
    if packed.layout == "nvfp4":  # scales were multiplied by it, to make use of e4m3's range
        scales = scales.float() / tensors["weight_global_scale"].float()
    else:
        scales = scales.float() * tensors["weight_scale_2"].float()
    if not scales.isfinite().all():
        raise ModelError(f"{layer}.weight_scale holds what is not a number; download the checkpoint again")
    return _float4_matrix(codes, scales, dtype)


def _float4_matrix(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Weight:
    """The matrix of bytes [out, in / 2] of e2m1, with a scale for each group of inputs."""
    return _scaled(torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1), scales, "float4-weight-only", dtype)


def _scaled(values: Tensor, scales: Tensor, scheme: str, dtype: torch.dtype) -> Weight:
    factors = torch.ones(scales.shape, dtype=torch.int8)
    groups = Groups(values.shape[1] // scales.shape[1], factors, torch.zeros_like(factors), scales.contiguous())
    return Weight(values, scheme, groups=groups, dtype=dtype)


class _State(msgspec.Struct):
    """The JSON in which bitsandbytes describes a matrix."""

    shape: tuple[int, int]
    blocksize: int
    nested_blocksize: int = BLOCK_SCALES
    nested_offset: float = 0.0


def shape_in_state(stored: Tensor, name: str) -> tuple[int, int]:
    """The shape of the matrix that a tensor of bitsandbytes describes. Raises ModelError where it is damaged."""
    return _state(stored, name).shape


def _state(stored: Tensor, name: str) -> _State:
    try:
        state = msgspec.json.decode(stored.numpy().tobytes(), type=_State)
    except msgspec.MsgspecError as error:
        raise ModelError(f"{name} is damaged ({error}); download the checkpoint again") from None
    if (state.blocksize, state.nested_blocksize) != (BLOCK_NUMBERS, BLOCK_SCALES):
        raise ModelError(
            f"{name} has blocksize {state.blocksize} and nested_blocksize {state.nested_blocksize}, which are not "
            f"supported, only {BLOCK_NUMBERS} and {BLOCK_SCALES} are; use the unquantised checkpoint"
        )
    return state


def _bitsandbytes_matrix(
    packed: PackedMatrices, layer: str, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> Weight:
    """A matrix of bitsandbytes in four bits, two numbers in a byte, the first in the high bits.

    A block of its numbers, row after row, has a scale. Where rows end within blocks, groups are of what divides both.
    The numbers of fp4 times 192 are whole, and short enough for e4m3.
    """
    name = f"weight.{STATE}{packed.layout}"
    state = _state(tensors[name], f"{layer}.{name}")
    rows, columns = state.shape
    size = math.gcd(columns, BLOCK_NUMBERS)
    if size % 8:
        raise ModelError(f"{layer} has {columns} inputs, which are no multiple of 8")
    numbers = torch.tensor(_OF_BLOCKS[packed.layout])
    if not torch.equal(tensors["weight.quant_map"], numbers):
        raise ModelError(f"{layer}.weight.quant_map is not that of {packed.layout}; download the checkpoint again")
    scales = tensors["weight.absmax"]
    if packed.nested:
        of_scales = tensors["weight.nested_absmax"].repeat_interleave(BLOCK_SCALES)[: len(scales)]
        scales = tensors["weight.nested_quant_map"][scales.int()] * of_scales + state.nested_offset
    scales = scales.float().repeat_interleave(BLOCK_NUMBERS // size)[: rows * columns // size].view(rows, -1)
    codes = tensors["weight"].flatten()
    codes = torch.stack([codes >> 4, codes & 15], dim=-1).view(rows, columns)
    if packed.layout == "nf4":
        return _scaled(codes, scales, packed.scheme, dtype)
    whole = (numbers * 192).round().to(torch.float8_e4m3fn).view(torch.uint8)
    return _scaled(whole[codes.int()].view(torch.float8_e4m3fn), scales / 192, packed.scheme, dtype)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """The numbers in int32 words [..., W] from the lowest bits on, uint8 [..., W, numbers]."""
    bytes_ = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))
    return bytes_ if bits == 8 else torch.stack([bytes_ & 15, bytes_ >> 4], dim=-1).flatten(-2)


def _float8(packed: PackedMatrices, layer: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    values = tensors["weight"]
    if (values.view(torch.uint8) & 127 == 127).any():
        raise ModelError(f"{layer}.weight holds what is not a number; download the checkpoint again")
    rows = values.shape[0]
    scales = tensors[packed.scale].float().view(-1, -(-values.shape[1] // (packed.group_size or values.shape[1])))
    scales = scales.repeat_interleave(packed.block_rows or rows, 0)[:rows]
    return values, scales, torch.zeros(scales.shape, dtype=torch.uint8)


def _order(group_of: Tensor, size: int, layer: str) -> Tensor | None:
    """Inputs by the number of their group, int32; None where they are in this order already."""
    order = group_of.argsort(stable=True)
    expected = torch.arange(len(group_of)) // size
    if not torch.equal(group_of[order].long(), expected):
        raise ModelError(f"{layer}: its g_idx does not have {size} inputs in each group; download the checkpoint again")
    return None if torch.equal(group_of.long(), expected) else order.int()


def _groups(layer: str, inputs: int, size: int, scales: Tensor, zeros: Tensor, order: Tensor | None) -> Groups:
    """Groups of `size` inputs, cut where they are long; the last may be shorter."""
    least = next(
        (each for each in _SIZES if inputs % each == 0 and size % each == 0 and _fits(size // each, scales)), 0
    )
    if not least:
        if size % 8 or inputs % size or size > _MOST_INPUTS:
            raise ModelError(f"{layer} has {inputs} inputs in groups of {size}, which are no multiple of 8")
        least = size
    count, run = inputs // least, size // least
    offsets = zeros.view(torch.int8).repeat_interleave(run, 1)[:, :count].contiguous()
    return Groups(least, torch.ones_like(offsets), offsets, scales.float().contiguous(), run, order=order)


def _fits(run: int, scales: Tensor) -> bool:
    """Runs are of a power of two groups, or there is one."""
    return scales.shape[1] == 1 or run & (run - 1) == 0
