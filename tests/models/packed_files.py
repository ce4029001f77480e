"""Matrices as AWQ, GPTQ, compressed-tensors and FP8 checkpoints hold them, and what they stand for, by definition."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.kernels.weights import NF4

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which column each four bits of a word are of


@dataclass
class Format:
    """A quantization_config, and what makes the tensors of a layer and its dense matrix of (rows, columns, seed)."""

    said: dict[str, Any]
    make: Any

    def layer(self, rows: int, columns: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        return self.make(torch.Generator().manual_seed(seed), rows, columns)  # type: ignore[no-any-return]


def words(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Numbers [..., n] in int32 [..., n * bits / 32], the first of each word lowest, or that which `order` says."""
    in_word = 32 // bits
    parts = numbers.long().unflatten(-1, (-1, in_word))
    total = torch.zeros(parts.shape[:-1], dtype=torch.int64)
    for place in range(in_word):
        total |= parts[..., order[place] if order else place] << (bits * place)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


def _numbers(generator: torch.Generator, *shape: int, below: int) -> Tensor:
    return torch.randint(0, below, shape, generator=generator)


def _scales(generator: torch.Generator, *shape: int, largest: int) -> Tensor:
    """float16 such that weights are about as large as those of tiny models."""
    return ((0.5 + torch.rand(shape, generator=generator)) * 0.3 / largest).half()


