"""Parts of a step are its rows, once each, take equally long, and share no block; ways to run it are measured."""

from __future__ import annotations

import random
from collections.abc import Callable

from headway.policy.step.context_shares import ContextShares
from headway.policy.step.plan import ScheduledSequence, StepPlan, work_of

BLOCK = 16


def prompt(seq_id: int, tokens: int, start: int = 0, samples: int = 1, logit_rows: int = 0) -> ScheduledSequence:
    return ScheduledSequence(seq_id, start, list(range(start, start + tokens)), False, samples, logit_rows)


def plan_of(*scheduled: ScheduledSequence, pools: bool = False) -> StepPlan:
    return StepPlan([*scheduled], work=work_of([*scheduled]), pools=pools)


def took_ms(items: list[ScheduledSequence], pair_ms: float) -> float:
    work = work_of(items)
    return 1.0 + 0.05 * work.tokens + pair_ms * work.prefill_pairs


def learnt(ranks: int, pair_ms: float, times: Callable[[list[list[ScheduledSequence]]], float]) -> ContextShares:
    """What has seen a machine on which rows take so long, and steps as long as `times` says of their parts."""
    shares, draw = ContextShares(ranks, BLOCK), random.Random(1)
    for _ in range(200):
        plan = plan_of(prompt(1, draw.randint(64, 2000), draw.randint(0, 6000)))
        shares.observe(round(1e6 * times(shares.divide(plan))))
    return shares


def test_parts_have_every_row_once_and_no_block_twice() -> None:
    draw, divided = random.Random(1), 0
    for _ in range(300):
        items = [
            prompt(n, draw.randint(1, 200), draw.randint(0, 50), draw.randint(0, 1), draw.choice((0, 0, 0, 1)))
            if draw.random() < 0.4
            else ScheduledSequence(n, draw.randint(1, 90), [7] * (drafts := draw.randint(1, 4)), True, drafts)
            for n in range(draw.randint(1, 20))
        ]
        ranks = draw.randint(2, 5)
        parts = ContextShares(ranks, BLOCK).divide(plan_of(*items))
        divided += len(parts) == ranks
        assert len(parts) in (1, ranks) and all(parts)
        if len(parts) == 1:
            assert parts == [items]
            continue
        writers: dict[tuple[int, int], int] = {}
        for rank, part in enumerate(parts):
            for item in part:
                assert rank == 0 or not (item.samples or item.decoding or item.logit_rows)
                for position in range(item.start, item.start + item.num_tokens):
                    assert writers.setdefault((item.seq_id, position // BLOCK), rank) == rank
        for item in items:
            own = [each for part in parts[1:] + parts[:1] for each in part if each.seq_id == item.seq_id]
            assert [token for each in own for token in each.token_ids] == item.token_ids
            assert own[-1].samples == item.samples and own[-1] in parts[0]
    assert divided > 100


def test_parts_take_equally_long() -> None:
    """Later rows attend to more keys, so rank 0, whose rows are last, has fewer; and decodes are its own."""
    pair_ms = 1e-4
    shares = learnt(4, pair_ms, lambda parts: max(took_ms(part, pair_ms) for part in parts) / len(parts) ** 0.5)
    decodes = [ScheduledSequence(n, 500, [7], True, 1) for n in range(2, 40)]
    for beside in ([], decodes):
        parts = shares.divide(plan_of(prompt(1, 2000), *beside))
        milliseconds = [took_ms(part, pair_ms) for part in parts]
        assert len(parts) == 4 and max(milliseconds) < 1.15 * min(milliseconds)
    rows = [sum(item.num_tokens for item in part) for part in shares.divide(plan_of(prompt(1, 2000)))]
    assert rows[1] > 2 * rows[0]


def test_the_way_is_taken_that_is_measured_to_be_quicker() -> None:
    """Each of both is tried until it is known, and now and then later."""
    pair_ms = 1e-5
    for speed, expected in ((1.7, 0.9), (0.8, 0.1)):
        shared = []

        def times(parts: list[list[ScheduledSequence]], speed: float = speed, shared: list[bool] = shared) -> float:
            shared.append(len(parts) > 1)
            return max(took_ms(part, pair_ms) for part in parts) * (2 / speed if len(parts) > 1 else 1)

        learnt(2, pair_ms, times)
        assert shared[:32] == [True, False] * 16
        assert abs(sum(shared[32:]) / len(shared[32:]) - expected) < 0.1
        assert 0 < sum(shared[32:]) < len(shared[32:])


def test_what_has_results_of_each_row_is_not_divided() -> None:
    for plan in (plan_of(prompt(1, 400, logit_rows=399)), plan_of(prompt(1, 400), pools=True)):
        assert ContextShares(2, BLOCK).divide(plan) == [plan.scheduled]
