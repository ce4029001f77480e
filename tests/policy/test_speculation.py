"""How many drafts a step tries, on simulated machines: nearly as many as are best, and none where they lose time."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.policy.step.draft_measures import HitRates, RowTimes
from headway.policy.step.speculation import ROWS, Proposal, Speculation
from headway.policy.step.speculative_config import SpeculativeConfig
from headway.policy.step.step_time import StepTimeModel
from tests.policy.exact import Exact

MS = 1_000_000
MOST = 15


def tiles(rows: int) -> float:
    """Milliseconds on a machine that takes 16 rows at a time."""
    return 10.0 * -(-rows // 16) + 0.05 * rows


def compute_bound(rows: int) -> float:
    return 2.0 + 1.0 * rows


def memory_bound(rows: int) -> float:
    return 20.0 + 0.02 * rows


class Machine:
    """Sequences whose drafts are right by chance, on a machine with a time for each number of rows.

    Args:
        chance: that a draft is right where those before it are.
        offered: share of steps in which a sequence has drafts.
        drafting_ms: what it takes to make them, for each sequence.
        noise: most that a step's time differs from the machine's, as a share.
        cold: how much longer a step takes behind one that was not left alone, whose numbers are in the caches.
        changes: the share of steps after which the machine becomes half as quick, or as quick as before.
    """

    def __init__(
        self,
        cost: Callable[[int], float],
        chance: float,
        offered: float = 1.0,
        drafting_ms: float = 0.01,
        noise: float = 0.1,
        cold: float = 0.0,
        changes: float = 0.0,
        seed: int = 7,
    ) -> None:
        self.cost, self.chance, self.offered = cost, chance, offered
        self.changes, self.pace = changes, 1
        self.drafting_ms, self.noise, self.cold = drafting_ms, noise, cold
        self.rng = random.Random(seed)
        self.policy = Speculation(MOST, StepTimeModel())
        self.ms, self.tokens = 0.0, 0
        self.rows: list[int] = []

    def run(self, sequences: int, steps: int, with_prompts: bool = False) -> float:
        """Tokens per millisecond of these steps, as a multiple of those without drafts."""
        policy, rng = self.policy, self.rng
        ms, tokens = self.ms, self.tokens
        chosen: dict[int, list[int]] = {}
        proposals: dict[int, Proposal] = {}
        busy = False
        for _ in range(steps):
            rows, new = sequences, 0
            drawn = {}
            for seq_id in range(sequences):
                right = proposals[seq_id].token_ids if seq_id in proposals else []
                tried = len(chosen.get(seq_id, []))
                hits = next((at for at in range(len(right)) if rng.random() > self.chance), len(right))
                accepted = min(tried, hits)
                # Where a draft was not tried, what is drawn still says whether it was right.
                drawn[seq_id] = right[:accepted] + [right[accepted] if accepted < hits else -1]
                rows, new = rows + tried, new + accepted + 1
            took = self.cost(rows) * rng.uniform(1 - self.noise, 1 + self.noise) * (1 + self.cold * busy)
            self.ms, self.tokens = self.ms + took, self.tokens + new
            self.rows.append(rows)
            chosen = {}
            rests = policy.rests()
            policy.took(sequences, rows, new, int(took * self.pace * MS))
            if self.changes and rng.random() < self.changes:
                self.pace = 3 - self.pace
            if rests:
                busy = False
                continue
            busy = True
            for seq_id, tokens_of in drawn.items():
                policy.heed(seq_id, tokens_of)
            proposals = {}
            if policy.asks():
                for seq_id in range(sequences):
                    if rng.random() < self.offered:
                        proposals[seq_id] = Proposal([rng.randrange(1, 100) for _ in range(MOST)], 4)
                self.ms += self.drafting_ms * sequences
                chosen = policy.choose(proposals, sequences, with_prompts)
                policy.spent(int(self.drafting_ms * sequences * MS))
        return (self.tokens - tokens) / (self.ms - ms) / (sequences / self.cost(sequences))

    def best(self, sequences: int) -> float:
        """The same of the number of drafts that is best, if it were known."""
        plain = sequences / self.cost(sequences)

        def rate(drafts: int) -> float:
            tokens = sum(self.chance**at for at in range(drafts + 1))
            return sequences * tokens / (self.cost(sequences * (drafts + 1)) + self.drafting_ms * sequences)

        return max(1.0, *(rate(drafts) / plain for drafts in range(MOST + 1)))


@pytest.mark.covering(2)
@pytest.mark.parametrize("cost", [tiles, compute_bound, memory_bound])
@pytest.mark.parametrize("chance", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("sequences", [1, 4, 16, 32])
def test_it_wins_nearly_what_can_be_won(cost: Callable[[int], float], chance: float, sequences: int) -> None:
    machine = Machine(cost, chance)
    machine.run(sequences, 200)
    gained = machine.run(sequences, 500)
    assert gained >= max(0.98, 0.82 * machine.best(sequences))


@pytest.mark.covering(2)
@pytest.mark.parametrize("cost", [tiles, compute_bound, memory_bound])
@pytest.mark.parametrize("chance", [0.0, 0.2])
@pytest.mark.parametrize("sequences", [1, 4, 32])
@pytest.mark.parametrize("drafting_ms", [0.01, 1.0])
def test_it_loses_no_more_than_two_in_a_hundred(
    cost: Callable[[int], float], chance: float, sequences: int, drafting_ms: float
) -> None:
    """Also from the first step on, where all is still to be learnt, and where drafts take long to make."""
    assert Machine(cost, chance, drafting_ms=drafting_ms).run(sequences, 1000) >= 0.98


@pytest.mark.covering(2)
@pytest.mark.parametrize("cost", [tiles, compute_bound, memory_bound])
@pytest.mark.parametrize("chance", [0.0, 0.4])
@pytest.mark.parametrize("sequences", [1, 4, 16])
@pytest.mark.parametrize("cold", [0.02, 0.05])
def test_what_drafts_leave_in_the_caches_counts(
    cost: Callable[[int], float], chance: float, sequences: int, cold: float
) -> None:
    """Steps that were left alone say what the others would take, if nobody had looked for drafts."""
    machine = Machine(cost, chance, cold=cold)
    assert machine.run(sequences, 1000) >= 0.98
    assert machine.run(sequences, 1000) >= 0.98


def test_few_of_the_steps_that_are_left_alone_are_timed() -> None:
    """To time a step takes a per cent of a short one. Where drafts never pay, nearly all steps cost nothing."""
    machine = Machine(compute_bound, 0.0, drafting_ms=0.3)
    machine.run(16, 200)
    timed = 0
    took = machine.policy.took

    def counted(*step: int) -> None:
        nonlocal timed
        timed += machine.policy.is_timed
        took(*step)

    machine.policy.took = counted  # type: ignore[method-assign]
    machine.run(16, 1000)
    assert timed < 300


def test_what_was_won_is_not_lost_when_the_text_changes() -> None:
    machine = Machine(tiles, 0.95)
    assert machine.run(1, 500) > 4
    machine.chance = 0.0
    assert machine.run(1, 1000) >= 0.98
    machine.chance = 0.95
    machine.run(1, 200)
    assert machine.run(1, 500) > 4, "and it begins again when drafts are right again"


def test_what_was_won_is_not_lost_when_the_batch_grows() -> None:
    machine = Machine(tiles, 0.5)
    machine.run(1, 500)
    assert machine.run(64, 500) >= 0.98


def test_a_machine_that_was_held_up_is_tried_again() -> None:
    machine = Machine(memory_bound, 0.9)
    right, machine.cost = machine.cost, lambda rows: memory_bound(rows) * (1 if rows == 1 else 20)
    machine.run(1, 60)
    machine.cost = right
    machine.run(1, 6000)
    assert machine.run(1, 500) > 3


def test_beside_prompts_each_row_costs_its_own() -> None:
    """A product of thousands of rows leaves no time in which some more cost nothing."""
    machine = Machine(tiles, 0.8)
    machine.run(4, 200)
    assert machine.rows[-40:].count(4) <= 2, "alone, drafts pay"
    machine.policy._step_time = Exact(token=3.0)  # type: ignore[assignment]
    proposals = {seq_id: Proposal([1] * MOST, 4) for seq_id in range(4)}
    assert machine.policy.choose(proposals, 4, with_prompts=True) == {}
    machine.policy._step_time = Exact(token=0.3)  # type: ignore[assignment]
    assert machine.policy.choose(proposals, 4, with_prompts=True) != {}


def test_rows_with_drafts_are_of_few_sizes() -> None:
    machine = Machine(tiles, 0.7)
    machine.run(5, 500)
    assert {rows for rows in machine.rows if rows != 5} <= set(ROWS)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 20), st.sampled_from([0, 1, 1000, MS, 10**12]))
def test_whatever_is_measured_only_what_was_proposed_is_chosen(seed: int, most: int, longest: int) -> None:
    """Also with clocks that stand still, steps as long as hours, and sequences that come and go."""
    rng, policy = random.Random(seed), Speculation(most, StepTimeModel())
    chosen: dict[int, list[int]] = {}
    for _ in range(150):
        sequences = rng.sample(range(40), rng.randrange(1, 40))
        rows = len(sequences) + sum(map(len, chosen.values()))
        rests = policy.rests()
        policy.took(len(sequences), rows, rng.randrange(rows + 1), rng.randrange(longest + 1))
        if rests:
            chosen = {}
            continue
        for seq_id in sequences:
            policy.heed(seq_id, [rng.randrange(3) for _ in range(rng.randrange(4))])
        policy.forget(rng.randrange(40))
        chosen = {}
        if policy.asks():
            asked = rng.sample(sequences, rng.randrange(len(sequences) + 1))
            drafts = {seq_id: [rng.randrange(3) for _ in range(rng.randrange(1, 30))] for seq_id in asked}
            proposals = {seq_id: Proposal(each, rng.randrange(1, 30)) for seq_id, each in drafts.items()}
            chosen = policy.choose(proposals, len(sequences), rng.random() < 0.3)
            policy.spent(rng.randrange(longest + 1))
            for seq_id, each in chosen.items():
                assert 0 < len(each) <= most and each == drafts[seq_id][: len(each)]


def test_longer_matches_and_a_sequence_s_own_hits_count() -> None:
    rates = HitRates()
    for number in range(400):
        rates.note(1, 2, number % 4 == 0)
        rates.note(2, 20, number % 8 != 0)
    assert rates.chances(3, 2, 1)[0] < 0.4 < 0.8 < rates.chances(3, 20, 1)[0]
    assert rates.chances(1, 2, 1)[0] < rates.chances(2, 2, 1)[0]
    chances = rates.chances(2, 20, 15)
    assert chances == sorted(chances, reverse=True) and len(chances) > 5
    rates.forget(1)
    assert rates.chances(1, 2, 1) == rates.chances(3, 2, 1)


def test_times_between_sizes_and_beyond() -> None:
    times = RowTimes()
    for rows, ms in ((1, 10), (9, 18), (1, 10), (9, 18)):
        times.observe(rows, ms * MS)
    assert times.expected_ns(5, 0.0) == 14 * MS
    assert times.expected_ns(12, 2.0 * MS) == 21 * MS, "as between the largest two"
    assert times.expected_ns(12, 0.5 * MS) == 19.5 * MS, "but at most what a row is taken to cost"
    assert times.known_ns(5) is None
    assert times.observe(1, 1000 * MS) == 20 * MS
    times.observe(4, 0)
    times.observe(4, 40 * MS)
    times.observe(9, 18 * MS)
    assert times.known_ns(4) == times.known_ns(9), "fewer rows cannot take longer"


def test_a_machine_that_becomes_slower_and_quicker_drafts_as_one_that_does_not() -> None:
    def won(changes: float) -> float:
        return sum(Machine(tiles, 0.5, changes=changes, seed=seed).run(4, 600) for seed in range(4)) / 4

    assert won(1 / 40) > 0.93 * won(0.0) > 1.5


def test_a_proposal_is_compared_up_to_the_first_that_differs() -> None:
    policy = Speculation(4, StepTimeModel())
    policy.asks()
    policy.choose({1: Proposal([5, 6, 7], 2)}, 1)
    before = policy._rates.chances(1, 2, 3)
    policy.heed(1, [5, 9, 7])
    after = policy._rates.chances(1, 2, 3)
    assert policy._rates._own[1][1] == pytest.approx(1.95), "of three drafts, two were judged"
    assert after != before


def test_a_config_of_json() -> None:
    assert SpeculativeConfig.of('{"method": "ngram"}') == SpeculativeConfig()
    assert SpeculativeConfig.of({"model": "[ngram]", "num_speculative_tokens": 3}).num_speculative_tokens == 3
    assert SpeculativeConfig.of('{"prompt_lookup_min": 3, "prompt_lookup_max": 5}').prompt_lookup_max == 5
    draft = SpeculativeConfig(method="draft_model", model="headway/story-draft")
    assert SpeculativeConfig.of({"model": "headway/story-draft"}) == draft
    assert SpeculativeConfig.of('{"method": "draft_model", "model": "headway/story-draft"}') == draft


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ("3", "is not a JSON object"),
        ('{"metod": "ngram"}', "'metod' is not known; its keys are method, model, num_speculative_tokens, "),
        ('{"method": "medusa"}', "method is 'medusa'; it must be one of ngram, draft_model, mtp, eagle3"),
        ('{"method": "eagle3"}', "model is None; method 'eagle3' needs the name of a head that was trained"),
        ('{"method": "draft_model"}', "model is None; method 'draft_model' needs the name of a small model"),
        ('{"method": "draft_model", "model": " "}', "model is ' '; method 'draft_model' needs the name"),
        ('{"model": 3}', "model is 3; method 'draft_model' needs the name"),
        ('{"method": "ngram", "model": "x"}', "model is 'x', but method 'ngram' has none"),
        ('{"method": "mtp", "model": "x"}', "model is 'x', but method 'mtp' has none"),
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens is 0; it must be a whole number from 1 to 64"),
        ('{"num_speculative_tokens": 65}', "num_speculative_tokens is 65"),
        ('{"num_speculative_tokens": true}', "num_speculative_tokens is True"),
        ('{"num_speculative_tokens": 2.5}', "num_speculative_tokens is 2.5"),
        ('{"prompt_lookup_min": 0}', "prompt_lookup_min is 0"),
        ('{"prompt_lookup_max": 100}', "prompt_lookup_max is 100"),
        ('{"prompt_lookup_max": 1}', "prompt_lookup_min is 2, more than prompt_lookup_max (1)"),
    ],
)
def test_what_is_wrong_with_a_config_is_named(given: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        SpeculativeConfig.of(given)
    assert "\n" not in str(error.value)
