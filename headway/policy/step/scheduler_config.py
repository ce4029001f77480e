"""What an operator chooses for the scheduler."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from headway.policy.cache.swap import NO_SWAP, SwapSpace
from headway.policy.objectives.service_class import BUILT_IN, ClassTable
from headway.policy.step.step_budget import MIXED, Sharing

MOST_DRAFTS = 64  # behind a token, as --speculative-config allows


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of a SchedulerConfig that may change while an engine runs, up to those that it was built for.

    None leaves one as it is.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_prefill_stall_ms: float | None = None
    most_drafts: int | None = None

    @property
    def changed(self) -> dict[str, Any]:
        """The limits that are not left as they are, by their names."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step. Raises ValueError: limits contradict each other; the message names both."""

    max_num_seqs: int  # sequences that may run at once
    max_num_batched_tokens: int  # tokens of one step; at least max_num_seqs, so that decoding never waits
    max_model_len: int  # longest sequence; the pool must hold one of it
    enable_chunked_prefill: bool = True
    policy: str = "fcfs"  # a scheduling policy by its name, or as module:Class (`policies`)
    lookahead: int = 16  # how many waiting sequences behind one that does not fit are tried
    max_bypasses: int = 32  # how often a sequence that does not fit may be overtaken
    # Prompts may hold up others for at most this many ms a step, or for as long as the others take alone where that is
    # longer; may be infinite. Without chunked prefill there is no bound.
    max_prefill_stall_ms: float = math.inf
    max_queue_time: float = math.inf  # seconds after which a sequence that was never served is ended; may be infinite
    classes: ClassTable = BUILT_IN  # classes of requests, with their objectives
    # Share of the pool that admission leaves free for those who run, and the most that is kept free of each class's
    # share for those to come.
    watermark: float = 0.01
    # Weights of tenants, who take turns by them; where there are none, tenants make no difference.
    weights: Mapping[str, float] = field(default_factory=dict)
    swap: SwapSpace = NO_SWAP  # host memory for the KV of preempted sequences
    sharing: Sharing = MIXED  # how prompts and decodes share steps
    max_loras: int = 0  # slots for adapters; 0 where there are none
    most_drafts: int = MOST_DRAFTS  # most drafts behind a token; what makes them may make fewer

    def __post_init__(self) -> None:
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark is {self.watermark:g}; it is a share of the KV pool, from 0 to below 1")
        if not self.max_queue_time > 0:
            raise ValueError(f"max_queue_time is {self.max_queue_time:g}; it must be more than 0")
        if not self.max_prefill_stall_ms >= 0:
            raise ValueError(f"max_prefill_stall_ms is {self.max_prefill_stall_ms:g}; it must be 0 or more")
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {self.max_num_seqs}; it must be at least 1")
        check_budget(self.max_num_batched_tokens, self.max_num_seqs)
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"without chunked prefill a whole prompt must fit in a step: raise max_num_batched_tokens "
                f"({self.max_num_batched_tokens}) to max_model_len ({self.max_model_len}) or lower the latter"
            )

    def kept_free(self, num_blocks: int) -> int:
        """How many blocks of a pool of `num_blocks` the watermark stands for."""
        return max(1, int(self.watermark * num_blocks))


def check_budget(max_num_batched_tokens: int, max_num_seqs: int) -> None:
    """Raise ValueError when a step has no token for each sequence."""
    if max_num_batched_tokens < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens is {max_num_batched_tokens}, less than max_num_seqs ({max_num_seqs}); "
            "raise the first or lower the second"
        )
