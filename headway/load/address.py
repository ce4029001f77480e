"""Parses and checks the base URL of a server."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from headway.load.errors import BenchError

DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Address:
    """The address to connect to, and the path to ask for.

    Args:
        host: as it is looked up; an IPv6 address without brackets.
        host_header: the value of the Host header.
        prefix: path in front of every route, "" or "/like/this"; without a final /v1.
    """

    scheme: str
    host: str
    port: int
    host_header: str
    prefix: str

    @property
    def is_tls(self) -> bool:
        return self.scheme == "https"


def parse_base_url(base_url: str) -> Address:
    """`http://host:8000`, with or without a path in front of the routes, with or without /v1 at its end.

    Raises:
        BenchError: it is no such URL.
    """

    def wrong(what: str) -> BenchError:
        return BenchError(f"--base-url is {base_url!r}: {what}; give it like http://127.0.0.1:8000")

    if not base_url.isascii() or any(character.isspace() for character in base_url):
        raise wrong("only ASCII without blanks is allowed")
    try:
        parts = urlsplit(base_url)
        port = parts.port
    except ValueError as error:
        raise wrong(str(error)) from None
    if parts.scheme not in DEFAULT_PORTS:
        raise wrong("it must begin with http:// or https://")
    if parts.username is not None or parts.password is not None:
        raise BenchError("--base-url has a user name or password in it; give the key with --api-key")
    if not parts.hostname:
        raise wrong("it has no host")
    if parts.query or parts.fragment:
        raise wrong("it must end before ? and #")
    if port == 0:
        raise wrong("port 0 cannot be connected to")
    return _address(parts, parts.hostname, port or DEFAULT_PORTS[parts.scheme])


def _address(parts: SplitResult, host: str, port: int) -> Address:
    shown = f"[{host}]" if ":" in host else host
    host_header = shown if port == DEFAULT_PORTS[parts.scheme] else f"{shown}:{port}"
    prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return Address(parts.scheme, host, port, host_header, prefix)
