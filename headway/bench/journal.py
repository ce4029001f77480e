"""A journal of what was measured and simulated, so that an interrupted tuning or sweep goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Journal:
    """Answers by their questions, a line of JSON each. Who asks the same again gets the same answer.

    Args:
        about: what it is of; a journal of something else is refused.

    Raises:
        ValueError: the file cannot be used; one line.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self._path, self._known = path, dict[str, Any]()
        self.seconds = 0.0  # that all measurements took
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        except OSError as error:
            raise ValueError(f"cannot use {path}: {error.strerror}") from None
        about = json.loads(json.dumps(about))
        for number, line in enumerate(lines):
            try:
                entry = json.loads(line)
            except ValueError:
                if number + 1 < len(lines):
                    raise ValueError(f"{path}, line {number + 1} is not JSON; give another --output") from None
                continue  # half a line of a process that was killed
            if not number and entry.get("about") != about:
                raise ValueError(f"{path} is of a run with other options; give another --output, or remove it")
            if "question" in entry:
                self._known[entry["question"]] = entry["answer"]
                self.seconds += entry["seconds"]
        if not lines:
            self._write({"about": about})
        elif not self._path.read_text(encoding="utf-8").endswith("\n"):
            self._path.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")

    def answer(self, question: str) -> Any | None:
        """What is known; None where nothing is."""
        return self._known.get(question)

    def add(self, question: str, answer: Any, seconds: float = 0.0) -> None:
        """Keep an answer, which is JSON-able, at once."""
        self._known[question] = answer
        self.seconds += seconds
        self._write({"question": question, "answer": answer, "seconds": round(seconds, 3)})

    def _write(self, entry: dict[str, Any]) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            raise ValueError(f"cannot write {self._path}: {error.strerror}") from None
