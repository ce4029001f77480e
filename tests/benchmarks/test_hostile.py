"""The campaign of hostile clients: its client, its verdicts, and a short form of it against a live server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.hostile.__main__ import main, summary, table
from benchmarks.hostile.campaign import Campaign, all_attacks
from benchmarks.hostile.client import Talk, converse
from benchmarks.hostile.messages import PLAIN, error_object, get
from benchmarks.hostile.victim import attacked

ATTACKS = all_attacks()
ERROR = b"HTTP/1.1 400 Bad Request\r\nx-request-id: 1\r\ncontent-length: %d\r\n\r\n%b"
BUSY_MS = 1500.0  # other tests run on the same cores


@contextmanager
def scripted(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port on which each connection is served by a function, one after another."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    serve(connection)

        threading.Thread(target=run, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def test_answers_are_counted_to_their_end() -> None:
    """Three on one connection, of which one is an error, behind a word that comes before an answer."""
    body = json.dumps({"error": {"message": "no"}}).encode()

    def serve(connection: socket.socket) -> None:
        connection.recv(65536)
        fine = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" + fine + ERROR % (len(body), body) + fine)
        connection.recv(1)  # kept open

    with scripted(serve) as port:
        (answer,) = converse(port, [Talk([b"x"], answers=3)], 20)
    assert answer.statuses == {200: 2, 400: 1} and answer.error_bytes == len(body)
    assert not answer.closed and answer.seconds is not None


def test_what_is_wrong_with_an_error_is_said() -> None:
    def said(message: bytes) -> str:
        def serve(connection: socket.socket) -> None:
            connection.recv(65536)
            connection.sendall(message)

        with scripted(serve) as port:
            return error_object(converse(port, [Talk([b"x"])], 20)[0])

    body = b'{"error": {"message": "no"}}'
    assert said(ERROR % (len(body), body)) == ""
    assert said(ERROR % (2, b"no")) == "no error object"
    assert said((ERROR % (len(body), body)).replace(b"x-request-id: 1\r\n", b"")) == "no x-request-id"
    assert said(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n") == ""


def test_a_client_that_leaves_and_one_that_is_not_answered() -> None:
    def serve(connection: socket.socket) -> None:
        if b"stream" in connection.recv(65536):
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + b"a" * 100_000)

    with scripted(serve) as port:
        left, closed = converse(port, [Talk([b"stream"], leaves_after=1000), Talk([b"other"])], 20, at_once=1)
    assert left.statuses == {200: 1} and left.total >= 1000
    assert closed.statuses == {} and closed.closed and closed.error_bytes == 0


def test_a_client_that_trickles_takes_its_time() -> None:
    times: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        while data := connection.recv(65536):
            times.append(data)

    with scripted(serve) as port:
        converse(port, [Talk([b"a", b"b", b"c"], every_s=0.05, half_closes=True)], 20)
    assert times == [b"a", b"b", b"c"]


def test_attacks_are_told_apart_and_bounded() -> None:
    names = [attack.name for attack in ATTACKS]
    assert len(names) == len(set(names)) > 120
    assert all(attack.expect and attack.seconds <= 25 for attack in ATTACKS)
    assert {attack.group for attack in ATTACKS} >= {
        "memory",
        "event loop",
        "headers",
        "protocol",
        "templates",
        "uploads",
    }


def test_the_table_has_what_was_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a campaign that has everything already attacks nothing."""
    row = {"name": "a", "group": "g", "statuses": {"400": 2}, "health_ms": 5.2, "gap_ms": 9.0, "growth_mb": 1.0}
    row |= {"answered_s": 0.5, "error_bytes": 100, "wrong": []}
    old = row | {"statuses": {}, "health_ms": 4100.0, "answered_s": None, "wrong": ["no answer"]}
    said = table({"rows": [row], "before": {"commit": "c", "rows": [old]}}).splitlines()
    assert said[2] == "| a | 2 400 | 5 | 9 | 1 | 0.50 s |  |"
    assert said[3] == "| ... before | none | 4100 | 9 | 1 | - | no answer |"
    assert said[-1] == "0 of 1 attacks do what they should not."
    said = summary({"rows": [row], "before": {"commit": "c", "rows": [old]}}).splitlines()
    assert said[2:] == ["| g | before | 1 of 1 | 4,100 | 9 | 1 | 100 |", "| g | now | 0 of 1 | 5 | 9 | 1 | 100 |"]
    (tmp_path / "known.json").write_text(json.dumps({"commit": "c", "rows": [row]}))
    main(["--go-on", "--seconds", "0", "--output", str(tmp_path / "known.json")])
    assert "0 of 1 attacks" in capsys.readouterr().out


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    running = Campaign(Path(__file__).parents[2], tmp_path_factory.mktemp("hostile"))
    yield running
    running.drop()


@pytest.mark.parametrize("attack", [each for each in ATTACKS if each.short and each.server == PLAIN], ids=str)
def test_the_server_holds(attack, campaign: Campaign) -> None:  # type: ignore[no-untyped-def]
    """The quick ones of `make bench-hostile`, with more patience for a machine on which other tests run."""
    row = attacked(campaign.victim(PLAIN), attack, BUSY_MS)
    assert row.wrong == []


def test_a_server_that_is_attacked_is_watched(campaign: Campaign) -> None:
    victim = campaign.victim(PLAIN)
    assert victim.normal.gap_ms > 0 and victim.normal.memory_mb > 50 and victim.normal.broken == 0
    assert victim.watch.engine() != victim.process.pid
    assert victim.ask(get("/health")).statuses == {200: 1}
