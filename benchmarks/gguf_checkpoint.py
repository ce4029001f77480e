"""The checkpoint of benchmarks.weights as a GGUF file in bfloat16, so that llama.cpp reads the same weights.

    python -m benchmarks.gguf_checkpoint --shape qwen2.5-0.5b

The layout is that of the GGUF specification, version 3 (ggml-org/ggml, docs/gguf.md). Matrices are bfloat16; norms and
biases float32, as llama.cpp's own converter leaves them. The tokenizer is the one that benchmarks.checkpoint writes.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.checkpoint import SHAPES
from benchmarks.weights import CHECKPOINTS, read_weights, write_weights
from headway.models.gguf.names import TENSORS

_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9  # types of values
_F32, _BF16 = 0, 30  # types of tensors
_MOSTLY_BF16 = 32  # general.file_type
_NORMAL, _CONTROL = 1, 3  # types of tokens
_ALIGNMENT = 32
_FAMILIES = {"Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}


@dataclass(frozen=True)
class Tensor:
    """One tensor of the file; values in torch's shape, bfloat16 as its bits (uint16) or float32."""

    name: str
    values: npt.NDArray[Any]

    @property
    def kind(self) -> int:
        return _BF16 if self.values.dtype == np.uint16 else _F32


def tensors(config: dict[str, Any], weights: dict[str, npt.NDArray[np.uint16]]) -> Iterator[Tensor]:
    """What llama.cpp's converter makes of a checkpoint's tensors, in its names."""
    llama = _family(config) == "llama"
    if llama and "rope_scaling" in config:
        yield Tensor("rope_freqs.weight", _rope_factors(config))
    for name, values in weights.items():
        if len(values.shape) == 1:
            yield Tensor(_name(name), (values.astype("<u4") << 16).view("<f4"))
        elif llama and (".q_proj." in name or ".k_proj." in name):
            which = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
            yield Tensor(_name(name), _interleaved(values, config[which]))
        else:
            yield Tensor(_name(name), values)


def _name(name: str) -> str:
    stem, _, ending = name.rpartition(".")
    if stem.startswith("model.layers."):
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{TENSORS[part]}.{ending}"
    return f"{TENSORS[stem]}.{ending}"


def _interleaved(values: npt.NDArray[np.uint16], heads: int) -> npt.NDArray[np.uint16]:
    """Rows in llama.cpp's order for this architecture: it turns neighbours, transformers turns halves of a head."""
    rows, width = values.shape
    return values.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def _rope_factors(config: dict[str, Any]) -> npt.NDArray[np.float32]:
    """The divisor of each frequency by Llama 3.1's scaling of positions."""
    scaling, head = config["rope_scaling"], config["head_dim"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for index in range(0, head, 2):
        wavelength = 2 * math.pi * config["rope_theta"] ** (index / head)
        turns = scaling["original_max_position_embeddings"] / wavelength
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, "<f4")


def _family(config: dict[str, Any]) -> str:
    return _FAMILIES[config["architectures"][0]]


def metadata(config: dict[str, Any], tokens: list[str], name: str) -> list[tuple[str, int, Any]]:
    """Key, type and value of each entry; an array's value is the type of its items and the items."""
    family = _family(config)
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return [
        ("general.architecture", _STRING, family),
        ("general.name", _STRING, name),
        ("general.file_type", _UINT32, _MOSTLY_BF16),
        (f"{family}.context_length", _UINT32, config["max_position_embeddings"]),
        (f"{family}.embedding_length", _UINT32, config["hidden_size"]),
        (f"{family}.block_count", _UINT32, config["num_hidden_layers"]),
        (f"{family}.feed_forward_length", _UINT32, config["intermediate_size"]),
        (f"{family}.attention.head_count", _UINT32, config["num_attention_heads"]),
        (f"{family}.attention.head_count_kv", _UINT32, config["num_key_value_heads"]),
        (f"{family}.attention.layer_norm_rms_epsilon", _FLOAT32, config["rms_norm_eps"]),
        (f"{family}.rope.freq_base", _FLOAT32, config["rope_theta"]),
        (f"{family}.rope.dimension_count", _UINT32, head),
        (f"{family}.vocab_size", _UINT32, config["vocab_size"]),
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
        dimensions, size = tensor.values.shape[::-1], tensor.values.nbytes  # innermost first
        parts.append(_string(tensor.name))
        parts.append(struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, tensor.kind, offset))
        offset += size + len(_padding(size))
    header = b"".join(parts)
    return header + _padding(len(header))


def write_gguf(shape: str, folder: Path) -> Path:
    """Write folder / shape / bf16.gguf of the checkpoint there, unless it is there already; return its path.

    Raises:
        KeyError: `shape` is not one of SHAPES.
        ValueError: weights of its architecture are not known here.
    """
    config, checkpoint = SHAPES[shape], write_weights(shape, folder)
    target = checkpoint / "bf16.gguf"
    if target.exists():
        return target
    write_gguf_of(config, checkpoint, shape, target)
    return target


def write_gguf_of(config: dict[str, Any], checkpoint: Path, name: str, target: Path) -> None:
    """Write a checkpoint folder in bfloat16 to a file; `name` is for the file's metadata."""
    vocabulary: dict[str, int] = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
    contents = list(tensors(config, read_weights(checkpoint)))
    partial = target.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(_header(metadata(config, sorted(vocabulary, key=vocabulary.__getitem__), name), contents))
        for tensor in contents:
            file.write(np.ascontiguousarray(tensor.values).data)
            file.write(_padding(tensor.values.nbytes))
    partial.replace(target)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gguf_checkpoint", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--folder", type=Path, default=CHECKPOINTS)
    arguments = parser.parse_args(argv)
    print(write_gguf(arguments.shape, arguments.folder))


if __name__ == "__main__":
    main()
