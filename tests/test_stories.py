"""The program that writes stories for the bundled model: every choice is filled in, and a seed gives the same again."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path

_SPEC = importlib.util.spec_from_file_location("stories", Path(__file__).parents[1] / "tools" / "stories.py")
assert _SPEC is not None and _SPEC.loader is not None
stories = importlib.util.module_from_spec(_SPEC)
sys.modules["stories"] = stories
_SPEC.loader.exec_module(stories)


def written(seed: int, count: int) -> list[str]:
    texts = itertools.islice(stories.texts(seed), count)
    return [text if isinstance(text, str) else "\n".join(f"{role}: {said}" for role, said in text) for text in texts]


def test_no_template_shows() -> None:
    for text in written(1, 1500):
        assert text and not any(mark in text for mark in "[]{}|#"), text
        assert "  " not in text and " ." not in text, text


def test_a_seed_gives_the_same_texts() -> None:
    assert written(2, 20) == written(2, 20) != written(3, 20)


def test_a_conversation_takes_turns_and_answers_every_one() -> None:
    for text in itertools.islice(stories.texts(4), 300):
        if not isinstance(text, str):
            roles = [role for role, _ in text if role != "system"]
            assert roles == ["user", "assistant"] * (len(roles) // 2)
            assert all(said.strip() for _, said in text), text
