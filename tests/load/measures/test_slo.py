"""Objectives as they are written, and who met them."""

from __future__ import annotations

import math

import pytest

from headway.load.errors import BenchError
from headway.load.measures.percentiles import proportion_interval
from headway.load.measures.slo import attainment, missed_objectives, slowness
from headway.load.option_values import check_objectives, parse_goodput
from headway.load.record import FailureKind
from tests.bench.records import failed, request


def test_objectives_are_key_and_milliseconds() -> None:
    assert parse_goodput(["ttft:200", "tpot:50.5", "e2el:5e3"]) == {"ttft": 200.0, "tpot": 50.5, "e2el": 5000.0}
    assert parse_goodput([]) == {}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (["ttft=200"], ["'ttft=200'", "KEY:MS", "ttft, tpot, e2el"]),
        (["ttft"], ["'ttft'", "KEY:MS"]),
        (["itl:20"], ["'itl'", "ttft, tpot, e2el"]),
        (["TTFT:20"], ["'TTFT'"]),
        (["ttft:fast"], ["'fast'", "milliseconds"]),
        (["ttft:"], ["'ttft:'"]),
        (["ttft:0"], ["ttft:0", "above 0"]),
        (["tpot:-5"], ["tpot:-5"]),
        (["tpot:nan"], ["nan"]),
        (["tpot:inf"], ["inf"]),
        (["ttft:1", "ttft:2"], ["twice", "'ttft'"]),
    ],
)
def test_bad_objectives_name_the_value_and_the_keys(values: list[str], named: list[str]) -> None:
    with pytest.raises(BenchError) as error:
        parse_goodput(values)
    message = str(error.value)
    assert "--goodput" in message and "\n" not in message
    assert all(word in message for word in named)


def test_objectives_of_a_class_name_the_class() -> None:
    with pytest.raises(BenchError, match=r"class 'chat' of mix\.json: unknown objective 'tbt'"):
        check_objectives({"tbt": 3.0}, "class 'chat' of mix.json")


OBJECTIVES = {"ttft": 100.0, "tpot": 20.0, "e2el": 200.0}
GOALS = {"": OBJECTIVES}


def test_a_request_meets_all_or_misses() -> None:
    records = [
        request(0, [100, 120, 140]),  # all of them exactly
        request(1, [101, 120]),
        request(2, [50, 71]),
        request(3, [90, 105, 120, 135, 150, 165, 180, 195, 201]),
        request(4, [150, 300]),
        failed(5),
    ]
    assert missed_objectives(records, GOALS) == {
        0: (),
        1: ("ttft",),
        2: ("tpot",),
        3: ("e2el",),
        4: ("ttft", "tpot", "e2el"),
        5: ("failed",),
    }
    told = attainment(records, GOALS, duration_s=10)
    assert told is not None
    assert (told.met, told.total, told.share) == (1, 6, 1 / 6)
    assert told.missed_by == {"ttft": 2, "tpot": 2, "e2el": 2, "failed": 1}
    assert (told.requests_per_s, told.tokens_per_s) == (0.1, 0.3)
    assert told.objectives == OBJECTIVES


def test_only_what_was_asked_for_counts() -> None:
    records = [request(0, [150, 300])]
    told = attainment(records, {"": {"e2el": 300.0}}, duration_s=1)
    assert told is not None and told.met == 1
    assert told.missed_by == {"e2el": 0, "failed": 0}


def test_latencies_count_from_the_schedule() -> None:
    late = [request(0, [1000, 1010], due=0, sent=950)]
    assert missed_objectives(late, {"": {"ttft": 100.0}}) == {0: ("ttft",)}
    assert missed_objectives(late, {"": {"ttft": 100.0}}, since="send") == {0: ()}


def test_an_answer_of_one_token_meets_any_tpot() -> None:
    assert missed_objectives([request(0, [1000])], {"": {"tpot": 0.1}}) == {0: ()}


def test_the_interval_is_that_of_the_share() -> None:
    # Which requests miss is spread at random, so that they are worth nearly as many as they are.
    records = [request(i, [500 if i * i % 101 > 80 else 50, 600], due=0) for i in range(101)]
    told = attainment(records, {"": {"ttft": 100.0}}, duration_s=1)
    assert told is not None
    low, high = proportion_interval(told.met, told.total, 0.95)
    assert told.low <= low < told.share < high <= told.high


