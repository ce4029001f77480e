"""The checkpoint of random weights: what it holds, that it is the same each time, and that it is whole or not there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks import weights
from benchmarks.checkpoint import SHAPES
from benchmarks.work import shape_of


def test_weights_are_random_norms_ones_and_biases_zeros(tmp_path: Path) -> None:
    found = load_file(weights.write_weights("tiny", tmp_path) / weights.WEIGHTS)
    assert all(values.dtype == torch.bfloat16 for values in found.values())
    assert sum(values.numel() for values in found.values()) == shape_of(SHAPES["tiny"]).num_parameters
    assert found["model.embed_tokens.weight"].shape == (512, 64)
    assert found["model.layers.1.self_attn.k_proj.weight"].shape == (2 * 16, 64)
    assert found["model.layers.0.mlp.down_proj.weight"].shape == (64, 128)
    for name, values in found.items():
        if "norm" in name:
            assert torch.all(values == 1)
        elif name.endswith("bias"):
            assert torch.all(values == 0)
        else:
            assert abs(values.float().mean()) < 0.002
            assert values.float().std().item() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(found["model.layers.0.mlp.up_proj.weight"], found["model.layers.1.mlp.up_proj.weight"]), (
        "layers have weights of their own"
    )


def test_weights_are_the_same_every_time_and_written_once(tmp_path: Path) -> None:
    first, second = (weights.write_weights("tiny", tmp_path / name) / weights.WEIGHTS for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    written = first.stat().st_mtime_ns
    weights.write_weights("tiny", tmp_path / "a")
    assert first.stat().st_mtime_ns == written
    assert not list(tmp_path.rglob("*.partial"))


def test_weights_can_be_read_back_without_torch(tmp_path: Path) -> None:
    checkpoint = weights.write_weights("tiny", tmp_path)
    found, expected = weights.read_weights(checkpoint), load_file(checkpoint / weights.WEIGHTS)
    assert list(found) == [tensor.name for tensor in weights.tensors(SHAPES["tiny"])]
    for name, bits in found.items():
        assert np.array_equal(bits.view(np.int16), expected[name].view(torch.int16).numpy())


@pytest.mark.parametrize("shape", SHAPES)
def test_tensors_are_all_of_the_shape(shape: str) -> None:
    sizes = [tensor.size for tensor in weights.tensors(SHAPES[shape])]
    assert sum(sizes) == shape_of(SHAPES[shape]).num_parameters


def test_an_interrupted_write_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(weights, "_write_tensor", interrupted)
    with pytest.raises(KeyboardInterrupt):
        weights.write_weights("tiny", tmp_path)
    assert not list(tmp_path.rglob(weights.WEIGHTS))


def test_other_architectures_are_refused() -> None:
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no weights here"):
        next(weights.tensors({"architectures": ["GPT2LMHeadModel"]}))
