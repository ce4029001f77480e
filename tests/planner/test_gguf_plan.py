"""A plan of a GGUF file: its shape, and what its weights are planned as."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from headway.models.gguf.config import folder_of
from headway.planner.models import find_model
from headway.planner.request import PlanError, PlanRequest
from headway.planner.resolve import resolve
from tests.models import gguf_files, tiny

WIDE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "head_dim": 64,
}


@pytest.mark.parametrize(
    ("kind_of", "quantization"),
    [
        (lambda name: "Q6_K" if "down_proj" in name or "v_proj" in name else "Q4_K", "q4_k"),
        (lambda name: "Q5_K", "q6_k"),
        (lambda name: "Q8_0", "q8_0"),
        (lambda name: "BF16", "none"),
    ],
)
def test_a_plan_is_of_the_file_s_shape_and_of_most_of_its_weights(
    kind_of: Callable[[str], str], quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "Tiny.gguf"
    gguf_files.write(path, tiny.build("qwen3_moe", **WIDE), kind_of)
    found = find_model(str(path))
    assert found == replace(find_model(str(folder_of(path)), quantization), name="Tiny")
    assert find_model(str(path), "int8").quantization == "int8"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(PlanError, match=r"Tiny\.gguf"):
        resolve(PlanRequest(str(path), "H100-SXM"))
