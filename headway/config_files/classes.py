"""The file that says which classes of requests there are."""

from __future__ import annotations

from dataclasses import dataclass

from headway.config_files.toml import parse, read_text
from headway.policy.objectives.service_class import BUILT_IN, ClassTable, table_of

_KEYS = ("default", "service_tiers", "class")


@dataclass(frozen=True, slots=True)
class ClassFile:
    """The contents of a file of classes."""

    table: ClassTable = BUILT_IN
    path: str = ""  # where it was read; empty where there is no file


def read_class_file(path: str) -> ClassFile:
    """Read and check the file.

    Raises:
        ValueError: naming the file, the line, and what is wrong there.
    """
    return parse_class_file(path, read_text(path))


def parse_class_file(path: str, text: str) -> ClassFile:
    """Check a text like read_class_file() checks a file; `path` names it in errors."""
    return ClassFile(parse(path, text, _KEYS, table_of), path)
