"""Random weights of a known shape as a real checkpoint, so that every engine and converter reads the same model.

    python -m benchmarks.weights --shape qwen2.5-0.5b

Matrices are drawn from a normal distribution (0.02, the usual initializer_range) in bfloat16, norms are 1 and biases 0.
The seed of each matrix is its place in the file. The layout is that of safetensors: the length of a JSON header, the
header, and the tensors one after the other.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from benchmarks.checkpoint import SHAPES, write_checkpoint

CHECKPOINTS = Path(__file__).parent / "checkpoints"
WEIGHTS = "model.safetensors"
_STD = 0.02
_DRAW = 1 << 22  # weights drawn at a time
_ONE, _ZERO = 0x3F80, 0x0000  # in bfloat16
_HEADER_ALIGNMENT = 8
_TO_RESIDUAL = ("o_proj.weight", "down_proj.weight")
_EIGHTFOLD = 3 << 7  # added to the bits of a bfloat16: its exponent; so that a token is as good as certain
_ARCHITECTURES = ("Qwen2ForCausalLM", "LlamaForCausalLM")


@dataclass(frozen=True)
class Tensor:
    """One tensor of the checkpoint, in bfloat16; `shape` is torch's, outermost first.

    fill: "random" for matrices, "ones" for norms, "zeros" for biases.
    """

    name: str
    shape: tuple[int, ...]
    fill: str

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape))


def tensors(config: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors of a Qwen2 or Llama model, in the names of transformers.

    Raises:
        ValueError: the architecture is another.
    """
    architecture = config["architectures"][0]
    if architecture not in _ARCHITECTURES:
        raise ValueError(f"{architecture} has no weights here; only {' and '.join(_ARCHITECTURES)} do")
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield Tensor("model.embed_tokens.weight", (config["vocab_size"], hidden), "random")
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        yield Tensor(f"{block}.input_layernorm.weight", (hidden,), "ones")
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield Tensor(f"{block}.self_attn.{name}_proj.weight", (rows, hidden), "random")
            if architecture == "Qwen2ForCausalLM":
                yield Tensor(f"{block}.self_attn.{name}_proj.bias", (rows,), "zeros")
        yield Tensor(f"{block}.self_attn.o_proj.weight", (hidden, queries), "random")
        yield Tensor(f"{block}.post_attention_layernorm.weight", (hidden,), "ones")
        yield Tensor(f"{block}.mlp.gate_proj.weight", (inner, hidden), "random")
        yield Tensor(f"{block}.mlp.up_proj.weight", (inner, hidden), "random")
        yield Tensor(f"{block}.mlp.down_proj.weight", (hidden, inner), "random")
    yield Tensor("model.norm.weight", (hidden,), "ones")
    if not config["tie_word_embeddings"]:
        yield Tensor("lm_head.weight", (config["vocab_size"], hidden), "random")


def _header(contents: list[Tensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in contents:
        end = offset + 2 * tensor.size
        entries[tensor.name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _bfloat16(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper half of each float32; which way it rounds does not matter to a random weight."""
    return (weights.view(np.uint32) >> 16).astype("<u2")


def _write_tensor(file: BinaryIO, tensor: Tensor, seed: int) -> None:
    if tensor.fill != "random":
        file.write(np.full(tensor.size, _ONE if tensor.fill == "ones" else _ZERO, "<u2").tobytes())
        return
    draw = np.random.default_rng(seed)
    for start in range(0, tensor.size, _DRAW):
        weights = draw.standard_normal(min(_DRAW, tensor.size - start), dtype=np.float32) * np.float32(_STD)
        file.write(_bfloat16(weights).tobytes())


def write_weights(shape: str, folder: Path) -> Path:
    """Write the whole checkpoint of `shape` to folder / shape, unless its weights are there already; return that path.

    Raises:
        KeyError: `shape` is not one of SHAPES.
        ValueError: weights of its architecture are not known here.
    """
    contents = list(tensors(SHAPES[shape]))
    checkpoint = write_checkpoint(shape, folder)
    target = checkpoint / WEIGHTS
    if target.exists():
        return checkpoint
    partial = target.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(_header(contents))
        for seed, tensor in enumerate(contents):
            _write_tensor(file, tensor, seed)
    partial.replace(target)
    return checkpoint


def write_speaking(config: dict[str, Any], following: npt.NDArray[np.int64], checkpoint: Path) -> None:
    """Write a checkpoint whose greedy text is known: behind a token it says the one that `following` has for it.

    All is computed as with other weights. But what its layers add to a token's embedding is zero, and its output layer
    has the embedding of each token in the row of the one that follows it.

    Args:
        following: [vocab], a permutation.
        checkpoint: a folder with the config.json of `config`, whose output layer is not its embedding.
    """
    contents = [
        replace(tensor, fill="zeros") if tensor.name.endswith(_TO_RESIDUAL) else tensor for tensor in tensors(config)
    ]
    assert contents[0].name == "model.embed_tokens.weight" and contents[-1].name == "lm_head.weight"
    before, header = np.argsort(following), _header(contents)
    with (checkpoint / WEIGHTS).open("wb") as file:
        file.write(header)
        for seed, tensor in enumerate(contents[:-1]):
            _write_tensor(file, tensor, seed)
        file.flush()
        rows = np.memmap(file.name, "<u2", "r", offset=len(header), shape=contents[0].shape)
        for start in range(0, len(before), 4096):
            file.write((rows[before[start : start + 4096]] + np.uint16(_EIGHTFOLD)).tobytes())


def read_weights(checkpoint: Path) -> dict[str, npt.NDArray[np.uint16]]:
    """The tensors of a checkpoint folder by name, in their shapes, as the bits of bfloat16; mapped, not read."""
    path = checkpoint / WEIGHTS
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        entries = json.loads(file.read(length))
    content = np.memmap(path, np.uint8, "r", offset=8 + length)
    found = {}
    for name, entry in entries.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            found[name] = content[begin:end].view("<u2").reshape(entry["shape"])
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--folder", type=Path, default=CHECKPOINTS)
    arguments = parser.parse_args(argv)
    print(write_weights(arguments.shape, arguments.folder))


if __name__ == "__main__":
    main()
