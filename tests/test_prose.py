"""Docstrings and comments begin like sentences, so that a newcomer understands each at first reading."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
ROOTS = ("headway", "benchmarks", "tools")

# What begins like this has no subject but the name that it explains.
EVERYWHERE = "Of|Those|By"
# A comment may give a reason, such as "As the file is mapped, ..."; a docstring has to say what the thing is.
IN_DOCSTRINGS = f"{EVERYWHERE}|As|With|Without|In|Inside|To|From|Until"
FINE = r"By default|As (?:long|soon|far) as"
COMMENT = re.compile(rf"#+\s*(?!{FINE})(?:{EVERYWHERE})\b")
DOCSTRING = re.compile(rf"\s*(?!{FINE})(?:{IN_DOCSTRINGS})\b")


def fragments(source: str) -> list[tuple[int, str]]:
    """The line and the first words of each docstring and comment that begins in the middle of a sentence."""
    docstrings = [(line, text) for line, text in docstrings_of(source) if DOCSTRING.match(text)]
    # Most files have no such words after a "#"; taking all of them apart would take seconds.
    comments = comments_of(source) if COMMENT.search(source) else ()
    found = sorted([*docstrings, *((line, text) for line, text in comments if COMMENT.match(text))])
    return [(line, " ".join(text.split()[:8])) for line, text in found]


def docstrings_of(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield node.body[0].lineno, text


def comments_of(source: str) -> Iterator[tuple[int, str]]:
    """Comments, of which lines that follow each other are one."""
    lines, before = source.splitlines(), -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            number, column = token.start
            stands_alone = not lines[number - 1][:column].strip()
            if not (stands_alone and before == number - 1):
                yield number, token.string
            before = number if stands_alone else -1


def sources() -> Iterator[Path]:
    for root in ROOTS:
        yield from sorted((REPOSITORY / root).rglob("*.py"))


def test_no_docstring_or_comment_begins_in_the_middle_of_a_sentence() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{line}: {words} ..."
        for path in sources()
        for line, words in fragments(path.read_text())
    ]
    assert not found, "write a sentence with a subject, or a noun phrase:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        '"""Of a module."""',
        'class A:\n    """By its name."""',
        'def a():\n    """As b(), for two."""',
        'async def a():\n    """\n    With a long tail.\n    """',
        "# Those that are empty.\nx = 1",
        "x = 1  # By hand.",
        "x = 1\n#Of all.\n# And more.",
        "x = 1  # bytes\n# Of those.",
    ],
)
def test_a_fragment_is_found(source: str) -> None:
    assert len(fragments(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        '"""The blocks of a sequence, oldest first."""',
        'def a():\n    """By default, the largest.\n\n    Of two that are equal, the first.\n    """',
        'def a():\n    """As long as it runs."""',
        'def a():\n    """Offsets of tokens."""',
        'def a():\n    """Return b.\n\n    With c it is faster.\n    """\n    return """Of no docstring."""',
        "# The largest\n# Of all are those.\nx = 1",
        "# As the file is mapped, this costs nothing.\nx = 1",
        "x = 1  # of one response",
        "# By default, all.\nx = 1",
        'x = "# Of course"',
    ],
)
def test_a_sentence_is_let_through(source: str) -> None:
    assert fragments(source) == []
