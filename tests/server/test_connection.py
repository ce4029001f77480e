"""What a connection takes and refuses: sizes, framing, versions, half-closed clients; see docs/faults.md."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable

import httptools
import pytest

from headway.server.edge import connection as limits
from headway.server.edge.connection import Connection
from headway.server.edge.http_head import MAX_HEAD
from headway.server.edge.pacing import Pace
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer, eventually
from tests.server.test_slow_requests import connect, read_until

StartServer = Callable[..., LiveServer]
BODY = b'{"prompt": "x"}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
GET = b"GET /version HTTP/1.1\r\nHost: x\r\n"
WHOLE = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
STREAM = json.dumps({"prompt": "x", "stream": True, "max_tokens": 20, "ignore_eos": True}).encode()


class Reader:
    """Parses the answers of a connection."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict[str, str], bytes]] = []
        self._headers: dict[str, str] = {}
        self._body = b""
        self._parser = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        self._headers, self._body = {}, b""

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self.answers.append((self._parser.get_status_code(), self._headers, self._body))

    def read(self, data: bytes) -> list[tuple[int, dict[str, str], bytes]]:
        self._parser.feed_data(data)
        return self.answers


def answers_to(server: LiveServer, data: bytes, ends: bool = False) -> list[tuple[int, dict[str, str], bytes]]:
    """All answers of one connection until the server closes it.

    Args:
        ends: the client closes its sending side behind `data`.
    """
    with connect(server) as client:
        client.sendall(data)
        if ends:
            client.shutdown(socket.SHUT_WR)
        return Reader().read(read_until(client, b""))


def refusal_of(server: LiveServer, data: bytes) -> tuple[int, str]:
    """Status and code of the error object that `data` is answered with, once, before the connection is closed."""
    ((status, headers, body),) = answers_to(server, data)
    assert headers["connection"] == "close" and headers["content-type"] == "application/json" and "date" in headers
    assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])
    error = json.loads(body)["error"]
    assert error["message"] and len(body) < 600
    return status, error["code"]


def is_still_served(server: LiveServer) -> bool:
    eventually(lambda: not server.service.in_flight)
    return server.post("/v1/completions", prompt="x").status_code == 200


# --- sizes ------------------------------------------------------------------------------------------------


def headers(count: int, size: int = 10) -> bytes:
    return b"".join(b"x-%d: %s\r\n" % (number, b"v" * size) for number in range(count))


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (GET + headers(100) + b"\r\n", 431, "headers_too_large"),
        (GET + headers(50, 1500), 431, "headers_too_large"),
        (GET + b"x: " + b"v" * 70_000, 431, "headers_too_large"),  # it never ends
        (GET + b"x" * 70_000, 431, "headers_too_large"),
        (b"GET /" + b"p" * 9_000, 414, "target_too_long"),
        (b"GET /version?" + b"p" * 9_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414, "target_too_long"),
        (POST + CHUNKED + b"1;" + b"e" * 100_000, 400, "malformed_request"),
        (POST + CHUNKED + b"1\r\nx\r\n" * 20_000, 400, "malformed_request"),
        (POST + CHUNKED + b"0\r\nx: " + b"t" * 100_000, 400, "malformed_request"),
        (POST + CHUNKED + b"0\r\n" + headers(101), 400, "malformed_request"),
    ],
)
def test_too_much_around_a_body(server: LiveServer, engine: FakeEngine, data: bytes, status: int, code: str) -> None:
    assert refusal_of(server, data) == (status, code)
    assert not engine.requests and is_still_served(server)


def test_what_is_within_the_limits_is_served(server: LiveServer) -> None:
    end = b"Connection: close\r\n\r\n"
    for data in (
        GET + headers(98) + end,
        GET + headers(40, 1500) + end,
        GET[:12] + b"?" + b"p" * 8_000 + GET[12:] + end,
    ):
        assert [status for status, _, _ in answers_to(server, data)] == [200]


