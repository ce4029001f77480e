"""HTTPS: certificates, their renewal, clients that speak no TLS or do not read."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from headway.server.edge.entrance import HANDSHAKES_PER_TURN, Entrance
from headway.server.edge.listening import Certificate, StartupError
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import MODEL, LiveServer, eventually, settings
from tests.server.test_connection import BODY, POST, Reader
from tests.server.test_entrance import standing_still
from tests.server.test_faults import LONG
from tests.server.test_slow_requests import read_until

StartServer = Callable[..., LiveServer]
FILES = Path(__file__).parent / "certificates"
AUTHORITY = FILES / "ca.pem"
HELLO = b"\x16\x03\x01\x02\x00"  # the beginning of one


def trusting(client: Path | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(AUTHORITY))
    if client is not None:
        context.load_cert_chain(client)
    return context


def connect(server: LiveServer, context: ssl.SSLContext | None = None) -> ssl.SSLSocket:
    plain = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    return (context or trusting()).wrap_socket(plain, server_hostname="localhost")


def name_of(server: LiveServer) -> str:
    """The common name of the server's certificate."""
    with connect(server) as connection:
        found = connection.getpeercert()
        assert found is not None
        ((_, name),) = found["subject"][0]  # type: ignore[misc]
        return str(name)


@pytest.fixture
def renewed_in_place(tmp_path: Path) -> Path:
    """A certificate with its key, to be overwritten."""
    return Path(shutil.copy(FILES / "server.pem", tmp_path / "served.pem"))


def test_https_is_served_to_openai_s_client(start_server: StartServer) -> None:
    server = start_server(ssl_certfile=FILES / "server.pem")
    with httpx.Client(verify=trusting()) as http:
        assert http.get(f"{server.url}/health").status_code == 200  # the first request of the connection
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http)
        whole = client.completions.create(model=MODEL, prompt="x", max_tokens=5)
        streamed = client.completions.create(model=MODEL, prompt="x", max_tokens=5, stream=True)
        assert "".join(part.choices[0].text for part in streamed) == whole.choices[0].text != ""
    with connect(server) as connection:
        assert connection.selected_alpn_protocol() is None and connection.version() == "TLSv1.3"
        connection.sendall(POST + b"Content-Length: -1\r\n\r\n")
        ((status, head, _),) = Reader().read(read_until(connection, b"}}"))
    assert (status, head["connection"]) == (400, "close")


def test_http_on_the_port_of_https_is_told_so(start_server: StartServer) -> None:
    server = start_server(ssl_certfile=FILES / "server.pem")
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        ((status, _, body),) = Reader().read(read_until(client, b""))
    assert status == 400 and b"this port speaks HTTPS" in body
    assert not server.engine.requests


