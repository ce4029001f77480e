"""Models that come with the package, as ordinary Hugging Face folders."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

STORY = Path(str(files(__package__) / "story"))
DRAFT = Path(str(files(__package__) / "story-draft"))
