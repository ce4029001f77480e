"""The server's port, and its certificate. Both are taken before anything slow is imported or started."""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
from pathlib import Path
from typing import NoReturn

from headway.server.edge.settings import EdgeSettings

BACKLOG = 2048
# Bytes that the kernel may hold unsent for one client; beyond it the stream's own buffer fills and is bounded.
UNSENT_BYTES = 128 * 1024
logger = logging.getLogger("headway.server")


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


class Watched:
    """Files that somebody may write at any time, maybe one after the other."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self.take()
        self._seen = self._taken

    def take(self) -> None:
        """Note that the files are taken as they are now."""
        self._taken = self._stamps()

    def have_changed(self) -> bool:
        """Whether they are not as they were taken, and all is as at the last call. It takes them then."""
        now = self._stamps()
        is_settled, self._seen = now == self._seen != self._taken, now
        if is_settled:
            self._taken = now
        return is_settled

    def _stamps(self) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for path in self._paths:
            try:
                of_file = path.stat()
                found.append((of_file.st_mtime_ns, of_file.st_size, of_file.st_ino))
            except OSError:
                found.append(())
        return found


class Certificate:
    """What makes HTTPS of connections: a certificate that is read again when its files are renewed.

    Attributes:
        context: the context of connections that are accepted from now on.

    Raises:
        StartupError: the files cannot be used.
    """

    def __init__(self, settings: EdgeSettings) -> None:
        self._certfile, self._keyfile = settings.ssl_certfile, settings.ssl_keyfile
        self._ca_certs, self._cert_reqs = settings.ssl_ca_certs, ssl.VerifyMode(settings.ssl_cert_reqs)
        if self._certfile is None:
            raise StartupError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
        if bool(self._cert_reqs) != (self._ca_certs is not None):
            raise StartupError("--ssl-ca-certs and an --ssl-cert-reqs of 1 or 2 need each other")
        self._files = [path for path in (self._certfile, self._keyfile, self._ca_certs) if path is not None]
        self._watched = Watched(*self._files)
        try:
            self.context = self._load()
        except ValueError as error:
            raise StartupError(str(error)) from None

    @classmethod
    def of(cls, settings: EdgeSettings) -> Certificate | None:
        """The certificate that the settings name, if any. Raises StartupError."""
        given = (settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)
        return cls(settings) if any(given) or settings.ssl_cert_reqs else None

    def refresh(self) -> None:
        """Take changed files if they are as at the last call: they may be written one after the other."""
        if self._watched.have_changed():
            self.reload()

    def reload(self) -> None:
        """Read the files again. Where they cannot be used, all stays as it is, and the log says so."""
        self._watched.take()
        try:
            self.context = self._load()
        except ValueError as error:
            logger.error("the certificate is unchanged: %s", error)
        else:
            logger.info("%s was read again; new connections get it", self._certfile)

    def _load(self) -> ssl.SSLContext:
        """A context with the certificate. Raises ValueError, one line."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        _readable(*self._files)
        assert self._certfile is not None
        try:
            context.load_cert_chain(self._certfile, self._keyfile, _no_passphrase)
        except ssl.SSLError as error:
            with_key = f" with {self._keyfile}" if self._keyfile else ""
            raise ValueError(f"{self._certfile}{with_key} cannot be used: {_reason(error)}") from None
        context.verify_mode = self._cert_reqs
        if self._ca_certs is not None:
            try:
                context.load_verify_locations(self._ca_certs)
            except ssl.SSLError as error:
                raise ValueError(f"{self._ca_certs} has no certificate of an authority: {_reason(error)}") from None
        return context


def _readable(*paths: Path) -> None:
    for path in paths:
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            if not path.is_file():
                raise ValueError(f"{path} is not a file")
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def _no_passphrase() -> NoReturn:
    raise ValueError("the key of the certificate has a passphrase; write it without one, readable by the server alone")


def _reason(error: ssl.SSLError) -> str:
    """What is wrong with a certificate, in plain words where the library has a code."""
    known = {"KEY_VALUES_MISMATCH": "the key belongs to another certificate", "NO_START_LINE": "it has no PEM block"}
    return known.get(error.reason or "", (error.reason or "it has no PEM block of this kind").replace("_", " ").lower())