def test_connections_that_say_nothing_are_closed(start_server: StartServer) -> None:
    server = start_server(ssl_certfile=FILES / "server.pem", request_read_timeout=0.2)
    for sent in (b"", b"\x16", b"\x16\x03\x01\x00\x10 no hello at all"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            client.sendall(sent)
            assert b"HTTP" not in read_until(client, b"")
    eventually(lambda: not server.service._background)
    assert name_of(server) == "server"


def test_a_crowd_of_handshakes_takes_turns_and_the_newest_need_not_wait_for_all(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, came = start_server(ssl_certfile=FILES / "server.pem"), list[int]()
    serve, let_in, turns = Entrance._serve, Entrance._let_in, list[int]()

    def noted(self: Entrance, connection: socket.socket, *others: Any) -> Any:
        came.append(connection.getpeername()[1])
        return serve(self, connection, *others)

    def counted(self: Entrance) -> None:
        before = len(self._waiting)
        let_in(self)
        turns.append(before - len(self._waiting))

    monkeypatch.setattr(Entrance, "_serve", noted)
    monkeypatch.setattr(Entrance, "_let_in", counted)
    with standing_still(server):
        clients = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(20)]
        for each in clients:
            each.sendall(HELLO)
    eventually(lambda: len(came) == 20)
    ports = [each.getsockname()[1] for each in clients]
    assert came[::2] == ports[:10] and came[1::2] == ports[:9:-1]
    assert max(turns) == HANDSHAKES_PER_TURN
    for each in clients:
        each.close()


@pytest.mark.parametrize("how", ["watching", "signal"])
def test_a_renewed_certificate_is_taken(start_server: StartServer, renewed_in_place: Path, how: str) -> None:
    server = start_server(ssl_certfile=renewed_in_place, enable_ssl_refresh=how == "watching")
    before = connect(server)
    assert name_of(server) == "server"
    renewed_in_place.write_text("half of a certificate")
    if how == "signal":
        server.call(server.server.reload)
    assert name_of(server) == "server"
    shutil.copy(FILES / "renewed.pem", renewed_in_place)
    if how == "signal":
        server.call(server.server.reload)
    eventually(lambda: name_of(server) == "renewed")
    before.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
    assert b"200 OK" in read_until(before, b"}]"), "connections that are there go on"
    before.close()


def test_files_that_are_being_written_are_waited_for(renewed_in_place: Path) -> None:
    certificate = Certificate(settings(ssl_certfile=renewed_in_place))
    first = certificate.context
    certificate.refresh()
    shutil.copy(FILES / "renewed.pem", renewed_in_place)
    certificate.refresh()
    assert certificate.context is first, "it has only just changed"
    certificate.refresh()
    taken = certificate.context
    assert taken is not first
    certificate.refresh()
    assert certificate.context is taken, "nothing has changed"


def test_clients_may_need_a_certificate_too(start_server: StartServer) -> None:
    server = start_server(ssl_certfile=FILES / "server.pem", ssl_ca_certs=AUTHORITY, ssl_cert_reqs=2)
    with connect(server, trusting(FILES / "client.pem")) as connection:
        connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        assert b"200 OK" in read_until(connection, b"}]")
    answer = b""
    with contextlib.suppress(OSError), connect(server) as connection:  # TLS 1.3 refuses after the handshake
        connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        answer = connection.recv(100)
    assert not answer


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_slow_reader_is_cut_off(start_server: StartServer, engine: FakeEngine, version: str) -> None:
    engine.max_model_len, engine.tokens_per_step, engine.step_s = 1_000_000, 20, 0.0005
    server = start_server(ssl_certfile=FILES / "server.pem", max_stream_buffer=50_000)
    body = json.dumps(LONG).encode()
    with connect(server) as client:
        client.sendall(f"POST /v1/completions HTTP/{version}\r\nHost: x\r\n".encode())
        client.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        eventually(lambda: len(engine.aborted) == 1)
        eventually(lambda: not server.server.server_state.connections)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssl_certfile": "nowhere.pem"}, "nowhere.pem cannot be read: No such file or directory"),
        ({"ssl_certfile": FILES}, "certificates is not a file"),
        ({"ssl_certfile": FILES / "README.md"}, "cannot be used"),
        ({"ssl_certfile": AUTHORITY}, "cannot be used"),  # it has no key
        (
            {"ssl_certfile": FILES / "server.pem", "ssl_keyfile": FILES / "renewed.pem"},
            "the key belongs to another certificate",
        ),
        ({"ssl_keyfile": FILES / "server.pem"}, "--ssl-keyfile and --ssl-ca-certs need --ssl-certfile"),
        ({"ssl_certfile": FILES / "server.pem", "ssl_cert_reqs": 1}, "need each other"),
        ({"ssl_certfile": FILES / "server.pem", "ssl_ca_certs": AUTHORITY}, "need each other"),
        (
            {"ssl_certfile": FILES / "server.pem", "ssl_ca_certs": FILES / "README.md", "ssl_cert_reqs": 2},
            "has no certificate of an authority",
        ),
    ],
)
def test_files_that_cannot_be_used_are_named(changes: dict[str, object], message: str) -> None:
    given = {name: Path(value) if isinstance(value, str) else value for name, value in changes.items()}
    with pytest.raises(StartupError) as error:
        Certificate.of(settings(**given))
    assert message in str(error.value) and "\n" not in str(error.value)
