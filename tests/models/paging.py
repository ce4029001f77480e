"""Drives a decoder over a paged cache with shuffled blocks, a chosen number of tokens a step for each sequence."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headway.engine.memory import zero_caches
from headway.kernels.interface import Span, StepGeometry
from headway.models.decoder import Decoder

GARBAGE = 3e4  # finite in float16


@dataclass
class PagedSequence:
    tokens: list[int]
    block_table: list[int]
    num_computed: int = 0
    logits: list[Tensor] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.num_computed


class PagedModel:
    """A decoder with its caches, full of a huge value so that a read of a slot never written shows."""

    def __init__(self, decoder: Decoder, prompts: list[list[int]], block_size: int = 4, seed: int = 0) -> None:
        needed = [-(-len(prompt) // block_size) for prompt in prompts]
        blocks = list(range(sum(needed) + 3))
        random.Random(seed).shuffle(blocks)
        self.decoder = decoder
        self.block_size = block_size
        self.sequences = [
            PagedSequence(p, [blocks.pop() for _ in range(n)]) for p, n in zip(prompts, needed, strict=True)
        ]
        self.caches = zero_caches(
            decoder.config.caches, sum(needed) + 3, block_size, decoder.dtype, decoder.device, len(prompts) + 1
        )
        for tensor in itertools.chain.from_iterable(cache.tensors for cache in self.caches):
            tensor.fill_(GARBAGE)

    def step(self, work: list[tuple[PagedSequence, int]]) -> None:
        """Compute the given number of tokens of each sequence, in this order, and keep the logits of all of them."""
        step = geometry([(s.num_computed, n, s.block_table) for s, n in work], self.block_size, self.decoder.device)
        step.spans = self._spans(work)
        ids = [token for s, n in work for token in s.tokens[s.num_computed : s.num_computed + n]]
        with torch.inference_mode():
            hidden = self.decoder.forward(torch.tensor(ids, device=self.decoder.device), step, self.caches)
            logits = self.decoder.logits(hidden)
        for (sequence, count), rows in zip(work, logits.split([n for _, n in work]), strict=True):
            sequence.num_computed += count
            sequence.logits.append(rows.float().cpu())

    def _spans(self, work: list[tuple[PagedSequence, int]]) -> Tensor:
        """Each sequence has a slot of its own, and reads it from its second step on."""
        rows, first = [[len(work), *[0] * (len(Span._fields) - 1)]], 0
        for sequence, count in work:
            slot = next(at for at, each in enumerate(self.sequences) if each is sequence)
            rows.append([*Span(first, count, slot if sequence.num_computed else -1, slot)])
            first += count
        return torch.tensor(rows, device=self.decoder.device)

    def all_logits(self) -> list[Tensor]:
        return [torch.cat(sequence.logits) for sequence in self.sequences]


def geometry(work: list[tuple[int, int, list[int]]], block_size: int, device: torch.device) -> StepGeometry:
    """The step of (tokens computed before, tokens to compute, block table) for each sequence."""
    query_lens = [count for _, count, _ in work]
    context_lens = [start + count for start, count, _ in work]
    positions = [p for start, count, _ in work for p in range(start, start + count)]
    slots = [
        table[p // block_size] * block_size + p % block_size
        for start, count, table in work
        for p in range(start, start + count)
    ]
    widest = max(len(table) for _, _, table in work)
    return StepGeometry(
        query_start=torch.tensor([0, *query_lens], device=device).cumsum(0).to(torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        block_tables=torch.tensor([t + [0] * (widest - len(t)) for _, _, t in work], dtype=torch.int32, device=device),
        slots=torch.tensor(slots, device=device),
        positions=torch.tensor(positions, device=device),
        num_sequences=len(work),
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
        query_lens_host=query_lens,
        context_lens_host=context_lens,
    )


def whole(decoder: Decoder, prompts: list[list[int]]) -> list[Tensor]:
    """Each prompt alone in one step."""
    model = PagedModel(decoder, prompts)
    for sequence in model.sequences:
        model.step([(sequence, sequence.remaining)])
    return model.all_logits()


def chunked(decoder: Decoder, prompts: list[list[int]]) -> list[Tensor]:
    """Each prompt alone, cut at odd places that are not block boundaries."""
    model = PagedModel(decoder, prompts, block_size=8)
    for sequence in model.sequences:
        sizes = [3, 7, 1, 5, 2, 9]
        while sequence.remaining:
            sizes.append(sizes.pop(0))
            model.step([(sequence, min(sizes[0], sequence.remaining))])
    return model.all_logits()


def token_by_token(decoder: Decoder, prompts: list[list[int]]) -> list[Tensor]:
    """All prompts together, one token a step."""
    model = PagedModel(decoder, prompts, block_size=1)
    while work := [(sequence, 1) for sequence in model.sequences if sequence.remaining]:
        model.step(work)
    return model.all_logits()


def mixed(decoder: Decoder, prompts: list[list[int]]) -> list[Tensor]:
    """Sequences start at different steps and advance by 0 to 6 tokens in changing order."""
    model = PagedModel(decoder, prompts, block_size=4, seed=1)
    draw = random.Random(7)
    while unfinished := [sequence for sequence in model.sequences if sequence.remaining]:
        draw.shuffle(unfinished)
        work = [(s, min(draw.choice([0, 1, 1, 3, 6]), s.remaining)) for s in unfinished]
        if work := [(s, n) for s, n in work if n]:
            model.step(work)
    return model.all_logits()


EXECUTIONS = {"whole": whole, "chunked": chunked, "token_by_token": token_by_token, "mixed": mixed}
