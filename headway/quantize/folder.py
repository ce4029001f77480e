"""The folder of a quantised checkpoint: it is there when it is whole."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from headway.kernels.weights import E2M1
from headway.models.checkpoint import INDEX_FILE, SINGLE_FILE
from headway.models.quantization import PackedMatrices
from headway.quantize.rounding import Rounded

_COPIED = ("*.json", "*.jinja", "*.txt", "*.model")
_SHARD_BYTES = 4 << 30


class FolderDraft:
    """The draft of a checkpoint's folder, in which files are written before it gets its name.

    Args:
        path: the folder of the draft.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tensors: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self._bytes = self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor; many together go to a file."""
        self._tensors[name] = tensor.contiguous()
        self._bytes += tensor.nbytes
        if self._bytes >= _SHARD_BYTES:
            self._write()

    def finish(self, source: Path, config: dict[str, Any]) -> int:
        """Write what is left, and what goes with the tensors; the bytes of all tensors."""
        if self._tensors:
            self._write()
        names = [SINGLE_FILE]
        if len(self._shards) > 1:
            count = len(self._shards)
            names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
            of = {tensor: name for name, tensors in zip(names, self._shards, strict=True) for tensor in tensors}
            index = {"metadata": {"total_size": self._total}, "weight_map": of}
            (self._path / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        for file in sorted({file for pattern in _COPIED for file in source.glob(pattern) if file.is_file()}):
            if file.name not in (INDEX_FILE, "config.json"):
                shutil.copyfile(file, self._path / file.name)
        (self._path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for number, name in enumerate(names):
            shutil.copymode(self._path / "config.json", self._shard(number))  # its library lets only the owner read
            self._shard(number).rename(self._path / name)
        return self._total

    def _shard(self, number: int) -> Path:
        return self._path / f"{number}.safetensors"

    def _write(self) -> None:
        try:
            save_file(self._tensors, self._shard(len(self._shards)), metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk is no OSError to this library
            raise OSError(str(error)) from None
        self._shards.append(list(self._tensors))
        self._total += self._bytes
        self._tensors, self._bytes = {}, 0


@contextmanager
def new_folder(target: Path) -> Iterator[FolderDraft]:
    """A draft that becomes the folder at the end, or leaves nothing behind if there is an error or an interruption.

    Raises:
        ValueError: there is something at that place, or nothing can be written there.
    """
    check_place(target)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir()
        yield FolderDraft(draft)
        if target.exists():
            target.rmdir()
        draft.rename(target)
    except OSError as error:
        raise ValueError(f"--output {target} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def check_place(target: Path) -> None:
    """Raises ValueError where there is something at the place of the folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"--output {target} is there already; remove it, or name another folder")


def packed_tensors(rounded: Rounded, packed: PackedMatrices) -> dict[str, Tensor]:
    """The tensors of a layer (see PackedMatrices.tensors), as compressed-tensors has them."""
    if packed.scheme == "float4-weight-only":
        return _float4_tensors(rounded)
    if packed.layout != "pack-quantized":
        return {"weight": rounded.codes, "weight_scale": rounded.scales}
    half = 1 << (packed.bits - 1)
    tensors = {
        "weight_packed": _words(rounded.codes + half, packed.bits),
        "weight_scale": rounded.scales,
        "weight_shape": torch.tensor(rounded.codes.shape),
    }
    if rounded.zeros is not None:
        tensors["weight_zero_point"] = _words((rounded.zeros + half).T, packed.bits).T
    return tensors


def _float4_tensors(rounded: Rounded) -> dict[str, Tensor]:
    """Two codes of e2m1 in a byte, the first in the low bits."""
    codes = torch.searchsorted(torch.tensor(E2M1[:8]), rounded.codes.abs().contiguous()).to(torch.uint8)
    codes |= rounded.codes.signbit().to(torch.uint8) << 3
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    if rounded.of_all is None:
        exponents = (torch.log2(rounded.scales) + 127).to(torch.uint8)
        return {"weight_packed": packed, "weight_scale": exponents}
    scales = (rounded.scales * rounded.of_all).to(torch.float8_e4m3fn)
    return {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": rounded.of_all.clone()}


def _words(numbers: Tensor, bits: int) -> Tensor:
    """Numbers of so many bits, of which only the lowest count, in int32 words from the lowest bits on."""
    bytes_ = numbers.contiguous().view(torch.uint8)
    if bits == 4:
        first, second = bytes_.unflatten(-1, (-1, 2)).unbind(-1)
        bytes_ = first & 15 | second << 4
    return bytes_.contiguous().view(torch.int32)
