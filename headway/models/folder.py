"""Finds the folder of a model's name. No torch: the server needs the folder before the engine does."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from headway.bundled import bundled_folder
from headway.cost.values import ModelError
from headway.files import not_a_file
from headway.models.gguf.config import folder_of, gguf_file, gguf_files

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
TAG = re.compile(r"[A-Za-z]+\d[\w]*")  # as Q4_K_M, F16, MXFP4
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_READ = (".json", ".jinja", ".safetensors", ".gguf", ".model")  # files of a folder that may be read
HUB_DUPLICATES = ["original/*", "consolidated*", "onnx/*"]


def resolve_model(name_or_path: str) -> Path:
    """The folder of a checkpoint: a local one, that of a GGUF file, a bundled one, or a hub id's snapshot, downloaded.

    Of several GGUF models in a folder or a hub's repository, `NAME:Q4_K_M` is the one with that in its file's name.

    Raises:
        ModelError: no such folder, the hub cannot give it, or what should be a file is none.
    """
    path = Path(name_or_path).expanduser()
    if name_or_path and path.is_dir():
        return _folder(path)
    if path.suffix == ".gguf":
        if problem := not_a_file(path):
            raise ModelError(f"{name_or_path}: {problem}")
        return folder_of(path)
    if (bundled := bundled_folder(name_or_path)) is not None:
        if not bundled.is_dir():
            raise ModelError(f"{name_or_path}: the bundled model is missing from this installation ({bundled})")
        return bundled
    if name_or_path and path.is_symlink() and not path.exists():
        raise ModelError(f"{name_or_path}: {not_a_file(path)}")
    if name_or_path and path.exists():
        raise ModelError(f"{name_or_path}: is a file; give the folder that holds config.json, or a .gguf file")
    base, _, tag = name_or_path.rpartition(":")
    if TAG.fullmatch(tag) and (Path(base).expanduser().is_dir() or HUB_ID.fullmatch(base)):
        folder = Path(base).expanduser()
        spellings = {f"*{spelt}*.gguf" for spelt in (tag, tag.lower(), tag.upper())}
        return folder_of(gguf_file(folder if folder.is_dir() else _download(base, sorted(spellings)), tag))
    if not HUB_ID.fullmatch(name_or_path):
        raise ModelError(f"{name_or_path!r}: no such folder; give a model folder or a Hugging Face id like owner/name")
    return _checked(_download(name_or_path))


def _checked(folder: Path) -> Path:
    """The folder, if what it has under the names of files are files. Raises ModelError."""
    for path in sorted(each for each in folder.iterdir() if each.suffix in _READ):
        if problem := not_a_file(path):
            raise ModelError(f"{path}: {problem}; a model folder needs the file itself")
    return folder


def _folder(path: Path) -> Path:
    """The folder itself, or that of the GGUF model in it, where what goes with it is not there."""
    _checked(path)
    is_whole = all((path / name).is_file() for name in ("config.json", "tokenizer.json"))
    files = [] if is_whole else gguf_files(path)
    return folder_of(files[0]) if files else path


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, or its GGUF files."""
    return [*sorted(folder.glob("*.safetensors")), *gguf_files(folder)]


def read_ahead(folder: Path) -> None:
    """Ask the system for the weights' files, in large reads, long before they are looked into.

    A file that cannot be opened, such as a link to nothing, is left to who reads it.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for path in weight_files(folder):
        with suppress(OSError), path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _download(model_id: str, files: list[str] = HUB_FILES) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(model_id, allow_patterns=files, ignore_patterns=HUB_DUPLICATES))
    except GatedRepoError:
        problem = "is gated on the Hugging Face hub; accept its licence there and set HF_TOKEN"
    except LocalEntryNotFoundError:
        problem = "no such folder, and the Hugging Face hub cannot be reached for it; give a local model folder"
    except RepositoryNotFoundError:
        problem = "no such folder, and no such model on the Hugging Face hub; check the name, or set HF_TOKEN"
    except Exception as error:  # the hub client raises whatever its HTTP library does
        problem = f"cannot be downloaded ({type(error).__name__}: {_first_line(error)}); give a local model folder"
    raise ModelError(f"{model_id}: {problem}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no details"])[0]
