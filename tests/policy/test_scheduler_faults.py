"""Sequences that make a step fail, or whose logits are not numbers, leave nothing behind and harm nobody."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from headway.policy.step.ledger import Phase
from headway.policy.step.request import FinishReason, Sequence
from tests.policy.simulation import Simulation, check_ledger


@dataclass
class Faulty(Simulation):
    """Tokens are a function of the tokens before them; `faults` says which seq_id fails how, with how many tokens."""

    faults: dict[int, tuple[str, int]] = field(default_factory=dict)

    def is_due(self, sequence: Sequence, kind: str) -> bool:
        how, at = self.faults.get(sequence.seq_id, ("", 0))
        return how == kind and sequence.num_computed >= at

    def fails(self, sequence: Sequence) -> bool:
        return self.is_due(sequence, "raises")

    def draw(self, sequence: Sequence) -> int | None:
        if self.is_due(sequence, "nan"):
            return None
        return 3 + hash(tuple(sequence.tokens)) % 90


def test_blocks_of_a_sequence_that_is_not_numbers_are_not_found() -> None:
    for at in (0, 18):  # with its first token, and later
        sim = Faulty(num_blocks=64, faults={0: ("nan", at)})
        bad = sim.submit(list(range(16)), 12)
        sim.run_until_done()
        assert bad.finish_reason is FinishReason.ERROR
        assert sim.scheduler.blocks.match(bad.tokens, "") == []
        again = sim.submit(list(range(16)), 2)
        sim.run_until_done()
        assert (again.cached_tokens, again.finish_reason) == (0, FinishReason.LENGTH)
        sim.check_all_closed()


def test_blocks_of_a_sequence_that_fails_within_its_prompt_are_not_found() -> None:
    sim = Faulty(num_blocks=64, max_num_batched_tokens=8, faults={0: ("raises", 16)})
    bad = sim.submit(list(range(24)), 4)
    sim.run_until_done()
    assert bad.finish_reason is FinishReason.ERROR
    assert sim.scheduler.blocks.match(bad.tokens, "") == []
    sim.check_all_closed()


def test_what_it_had_found_itself_stays_for_others() -> None:
    sim = Faulty(num_blocks=64, faults={1: ("nan", 0)})
    good = sim.submit(list(range(17)), 2)
    sim.run_until_done()
    sim.submit([*range(16), *range(50, 60)], 2)
    sim.run_until_done()
    assert len(sim.scheduler.blocks.match([*range(16), *range(50, 60)], "")) == 4
    assert len(sim.scheduler.blocks.match(good.tokens, "")) == 4


def test_a_choice_that_is_not_numbers_leaves_the_others_their_prompt() -> None:
    sim = Faulty(num_blocks=64)
    first, second = sim.submit_choices(list(range(18)), 8, n=2)
    sim.step()
    sim.step()
    sim.faults[second.seq_id] = ("nan", 0)
    sim.run_until_done()
    assert (first.finish_reason, second.finish_reason) == (FinishReason.LENGTH, FinishReason.ERROR)
    assert len(sim.scheduler.blocks.match(list(range(18)), "")) == 4
    sim.check_all_closed()


def test_the_time_of_a_step_that_was_run_again_is_told_apart() -> None:
    sim = Faulty(num_blocks=64, max_num_batched_tokens=8)
    decoding = sim.submit([1, 2, 3], 30)
    sim.step()
    prompt = sim.submit(list(range(20)), 3)
    sim.faults[2] = ("raises", 0)
    bad = sim.submit([7, 8], 5)
    sim.run_until_done()
    sim.check_all_closed()
    assert bad.output_len == 0 and (decoding.output_len, prompt.output_len) == (30, 3)
    assert decoding.ledger.phases_ns[Phase.STEP_RETRY] > 0
    assert bad.ledger.phases_ns[Phase.STEP_RETRY] > 0
    lost = [s.ledger.phases_ns.get(Phase.STEP_RETRY, 0) for s in (decoding, prompt, bad)]
    assert sim.scheduler.accounting.take_stalls()[Phase.STEP_RETRY] == sum(lost)


@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(16, 40),
    max_num_seqs=st.integers(1, 8),
    caching=st.booleans(),
    faults=st.dictionaries(
        st.integers(0, 15), st.tuples(st.sampled_from(["nan", "raises"]), st.integers(0, 40)), max_size=8
    ),
)
def test_random_faults_leak_nothing_and_leave_the_others_as_they_were(
    seed: int, num_blocks: int, max_num_seqs: int, caching: bool, faults: dict[int, tuple[str, int]]
) -> None:
    def run(faults: dict[int, tuple[str, int]]) -> Faulty:
        rng = random.Random(seed)
        sim = Faulty(
            num_blocks=num_blocks, max_num_seqs=max_num_seqs, caching=caching, faults=faults, rng=random.Random(seed)
        )
        beginnings = [[rng.randrange(3, 100) for _ in range(rng.randrange(1, 30))] for _ in range(4)]
        for number in range(16):
            prompt = rng.choice(beginnings) + [rng.randrange(3, 100) for _ in range(rng.randrange(8))]
            sim.submit_choices(prompt, rng.randrange(1, 20), n=2 if rng.random() < 0.3 else 1)
            if number % 4 == 3:
                sim.step()
        sim.run_until_done()
        return sim

    faulty, sound = run(dict(faults)), run({})
    faulty.check_all_closed()
    failed = [s for s in faulty.sequences if s.finish_reason is FinishReason.ERROR]
    assert {s.seq_id for s in failed} <= faults.keys()
    for sequence, expected in zip(faulty.sequences, sound.sequences, strict=True):
        check_ledger(sequence)
        if sequence not in failed:
            assert sequence.tokens == expected.tokens
        else:
            assert sequence.tokens == expected.tokens[: len(sequence.tokens)]
