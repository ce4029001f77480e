"""Reading datasets from files: errors name the file and the line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from headway.load.errors import BenchError

T = TypeVar("T")
SHOWN_CHARS = 200
HUB = "hf:"  # the first part of the path of a file of a Hugging Face dataset, hf://OWNER/NAME/FILE


class Line(NamedTuple):
    """A line of a file, numbered from 1."""

    path: Path
    number: int

    def wrong(self, what: str, expected: str) -> BenchError:
        """The error for it, however much is wrong with it."""
        what = " ".join(what.split())
        shown = what if len(what) <= SHOWN_CHARS else f"{what[:SHOWN_CHARS]}..."
        return BenchError(f"{self.path}, line {self.number}: {shown}; {expected}")

    def decoded(self, decode: Callable[[str], T], said: str, expected: str) -> T:
        """What it says in JSON. Raises BenchError."""
        try:
            return decode(said)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise self.wrong(str(error), f"expected as {expected}") from None


def is_of_hub(path: Path) -> bool:
    """Whether it is a file of a Hugging Face dataset, hf://OWNER/NAME/FILE."""
    return path.parts[:1] == (HUB,)


def local_file(path: Path) -> Path:
    """The file on this machine: itself, or that of a Hugging Face dataset, from the cache or downloaded into it.

    Raises:
        BenchError: the hub does not have it, or cannot be reached.
    """
    if not is_of_hub(path):
        return path
    parts = path.parts[1:]
    if len(parts) < 3:
        raise BenchError(f"the dataset {path} names no file; write hf://OWNER/NAME/FILE, such as hf://a/b/data.jsonl")
    owner, name, file = parts[0], parts[1], "/".join(parts[2:])
    from huggingface_hub import hf_hub_download
    from huggingface_hub import logging as hub_logging
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    hub_logging.set_verbosity_error()  # it would say of each attempt that it failed
    try:
        return Path(hf_hub_download(f"{owner}/{name}", file, repo_type="dataset"))
    except GatedRepoError:
        problem = "is gated on the Hugging Face hub; accept its terms there and set HF_TOKEN"
    except LocalEntryNotFoundError:
        problem = "is not in the local cache, and the Hugging Face hub cannot be reached; give a local file"
    except EntryNotFoundError:
        problem = f"has no file {file}; look at its files on the Hugging Face hub"
    except RepositoryNotFoundError:
        problem = "is not on the Hugging Face hub; check the name, or set HF_TOKEN"
    except Exception as error:  # the hub client raises whatever its HTTP library does
        first = (str(error).strip().splitlines() or ["no details"])[0]
        problem = f"cannot be downloaded ({type(error).__name__}: {first}); give a local file"
    raise BenchError(f"the dataset {owner}/{name} {problem}")


def read_text(path: Path) -> str:
    """The whole of a file that must be UTF-8 and must not be empty.

    Raises:
        BenchError: naming the file and, for bytes that are not UTF-8, their line.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise BenchError(
            f"the dataset {path} cannot be read: {error.strerror or error}; check --dataset-path"
        ) from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at = Line(path, raw.count(b"\n", 0, error.start) + 1)
        raise at.wrong(f"byte 0x{raw[error.start]:02x} is not UTF-8", "is it compressed or binary?") from None
    if not text.strip():
        raise BenchError(f"the dataset {path} is empty; it must have at least one request")
    return text


def lines_of(path: Path) -> Iterator[tuple[Line, str]]:
    """Each line that is not blank, and what it says."""
    for number, said in enumerate(read_text(path).split("\n"), start=1):
        if said.strip():
            yield Line(path, number), said


def count_of(at: Line, name: str, value: str) -> int:
    """A whole number of 0 or more; "374.0" counts as one.

    Raises:
        BenchError: naming the column and the value.
    """
    try:
        number = int(value)
    except ValueError:
        try:
            real = float(value)
            number = int(real) if real.is_integer() else -1
        except (ValueError, OverflowError):
            number = -1
    if number < 0:
        raise at.wrong(f"{name} is '{value}'", "a whole number of tokens is expected")
    return number
