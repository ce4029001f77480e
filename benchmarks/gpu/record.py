"""The results of a GPU: what is there of an earlier call with the same sources and versions, and what is added."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import ROOT
from benchmarks.gpu.runner import Outcome
from benchmarks.machine import save

_SOURCES = ("headway", "benchmarks", "tests")
_KINDS = (".py", ".toml", ".json", ".j2")


@dataclass
class Record:
    """One file.

    Args:
        machine: what environment.look found.
        version: what results must have in common to stand beside each other: the sources, torch, Triton, driver.
        parts: by name, {"date", "commit", "version", "tasks", "left", "cut", "missing"}.
    """

    path: Path
    machine: dict[str, Any]
    commit: str
    version: dict[str, Any]
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, machine: dict[str, Any], name: str) -> Record:
        """Open the record of a machine, with what its file has if there is one that can be read."""
        path = folder / f"{slug(name)}.json"
        version = {
            "sources": fingerprint(ROOT), "torch": machine["torch"].get("version"), "triton": machine["triton"],
            "driver": machine["driver"],
        }  # fmt: skip
        record = cls(path, machine, commit(ROOT), version)
        try:
            parts = json.loads(path.read_text())["parts"]
            record.parts = {str(name): part for name, part in parts.items() if isinstance(part["tasks"], dict)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        return record

    def kept(self, part: str) -> Outcome:
        """What is known of a part from calls with the same version."""
        known = self.parts.get(part, {})
        if known.get("version") != self.version:
            return Outcome()
        return Outcome(dict(known["tasks"]), list(known.get("left", [])), bool(known.get("cut")))

    def is_done(self, part: str) -> bool:
        """Whether nothing of a part is left to be run."""
        kept = self.kept(part)
        return bool(kept.tasks) and not kept.left and not kept.cut

    def add(self, part: str, outcome: Outcome, missing: list[str], seconds: float) -> None:
        """Write the file anew, whole or not at all.

        Args:
            missing: Python packages without which the part was left out.
        """
        self.parts[part] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": self.commit, "version": self.version,
            "seconds": round(seconds, 1), "missing": missing, **asdict(outcome),
        }  # fmt: skip
        save({"machine": self.machine, "parts": self.parts}, self.path)

    def rows(self, part: str) -> list[dict[str, Any]]:
        """What the part measured, each with the name of its task."""
        tasks = self.parts.get(part, {}).get("tasks", {})
        return [{"task": name, **row} for name, task in tasks.items() for row in task["rows"]]


def slug(name: str) -> str:
    """A file's name: "NVIDIA H100 80GB HBM3" is nvidia-h100-80gb-hbm3."""
    return "-".join(re.findall(r"[a-z0-9]+", name.lower())) or "gpu"


def fingerprint(root: Path) -> str:
    """A digest of all source files. It also covers what is in no commit, and works without git."""
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for file in sorted((root / folder).rglob("*")):
            relative = file.relative_to(root)
            if file.suffix in _KINDS and file.is_file() and relative.parts[1] not in ("results", "checkpoints"):
                digest.update(f"{relative}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def commit(root: Path) -> str:
    """The commit by git, with "and changes" if there are some; "unknown" without git."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        status = ["git", "status", "--porcelain", "--", *_SOURCES]
        changed = subprocess.run(status, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + (" and changes" if changed else "")