def awq(size: int, **more: Any) -> Format:
    def make(generator: torch.Generator, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
        numbers, zeros = (
            _numbers(generator, columns, rows, below=16),
            _numbers(generator, columns // size, rows, below=16),
        )
        scales = _scales(generator, columns // size, rows, largest=8)
        stored = {"qweight": words(numbers, 4, AWQ_ORDER), "qzeros": words(zeros, 4, AWQ_ORDER), "scales": scales}
        wide = (each.repeat_interleave(size, 0) for each in (zeros, scales.float()))
        zero, scale = wide
        return stored, ((numbers - zero) * scale).T.contiguous()

    said = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    return Format(said | more, make)


def gptq(bits: int, size: int, ordered: bool = False, form: str = "gptq", **more: Any) -> Format:
    """Version 1 stores zero points less one, and 0 as the largest number."""

    def make(generator: torch.Generator, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
        group = columns if size == -1 else size
        most = 1 << bits
        numbers, zeros = (
            _numbers(generator, columns, rows, below=most),
            _numbers(generator, columns // group, rows, below=most),
        )
        scales = _scales(generator, columns // group, rows, largest=most // 2)
        group_of = torch.arange(columns) // group
        if ordered:  # alike for all layers of so many inputs, as the inputs of fused ones are the same
            group_of = group_of[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
        stored = {
            "qweight": words(numbers.T, bits).T.contiguous(),
            "qzeros": words((zeros - 1) % most if form == "gptq" else zeros, bits),
            "scales": scales,
            "g_idx": group_of.int(),
        }
        return stored, ((numbers - zeros[group_of]) * scales.float()[group_of]).T.contiguous()

    said = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": ordered, "checkpoint_format": form}
    return Format(said | more, make)


def compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {**group, "output_activations": None}},
        "ignore": ["lm_head", "re:.*gate$"],
    }


def pack_quantized(bits: int, size: int | None, symmetric: bool = True, actorder: str | None = None) -> Format:
    strategy = "channel" if size is None else "group"
    described = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy}
    described |= {"group_size": size, "actorder": actorder}

    def make(generator: torch.Generator, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
        group = size or columns
        half = 1 << (bits - 1)
        numbers = _numbers(generator, rows, columns, below=2 * half)
        zeros = _numbers(generator, rows, columns // group, below=2 * half) if not symmetric else None
        scales = _scales(generator, rows, columns // group, largest=half).bfloat16()
        stored = {"weight_packed": words(numbers, bits), "weight_scale": scales}
        stored["weight_shape"] = torch.tensor([rows, columns])
        group_of = torch.arange(columns) // group
        if actorder == "group":
            group_of = group_of[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
            stored["weight_g_idx"] = group_of.int()
        if zeros is not None:
            stored["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
        zero = half if zeros is None else zeros[:, group_of]
        return stored, (numbers - zero) * scales.float()[:, group_of]

    return Format(compressed("pack-quantized", described), make)


def int_quantized(size: int | None, steps: bool = False) -> Format:
    """Four bits in a byte, with activations of eight. With `steps`, scales are 1 .. 16 times one of the row."""
    described = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": size}
    described |= {"strategy": "channel" if size is None else "group"}

    def make(generator: torch.Generator, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
        group = size or columns
        numbers = _numbers(generator, rows, columns, below=16) - 8
        scales = _scales(generator, rows, columns // group, largest=8).bfloat16()
        if steps:
            units = torch.randint(8, 16, (rows, 1), generator=generator) * 2.0**-13  # of four bits
            scales = (units * (1 + _numbers(generator, *scales.shape, below=16))).bfloat16()
        stored = {"weight": numbers.to(torch.int8), "weight_scale": scales}
        return stored, numbers * scales.float().repeat_interleave(group, 1)

    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    said = compressed("int-quantized", described, activations)
    return Format(said | ({"scale_steps": 16} if steps else {}), make)


def _float8(generator: torch.Generator, rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)


def float_quantized(strategy: str, block: tuple[int, int] = (16, 16), dynamic: bool = True) -> Format:
    described = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    described |= {"block_structure": list(block)} if strategy == "block" else {}

    def make(generator: torch.Generator, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
        numbers = _float8(generator, rows, columns)
        shape = {"tensor": (1, 1), "channel": (rows, 1), "block": (-(-rows // block[0]), -(-columns // block[1]))}[
            strategy
        ]
        scales = (0.5 + torch.rand(shape, generator=generator)) * 0.15
        stored = {"weight": numbers, "weight_scale": scales.view(1) if strategy == "tensor" else scales}
        if not dynamic:
            stored["input_scale"] = torch.ones(1)
        tall, wide = (rows, columns) if strategy == "tensor" else (1, columns) if strategy == "channel" else block
        dense = scales.repeat_interleave(tall, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        return stored, numbers.float() * dense

    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": dynamic}
    return Format(compressed("float-quantized", described, activations), make)


def fp8(block: tuple[int, int] | None, **more: Any) -> Format:
    """Without blocks a null for them in `more` stands for the names that transformers writes, as of Ministral 3."""
    of_form = float_quantized("tensor" if block is None else "block", block or (16, 16))
    said = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    if block is None and "weight_block_size" not in more:
        return Format(said | more, of_form.make)

    def make(generator: torch.Generator, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
        stored, dense = of_form.make(generator, rows, columns)
        beside = {"activation_scale": torch.ones(())} if block is None else {}
        return {"weight": stored["weight"], "weight_scale_inv": stored["weight_scale"]} | beside, dense

    return Format(said | ({"weight_block_size": list(block)} if block else {}) | more, make)


def bitsandbytes(kind: str, nested: bool = False, **more: Any) -> Format:
    """Blocks of 64 numbers, row after row; the scales are codes of 8 bits of their own in blocks of 256, or plain."""

    def make(generator: torch.Generator, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
        codes = _numbers(generator, rows * columns, below=16)
        numbers = normal_quantiles() if kind == "nf4" else torch.tensor(FP4) / 192
        absmax = (0.5 + torch.rand(-(-rows * columns // 64), generator=generator)) * 0.3
        state = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns]}
        stored = {"weight.absmax": absmax, "weight.quant_map": numbers}
        if nested:
            eight, maps = _numbers(generator, len(absmax), below=256).to(torch.uint8), torch.linspace(-1, 1, 256)
            of_all = torch.rand(-(-len(absmax) // 256), generator=generator)
            absmax = maps[eight.int()] * of_all.repeat_interleave(256)[: len(absmax)] + 0.25
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
            stored |= {"weight.absmax": eight, "weight.nested_absmax": of_all, "weight.nested_quant_map": maps}
        said = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
        stored |= {"weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8).unsqueeze(1)}
        stored |= {f"weight.quant_state.bitsandbytes__{kind}": said}
        scales = absmax.repeat_interleave(64)[: len(codes)]
        dense = numbers[codes] * scales if kind == "nf4" else (numbers * 192).round()[codes] * (scales / 192)
        return stored, dense.view(rows, columns)

    said = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": kind}
    return Format(said | {"bnb_4bit_use_double_quant": nested, "bnb_4bit_quant_storage": "uint8"} | more, make)


FP4 = (0, 1, 128, 192, 64, 96, 32, 48, 0, -1, -128, -192, -64, -96, -32, -48)


def normal_quantiles() -> Tensor:
    """NF4: between the outermost of 16 and of 15 quantiles and 0, of which there is one (Dettmers et al., 2023)."""
    negative, positive = (torch.linspace(0.9677083, 0.5, n, dtype=torch.float64) for n in (8, 9))
    both = torch.cat([-torch.special.ndtri(negative), torch.special.ndtri(positive)[:-1].flip(0)])
    exact = (both / both.abs().max()).float()
    assert (exact - torch.tensor(NF4)).abs().max() < 1e-6  # which is rounded at several places
    return torch.tensor(NF4)


def llm_int8() -> Format:
    def make(generator: torch.Generator, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
        numbers = (_numbers(generator, rows, columns, below=255) - 127).to(torch.int8)
        largest = (0.5 + torch.rand(rows, generator=generator)) * 0.3
        stored = {"weight": numbers, "SCB": largest, "weight_format": torch.zeros((), dtype=torch.uint8)}
        return stored, numbers * (largest / 127).unsqueeze(1)

    return Format({"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}, make)


FLOAT4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nvfp4(modelopt: bool = False, **more: Any) -> Format:
    """e2m1 with a scale of e4m3 for 16 inputs, and one for all, which compressed-tensors stores as its inverse."""
    described = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    said = compressed("nvfp4-pack-quantized", described, described | {"dynamic": "local"})
    if modelopt:
        said = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}

    def make(generator: torch.Generator, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
        codes = _numbers(generator, rows, columns, below=16).to(torch.uint8)
        scales = (50 + 400 * torch.rand(rows, columns // 16, generator=generator)).to(torch.float8_e4m3fn)
        of_all = torch.tensor([2.0**-12]) * (1 + rows / 1000)
        stored = {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scales}
        stored |= {"weight_global_scale": 1 / of_all, "input_global_scale": torch.ones(1)}
        each = scales.float() / (1 / of_all)
        if modelopt:
            stored = {"weight": stored["weight_packed"], "weight_scale": scales}
            stored |= {"weight_scale_2": of_all.squeeze(), "input_scale": torch.ones(())}
            each = scales.float() * of_all
        return stored, FLOAT4[codes.int()] * each.repeat_interleave(16, 1)

    return Format(said | more, make)
