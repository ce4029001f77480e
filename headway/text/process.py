"""Work on texts in a bounded process: chat templates that are not plain, and very long texts."""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headway.text.bounded import BoundedProcess, Closed, limit_memory, serve
from headway.text.chat_template import ChatTemplate
from headway.text.tokenizer import Tokenizer
from headway.text.tokenizer_files import TextError

RENDER_S, ENCODE_S = 5.0, 60.0
# More than this process has when it is ready.
RENDER_BYTES, ENCODE_BYTES = 2**29, 2**31
# The limit of a text that no context bounds.
MOST_CHARS = 2**24
# The limit of a text that is cut to the context or only tokenized; in UTF-8 also of its bytes. It takes up to 0.6 GB.
MOST_CUT = 2**22
# Ids become Python's with the interpreter's lock held.
IDS_BETWEEN_PAUSES, PAUSE_S = 2**16, 2e-5


class Render(msgspec.Struct, tag=True):
    """The arguments of ChatTemplate.render(); `template` is the source, and `most` the characters of the result."""

    template: str
    special_tokens: dict[str, str]
    messages: list[dict[str, Any]]
    options: dict[str, Any]
    most: int


class Encode(msgspec.Struct, tag=True):
    """The arguments of Tokenizer.encode_all(); `folder` has the tokenizer, and `most` the ids of each text."""

    folder: str
    texts: list[str]
    add_special_tokens: bool
    most: int


class Decode(msgspec.Struct, tag=True):
    """The arguments of Tokenizer.decode(); `folder` has the tokenizer, and `ids` 8 bytes for each."""

    folder: str
    ids: bytes
    skip_special_tokens: bool


class _Answer(msgspec.Struct):
    """`ids` has 4 bytes for each id. For a text of more than `most` tokens, it is their number."""

    text: str = ""
    ids: list[bytes | int] = []
    refusal: str = ""


class TooLong(TextError):
    """A task took more time or memory than it may."""


class TextProcess:
    """The process, from this side. One task at a time; for any thread."""

    def __init__(self) -> None:
        self._process = BoundedProcess(__name__)

    def render(
        self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], most: int = MOST_CHARS, **options: Any
    ) -> str:
        """Render like ChatTemplate.render(), in the other process.

        Args:
            most: the limit of the result, in characters.

        Raises:
            TextError: as ChatTemplate.render() raises it, and for a longer result.
            TooLong: it took too long, or too much memory.
        """
        asked = Render(template.source, template.special_tokens, [dict(each) for each in messages], options, most)
        return self._done(asked, RENDER_S, "the chat template", "these messages").text

    def encode(self, folder: Path, texts: list[str], add_special_tokens: bool, most: int) -> list[list[int] | int]:
        """Encode like Tokenizer.encode_all(), in the other process. For more than `most` tokens, return their number.

        Raises:
            TooLong: it took too long, or too much memory.
        """
        asked = Encode(str(folder), texts, add_special_tokens, most)
        found = self._done(asked, ENCODE_S, "the tokenizer", "this text").ids
        return [each if isinstance(each, int) else _listed(each) for each in found]

    def decode(self, folder: Path, ids: bytes, skip_special_tokens: bool) -> str:
        """Decode ids of 8 bytes each as Tokenizer.decode() does. Raises TooLong: it took too much time or memory."""
        asked = Decode(str(folder), ids, skip_special_tokens)
        return self._done(asked, ENCODE_S, "the tokenizer", "these tokens").text

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.close()

    def _done(self, task: Render | Encode | Decode, seconds: float, who: str, what: str) -> _Answer:
        try:
            answered = self._process.ask(msgspec.msgpack.encode(task), seconds)
        except Closed as error:
            raise TooLong(str(error)) from None
        except TimeoutError:
            raise TooLong(f"{who} took more than {seconds:g} s for {what}") from None
        except OSError:
            raise TooLong(f"{who} took more memory than it may for {what}") from None
        answer = msgspec.msgpack.decode(answered, type=_Answer)
        if answer.refusal:
            raise TextError(answer.refusal)
        return answer


def _listed(ids: bytes) -> list[int]:
    """Ids of 4 bytes each, with pauses for other threads."""
    found, given = list[int](), memoryview(ids).cast("i")
    for at in range(0, len(given), IDS_BETWEEN_PAUSES):
        found += given[at : at + IDS_BETWEEN_PAUSES].tolist()
        time.sleep(PAUSE_S)
    return found


# --- in the process ---------------------------------------------------------------------------------


class _Worker:
    def __init__(self) -> None:
        self._template: ChatTemplate | None = None
        self._tokenizer: Tokenizer | None = None

    def do(self, task: Render | Encode | Decode) -> _Answer:
        try:
            if isinstance(task, Render):
                return self._render(task)
            return self._encode(task) if isinstance(task, Encode) else self._decode(task)
        except TextError as error:
            return _Answer(refusal=str(error)[:2000])

    def _render(self, task: Render) -> _Answer:
        if self._template is None or self._template.source != task.template:
            self._template = ChatTemplate(task.template, task.special_tokens)
        text = self._template.render(task.messages, **task.options)
        if len(text) > task.most:
            raise TextError(
                f"the chat template makes a text of {len(text)} characters; at most {task.most} can fit the context"
            )
        return _Answer(text=text)

    def _encode(self, task: Encode) -> _Answer:
        found = list[bytes | int]()
        for ids in self._of(task.folder).encode_all(task.texts, task.add_special_tokens):
            found.append(len(ids) if len(ids) > task.most else array("i", ids).tobytes())
        return _Answer(ids=found)

    def _decode(self, task: Decode) -> _Answer:
        ids = array("q", task.ids).tolist()
        return _Answer(text=self._of(task.folder).decode(ids, task.skip_special_tokens))

    def _of(self, folder: str) -> Tokenizer:
        if self._tokenizer is None or self._tokenizer.folder != Path(folder):
            self._tokenizer = Tokenizer.load(folder)
        return self._tokenizer


def main(descriptor: int, parent: int) -> None:
    """Do what is asked until the parent has gone."""
    worker = _Worker()

    def do(message: bytearray) -> bytes:
        task = msgspec.msgpack.decode(message, type=Render | Encode | Decode)
        limit_memory(RENDER_BYTES if isinstance(task, Render) else ENCODE_BYTES)
        return msgspec.msgpack.encode(worker.do(task))

    serve(descriptor, parent, do)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
