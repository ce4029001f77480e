"""The command that starts a server, with names in braces where the values of settings belong."""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Collection, Mapping

_NAME = re.compile(r"\{(\w*)\}")


def placeholders(start: str) -> frozenset[str]:
    """The names in braces of a start command."""
    return frozenset(_NAME.findall(start))


def check_placeholders(start: str, settings: Collection[str]) -> None:
    """Raise ValueError where it is no command, has another name than `port` and these, or no port; one line."""
    try:
        shlex.split(start)
    except ValueError as error:
        raise ValueError(f"--start {start!r} cannot be split into words: {error}") from None
    if unknown := placeholders(start) - {"port", *settings}:
        wanted = ", ".join(f"{{{name}}}" for name in settings)
        raise ValueError(
            f"--start has {{{min(unknown)}}}, which is no setting; it may have {{port}}{', ' * bool(wanted)}{wanted}"
        )
    if "port" not in placeholders(start):
        raise ValueError("--start has no {port}; write it where the command takes the port")


def words(start: str, values: Mapping[str, str]) -> list[str]:
    """The words of a start command with these values. A name that is a word of its own may become several, or none."""
    found: list[str] = []
    for word in shlex.split(start):
        alone = _NAME.fullmatch(word)
        found += shlex.split(values[alone[1]]) if alone else [_NAME.sub(lambda name: values[name[1]], word)]
    return found


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port
