"""The server's port. It is taken before anything slow is imported or started."""

from __future__ import annotations

import errno
import socket

BACKLOG = 2048
# Bytes that the kernel may hold unsent for one client; beyond it the stream's own buffer fills and is bounded.
UNSENT_BYTES = 128 * 1024


class StartupError(Exception):
    """The server can't serve; the message is one line for the user."""


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address.

    Raises:
        StartupError: the port is in use, or the address can't be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartupError(f"cannot listen on {host}:{port}: {error}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        bound.bind(address)
        # Two listeners may bind the same port with SO_REUSEADDR, but only one may listen.
        bound.listen(BACKLOG)
        return bound
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise StartupError(f"port {port} on {host} is in use; choose another with --port") from None
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror}") from None
