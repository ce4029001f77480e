"""The parts of the policy `slo`: windows, shares, prompts that begin alike, lengths, who starves, and words."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.objectives.orders import deadline
from headway.policy.objectives.output_lengths import OutputLengths
from headway.policy.objectives.prefix_batching import PrefixLeaders
from headway.policy.objectives.service_class import ClassTable, ServiceClass
from headway.policy.objectives.shares import Shares
from headway.policy.objectives.slo import SloPolicy
from headway.policy.objectives.window import MOST_OF_TIME_LEFT, Window
from headway.policy.step.decisions import Decision
from headway.policy.step.ledger import Phase
from headway.policy.step.plan import work_of
from headway.policy.step.request import FinishReason, Sequence, Status
from headway.policy.step.step_budget import StepBudget
from headway.policy.step.step_time import StepWork
from tests.policy.exact import MS, Exact, waiting
from tests.policy.simulation import Simulation, make_sequence

CHAT = ServiceClass(name="chat", ttft_ms=200, tpot_ms=40, window_ms=(0, 5), starvation_s=1)
OFFLINE = ServiceClass(name="offline", starvation_s=2)
CLASSES = ClassTable((CHAT, OFFLINE))


class ExactSimulation(Simulation):
    """Steps take what `Exact` says."""

    def duration(self, work: StepWork) -> int:
        return int(self.scheduler.accounting.step_time.predict_ns(work))


def simulation(classes: ClassTable = CLASSES, step_time: Exact | None = None, **options: Any) -> ExactSimulation:
    memory = {"num_blocks": 200, "max_num_batched_tokens": 32, **options}
    return ExactSimulation(policy="slo", classes=classes, step_time=step_time or Exact(), **memory)


# --- windows ---------------------------------------------------------------------------------------


def window_after(gap_ms: float, step_time: Exact) -> Window:
    window = Window(step_time)
    for number in range(1, 200):
        window.arrived(int(number * gap_ms * MS))
    return window


@given(
    gap_ms=st.floats(0.1, 30),
    fixed=st.floats(0, 50),
    work_ms=st.floats(0, 50),
    limits=st.tuples(st.floats(0, 20), st.floats(0, 20)).map(sorted),
    count=st.integers(1, 4),
    due_ms=st.one_of(st.none(), st.floats(0, 40)),
)
def test_a_window_is_open_where_it_pays_and_never_longer_than_it_may(
    gap_ms: float, fixed: float, work_ms: float, limits: list[float], count: int, due_ms: float | None
) -> None:
    service = ServiceClass(name="chat", window_ms=(limits[0], limits[1]))
    window, now = window_after(gap_ms, Exact(fixed=fixed, token=0.0)), 10_000 * MS
    there = [waiting(4, None if due_ms is None else 10_000 + due_ms, service=service) for _ in range(count)]
    length_ms = (window.until(there, work_ms * MS, now) - now) / MS
    if length_ms > 0:
        gain = length_ms / gap_ms * (fixed - work_ms - length_ms) - count * length_ms
        at_least = limits[0] / gap_ms * (fixed - work_ms - limits[0]) - count * limits[0]
        assert gain > -1e-6 * (1 + abs(at_least)) or length_ms <= limits[0] + 1e-6
        longest = math.inf if due_ms is None else MOST_OF_TIME_LEFT * due_ms
        assert min(limits[0], longest) - 1e-5 <= length_ms <= min(limits[1], longest) + 1e-6
        for other_ms in (0.9 * length_ms, 1.1 * length_ms):  # no other length within the limits is worth more
            other = other_ms / gap_ms * (fixed - work_ms - other_ms) - count * other_ms
            within = limits[0] <= other_ms <= limits[1] and due_ms is None
            assert not within or other <= gain + 1e-3
    elif limits[1] > 1e-3 and (due_ms is None or due_ms > 1e-3):
        assert (fixed - work_ms - count * gap_ms) / 2 <= 1e-3 and limits[0] <= 1e-3


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_minimum_is_kept_from_the_first_request_on(is_trained: bool) -> None:
    window = Window(Exact(fixed=1, is_trained=is_trained))
    there = [waiting(4, 1000, service=ServiceClass(name="chat", window_ms=(5, 20)))]
    assert window.until(there, 100 * MS, MS) == 6 * MS
    assert window.num_opened == 1


def test_a_window_s_end_stands_when_others_join() -> None:
    window, now = window_after(0.5, Exact(fixed=50)), 10_000 * MS
    first = waiting(4, None, service=CHAT)
    assert window.until([first], 0, now) == now + 5 * MS
    assert window.until([first, waiting(4, None, service=CHAT)], 0, now + 3 * MS) == now + 5 * MS
    assert window.until([first], 0, now + 6 * MS) == now + 6 * MS
    assert window.num_opened == 1


def fill(sim: Simulation, count: int, gap_ms: float) -> None:
    """Have requests come at this rate, which the window learns, and serve them."""
    for _ in range(count):
        sim.submit([1], 1)
        sim.now += int(gap_ms * MS)
    sim.run_until_done()


def test_an_idle_engine_waits_for_company_and_the_ledger_says_so() -> None:
    sim = simulation(max_num_seqs=8)
    fill(sim, 30, 0.5)
    sequence = sim.submit([1, 2], 2)
    began = sim.now
    sim.step()
    waited = sim.now - began
    assert 0 < waited <= 5 * MS
    assert "waits" in sim.scheduler.decisions[-1].in_words()
    other = sim.submit([1, 2], 2)
    sim.step()
    assert sequence.output_len == other.output_len == 1
    sim.run_until_done()
    sim.check_all_closed()
    assert sequence.ledger.phases_ns[Phase.QUEUE_WINDOW] == pytest.approx(waited, abs=200)
    assert Phase.QUEUE_WINDOW not in other.ledger.phases_ns or other.ledger.phases_ns[Phase.QUEUE_WINDOW] < 200


def test_no_window_while_something_runs() -> None:
    sim = simulation(max_num_seqs=8)
    fill(sim, 30, 0.5)
    running = sim.submit([1], 8)
    while not running.output_len:
        sim.step()
    sim.submit([1, 2], 2)
    while sim.scheduler.has_work:
        assert sim.step()


def test_a_window_ends_with_the_last_request_that_waited() -> None:
    sim = simulation(max_num_seqs=8)
    fill(sim, 30, 0.5)
    sequence = sim.submit([1, 2], 2)
    sim.step()
    slo = sim.scheduler.policy
    assert isinstance(slo, SloPolicy) and slo.window.opened_ns
    sim.scheduler.abort(sequence, sim.now)
    assert not slo.window.opened_ns


# --- shares ----------------------------------------------------------------------------------------


def shares(**kept: float) -> ClassTable:
    return ClassTable((CHAT, ServiceClass(name="offline", **kept)))  # type: ignore[arg-type]


def running_prompt(service: ServiceClass) -> Sequence:
    return waiting(100, None, service=service, status=Status.RUNNING)


@given(
    share=st.floats(0.01, 0.99), tokens=st.integers(1, 500), first=st.sampled_from([1, 0]), asked=st.integers(1, 500)
)
def test_a_share_of_the_step_s_tokens_is_left_to_its_class(share: float, tokens: int, first: int, asked: int) -> None:
    kept = Shares(shares(tokens=share), 8, KVBlocks(100, 16), 1)
    budget = StepBudget(tokens, Exact())
    kept.begin_step([running_prompt(CHAT), running_prompt(kept_class := shares(tokens=share).named("offline"))])
    names = [kept_class.name, "chat"] if first else ["chat", kept_class.name]
    given_: dict[str, int] = {}
    for name in (*names, *names):
        count = min(asked, kept.tokens_for(name, budget), budget.tokens)
        budget.spend(0, count)
        kept.give_tokens(name, count)
        given_[name] = given_.get(name, 0) + count
    assert sum(given_.values()) <= tokens
    assert given_["chat"] <= tokens - int(share * tokens) or given_["offline"] >= int(share * tokens)
    assert given_["offline"] >= min(asked, int(share * tokens))


def test_a_share_of_tokens_binds_in_a_short_step_and_where_its_class_has_prompts() -> None:
    classes = shares(tokens=0.25)
    kept = Shares(classes, 8, KVBlocks(100, 16), 1)
    budget = StepBudget(512, Exact())
    budget.share_with(StepWork(decode_tokens=1), slack_ns=31 * MS)  # 20 tokens
    kept.begin_step([running_prompt(CHAT)])
    assert kept.tokens_for("chat", budget) == 20
    kept.waiting["offline"] += 1
    kept.begin_step([running_prompt(CHAT)])
    assert kept.tokens_for("chat", budget) == 15
    assert kept.tokens_for("offline", budget) == 20


def test_seats_and_blocks_are_kept_for_a_class() -> None:
    pool = KVBlocks(100, 16)
    kept = Shares(shares(seats=0.5, kv=0.25), 8, pool, 2)
    assert (kept.seats_kept_from("chat"), kept.seats_kept_from("offline")) == (4, 0)
    kept.running["offline"] = 3
    assert kept.seats_kept_from("chat") == 1 and kept.has_seat_left("offline")
    kept.running["offline"] = 5
    assert kept.seats_kept_from("chat") == 0 and not kept.has_seat_left("offline")
    assert kept.blocks_kept_from("chat") == 2, "most of an idle share is lent"
    kept.waiting["offline"] = 1
    assert (kept.blocks_kept_from("chat"), kept.blocks_kept_from("offline")) == (25, 0)
    pool.allocate(10, "offline")
    assert kept.blocks_kept_from("chat") == 15
    assert kept.has_blocks_left("offline", 15) and not kept.has_blocks_left("offline", 16)
    assert not kept.has_blocks_left("chat", 1) and not kept.is_over("chat") and kept.is_over("offline", 16)


def test_a_class_with_a_share_gets_it_past_a_long_queue() -> None:
    sim = simulation(shares(tokens=0.25, seats=0.25), max_num_seqs=4, lookahead=2, message_ns=0)
    for _ in range(100):
        sim.submit([1] * 30, 8, service_class="chat")
    offline = sim.submit([2] * 30, 8, service_class="offline")
    for _ in range(10):
        sim.step()
        in_seats = [sequence.service.name for sequence in sim.scheduler.running]
        assert in_seats.count("chat") <= 3
    assert offline.output_len > 0


# --- prompts that begin alike ----------------------------------------------------------------------


@given(
    leader_blocks=st.integers(0, 6),
    shared=st.integers(0, 40),
    lengths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    dues=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_only_what_another_is_about_to_compute_first_is_waited_for(
    leader_blocks: int, shared: int, lengths: tuple[int, int], dues: tuple[int, int]
) -> None:
    leaders = PrefixLeaders(4, deadline)
    first, second = (waiting(length, 100 * due) for length, due in zip(lengths, dues, strict=True))
    alike = min(shared, *lengths)
    first.tokens = [7] * alike + [1] * (lengths[0] - alike)
    second.tokens = [7] * alike + [2] * (lengths[1] - alike)
    first.status, first.num_computed = Status.RUNNING, min(4 * leader_blocks, lengths[0] - 1)
    leaders.begins(first)
    found = min(alike, lengths[1] - 1) // 4 - first.num_computed // 4
    worth = found > 0 and first.num_to_compute > 1 and lengths[0] > 4
    assert leaders.is_worth_waiting_for(second) == (worth and deadline(first) < deadline(second))
    leaders.ends(first)
    leaders.ends(second)
    assert not leaders.is_worth_waiting_for(second) and not leaders._common


@pytest.mark.parametrize("caching", [True, False])
def test_the_second_of_two_alike_finds_what_the_first_computed(caching: bool) -> None:
    sim = simulation(max_num_seqs=4, max_num_batched_tokens=64, caching=caching)
    prompt = list(range(20))
    first, second = sim.submit([*prompt, 1], 2), sim.submit([*prompt, 2], 2)
    other = sim.submit([5] * 9, 2)
    sim.step()
    assert second.status is (Status.WAITING if caching else Status.RUNNING)
    sim.run_until_done()
    sim.check_all_closed()
    assert first.cached_tokens == other.cached_tokens == 0
    assert second.cached_tokens == (20 if caching else 0)


# --- lengths, and words ----------------------------------------------------------------------------


def test_a_length_is_what_the_class_has_shown_and_no_more_than_is_allowed() -> None:
    lengths = OutputLengths()
    sequence = make_sequence("a", [1, 2], 50)
    assert lengths.expected(sequence) == 50
    shown = make_sequence("b", [1], 50)
    shown.tokens += [1] * 10
    for _ in range(200):
        lengths.ended(shown)
    assert lengths.expected(sequence) == 10
    assert lengths.expected(make_sequence("c", [1], 7)) == 7
    shown.tokens += [1] * 20
    for _ in range(200):
        lengths.ended(shown)
    assert lengths.expected(sequence) == 30
    assert lengths.expected(make_sequence("d", [1], 50, service_class="offline")) == 50


def test_decisions_are_told_in_words() -> None:
    assert Decision(0).in_words() == "Nothing runs."
    assert Decision(0, window_ns=3 * MS).in_words() == ("Nothing runs: waits 3.0 ms for more requests.")
    decision = Decision(
        0, decoding=1, prompt_tokens=30, waiting=2, queue="queue_policy", slack_ns=41.25 * MS, tightest="a", urgent="b",
        left_out=1, admitted=["b", "c"], preempted=["d"], yielded=[("e", "late")], predicted_ns=50.0 * MS,
        took_ns=51 * MS,
    )  # fmt: skip
    assert decision.in_words() == (
        "1 sequence decodes, 30 tokens of prompts; the next promised token, of a, is due in 41.2 ms; the prompt of b "
        "is urgent; 1 sequence without an objective is left out; admitted: b, c; preempted: d; e yields (late); "
        "2 wait (queue_policy); predicted 50.0 ms; took 51.0 ms."
    )
    decision = Decision(0, decoding=2, prompt_tokens=1, left_out=3)
    assert decision.in_words() == (
        "2 sequences decode, 1 token of prompts; 3 sequences without an objective are left out."
    )


# --- decisions of a scheduler ----------------------------------------------------------------------


def test_an_urgent_prompt_takes_the_seat_of_one_without_a_promise() -> None:
    sim = simulation(max_num_seqs=2)
    offline = [sim.submit([1] * 8, 40, service_class="offline") for _ in range(2)]
    for _ in range(4):
        sim.step()
    chat = sim.submit([2] * 8, 3, service_class="chat")
    sim.now += 150 * MS  # it could not be in time if it waited for a seat
    sim.step()
    assert chat.output_len == 1 and chat.last_token_ns <= chat.due_ns
    assert sum(sequence.preemptions for sequence in offline) == 1
    sim.run_until_done()
    sim.check_all_closed()
    assert all(sequence.finish_reason is FinishReason.LENGTH for sequence in sim.sequences)


def test_who_is_left_out_is_told_in_the_ledger() -> None:
    sim = simulation(max_num_seqs=8, max_num_batched_tokens=16, max_model_len=256, step_time=Exact(fixed=5))
    offline = sim.submit([1] * 8, 40, service_class="offline")
    while offline.output_len < 2:
        sim.step()
    sim.submit([2] * 104, 3, service_class="chat")  # 139 ms, more than half of its time
    sim.now += 30 * MS
    had, began, first = offline.output_len, sim.now, sim.sequences[1]
    while not first.output_len:
        sim.step()
    assert first.last_token_ns <= first.due_ns and offline.output_len == had
    took = first.last_token_ns - began
    sim.run_until_done()
    sim.check_all_closed()
    assert offline.ledger.phases_ns[Phase.DECODE_STALL_POLICY] == pytest.approx(took, rel=0.2)
    assert Phase.DECODE_STALL_POLICY not in first.ledger.phases_ns


def test_an_answer_that_was_late_keeps_its_pace_beside_an_urgent_prompt() -> None:
    sim = simulation(max_num_seqs=8, max_num_batched_tokens=16, max_model_len=512, step_time=Exact(fixed=5))
    late = sim.submit([1] * 200, 40, service_class="chat")
    offline = sim.submit([1] * 8, 40, service_class="offline")
    while late.output_len < 2 or offline.output_len < 2:
        sim.step()
    assert late.yielded == "oversized"
    prompt = sim.submit([2] * 90, 3, service_class="chat")  # 124 ms, more than half of its time
    had, stood = (late.output_len, offline.output_len), 0
    while not prompt.output_len:
        before = sim.now
        sim.step()
        stood = max(stood, sim.now - before)
    assert prompt.last_token_ns <= prompt.due_ns
    assert late.output_len > had[0] + 4 and stood <= late.tpot_ns
    assert offline.output_len == had[1], "it has no objective"
    sim.run_until_done()
    sim.check_all_closed()
    assert Phase.DECODE_STALL_POLICY not in late.ledger.phases_ns


REPORT = ServiceClass(name="report", ttft_ms=5000)


def test_one_that_has_yielded_goes_before_what_is_due_later_and_makes_nobody_late() -> None:
    classes = ClassTable((CHAT, REPORT, OFFLINE))
    sim = simulation(classes, max_num_seqs=16, max_model_len=512, num_blocks=1000, step_time=Exact(fixed=5))
    reports = [sim.submit([1 + each] * 500, 2, service_class="report") for each in range(4)]  # more than two seconds
    for _ in range(20):
        sim.step()
    chats = [sim.submit([10 + each] * 40, 2, service_class="chat") for each in range(8)]  # 370 ms
    while not all(chat.output_len for chat in chats):
        sim.step()
    late = [chat for chat in chats if chat.yielded]
    assert 2 <= len(late) <= 6
    assert sum(not report.output_len for report in reports) >= 3, "the reports have time"
    sim.run_until_done()
    sim.check_all_closed()
    assert not any(report.yielded for report in reports)


@pytest.mark.parametrize("begun", [False, True])
def test_what_has_no_promise_is_served_while_promised_requests_come_without_end(begun: bool) -> None:
    """Whether it waits, or its prompt is under way: those of others would take every step whole."""
    chat = ServiceClass(name="chat", ttft_ms=10_000)
    sim = simulation(ClassTable((chat, OFFLINE)), max_num_seqs=4, max_num_batched_tokens=16)
    offline = sim.submit([1] * 60, 4, service_class="offline")
    if begun:
        sim.step()
        assert 0 < offline.num_computed < 60
    had = offline.num_computed
    while offline.status is not Status.FINISHED:
        while len(sim.scheduler.sequences) < 8:
            sim.submit([len(sim.sequences) % 500] * 24, 1, service_class="chat")
        sim.step()
        waited_ns = sim.now - offline.arrival_ns
        assert offline.has_starved or offline.num_computed == had
        assert waited_ns < 10_000 * MS
    # Its own threshold, then its prompt by blocks of 4 at least in steps of at most 40 ms, and 4 tokens.
    assert OFFLINE.starvation_s * 1e9 < waited_ns <= OFFLINE.starvation_s * 1e9 + (60 / 4 + 4 + 4) * 40 * MS


def test_those_who_starve_take_turns_by_when_they_began_to() -> None:
    """Some sequences of a better class are always starving; one of the last class gets its turn all the same."""
    sim = simulation(max_num_seqs=2, max_num_batched_tokens=16)
    offline = sim.submit([1] * 10, 2, service_class="offline")
    number = 0
    while offline.status is not Status.FINISHED:
        sim.submit([number % 500] * 20, 2, service_class="chat")
        number += 1
        sim.step()
        assert number < 1000
    assert sim.now - offline.arrival_ns > OFFLINE.starvation_s * 1e9


def test_without_chunks_a_prompt_does_not_wait_for_the_decodes_beside_it() -> None:
    sim = simulation(max_num_seqs=4, max_num_batched_tokens=64, chunked=False)
    first = sim.submit([1] * 4, 30, service_class="chat")
    sim.step()
    second = sim.submit([2] * 50, 2, service_class="chat")
    for _ in range(3):
        sim.step()
    assert second.output_len >= 1 and first.status is Status.RUNNING


@example(31061096, 3.0, 0.1, 8)  # a preempted sequence goes on with one token
@given(
    st.integers(0, 2**32),
    st.sampled_from([0.1, 1.0, 3.0]),
    st.sampled_from([0.1, 1.0, 3.0]),
    st.sampled_from([1, 8, 12]),
)
def test_a_step_has_all_prompt_tokens_that_the_slack_allows_and_no_more(
    seed: int, token: float, decode: float, seats: int
) -> None:
    rng, checked = random.Random(seed), 0
    sim = simulation(max_num_seqs=seats, max_num_batched_tokens=64, step_time=Exact(5.0, token, decode), rng=rng)
    step_time = sim.scheduler.accounting.step_time
    while checked < 40 or sim.scheduler.has_work:
        if checked < 40 and rng.random() < 0.6:
            service = rng.choice(["chat", "chat", "offline"])
            sim.submit([rng.randrange(500)] * rng.randrange(1, 40), rng.randrange(1, 20), service_class=service)
        items, checked = sim.step(), checked + 1
        slack_ns, work = sim.scheduler.decisions[-1].slack_ns, work_of(items)
        alone_ns = step_time.predict_ns(StepWork(decode_tokens=work.decode_tokens))
        starves = any(sequence.has_starved for sequence in sim.scheduler.running)
        if slack_ns < alone_ns or math.isinf(slack_ns) or starves:
            assert starves or slack_ns >= alone_ns or not work.prefill_tokens
            continue
        assert step_time.predict_ns(work) <= slack_ns
        left = any(sequence.num_to_compute > 1 and not sequence.is_decoding for sequence in sim.scheduler.running)
        more_ns = step_time.predict_ns(StepWork(work.prefill_tokens + 1, work.decode_tokens))
        assert not left or work.tokens == 64 or more_ns > slack_ns - 1
    sim.check_all_closed()


@dataclass
class Attending(Exact):
    """A token that attends to others takes five times as long."""

    def prefill_ns(self, count: int, start: int, with_logits: bool = False) -> float:
        return super().prefill_ns(count, start) * (5 if start else 1)

    def prefill_tokens_within(self, duration_ns: float, start: int, with_logits: bool = False) -> int:
        return super().prefill_tokens_within(duration_ns / (5 if start else 1), start)


def test_nobody_goes_before_a_prompt_that_has_less_than_it_wants() -> None:
    """Though its token would be too long for what is left of the step's time, and theirs would not."""
    chat, report = ServiceClass(name="chat", ttft_ms=1000, tpot_ms=30), ServiceClass(name="report", ttft_ms=60_000)
    sim = simulation(ClassTable((chat, report)), Attending(), max_num_seqs=8)
    sim.submit([1] * 4, 20, service_class="chat")
    sim.step()
    first = sim.submit([2] * 60, 2, service_class="report")
    sim.step()
    second = sim.submit([3] * 40, 2, service_class="report")
    steps = 0
    while not first.output_len:
        (talk, *prompts), steps = sim.step(), steps + 1
        assert talk.decoding and prompts[0].seq_id == first.seq_id
        if not first.output_len:
            assert len(prompts) == 1 and not second.num_computed
    assert steps > 3
    sim.run_until_done()


def test_a_promised_prompt_has_what_drafts_would_have_of_a_step_s_time() -> None:
    sim = simulation(ClassTable((ServiceClass(name="chat", ttft_ms=1000, tpot_ms=30),)), max_num_seqs=8)
    talk = sim.submit([1] * 4, 40)
    for prompts in (0, 1):
        sim.step()
        for _ in range(prompts):
            sim.submit([2] * 60, 2)
        sim.scheduler.propose(talk.seq_id, [7] * 30)
        items = sim.step()
        assert (items[0].samples > 10) == (not prompts) and len(items) == 1 + prompts
