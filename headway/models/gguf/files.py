"""Reads GGUF files: what they say of a model, and where their tensors lie (ggml-org/ggml, docs/gguf.md). No torch.

Nothing that a file says of itself is believed: each count and length is held against the bytes that are left before
anything is made of it.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.cost.values import ModelError
from headway.files import not_a_file

SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
# Types of tensors: by their number, the name, and inputs and bytes of a block.
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}
# Types that cannot be read, for messages.
_OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MOST_DIMENSIONS = 4
_LEAST_ENTRY = 8 + 1 + 4 + 1  # bytes of a key and its value, and less than those of a tensor's entry


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies: bytes first .. first + size of a file."""

    path: Path
    kind: str  # its type's name, such as Q4_K
    shape: tuple[int, ...]  # the outermost dimension first
    first: int
    size: int


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """All parts of a model: keys and values of the first, tensors of all."""

    path: Path
    values: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFModel:
    """Read what stands before the tensors, of the file and, where it is one of several, of the others.

    Raises:
        ModelError: a file is missing, not whole, or not GGUF of version 2 or 3.
    """
    paths = parts_of(path)
    values, tensors = _read_file(paths[0])
    stated = values.get("split.count", 1) or 1
    if stated != len(paths):
        raise ModelError(f"{paths[0]}: says that it is one of {stated} parts, but its name says {len(paths)}")
    for other in paths[1:]:
        more = _read_file(other)[1]
        if twice := tensors.keys() & more.keys():
            raise ModelError(f"{other}: tensor {min(twice)} is in an earlier part too; download the files again")
        tensors |= more
    return GGUFModel(paths[0], values, tensors)


def parts_of(path: Path) -> list[Path]:
    """All files of a model of which `path` is one, in their order. Raises ModelError where one is missing."""
    split = SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    count = int(split[3])
    if not 1 <= int(split[2]) <= count:
        raise ModelError(f"{path}: part {int(split[2])} of {count} cannot exist; give the first part")
    paths = []
    for number in range(1, count + 1):
        paths.append(path.with_name(f"{split[1]}-{number:05}-of-{split[3]}.gguf"))
        if problem := not_a_file(paths[-1]):
            raise ModelError(f"{paths[-1]}: {problem}, but {path.name} is one of {count} parts; download it")
    return paths


def _shown(name: str) -> str:
    """A name that a file gives, as messages can have it."""
    return name if name.isprintable() and len(name) <= 80 else repr(name[:80])


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise ModelError(f"{path}: is empty; download it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Reader(path, content).read()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error


class _Reader:
    """Goes through a file from its beginning; every step is checked against its end."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path, self._content, self._at = path, content, 0

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if self._take(4) != b"GGUF":
            raise ModelError(f"{self._path}: is not a GGUF file")
        version = self._number("I")
        if version not in (2, 3):
            known = "is big-endian" if version in (2 << 24, 3 << 24) else f"is of version {version}"
            raise ModelError(f"{self._path}: {known}; only little-endian GGUF of version 2 and 3 is supported")
        num_tensors, num_values = self._count(_LEAST_ENTRY, "tensors"), self._count(_LEAST_ENTRY, "keys")
        values: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            values[key] = self._value(self._number("I"), key)
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment!r}, not a power of two")
        entries = [self._entry() for _ in range(num_tensors)]
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, kind, shape, offset in entries:
            if name in tensors:
                raise self._damaged(f"tensor {_shown(name)} occurs twice")
            tensors[name] = self._tensor(name, kind, shape, start + offset)
        return values, tensors

    def _entry(self) -> tuple[str, int, tuple[int, ...], int]:
        name, dimensions = self._string(), self._number("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self._damaged(f"tensor {_shown(name)} has {dimensions} dimensions")
        sizes = struct.unpack(f"<{dimensions}Q", self._take(8 * dimensions))
        return name, self._number("I"), sizes[::-1], self._number("Q")

    def _tensor(self, name: str, kind: int, shape: tuple[int, ...], first: int) -> GGUFTensor:
        if kind not in TENSOR_TYPES:
            known = ", ".join(each[0] for each in TENSOR_TYPES.values())
            stated = f"tensor {_shown(name)} is of type {_OTHER_TYPES.get(kind, kind)}"
            raise ModelError(f"{self._path}: {stated}, which is not supported; use a file in {known}")
        type_name, inputs, block = TENSOR_TYPES[kind]
        if shape[-1] % inputs:
            raise self._damaged(
                f"tensor {_shown(name)} has rows of {shape[-1]} in {type_name}, which must be a multiple of {inputs}"
            )
        size = math.prod(shape) // inputs * block
        if size < 1 or first + size > len(self._content):
            raise ModelError(
                f"{self._path}: tensor {_shown(name)} of {size:,} bytes at {first:,} lies outside the file of "
                f"{len(self._content):,}; it is truncated or damaged, download it again"
            )
        return GGUFTensor(self._path, type_name, shape, first, size)

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise self._damaged(f"{_shown(key)} has a value of unknown type {kind}")
        item = self._number("I")
        if item == _STRING:
            return [self._string() for _ in range(self._count(8, key))]
        if item not in _NUMBERS:
            raise self._damaged(f"{_shown(key)} is a list of unknown type {item}")
        each = _NUMBERS[item]
        count = self._count(struct.calcsize(f"<{each}"), key)
        return list(struct.unpack(f"<{count}{each}", self._take(struct.calcsize(f"<{count}{each}"))))

    def _number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))[0]

    def _count(self, least: int, what: str) -> int:
        """How many of something follow, of which each takes `least` bytes."""
        count: int = self._number("Q")
        if count * least > len(self._content) - self._at:
            raise self._damaged(f"{count:,} of {_shown(what)} do not fit into it")
        return count

    def _string(self) -> str:
        return self._take(self._count(1, "bytes of a text")).decode(errors="replace")

    def _take(self, size: int) -> bytes:
        taken = self._content[self._at : self._at + size]
        if len(taken) < size:
            raise self._damaged("it ends too early")
        self._at += size
        return taken

    def _damaged(self, problem: str) -> ModelError:
        return ModelError(
            f"{self._path}: not a whole GGUF file ({problem}); it is truncated or damaged, download it again"
        )
