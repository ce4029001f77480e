"""The kernel that draws beside the sampler's tensors: the same tokens by seed, and memory."""

from __future__ import annotations

import math
import random

import pytest
import torch

from headway.engine.sampler import Sampler
from headway.kernels.cpu.kernels import CpuKernels
from headway.kernels.reference import ReferenceKernels
from headway.policy.cache.sizing import sampling_bytes
from headway.policy.step.plan import SequenceState
from tests.engine.sampling_oracle import logits_of, make_sequence
from tests.engine.test_penalties import crowd

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    return CpuKernels()


def mixed(chance: random.Random, rows: int) -> list[SequenceState]:
    """Any parameters together."""

    def sometimes(value: object, *others: object) -> object:
        return chance.choice(others) if chance.random() < 0.4 else value

    return [
        make_sequence(
            chance.choices(range(9), k=3),
            chance.choices(range(9), k=chance.randrange(6)),
            seed=chance.getrandbits(62),
            stop_ids=(1, 2),
            temperature=chance.choice([0.0, 0.2, 0.7, 1.0, 1.0, 2.0]),
            top_k=sometimes(0, 1, 7, 50, 400, 5000, 10**6),
            top_p=sometimes(1.0, 0.001, 0.1, 0.5, 0.9, 0.95, 0.999),
            min_p=sometimes(0.0, 0.01, 0.1, 1.0),
            repetition_penalty=sometimes(1.0, 0.6, 1.3),
            presence_penalty=sometimes(0.0, -1.0, 0.7),
            frequency_penalty=sometimes(0.0, -0.3, 1.1),
            logit_bias=sometimes({}, {3: 5.5, 4: -100.0}),
            min_tokens=sometimes(0, 3, 6),
            logprobs=sometimes(None, 0, 3),
        )
        for _ in range(rows)
    ]


@pytest.mark.covering(1)
@pytest.mark.parametrize("vocab_size", [129, 2600, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_the_same_tokens_by_seed(kernels: CpuKernels, vocab_size: int, dtype: torch.dtype, scale: float) -> None:
    """But one that may fall within rounding of an edge between two."""
    chance, rows, different = random.Random(vocab_size), 12, 0
    for step in range(8):
        logits, sequences = logits_of(rows, vocab_size, step, scale).to(dtype), mixed(chance, rows)
        tensors = Sampler(vocab_size, CPU).sample(logits, sequences)
        drawn = Sampler(vocab_size, CPU, kernels.draw).sample(logits, sequences)
        for row in range(rows):
            if drawn.token_ids[row] != tensors.token_ids[row]:
                different += 1
            else:
                assert drawn.logprobs[row] == tensors.logprobs[row]
    assert different <= 1


def test_min_p_keeps_the_same_tokens_to_the_bit(kernels: CpuKernels) -> None:
    """A token whose probability is the limit itself, rounded, and those beside it."""
    for seed in range(40):
        temperature, min_p = random.Random(seed).uniform(0.3, 3.0), random.Random(seed).uniform(0.01, 0.9)
        edge = torch.tensor(math.log(min_p) * temperature)
        around = [edge, *(torch.nextafter(edge, torch.tensor(way)) for way in (-9.0, 9.0))]
        logits = torch.tensor([[0.0, *around]]).expand(64, -1).contiguous()
        sequences = [make_sequence(seed=row, temperature=temperature, min_p=min_p) for row in range(64)]
        expected = Sampler(4, CPU).sample(logits, sequences)
        assert Sampler(4, CPU, kernels.draw).sample(logits, sequences).token_ids == expected.token_ids


def test_memory_is_as_planned() -> None:
    vocab_size = 40_000
    kernels = CpuKernels()
    sampler = Sampler(vocab_size, CPU, kernels.draw)
    logits = torch.zeros(64, vocab_size, dtype=torch.bfloat16)
    live = crowd(64, vocab_size, 3000)
    for sequence, token in zip(live, sampler.sample(logits, live).token_ids, strict=True):
        sequence.tokens.append(token)
    assert sampler.held_bytes + len(kernels._drawing) <= sampling_bytes(64, vocab_size, 3100)
    for sequence in live:
        sampler.forget(sequence)
    assert sampler.held_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_the_likeliest_token_and_its_probability_are_those_of_tensors(
    kernels: CpuKernels, dtype: torch.dtype, rows: int
) -> None:
    logits = (torch.randn(rows, 700, generator=torch.Generator().manual_seed(rows)) * 3).to(dtype)
    for size in (700, 699, 1):
        found, tokens = kernels.likeliest(logits, size)
        expected, likeliest = ReferenceKernels().likeliest(logits, size)
        assert tokens == logits[:, :size].argmax(-1).tolist() == likeliest
        assert found == pytest.approx(expected, rel=1e-5)
    logits[0, 3] = math.nan
    found, tokens = kernels.likeliest(logits, 700)
    assert not found[0] > 0.0 and 0 <= tokens[0] < 700
    assert found[1:] == pytest.approx(expected_of(logits)[1:], rel=1e-5)


def expected_of(logits: torch.Tensor) -> list[float]:
    return logits.float().softmax(-1).amax(-1).tolist()  # type: ignore[no-any-return]
