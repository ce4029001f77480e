"""How far a draft model drafts, on simulated machines: nearly as far as is best, and not at all where it loses time."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.policy.step.draft_measures import Confidences
from headway.policy.step.drafting import BESIDE, CAUGHT_UP_AT_ONCE, Drafting
from headway.policy.step.speculation import Proposal, Speculation
from headway.policy.step.step_time import StepTimeModel
from tests.policy.test_speculation import MOST, MS, compute_bound, memory_bound, tiles


class DraftingMachine:
    """Sequences for which a model drafts, whose drafts are right by chance.

    Args:
        cost: milliseconds of a step of so many rows.
        chance: that a draft is right where those before it are; half of the drafts are surer than that, half less sure.
        pass_ms: milliseconds of a pass of the draft model.
        token_ms: milliseconds of a token of a prompt in the draft model.
        prompt, output: tokens of each sequence.
        changes: the share of steps after which the machine becomes 1.6 times as slow, or as quick as before.
        held: the share of steps and passes that are held up, and take 1.8 times as long.
    """

    def __init__(
        self,
        cost: Callable[[int], float],
        chance: float,
        pass_ms: float,
        token_ms: float = 0.01,
        prompt: int = 0,
        output: int = 200,
        changes: float = 0.0,
        held: float = 0.0,
        seed: int = 3,
    ) -> None:
        self.cost, self.chance, self.pass_ms, self.token_ms = cost, chance, pass_ms, token_ms
        self.prompt, self.output = prompt, output
        self.changes, self.held, self.slow = changes, held, False
        self.rng, self.others = random.Random(seed), random.Random(100 + seed)
        self.drafting = Drafting(MOST)
        self.policy = Speculation(MOST, StepTimeModel(), self.drafting)
        for size in (1, 4, 16):
            for _ in range(4):
                self.drafting.passed(size, int(self.pass_of(size) * MS))
        self.drafting.caught_up(64, int(64 * token_ms * MS))
        self.drafting.take_passes_ns()
        self.ms, self.tokens, self.passes, self.advanced = 0.0, 0, 0, 0
        self.lacks: dict[int, int] = {}
        self.lens: dict[int, int] = {}
        self.right: dict[int, list[bool]] = {}

    def pass_of(self, sequences: int) -> float:
        return self.pass_ms * (1 + 0.02 * sequences)

    def measured(self, ms: float) -> int:
        """The nanoseconds that the policy is told of; what is won is counted without the machine's changes."""
        return int(ms * MS * (1.6 if self.slow else 1.0) * (1.8 if self.others.random() < self.held else 1.0))

    def run(self, sequences: int, steps: int) -> float:
        """Tokens per millisecond of these steps, as a multiple of those without drafts."""
        rng, policy, ms, tokens = self.rng, self.policy, self.ms, self.tokens
        numbers = list(range(sequences))
        self.lacks, self.lens = dict.fromkeys(numbers, 1 + self.prompt), dict.fromkeys(numbers, 1)
        proposals: dict[int, Proposal] = {}
        chosen: dict[int, list[int]] = {}
        for _ in range(steps):
            drawn = {number: self.draw(number, proposals.get(number), chosen.get(number, [])) for number in numbers}
            new = sum(map(len, drawn.values()))
            rows = sequences + sum(map(len, chosen.values()))
            took = self.cost(rows) * rng.uniform(0.9, 1.1)
            self.ms, self.tokens = self.ms + took, self.tokens + new
            self.end(numbers)
            proposals, chosen = {}, {}
            rests = policy.rests()
            policy.took(sequences, rows, new, self.measured(took))
            self.slow ^= self.others.random() < self.changes
            if rests:
                continue
            for number, each in drawn.items():
                policy.heed(number, each)
            if policy.asks():
                if policy.opens(sequences, with_prompts=False) is not None:
                    proposals = self.draft({number: self.lacks[number] for number in numbers})
                policy.spent(20_000)
                self.ms += 0.02
                chosen = policy.choose(proposals, sequences)
        return (self.tokens - tokens) / (self.ms - ms) / (sequences / self.cost(sequences))

    def draw(self, number: int, proposal: Proposal | None, tried: list[int]) -> list[int]:
        drafts = [] if proposal is None else proposal.token_ids
        hits = next(
            (at for at, right in enumerate(self.right.get(number, [])[: len(drafts)]) if not right), len(drafts)
        )
        accepted = min(len(tried), hits)
        drawn = drafts[:accepted] + [drafts[accepted] if accepted < hits else -1]
        self.lens[number] += len(drawn)
        if drafts:
            self.lacks[number] = 1 if accepted < len(drafts) else 2
        else:
            self.lacks[number] += 1
        return drawn

    def end(self, numbers: list[int]) -> None:
        """End sequences that are long enough; another begins in the place of each."""
        for at, number in enumerate(numbers):
            if self.lens[number] > self.output:
                self.policy.forget(number, self.lens.pop(number))
                numbers[at] = number = max(self.lacks) + 1
                self.lacks[number], self.lens[number] = 1 + self.prompt, 1

    def draft(self, lacks: dict[int, int]) -> dict[int, Proposal]:
        rng, drafting = self.rng, self.drafting
        advance, chosen = drafting.begin(lacks, self.lens)
        assert sum(advance.values()) <= CAUGHT_UP_AT_ONCE
        for number, count in advance.items():
            assert 0 < count < self.lacks[number]
            self.lacks[number] -= count
            self.ms, self.advanced = self.ms + count * self.token_ms, self.advanced + count
            drafting.caught_up(count, max(1, int(count * self.token_ms * MS)))
        tokens: dict[int, list[int]] = {}
        confidences: dict[int, list[float]] = {}
        self.right = {}
        while chosen:
            assert all(self.lacks[number] <= BESIDE for number in chosen)
            took = self.pass_of(len(chosen)) * rng.uniform(0.9, 1.1)
            self.ms, self.passes = self.ms + took, self.passes + 1
            drafting.passed(sum(1 if each in tokens else self.lacks[each] for each in chosen), self.measured(took))
            for number in chosen:
                share = self.chance * rng.choice((0.8, 1.2))
                confidence = min(share, 0.999)
                tokens.setdefault(number, []).append(5)
                confidences.setdefault(number, []).append(confidence)
                self.right.setdefault(number, []).append(rng.random() < confidence)
            chosen = drafting.goes_on({number: confidences[number][-1] for number in chosen})
        return {number: Proposal(each, 0, confidences[number]) for number, each in tokens.items()}

    def best(self, sequences: int) -> float:
        """What the best number of drafts for all steps gives."""
        cost, count = self.cost, sequences

        def rate(drafts: int) -> float:
            tokens = sum(self.chance**at for at in range(drafts + 1))
            return count * tokens / (cost(count * (drafts + 1)) + drafts * self.pass_of(count))

        return max(rate(drafts) for drafts in range(MOST + 1)) / rate(0)


