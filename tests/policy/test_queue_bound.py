"""The bound of the queue: nothing gets past it, nothing stays behind, and the time to come back is the measured one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.policy.admission.queue_bound import MAX_RETRY_AFTER_S, Place, QueueBound, QueueLimits, Queues
from headway.policy.objectives.service_class import BUILT_IN, ClassTable, ServiceClass
from tests.policy.simulation import Simulation

SECOND = 10**9


@settings(max_examples=50, deadline=None)
@given(
    limits=st.tuples(st.integers(1, 20), st.integers(1, 200)),
    arrivals=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 300), st.booleans()), max_size=40),
)
def test_nothing_gets_past_the_bound(limits: tuple[int, int], arrivals: list[tuple[int, int, bool]]) -> None:
    bound = QueueBound(QueueLimits(*limits))
    there: list[tuple[int, int]] = []
    for now, (choices, tokens, leaves) in enumerate(arrivals):
        refusal = Place(bound).take(choices, [tokens])
        fits = (
            sum(c for c, _ in there) + choices <= limits[0],
            sum(t for _, t in there) + tokens <= limits[1],
        )
        assert (refusal is None) == all(fits)
        if refusal is None:
            there.append((choices, tokens))
        else:
            assert refusal.unit == ("choices" if not fits[0] else "tokens")
            assert refusal.is_final == ((choices > limits[0]) if not fits[0] else (tokens > limits[1]))
        if leaves and there:
            bound.leave(now, *there.pop(0))
        assert (bound.choices, bound.tokens) == (sum(c for c, _ in there), sum(t for _, t in there))
        assert bound.is_full == (bound.choices >= limits[0] or bound.tokens >= limits[1])


def test_without_limits_everybody_comes_in() -> None:
    bound = QueueBound(QueueLimits())
    assert Place(bound).take(10**9, [10**12]) is None and not bound.is_full


def test_limits_suit_the_engine_unless_they_are_chosen() -> None:
    assert QueueLimits.for_engine(256, 10_000) == QueueLimits(2048, 80_000)
    assert QueueLimits.for_engine(256, 10_000, choices=5, tokens=math.inf) == QueueLimits(5, math.inf)


@pytest.mark.parametrize("seconds", [2, 100])
def test_retry_after_is_as_long_as_the_excess_took_to_leave_of_late(seconds: int) -> None:
    bound = QueueBound(QueueLimits(1000, 10**6))
    assert Place(bound).take(1000) is None
    refusal = Place(bound).take(8)
    assert refusal is not None and not refusal.is_final
    assert bound.retry_after_s(refusal, SECOND) == 1, "nothing has been measured"
    now = SECOND
    for _ in range(seconds * 4):  # four a second
        now += SECOND // 4
        bound.leave(now, choices=1)
        assert Place(bound).take(1) is None
    assert bound.retry_after_s(refusal, now) in (2, 3)
    assert bound.retry_after_s(refusal, now + 20 * SECOND) > 5, "nothing has left since"
    assert bound.retry_after_s(refusal, now + 3600 * SECOND) == MAX_RETRY_AFTER_S


def test_tokens_have_a_rate_of_their_own() -> None:
    bound = QueueBound(QueueLimits(1000, 10_000))
    assert Place(bound).take(1, [10_000]) is None
    refusal = Place(bound).take(1, [3_000])
    assert refusal is not None and refusal.unit == "tokens"
    for second in range(1, 9):
        bound.leave(second * SECOND, choices=1, tokens=500)
        assert Place(bound).take(1, [500]) is None
    assert bound.retry_after_s(refusal, 8 * SECOND) in (5, 6, 7)


def test_a_place_gives_everything_back_once() -> None:
    bound = QueueBound(QueueLimits(10, 100))
    place = Place(bound)
    assert place.take(3) is None and place.take(prompts=[20, 30]) is None
    refusal = place.take(prompts=[60])
    assert refusal is not None and (refusal.asked, refusal.present) == (60, 50)
    assert (bound.choices, bound.tokens) == (3, 50)
    for _ in range(2):
        place.had_output(1, SECOND)
    assert bound.tokens == 20
    place.ended(SECOND)
    assert bound.choices == 2
    for _ in range(2):
        place.close(SECOND)
    place.ended(SECOND)  # the engine's last word comes after the answer
    place.had_output(0, SECOND)
    assert (bound.choices, bound.tokens) == (0, 0)


def test_a_place_counts_for_all_its_bounds_or_for_none() -> None:
    everybody, batch = QueueBound(QueueLimits(10)), QueueBound(QueueLimits(4), "batch")
    place, other = Place(everybody, batch), Place(everybody, batch)
    assert place.take(3) is None
    refusal = other.take(2)
    assert refusal is not None and refusal.bound is batch
    assert (everybody.choices, batch.choices) == (3, 3)
    assert Place(everybody).take(7) is None
    refusal = other.take(1)
    assert refusal is not None and refusal.bound is everybody
    place.close(SECOND)
    assert (everybody.choices, batch.choices) == (7, 0)


@settings(max_examples=50, deadline=None)
@given(
    limit=st.integers(4, 30),
    shares=st.lists(st.floats(0, 0.3), min_size=3, max_size=3),
    bounds=st.lists(st.integers(1, 30), min_size=3, max_size=3),
    arrivals=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.booleans()), max_size=60),
)
def test_no_class_gets_past_its_bound_or_into_the_share_of_another(
    limit: int, shares: list[float], bounds: list[int], arrivals: list[tuple[int, int, bool]]
) -> None:
    names = "abc"
    classes = (
        ServiceClass(name=name, seats=share, max_queued=bound)
        for name, share, bound in zip(names, shares, bounds, strict=True)
    )
    queues = Queues(QueueLimits(limit), ClassTable(tuple(classes)))
    there: list[Place] = []
    for now, (which, choices, leaves) in enumerate(arrivals):
        place, own = queues.place(names[which]), queues.of_class[names[which]]
        refusal = place.take(choices)
        if refusal is None:
            there.append(place)
        elif refusal.bound is queues.of_all:
            assert own.choices + choices > math.floor(shares[which] * limit), "its own share is free for it"
        else:
            assert own.choices + choices > bounds[which]
        if leaves and there:
            there.pop(0).close(now)
        counts = [queues.of_class[name].choices for name in names]
        assert sum(counts) == queues.of_all.choices <= limit
        assert all(count <= bound for count, bound in zip(counts, bounds, strict=True))


def test_the_share_of_a_class_is_left_free_for_it() -> None:
    chat, rest = ServiceClass(name="chat", seats=0.3), [ServiceClass(name=name) for name in ("batch", "offline")]
    queues = Queues(QueueLimits(10), ClassTable((chat, *rest)))
    assert queues.place("batch").take(4) is None
    assert queues.place("offline").take(3) is None
    for name in ("batch", "offline"):
        refusal = queues.place(name).take(1)
        assert refusal is not None and (refusal.bound, refusal.limit, refusal.kept) == (queues.of_all, 7, 3)
        assert not refusal.is_final
    refusal = queues.place("batch").take(8)
    assert refusal is not None and refusal.is_final, "the share is never free for it"
    assert queues.place("chat").take(2) is None
    refusal = queues.place("batch").take(1)
    assert refusal is not None and refusal.kept == 1
    assert queues.place("chat").take(1) is None and queues.of_all.is_full
    queues.set_classes(ClassTable((ServiceClass(name="chat"),)))
    queues.of_all.limits = QueueLimits(11)
    assert queues.place("chat").take(1) is None, "who was there counts on"
    assert queues.of_all.choices == 11


def test_a_flood_of_a_lower_class_leaves_room_for_the_more_urgent_ones() -> None:
    queues = Queues(QueueLimits(600, 6000), BUILT_IN)
    for name, choices in (("offline", 500), ("batch", 50), ("interactive", 50)):
        taken = 0
        while queues.place(name).take(1, [1]) is None:
            taken += 1
        assert taken == choices
    assert queues.of_all.is_full
    queues = Queues(QueueLimits(600, 6000), BUILT_IN)
    assert queues.place("offline").take(1, [6000]) is None, "a prompt that needs all of the room comes in alone"
    queues = Queues(QueueLimits(600, 6000), BUILT_IN)
    assert queues.place("offline").take(1, [4999]) is None
    refusal = queues.place("offline").take(1, [2])
    assert refusal is not None and (refusal.unit, refusal.limit, refusal.kept) == ("tokens", 5000, 1000)
    assert queues.place("interactive").take(1, [1001]) is None


def test_a_full_queue_takes_nobody_in_until_somebody_leaves() -> None:
    sim = Simulation(limits=QueueLimits(choices=4, tokens=40), max_num_seqs=2)
    first = sim.submit_choices(list(range(30)), 3, n=3)
    assert len(first) == 3
    assert sim.submit_choices([1, 2], 3, n=2) == [], "two choices more than there is room for"
    assert sim.submit_choices(list(range(11)), 3) == [], "and a token more"
    while first[0].output_len == 0:
        sim.step()
    assert len(sim.submit_choices(list(range(11)), 3)) == 1, "a prompt counts until its first token is out"
    assert sim.submit_choices([1], 3) == []
    sim.run_until_done()
    assert len(sim.submit_choices([1], 3, n=4)) == 4
    sim.run_until_done()
    sim.check_all_closed()


def test_a_flood_of_one_tenant_leaves_room_for_others() -> None:
    queues = Queues(QueueLimits(100, 1000), BUILT_IN)

    def flood(tenant: str) -> int:
        return sum(queues.place("interactive", tenant).take(1, [1]) is None for _ in range(200))

    def held(tenant: str) -> int:
        return queues.of_tenant[tenant].choices

    assert flood("anybody") == 100, "tenants make no difference"
    queues = Queues(QueueLimits(100, 1000), BUILT_IN)
    queues.set_tenants({"heavy": 2.0})
    assert flood("a") == 80
    assert flood("b") == 16
    refusal = queues.place("interactive", "a").take(2)
    assert refusal is not None and not refusal.is_final and refusal.bound is queues.of_tenant["a"]
    assert queues.place("interactive", "new").take(4) is None
    for bound in (queues.of_all, queues.of_tenant["a"]):
        bound.leave(0, 60, 60)
    assert flood("heavy") > held("a")


def test_no_tenant_fills_the_queue_with_prompts() -> None:
    queues = Queues(QueueLimits(100, 1000), BUILT_IN)
    queues.set_tenants({})
    assert sum(queues.place("interactive", "a").take(1, [100]) is None for _ in range(20)) == 8
    refusal = queues.place("interactive", "a").take(prompts=[50])
    assert refusal is not None and refusal.unit == "tokens"
    assert queues.place("interactive", "b").take(1, [200]) is None
