"""Drives a scheduler with invented step times and tokens, and holds its invariants at every step."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from headway.cost.layers import AttentionSinks
from headway.policy.admission.intake import taken_up
from headway.policy.admission.lengths import fit_to_context
from headway.policy.admission.queue_bound import Place, QueueBound, QueueLimits
from headway.policy.admission.tenants import DEFAULT_TENANT
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.cache.kv_groups import PASSED, kv_cache_groups
from headway.policy.cache.sizing import pool_size
from headway.policy.cache.swap import NO_SWAP, SwapSpace
from headway.policy.objectives.promises import MOST_LEFT_OUT_NS, is_promised
from headway.policy.objectives.service_class import BUILT_IN, ClassTable, ServiceClass
from headway.policy.objectives.slo import SloPolicy
from headway.policy.step.accounting import StepTimes
from headway.policy.step.plan import ScheduledSequence, StepPlan, work_of
from headway.policy.step.pooling import PoolingParams
from headway.policy.step.request import Request, Sequence, Status, check, sequences_of
from headway.policy.step.sampling_params import SamplingParams
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.scheduler_config import SchedulerConfig
from headway.policy.step.step_budget import MIXED, Sharing
from headway.policy.step.step_time import StepTimeModel, StepWork
from tests.policy.fake_executor import FakeExecutor

VOCAB_SIZE = 1000


def random_classes(rng: random.Random, longest_step_ns: int) -> ClassTable:
    """Classes whose objectives steps of up to this length meet only now and then."""
    step_ms = longest_step_ns / 1e6
    return ClassTable(
        (
            ServiceClass(
                name="chat",
                ttft_ms=step_ms * rng.choice([1, 4, 20]),
                tpot_ms=step_ms * rng.choice([0.5, 1, 3]),
                window_ms=(0.0, step_ms * 2) if step_ms < 1 else (0.0, 1000.0),
                seats=rng.choice([0.0, 0.3]),
                starvation_s=step_ms,
                when_late=rng.choice(["serve", "refuse"]),
            ),
            ServiceClass(
                name="report",
                ttft_ms=step_ms * 50,
                kv=rng.choice([0.0, 0.3]),
                tokens=rng.choice([0.0, 0.4]),
                starvation_s=step_ms,
            ),
            ServiceClass(name="offline", seats=rng.choice([0.0, 0.4]), starvation_s=step_ms),
        )
    )


def make_request(
    request_id: str,
    prompt: list[int],
    max_tokens: int,
    now: int = 0,
    *,
    priority: int = 0,
    salt: str = "",
    service_class: str = "",
    ttft_ms: float = math.inf,
    tpot_ms: float = math.inf,
    pooling: PoolingParams | None = None,
    tenant: str = DEFAULT_TENANT,
    **params: Any,
) -> Request:
    wanted = SamplingParams(temperature=0.0, max_tokens=max_tokens, **params)
    return Request(
        request_id,
        prompt,
        wanted,
        eos_token_ids=[],
        priority=priority,
        cache_salt=salt,
        arrival_ns=now,
        sent_ns=now,
        service_class=service_class,
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        pooling=pooling,
        tenant=tenant,
    )


def make_sequence(name: str, prompt: list[int], max_tokens: int, **options: Any) -> Sequence:
    request = make_request(name, prompt, max_tokens, **options)
    return sequences_of(request, len(prompt) + max_tokens)[0]


@dataclass
class Simulation:
    """A scheduler with a clock of its own; `random` draws step times and tokens.

    Args:
        num_blocks: how many blocks there is memory for.
        message_ns: how long it takes to read a message.
    """

    num_blocks: int = 32
    block_size: int = 4
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_model_len: int = 64
    chunked: bool = True
    policy: str = "fcfs"
    caching: bool = True
    num_checkpoints: int | None = None
    windows: tuple[int | None, ...] = ()  # one for each layer
    sinks: AttentionSinks | None = None
    lookahead: int = 16
    max_bypasses: int = 32
    max_prefill_stall_ms: float = math.inf
    max_queue_time: float = math.inf
    classes: ClassTable = BUILT_IN
    weights: dict[str, float] = field(default_factory=dict)  # by tenant
    swap: SwapSpace = NO_SWAP
    sharing: Sharing = MIXED
    longest_step_ns: int = 10_000
    step_time: StepTimeModel | None = None
    limits: QueueLimits = field(default_factory=QueueLimits)
    message_ns: int = 1_000
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
            self.classes,
            weights=self.weights,
            swap=self.swap,
            sharing=self.sharing,
        )
        memory = self.num_blocks, 1, self.block_size
        longest = self.max_model_len, self.block_size
        groups = kv_cache_groups(self.windows, self.max_num_batched_tokens, *longest, self.sinks)
        pool = pool_size(*memory, self.max_num_seqs, self.max_model_len, may_shrink=False, groups=groups)
        blocks = KVBlocks(
            pool.num_blocks, self.block_size, self.caching, num_checkpoints=self.num_checkpoints, groups=groups
        )
        if blocks.checkpoints is not None:
            blocks.checkpoints.spacing = 2 * self.block_size  # as by default, where blocks are larger
        self.scheduler = self.make_scheduler(config, blocks)
        self.sequences: list[Sequence] = []
        self.inbox: deque[tuple[list[int], int]] = deque()  # requests that have not been taken up: prompt, max_tokens
        self.queue = QueueBound(self.limits)
        self.places: list[tuple[Place, list[Sequence]]] = []  # with the choices that have not ended
        self.executor = FakeExecutor(self.block_size, self.num_checkpoints is not None, groups)

    def make_scheduler(self, config: SchedulerConfig, blocks: KVBlocks) -> Scheduler:
        return Scheduler(config, blocks, self.step_time)

    def submit_choices(self, prompt: list[int], max_tokens: int, **options: Any) -> list[Sequence]:
        """Take a request in as the server and the engine do. Returns its choices, none where the queue is full."""
        place = Place(self.queue)
        if place.take(options.get("n", 1), [len(prompt)]) is not None:
            return []
        request = make_request(str(len(self.sequences)), prompt, max_tokens, self.now, **options)
        request.params = fit_to_context(request.params, len(prompt), self.max_model_len, max_tokens_field=None)
        check(request, self.max_model_len, VOCAB_SIZE)
        sequences = sequences_of(request, self.max_model_len, self.classes)
        for sequence in sequences:
            self.scheduler.add(sequence, self.now)
        self.sequences += sequences
        self.places.append((place, list(sequences)))
        return sequences

    def settle_places(self) -> None:
        """Requests give back what they took of the queue: their prompts with a first token, and choices that ended."""
        for place, sequences in self.places:
            if any(sequence.output_len for sequence in sequences):
                place.had_output(0, self.now)
            ended = [sequence for sequence in sequences if sequence.status is Status.FINISHED]
            place.ended(self.now, len(ended))
            for sequence in ended:
                sequences.remove(sequence)
            if not sequences:
                place.close(self.now)
        self.places = [(place, sequences) for place, sequences in self.places if sequences]
        assert self.queue.choices == sum(len(sequences) for _, sequences in self.places)

    def receive(self) -> Iterator[tuple[list[int], int]]:
        while self.inbox:
            self.now += self.message_ns
            yield self.inbox.popleft()

    def submit(self, prompt: list[int], max_tokens: int, **options: Any) -> Sequence:
        """Take in a request of one choice, and return that."""
        (sequence,) = self.submit_choices(prompt, max_tokens, **options)
        return sequence

    def draw(self, sequence: Sequence) -> int | None:
        """The next token of a sequence."""
        return self.rng.randrange(3, 100)

    def fails(self, sequence: Sequence) -> bool:
        """Whether a sequence of the plan makes the step raise."""
        return False

    def duration(self, work: StepWork) -> int:
        """Nanoseconds of a step's forward pass."""
        return self.rng.randrange(0, self.longest_step_ns)

    def step(self) -> list[ScheduledSequence]:
        """Run one step; returns what ran."""
        for message in taken_up(self.receive(), lambda: self.now):
            self.submit(*message)
        self.now += self.rng.randrange(0, 50)
        ran_before = set(self.scheduler.running)
        plan = self.scheduler.schedule(self.now)
        if plan.wait_until_ns:
            self.check_window(plan)
            self.now = plan.wait_until_ns
            return []
        assert plan.scheduled or plan.expired or not self.scheduler.has_work, "nothing runs and something could"
        self.check_plan(plan.scheduled, ran_before)
        if self.policy == "slo":
            self.check_classes(plan.scheduled)
        self.executor.run(plan)
        self.check_known(plan.scheduled)
        launched = self.now + self.rng.randrange(0, 20)
        repeated = StepWork(repeated_context=self.scheduler.blocks.repeated_tokens)
        assert plan.work == work_of(plan.scheduled) + repeated
        computed = launched + self.duration(plan.work)
        sampled = computed + self.rng.randrange(0, 100)
        self.now = sampled
        items = list(plan.scheduled)
        failed = [sequence for sequence in map(self.sequence_of, items) if self.fails(sequence)]
        if failed:
            self.now = ended = sampled + self.rng.randrange(0, 1000)
            self.scheduler.take_out(failed, plan, launched, ended)
            launched = computed = sampled = ended
        if items:
            times = StepTimes(launched, computed, sampled)
            tokens = {item.seq_id: self.tokens_of(item) for item in plan.scheduled if item.samples}
            pooled = [item for item in plan.scheduled if self.sequence_of(item).pooling is not None]
            tokens |= dict.fromkeys(item.seq_id for item in pooled if self.tokens_of(item) is None)
            self.scheduler.complete(plan, tokens, times)
            self.propose(items)
        self.settle_places()
        self.scheduler.check()
        assert {s.seq_id for s in (*self.scheduler.waiting, *self.scheduler.running)} == self.scheduler.sequences.keys()
        return items

    def tokens_of(self, item: ScheduledSequence) -> list[int] | None:
        token = self.draw(self.sequence_of(item))
        return None if token is None else [token]

    def propose(self, items: list[ScheduledSequence]) -> None:
        """Give the sequences of a step drafts for the next one."""

    def sequence_of(self, item: ScheduledSequence) -> Sequence:
        return self.sequences[item.seq_id]

    def step_sequences(self) -> list[Sequence]:
        """Run one step; returns the sequences that had a part in it."""
        return [self.sequence_of(item) for item in self.step()]

    def check_plan(self, items: list[ScheduledSequence], ran_before: set[Sequence]) -> None:
        scheduler = self.scheduler
        assert sum(item.num_tokens for item in items) <= self.max_num_batched_tokens
        assert len(scheduler.running) <= self.max_num_seqs
        assert len({item.seq_id for item in items}) == len(items)
        size = self.block_size
        for item in items:
            sequence = self.sequence_of(item)
            assert item.num_tokens >= 1
            assert item.start == sequence.num_computed
            end = item.start + item.num_tokens
            known = sequence.tokens[item.start : end]
            drafts = item.num_tokens - len(known)
            assert item.token_ids[: len(known)] == known
            samples = end >= len(sequence.tokens) and sequence.pooling is None
            assert item.samples == (1 + drafts if samples else 0)
            assert drafts == 0 or (item.decoding and end < sequence.max_len)
            for table in sequence.tables:
                assert table.end * size >= end
                for block in table.entries(item.start // size, -(-end // size)):
                    assert scheduler.blocks.references[block] == 1, "a step would write into a shared block"
        self.check_stall(items)
        decoding = [s for s in scheduler.running if s.is_decoding]
        ran = {id(self.sequence_of(item)) for item in items}
        of_prompts = self.sharing.prefill_first and any(not item.decoding for item in items)
        for sequence in decoding:
            may_be_left_out = self.policy == "slo" and not (is_promised(sequence) or sequence.has_starved)
            # One that comes back with all of it in the cache is given what the step has left, and else the next one.
            may_be_left_out |= sequence not in ran_before
            assert id(sequence) in ran or may_be_left_out or of_prompts, "a decoding sequence was left out"

    def check_classes(self, items: list[ScheduledSequence]) -> None:
        """Check that what belongs to a class is left to it, and that none goes before another that could."""
        running = list(self.scheduler.running)
        by_class = Counter(sequence.service.name for sequence in running)
        kept = [int(each.seats * self.max_num_seqs) - by_class[each.name] for each in self.classes]
        assert len(running) + sum(max(0, seats) for seats in kept) <= self.max_num_seqs
        assert sum(sequence.has_starved for sequence in self.scheduler.sequences.values()) <= 1
        tokens = {item.seq_id: item.num_tokens for item in items}
        left_out = [s for s in running if s.is_decoding and s.seq_id not in tokens]
        oldest = min((s.last_token_ns for s in left_out), default=self.now)
        if self.now - oldest >= MOST_LEFT_OUT_NS:
            assert any(self.sequence_of(item).last_token_ns <= oldest for item in items if item.decoding)
        if not self.chunked or any(each.tokens for each in self.classes) or any(item.logit_rows for item in items):
            return
        if self.windows or self.weights:
            return  # a chunk frees what windows have passed, so that one before it fits after all; tenants have turns
        prompts = [s for s in running if not (s.is_decoding or s.has_starved)]
        unfinished = [s for s in prompts if tokens.get(s.seq_id, 0) < s.num_to_compute]
        later = prompts[prompts.index(unfinished[0]) + 1 :] if unfinished else []
        assert not any(sequence.seq_id in tokens for sequence in later), "a prompt went before one that comes first"

    def check_window(self, plan: StepPlan) -> None:
        """Check that nothing runs, and that none waits longer for others than the class of each that waits allows."""
        assert not plan.scheduled and not len(self.scheduler.running)
        assert isinstance(self.scheduler.policy, SloPolicy)
        most_ns = min(sequence.service.window_ms[1] for sequence in self.scheduler.waiting) * 1e6
        assert self.now < plan.wait_until_ns <= self.scheduler.policy.window.opened_ns + most_ns

    def check_stall(self, items: list[ScheduledSequence]) -> None:
        """Check that prompts hold up others no longer than they may, except by the least tokens of the first one."""
        step_time = self.scheduler.accounting.step_time
        prompts = [item for item in items if not item.decoding]
        if not prompts or not self.chunked or not step_time.is_trained:
            return
        if self.policy == "slo" and (slack_ns := self.scheduler.decisions[-1].slack_ns) < math.inf:
            decodes = [item for item in items if item.decoding]
            allowed = max(slack_ns, step_time.predict_ns(work_of(decodes)))
            starved = [sequence for sequence in self.scheduler.running if sequence.has_starved]
            allowed += sum(step_time.prefill_ns(self.block_size, sequence.num_computed) for sequence in starved)
            within = step_time.predict_ns(work_of(items)) <= allowed * (1 + 1e-9)
            assert within or not decodes or sum(item.num_tokens for item in prompts) <= self.block_size
            return
        waiting = list(takewhile(lambda item: item.decoding, items)) or prompts[:1]  # later ones were admitted
        added = [item for item in prompts if item is not waiting[0]]
        stall = sum(step_time.prefill_ns(item.num_tokens, item.start, bool(item.logit_rows)) for item in added)
        # Sequences that were swapped in came later; and random durations may teach that more of them take less time.
        beside = [step_time.predict_ns(work_of(waiting[: end + 1])) for end in range(len(waiting))]
        allowed = max(self.max_prefill_stall_ms * 1e6, *beside)
        least = waiting[0].decoding and len(added) == 1 and added[0].num_tokens <= self.block_size
        assert stall <= allowed * (1 + 1e-9) or least

    def check_known(self, items: list[ScheduledSequence]) -> None:
        """Check that the executor knows from plans alone what the scheduler knows."""
        for item in items:
            sequence, state = self.sequence_of(item), self.executor.known[item.seq_id]
            drafted = [*sequence.tokens[: item.start], *item.token_ids] if item.decoding else sequence.tokens
            assert state.tokens == drafted
            for known, table in zip(state.block_tables, sequence.tables, strict=True):
                passed = [PASSED] * (table.first - len(table.sinks))
                assert known[: table.end] == table.sinks + passed + table.blocks
            assert (state.seed, state.prompt_len) == (sequence.seed, sequence.prompt_len)
            assert (state.params, state.stop_ids) == (sequence.params, sequence.stop_ids)

    def run_until_done(self, limit: int = 5_000) -> int:
        """Step until nothing is left; returns the number of steps."""
        for count in range(limit):
            if not self.scheduler.has_work:
                return count
            self.step()
        raise AssertionError(f"still work after {limit} steps: somebody starves")

    def check_all_closed(self) -> None:
        """Check that every block and every place is free, and that every ledger sums to its life."""
        self.settle_places()
        assert (self.queue.choices, self.queue.tokens) == (0, 0)
        blocks = self.scheduler.blocks
        assert blocks.num_free == blocks.num_blocks
        assert self.scheduler.host is None or self.scheduler.host.num_used == 0
        for sequence in self.sequences:
            assert sequence.status is Status.FINISHED
            assert sequence.tables == []
            assert sequence.displacements <= self.scheduler.policy.orders.displaces
            check_ledger(sequence)


def check_ledger(sequence: Sequence) -> None:
    ledger = sequence.ledger
    assert all(isinstance(ns, int) and ns >= 0 for ns in ledger.phases_ns.values())
    assert sum(ledger.phases_ns.values()) == ledger.last_ns - ledger.began_ns
