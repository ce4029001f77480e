"""Several tokens of a sequence in a step: drafts are tried, and those that are refused leave nothing behind."""

from __future__ import annotations

import random
from collections.abc import Sequence as Items
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.policy.step.plan import ScheduledSequence
from headway.policy.step.request import FinishReason, Sequence
from tests.policy.simulation import Simulation, check_ledger
from tests.policy.test_scheduler_faults import Faulty


@dataclass
class Drafting(Faulty):
    """The executor proposes up to so many drafts, some of them right, and accepts none or some of those that are."""

    most_drafts: int = 3
    idle_steps: float = 0.0  # share of steps in which nothing comes of a sequence

    def following(self, sequence: Sequence, tokens: Items[int]) -> int | None:
        """The token that the model gives after the sequence's tokens and these."""
        if self.is_due(sequence, "nan"):
            return None
        return 3 + hash((*sequence.tokens, *tokens)) % 90

    def tokens_of(self, item: ScheduledSequence) -> list[int] | None:
        sequence = self.sequence_of(item)
        if self.rng.random() < self.idle_steps:
            return []
        accepted: list[int] = []
        drafts = item.token_ids[item.num_tokens - item.samples + 1 :]
        for draft in drafts[: self.rng.randrange(len(drafts) + 1)]:
            if draft != self.following(sequence, accepted):
                break
            accepted.append(draft)
        last = self.following(sequence, accepted)
        return None if last is None else [*accepted, last]

    def propose(self, items: list[ScheduledSequence]) -> None:
        for item in items:
            sequence, drafts = self.sequence_of(item), []
            for _ in range(self.rng.randrange(self.most_drafts + 1)):
                right = self.following(sequence, drafts) or 1
                drafts.append(right if self.rng.random() < 0.7 else 2)
            self.scheduler.propose(item.seq_id, drafts)

    def check_blocks(self) -> None:
        """Check that no block is held for a token that was refused, and that what the index knows is in the cache."""
        blocks = self.scheduler.blocks
        for sequence in self.scheduler.running:
            assert sequence.accepted_drafts <= min(sequence.drafts, sequence.output_len)
            assert len(sequence.held_blocks) <= blocks.blocks_for(len(sequence.tokens))
            assert sequence.num_registered * self.block_size <= sequence.num_computed < len(sequence.tokens)
        for sequence in self.sequences:
            found = blocks.match([*sequence.tokens, 0], sequence.cache_salt)
            numbers = list(self.executor.numbered(sequence.tokens))
            for number, block in zip(numbers[self.block_size - 1 :: self.block_size], found, strict=False):
                assert self.executor.written[block, self.block_size - 1] == (0, number)


@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(16, 40),
    max_num_seqs=st.integers(1, 6),
    extra_budget=st.integers(0, 24),
    caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority", "slo"]),
    most_drafts=st.integers(1, 6),
    idle_steps=st.sampled_from([0.0, 0.2]),
    faults=st.dictionaries(
        st.integers(0, 15), st.tuples(st.sampled_from(["nan", "raises"]), st.integers(0, 40)), max_size=3
    ),
)
def test_drafts_change_no_token_and_leave_nothing_behind(
    seed: int, max_num_seqs: int, extra_budget: int, faults: dict[int, tuple[str, int]], **options: object
) -> None:
    def run(sim: Faulty) -> Faulty:
        rng = random.Random(seed)
        beginnings = [[rng.randrange(3, 100) for _ in range(rng.randrange(1, 24))] for _ in range(3)]
        for number in range(10):
            prompt = rng.choice(beginnings) + [rng.randrange(3, 100) for _ in range(rng.randrange(1, 8))]
            stops = [rng.randrange(3, 93) for _ in range(rng.choice([0, 3]))]
            wanted = {"n": rng.choice([1, 1, 3]), "priority": rng.randrange(3), "stop_token_ids": stops}
            sim.submit_choices(prompt, rng.randrange(1, 20), **wanted)
            if number % 3 == 2:
                sim.step()
        while sim.scheduler.has_work:
            sim.step()
            if isinstance(sim, Drafting):
                sim.check_blocks()
            for sequence in sim.sequences:
                check_ledger(sequence)
        sim.check_all_closed()
        return sim

    options["max_num_seqs"], options["max_num_batched_tokens"] = max_num_seqs, max_num_seqs + extra_budget
    drafts = {name: options.pop(name) for name in ("most_drafts", "idle_steps")}
    drafting = run(Drafting(rng=random.Random(seed), faults=faults, **options, **drafts))  # type: ignore[arg-type]
    plain = run(Faulty(rng=random.Random(seed), **options))  # type: ignore[arg-type]
    for sequence, expected in zip(drafting.sequences, plain.sequences, strict=True):
        if sequence.finish_reason is FinishReason.ERROR:
            assert sequence.seq_id in faults
            assert sequence.tokens == expected.tokens[: len(sequence.tokens)]
        else:
            assert (sequence.tokens, sequence.finish_reason) == (expected.tokens, expected.finish_reason)


