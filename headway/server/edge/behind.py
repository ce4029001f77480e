"""Clients that do not take what was sent to them."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import struct
import termios
from collections.abc import Iterable
from typing import Protocol

# A client that has so many bytes to take is behind; fewer are on their way, also over a long one.
BEHIND = 8 * 2**10


class Sending(Protocol):
    """A connection."""

    transport: asyncio.Transport


def unread_bytes(connection: Sending) -> int:
    """Bytes of answers that were sent, and that the client's machine has yet to take (SIOCOUTQ, tcp(7))."""
    transport: asyncio.Transport | None = connection.transport
    if transport is None or transport.is_closing():
        return 0
    with contextlib.suppress(OSError):
        found = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return int(struct.unpack("i", found)[0]) + transport.get_write_buffer_size()
    return 0


def backlog(connections: Iterable[Sending]) -> tuple[int, int]:
    """How many clients are behind, and the bytes that these have yet to take."""
    behind = [unread for each in list(connections) if (unread := unread_bytes(each)) > BEHIND]
    return len(behind), sum(behind)
