"""How much `headway calibrate` measures: which pieces, of which sizes, how often."""

from __future__ import annotations

from dataclasses import dataclass

from headway.calibration.cases import AttentionLoad
from headway.calibration.measure import MIB
from headway.cost.shape import ModelShape


def _layer(hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int) -> ModelShape:
    return ModelShape(1, hidden, heads, kv_heads, head_dim, ffn, 1)


@dataclass(frozen=True, slots=True)
class Effort:
    """What to time, and how often."""

    rounds: int  # runs of each piece
    piece_s: float  # seconds of one run, at most, as far as the machine's peaks tell
    tokens: tuple[int, ...]  # the numbers of tokens that linear layers are timed with
    layers: tuple[ModelShape, ...]  # shapes of the linear layers
    heads: tuple[ModelShape, ...]  # shapes of the heads that attention is timed with
    loads: tuple[AttentionLoad, ...]  # sequences that attention is timed with
    # The numbers of tokens that element-wise operations are timed with.
    element_tokens: tuple[int, ...] = (1, 4, 16, 32, 64, 256, 1024)
    depths: tuple[int, ...] = (2, 26)  # layers of the tiny models
    batches: tuple[int, ...] = (1, 32)  # numbers of sequences in a step of the tiny models
    steps: int = 20  # the number of such steps in a round
    # Bytes of weights and caches, unless the largest read by which the bandwidth was measured is more.
    pool: int = 256 * MIB
    peaks_share: float = 0.2  # the share of the whole time, roughly, that goes to the machine's peaks before all this


_TOKENS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024)
_HEADS = (_layer(1024, 16, 2, 64, 1), _layer(4096, 32, 8, 128, 1), _layer(768, 12, 12, 64, 1))
_DECODES = ((64, 32), (256, 1), (256, 8), (256, 32), (1024, 1), (1024, 8), (4096, 1), (4096, 4))
_PROMPTS = ((64, 64), (64, 1024), (128, 512), (256, 256), (512, 512), (512, 2048))
_LOADS = tuple(AttentionLoad(1, context, n) for context, n in _DECODES) + tuple(
    AttentionLoad(tokens, context, 1) for tokens, context in _PROMPTS
)
# A GPU is full of work only then.
_LARGE_LOADS = (
    *_LOADS,
    *(AttentionLoad(1, context, n) for context, n in ((1024, 32), (512, 128), (2048, 64))),
    *(AttentionLoad(tokens, tokens, 1) for tokens in (2048, 4096)),
)
_NARROW, _MIDDLE = _layer(1024, 16, 4, 64, 3072), _layer(2048, 16, 8, 128, 8192)
_WIDE, _WIDEST = _layer(4096, 32, 8, 128, 14336), _layer(8192, 64, 8, 128, 28672)
EFFORTS = {
    ("cpu", "quick"): Effort(
        rounds=8,
        piece_s=0.03,
        tokens=(1, 4, 16, 64, 256),
        layers=(_NARROW,),
        heads=_HEADS[:2],
        loads=(
            AttentionLoad(1, 64, 32),
            AttentionLoad(1, 256, 1),
            AttentionLoad(1, 256, 8),
            AttentionLoad(1, 1024, 1),
            AttentionLoad(64, 64, 1),
            AttentionLoad(256, 256, 1),
        ),
        element_tokens=(16, 256),
        steps=10,
        peaks_share=0.65,
    ),
    ("cpu", "default"): Effort(12, 0.06, _TOKENS, (_NARROW, _MIDDLE), _HEADS, _LOADS),
    ("cpu", "full"): Effort(
        20, 0.12, _TOKENS, (_NARROW, _MIDDLE), _HEADS, _LOADS, batches=(1, 8, 32), peaks_share=0.35
    ),
    ("cuda", "quick"): Effort(
        3, 0.03, (1, 16, 256), (_WIDE,), _HEADS[:2], _LARGE_LOADS, pool=1024 * MIB, peaks_share=0.5
    ),
    ("cuda", "default"): Effort(20, 0.05, _TOKENS, (_WIDE, _WIDEST), _HEADS, _LARGE_LOADS, pool=2048 * MIB),
    ("cuda", "full"): Effort(60, 0.05, _TOKENS, (_WIDE, _WIDEST), _HEADS, _LARGE_LOADS, pool=2048 * MIB),
}
