"""Where weights come from: safetensors files, or random numbers of the right shapes."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headway.files import not_a_file
from headway.kernels.weights import Weight
from headway.models.config import ModelConfig, ModelError, read_json
from headway.models.families import OTHER_PARTS, WITHIN, Traits
from headway.models.packed_layers import packed_layer, shape_in_state
from headway.models.quantization import STATE, PackedMatrices
from headway.models.tensors import STACKED, Shapes

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PAGE_BYTES = 4096
LOADABLE = ("F64", "F32", "F16", "BF16")  # safetensors' names
# The types of packed tensors, by the last part of a name. A weight that has scales is int8 or float8.
_PACKED = {
    **dict.fromkeys(("qweight", "qzeros", "g_idx", "weight_packed", "weight_zero_point", "weight_g_idx"), ("I32",)),
    "weight_shape": ("I64", "I32"),
    "absmax": ("U8", "F32"),
}
_KIND_OF_WEIGHTS = {"fp8": "F8_E4M3", "nf4": "U8", "fp4": "U8"}
# Tensors beside packed matrices that are not needed: of activations that are not rounded, and of parts that are plain.
_UNUSED = (
    "activation_scale",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "weight_shape",
    "g_idx",
    "weight_format",
    "rotary_emb.inv_freq",
)
DUMMY_STD = 0.02
DUMMY_POOL = 1_048_573  # a prime, so that rows of a matrix do not repeat


class StageClock:
    """Nanoseconds spent in each stage of loading, added up over tensors.

    Stages: storage_read (finding tensors in the files, and bringing into memory what is then converted), convert
    (copying into the fused layout of the model with the cast to its dtype, or making random weights), layout (packing
    by the kernels, which read what is lent to them from the mapped file, and the transfer to a device other than the
    CPU).
    """

    def __init__(self) -> None:
        self.ns = {"storage_read": 0, "convert": 0, "layout": 0}

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Add the duration of the block to a stage, less what was added meanwhile."""
        start, before = time.monotonic_ns(), sum(self.ns.values())
        try:
            yield
        finally:
            self.ns[stage] += time.monotonic_ns() - start - (sum(self.ns.values()) - before)