def decoding(**options: object) -> tuple[Simulation, Sequence]:
    """A sequence that decodes, with 9 tokens known."""
    sim = Simulation(num_blocks=32, **options)  # type: ignore[arg-type]
    sequence = sim.submit(list(range(8)), 20)
    sim.step()
    assert sequence.is_decoding
    return sim, sequence


def answer(sim: Simulation, tokens: list[int]) -> list[ScheduledSequence]:
    """Run a step in which each sequence gets these tokens."""
    sim.tokens_of = lambda item: tokens  # type: ignore[method-assign]
    return sim.step()


def test_what_is_accepted_is_computed_and_what_is_refused_gives_its_blocks_back() -> None:
    sim, sequence = decoding()
    sim.scheduler.propose(sequence.seq_id, [50, 51, 52, 53, 54])
    (item,) = answer(sim, [50, 51, 90])
    assert item.token_ids[1:] == [50, 51, 52, 53, 54] and item.samples == 6
    assert sequence.tokens[9:] == [50, 51, 90]
    assert (sequence.drafts, sequence.accepted_drafts) == (5, 2)
    assert (sequence.num_computed, len(sequence.held_blocks), sequence.num_registered) == (11, 3, 2)
    (item,) = answer(sim, [91])
    assert (item.start, item.token_ids) == (11, [90])
    assert sequence.num_registered == 3, "a block is found by others once all its tokens are certain"


def test_where_nothing_is_accepted_the_newest_token_is_computed_again() -> None:
    sim, sequence = decoding()
    (first,) = answer(sim, [])
    (again,) = answer(sim, [60])
    assert (first.start, first.token_ids) == (again.start, again.token_ids) == (8, [sequence.tokens[8]])
    assert sequence.tokens[9:] == [60] and sequence.steps == 3


def test_a_stop_among_the_accepted_tokens_ends_the_sequence() -> None:
    sim = Simulation(num_blocks=32)
    sequence = sim.submit([1, 2], 20, stop_token_ids=[51])
    sim.step()
    sim.scheduler.propose(sequence.seq_id, [50, 51, 52])
    answer(sim, [50, 51, 52, 53])
    assert (sequence.finish_reason, sequence.tokens[3:]) == (FinishReason.STOP, [50, 51])
    assert sequence.accepted_drafts == 2, "those behind the stop were of no use"
    sim.check_all_closed()


def test_no_draft_goes_beyond_the_longest_output_or_the_budget() -> None:
    sim, sequence = decoding()
    sim.scheduler.propose(sequence.seq_id, [7] * 30)
    (item,) = answer(sim, [7] * 16)
    assert item.num_tokens == 16 and len(sequence.tokens) == 25, "a step's budget"
    sim.scheduler.propose(sequence.seq_id, [7] * 30)
    (item,) = answer(sim, [7] * 3)
    assert item.num_tokens == 3 and sequence.finish_reason is FinishReason.LENGTH
    sim.check_all_closed()


def test_drafts_take_no_block_that_a_newest_token_needs() -> None:
    sim = Simulation(num_blocks=16, max_num_batched_tokens=64, caching=False)
    sequences = [sim.submit(list(range(11)), 20) for _ in range(4)]
    sim.step()
    sim.step()
    assert sim.scheduler.blocks.num_free == 4
    for sequence in sequences:
        sim.scheduler.propose(sequence.seq_id, [5, 5, 5, 5])
    items = sim.step()
    assert sim.scheduler.sequences.num_preemptions == 0
    assert [item.samples for item in items] == [1, 1, 1, 1]


def test_no_draft_is_tried_where_penalties_count_the_tokens_before() -> None:
    sim = Simulation(num_blocks=32)
    sequence = sim.submit([1, 2], 20, frequency_penalty=0.5)
    sim.step()
    sim.scheduler.propose(sequence.seq_id, [50])
    assert [item.samples for item in sim.step()] == [1]


@pytest.mark.parametrize("drafts", [[], [50]])
def test_who_does_not_decode_gets_no_drafts(drafts: list[int]) -> None:
    sim = Simulation(num_blocks=32, max_num_batched_tokens=8)
    sequence = sim.submit(list(range(20)), 5)
    for tokens in (8, 8, 4, 1):
        sim.scheduler.propose(sequence.seq_id, drafts if tokens > 1 else [])
        assert [item.num_tokens for item in sim.step()] == [tokens]
    sim.run_until_done()
    sim.scheduler.propose(sequence.seq_id, drafts)
    assert sim.step() == []


def test_drafts_leave_a_block_of_tokens_to_prompts() -> None:
    """Otherwise a prompt would wait for as long as there are drafts."""
    sim, sequence = decoding(max_num_batched_tokens=8)
    prompt = sim.submit(list(range(20, 32)), 4)
    for computed in (4, 8, 12):
        sim.scheduler.propose(sequence.seq_id, [7] * 7)
        first, second = answer(sim, [50])
        assert (first.num_tokens, second.num_tokens, prompt.num_computed) == (4, 4, computed)
    sim.run_until_done()
    sim.check_all_closed()
