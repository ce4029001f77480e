"""Compiled code is kept between starts, and dropped when any kernel source has changed."""

from __future__ import annotations

from pathlib import Path

from headway.kernels.cpu_compile import drop_stale_code


def test_code_is_dropped_when_a_source_changes_and_kept_when_none_does(tmp_path: Path) -> None:
    (tmp_path / "cpu_a.py").write_text("one")
    code = tmp_path / "__pycache__" / "cpu_b.f-1.py311.nbi"
    drop_stale_code(tmp_path)
    code.write_text("compiled")
    drop_stale_code(tmp_path)
    assert code.exists()
    (tmp_path / "cpu_a.py").write_text("two")
    drop_stale_code(tmp_path)
    assert not code.exists()


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "cpu_a.py").write_text("one")
    (tmp_path / "__pycache__").write_text("a file in the way")
    drop_stale_code(tmp_path)
