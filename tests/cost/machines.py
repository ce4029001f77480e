"""Machines and deployments with round numbers, which tests of time and of serving reckon with by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headway.cost.efficiency import Efficiency
from headway.cost.hardware import Hardware, Link
from headway.cost.layers import Experts, Latent
from headway.cost.memory import kv_cache_bytes
from headway.cost.precision import Precision
from headway.cost.shape import ModelShape
from headway.cost.timing import Deployment

LINK = Link("wire", bytes_per_s=1e9, latency_s=1e-5, max_devices=8)
MACHINE = Hardware(
    key="round",
    name="Round",
    kind="gpu",
    architecture="paper",
    memory_bytes=10**9,
    bytes_per_s=1e10,
    flops_per_s={"fp32": 1e11, "bf16": 4e11, "fp8": 8e11},
    link=LINK,
)
DENSE = ModelShape(layers=4, hidden=64, heads=8, kv_heads=4, head_dim=16, ffn=96, vocab=160)
MIXTURE = replace(DENSE, experts=Experts(8, 2, 48, 3, shared_width=32, bias=True, router_bias=True), sinks=True)
WINDOWED = replace(DENSE, sliding_windows=(24, None, 24, 60), qk_norm=True)
LATENT = replace(DENSE, kv_heads=8, head_dim=24, latent=Latent(32, 40, 16, 8, 16))
PARALLEL_BLOCKS = replace(
    DENSE, kv_heads=8, gated=False, layer_norms=1, norm_bias=True, head_bias=True, mlp_bias=True, tied_embeddings=True
)
SHAPES = {
    "dense": DENSE,
    "mixture": MIXTURE,
    "windowed": WINDOWED,
    "latent": LATENT,
    "parallel_blocks": PARALLEL_BLOCKS,
    "latent_mixture": replace(LATENT, experts=MIXTURE.experts, qkv_bias=False),
    "biased": replace(DENSE, qkv_bias=True, o_bias=True, mlp_bias=True, tied_embeddings=True),
}


def deployment(shape: ModelShape = DENSE, **changes: Any) -> Deployment:
    """On the machine with round numbers, in bfloat16, without any loss unless `changes` say otherwise."""
    settings: dict[str, Any] = {"precision": Precision(), "hardware": MACHINE, "efficiency": Efficiency.ideal()}
    return Deployment(shape, **{**settings, **changes})


def shared_prefix_kv_bytes(
    shape: ModelShape, prefix: int, rest: int, sequences: int, precision: Precision, block_size: int
) -> int:
    """Whole blocks of a prefix are held once; what its last block only fills in part, each holds itself."""
    whole = prefix // block_size * block_size
    own = kv_cache_bytes(shape, prefix - whole + rest, precision, block_size, sequences)
    return (kv_cache_bytes(shape, whole, precision, block_size) if sequences else 0) + own
