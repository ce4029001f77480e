"""The GGUF file, read back by the letter of its specification."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from benchmarks import gguf_checkpoint

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
    assert tensors["token_embd.weight"].shape == (512, 64)
    assert tensors["blk.1.attn_k.weight"].shape == (2 * 16, 64)
    assert tensors["blk.0.ffn_down.weight"].shape == (64, 128)
    for name, values in tensors.items():
        if name.endswith("norm.weight"):
            assert np.all(values == 1)
        elif name.endswith("bias"):
            assert np.all(values == 0)
        else:
            assert abs(values.mean()) < 0.002 and values.std() == pytest.approx(0.02, rel=0.05)


def test_file_is_written_once(tmp_path: Path) -> None:
    path = gguf_checkpoint.write_gguf("tiny", tmp_path)
    written = path.stat().st_mtime_ns
    assert gguf_checkpoint.write_gguf("tiny", tmp_path).stat().st_mtime_ns == written
    assert not list(path.parent.glob("*.partial"))


def test_other_architectures_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gguf_checkpoint.main(["--shape", "llama-3.1-8b", "--folder", str(tmp_path)])
    assert ended.value.code == 2
    assert "llama-3.1-8b is not a Qwen2 model with tied embeddings" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
