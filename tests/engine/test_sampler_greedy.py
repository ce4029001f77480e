"""Greedy batches, which are sampled by the kernels' own search for the likeliest token."""

from __future__ import annotations

import math

import torch

from headway.engine.sampler import BAD_TOKEN, Sampler
from headway.kernels.cpu import CpuKernels
from tests.engine.test_sampler import CPU, logits_of, make_sequence


def test_a_greedy_batch_is_sampled_alike_with_and_without_kernels() -> None:
    """With ties and with rows that are not numbers; one that wants log-probabilities makes it a search over tensors."""
    logits = logits_of(9, 700, 5, step=0.5)
    logits[2, 3], logits[4, 7], logits[6] = math.nan, math.inf, -math.inf
    greedy = [make_sequence(temperature=0.0) for _ in range(9)]
    asking = [*greedy[:8], make_sequence(temperature=0.0, logprobs=2)]
    for sequences in (greedy, asking):
        for dtype in (torch.float32, torch.bfloat16):
            plain = Sampler(700, CPU).sample(logits.to(dtype), sequences)
            short = Sampler(700, CPU, CpuKernels().most_likely).sample(logits.to(dtype), sequences)
            assert short.token_ids == plain.token_ids
            assert [row for row, token in enumerate(short.token_ids) if token == BAD_TOKEN] == [2, 4, 6]
            assert [entry is None for entry in short.logprobs] == [entry is None for entry in plain.logprobs]
