"""`headway bench pareto`: runs that no other one beats for users and for the device."""

from __future__ import annotations

from pathlib import Path

from headway.bench.pareto import Point, front_figure, marked
from headway.bench.results import to_json, write_json
from headway.load.measures.summary import summarise_all
from tests.bench.command_line import CommandLine
from tests.bench.records import request, run


def point(name: str, user: float, device: float) -> Point:
    return Point(name, 1.0, user, device, None)


def test_the_front_is_what_no_other_run_beats() -> None:
    points = [point("a", 100, 50), point("a", 60, 400), point("b", 80, 300), point("b", 50, 350), point("b", 60, 380)]
    found = marked([*points, point("c", 20, 400), point("c", 10, 500)])
    front = [(each.user, each.device) for each in found if each.is_front]
    assert front == [(100, 50), (80, 300), (60, 400), (10, 500)]
    (axes,) = front_figure(found).axes
    assert len(axes.lines) == 4 and list(axes.lines[-1].get_xdata()) == [100, 80, 60, 10]


def saved(folder: Path, name: str, gap: float, **fields: object) -> Path:
    """A run of eight requests with so many milliseconds between tokens."""
    records = [request(i, [50.0, 50 + gap, 50 + 2 * gap], due=0) for i in range(8)]
    result = run(records, seconds=1.0, **fields)
    result.settings |= {"label": "", "goodput_by_class": {}}
    path = folder / name
    write_json(path, to_json(result, summarise_all(result), percentiles=[50.0]))
    return path


def test_files_become_a_table_and_a_picture(headway: CommandLine, tmp_path: Path) -> None:
    files = [
        saved(tmp_path, "fast-1.json", 10.0),
        saved(tmp_path, "fast-2.json", 20.0),
        saved(tmp_path, "slow.json", 40.0),
    ]
    page = tmp_path / "pareto.html"
    ran = headway("bench", "pareto", *files, "--devices", 2, "--report", page, results=False)
    assert ran.code == 0 and "3 runs" in ran.out and page.stat().st_size > 10_000
    rows = [line.split() for line in ran.out.splitlines() if line.strip().startswith(("fast", "slow"))]
    assert [(row[0], row[2], row[3]) for row in rows] == [
        ("fast", "100", "12"),
        ("fast", "50", "12"),
        ("slow", "25", "12"),
    ]
    assert rows[0][-1] == "front" and rows[1][-1] != "front"
    cut = saved(tmp_path, "cut.json", 5.0, interrupted=True)
    assert "left out: " in headway("bench", "pareto", *files, cut, results=False).out
    error = headway("bench", "pareto", files[0], cut, results=False).error()
    assert "1 of 2 runs can be shown" in error and "it was interrupted" in error
    assert "above 10 ms" in headway("bench", "pareto", *files, "--ttft-ms", 10, results=False).error()
