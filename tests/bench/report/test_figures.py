"""Figures: labelled axes, and no run that breaks one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest

from headway.bench.report import figures, figures_rates, figures_requests, figures_time, pictures
from headway.bench.report.figures_rates import load_points
from headway.bench.report.phases import part_of
from headway.bench.report.views import load_name, load_of
from headway.load.measures.server_metrics import over_time
from headway.load.measures.summary import summarise_all
from headway.load.record import RunResult
from headway.report import style
from headway.report.parts import Picture
from tests.bench.report.runs import OBJECTIVES, ODD, sweep, usual
from tests.bench.report.simulated import simulated_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNIT = re.compile(
    r"\((ms|s|%|steps|1/s|1: no difference|its number)\)|tokens/s|in flight|in order of arrival|; .* is better"
)


def all_pictures(result: RunResult) -> Iterator[Picture]:
    summaries = summarise_all(result, goals={"": OBJECTIVES})
    yield from pictures.latency_pictures(result, summaries[0])
    yield from pictures.tail_pictures(result)
    yield from pictures.time_pictures(result, summaries)
    yield pictures.client_picture(result)
    yield from pictures.load_pictures(load_points([(result, summaries)]), load_name([result]))


def check_axes(figure: Figure) -> None:
    """Every axis has a name with a unit, unless it shares a neighbour's or has names for its ticks."""
    assert figure.axes
    names = {axes.get_xlabel() for axes in figure.axes} | {axes.get_ylabel() for axes in figure.axes}
    for axes in figure.axes:
        for label, shared in (
            (axes.get_xlabel(), axes.get_shared_x_axes()),
            (axes.get_ylabel(), axes.get_shared_y_axes()),
        ):
            named_ticks = any(re.search("[A-Za-z]{3}", tick.get_text()) for tick in axes.get_yticklabels())
            assert UNIT.search(label) or named_ticks or len(shared.get_siblings(axes)) > 1, (label, names)


@pytest.mark.parametrize("kind", ODD)
def test_no_run_breaks_a_picture(kind: str) -> None:
    for picture in all_pictures(ODD[kind]()):
        picture.figure.set_layout_engine("none")  # half of the time, and not what is tested
        svg = style.to_svg(picture.figure, picture.name)
        assert not re.search(r"\b(nan|NaN|inf)\b", svg), picture.name
        assert picture.caption.endswith((".", ")")) and not re.search(r"\bnan\b", picture.caption), picture.caption


def test_axes_of_a_usual_run_are_labelled() -> None:
    found = list(all_pictures(usual()[0]))
    assert len(found) >= 11
    for picture in found:
        check_axes(picture.figure)


def test_no_name_of_an_axis_is_wider_than_the_picture() -> None:
    """There must be room to spare: a page has another font, whose letters may be wider."""
    points = load_points(list(zip(*sweep(), strict=True)))
    for picture in [*all_pictures(usual()[0]), *pictures.load_pictures(points, "Request rate (1/s)")]:
        figure = picture.figure
        with style.drawing():
            figure.draw_without_rendering()
            boxes = {axes.get_xlabel(): axes.xaxis.label.get_window_extent() for axes in figure.axes}
        for name, box in boxes.items():
            assert box.x0 >= 0 and box.x1 + 0.05 * box.width <= figure.bbox.width, name


def test_names_of_pictures_are_fit_for_files() -> None:
    names = [picture.name for picture in all_pictures(simulated_run(2))]
    assert len(set(names)) == len(names) and all(re.fullmatch("[a-z0-9-]+", name) for name in names)


def test_a_cdf_marks_only_percentiles_that_can_be_claimed() -> None:
    run = simulated_run(60, rate=5)
    whole = summarise_all(run)[0]
    texts = [text.get_text() for text in figures.latency_cdf(run.records, whole).axes[0].texts]
    claimed = [claim.p for claim in whole.from_schedule["ttft_ms"].percentiles if claim.value is not None]
    assert 50.0 in claimed and 99.0 not in claimed
    assert [text.split()[0] for text in texts] == [f"P{p:g}" for p in claimed if p in figures.PERCENTILES]
    assert not figures.latency_cdf(run.records).axes[0].texts


def test_a_cdf_of_many_values_keeps_its_tail() -> None:
    values = np.sort(np.random.default_rng(0).exponential(size=200_000))
    x, y = figures.thinned(values)
    assert len(x) <= figures.MOST_POINTS + 2
    assert x[-1] == values[-1] and y[-1] == 100
    assert np.interp(99.9, y, x) == pytest.approx(np.quantile(values, 0.999), rel=0.01)


