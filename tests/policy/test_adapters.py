"""Which adapters are in slots: who goes past whom, whose slot is taken, and the time that waiting for one takes."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.step.accounting import StepTimes
from headway.policy.step.ledger import Phase
from headway.policy.step.request import FinishReason, Request, Sequence, Status, cache_key, sequences_of
from headway.policy.step.sampling_params import SamplingParams
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.scheduler_config import SchedulerConfig


class Server:
    """A scheduler with slots for adapters, whose loads take a number of steps of a millisecond."""

    def __init__(self, slots: int, load_steps: int = 1) -> None:
        config = SchedulerConfig(8, 64, 64, max_loras=slots, max_bypasses=3)
        self.scheduler, self.now, self._load_steps = Scheduler(config, KVBlocks(64, 8)), 0, load_steps
        assert self.scheduler.sequences.slots is not None
        self.slots, self._loads, self._names = self.scheduler.sequences.slots, dict[str, int](), itertools.count()

    def submit(self, adapter: str = "", tokens: int = 4) -> Sequence:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        request = Request(str(next(self._names)), [1, 2, 3], params, [], 0, "", self.now, self.now, adapter=adapter)
        (sequence,) = sequences_of(request, 64)
        self.scheduler.add(sequence, self.now)
        return sequence

    def step(self) -> None:
        plan = self.scheduler.schedule(self.now)
        for load in self.slots.loads:
            self._loads[load.digest] = self._load_steps
        self.slots.loads.clear()
        began, self.now = self.now, self.now + 1_000_000
        if plan.scheduled:
            tokens = {item.seq_id: [5] for item in plan.scheduled if item.samples}
            self.scheduler.complete(plan, tokens, StepTimes(began, self.now, self.now))
        for digest in list(self._loads):
            self._loads[digest] -= 1
            if self._loads[digest] <= 0:
                del self._loads[digest]
                self.scheduler.adapter_loaded(digest, self.now)
        slots = [sequence.slot for sequence in self.scheduler.running if sequence.adapter]
        adapters = {sequence.adapter for sequence in self.scheduler.running if sequence.adapter}
        assert len(set(slots)) == len(adapters) and adapters <= set(self.slots.resident)


def test_the_wait_for_a_slot_is_a_phase_and_the_base_model_goes_past() -> None:
    server = Server(1, load_steps=2)
    first, base = server.submit("a", 10), server.submit()
    server.step()
    assert (first.status, base.status) == (Status.WAITING, Status.RUNNING)
    server.step()
    server.step()
    assert first.status is Status.RUNNING and first.slot == 0
    other = server.submit("b")
    while other.status is not Status.FINISHED:
        server.step()
    assert first.status is base.status is Status.FINISHED
    assert first.ledger.phases_ns[Phase.QUEUE_ADAPTER] == 2_000_000
    assert other.ledger.phases_ns[Phase.QUEUE_ADAPTER] >= 8_000_000
    assert Phase.QUEUE_ADAPTER not in base.ledger.phases_ns
    assert all(sum(each.ledger.phases_ns.values()) == each.ledger.total_ns for each in (first, other, base))


def test_so_many_go_past_one_that_finds_no_slot_and_no_more() -> None:
    server = Server(1)
    server.submit("a", 30)
    server.step()
    server.step()
    waits = server.submit("b")
    server.step()
    late = []
    for _ in range(6):
        late.append(server.submit("a", 30))
        server.step()
    assert [each.status for each in late] == [Status.RUNNING] * 3 + [Status.WAITING] * 3
    base = server.submit()
    while waits.status is not Status.FINISHED:
        server.step()
    assert base.status is Status.FINISHED and late[3].status is not Status.RUNNING
    while server.scheduler.has_work:
        server.step()


def test_the_slot_that_was_used_least_recently_is_taken() -> None:
    server = Server(2)
    for adapter in ("a", "b", "a"):
        server.submit(adapter, 1)
        while server.scheduler.has_work:
            server.step()
    server.submit("c", 1)
    while server.scheduler.has_work:
        server.step()
    assert server.slots.resident == ["a", "c"] and server.slots.counts == [1, 3, 3]


def test_an_adapter_that_cannot_be_had_ends_those_who_wait_for_it() -> None:
    server = Server(1, load_steps=100)
    gone, base = server.submit("gone"), server.submit()
    server.step()
    assert server.scheduler.adapter_loaded("gone", server.now, done=False) == [gone]
    assert gone.finish_reason is FinishReason.ERROR and not server.slots.loading
    while server.scheduler.has_work:
        server.step()
    assert base.finish_reason is FinishReason.LENGTH


@given(st.lists(st.tuples(st.sampled_from("abcde-"), st.integers(1, 9), st.integers(0, 3)), max_size=40))
@settings(max_examples=50, deadline=None)
def test_everybody_ends_whatever_comes(arrivals: list[tuple[str, int, int]]) -> None:
    server = Server(2, load_steps=2)
    sequences = []
    for adapter, tokens, steps in arrivals:
        sequences.append(server.submit(adapter.strip("-"), tokens))
        for _ in range(steps):
            server.step()
    for _ in range(1000):
        if not server.scheduler.has_work:
            break
        server.step()
    assert all(sequence.finish_reason is FinishReason.LENGTH for sequence in sequences)
    assert all(sum(each.ledger.phases_ns.values()) == each.ledger.total_ns for each in sequences)
    server.scheduler.check()


@given(st.tuples(st.text(), st.sampled_from(["", "ab", "cd"])), st.tuples(st.text(), st.sampled_from(["", "ab", "cd"])))
def test_no_two_pairs_of_salt_and_adapter_share_a_prefix(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (cache_key(*one) == cache_key(*other)) == (one == other)
    forged = cache_key("x", "ab")
    assert cache_key(forged, "") != forged
