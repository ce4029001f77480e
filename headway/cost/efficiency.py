"""How far real programs stay behind a device's data sheet: shares of its rates, and costs that no data sheet has."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares are of the data sheet's rate, above 0; times in seconds.

    Args:
        matmul_flops: of large matrix products, by format; "other" for formats that are not named.
        matmul_bytes: of the weights of a product with few tokens.
        weight_only: factor on `matmul_bytes` where weights are narrower than what they are multiplied in, by the
            bits of a weight: widening them takes time.
        expert_flops, expert_bytes: factors on the two above for the experts' products, which are many and uneven.
        attention_flops: of the products of attention over prompts.
        kv_bytes: of the cache read by decodes.
        element_bytes: of operations on single elements.
        link: of the links' rate, in large collectives.
        sharpness: how well arithmetic and memory traffic overlap: an operation takes
            (compute ** p + memory ** p) ** (1 / p), so infinity for perfectly and 1 for not at all.
        kernel_s: between one kernel and the next.
        step_s: between one step and the next, while the device waits for its host.
        sequence_s: of the host, for each sequence of a step.
        token_s: of the host, for each prompt token before its step (tokenizing, copying).
        request_s: of the host, for each request before its first token (HTTP, queues, the answer).
        linear: (tokens, factor on the time of linear layers) as measured, by tokens in a step, ascending; between them
            it is interpolated over the logarithm. Empty for 1 everywhere.
    """

    matmul_flops: dict[str, float] = field(default_factory=lambda: {"other": 0.7})
    matmul_bytes: float = 0.85
    weight_only: dict[str, float] = field(default_factory=dict)
    expert_flops: float = 0.7
    expert_bytes: float = 0.8
    attention_flops: float = 0.5
    kv_bytes: float = 0.75
    element_bytes: float = 0.7
    link: float = 0.7
    sharpness: float = 4.0
    kernel_s: float = 2e-6
    step_s: float = 1e-3
    sequence_s: float = 1e-5
    token_s: float = 2e-6
    request_s: float = 1e-2
    linear: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            numbers = value.values() if isinstance(value, dict) else [] if isinstance(value, tuple) else [value]
            least = 0.0 if each.name.endswith("_s") else 1e-9
            for number in numbers:
                if not number >= least:
                    raise ValueError(f"{each.name} is {number}; an efficiency is above 0, and a time not below")

    @classmethod
    def ideal(cls) -> Efficiency:
        """A program that reaches every limit of the data sheet and wastes no time: what physics allows."""
        return cls(
            matmul_flops={"other": 1.0},
            matmul_bytes=1.0,
            expert_flops=1.0,
            expert_bytes=1.0,
            attention_flops=1.0,
            kv_bytes=1.0,
            element_bytes=1.0,
            link=1.0,
            sharpness=math.inf,
            kernel_s=0.0,
            step_s=0.0,
            sequence_s=0.0,
            token_s=0.0,
            request_s=0.0,
        )

    def matmul(self, format_: str) -> float:
        """Share of the rate of products in this format."""
        return self.matmul_flops.get(format_, self.matmul_flops.get("other", 0.7))

    def streaming(self, weight_bits: int, compute_bits: int) -> float:
        """Share of the bandwidth at which weights of so many bits are read."""
        if weight_bits >= compute_bits:
            return self.matmul_bytes
        return self.matmul_bytes * self.weight_only.get(str(weight_bits), 1.0)

    def overlapped(self, compute_s: float, memory_s: float) -> float:
        """The time of an operation whose arithmetic and traffic alone would take so long."""
        longer, shorter = max(compute_s, memory_s), min(compute_s, memory_s)
        if shorter <= 0.0 or math.isinf(self.sharpness):
            return longer
        return float(longer * (1.0 + (shorter / longer) ** self.sharpness) ** (1.0 / self.sharpness))

    def linear_factor(self, tokens: int) -> float:
        """What the time of linear layers is multiplied by in a step of so many tokens."""
        curve = self.linear
        if not curve:
            return 1.0
        if tokens <= curve[0][0]:
            return curve[0][1]
        for (low, before), (high, after) in itertools.pairwise(curve):
            if tokens < high:
                share = math.log(tokens / low) / math.log(high / low)
                return before + share * (after - before)
        return curve[-1][1]
