"""A GGUF file of a known shape with random bfloat16 weights, so that llama.cpp can be measured on the same model.

    python -m benchmarks.gguf_checkpoint --shape qwen2.5-0.5b

The layout is that of the GGUF specification, version 3 (ggml-org/ggml, docs/gguf.md). Matrices are bfloat16; norms and
biases float32, as llama.cpp's own converter leaves them. The tokenizer is the one that benchmarks.checkpoint writes.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from benchmarks.checkpoint import SHAPES, write_checkpoint

_UINT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 6, 7, 8, 9  # types of values
_INT32 = 5
_F32, _BF16 = 0, 30  # types of tensors
_MOSTLY_BF16 = 32  # general.file_type
_NORMAL, _CONTROL = 1, 3  # types of tokens
_ALIGNMENT = 32
_STD = 0.02  # the usual initializer_range
_DRAW = 1 << 22  # weights drawn at a time


@dataclass(frozen=True)
class Tensor:
    """One tensor of the file; `shape` is torch's, outermost first.

    fill: "random" for weights, "ones" for norms, "zeros" for biases.
    """

    name: str
    shape: tuple[int, ...]
    fill: str

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape)) * (2 if self.fill == "random" else 4)


def tensors(config: dict[str, Any]) -> Iterator[Tensor]:
    """Of a Qwen2 model with tied embeddings, in llama.cpp's names."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = hidden // config["num_attention_heads"]
    queries, keys = hidden, config["num_key_value_heads"] * head
    yield Tensor("token_embd.weight", (config["vocab_size"], hidden), "random")
    for layer in range(config["num_hidden_layers"]):
        block = f"blk.{layer}"
        yield Tensor(f"{block}.attn_norm.weight", (hidden,), "ones")
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield Tensor(f"{block}.attn_{name}.weight", (rows, hidden), "random")
            yield Tensor(f"{block}.attn_{name}.bias", (rows,), "zeros")
        yield Tensor(f"{block}.attn_output.weight", (hidden, queries), "random")
        yield Tensor(f"{block}.ffn_norm.weight", (hidden,), "ones")
        yield Tensor(f"{block}.ffn_gate.weight", (inner, hidden), "random")
        yield Tensor(f"{block}.ffn_up.weight", (inner, hidden), "random")
        yield Tensor(f"{block}.ffn_down.weight", (hidden, inner), "random")
    yield Tensor("output_norm.weight", (hidden,), "ones")


def metadata(config: dict[str, Any], tokens: list[str], name: str) -> list[tuple[str, int, Any]]:
    """Key, type and value of each entry; an array's value is the type of its items and the items."""
    return [
        ("general.architecture", _STRING, "qwen2"),
        ("general.name", _STRING, name),
        ("general.file_type", _UINT32, _MOSTLY_BF16),
        ("qwen2.context_length", _UINT32, config["max_position_embeddings"]),
        ("qwen2.embedding_length", _UINT32, config["hidden_size"]),
        ("qwen2.block_count", _UINT32, config["num_hidden_layers"]),
        ("qwen2.feed_forward_length", _UINT32, config["intermediate_size"]),
        ("qwen2.attention.head_count", _UINT32, config["num_attention_heads"]),
        ("qwen2.attention.head_count_kv", _UINT32, config["num_key_value_heads"]),
        ("qwen2.attention.layer_norm_rms_epsilon", _FLOAT32, config["rms_norm_eps"]),
        ("qwen2.rope.freq_base", _FLOAT32, config["rope_theta"]),
        ("tokenizer.ggml.model", _STRING, "gpt2"),
        ("tokenizer.ggml.pre", _STRING, "gpt-2"),
        ("tokenizer.ggml.tokens", _ARRAY, (_STRING, tokens)),
        ("tokenizer.ggml.token_type", _ARRAY, (_INT32, [_CONTROL] + [_NORMAL] * (len(tokens) - 1))),
        ("tokenizer.ggml.merges", _ARRAY, (_STRING, [])),
        ("tokenizer.ggml.bos_token_id", _UINT32, config["bos_token_id"]),
        ("tokenizer.ggml.eos_token_id", _UINT32, config["eos_token_id"]),
        ("tokenizer.ggml.add_bos_token", _BOOL, False),
    ]


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(kind: int, value: Any) -> bytes:
    if kind == _ARRAY:
        item_kind, items = value
        return struct.pack("<IQ", item_kind, len(items)) + b"".join(_value(item_kind, item) for item in items)
    if kind == _STRING:
        return _string(value)
    return struct.pack({_UINT32: "<I", _INT32: "<i", _FLOAT32: "<f", _BOOL: "<?"}[kind], value)


def _padding(length: int) -> bytes:
    return b"\0" * (-length % _ALIGNMENT)


def _header(entries: list[tuple[str, int, Any]], contents: list[Tensor]) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(contents), len(entries))]
    parts += [_string(key) + struct.pack("<I", kind) + _value(kind, value) for key, kind, value in entries]
    offset = 0
    for tensor in contents:
        kind = _BF16 if tensor.fill == "random" else _F32
        dimensions = tensor.shape[::-1]  # innermost first
        parts.append(_string(tensor.name))
        parts.append(struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset))
        offset += tensor.bytes + len(_padding(tensor.bytes))
    header = b"".join(parts)
    return header + _padding(len(header))


def _bfloat16(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper half of each float32; which way it rounds does not matter to a random weight."""
    return (weights.view(np.uint32) >> 16).astype(np.uint16)


def _write_tensor(file: BinaryIO, tensor: Tensor, draw: np.random.Generator) -> None:
    size = int(np.prod(tensor.shape))
    if tensor.fill == "random":
        for start in range(0, size, _DRAW):
            weights = draw.standard_normal(min(_DRAW, size - start), dtype=np.float32) * np.float32(_STD)
            file.write(_bfloat16(weights).astype("<u2").tobytes())
    else:
        file.write(np.full(size, 1.0 if tensor.fill == "ones" else 0.0, "<f4").tobytes())
    file.write(_padding(tensor.bytes))


def write_gguf(shape: str, folder: Path) -> Path:
    """Write folder / shape / random-bf16.gguf, unless it is there already; return its path.

    Raises:
        KeyError: `shape` is not one of SHAPES.
        ValueError: its architecture is not Qwen2 with tied embeddings.
    """
    config = SHAPES[shape]
    if config["architectures"] != ["Qwen2ForCausalLM"] or not config["tie_word_embeddings"]:
        raise ValueError(f"{shape} is not a Qwen2 model with tied embeddings; only those can be written as GGUF")
    checkpoint = write_checkpoint(shape, folder)
    target = checkpoint / "random-bf16.gguf"
    if target.exists():
        return target
    vocabulary: dict[str, int] = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
    contents = list(tensors(config))
    draw = np.random.default_rng(0)
    partial = target.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(_header(metadata(config, sorted(vocabulary, key=vocabulary.__getitem__), shape), contents))
        for tensor in contents:
            _write_tensor(file, tensor, draw)
    return partial.replace(target)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gguf_checkpoint", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "checkpoints")
    arguments = parser.parse_args(argv)
    try:
        print(write_gguf(arguments.shape, arguments.folder))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
