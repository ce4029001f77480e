"""Tensors of steps against the definition of their geometry, over lives of sequences with blocks that change."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engine.layout import ModelInput, StepLayout
from headway.policy.step.plan import ScheduledSequence, SequenceState, TableChange
from headway.policy.step.sampling_params import SamplingParams

BLOCK, MOST_SEQUENCES, MOST_TOKENS = 4, 70, 400
CPU = torch.device("cpu")


numbers = itertools.count()


def sequence(draw: random.Random, length: int) -> SequenceState:
    tokens = [draw.randrange(1000) for _ in range(length)]
    blocks = [draw.randrange(10_000) for _ in range(-(-length // BLOCK))]
    return SequenceState(next(numbers), SamplingParams(), 0, frozenset(), length, tokens, blocks)


def part(each: SequenceState, tokens: int, samples: int) -> ScheduledSequence:
    """Its last tokens, of which some are sampled."""
    return ScheduledSequence(each.seq_id, len(each.tokens) - tokens, each.tokens[-tokens:], samples > 0, samples)


def check(laid_out: ModelInput, scheduled: list[ScheduledSequence], sequences: list[SequenceState]) -> None:
    """Check a layout by the definitions of StepGeometry, token by token."""
    step, place = laid_out.geometry, 0
    assert step.num_sequences == len(scheduled)
    assert step.query_lens_host == [item.num_tokens for item in scheduled]
    assert step.context_lens_host == [item.start + item.num_tokens for item in scheduled]
    assert step.context_lens.tolist() == step.context_lens_host
    assert (step.max_query_len, step.max_context_len) == (max(step.query_lens_host), max(step.context_lens_host))
    wanted = []
    for number, (item, each) in enumerate(zip(scheduled, sequences, strict=True)):
        table = each.block_table
        assert step.query_start[number] == place
        used = -(-(item.start + item.num_tokens) // BLOCK)
        assert step.block_tables[number, :used].tolist() == table[:used]
        for position in range(item.start, item.start + item.num_tokens):
            assert laid_out.token_ids[place] == each.tokens[position]
            assert step.positions[place] == position
            assert step.slots[place] == table[position // BLOCK] * BLOCK + position % BLOCK
            place += 1
        wanted += range(place - item.samples, place)
    assert step.query_start[-1] == len(laid_out.token_ids) == place
    assert laid_out.last_rows.tolist() == wanted
    assert laid_out.token_ids.dtype == step.slots.dtype == step.positions.dtype == torch.int64
    assert step.block_tables.dtype == step.context_lens.dtype == step.query_start.dtype == torch.int32


def addresses(laid_out: ModelInput) -> tuple[int, ...]:
    step = laid_out.geometry
    tensors = laid_out.token_ids, step.positions, step.slots, step.block_tables
    return *(tensor.data_ptr() for tensor in tensors), step.block_tables.stride(0)


def change(layout: StepLayout, each: SequenceState, start: int, blocks: list[int]) -> None:
    each.block_table[start:] = blocks
    layout.tables.write(TableChange(each.seq_id, start, blocks))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, MOST_SEQUENCES))
def test_steps_of_sequences_that_live(seed: int, count: int) -> None:
    """Chunks, decodes and both; tables that grow, are exchanged, and go to others; steps of as many at one place."""
    draw = random.Random(seed)
    layout = StepLayout(CPU, BLOCK, MOST_SEQUENCES, MOST_TOKENS)
    live = [sequence(draw, draw.randint(2, 40)) for _ in range(count)]
    places: dict[int, tuple[int, ...]] = {}
    for _ in range(8):
        chosen = draw.sample(live, draw.randint(1, len(live)))
        decoding = draw.random() < 0.7
        scheduled = []
        for each in chosen:
            tokens = 1 if decoding or draw.random() < 0.5 else draw.randint(1, len(each.tokens))
            samples = 1 if decoding else draw.choice([0, 1, tokens])
            scheduled.append(part(each, tokens, samples))
        laid_out = layout.lay_out(scheduled, chosen)
        check(laid_out, scheduled, chosen)
        if laid_out.geometry.repeatable:
            total = len(laid_out.token_ids)
            assert places.setdefault(total, addresses(laid_out)) == addresses(laid_out)
        for each in chosen:
            each.tokens.append(draw.randrange(1000))
            if len(each.tokens) > BLOCK * len(each.block_table):
                change(layout, each, len(each.block_table), [draw.randrange(10_000)])
        exchanged = draw.choice(live)
        start = draw.randrange(len(exchanged.block_table))
        change(layout, exchanged, start, [draw.randrange(10_000), *exchanged.block_table[start + 1 :]])
        leaving = draw.randrange(len(live))
        layout.tables.forget(live[leaving].seq_id)
        live[leaving] = sequence(draw, draw.randint(2, 40))


@pytest.mark.parametrize(("count", "repeatable"), [(64, True), (65, False)])
def test_many_tokens_are_not_repeated(count: int, repeatable: bool) -> None:
    draw = random.Random(0)
    layout = StepLayout(CPU, BLOCK, MOST_SEQUENCES, MOST_TOKENS)
    sequences = [sequence(draw, 5) for _ in range(count)]
    scheduled = [part(each, 1, samples=1) for each in sequences]
    laid_out = layout.lay_out(scheduled, sequences)
    check(laid_out, scheduled, sequences)
    assert laid_out.geometry.repeatable == repeatable
