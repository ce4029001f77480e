"""The records of an engine's steps, and the scheduler that makes them.

The records hold all that the scheduler was told, with the times, and all that it decided. So the same decisions can be
made again. They hold no text and no token ids, only how many tokens there are and a number for each block of them.
Blocks that the prefix cache takes for equal have equal numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from headway.policy.admission.tenants import DEFAULT_TENANT
from headway.policy.cache.kv_blocks import PROTECTED_SHARE, KVBlocks
from headway.policy.cache.kv_groups import KVCacheGroup
from headway.policy.objectives.service_class import ClassTable
from headway.policy.step.accounting import StepTimes
from headway.policy.step.plan import ScheduledSequence, StepPlan
from headway.policy.step.request import NEVER, FinishReason, Sequence
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.scheduler_config import SchedulerConfig, StepLimits

FORMAT = 1
NOT_NUMBERS = -1  # instead of a number of new tokens
_EXACT = 2**53 - 1  # every reader of JSON keeps such numbers exactly


class _Record(msgspec.Struct, tag=str.lower, omit_defaults=True, gc=False):
    pass


class RecordedEngine(_Record, tag="engine"):
    """The first record of an engine. All times are nanoseconds of its clock."""

    format: int  # the version of the recording's format
    version: str  # the version of Headway
    model: str
    device: str
    kv_cache_dtype: str
    settings: dict[str, Any]  # settings of the engine, by the names of its flags
    scheduler: dict[str, Any]  # fields of SchedulerConfig; None for what is infinite
    num_blocks: int
    block_size: int
    enable_prefix_caching: bool
    # began_ns, began_unix_s: the same moment, on the engine's clock and on the wall clock.
    began_ns: int
    began_unix_s: float
    protected_share: float = PROTECTED_SHARE
    num_checkpoints: int | None = None
    groups: list[KVCacheGroup] = []

    @classmethod
    def of(cls, config: SchedulerConfig, blocks: KVBlocks, **about: Any) -> RecordedEngine:
        """The record of an engine with this scheduler; `about` has the fields that are not of it."""
        return cls(
            format=FORMAT,
            scheduler=asdict(config),
            num_blocks=blocks.num_blocks,
            block_size=blocks.block_size,
            enable_prefix_caching=blocks.enable_prefix_caching,
            protected_share=blocks.protected_share,
            num_checkpoints=None if blocks.checkpoints is None else blocks.checkpoints.num_slots,
            groups=list(blocks.groups),
            **about,
        )

    def scheduler_config(self) -> SchedulerConfig:
        return msgspec.convert(_with_infinities(self.scheduler), SchedulerConfig)

    def kv_blocks(self) -> KVBlocks:
        """An empty pool."""
        sizes = self.num_blocks, self.block_size
        return KVBlocks(*sizes, self.enable_prefix_caching, self.protected_share, self.num_checkpoints, self.groups)


class Arrival(_Record):
    """A sequence was queued."""

    now: int
    seq_id: int
    prompt_len: int
    known: int  # its tokens: the prompt, and what an earlier engine had generated
    max_len: int  # most tokens that it may have in the end
    blocks: list[int]  # a number for each full block of the known tokens
    arrival_ns: int
    sent_ns: int  # when it was handed over to the engine
    priority: int = 0
    service_class: str = ""
    tenant: str = DEFAULT_TENANT
    # due_ns, tpot_ns: when its first token is due, and most time between two; NEVER for no objective.
    due_ns: int = NEVER
    tpot_ns: int = NEVER
    index: int = 0
    parent: int | None = None  # the first choice of its request, whose prompt it shares
    wants_logits: bool = False  # the logits of its prompt are wanted, for prompt_logprobs
    pins_prompt: bool = False  # its prompt's blocks stay for good
    pools: str = ""  # how a vector is made of it, in place of tokens; empty where none is
    adapter: str = ""  # digest of its adapter; empty for the base model


class End(_Record):
    """A sequence has finished or was aborted. The scheduler is told of aborts; other ends follow from the steps."""

    now: int
    seq_id: int
    reason: FinishReason
    length: int  # how many tokens it has
    blocks: list[int]  # numbers of its full blocks after those of its Arrival


class NewClasses(_Record, tag="classes"):
    """The classes of requests were changed: fields of ClassTable; None for what is infinite. And weights of tenants."""

    classes: dict[str, Any]
    weights: dict[str, float] = {}
    limits: dict[str, Any] = {}  # fields of StepLimits that were changed

    def table(self) -> ClassTable:
        return msgspec.convert(_with_infinities(self.classes), ClassTable)

    def step_limits(self) -> StepLimits:
        return msgspec.convert(_with_infinities(self.limits), StepLimits)


class Retry(_Record):
    """A step failed and was run again in parts, from `began` to `ended`; `failed` are the sequences at fault."""

    failed: list[int]
    began: int
    ended: int


class AdapterLoaded(_Record):
    """A load of an adapter, by its digest, has ended. If it could not be had, all that waited for it have ended."""

    now: int
    adapter: str
    done: bool = True


class Proposal(_Record):
    """So many drafts were proposed for a sequence's next step."""

    seq_id: int
    drafts: int


class Item(msgspec.Struct, array_like=True, gc=False):
    """A sequence's part of a step: `tokens` after the `start` computed ones, and how many new ones came of it."""

    seq_id: int
    start: int
    tokens: int
    samples: int
    new: int  # NOT_NUMBERS where none could be drawn


class Step(_Record):
    """What the scheduler decided at `now`, and what came of it."""

    now: int
    items: list[Item] = []  # empty where nothing could run; times is None then
    times: tuple[int, int, int] | None = None  # when it was launched, computed and sampled
    preempted: list[int] = []
    expired: list[int] = []
    retry: Retry | None = None


