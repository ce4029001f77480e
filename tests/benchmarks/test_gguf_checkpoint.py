"""The GGUF file, read back by the letter of its specification."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from benchmarks import gguf_checkpoint
from benchmarks.checkpoint import SHAPES
from benchmarks.weights import read_weights

_SCALARS = {4: "<I", 5: "<i", 6: "<f", 7: "<?"}
_BYTES = {0: 4, 30: 2}  # of float32 and bfloat16


def _take(file: BinaryIO, form: str) -> Any:
    (value,) = struct.unpack(form, file.read(struct.calcsize(form)))
    return value


def _string(file: BinaryIO) -> str:
    return file.read(_take(file, "<Q")).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == 8:
        return _string(file)
    if kind == 9:
        item, count = _take(file, "<I"), _take(file, "<Q")
        return [_value(file, item) for _ in range(count)]
    return _take(file, _SCALARS[kind])


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Metadata, and tensors in torch's shapes; bfloat16 widened to float32."""
    with path.open("rb") as file:
        assert file.read(4) == b"GGUF" and _take(file, "<I") == 3
        tensors, entries = _take(file, "<Q"), _take(file, "<Q")
        metadata = {_string(file): _value(file, _take(file, "<I")) for _ in range(entries)}
        infos = []
        for _ in range(tensors):
            name = _string(file)
            shape = [_take(file, "<Q") for _ in range(_take(file, "<I"))][::-1]
            infos.append((name, shape, _take(file, "<I"), _take(file, "<Q")))
        start = -(-file.tell() // 32) * 32
    content, found, end = path.read_bytes(), {}, start
    for name, shape, kind, offset in infos:
        assert offset % 32 == 0 and start + offset >= end, f"{name} overlaps the tensor before it"
        end = start + offset + int(np.prod(shape)) * _BYTES[kind]
        raw = content[start + offset : end]
        values = np.frombuffer(raw, "<f4") if kind == 0 else (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
        found[name] = values.reshape(shape)
    assert len(content) == -(-end // 32) * 32
    return metadata, found


def _bits(values: np.ndarray) -> np.ndarray:
    """Upper halves of float32s."""
    return (np.ascontiguousarray(values).view("<u4") >> 16).astype("<u2")


_LLAMA = {
    **SHAPES["llama-3.2-1b"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def test_file_is_the_checkpoint_in_gguf(tmp_path: Path) -> None:
    path = gguf_checkpoint.write_gguf("tiny", tmp_path)
    metadata, tensors = _read(path)
    config = json.loads((path.parent / "config.json").read_text())
    vocabulary = json.loads((path.parent / "tokenizer.json").read_text())["model"]["vocab"]
    assert [vocabulary[token] for token in metadata["tokenizer.ggml.tokens"]] == list(range(config["vocab_size"]))
    assert metadata["tokenizer.ggml.token_type"] == [3] + [1] * (config["vocab_size"] - 1)
    assert metadata["general.architecture"] == "qwen2"
    assert metadata["qwen2.block_count"] == config["num_hidden_layers"]
    assert metadata["qwen2.rope.freq_base"] == config["rope_theta"]
    assert len(tensors) == 2 + 12 * config["num_hidden_layers"]
    weights = read_weights(path.parent)
    pairs = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.1.attn_q.weight": "model.layers.1.self_attn.q_proj.weight",
        "blk.1.attn_k.bias": "model.layers.1.self_attn.k_proj.bias",
        "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
        "blk.0.ffn_norm.weight": "model.layers.0.post_attention_layernorm.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
    }
    for theirs, ours in pairs.items():
        assert np.array_equal(_bits(tensors[theirs]), weights[ours]), theirs


def test_llama_has_its_rows_interleaved_and_its_positions_scaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "tiny-llama", _LLAMA)
    path = gguf_checkpoint.write_gguf("tiny-llama", tmp_path)
    metadata, tensors = _read(path)
    weights = read_weights(path.parent)
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.rope.dimension_count"] == 16
    assert len(tensors) == 3 + 9 * 2
    for theirs, ours, heads in (("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)):
        original = weights[f"model.layers.1.self_attn.{ours}.weight"].reshape(heads, 16, 64)
        written = _bits(tensors[f"blk.1.{theirs}.weight"]).reshape(heads, 16, 64)
        assert np.array_equal(written[:, 0::2], original[:, :8])
        assert np.array_equal(written[:, 1::2], original[:, 8:])
    assert np.array_equal(_bits(tensors["blk.1.attn_v.weight"]), weights["model.layers.1.self_attn.v_proj.weight"])


def test_positions_are_scaled_as_transformers_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    monkeypatch.setitem(SHAPES, "tiny-llama", _LLAMA)
    _, tensors = _read(gguf_checkpoint.write_gguf("tiny-llama", tmp_path))
    parameters = _LLAMA["rope_scaling"] | {"rope_theta": _LLAMA["rope_theta"]}
    config = transformers.LlamaConfig(**{k: v for k, v in _LLAMA.items() if k != "rope_scaling"})
    config.rope_parameters = parameters
    scaled, _ = rope.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = _LLAMA["rope_theta"] ** (-np.arange(0, 16, 2) / 16)
    assert tensors["rope_freqs.weight"] == pytest.approx(plain / scaled.numpy(), rel=1e-5)


def test_file_is_written_once(tmp_path: Path) -> None:
    path = gguf_checkpoint.write_gguf("tiny", tmp_path)
    written = path.stat().st_mtime_ns
    assert gguf_checkpoint.write_gguf("tiny", tmp_path).stat().st_mtime_ns == written
    assert not list(path.parent.glob("*.partial"))
