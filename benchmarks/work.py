"""What a point must read and compute at least, and so what share of the machine's peaks a rate is.

Of a decode at batch 1, the bytes of a step are

    layers' matrices x bytes of a weight + head x bytes of its weight + 2 x KV of a token x mean context

where a weight has 2 bytes in bf16, 1 in int8 and 0.5 in int4, and the head 2, 1 and 1. In a GGUF file a weight has the
bits of the file's kind, and the head 6 bits at least. All engines count alike whatever they keep: scales, norms and
biases are left out (12 % of the layers' bytes with groups of 32 at 4 bits), and so are activations. The KV cache has 16
bits a number. Then

    share of the streaming read = rate x bytes of a step / bytes a second of the read

Of a prefill, FLOPs are those of headway.cost: 2 for each weight of the layers and token, the causal half of attention,
and the head for the last token of each prompt alone. Then

    share of the GEMM peak = rate x FLOPs of all prompts / prompt tokens / FLOPs a second of the peak

where the peak is that of bfloat16 for bf16, and that of int8 for int8 and int4.
"""

from __future__ import annotations

from typing import Any

from benchmarks.exports import GGUF_KINDS, PACKED_KINDS
from benchmarks.points import Point
from headway.cost.attention import Chunk
from headway.cost.config import read_shape
from headway.cost.shape import ModelShape
from headway.cost.work import step_work, total

_GGUF_BYTES = {kind: int(kind[1]) / 8 for kind in GGUF_KINDS}
_WEIGHT_BYTES = {"bf16": 2.0, "int8": 1.0, "int4": 0.5, **_GGUF_BYTES, **dict.fromkeys(PACKED_KINDS, 0.5)}
_HEAD_BYTES = {"bf16": 2.0, "int8": 1.0, "int4": 1.0, **{kind: max(0.75, size) for kind, size in _GGUF_BYTES.items()}}
_HEAD_BYTES |= dict.fromkeys(PACKED_KINDS, 2.0)
_GEMM = {precision: "bf16" if precision == "bf16" else "int8" for precision in _WEIGHT_BYTES}
_KV_BYTES = 2


def shape_of(config: dict[str, Any]) -> ModelShape:
    return read_shape(config)


def weight_bytes(shape: ModelShape, precision: str) -> float:
    """Read in each step of any batch."""
    matrices = shape.matrices()
    return matrices["linear"] * _WEIGHT_BYTES[precision] + matrices["head"] * _HEAD_BYTES[precision]


def kv_bytes(shape: ModelShape, tokens: int) -> int:
    """Bytes of the KV cache of so many tokens."""
    return tokens * shape.kv_elements_per_token * _KV_BYTES


def decode_bytes(shape: ModelShape, precision: str, context: float) -> float:
    """Bytes of one step of one sequence; `context` is the mean over the steps, in tokens."""
    return weight_bytes(shape, precision) + context * kv_bytes(shape, 1)


def prefill_flops(shape: ModelShape, batch: int, prompt: int) -> int:
    """FLOPs of taking in so many prompts of so many tokens."""
    return total(step_work(shape, [Chunk(prompt, sequences=batch)]).values()).flops


def share(shape: ModelShape, precision: str, point: Point, rate: float, peaks: dict[str, float]) -> float | None:
    """The share of the streaming read (decodes at batch 1) or of the GEMM peak (prefills); None for other points.

    Args:
        rate: tokens a second.
        peaks: "read" in bytes a second, "bf16" and "int8" in FLOPs a second.
    """
    if point.rate == "prefill":
        peak = peaks[_GEMM[precision]]
        flops = prefill_flops(shape, point.batch, point.prompt) / (point.batch * point.prompt)
        return rate * flops / peak if peak else None
    if point.batch > 1:
        return None
    return rate * decode_bytes(shape, precision, point.prompt + point.new / 2) / peaks["read"]
