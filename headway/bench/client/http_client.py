"""A pool of connections to one server.

Proxies are not used, redirects are not followed, and the number of open connections is not limited: a limit would
turn an open loop into a closed one.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import ssl
from typing import Any, Self

from headway.bench.client.connection import Connection, Inbox, Receiver
from headway.bench.client.failures import RequestFailed
from headway.load.endpoint import Address, Endpoint
from headway.load.record import FailureKind


class HttpClient:
    """Connections to one address, kept open and used again, the latest first.

    Args:
        connect_timeout_s: the longest time for looking up the name, connecting and the TLS handshake together.
        insecure: accept any certificate.

    Attributes:
        opened: connections made.
    """

    def __init__(self, address: Address, *, connect_timeout_s: float = 30.0, insecure: bool = False) -> None:
        self._address = address
        self._connect_timeout_s = connect_timeout_s
        self._loop = asyncio.get_running_loop()
        self._inbox = Inbox(self._loop)
        self._ssl = _ssl_context(insecure) if address.is_tls else None
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._hosts: list[str] | None = None
        self._looking_up: asyncio.Task[list[str]] | None = None
        self.opened = 0
        _allow_many_sockets()

    @classmethod
    def to(cls, endpoint: Endpoint) -> Self:
        """Make a client for the server of an endpoint. This needs a running event loop."""
        return cls(endpoint.address, connect_timeout_s=endpoint.connect_timeout_s, insecure=endpoint.insecure)

    def head(self, method: str, route: str, headers: dict[str, str]) -> bytes:
        """The request line and headers (lower-case names), to which exchange() adds content-length and the body."""
        own = {"host": self._address.host_header, "user-agent": "headway-bench", "accept-encoding": "identity"}
        lines = [f"{method} {self._address.prefix}{route} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in (own | headers).items()]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n"

    async def exchange(self, head: bytes, body: bytes, receiver: Receiver, timeout_s: float) -> None:
        """Send one request and wait for the end of its response. When cancelled, the connection is closed.

        Raises:
            RequestFailed: there was none, or not all of it came.
        """
        request = b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)
        deadline = self._loop.time() + timeout_s
        connection = self._take_idle()
        if connection is not None:
            try:
                return await self._send(connection, request, receiver, timeout_s, deadline)
            except RequestFailed as error:
                if connection.response_began or error.failure.kind is not FailureKind.CUT:
                    raise
                receiver.resent()  # on a new connection, as the server had closed this one meanwhile
        connection = await self._connect(deadline, timeout_s)
        receiver.connected(connection.connected_ns)
        await self._send(connection, request, receiver, timeout_s, deadline)

    def busy_sockets(self) -> list[int]:
        """File descriptors of connections with a request under way."""
        return [fileno for connection in self._busy if (fileno := connection.fileno()) >= 0]

    def close(self) -> None:
        """Close every connection; requests under way fail."""
        for connection in [*self._idle, *self._busy]:
            connection.close()
        self._idle.clear()
        if self._looking_up is not None:
            self._looking_up.cancel()

    # --- one request --------------------------------------------------------------------------------

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _send(
        self, connection: Connection, request: bytes, receiver: Receiver, timeout_s: float, deadline: float
    ) -> None:
        self._busy.add(connection)
        done = connection.send(request, receiver)
        late = f"no end of the response within {timeout_s:g} s"
        timer = self._loop.call_at(deadline, connection.fail, FailureKind.TIMEOUT, late)
        try:
            await done
        except BaseException:
            connection.close()
            if done.done() and not done.cancelled():
                done.exception()  # cancelled while it failed: looked at here, or asyncio complains
            raise
        finally:
            timer.cancel()
            self._busy.discard(connection)
            del done  # it holds its exception, which holds this frame, and no garbage is collected in a run
        if connection.is_open:
            self._idle.append(connection)
        else:
            connection.close()

    # --- connecting ---------------------------------------------------------------------------------

    async def _connect(self, deadline: float, timeout_s: float) -> Connection:
        connect_by = min(deadline, self._loop.time() + self._connect_timeout_s)
        try:
            async with asyncio.timeout_at(connect_by):
                hosts = await self._look_up()
                return await self._connect_to_one_of(hosts)
        except TimeoutError:
            if connect_by == deadline:
                message = f"no connection within the request's {timeout_s:g} s"
                raise RequestFailed(FailureKind.TIMEOUT, message) from None
            message = f"no connection to {self._address.host_header} within {self._connect_timeout_s:g} s"
            raise RequestFailed(FailureKind.CONNECT, message) from None

    async def _look_up(self) -> list[str]:
        """IP addresses of the host, asked for once: a look-up is a thread's work."""
        if self._hosts is None:
            if self._looking_up is None:
                self._looking_up = self._loop.create_task(self._ask_for_hosts())
            task = self._looking_up
            try:
                self._hosts = await asyncio.shield(task)
            except OSError as error:
                if self._looking_up is task:
                    self._looking_up = None
                message = f"the name {self._address.host} is not found ({error.strerror or error})"
                raise RequestFailed(FailureKind.CONNECT, message) from None
        return self._hosts

    async def _ask_for_hosts(self) -> list[str]:
        found = await self._loop.getaddrinfo(self._address.host, self._address.port, type=1)
        return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))

    async def _connect_to_one_of(self, hosts: list[str]) -> Connection:
        failure: RequestFailed | None = None
        for host in list(hosts):
            try:
                connection = await self._connect_to(host)
            except (OSError, ssl.SSLError) as error:
                failure = failure or self._failure_to_connect(error)
                continue
            if hosts[0] != host and host in hosts:  # the next ones go there at once
                hosts.remove(host)
                hosts.insert(0, host)
            return connection
        assert failure is not None
        try:
            raise failure
        finally:
            del failure  # the same

    async def _connect_to(self, host: str) -> Connection:
        tls: dict[str, Any] = {}
        if self._ssl is not None:
            tls = {"ssl": self._ssl, "server_hostname": self._address.host}
        _, connection = await self._loop.create_connection(self._make, host, self._address.port, **tls)
        self.opened += 1
        return connection

    def _make(self) -> Connection:
        return Connection(self._inbox)

    def _failure_to_connect(self, error: OSError) -> RequestFailed:
        where = self._address.host_header
        if isinstance(error, ssl.SSLCertVerificationError):
            reason = f"the certificate of {where} is not trusted: {error.verify_message or error}"
            return RequestFailed(FailureKind.TLS, reason)
        if isinstance(error, ssl.SSLError):
            return RequestFailed(FailureKind.TLS, f"no TLS with {where}: {error.reason or error}")
        if (
            self._ssl is not None
            and isinstance(error, ConnectionError)
            and not isinstance(error, ConnectionRefusedError)
        ):
            return RequestFailed(FailureKind.TLS, f"{where} ended the TLS handshake")
        reason = "connection refused" if isinstance(error, ConnectionRefusedError) else error.strerror or str(error)
        return RequestFailed(FailureKind.CONNECT, f"no connection to {where}: {reason}")


def _ssl_context(insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["http/1.1"])
    return context


def _allow_many_sockets() -> None:
    """Raise the limit on open files as far as this user may: each stream is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
