"""Tables, figures and the page say what the numbers say."""

from __future__ import annotations

import dataclasses
import re

import pytest

from headway.bench.profile import figures, tables
from headway.bench.profile.naive import naive_of
from headway.bench.profile.page import banners, key_figures, page_of
from headway.bench.profile.result import opportunities, profile_length
from headway.calibration.peaks import Rate
from headway.load.record import FailureKind
from headway.report.page import write_page
from tests.bench.command_line import skip_layout
from tests.bench.profile.made import PEAKS, QWEN, answered, result
from tests.bench.records import failed, request


@pytest.fixture(autouse=True)
def _without_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_layout(monkeypatch)


def texts(table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


def written_in(axes) -> str:
    return " | ".join(text.get_text().strip() for text in axes.texts)


def test_latency_table_has_a_row_for_each_metric_and_says_what_a_claim_needs():
    table = tables.latency_table(result())
    assert table.columns == ("prompt", "ms", "requests", "least", "median", "most")
    assert [row[:3] for row in texts(table)[:3]] == [["64", "TTFT", "3"], ["", "TPOT", "3"], ["", "TTLT", "3"]]
    assert texts(table)[0][3:] == ["268", "268", "268"]
    assert re.search(r"Too few requests per length; needed are: P90 \d+, P95 \d+, P99 \d+", table.note)


def test_latency_table_shows_percentiles_that_can_be_claimed():
    records = [answered(n, 64, prefill_ms=10.0 + n) for n in range(50)]
    found = [profile_length(64, records, (50.0, 90.0, 99.0), QWEN, PEAKS)]
    table = tables.latency_table(result(lengths=found, settings={"percentiles": (50.0, 90.0, 99.0)}))
    assert table.columns == ("prompt", "ms", "requests", "least", "median", "P90", "most")
    assert re.search(r"P99 [\d,]+ \(--repeats", table.note) and "P90 " not in table.note.split("Too few")[1]


def test_stage_table_sums_to_the_whole():
    table = tables.stage_table(result())
    assert table.columns == ("tokens", "64", "256")
    columns = list(zip(*texts(table), strict=True))[1:]
    for column in columns:
        *parts, whole = (float(text.replace(",", "")) for text in column)
        assert sum(parts) == pytest.approx(whole, abs=0.6)
    decode = next(row for row in table.rows if row[0].text == "decode")
    assert (decode[1].text, decode[1].detail) == ("150", "34.9 %")


def test_achieved_and_opportunity_tables():
    rows = texts(tables.achieved_table(result()))
    assert [row[:2] for row in rows] == [["64", "prefill"], ["", "decode"], ["256", "prefill"], ["", "decode"]]
    assert rows[1][6] == "memory"
    each = result().typical
    found = texts(tables.opportunity_table(each))
    assert not any("speculative" in text for row in found for text in row), "Headway has none"
    assert [row[0] for row in found[:2]] == ["prefill", "decode"]
    assert found[1][5].startswith("fewer bytes of weights")
    assert len(found) == 8


def test_loading_table_names_the_rest_and_the_rate():
    table = tables.loading_table(result())
    assert texts(table)[-1] == ["process starts and waiting", "1,740"]
    assert "988 MB of weights were read, converted and laid out in 1,000 ms, 0.988 GB/s" in table.note
    assert "imports 800 ms" in table.note
    assert tables.loading_stages(result(engine_stages={})) == {}


def test_machine_table_lists_every_peak():
    rows = texts(tables.machine_table(result()))
    assert rows[0] == ["cpu", "a processor <of> sorts", "2 threads"]
    assert ["reads of 256 MiB", "32 GB/s", "median 31, by headway"] in rows
    assert ["products in bfloat16", "400 GFLOP/s", "median 390, by headway, 1024 x 1024"] in rows


def test_stage_figure_draws_every_stage_of_every_length():
    figure = figures.stage_breakdown(result().measured)
    times, shares = figure.axes
    assert len(times.patches) == len(shares.patches) == 8 * 2
    assert sum(patch.get_width() for patch in shares.patches) == pytest.approx(200)
    assert written_in(times) == "430 | 1,198"
    assert [label.get_text() for label in times.get_yticklabels()] == ["64", "256"]


def test_latency_figure_has_medians_and_the_roofline():
    ttft, tpot = figures.latency_by_length(result()).axes
    median, floor = ttft.lines
    assert list(median.get_ydata()) == pytest.approx([268.0, 1036.0])
    # 64 tokens are bound by bytes, 256 by arithmetic.
    each = result().lengths
    assert floor.get_ydata()[0] == pytest.approx(each[0].prefill.floor_ms)
    assert floor.get_ydata()[-1] == pytest.approx(each[1].prefill.floor_ms)
    assert tpot.lines[1].get_ydata()[0] == pytest.approx(each[0].decode.floor_ms, rel=1e-3)
    assert ttft.get_xlabel() == "Prompt (tokens)" and "ms" in tpot.get_ylabel()


def test_latency_figure_of_one_length_shows_its_range_and_the_roofline():
    one = result()
    one = dataclasses.replace(one, lengths=one.lengths[:1])
    for axes in figures.latency_by_length(one).axes:
        _, floor = axes.lines
        assert floor.get_xdata()[0] < 64 < floor.get_xdata()[-1]
        (least_to_most,) = axes.collections
        (segment,) = least_to_most.get_segments()
        assert segment[0][0] == segment[1][0] == 64


def test_memory_figure_stacks_weights_activations_and_cache():
    needs, room = figures.memory_requirements(result()).axes
    assert [label.get_text() for label in needs.get_xticklabels()] == ["128", "256", "512", "1K", "2K", "4K"]
    last = [bars.patches[-1].get_height() for bars in needs.containers]
    assert sum(last) == pytest.approx(sum(result().memory_of(4096).values()) / 2**20)
    assert written_in(room) == "125 | 62 | 31 | 15 | 7 | 3"


def test_opportunity_figure_is_floor_and_gain():
    each = result().typical
    found = opportunities(each)
    (axes,) = figures.optimisation_opportunities(found, each).axes
    floors, gains = axes.containers
    assert [bar.get_width() for bar in gains] == pytest.approx([o.winnable_ms for o in found])
    assert [bar.get_width() for bar in floors] == pytest.approx([o.floor_ms for o in found])
    assert axes.get_yticklabels()[0].get_text() == "prefill"


def test_roofline_figure_has_points_under_the_roof():
    (axes,) = figures.roofline(result()).axes
    (roof,) = axes.lines
    assert max(roof.get_ydata()) == pytest.approx(400)
    prefill, decode = (points.get_offsets() for points in axes.collections)
    assert len(prefill) == len(decode) == 2
    assert decode[0][1] < 32 * decode[0][0]


def test_roofline_figure_shows_the_caches_where_the_model_fits_in_them():
    reads = (Rate(160e9, 150e9, 20, "torch", 2 * 10**9), Rate(32e9, 31e9, 9, "headway", 4 * 10**9))
    peaks = dataclasses.replace(PEAKS, read_bytes_per_s=reads)
    lengths = [profile_length(64, [answered(0, 64)], (50.0,), QWEN, peaks)]
    (axes,) = figures.roofline(result(peaks=peaks, lengths=lengths)).axes
    labels = [line.get_label() for line in axes.lines]
    assert labels[1] == "943 MiB over and over, from caches: 160 GB/s"


def test_figures_without_data_say_so():
    empty = result(lengths=[], engine_stages={})
    assert "no request" in written_in(figures.stage_breakdown([]).axes[0])
    assert "no request" in written_in(figures.latency_by_length(empty).axes[0])
    assert "no request" in written_in(figures.optimisation_opportunities([], None).axes[0])
    assert "no request" in written_in(figures.roofline(empty).axes[0])
    assert "the server reported nothing" in written_in(figures.model_loading({}, 0.0).axes[0])


def test_page_is_written_with_all_pictures(tmp_path):
    made = result(notes=["the client <b>was late</b>"], interrupted=True)
    files = write_page(tmp_path / "profile.html", page_of(made), figures_dir=tmp_path / "figures")
    html = files[0].read_text()
    assert html.count("<svg") == 6
    assert {file.name for file in files[1:]} == {
        "latency-by-length.png",
        "memory-requirements.png",
        "model-loading.png",
        "optimisation-opportunities.png",
        "roofline.png",
        "stage-breakdown.png",
    }
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files[1:])
    assert "Interrupted" in html and "<b>was late</b>" not in html and "a processor &lt;of&gt; sorts" in html
    assert not re.search(r"(src|href)=[\"']?https?:", html)