class WeightSource(Protocol):
    """Gives tensors by their Hugging Face names."""

    def lend(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """The tensor where it lies, good until the source is closed; None if none lies in memory in this dtype."""

    def copy_into(self, name: str, out: Tensor) -> None:
        """Fill `out`, of the tensor's shape, any dtype and device."""

    def packed(self, layer: str, dtype: torch.dtype) -> Weight | None:
        """The matrix of a linear layer that is packed in groups, to be multiplied in `dtype`; None if it is not."""


def has_tensor(folder: Path, name: str) -> bool:
    """Whether the folder's checkpoint has a tensor of this name, whatever lies around it."""
    return any(each == name or each.endswith(f".{name}") for each in _names_in(folder))


def has_stacked_experts(folder: Path, traits: Traits) -> bool:
    """Whether the experts of a layer are one tensor."""
    return any(name.endswith(tuple(stored_name(each, traits.stored) for each in STACKED)) for name in _names_in(folder))


def as_saved(folder: Path, config: ModelConfig) -> ModelConfig:
    """The config as the folder's checkpoint has the model: embedders often lack the output layer and `model.` in names.

    Only folders are looked into that sentence-transformers, or config.json, says to hold an embedder.
    """
    if not config.headless and not (folder / "modules.json").is_file():
        return config
    names = _names_in(folder)
    if "embed_tokens.weight" in names:
        config = replace(config, traits=replace(config.traits, stored=(("model.", ""), *config.traits.stored)))
    if not config.shape.tied_embeddings and names and "lm_head.weight" not in names:
        config = replace(config, shape=replace(config.shape, tied_embeddings=True), headless=True)
    return config


def found_traits(folder: Path, traits: Traits) -> Traits:
    """The traits with the names that the folder's checkpoint has, if other parts lie beside the one that reads text."""
    if not traits.within:
        return traits
    names = _names_in(folder)
    ways = ((*pairs, *traits.stored) for pairs in WITHIN)
    stored = next(way for way in ways if stored_name("model.norm.weight", way) in names or not way)
    return replace(traits, stored=stored, inputs_first=traits.inputs_first and not _has_outputs_first(folder, names))


def _has_outputs_first(folder: Path, names: Collection[str]) -> bool:
    """Whether stacked experts are [E, out, in], as transformers 5 saves those of a family that has inputs first."""
    shapes = []
    for part in STACKED:
        name = next((each for each in names if each.endswith(part)), None)
        if name is None:
            return False
        path = folder / str(names[name] if isinstance(names, dict) else SINGLE_FILE)
        try:
            with safe_open(str(path), framework="pt") as file:
                shapes.append(file.get_slice(name).get_shape())
        except (SafetensorError, OSError):  # Checkpoint says what is wrong with it
            return False
    (_, above, _), (_, _, width) = shapes
    return bool(above == 2 * width)


def found_packed(
    folder: Path, packed: PackedMatrices | None, stored: tuple[tuple[str, str], ...]
) -> PackedMatrices | None:
    """Add the plain matrices to `packed` if config.json does not name them (bitsandbytes): they have no scales."""
    if packed is None or packed.layout not in ("nf4", "fp4", "llm.int8"):
        return packed
    names, back = _names_in(folder), [(theirs, ours) for ours, theirs in reversed(stored)]
    layers = (name.removesuffix(".weight") for name in names if name.endswith(".weight"))
    plain = (stored_name(layer, back) for layer in layers if f"{layer}.{packed.scale}" not in names)
    return replace(packed, ignored=tuple(sorted(plain)))


def _names_in(folder: Path) -> Collection[str]:
    """Names of the tensors; none where files are damaged: Checkpoint says what is wrong with them."""
    try:
        if (folder / INDEX_FILE).is_file():
            names = read_json(folder / INDEX_FILE, "").get("weight_map")
            return names if isinstance(names, dict) else ()
        with safe_open(str(folder / SINGLE_FILE), framework="pt") as file:
            return set(file.keys())
    except (ModelError, SafetensorError, OSError):
        return ()


def other_parts(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint's parts that do not read text."""
    names = _names_in(folder)
    files = sorted(set(names.values())) if isinstance(names, dict) else [SINGLE_FILE]
    for file_name in files:
        with safe_open(str(folder / file_name), framework="pt") as file:
            for name in sorted(set(file.keys())):
                if name.startswith(OTHER_PARTS):
                    yield name, file.get_tensor(name)


def stored_name(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    """The name of a tensor in the checkpoint."""
    for ours, theirs in pairs:
        name = name.replace(ours, theirs, 1)
    return name


class Checkpoint:
    """The safetensors files of a model folder, memory-mapped.

    Everything is checked on opening, before any weight is read: files, names, shapes and dtypes. Use as a
    context manager; tensors stay mapped until it is left. To have the files in memory in time, see read_ahead().

    Raises:
        ModelError: naming the file, and the tensor where there is one.
    """

    def __init__(
        self,
        folder: Path,
        expected: Shapes,
        clock: StageClock,
        packed: PackedMatrices | None = None,
        left_out: tuple[str, ...] = (),
        stored: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._clock = clock
        self._left_out = left_out
        self._packed = packed
        self._names = stored
        self._expected = expected = {self._name_of(name): shape for name, shape in expected.items()}
        self._stack = ExitStack()
        try:
            self._file_of = self._locate(folder, expected)
            self._handles = {path: self._open(path) for path in sorted(set(self._file_of.values()))}
            self._check(expected)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def lend(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """The mapped tensor. Its pages come into memory when they are read."""
        with self._clock.measure("storage_read"):
            mapped = self.stored(name)
        return mapped if mapped.dtype == dtype else None

    def copy_into(self, name: str, out: Tensor) -> None:
        """Fill `out` from the mapped tensor, one pass over the file's pages and one over `out`."""
        with self._clock.measure("storage_read"):
            mapped = self.stored(name).view(out.shape)
            mapped.view(-1).view(torch.uint8)[::PAGE_BYTES].sum()
        if out.device.type != "cpu":
            with self._clock.measure("convert"):
                mapped = mapped.to(out.dtype)
            with self._clock.measure("layout"):
                out.copy_(mapped)
        else:
            with self._clock.measure("convert"):
                out.copy_(mapped)

    def packed(self, layer: str, dtype: torch.dtype) -> Weight | None:
        """The matrix of a linear layer that is packed in groups, to be multiplied in `dtype`; None if it is not."""
        if self._packed is None or not self._packed.in_groups or not self._packed.covers(layer):
            return None
        with self._clock.measure("storage_read"):
            tensors = {part: self.stored(f"{layer}.{part}") for part in self._packed.parts}
        with self._clock.measure("convert"):
            return packed_layer(self._packed, layer, tensors, dtype)

    def stored(self, name: str) -> Tensor:
        """The mapped tensor, in the file's dtype."""
        name = self._name_of(name)
        mapped: Tensor = self._handles[self._file_of[name]].get_tensor(name)
        return mapped

    def _name_of(self, name: str) -> str:
        return stored_name(name, self._names)

    def _locate(self, folder: Path, expected: Shapes) -> dict[str, Path]:
        if (folder / INDEX_FILE).is_file():
            return _files_of_index(folder, expected)
        path = folder / SINGLE_FILE
        if problem := not_a_file(path):
            raise ModelError(f"{path}: {problem}" if os.path.lexists(path) else _no_weights(folder))
        return dict.fromkeys(expected, path)

    def _open(self, path: Path) -> Any:
        try:
            return self._stack.enter_context(safe_open(str(path), framework="pt"))
        except SafetensorError as error:
            raise ModelError(
                f"{path}: not a whole safetensors file ({error}); it is truncated or damaged, download it again"
            ) from error
        except OSError as error:
            raise ModelError(f"{path}: cannot be opened ({error}); download it again") from error

    def _check(self, expected: Shapes) -> None:
        names_in = {path: set(handle.keys()) for path, handle in self._handles.items()}
        for name, shape in expected.items():
            path = self._file_of[name]
            if name not in names_in[path]:
                raise ModelError(f"{path}: tensor {name} is missing; the checkpoint does not fit config.json")
            found = self._handles[path].get_slice(name)
            loadable = self._loadable(name)
            if found.get_dtype() not in loadable:
                raise ModelError(
                    f"{path}: tensor {name} is stored as {found.get_dtype()}, which is not supported; "
                    f"use a checkpoint in one of {', '.join(loadable)}"
                )
            has = shape_in_state(self.stored(name), f"{path}: {name}") if STATE in name else found.get_shape()
            if [n for n in has if n != 1] != [n for n in shape if n != 1]:
                raise ModelError(f"{path}: tensor {name} has shape {list(has)}, but config.json asks for {list(shape)}")
        for path, names in names_in.items():
            for name in sorted(names - expected.keys()):
                is_known = name == "lm_head.weight" or name.endswith(_UNUSED) or name.startswith(self._left_out)
                if not is_known and not self._is_nothing(path, name):
                    raise ModelError(f"{path}: tensor {name} has no place in the model that config.json describes")

    def _loadable(self, name: str) -> tuple[str, ...]:
        part = name.rpartition(".")[2]
        if part.endswith(("_blocks", "_scales")):
            return ("U8",)
        if self._packed and f"{name.removesuffix(part)}weight_scale" in self._expected and part in self._packed.kinds:
            return (self._packed.kinds[part],)
        if STATE in name:
            return ("U8",)
        if part == "weight" and self._packed and f"{name.removesuffix(part)}{self._packed.scale}" in self._expected:
            return (_KIND_OF_WEIGHTS.get(self._packed.layout, "I8"),)
        return _PACKED.get(part, LOADABLE)

    def _is_nothing(self, path: Path, name: str) -> bool:
        """A bias of zeros, which GPTQ's tools write beside matrices that have none."""
        return (
            name.endswith(".bias")
            and f"{name.removesuffix('bias')}qweight" in self._expected
            and not self._handles[path].get_tensor(name).any()
        )


def _files_of_index(folder: Path, expected: Shapes) -> dict[str, Path]:
    index = folder / INDEX_FILE
    weight_map = read_json(index, "").get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{index}: weight_map is missing; download the file again")
    files: dict[str, Path] = {}
    for name in expected:
        file_name = weight_map.get(name)
        if not isinstance(file_name, str):
            raise ModelError(f"{index}: tensor {name} is missing; the checkpoint does not fit config.json")
        if file_name != Path(file_name).name:
            raise ModelError(f"{index}: tensor {name} is said to be in {file_name!r}, which is not a file name")
        files[name] = folder / file_name
    for path in sorted(set(files.values())):
        if problem := not_a_file(path):
            raise ModelError(f"{path}: {problem}, but {INDEX_FILE} names it; download the missing shard")
    return files


def _no_weights(folder: Path) -> str:
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        return f"{folder}: holds PyTorch pickles but no {SINGLE_FILE}; convert the checkpoint to safetensors"
    return (
        f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there; download the weights, "
        "or use --load-format dummy for random ones"
    )


def drawn_weights(seed: int) -> Tensor:
    """A pool of small normal numbers, float32 [DUMMY_POOL]."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(DUMMY_POOL, np.float32)) * DUMMY_STD


class RandomWeights:
    """Small normal weights (standard deviation 0.02) and norms of 1, the same for the same seed.

    One pool of numbers is drawn, and every tensor is filled from it at an offset that its name decides, at
    the speed of memory: drawing billions of numbers would take minutes.
    """

    def __init__(self, seed: int, clock: StageClock) -> None:
        self._drawn = drawn_weights(seed)
        self._pools: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._clock = clock

    def lend(self, name: str, dtype: torch.dtype) -> None:
        """Return None: nothing lies in memory, a tensor is made when it is asked for."""

    def packed(self, layer: str, dtype: torch.dtype) -> None:
        """Return None: no matrix is packed in groups."""

    def copy_into(self, name: str, out: Tensor) -> None:
        """Fill `out`, which must be contiguous."""
        with self._clock.measure("convert"):
            if name.endswith("norm.weight"):
                out.fill_(1.0)
            else:
                self._tile(zlib.crc32(name.encode()) % DUMMY_POOL, out.view(-1))

    def _tile(self, offset: int, out: Tensor) -> None:
        key = (out.dtype, out.device)
        if key not in self._pools:
            self._pools[key] = self._drawn.to(dtype=out.dtype, device=out.device)
        pool = self._pools[key]
        done = 0
        while done < out.numel():
            piece = pool[offset : offset + out.numel() - done]
            out[done : done + piece.numel()].copy_(piece)
            done += piece.numel()
            offset = 0
