"""How far real programs stay behind a device's data sheet: shares of its rates, and costs that no data sheet has."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from headway.cost.curve import on_curve

# Rows of a tile of a product whose weights are widened on the way: the usual choice of such kernels (MARLIN, Frantar et
# al., 2024).
TILE_ROWS = 64


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares are of the data sheet's rate, above 0; times in seconds."""

    # Share for large matrix products, by format; "other" for formats that are not named.
    matmul_flops: dict[str, float] = field(default_factory=lambda: {"other": 0.7})
    matmul_bytes: float = 0.85  # share for the weights of a product with few tokens
    # Operations in fp32 that it takes to widen a weight to what it is multiplied in, by the bits of a weight. They are
    # done once for each tile of rows of a product (`TILE_ROWS`), while weights are read, but not while products are
    # made.
    widen_ops: dict[str, float] = field(default_factory=lambda: {"8": 8.0, "4": 12.0})
    # expert_flops, expert_bytes: factors on the two above for the experts' products, which are many and uneven. The
    # second may be above 1: uneven routers touch fewer experts than even ones.
    expert_flops: float = 0.7
    expert_bytes: float = 0.8
    attention_flops: float = 0.5  # share for the products of attention over prompts
    # Time of each score (a query, a key and a head) besides the products: exponential, maximum and sum.
    score_s: float = 0.0
    # Time of a layer's attention besides all that it reads and computes: on a GPU, tiles of a sequence are read one
    # after the other, and however few they are, each is waited for.
    attention_s: float = 0.0
    kv_bytes: float = 0.75  # share for the cache that decodes read
    element_bytes: float = 0.7  # share for operations on single elements
    link: float = 0.7  # share of the links' rate, in large collectives
    # How well arithmetic and memory traffic overlap: an operation takes (compute ** p + memory ** p) ** (1 / p), so
    # infinity for perfectly and 1 for not at all.
    sharpness: float = 4.0
    kernel_s: float = 2e-6  # time between one kernel and the next
    step_s: float = 1e-3  # time between one step and the next, while the device waits for its host
    sequence_s: float = 1e-5  # time of the host for each sequence of a step
    # Time of the host for each kernel of a step with prompts, which no captured graph holds. The device works
    # meanwhile, so that it counts where the device is faster.
    launch_s: float = 0.0
    token_s: float = 2e-6  # time of the host for each prompt token before its step (tokenizing, copying)
    request_s: float = 1e-2  # time of the host for each request before its first token (HTTP, queues, the answer)
    # Time of the API process for each sequence that decodes beside a request's first step: what a step draws is sent
    # one token after the other, and requests are taken up in between.
    output_s: float = 0.0
    # (tokens, factor on the time of linear layers) as measured, by tokens in a step, ascending; between them it is
    # interpolated over the logarithm. Empty for 1 everywhere.
    linear: tuple[tuple[int, float], ...] = ()
    # Factors like `linear` for products with weights in some formats, or made in some, where they differ.
    linear_of: dict[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in ("linear", "linear_of"):
                continue
            numbers = value.values() if isinstance(value, dict) else [value]
            least = 0.0 if each.name.endswith(("_s", "_ops")) else 1e-9
            for number in numbers:
                if not number >= least:
                    raise ValueError(f"{each.name} is {number}; an efficiency is above 0, and a time not below")
        if self.sharpness < 1:
            raise ValueError(f"sharpness is {self.sharpness}; at 1 nothing overlaps, and it can't be less")
        for name, curve in (("linear", self.linear), *(("linear_of", each) for each in self.linear_of.values())):
            tokens = [each for each, _ in curve]
            if any(each < 1 for each in tokens) or tokens != sorted(set(tokens)) or any(not f > 0 for _, f in curve):
                raise ValueError(f"{name} is {curve}; tokens must ascend from at least 1, and factors be above 0")

    @classmethod
    def ideal(cls) -> Efficiency:
        """A program that reaches every limit of the data sheet and wastes no time: what physics allows."""
        wasted: dict[str, Any] = {each.name: 0.0 for each in fields(cls) if each.name.endswith("_s")}
        shares = (
            "matmul_bytes",
            "expert_flops",
            "expert_bytes",
            "attention_flops",
            "kv_bytes",
            "element_bytes",
            "link",
        )
        reached = wasted | dict.fromkeys(shares, 1.0)
        return cls(matmul_flops={"other": 1.0}, widen_ops={}, sharpness=math.inf, **reached)

    def matmul(self, format_: str) -> float:
        """Share of the rate of products in this format."""
        alike = {"fp16": "bf16", "bf16": "fp16", "nvfp4": "fp8"}.get(format_, "other")
        found = self.matmul_flops.get(format_) or self.matmul_flops.get(alike) or self.matmul_flops.get("other")
        return found or 0.7

    def widening(self, weight_bits: int, compute_bits: int) -> float:
        """Operations for each weight of so many bits that is multiplied in so many."""
        return self.widen_ops.get(str(weight_bits), 0.0) if weight_bits < compute_bits else 0.0

    def overlapped(self, compute_s: float, memory_s: float) -> float:
        """The time of an operation whose arithmetic and traffic alone would take so long."""
        longer, shorter = max(compute_s, memory_s), min(compute_s, memory_s)
        if shorter <= 0.0 or math.isinf(self.sharpness):
            return longer
        return float(longer * (1.0 + (shorter / longer) ** self.sharpness) ** (1.0 / self.sharpness))

    def linear_factor(self, tokens: int, *formats: str) -> float:
        """What the time of linear layers is multiplied by in a step of so many tokens.

        Args:
            formats: formats of the weights and of the products; the first that was measured on its own counts.
        """
        curve = next((self.linear_of[each] for each in formats if each in self.linear_of), self.linear)
        return on_curve(curve, tokens) if curve else 1.0