def test_a_long_run_shows_the_neighbours_of_its_slowest_request() -> None:
    run = simulated_run(600, rate=24)
    rows, first = figures_requests.timeline_rows(run.records)
    slowest = max(run.records, key=lambda record: record.end_ns - record.scheduled_ns)
    assert len(rows) == figures_requests.EXCERPT and slowest in rows
    assert rows == sorted(run.records, key=lambda record: record.scheduled_ns)[first : first + len(rows)]
    few, none_before = figures_requests.timeline_rows(run.records[:100])
    assert len(few) == 100 and none_before == 0


def test_a_part_that_is_long_in_one_request_has_a_legend() -> None:
    run = simulated_run(100, rate=24)
    queued = max(run.records, key=lambda record: record.end_ns - record.scheduled_ns)
    assert queued.timings is not None
    queued.timings["phases_ns"]["queue_blocks"] = 20_000_000
    figure = figures_requests.slowest_requests(run.records)
    named = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert part_of("queue_blocks").label in named


def test_many_requests_do_not_make_a_large_file() -> None:
    run = simulated_run(3000, rate=24)
    for figure in (
        figures_requests.timeline(run.records, run.began_ns),
        figures_time.itl_over_time(run.records, run.began_ns),
        figures_time.latency_over_time(run.records, run.began_ns),
        figures_time.load_over_time(run.records, run.began_ns, run.ended_ns),
    ):
        figure.set_layout_engine("none")
        assert len(style.to_svg(figure)) < 200_000


def test_a_server_s_gauges_are_shown_as_far_as_it_has_them() -> None:
    run = usual()[0]
    gauges = [(1.0, {"running": 2.0, "waiting": 0.0}), (2.0, {"waiting": 3.0, "kv_cache_usage": 0.5}), (3.0, {})]
    run.server = {"metrics": over_time(gauges)}
    (picture,) = pictures.server_pictures(run)
    assert "50 % of its KV cache in use on average" in picture.caption
    above, below = picture.figure.axes
    assert {line.get_label() for line in above.get_lines()} == {"running", "waiting"}
    assert [line.get_label() for line in below.get_lines()] == ["KV cache"]
    assert below.get_xlim()[0] == 0
    check_axes(picture.figure)
    picture.figure.set_layout_engine("none")
    assert not re.search(r"\b(nan|NaN|inf)\b", style.to_svg(picture.figure, picture.name))
    run.server = {}
    assert pictures.server_pictures(run) == []


def test_lag_keeps_its_peaks() -> None:
    lag = np.zeros(100_000)
    lag[77_777] = 42.0
    _, worst = figures.worst_of_bins(lag, 400)
    assert len(worst) == 400 and worst.max() == 42.0


def test_runs_are_points_by_rising_load() -> None:
    runs, summaries = sweep()
    points = load_points(list(zip(runs, summaries, strict=True)))
    assert [point.load for point in points] == [4.0, 8.0, 16.0, 40.0]
    assert load_name(runs) == "Request rate (1/s)"
    good = figures_rates.goodput_against_load(points)
    lines = {line.get_label(): line for line in good.axes[0].get_lines()}
    assert list(lines["goodput: objectives met"].get_ydata()) == [p.summary.attainment.requests_per_s for p in points]
    for figure in (good, figures_rates.latency_against_load(points), figures_rates.throughput_against_latency(points)):
        check_axes(figure)


def test_an_interval_at_a_single_load_can_be_seen() -> None:
    figure = figures_rates.latency_against_load(load_points([usual()]))
    ranges = [found for axes in figure.axes for found in axes.collections]
    assert ranges and all(len(each.get_segments()) == 1 for each in ranges)
    assert any(segment[0][1] < segment[1][1] for each in ranges for segment in each.get_segments())


def test_the_load_of_closed_and_of_unpaced_runs() -> None:
    run = simulated_run(20)
    run.settings |= {"request_rate": None, "max_concurrency": 8}
    assert (load_of(run), load_name([run])) == (8.0, "Requests in flight, at most")
    run.settings |= {"request_rate": float("inf"), "max_concurrency": None}
    assert load_of(run) == pytest.approx(20 / run.duration_s)
    assert load_name([run]) == "Requests that came (1/s)"


def test_the_front_joins_runs_that_no_other_beats() -> None:
    runs, summaries = sweep()
    points = load_points(list(zip(runs, summaries, strict=True)))
    axes = figures_rates.throughput_against_latency(points).axes[0]
    (front,) = [line for line in axes.get_lines() if line.get_label() == "Pareto front"]
    known = [
        (x, p.summary.rates["output_throughput"])
        for p in points
        if (x := p.summary.from_schedule["ttft_ms"].percentile(90.0).value)
    ]
    best = {(x, y) for x, y in known if not any(x2 <= x and y2 >= y and (x2, y2) != (x, y) for x2, y2 in known)}
    assert set(zip(*front.get_data(), strict=True)) == best
