"""Messages on the stream of bytes between two processes: each is its length in eight bytes, then itself."""

from __future__ import annotations

import struct

_LENGTH = struct.Struct("<Q")


def framed(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message


class Frames:
    """Cuts the bytes that come into messages."""

    def __init__(self) -> None:
        self._begun = bytearray()  # bytes that are not yet returned

    def take(self, data: bytes) -> list[bytearray]:
        """The messages that are complete with these bytes."""
        begun, at = self._begun, 0
        messages: list[bytearray] = []
        begun += data
        while len(begun) >= (start := at + _LENGTH.size):
            end = start + _LENGTH.unpack_from(begun, at)[0]
            if len(begun) < end:
                break
            messages.append(begun[start:end])
            at = end
        del begun[:at]
        return messages
