"""Gemma 4's layers differ: the cost model counts the bytes that the engine keeps, packs and reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.cost.attention import Chunk
from headway.cost.config import read_shape
from headway.cost.memory import kv_cache_bytes, weight_bytes
from headway.cost.precision import Precision
from headway.cost.values import ModelError
from headway.cost.work import step_work
from headway.engine.memory import bytes_per_block, zero_caches
from headway.kernels import kernels_for
from headway.kernels.cpu import choice as cpu_choice
from headway.models.config import ModelConfig
from headway.models.loading import load_model
from tests.engine.models import TINY_GEMMA4, TINY_LLAMA


@pytest.fixture(autouse=True)
def on_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows for matrix tiles are filled up to whole tiles, which plans do not count; in real models most are whole."""
    monkeypatch.setattr(cpu_choice, "has_matrix_tiles", lambda: False)


RAW = TINY_LLAMA | TINY_GEMMA4
# The first two of 4 layers have a cache: keys and values of 2 heads of 16, and of 2 of 32.
TOKEN = 2 * 2 * (16 + 32)


def test_a_block_is_counted_once_for_all_layers_that_read_it() -> None:
    config, shape = ModelConfig.from_dict(RAW), read_shape(RAW)
    assert [each.source for each in config.caches] == [None, None, 0, 1]  # type: ignore[union-attr]
    theirs = bytes_per_block(config.caches, 16, torch.bfloat16)
    caches = zero_caches(config.caches, 3, 16, torch.bfloat16, torch.device("cpu"))
    assert caches[2] is caches[0] and caches[3] is caches[1]
    assert theirs == 16 * 2 * TOKEN == kv_cache_bytes(shape, 16, Precision(), 16)
    assert shape.kv_elements_per_token == TOKEN


def test_a_decode_reads_the_keys_of_all_layers_and_writes_those_of_two() -> None:
    """Windows are 20, the context is 40. Each layer reads for itself, also from the cache of another."""
    work = step_work(read_shape(RAW), [Chunk(1, 39)]).values()
    assert sum(part.kv_read_bytes for part in work) == 2 * (20 * 2 * 2 * 16 * 2 + 40 * 2 * 2 * 32 * 2)
    assert sum(part.kv_write_bytes for part in work) == 2 * TOKEN


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_weights_are_counted_as_the_engine_has_them(tmp_path: Path, quantization: str) -> None:
    """A decode reads every matrix once; of the second embedding a row of a token, 4 layers of 24 numbers."""
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    model = load_model(
        tmp_path, torch.bfloat16, kernels_for("cpu", torch.bfloat16), "cpu", "dummy", quantization=quantization
    )
    packed = [model.weights.lm_head]
    for layer in model.weights.layers:
        assert layer.end is not None
        packed += [
            layer.mixer.qkv,
            layer.mixer.o,
            layer.mlp.gate_up,
            layer.mlp.down,
            layer.end.gate,
            layer.end.projection,
        ]
    assert model.weights.inputs is not None
    packed.append(model.weights.inputs.projection)
    kept = sum(_bytes_of(each) for each in packed)
    shape, precision = read_shape(RAW), Precision.of_engine("bfloat16", quantization, "auto", 16)
    rest = 2 * shape.matrices()["rest"]
    table = 2 * 512 * 4 * 24
    if quantization == "int4":
        assert weight_bytes(shape, precision) == kept + rest
    read = sum(part.weight_bytes for part in step_work(shape, [Chunk(1)], precision).values())
    tokens_rows = 2 * (64 + 4 * 24)
    weights = weight_bytes(shape, precision)
    assert read == weights - table + tokens_rows


def _bytes_of(linear: Any) -> int:
    size = linear._packed.nbytes + linear._row_scales.nbytes
    return size if linear._groups is None else size + linear._groups.scales.nbytes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4, which is not less than num_hidden_layers, 4"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers is 3, which leaves no layer of some kind"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all', which is not supported"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "not a multiple of the 3 key/value heads"),
        ({"enable_moe_block": True}, "num_experts is missing"),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input is -1, which is not a whole number"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        ModelConfig.from_dict(RAW | changes)
