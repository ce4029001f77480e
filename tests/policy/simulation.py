"""Drives a scheduler with invented step times and tokens, and holds its invariants at every step."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from headway.policy.accounting import ScheduledSequence, StepTimes, work_of
from headway.policy.kv_blocks import KVBlocks
from headway.policy.request import Sequence, Status
from headway.policy.sampling_params import SamplingParams
from headway.policy.scheduler import Scheduler
from headway.policy.scheduler_config import SchedulerConfig
from headway.policy.step_time import StepWork
from headway.policy.victims import MAX_DISPLACEMENTS


def make_sequence(
    request_id: str,
    prompt: list[int],
    max_tokens: int,
    now: int = 0,
    *,
    index: int = 0,
    parent: Sequence | None = None,
    priority: int = 0,
    salt: str = "",
    stop_ids: frozenset[int] = frozenset(),
    prompt_logprobs: int | None = None,
) -> Sequence:
    sequence = Sequence(
        request_id=request_id,
        index=index,
        params=SamplingParams(temperature=0.0, max_tokens=max_tokens, prompt_logprobs=prompt_logprobs),
        tokens=list(prompt),
        prompt_len=len(prompt),
        max_len=len(prompt) + max_tokens,
        stop_ids=stop_ids,
        seed=0,
        priority=priority,
        arrival_ns=now,
        cache_salt=salt,
        parent=parent,
    )
    sequence.ledger.began_ns = sequence.ledger.last_ns = now
    return sequence


@dataclass
class Simulation:
    """A scheduler with a clock of its own; `random` draws step times and tokens."""

    num_blocks: int = 32
    block_size: int = 4
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_model_len: int = 64
    chunked: bool = True
    policy: str = "fcfs"
    caching: bool = True
    lookahead: int = 16
    max_bypasses: int = 32
    max_prefill_stall_ms: float = math.inf
    max_queue_time: float = math.inf
    longest_step_ns: int = 10_000
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    now: int = 1_000

    def __post_init__(self) -> None:
        config = SchedulerConfig(
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.max_model_len,
            self.chunked,
            self.policy,
            self.lookahead,
            self.max_bypasses,
            self.max_prefill_stall_ms,
            self.max_queue_time,
        )
        self.scheduler = Scheduler(config, KVBlocks(self.num_blocks, self.block_size, self.caching))
        self.sequences: list[Sequence] = []
        self.written: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, offset) -> tokens up to there

    def add(self, sequence: Sequence) -> Sequence:
        self.scheduler.add(sequence, self.now)
        self.sequences.append(sequence)
        return sequence

    def submit(self, prompt: list[int], max_tokens: int, **options: object) -> Sequence:
        name = str(len(self.sequences))
        return self.add(make_sequence(name, prompt, max_tokens, self.now, **options))  # type: ignore[arg-type]

    def draw(self, item: ScheduledSequence) -> int | None:
        """The next token of an item."""
        return self.rng.randrange(3, 100)

    def fails(self, sequence: Sequence) -> bool:
        """Whether a sequence of the plan makes the step raise."""
        return False

    def duration(self, work: StepWork) -> int:
        """Nanoseconds of a step's forward pass."""
        return self.rng.randrange(0, self.longest_step_ns)

    def step(self) -> list[ScheduledSequence]:
        """One step; returns what ran."""
        self.now += self.rng.randrange(0, 50)
        plan = self.scheduler.schedule(self.now)
        self.check_plan(plan.scheduled)
        self.run_on_fake_cache(plan.copies, plan.scheduled)
        launched = self.now + self.rng.randrange(0, 20)
        computed = launched + self.duration(work_of(plan.scheduled))
        sampled = computed + self.rng.randrange(0, 100)
        self.now = sampled
        items = list(plan.scheduled)
        failed = [item.sequence for item in items if self.fails(item.sequence)]
        if failed:
            self.now = ended = sampled + self.rng.randrange(0, 1000)
            self.scheduler.take_out(failed, plan, launched, ended)
            launched = computed = sampled = ended
        if items:
            times = StepTimes(launched, computed, sampled)
            self.scheduler.complete(plan, self.draw, times)
        self.scheduler.check()
        return items

    def check_plan(self, items: list[ScheduledSequence]) -> None:
        scheduler = self.scheduler
        assert sum(item.num_tokens for item in items) <= self.max_num_batched_tokens
        assert len(scheduler.running) <= self.max_num_seqs
        assert len({id(item.sequence) for item in items}) == len(items)
        size = self.block_size
        for item in items:
            sequence = item.sequence
            assert item.num_tokens >= 1
            assert item.start == sequence.num_computed
            end = item.start + item.num_tokens
            assert end <= len(sequence.tokens)
            assert len(sequence.block_table) * size >= end
            for block in sequence.block_table[item.start // size : -(-end // size)]:
                assert scheduler.blocks.references[block] == 1, "a step would write into a shared block"
        self.check_stall(items)
        decoding = [s for s in scheduler.running if s.is_decoding]
        assert {id(s) for s in decoding} <= {id(item.sequence) for item in items}, "a decoding sequence was left out"

    def check_stall(self, items: list[ScheduledSequence]) -> None:
        """Prompts hold up others no longer than they may, as far as was known, but for the first one's least."""
        step_time = self.scheduler.accounting.step_time
        prompts = [item for item in items if not item.decoding]
        if not prompts or not self.chunked or not step_time.is_trained:
            return
        waiting = [item for item in items if item.decoding] or prompts[:1]
        added = [item for item in prompts if item is not waiting[0]]
        rows = [item.sequence.logit_rows(item.start, item.num_tokens) for item in added]
        stall = sum(
            step_time.prefill_ns(item.num_tokens, item.start, bool(row)) for item, row in zip(added, rows, strict=True)
        )
        allowed = max(self.max_prefill_stall_ms * 1e6, step_time.predict_ns(work_of(waiting)))
        least = waiting[0].decoding and len(added) == 1 and added[0].num_tokens <= self.block_size
        assert stall <= allowed * (1 + 1e-9) or least

    def run_on_fake_cache(self, copies: list[tuple[int, int]], items: list[ScheduledSequence]) -> None:
        """A cache that stores, in place of keys and values, the tokens they depend on."""
        size = self.block_size
        for source, target in copies:
            for offset in range(size):
                if (source, offset) in self.written:
                    self.written[target, offset] = self.written[source, offset]
        for item in items:
            sequence = item.sequence
            for position in range(item.start, item.start + item.num_tokens):
                place = (sequence.block_table[position // size], position % size)
                self.written[place] = tuple(sequence.tokens[: position + 1])
        for item in items:
            sequence = item.sequence
            for position in range(item.start + item.num_tokens):
                place = (sequence.block_table[position // size], position % size)
                assert self.written[place] == tuple(sequence.tokens[: position + 1]), (
                    "attention would read another's KV"
                )

    def run_until_done(self, limit: int = 5_000) -> int:
        """Step until nothing is left; returns the number of steps."""
        for count in range(limit):
            if not self.scheduler.has_work:
                return count
            self.step()
        raise AssertionError(f"still work after {limit} steps: somebody starves")

    def check_all_closed(self) -> None:
        """Every block is free and every ledger sums to its life."""
        blocks = self.scheduler.blocks
        assert blocks.num_free == blocks.num_blocks
        for sequence in self.sequences:
            assert sequence.status is Status.FINISHED
            assert sequence.block_table == []
            assert sequence.displacements <= MAX_DISPLACEMENTS
            check_ledger(sequence)


def check_ledger(sequence: Sequence) -> None:
    ledger = sequence.ledger
    assert all(isinstance(ns, int) and ns >= 0 for ns in ledger.phases_ns.values())
    assert sum(ledger.phases_ns.values()) == ledger.last_ns - ledger.began_ns