@pytest.mark.covering(2)
@pytest.mark.parametrize("cost", [tiles, compute_bound, memory_bound])
@pytest.mark.parametrize("chance", [0.6, 0.8])
@pytest.mark.parametrize("sequences", [1, 4])
@pytest.mark.parametrize("share", [0.05, 0.2])
def test_it_wins_nearly_what_can_be_won(
    cost: Callable[[int], float], chance: float, sequences: int, share: float
) -> None:
    machine = DraftingMachine(cost, chance, share * cost(1))
    machine.run(sequences, 400)
    gained, best = machine.run(sequences, 600), machine.best(sequences)
    assert gained >= (0.85 * best if best > 1.3 else 0.98)


@pytest.mark.covering(2)
@pytest.mark.parametrize("cost", [tiles, compute_bound, memory_bound])
@pytest.mark.parametrize("chance", [0.0, 0.3])
@pytest.mark.parametrize("sequences", [1, 4, 16])
@pytest.mark.parametrize("share", [0.05, 0.5, 3.0])
@pytest.mark.parametrize("prompt", [0, 2000])
def test_it_loses_no_more_than_two_in_a_hundred(
    cost: Callable[[int], float], chance: float, sequences: int, share: float, prompt: int
) -> None:
    """Also from the first step on, with a draft that costs more than the model, and where prompts are long."""
    machine = DraftingMachine(cost, chance, share * cost(1), token_ms=0.002 * cost(1), prompt=prompt)
    assert machine.run(sequences, 1000) >= 0.98


def test_a_poor_model_is_found_out_and_a_better_text_too() -> None:
    machine = DraftingMachine(memory_bound, 0.8, 1.0)
    assert machine.run(1, 400) > 1.8 and not machine.drafting.is_poor
    machine.chance = 0.0
    assert machine.run(1, 1500) >= 0.98
    assert machine.drafting.is_poor
    passes = machine.passes
    machine.run(1, 1000)
    assert machine.passes - passes < 60, "it is only tried now and then"
    machine.chance = 0.95
    machine.run(1, 5_000)
    assert not machine.drafting.is_poor
    assert machine.run(1, 300) > 1.8


def test_a_machine_that_others_use_drafts_nearly_as_far() -> None:
    """No size of steps looks bad for long because it was measured while the machine was slow."""

    def cost(rows: int) -> float:
        return 45 + 0.6 * min(rows, 16) + 1.2 * max(0, rows - 16)

    def gain(seed: int, changes: float, held: float) -> float:
        machine = DraftingMachine(cost, 0.9, 3.2, output=128, changes=changes, held=held, seed=seed)
        machine.policy.limit(8)
        machine.run(1, 240)
        return machine.run(4, 240)

    assert min(gain(seed, 1 / 40, 0.03) for seed in range(8)) >= 0.9 * gain(0, 0.0, 0.0)