def parsed_by(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes were parsed at a time, from now on."""
    sizes: list[int] = []
    parse = Connection._parse

    def noted(connection: Connection, data: bytes) -> None:
        sizes.append(len(data))
        parse(connection, data)

    monkeypatch.setattr(Connection, "_parse", noted)
    return sizes


def test_headers_are_refused_before_keys_and_before_memory_grows(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, sizes = start_server(api_keys=["sk"]), parsed_by(monkeypatch)
    with connect(server) as client:
        client.sendall(GET)
        for _ in range(64):  # what comes behind its answer the server reads and drops
            client.sendall(b"x: " + b"v" * 2**20)
        assert Reader().read(read_until(client, b"}}"))[0][0] == 431
    assert sum(sizes) <= MAX_HEAD + limits.SLICE


def test_bytes_that_take_long_to_parse_leave_turns_to_others(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body in tiny chunks takes a hundred times as long as one in one piece."""
    server, sizes, filled, fill = start_server(), parsed_by(monkeypatch), list[Pace](), Pace.fill

    def noted(pace: Pace) -> None:
        filled.append(pace)
        fill(pace)

    monkeypatch.setattr(Pace, "fill", noted)
    monkeypatch.setattr(limits, "SLICE_NS", 0)
    with connect(server) as client:
        client.sendall(POST + CHUNKED + b"8\r\n        \r\n" * 40_000 + b"f\r\n" + BODY + b"\r\n0\r\n\r\n")
        assert b"200 OK" in read_until(client, b"}]")
    assert max(sizes) == limits.SLICE and len(filled) == len(sizes)


# --- what is no request ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", 400, "malformed_request"),
        (b"\x00\x01\x02\r\n\r\n", 400, "malformed_request"),
        (GET.replace(b"\r\n", b"\n") + b"\n", 400, "malformed_request"),
        (GET + b"a: b\nc: d\r\n\r\n", 400, "malformed_request"),
        (GET + b"a: b\rc: d\r\n\r\n", 400, "malformed_request"),
        (GET + b"a: b\r\n folded\r\n\r\n", 400, "malformed_request"),
        (GET + b"a: b\x00c\r\n\r\n", 400, "malformed_request"),
        (GET + b"a\x00: b\r\n\r\n", 400, "malformed_request"),
        (GET + b"a : b\r\n\r\n", 400, "malformed_request"),
        (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", 400, "malformed_request"),
        (b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n", 400, "malformed_request"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "malformed_request"),
        (GET + b"Host: y\r\n\r\n", 400, "malformed_request"),
        (POST + b"Content-Length: 15\r\nTransfer-Encoding: chunked\r\n\r\n" + BODY, 400, "malformed_request"),
        (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 15\r\n\r\n" + BODY, 400, "malformed_request"),
        (POST + b"Content-Length: 15\r\nContent-Length: 15\r\n\r\n" + BODY, 400, "malformed_request"),
        (POST + b"Content-Length: 15, 15\r\n\r\n" + BODY, 400, "malformed_request"),
        (POST + b"Content-Length: -1\r\n\r\n" + BODY, 400, "malformed_request"),
        (POST + b"Content-Length: +15\r\n\r\n" + BODY, 400, "malformed_request"),
        (POST + b"Content-Length: 0x15\r\n\r\n" + BODY, 400, "malformed_request"),
        (POST + b"Content-Length: 1" + b"0" * 30 + b"\r\n\r\n" + BODY, 400, "malformed_request"),
        (POST + CHUNKED + b"-5\r\nhello\r\n", 400, "malformed_request"),
        (POST + CHUNKED + b"f" * 20 + b"\r\n", 400, "malformed_request"),
        (POST + CHUNKED + b"5\r\nhello world\r\n", 400, "malformed_request"),
        (POST.replace(b"1.1", b"1.0") + CHUNKED + b"0\r\n\r\n", 400, "malformed_request"),
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501, "unsupported_transfer_encoding"),
        (POST + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n", 501, "unsupported_transfer_encoding"),
        (POST + b"Transfer-Encoding: identity\r\n\r\n", 501, "unsupported_transfer_encoding"),
        (POST + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x8b", 415, "unsupported_content_encoding"),
        (POST + b"Expect: tea\r\n\r\n", 417, "expectation_failed"),
        (b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n", 501, "method_not_supported"),
        (b"get / HTTP/1.1\r\nHost: x\r\n\r\n", 501, "method_not_supported"),
        (b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n", 501, "method_not_supported"),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505, "http_version_not_supported"),
        (b"GET / HTTP/0.9\r\n\r\n", 505, "http_version_not_supported"),
        (b"GET / HTTP/1.2\r\nHost: x\r\n\r\n", 505, "http_version_not_supported"),
    ],
)
def test_what_is_no_request_gets_an_error_object(
    server: LiveServer, engine: FakeEngine, data: bytes, status: int, code: str
) -> None:
    assert refusal_of(server, data) == (status, code)
    assert not engine.requests and is_still_served(server)


def test_a_refusal_repeats_the_request_s_id_and_comes_after_earlier_answers(
    server: LiveServer, engine: FakeEngine
) -> None:
    engine.step_s = 0.01
    bad = GET + b"x-request-id: mine\r\nExpect: tea\r\n\r\n"
    stream = POST + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM
    answers = answers_to(server, stream + WHOLE + bad + GET + b"\r\n")
    assert [status for status, _, _ in answers] == [200, 200, 417], "nothing is served behind what is no request"
    assert answers[0][2].endswith(b"data: [DONE]\n\n")
    assert answers[2][1]["x-request-id"] == "mine"


def test_a_body_that_breaks_off_is_refused_and_its_request_forgotten(server: LiveServer, engine: FakeEngine) -> None:
    with connect(server) as client:
        client.sendall(POST + CHUNKED + b"5\r\nhello\r\n")
        eventually(lambda: bool(server.server.server_state.tasks))
        client.sendall(b"zz\r\n")
        ((status, _, _),) = Reader().read(read_until(client, b""))
    assert status == 400
    eventually(lambda: not server.server.server_state.tasks)


@pytest.mark.parametrize("target", [b"http://x/version", b"http://x:1/version?a=b", b"/version", b"/vers%69on#part"])
def test_targets_in_all_their_forms(server: LiveServer, target: bytes) -> None:
    ((status, _, _),) = answers_to(server, b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % target)
    assert status == 200


def test_pipelined_requests_are_answered_in_order(server: LiveServer) -> None:
    last = GET.replace(b"/version", b"/nowhere") + b"Connection: close\r\n\r\n"
    answers = answers_to(server, WHOLE + (GET + b"\r\n") * 50 + last)
    assert [status for status, _, _ in answers] == [200] * 51 + [404]
    assert b'"choices"' in answers[0][2]


def test_the_head_of_an_answer_and_its_body_are_one_write(server: LiveServer) -> None:
    with connect(server) as client:
        for _ in range(20):
            client.sendall(GET + b"\r\n")
            assert Reader().read(client.recv(65536))[0][0] == 200
        client.sendall(GET.replace(b"GET", b"HEAD") + b"\r\n")  # which has nothing that its head could go with
        assert client.recv(65536).endswith(b"\r\n\r\n")


def test_no_more_pipelined_requests_wait_than_may(server: LiveServer, engine: FakeEngine) -> None:
    engine.open = False
    with connect(server) as client:
        client.sendall(WHOLE + (GET + b"\r\n") * 500)
        eventually(lambda: bool(engine.requests))
        engine.open = True
        answers = Reader().read(read_until(client, b""))
    statuses = [status for status, _, _ in answers]
    assert statuses == [200] * (1 + limits.MAX_PIPELINED) + [429]


@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_an_upgrade_that_is_offered_is_passed_over(server: LiveServer, framing: str) -> None:
    """Java's client offers HTTP/2 with its first request. The bytes of the body are no request of their own."""
    offer = (
        POST + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
    )
    body = b'{"prompt": "x", "user": "GET /metrics HTTP/1.1"}'
    if framing == "length":
        data = offer + b"Content-Length: %d\r\n\r\n" % len(body) + body
    else:
        data = offer + CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    websocket = GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    with connect(server) as client:
        for byte in data:
            client.sendall(bytes([byte]))
        client.sendall(websocket + data + GET + b"Connection: close\r\n\r\n")
        answers = Reader().read(read_until(client, b""))
    assert [status for status, _, _ in answers] == [200, 200, 200, 200]
    assert [b"choices" in body for _, _, body in answers] == [True, False, True, False]


def test_a_body_that_is_held_back(start_server: StartServer) -> None:
    server = start_server(api_keys=["sk"], max_body_size=100)
    expect = b"Expect: 100-continue\r\nContent-Length: %d\r\n"
    with connect(server) as client:
        client.sendall(POST + b"Authorization: Bearer sk\r\n" + expect % len(BODY) + b"\r\n")
        assert read_until(client, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(BODY)
        assert b"200 OK" in read_until(client, b"}]")
    # Who is refused instead is not to be waited for: whether the body still comes nobody knows.
    for data in (expect % len(BODY), b"Authorization: Bearer sk\r\n" + expect % 101):
        ((status, head, _),) = answers_to(server, POST + data + b"\r\n")
        assert status in (401, 413) and head["connection"] == "close"


def test_a_body_that_is_too_large_closes_the_connection_and_its_answer_is_heard(start_server: StartServer) -> None:
    server = start_server(max_body_size=100)
    with connect(server) as client:
        client.sendall(POST + b"Content-Length: 50000000\r\n\r\n")
        for _ in range(50):
            client.sendall(b" " * 10**6)
        ((status, head, _),) = Reader().read(read_until(client, b""))
    assert (status, head["connection"]) == (413, "close")
    eventually(lambda: not server.server.server_state.connections)


# --- HTTP/1.0 and clients that send no more ----------------------------------------------------------------


@pytest.mark.parametrize("body", [BODY, STREAM])
def test_http_1_0_gets_no_chunks(server: LiveServer, body: bytes) -> None:
    with connect(server) as client:
        client.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        head, _, answer = read_until(client, b"").partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head
    if body is STREAM:
        assert answer.startswith(b"data: {") and answer.endswith(b"}\n\ndata: [DONE]\n\n")
    else:
        assert json.loads(answer)["choices"]


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("body", [BODY, STREAM])
def test_a_client_that_closes_its_sending_side_gets_its_answer(
    server: LiveServer, engine: FakeEngine, version: bytes, body: bytes
) -> None:
    engine.open, engine.step_s = False, 0.01
    with connect(server) as client:
        client.sendall(POST.replace(b"1.1", version) + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        client.shutdown(socket.SHUT_WR)
        time.sleep(0.3)  # in which it is asked whether it is still there
        assert len(engine.running) == 1
        engine.open = True
        received = read_until(client, b"")
    asked = received.count(b"HTTP/1.1 102 Processing\r\n\r\n")
    assert asked == (version == b"1.1") * asked and (asked or version == b"1.0")
    received = received.replace(b"HTTP/1.1 102 Processing\r\n\r\n", b"")
    assert received.startswith(b"HTTP/1.1 200 OK") and received.count(b"HTTP/1.1") == 1
    assert b"data: [DONE]" in received if body is STREAM else b'"choices"' in received
    assert not engine.aborted


def test_pipelined_requests_before_the_end_are_answered(server: LiveServer) -> None:
    answers = answers_to(server, WHOLE + GET + b"\r\n" + WHOLE, ends=True)
    assert [status for status, _, _ in answers if status != 102] == [200, 200, 200]  # 102 where the machine is busy
    assert answers_to(server, GET + b"\r\n", ends=True)[0][0] == 200


def test_half_a_request_is_refused_when_the_client_sends_no_more(server: LiveServer) -> None:
    for data in (GET, WHOLE[:-1], POST + CHUNKED + b"5\r\nhel"):
        ((status, _, body),) = answers_to(server, data, ends=True)
        assert status == 400 and b"ended before the request was complete" in body
    with connect(server) as client:
        client.shutdown(socket.SHUT_WR)
        assert read_until(client, b"") == b""


def test_a_client_of_http_1_0_that_cannot_be_asked_is_waited_for_for_a_while(
    server: LiveServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "UNASKED_S", 0.15)
    engine.open = False
    with connect(server) as client:
        client.sendall(WHOLE.replace(b"1.1", b"1.0"))
        client.shutdown(socket.SHUT_WR)
        eventually(lambda: len(engine.aborted) == 1)


def test_a_refused_head_has_no_body(server: LiveServer) -> None:
    with connect(server) as client:
        client.sendall(b"HEAD /version HTTP/1.1\r\nHost: x\r\nExpect: tea\r\n\r\n")
        received = read_until(client, b"")
    assert received.startswith(b"HTTP/1.1 417") and received.endswith(b"\r\n\r\n")
