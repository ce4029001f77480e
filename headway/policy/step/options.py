"""The settings of a scheduler as flags, and the scheduler that they make."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from headway.flags import Flag, tokens
from headway.policy.cache.kv_blocks import PROTECTED_SHARE, KVBlocks
from headway.policy.cache.sizing import SWAP_SPACE, PoolSize, default_batched_tokens
from headway.policy.cache.swap import NO_SWAP, SwapSpace
from headway.policy.objectives.service_class import BUILT_IN, ClassTable
from headway.policy.step.policies import policy_name
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.scheduler_config import MOST_DRAFTS, SchedulerConfig

_engine = functools.partial(Flag, panel="Engine")


@dataclass(kw_only=True)
class SchedulingOptions:
    """The settings of a scheduler, in a server as in a simulation of one.

    Args:
        max_prefill_stall_ms: may be infinite.
        classes: classes of requests.
        weights: weights of tenants, who take turns by them; where there are none, tenants make no difference.
        most_drafts: most drafts behind a token, of those that --speculative-config allows.
    """

    classes: ClassTable = BUILT_IN
    weights: dict[str, float] = field(default_factory=dict)
    most_drafts: int = MOST_DRAFTS
    block_size: Annotated[int, _engine("Tokens in a KV block.", min=1)] = 16
    max_num_seqs: Annotated[int, _engine("Maximum number of sequences in a step.", min=1, common=True)] = 256
    max_num_batched_tokens: Annotated[
        int | None, _engine("Token budget of a step. Default: chosen for the device.", parse=tokens, metavar="N")
    ] = None
    max_prefill_stall_ms: Annotated[
        float, _engine("Milliseconds by which prefill may delay running streams in a step.", min=0.0)
    ] = 50.0
    enable_prefix_caching: Annotated[bool, _engine("Reuse the KV cache of shared prompt prefixes.")] = True
    enable_chunked_prefill: Annotated[bool, _engine("Split long prompts over steps.")] = True
    scheduling_policy: Annotated[
        str,
        _engine(
            "How requests are ordered: by objectives (slo), arrival (fcfs), priority (lower first), or your class.",
            parse=policy_name,
            default="slo",
            metavar="slo|fcfs|priority|MODULE:CLASS",
            common=True,
        ),
    ] = "slo"
    watermark: Annotated[
        float,
        _engine("Share of the KV cache that admission keeps free; also of each class's idle share.", min=0.0, max=0.5),
    ] = 0.01
    protected_kv: Annotated[
        float,
        _engine("Largest share of the KV cache for protected prefixes, which many prompts share.", min=0.0, max=0.9),
    ] = PROTECTED_SHARE
    swap_space: Annotated[
        float | None,
        _engine(
            "GiB of host memory for the KV cache of preempted requests. Default: 4 on a GPU, 0 on a CPU.",
            min=0.0,
            metavar="GIB",
        ),
    ] = None
    max_queue_time: Annotated[
        float | None, _engine("Seconds that a request may wait in the queue; then 503. Default: no limit.")
    ] = None

    @property
    def lora_slots(self) -> int:
        """Slots for adapters; 0 where none are served."""
        return 0

    def scheduler(
        self,
        device: str,
        pool: PoolSize,
        make: Callable[[SchedulerConfig, KVBlocks], Scheduler] = Scheduler,
        swap: SwapSpace = NO_SWAP,
    ) -> Scheduler:
        """A scheduler with an empty pool, for a device that is cpu or cuda.

        Raises:
            ValueError: the settings contradict each other, or one sequence does not fit in the pool.
        """
        if pool.checkpoints is not None:
            swap = NO_SWAP  # states are not swapped, and without them blocks are of no use
        config = SchedulerConfig(
            pool.max_num_seqs or self.max_num_seqs,
            self.batched_tokens(device),
            pool.max_model_len,
            self.enable_chunked_prefill,
            self.scheduling_policy,
            max_prefill_stall_ms=self.max_prefill_stall_ms,
            max_queue_time=math.inf if self.max_queue_time is None else self.max_queue_time,
            classes=self.classes,
            watermark=self.watermark,
            weights=self.weights,
            swap=swap,
            max_loras=self.lora_slots,
            most_drafts=self.most_drafts,
        )
        caching, share = self.enable_prefix_caching, self.protected_kv
        return make(config, KVBlocks(pool.num_blocks, self.block_size, caching, share, pool.checkpoints, pool.groups))

    def batched_tokens(self, device: str) -> int:
        """The token budget of a step on cpu or cuda."""
        return self.max_num_batched_tokens or default_batched_tokens(device, self.max_num_seqs)

    def swap_bytes(self, device: str) -> int:
        """Bytes of host memory for swapped blocks, on cpu or cuda."""
        return int((SWAP_SPACE[device] if self.swap_space is None else self.swap_space) * 2**30)
