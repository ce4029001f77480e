"""The figures of a plan, from tiny models to those that do not fit."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from headway.cost.hardware import Hardware
from headway.planner import pictures
from headway.planner.make import make_plan
from headway.planner.plan import Plan
from headway.planner.request import PlanRequest
from headway.report import style

LIGHT: dict[str, Any] = {"prompt_tokens": 128, "output_tokens": 16, "max_num_seqs": 16}
SLOW = "405B on eight", "batch of one", "rate too high", "pipeline", "batch does not fit"
CASES: dict[str, dict[str, Any]] = {
    "batch of one": {"model": "llama-3.1-8b", "hardware": "H100-SXM"},
    "tiny": {
        "model": "qwen2.5-0.5b",
        "hardware": "RTX-4090",
        "batch_size": 4,
        "prompt_tokens": 1,
        "output_tokens": 1,
        "block_size": 1,
    },
    "clients and objectives": {
        "model": "llama-3.1-8b",
        "hardware": "H100-SXM",
        "concurrency": 8,
        "slo": {"ttft": 50, "tpot": 9},
    },
    "405B on eight": {"model": "llama-3.1-405b", "hardware": "H100-SXM", "count": 8, "quantization": "fp8"},
    "experts and latents": {"model": "deepseek-v3", "hardware": "H200", "count": 8, "concurrency": 8},
    "rate": {"model": "llama-3.1-8b", "hardware": "H100-SXM", "request_rate": 2.0, "output_tokens": 2},
    "rate too high": {"model": "llama-3.1-8b", "hardware": "L4", "request_rate": 1e6, "output_tokens": 2},
    "pipeline": {"model": "gpt-oss-20b", "hardware": "H100-SXM", "count": 4, "pipeline_parallel_size": 2},
    "does not fit": {"model": "llama-3.1-70b", "hardware": "H100-SXM", "count": 1, "concurrency": 4},
    "batch does not fit": {"model": "llama-3.1-8b", "hardware": "L4", "batch_size": 16, "prompt_tokens": 20000},
}


def planned(**settings: Any) -> Plan:
    return make_plan(PlanRequest(**{**LIGHT, **settings}))


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, id=name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES],
)
def plan(request: pytest.FixtureRequest) -> Plan:
    return planned(**CASES[request.param])


@pytest.fixture(scope="module")
def plans(plan: Plan) -> tuple[Plan, ...]:
    """The plan under more and less load."""
    return pictures.sweep(plan)


def test_all_can_be_drawn_and_no_name_covers_another(plan: Plan, plans: tuple[Plan, ...]) -> None:
    figures = {
        "roofline": pictures.roofline(plan),
        "memory": pictures.memory(plan),
        "latency": pictures.latency(plan, plans),
        "times": pictures.times(plan),
    }
    for name, figure in figures.items():
        assert "<svg" in style.to_svg(figure, name)  # which lays it out
        renderer = FigureCanvasAgg(figure).get_renderer()
        for axes in figure.axes:
            texts = [t for t in axes.texts if isinstance(t, Annotation) and t.get_text().strip()]
            boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in texts]
            for (one, box), (other, another) in combinations(boxes, 2):
                # Text boxes have some air around the letters.
                assert not box.padded(-2).overlaps(another.padded(-2)), f"{name}: {one!r} and {other!r}"


def lines(figure: Figure, label: str) -> list[Any]:
    return [line for axes in figure.axes for line in axes.get_lines() if label in str(line.get_label())]


def test_points_are_attained_rates_below_the_roof(plan: Plan) -> None:
    axes = pictures.roofline(plan).axes[0]
    roofs = pictures._roofs(plan)
    for phase, points in zip((plan.prefill, plan.decode), axes.collections, strict=True):
        parts = {p.name: p for p in phase.time.parts if p.work.flops}
        assert len(points.get_offsets()) == len(parts)
        for x, y in points.get_offsets():
            assert any(x == pytest.approx(part.work.intensity) for part in parts.values())
            assert y * 1e12 <= max(roof.attainable(float(x)) for roof in roofs.values()) * 1.0001


def test_roofline_has_a_roof_for_each_format(plan: Plan) -> None:
    roofs = pictures._roofs(plan)
    assert next(iter(roofs.values())).ridge == plan.ridge_flops_per_byte
    assert len(roofs) == (2 if plan.quantization in ("fp8", "fp8-block") else 1)


def test_memory_crosses_where_the_plan_says() -> None:
    made = planned(model="llama-3.1-8b", hardware="H100-SXM", concurrency=8)
    held = made.capacity
    for batch in (1, 3, 8):
        longest = pictures.longest_context(made, batch)
        assert pictures.kv_of_device(made, batch, longest) <= held.kv_pool
        assert pictures.kv_of_device(made, batch, longest + made.request.block_size) > held.kv_pool
    assert pictures.longest_context(made, 1) == held.max_context
    assert lines(pictures.memory(made), f"cache of {made.batch}: up to")


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", [{}, {"count": 2}, {"pipeline_parallel_size": 2}, {"block_size": 7}], ids=str)
@pytest.mark.parametrize("model", ["gpt-oss-20b", "mistral-7b", "qwen2.5-7b"])
def test_memory_agrees_with_the_answer(model: str, settings: dict[str, Any]) -> None:
    """Of models with windows in half of the layers, in all and in none: the longest context and the most sequences."""
    made = planned(model=model, hardware="A100-40GB-SXM", concurrency=16, prompt_tokens=6000, **settings)
    held, asked, block = made.capacity, made.workload.prompt + made.workload.output, made.request.block_size
    longest = pictures.longest_context(made, 1)
    assert longest == min(held.max_context, pictures.LONGEST) // block * block
    assert pictures.kv_of_device(made, made.max_batch, asked) <= held.kv_pool
    assert pictures.kv_of_device(made, made.max_batch + made.deployment.parallelism.data, asked) > held.kv_pool
    assert pictures.longest_context(made, made.max_batch) >= asked // block * block
    assert pictures.longest_context(made, made.max_batch + 1) < asked


@pytest.mark.parametrize("settings", [{}, {"max_model_len": 4096}, {"max_model_len": 200_000}], ids=str)
def test_memory_ends_where_it_is_allowed_to(settings: dict[str, Any]) -> None:
    made = planned(model="gpt-oss-20b", hardware="H100-SXM", concurrency=16, **settings)
    allowed = settings.get("max_model_len", 131_072)
    assert lines(pictures.memory(made), f"cache of 1: all {allowed:,} that are allowed")


def test_memory_is_drawn_where_nothing_fits() -> None:
    figure = pictures.memory(planned(model="llama-3.1-70b", hardware="H100-SXM", count=1))
    assert lines(figure, "none fits")
    assert figure.axes[0].get_ylim()[1] > 141  # GB of weights


def test_sweep_is_made_of_plans_and_holds_the_plan(plan: Plan, plans: tuple[Plan, ...]) -> None:
    if not plan.capacity.fits:
        assert plans == ()
        return
    values = [each.load_value for each in plans]
    assert values == sorted(values) and len(set(values)) == len(values) and len(values) >= min(6, plan.max_batch)
    assert (plan in plans) == (plan.fits and plan.ttft is not None)
    assert all(each.ttft is not None and each.load == plan.load for each in plans)
    middle = plans[len(plans) // 2]
    under = pictures.under(plan, middle.load_value)
    assert under.tpot and middle.tpot and under.tpot.value == middle.tpot.value


def test_latency_has_the_plan_its_bars_and_its_objectives() -> None:
    made = planned(**CASES["clients and objectives"])
    figure = pictures.latency(made, pictures.sweep(made))
    tpot, ttft = figure.axes
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "objective" in named and len(set(named)) == len(named) == 3
    for axes, found, limit in ((tpot, made.tpot, 9), (ttft, made.ttft, 50)):
        assert found is not None
        assert any(list(line.get_xdata()) == [limit, limit] for line in axes.get_lines())
        diamonds = [line for line in axes.get_lines() if line.get_marker() == "D"]
        assert [float(line.get_xdata()[0]) for line in diamonds] == [pytest.approx(found.value * 1e3)]


def test_bars_are_the_times_of_the_plan(plan: Plan) -> None:
    for phase in (plan.prefill, plan.decode):
        rows = pictures._bars(phase)
        assert sum(predicted for _, predicted, _ in rows) == pytest.approx(phase.time.seconds)
        assert sum(floor for _, _, floor in rows) == pytest.approx(phase.floor_s)


def test_caches_have_a_roof_of_their_own() -> None:
    """Of a measured machine whose caches hold the model."""
    made = planned(model="qwen2.5-0.5b", hardware="RTX-4090")
    cached: Hardware = replace(made.deployment.hardware, reads=((2**20, 9e12), (2**40, 1e12)))
    roofs = pictures._roofs(replace(made, deployment=replace(made.deployment, hardware=cached)))
    assert any("from caches" in label for label in roofs)