def test_a_long_prompt_is_computed_where_the_answer_earns_it() -> None:
    """It costs the time of twenty steps; short answers would never earn that."""
    long, short = (
        DraftingMachine(memory_bound, 0.9, 1.0, token_ms=0.2, prompt=2000, output=output) for output in (4000, 8)
    )
    long.drafting.ended(4000)
    short.drafting.ended(8)
    assert long.run(1, 1000) > 2.5
    assert long.advanced >= 2000
    assert short.run(1, 1000) >= 0.98
    assert short.advanced < 1000


def test_passes_fit_into_the_slack() -> None:
    drafting = Drafting(MOST)
    for _ in range(3):
        drafting.passed(1, 2 * MS)

    def drafted(slack_ms: float) -> int:
        drafting.open(1, lambda rows: memory_bound(rows) * MS, 64, slack_ms * MS)
        passes, (_, chosen) = 0, drafting.begin({1: 1}, {1: 1})
        while chosen:
            passes, chosen = passes + 1, drafting.goes_on({1: 0.999})
        return passes

    assert [drafted(slack) for slack in (0.0, 1.9, 2.1, 4.1, 9.0)] == [0, 0, 1, 2, 4]


@pytest.mark.parametrize("confidence", [0.3, 0.7, 0.9, 0.98])
@pytest.mark.parametrize("pass_ms", [0.5, 2.0, 6.0])
@pytest.mark.parametrize("sequences", [1, 3])
def test_a_chain_is_as_long_as_passes_that_are_decided_one_by_one(
    confidence: float, pass_ms: float, sequences: int
) -> None:
    counts, all_of = [], dict.fromkeys(range(sequences), 1)
    for in_chains in (False, True):
        drafting = Drafting(MOST)
        for _ in range(3):
            drafting.passed(sequences, int(pass_ms * MS))
        drafting.open(sequences, lambda rows: memory_bound(rows) * MS, 12 * sequences, 40.0 * MS)
        going = drafting.begin(all_of, all_of)[1]
        passes = 0
        while going:
            drafts, (bounds, chances) = 1, drafting.hits.by_confidence
            if in_chains:
                most, cost, each, worths = drafting.chain(going)
                chance = chances[sum(bound <= confidence for bound in bounds)]
                while drafts < min(most, 4) and worths[0] * chance**drafts > max(each, cost / sequences):
                    drafts += 1
                drafting.chained(dict.fromkeys(going, [confidence] * drafts), int(drafts * pass_ms * MS))
            passes, going = passes + drafts, drafting.goes_on(dict.fromkeys(going, confidence))
        counts.append(passes)
    assert counts[0] == counts[1]
    assert counts[0] <= 11, "as many rows as there may be"


def test_a_model_s_probabilities_are_corrected_by_what_is_drawn() -> None:
    hits = Confidences()
    assert hits.chance(0.95) == pytest.approx(0.935)
    for number in range(400):
        hits.note(1, 0.95, number % 2 == 0)
        hits.note(2, 0.1, number % 20 == 0)
    assert hits.chance(0.95) == pytest.approx(0.5, abs=0.02)
    assert hits.chance(0.1) == pytest.approx(0.05, abs=0.05)
    assert hits.usual(2) < 0.1 < 0.4 < hits.usual(1)
    assert hits.usual(3) == pytest.approx(hits.mean)
    assert hits.chances([0.95, 0.95, 0.1, 0.95]) == pytest.approx([0.5, 0.25], abs=0.03)
    hits.forget(1)
    assert hits.usual(1) == hits.usual(3)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 20), st.sampled_from([0, 1, 1000, MS, 10**12]))
def test_whatever_is_measured_only_what_was_asked_is_chosen(seed: int, most: int, longest: int) -> None:
    rng, drafting = random.Random(seed), Drafting(most)
    for _ in range(100):
        decoding = rng.randrange(1, 30)
        step_ns = float(rng.randrange(1, longest + 2))
        drafting.open(decoding, lambda rows, ns=step_ns: ns * rows, 4 * decoding, rng.choice([float("inf"), step_ns]))
        lacks = {
            number: rng.choice([1, 2, 50, 3000]) for number in rng.sample(range(60), rng.randrange(1, decoding + 1))
        }
        advance, chosen = drafting.begin(lacks, dict.fromkeys(lacks, rng.randrange(1, 500)))
        assert all(0 < count < lacks[number] for number, count in advance.items())
        assert all(lacks[number] - advance.get(number, 0) <= BESIDE for number in chosen)
        if advance:
            drafting.caught_up(sum(advance.values()), rng.randrange(longest + 1))
        passes = 0
        while chosen:
            drafting.passed(len(chosen), rng.randrange(longest + 1))
            going = drafting.goes_on({number: rng.random() for number in chosen})
            assert set(going) <= set(chosen)
            chosen, passes = going, passes + 1
        assert passes <= most
        for number in lacks:
            drafting.hits.note(number, rng.random(), rng.random() < 0.5)
        drafting.hits.forget(rng.randrange(60))
        drafting.ended(rng.randrange(500))