def _with_infinities(value: Any) -> Any:
    """A value read from JSON with each null replaced by infinity, which is written as null."""
    if isinstance(value, dict):
        return {key: _with_infinities(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_infinities(each) for each in value]
    return math.inf if value is None else value


Record = RecordedEngine | Arrival | NewClasses | AdapterLoaded | Proposal | Step | End
Write = Callable[[Record, bool], None]


@dataclass(slots=True)
class Chain:
    """The numbered blocks of a sequence: how many tokens they have, and the last number, which depends on all."""

    sequence: Sequence
    tokens: int
    last: int

    @classmethod
    def of(cls, sequence: Sequence, root: int) -> Chain:
        """A chain without a block; the numbers depend on the root."""
        return cls(sequence, 0, hash((root, sequence.cache_salt)))

    def number(self, tokens: list[int], size: int) -> list[int]:
        """Number the full blocks of the tokens that have no number yet."""
        numbers: list[int] = []
        for start in range(self.tokens, len(tokens) // size * size, size):
            self.last = hash((self.last, *tokens[start : start + size])) & _EXACT
            numbers.append(self.last)
        self.tokens += size * len(numbers)
        return numbers


def arrival_of(sequence: Sequence, now: int, blocks: list[int]) -> Arrival:
    """The record of a sequence that is queued now, with the numbers of its blocks."""
    return Arrival(
        now=now,
        seq_id=sequence.seq_id,
        prompt_len=sequence.prompt_len,
        known=len(sequence.tokens),
        max_len=sequence.max_len,
        blocks=blocks,
        arrival_ns=sequence.arrival_ns,
        sent_ns=sequence.ledger.began_ns,
        priority=sequence.priority,
        service_class=sequence.service.name,
        tenant=sequence.tenant,
        due_ns=sequence.due_ns,
        tpot_ns=sequence.tpot_ns,
        index=sequence.index,
        parent=None if sequence.parent is None else sequence.parent.seq_id,
        wants_logits=sequence.params.prompt_logprobs is not None,
        pins_prompt=sequence.pins_prompt,
        pools=sequence.pooling.pooling if sequence.pooling is not None else "",
        adapter=sequence.adapter,
    )


class RecordedScheduler(Scheduler):
    """A scheduler that records what it is told and what it decides.

    Args:
        write: called with each record, and whether the engine has nothing left to do.
        root: any number; the blocks' numbers depend on it.
    """

    def __init__(self, config: SchedulerConfig, blocks: KVBlocks, write: Write, root: int = 0) -> None:
        super().__init__(config, blocks)
        self._write_record = write
        self._root = root
        self._chains: dict[int, Chain] = {}
        self._step, self._planned = Step(0), list[ScheduledSequence]()

    def _write(self, record: Record) -> None:
        self._write_record(record, not self.has_work)

    def set_classes(self, classes: ClassTable, weights: Mapping[str, float], limits: StepLimits | None = None) -> None:
        super().set_classes(classes, weights, limits)
        self._write(NewClasses(asdict(classes), dict(weights), {} if limits is None else limits.changed))

    def add(self, sequence: Sequence, now: int) -> None:
        super().add(sequence, now)
        chain = self._chains[sequence.seq_id] = Chain.of(sequence, self._root)
        self._write(arrival_of(sequence, now, chain.number(sequence.tokens, self.blocks.block_size)))

    def abort(self, sequence: Sequence, now: int) -> None:
        super().abort(sequence, now)
        self._write_ends([sequence], now)

    def adapter_loaded(self, adapter: str, now: int, done: bool = True) -> list[Sequence]:
        failed = super().adapter_loaded(adapter, now, done)
        self._write(AdapterLoaded(now, adapter, done))
        self._write_ends(failed, now)
        return failed

    def _write_ends(self, sequences: Iterable[Sequence], now: int) -> None:
        """Write an End for each of these sequences that has finished."""
        for sequence in sequences:
            if sequence.finish_reason is not None and (chain := self._chains.pop(sequence.seq_id, None)) is not None:
                blocks = chain.number(sequence.tokens, self.blocks.block_size)
                self._write(End(now, sequence.seq_id, sequence.finish_reason, len(sequence.tokens), blocks))

    def schedule(self, now: int) -> StepPlan:
        plan = super().schedule(now)
        self._write_ends([self._chains[seq_id].sequence for seq_id in plan.expired], now)
        self._step, self._planned = Step(now, preempted=plan.preempted, expired=plan.expired), plan.scheduled
        if not plan.scheduled:
            self._write(self._step)
        return plan

    def take_out(self, failed: list[Sequence], plan: StepPlan, began: int, ended: int) -> None:
        super().take_out(failed, plan, began, ended)
        self._write_ends(failed, ended)
        self._step.retry = Retry([sequence.seq_id for sequence in failed], began, ended)

    def complete(
        self, plan: StepPlan, tokens: Mapping[int, list[int] | None], times: StepTimes
    ) -> list[tuple[Sequence, list[int]]]:
        changed = super().complete(plan, tokens, times)
        self._write_ends((sequence for sequence, _ in changed), times.sampled_ns)
        step = self._step
        new = {seq_id: NOT_NUMBERS if drawn is None else len(drawn) for seq_id, drawn in tokens.items()}
        step.items = [
            Item(item.seq_id, item.start, len(item.token_ids), item.samples, new.get(item.seq_id, 0))
            for item in self._planned
        ]
        step.times = times.launched_ns, times.computed_ns, times.sampled_ns
        self._write(step)
        return changed

    def propose(self, seq_id: int, drafts: list[int]) -> None:
        super().propose(seq_id, drafts)
        if seq_id in self._drafts:
            self._write(Proposal(seq_id, len(drafts)))