def test_requests_that_depend_on_each_other_widen_the_interval() -> None:
    blocks = [request(i, [500 if i // 50 % 2 else 50], due=i) for i in range(400)]
    mixed = [request(i, [(500 if i * 7919 % 400 % 2 else 50) + i], due=i) for i in range(400)]
    together, apart = (attainment(r, {"": {"ttft": 300.0}}, duration_s=1) for r in (blocks, mixed))
    assert together is not None and apart is not None
    assert together.high - together.low > 2 * (apart.high - apart.low)


def test_classes_have_their_own_objectives() -> None:
    records = [
        request(0, [150, 160], class_name="chat"),
        request(1, [150, 160], class_name="batch"),
        request(2, [1500, 1600], class_name="batch"),
        request(3, [50, 60], class_name="free"),
    ]
    by_class = {"chat": {"ttft": 100.0}, "batch": {"e2el": 1000.0}}
    told = attainment(records, by_class, duration_s=1)
    assert told is not None
    assert (told.met, told.total) == (1, 3)  # "free" has none and is not judged
    assert told.objectives == {"chat.ttft": 100.0, "batch.e2el": 1000.0}
    assert told.missed_by == {"ttft": 1, "e2el": 1, "failed": 0}
    with_general = attainment(records, {"": {"ttft": 10.0}, **by_class}, duration_s=1)
    assert with_general is not None and with_general.total == 4
    assert with_general.missed_by["ttft"] == 2
    of_chat = attainment(records[:1], by_class, duration_s=1)
    assert of_chat is not None and of_chat.objectives == {"ttft": 100.0}


def test_no_objectives_no_attainment() -> None:
    assert attainment([request(0, [1, 2])], {}, duration_s=1) is None
    assert attainment([request(0, [1, 2])], {"": {}}, duration_s=1) is None


def test_an_abandoned_request_counts_only_if_it_had_missed_already() -> None:
    records = [
        failed(0, FailureKind.ABANDONED, due=0, end=50),
        failed(1, FailureKind.ABANDONED, due=0, end=150),
        failed(2, FailureKind.ABANDONED, due=0, end=250),
        request(3, [50, 60], due=0, end=250),
    ]
    assert missed_objectives(records, GOALS) == {1: ("ttft",), 2: ("ttft", "e2el"), 3: ()}
    told = attainment(records, GOALS, duration_s=1)
    assert told is not None and (told.met, told.total) == (1, 3)


def test_a_cancelled_request_counts_only_if_it_had_missed_already() -> None:
    records = [
        failed(0, FailureKind.CANCELLED, due=0, end=50),
        failed(1, FailureKind.CANCELLED, chunks=[90, 95], due=0, end=190),
        failed(2, FailureKind.CANCELLED, due=0, end=150),
        request(3, [50, 60]),
    ]
    assert missed_objectives(records, GOALS) == {2: ("ttft",), 3: ()}
    told = attainment(records, GOALS, duration_s=1)
    assert told is not None and (told.met, told.total, told.missed_by["failed"]) == (1, 2, 0)


def test_a_request_never_sent_is_not_judged() -> None:
    never = failed(0, FailureKind.ABANDONED, due=5000)
    never.sent_ns = never.end_ns = 0
    told = attainment([never], GOALS, duration_s=1)
    assert told is not None
    assert (told.met, told.total, told.low, told.high) == (0, 0, 0.0, 1.0)


def test_slowness_is_how_near_each_request_came_to_its_limits() -> None:
    records = [request(1, [150, 160], due=50), request(0, [50, 90]), failed(2, due=90), request(3, [130], due=100)]
    limits = {"": {"ttft": 100.0, "tpot": 20.0}}
    assert slowness(records, limits).tolist() == pytest.approx([2.0, 1.0, math.inf, 0.3])
    missed = missed_objectives(records, limits)
    assert [bool(missed[index]) for index in range(4)] == [True, False, True, False]
    assert slowness([], limits).tolist() == slowness(records, {}).tolist() == []
