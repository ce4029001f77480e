"""The sampler's parts: random numbers, searches, and log-probabilities of prompts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headway.engine import draws, tensor_sampling
from headway.engine.logprobs import prompt_logprobs
from headway.engine.sampler import Sampler
from tests.engine.sampling_oracle import make_sequence

MASK = 2**64 - 1


def splitmix(state: int) -> int:
    """One output of SplitMix64, in Python integers."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 2**70 + 5])
def test_uniforms_are_those_of_the_published_generator(seed: int) -> None:
    golden = 0x9E3779B97F4A7C15
    start = splitmix((seed + golden) & MASK)
    positions = np.array([0, 1, 2, 131_071])
    got = tensor_sampling.uniforms(tensor_sampling.streams_of([seed] * 4), positions)
    for value, position in zip(got, positions.tolist(), strict=True):
        assert value == (splitmix((start + (position + 1) * golden) & MASK) >> 12) / 2**52


def test_the_generator_is_splitmix64() -> None:
    """First outputs of SplitMix64 from state 1234567, as in Vigna's reference program."""
    with np.errstate(over="ignore"):
        states = np.array([1234567], np.uint64) + np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert tensor_sampling._mix(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("across", ["seeds", "positions"])
def test_uniforms_are_uniform_and_unrelated(across: str) -> None:
    many = np.arange(50_000)
    if across == "seeds":
        values = tensor_sampling.uniforms(tensor_sampling.streams_of(many.tolist()), np.full(50_000, 17))
    else:
        values = tensor_sampling.uniforms(tensor_sampling.streams_of([3] * 50_000), many)
    assert values.min() >= 0.0
    assert values.max() < 1.0
    counts = np.histogram(values, 100, (0.0, 1.0))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 99 + 4 * math.sqrt(2 * 99)
    pairs = np.histogram2d(values[:-1], values[1:], 10, ((0, 1), (0, 1)))[0]
    assert ((pairs - 499.99) ** 2 / 499.99).sum() < 99 + 4 * math.sqrt(2 * 99)


def test_locate_never_leaves_the_weighted_tokens() -> None:
    """Weights of very different size, and shares at the very ends of the range."""
    weights = torch.zeros(6, 512)
    weights[0, 300] = 1e-38
    weights[1, [0, 511]] = torch.tensor([1.0, 1e-30])
    weights[2, [5, 130]] = torch.tensor([1e-30, 1.0])
    weights[3] = 1 / 3
    weights[4, 128:256] = 1.1
    weights[5, [127, 128]] = 0.1
    for share in (0.0, 1e-300, 0.3, 0.5, 1 - 2**-52):
        found = draws.locate(weights, torch.full((6,), share, dtype=torch.float64))
        assert (weights.gather(1, found.unsqueeze(1)) > 0).all(), share
    assert draws.locate(weights, torch.zeros(6).double()).tolist() == [300, 0, 5, 0, 128, 127]
    assert draws.locate(weights, torch.full((6,), draws.ALMOST_ONE, dtype=torch.float64))[3:].tolist() == [
        511,
        255,
        128,
    ]


@pytest.mark.parametrize("count", [1, 5, 64])
@pytest.mark.parametrize("size", [256, 65_536])
def test_likeliest_finds_the_greatest(count: int, size: int) -> None:
    x = torch.randn(4, size, generator=torch.Generator().manual_seed(0))
    x[3] = -x[3].abs().sort().values  # falling: all in the first block
    values, ids = draws.likeliest(x, draws.block_peaks(x), count)
    assert torch.equal(values, x.sort(-1, descending=True).values[:, :count])
    assert torch.equal(values, x.gather(1, ids))


@pytest.mark.parametrize("length", [0, 1, 16, 17, 50])
def test_prompt_logprobs(length: int) -> None:
    logits = torch.randn(length, 300, generator=torch.Generator().manual_seed(1)).bfloat16()
    targets = torch.randint(300, (length,), generator=torch.Generator().manual_seed(2))
    exact = logits.double().log_softmax(-1)
    entries = prompt_logprobs(logits, targets, 4).unpack()
    assert len(entries) == length
    for row, entry in enumerate(entries):
        token = int(targets[row])
        best = sorted(range(300), key=lambda token: (-exact[row, token].item(), token))[:4]
        assert entry.logprob == pytest.approx(exact[row, token].item(), abs=1e-5)
        assert entry.rank == 1 + int((exact[row] > exact[row, token]).sum())
        assert entry.top_ids == best
        assert entry.top_logprobs == pytest.approx(exact[row, best].tolist(), abs=1e-5)
    assert all(entry.top_ids == [] for entry in prompt_logprobs(logits, targets, 0).unpack())


def test_prompt_logprobs_are_those_of_sampling() -> None:
    """The same row of logits says the same of a token as a prompt token and as a generated one."""
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(4))
    sampled = Sampler(200, torch.device("cpu")).sample(logits, [make_sequence(seed=s, logprobs=3) for s in range(3)])
    assert prompt_logprobs(logits, torch.tensor(sampled.token_ids), 3).unpack() == sampled.logprobs


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [8192, 151_936])
def test_on_a_gpu_one_wait_a_step_and_the_same_tokens(vocab_size: int) -> None:
    """Every way of sampling in one batch; the host waits once, to read; tokens are those of the CPU."""
    device = torch.device("cuda")
    ways: list[dict[str, object]] = [
        {"temperature": 0.0},
        {},
        {"top_k": 40, "top_p": 0.9},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"logit_bias": {5: 3.0}, "min_tokens": 99, "max_tokens": 200, "logprobs": 5},
    ]
    sequences = [make_sequence([1, 2, 3], seed=row, stop_ids=(7,), **way) for row, way in enumerate(ways * 4)]
    logits = torch.randn(len(sequences), vocab_size, generator=torch.Generator().manual_seed(5)) * 6
    on_device, on_host = logits.bfloat16().to(device), logits.bfloat16()
    sampler, reference = Sampler(vocab_size, device), Sampler(vocab_size, torch.device("cpu"))
    same = 0
    for _ in range(5):
        tokens = sampler.sample(on_device, sequences).token_ids
        same += sum(a == b for a, b in zip(tokens, reference.sample(on_host, sequences).token_ids, strict=True))
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.tokens.append(token)
    assert same >= 5 * len(sequences) - 1  # a draw may fall within rounding of a boundary
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchronizing") as waits:
            sampler.sample(on_device, sequences)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 1, [str(wait.message) for wait in waits]
