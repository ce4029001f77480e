"""The benchmark of the simulator beside a live server: what it sends, and what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.verify import main, table, workloads


def test_traces_are_clipped_and_the_rest_needs_no_file(tmp_path: Path) -> None:
    assert list(workloads(None)) == ["bursts", "overload"]
    of_traces = workloads(tmp_path)
    assert len(of_traces) == 4
    assert of_traces["azure conversations"][-4:] == ["--max-input-len", "3000", "--max-output-len", "300"]


def test_the_table_has_ratios_and_dashes_where_a_sample_is_too_small() -> None:
    found = {
        "differences": [{"metric": "ttft_ms", "statistic": "median", "ratio": 0.954}],
        "throughput": [200, 210],
        "slower": [1.02, 0.98],
        "by_own_steps": {"ttft_ms": {"p90": 1.01}},
    }
    said = table({"workloads": {"bursts": found}})
    assert "| bursts | 0.95 | - | - | - | - | - | - | - | - | 1.05 | 1.02, 0.98 |" in said
    assert "| ... by own steps | - | 1.01 | - | - | - | - | - | - | - |  |  |" in said


def test_a_folder_without_the_traces_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--traces", str(tmp_path)])
    assert ended.value.code == 2
    assert f"--traces {tmp_path} has no azure_conv_2023.csv" in capsys.readouterr().err
