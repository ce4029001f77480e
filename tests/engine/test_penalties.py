"""What the sampler keeps of sequences between steps: penalties, lists of tokens, memory; and that it lets them go."""

from __future__ import annotations

import random

import pytest
import torch

from headway.engine import penalties
from headway.engine.sampler import Sampler
from headway.policy.cache.sizing import sampling_bytes
from headway.policy.step.plan import SequenceState
from tests.engine.sampling_oracle import acceptable, logits_of, make_sequence

CPU = torch.device("cpu")


@pytest.mark.parametrize("steps_of_two", [False, True])
def test_penalties_follow_a_growing_output(steps_of_two: bool) -> None:
    """Over a hundred steps of a changing batch."""
    sampler, vocab_size = Sampler(2000, CPU), 2000
    chance = random.Random(3)
    live: list[SequenceState] = []
    for step in range(150):
        if len(live) < 9 and step % 3 == 0:
            prompt = [chance.randrange(vocab_size) for _ in range(chance.randint(1, 90))]
            params = {"repetition_penalty": 1.2} if step % 2 else {"frequency_penalty": 0.4, "presence_penalty": 0.3}
            live.append(make_sequence(prompt, seed=step, temperature=0.7, **params))
        if step % 5 == 4:
            sampler.forget(live.pop(chance.randrange(len(live))))
        logits = logits_of(len(live), vocab_size, seed=step, scale=1.0)
        tokens = sampler.sample(logits, live).token_ids
        for row, (sequence, token) in enumerate(zip(live, tokens, strict=True)):
            if step % 10 == 0:
                assert token in acceptable(logits[row].numpy(), sequence)
            sequence.tokens.append(token)
            if steps_of_two:
                sequence.tokens.append(token)  # two tokens accepted in a step, and the same one
    assert len(sampler._penalties) == sum(1 for sequence in live if sequence.tokens)


def test_forgotten_sequences_leave_nothing_behind() -> None:
    sampler = Sampler(50, CPU)
    for seed in range(200):
        sequence = make_sequence([1, 2], seed=seed, presence_penalty=1.0)
        sampler.sample(torch.zeros(1, 50), [sequence])
        sampler.forget(sequence)
        sampler.forget(sequence)
    assert len(sampler._penalties) == 0
    assert sampler._penalties.nbytes == 0
    assert sampler._batch is None


def crowd(size: int, vocab_size: int, distinct: int) -> list[SequenceState]:
    """Sequences that make the sampler keep all that it can: penalties over long prompts, biases, stop tokens."""
    bias = dict.fromkeys(range(100), 1.0)
    prompts = [list(range(seed, seed + distinct)) for seed in range(size)]
    return [
        make_sequence(prompt, seed=seed, logit_bias=bias, repetition_penalty=1.1, min_tokens=5, stop_ids=(1, 2))
        for seed, prompt in enumerate(prompts)
    ]


def test_memory_of_a_crowd_is_as_planned_and_given_back() -> None:
    vocab_size = 40_000
    sampler = Sampler(vocab_size, CPU)
    logits = torch.zeros(64, vocab_size, dtype=torch.bfloat16)
    live = crowd(64, vocab_size, 3000)
    for sequence, token in zip(live, sampler.sample(logits, live).token_ids, strict=True):
        sequence.tokens.append(token)
    held = sampler.held_bytes
    assert 64 * (vocab_size * 4 + 3000 * 12) <= held
    assert held <= sampling_bytes(64, vocab_size, 3100)
    for sequence in live[1:]:
        sampler.forget(sequence)
    for _ in range(300):
        sampler.sample(logits[:1], live[:1])
    assert sampler.held_bytes < held / 10, "one of the crowd is left"
    sampler.forget(live[0])
    assert sampler.held_bytes < 4 << 20
    assert len(sampler._penalties) == len(sampler._edits) == len(sampler._known) == 0


@pytest.mark.parametrize("together", [1, 150, 1 << 20])
def test_a_crowd_is_penalised_as_defined_however_it_is_parted(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when most of it leaves, in the middle of a batch."""
    monkeypatch.setattr(penalties, "ENTRIES_AT_A_TIME", together)
    sampler, vocab_size = Sampler(400, CPU), 400
    params = {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.2}
    live = [make_sequence(list(range(seed, seed + 62)), seed=seed, temperature=0.8, **params) for seed in range(33)]
    for step in range(12):
        logits = logits_of(len(live), vocab_size, seed=step, scale=1.0)
        for row, (sequence, token) in enumerate(zip(live, sampler.sample(logits, live).token_ids, strict=True)):
            if row % 5 == 0:
                assert token in acceptable(logits[row].numpy(), sequence)
            sequence.tokens.append(token)
        if step == 7:
            for sequence in live[:-3]:
                sampler.forget(sequence)
            del live[:-3]


def test_long_lists_of_tokens_are_read_once() -> None:
    sampler = Sampler(300, CPU)
    (first, *rest) = crowd(4, 300, 10)
    sampler.sample(torch.zeros(4, 300), [first, *rest])
    first.params.logit_bias.clear()
    first.params.logit_bias[999] = 1.0  # would be out of the vocabulary, if it were read again
    sampler.forget(rest.pop())
    sampler.sample(torch.zeros(3, 300), [first, *rest])