def test_page_of_nothing_can_be_written(tmp_path):
    lengths = [profile_length(64, [failed(0, FailureKind.CUT)], (50.0,), QWEN, PEAKS)]
    html = write_page(tmp_path / "p.html", page_of(result(lengths=lengths)))[0].read_text()
    assert "Nothing was measured" in html and "1 requests failed" not in html and "cut" in html


def test_what_must_not_be_missed():
    peaks = dataclasses.replace(PEAKS, others_cores=1.5)
    found = banners(result(peaks=peaks, interrupted=True, notes=["the server ended with code 9"]))
    assert [banner.title for banner in found] == ["Interrupted", "Busy machine", "Beware"]
    assert found[1].lines[0].startswith("Other processes used 1.5 cores")
    assert found[2].lines == ("The server ended with code 9.",)
    assert banners(result()) == ()


def test_key_figures_are_those_of_the_middle_length():
    assert key_figures(result())[:2] == (("1,036 ms", "TTFT, prompt of 256"), ("50 ms", "TPOT"))
    assert key_figures(result(lengths=[])) == (("494.0 M", "parameters"), ("5 s", "until ready"))


def test_tokens_without_a_cache_stand_beside_those_with_one():
    cached = [answered(index, 100, prefill_ms=50.0, decode_ms=30.0) for index in range(3)]
    alone = [request(at, [60.0 + 20 * at], prompt=100 + at) for at in range(4)]
    naive = naive_of(100, alone, cached)
    assert naive is not None and naive.naive_ms == (60.0, 80.0, 100.0, 120.0)
    assert naive.cached_ms == pytest.approx((62.0, 10.0, 10.0, 10.0)) and naive.times == pytest.approx(360 / 92)
    rows = [[cell.text for cell in row] for row in tables.naive_table(naive).rows]
    assert rows[0][0] == "token 1" and rows[-1][-1] == "3.9 x" and rows[2][-1] == "12.0 x"
    (axes,) = figures.naive_and_cached(naive).axes
    assert [line.get_ydata()[-1] for line in axes.lines] == pytest.approx([360, 92])
    assert naive_of(100, alone[:3], cached) is None
