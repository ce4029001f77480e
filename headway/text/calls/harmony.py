"""The messages of gpt-oss: each has a channel, perhaps a recipient, and a text."""

from __future__ import annotations

import re

from headway.text.calls.events import Writer
from headway.text.calls.scanner import Reading, Scanner

_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_HEADER = ("<|start|>", "<|channel|>")
TAGS = (*_ENDS, "<|channel|>", "<|message|>", "<|constrain|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def answer(scan: Scanner, out: Writer, expects_calls: bool) -> Reading[None]:
    """Read the messages of an answer, whose first may lack the beginning that the prompt has.

    `analysis` is reasoning; a message to somebody is a call of a function, whose arguments are the message.
    """
    before = yield from scan.space()
    stray = yield from scan.literal("to=")
    if not stray:
        out.content(before)
    while True:
        stray = stray or (yield from scan.until((*_HEADER, "<|message|>"), out.content))
        if not stray:
            return
        scan.mark(len(stray))
        header, tag = [stray], stray
        if tag != "<|message|>":
            while tag in (*_HEADER, "<|constrain|>", "to="):
                tag = yield from scan.until(TAGS, header.append)
                header.append(tag)
        stray = ""
        if tag != "<|message|>":
            out.malformed(scan.since_mark())
            scan.unmark()
            continue
        yield from _message("".join(header), scan, out, expects_calls)


def _message(header: str, scan: Scanner, out: Writer, expects_calls: bool) -> Reading[None]:
    channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
    if recipient is not None and expects_calls:
        out.begin(recipient[1].removeprefix("functions."))
        found = yield from scan.until(_ENDS, out.arguments)
        out.end()
    elif channel is not None and channel[1] == "analysis":
        scan.unmark()
        out.begin_reasoning()
        found = yield from scan.until(_ENDS, out.reasoning)
        out.end_reasoning()
    else:
        is_call = recipient is not None
        if is_call:
            out.malformed(scan.since_mark())
        scan.unmark()
        found = yield from scan.until(_ENDS, out.malformed if is_call else out.content)
    scan.unmark()
    if found == "<|start|>":
        scan.back(len(found))
