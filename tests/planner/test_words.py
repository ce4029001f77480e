"""How figures are written."""

from __future__ import annotations

from typing import Any

import pytest

from headway.planner.answer import answer, headline
from headway.planner.make import make_plan
from headway.planner.plan import Estimate
from headway.planner.request import PlanRequest, Speculation
from headway.planner.words import amount, bar, dollars, gigabytes, many, milliseconds, seconds


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (131072, "131 kB"), (16_060_522_496, "16.1 GB"), (-2.5e9, "-2.5 GB")],
)
def test_sizes_are_decimal(size: float, text: str) -> None:
    assert gigabytes(size) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(250.0, "250 s"), (1.5, "1.5 s"), (0.0123, "12.3 ms"), (4.2e-6, "4.2 µs"), (3e-9, "3 ns"), (0.0, "0 ns")],
)
def test_times_have_the_unit_that_suits_them(value: float, text: str) -> None:
    assert seconds(value) == text


def test_others() -> None:
    assert amount(1.64e17, "FLOP") == "164 PFLOP"
    assert amount(12, "") == "12 "
    assert (many(1, "sequence"), many(2000, "sequence")) == ("1 sequence", "2,000 sequences")
    assert (dollars(1234.5), dollars(0.0421), dollars(None)) == ("$1,234.50", "$0.0421", "–")
    assert (dollars(0.36), dollars(8.274e-6), dollars(0.0)) == ("$0.36", "$0.00000827", "$0.00")


def test_bars() -> None:
    assert milliseconds(Estimate(0.02, 0.01, 0.04)) == "20 ms (10 to 40)"
    assert milliseconds(Estimate(20.0, 10.0, 40.0)) == "20 s (10 to 40)"
    assert milliseconds(None) == "–"
    assert bar(Estimate(2.0, 1.0, float("inf"))) == "1 or more"
    assert bar(Estimate(2.0, 2.0, 2.0)) == "exactly 2"


def said(model: str = "llama-3.1-8b", hardware: str = "H100-SXM", **given: Any) -> dict[str, str]:
    """The lines of the short answer by label, with the headline and the assumptions."""
    plan = make_plan(PlanRequest(model, hardware, **given))
    lines = {line.label: line.text for line in answer(plan)}
    return lines | {"headline": headline(plan), "assumptions": "\n".join(plan.assumptions)}


def test_objectives_say_how_far_off_they_are() -> None:
    slo = said(slo={"ttft": 1e6, "tpot": 0.1})["SLO"]
    assert slo.startswith("TTFT ≤ 1,000,000 ms: met, 100% below the limit; TPOT ≤ 0.1 ms: missed, ")
    assert slo.endswith(" times the limit.")
    assert "TPOT ≤ 7 ms: probably missed, but the error bar begins at " in said(slo={"tpot": 7.0})["SLO"]
    assert "TPOT ≤ 7.5 ms: probably met, but the error bar ends at " in said(slo={"tpot": 7.5})["SLO"]
    assert said(request_rate=1e4, slo={"ttft": 5.0})["SLO"].endswith("missed, because the queue grows without limit.")
    assert (
        said("llama-3.1-70b", count=1, slo={"ttft": 5.0})["SLO"]
        == "TTFT ≤ 5 ms: missed, because the plan does not fit."
    )
    assert "TPOT ≤ 5 ms: met" in said(output_tokens=1, concurrency=2, slo={"tpot": 5.0})["SLO"]


def test_what_another_name_is_taken_for_is_said() -> None:
    both = "llama-3-8b is taken as llama-3.1-8b, and H100 is taken as H100-SXM. `headway plan --list` lists all."
    assert said("llama-3-8b", "H100")["Names"] == both
    for name in ("llama-3.1-8b", "meta-llama/Llama-3.1-8B", "LLAMA-3.1-8B", "headway/story"):
        assert "Names" not in said(name, "h100-sxm")


def test_one_of_a_thing_is_no_plural() -> None:
    lines = said(prompt_tokens=1, speculation=Speculation(1, 0.1))
    assert "1 token in," in lines["headline"] and "with 1 token at" in lines["Speculation"]
    assert "A batch of 1 prompt," in lines["assumptions"]
    assert "times as slow" in said(speculation=Speculation(1, 0.0, "llama-3.1-8b"))["Speculation"]


def test_the_longest_context_is_no_longer_than_the_model_allows() -> None:
    assert "one of 131,072, the longest allowed" in said()["Fits"]
    assert "one of 4,000, the longest" in said(max_model_len=4000)["Fits"]
    assert "allowed" not in said(hardware="RTX-4090")["Fits"]


def test_cache_is_of_a_device_where_its_memory_is() -> None:
    assert "81.9 kB per token (328 kB in all)" in said("llama-3.1-70b", count=4)["Fits"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"concurrency": 4}, "between 230 and 282 tokens (--output-spread 0.1)"),
        ({"request_rate": 1.0, "output_spread": 0.5}, "between 128 and 384 tokens (--output-spread 0.5)"),
        ({"concurrency": 4, "output_spread": 0.0}, "All answers have 256 tokens"),
        ({"batch_size": 4}, "All answers are equally long"),
    ],
)
def test_assumptions_say_how_long_answers_are(given: dict[str, Any], text: str) -> None:
    assert text in said(**given)["assumptions"]


def test_assumptions_say_which_products_a_device_lacks() -> None:
    lacks = "A100-80GB-SXM has no products in fp8: they are done in bf16, and its weights are widened for it."
    assert lacks in said(hardware="A100-80GB-SXM", quantization="fp8")["assumptions"]
    assert "has no products" not in said(quantization="fp8")["assumptions"]


def test_a_queue_without_end_is_called_that() -> None:
    assert said(request_rate=1e4)["TTFT"].startswith("grows without limit;")
