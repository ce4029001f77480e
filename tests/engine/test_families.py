"""Which sequences of a step have their contexts in the same blocks, over lives of sequences."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway import LLM
from headway.engine.families import Families
from headway.engine.graphs import DecodeBuffers
from headway.engine.layout import StepLayout
from headway.kernels.families import LEAST_COMMON, Family, common_parts
from headway.policy.step.plan import ScheduledSequence, SequenceState, TableChange
from headway.policy.step.sampling_params import SamplingParams
from tests.engine.models import write_config

CPU, SIZE, LONGEST, SEATS = torch.device("cpu"), 64, 2048, 12
numbers = itertools.count()


def sequence(blocks: list[int], tokens: int) -> SequenceState:
    return SequenceState(next(numbers), SamplingParams(), 0, frozenset(), tokens, [0] * tokens, blocks)


def decode(each: SequenceState) -> ScheduledSequence:
    return ScheduledSequence(each.seq_id, len(each.tokens) - 1, each.tokens[-1:], True, 1)


def check(families: list[Family], live: list[SequenceState]) -> None:
    """Each pair that has enough in common is in one family, and no neighbours are said to have more than they do."""
    known = [number for family in families for number in family.sequences]
    assert len(set(known)) == len(known)
    common = {frozenset(pair): shared(*(live[n] for n in pair)) for pair in itertools.combinations(range(len(live)), 2)}
    for family in families:
        for first, end in itertools.combinations(range(len(family.sequences)), 2):
            least = min(family.common[first:end])
            assert LEAST_COMMON <= least <= common[frozenset((family.sequences[first], family.sequences[end]))]
    for pair, tokens in common.items():
        one, other = pair
        together = [family for family in families if one in family.sequences and other in family.sequences]
        assert bool(together) == (tokens >= LEAST_COMMON)
        for family in together:
            first, end = sorted((family.sequences.index(one), family.sequences.index(other)))
            assert min(family.common[first:end]) >= tokens - SIZE  # what has been computed since it was found


def shared(one: SequenceState, other: SequenceState) -> int:
    pairs = zip(one.block_table, other.block_table, strict=False)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return min(same * SIZE, len(one.tokens) - 1, len(other.tokens) - 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_families_of_sequences_that_live(seed: int) -> None:
    """Branches of branches, that come and go, grow, and exchange blocks that they had in common."""
    draw = random.Random(seed)
    layout = StepLayout(CPU, SIZE, SEATS, LONGEST)
    fresh = itertools.count(1)
    trunks = [[next(fresh) for _ in range(20)] for _ in range(2)]
    trunks += [[*draw.choice(trunks)[: draw.randint(6, 20)], *(next(fresh) for _ in range(9))] for _ in range(3)]

    def born() -> SequenceState:
        head = draw.choice(trunks)[: draw.randint(0, 29)]
        own = draw.randint(1, 100)
        return sequence(head + [next(fresh) for _ in range(-(-own // SIZE))], len(head) * SIZE + own)

    live = [born() for _ in range(draw.randint(1, 8))]
    for _ in range(12):
        laid_out = layout.lay_out([decode(each) for each in live], live)
        check(list(laid_out.geometry.families), live)
        for each in live:
            each.tokens.append(0)
            if len(each.tokens) > SIZE * len(each.block_table):
                each.block_table.append(next(fresh))
                layout.tables.write(TableChange(each.seq_id, len(each.block_table) - 1, each.block_table[-1:]))
        if draw.random() < 0.5:
            each = draw.choice(live)
            at = draw.randrange(len(each.block_table))
            each.block_table[at] = next(fresh)
            layout.tables.write(TableChange(each.seq_id, at, [each.block_table[at]]))
        if draw.random() < 0.5:
            layout.tables.forget(live.pop(draw.randrange(len(live))).seq_id)
            live.append(born())


def test_a_gpu_reads_once_what_saves_most() -> None:
    """All of a family together, or its branches apart, whichever leaves out more; nothing for a little."""
    assert not len(common_parts([Family([0, 1], [2000])], [1, 1])[0])
    few = Family([3, 0, 1, 2], [5000, 4800, 9000])
    parts, queries, tokens = common_parts([few], [1, 1, 1, 1])
    assert (parts.tolist(), queries.tolist()) == ([[3, 4800, 0, 4]], [3, 0, 1, 2])
    branches = Family([0, 1, 2, 3, 4], [9000, 9000, 1000, 9000])
    parts, queries, tokens = common_parts([branches], [1, 2, 1, 1, 40])
    assert (parts.tolist(), queries.tolist(), tokens[:5].tolist()) == (
        [[0, 9000, 0, 4]],
        [0, 1, 2, 3],
        [9000] * 4 + [0],
    )


@pytest.mark.parametrize("count", [2, 3])
def test_graphs_have_the_parts_at_one_place(count: int) -> None:
    """A step with something in common is of another size than one without, and tells its own tokens."""
    layout = StepLayout(CPU, SIZE, SEATS, 16384)
    buffers = DecodeBuffers(CPU, [4], True, layout.tables, SIZE, 16384)
    live = [sequence([*range(200), 1000 + number], 200 * SIZE + 5) for number in range(count)]
    other = sequence([5000], 9)
    first = buffers.lay_out([decode(each) for each in [*live, other]], [*live, other])
    assert first is not None and (common := first.geometry.common) is not None
    assert common.parts.tolist() == [[0, 200 * SIZE, 0, count]]
    assert common.queries.tolist()[:count] == list(range(count))
    assert common.tokens.tolist() == [200 * SIZE] * count + [0] * (4 - count)
    alone = buffers.lay_out([decode(other)], [other])
    assert alone is not None and alone.geometry.common is None
    again = buffers.lay_out([decode(each) for each in live], live)
    assert again is not None and again.geometry.common is not None
    assert again.geometry.common.parts.data_ptr() == common.parts.data_ptr()


def test_requests_in_company_say_what_they_say_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, though attention reads their first tokens once for all."""
    folder = write_config(tmp_path, max_position_embeddings=1024)
    llm = LLM(folder, skip_tokenizer_init=True, load_format="dummy", device="cpu", kv_cache_memory=8 << 20)
    common = [(7 * at) % 500 + 5 for at in range(600)]
    prompts = [{"prompt_token_ids": common + [50 + number] * (3 + 9 * number)} for number in range(5)]
    params, found, of = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), [], Families.of

    def noted(self: Families, *arguments: list[int]) -> Sequence[Family]:
        found.append(of(self, *arguments))
        return found[-1]

    monkeypatch.setattr(Families, "of", noted)
    alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    assert not found
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert together == alone
    assert any(len(family.sequences) == 5 and min(family.common) == 592 for each in found for family in each)
