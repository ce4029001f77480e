"""The fenced blocks of README.md and docs/*.md: commands, what they print, and files that they read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
DOCUMENTS = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")))
LANGUAGES = {"sh", "text", "python", "json", "toml", ""}
# What no test can have; a block that is not run says which of these it is.
REASONS = {
    "network",
    "GPU",
    "other engines",
    "other clients",
    "compiles every kernel",
    "a file of your own",
    "a server with a data folder",
}
_FENCE = re.compile(
    r"(?:<!-- (?P<mark>[^>]+) -->\n)?(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)\n *```", re.DOTALL
)
_NUMBER = re.compile(r"\d[\d,.]*")
_RULE = re.compile(r"[─━\s]+")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Args:
        section: number of the heading that it stands under.
        mark: of the comment before it: "slow", "not run: REASON", or "" for none; "an example" is an output that no two
            runs have alike.
    """

    document: Path
    line: int
    section: int
    mark: str
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.document.name}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The commands of a `sh` block, without comments, one per line."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [
            shlex.join(words).replace("'&&'", "&&") for line in lines if (words := shlex.split(line, comments=True))
        ]


def blocks(document: Path) -> list[Block]:
    text = document.read_text()
    found = []
    for match in _FENCE.finditer(text):
        before = text[: match.start()]
        outside = re.sub(r"```.*?```", "", before, flags=re.DOTALL)
        section = len(re.findall(r"^#+ ", outside, re.MULTILINE))
        mark, language = match["mark"] or "", match["language"]
        mark = "" if mark.startswith(("figures", "end of")) else mark
        found.append(Block(document, before.count("\n") + 1, section, mark, language, match["text"]))
    return found


def shown_by(block: Block) -> Iterator[str]:
    """The outputs that are shown for the last command of a block: `text` in its section, before the next command."""
    following = [each for each in blocks(block.document) if each.line > block.line and each.section == block.section]
    for each in following:
        if each.language == "sh":
            return
        if each.language == "text" and each.mark != "an example":
            yield each.text


def shape(line: str, keep_numbers: bool) -> str:
    """A line of output without the width of its columns, and without its numbers unless these are kept."""
    plain = _RULE.sub(" ", line).strip()
    return plain if keep_numbers else _NUMBER.sub("#", plain)


def missing_lines(shown: str, printed: str, keep_numbers: bool) -> list[str]:
    """Lines that a document shows and the command did not print after those before them."""
    rest = [shape(line, keep_numbers) for line in printed.splitlines()]
    missing = []
    for line in shown.splitlines():
        wanted = shape(line, keep_numbers)
        if not wanted:
            continue
        if wanted in rest:
            rest = rest[rest.index(wanted) + 1 :]
        else:
            missing.append(line)
    return missing
