"""Models that come with the package, as ordinary Hugging Face folders, and a text: sentences of Headway's documents."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

STORY = Path(str(files(__package__) / "story"))
DRAFT = Path(str(files(__package__) / "story-draft"))
PROSE = Path(str(files(__package__) / "prose.txt"))
NAME = "headway/story"
_FOLDERS = {NAME: STORY, "headway/story-draft": DRAFT}


def bundled_folder(name: str) -> Path | None:
    """The folder of a bundled model, None for any other name. No command looks for these on the Hugging Face hub."""
    return _FOLDERS.get(name.strip().lower())
