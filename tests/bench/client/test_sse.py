"""The parser of server-sent events: any cut of any stream gives the same events."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.bench.client import sse
from headway.bench.client.sse import Event, EventParser, MalformedEvents

payloads = st.binary(min_size=1, max_size=12).map(lambda raw: raw.translate(None, b"\r\n")).filter(bool)
names = st.sampled_from([b"", b"error", b"message"])
events_st = st.lists(st.tuples(names, st.lists(payloads, min_size=1, max_size=3)), max_size=6)


def parse(pieces: list[bytes]) -> list[Event]:
    parser = EventParser()
    found = [event for piece in pieces for event in parser.feed(piece)]
    return found + parser.finish()


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    return [stream[a:b] for a, b in pairwise(edges)]


@given(events_st, st.sampled_from([b"\n", b"\r\n", b"\r"]), st.booleans(), st.booleans(), st.lists(st.integers(0, 999)))
def test_any_cut_of_any_stream_gives_the_events_that_were_written(
    events: list[tuple[bytes, list[bytes]]], newline: bytes, with_comments: bool, blank: bool, places: list[int]
) -> None:
    stream = b""
    for name, lines in events:
        if with_comments:
            stream += b": a comment" + newline + b"id: 7" + newline + newline
        if name:
            stream += b"event: " + name + newline
        colon = b"data: " if blank or lines[0].startswith(b" ") else b"data:"
        stream += b"".join((b"data: " if line.startswith(b" ") else colon) + line + newline for line in lines) + newline
    expected = [(name, b"\n".join(lines)) for name, lines in events]
    assert parse([stream]) == expected
    assert parse(cut(stream, places)) == expected
    assert parse([stream[i : i + 1] for i in range(len(stream))]) == expected


@given(st.text("d:\r\n a", max_size=40), st.lists(st.integers(0, 99)))
def test_cutting_never_changes_what_is_found_in_arbitrary_bytes(text: str, places: list[int]) -> None:
    def outcome(pieces: list[bytes]) -> list[Event] | str:
        try:
            return parse(pieces)
        except MalformedEvents:
            return "malformed"

    stream = text.replace("d", "data").encode()
    assert outcome(cut(stream, places)) == outcome([stream])


def test_an_event_is_found_with_its_last_byte_and_not_with_the_next_event() -> None:
    for newline in (b"\n", b"\r\n", b"\r"):
        parser = EventParser()
        assert parser.feed(b"data: a" + newline) == []
        # The carriage return of CRLF alone ends the line: the reader must not wait for the line feed.
        assert parser.feed(newline[:1]) == [(b"", b"a")]
        assert parser.feed(newline[1:]) == []
        assert parser.feed(b"data:b" + newline + newline) == [(b"", b"b")]


def test_an_event_without_data_is_none() -> None:
    assert parse([b"data\n\ndata:\n\ndata: \n\nevent: error\n\n: ping\n\nretry: 3\n\n\n\n"]) == []


def test_the_last_event_may_lack_its_empty_line() -> None:
    assert parse([b"data: a\n\ndata: [DONE]"]) == [(b"", b"a"), (b"", b"[DONE]")]
    assert parse([b"data: a\n\ndata: [DONE]\n"]) == [(b"", b"a"), (b"", b"[DONE]")]


def test_the_error_field_is_an_event_of_that_name() -> None:
    assert parse([b'error: {"message": "x"}\n\n']) == [(b"error", b'{"message": "x"}')]


def test_what_is_no_field_is_named() -> None:
    with pytest.raises(MalformedEvents, match=r"not server-sent events: '<html>'"):
        parse([b"<html>\n<body>\n\n"])


def test_an_event_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    parser = EventParser()
    parser.feed(b"data: " + b"x" * 90)
    with pytest.raises(MalformedEvents, match="more than 100 bytes"):
        parser.feed(b"x" * 90)


@given(st.integers(0, 13))
def test_a_byte_order_mark_is_no_part_of_the_first_line(place: int) -> None:
    assert parse(cut(b"\xef\xbb\xbfdata: 1\n\n", [place])) == [(b"", b"1")]


def test_a_long_event_in_small_pieces_takes_time_by_its_length() -> None:
    """A few milliseconds; by its square it would take minutes."""
    parser = EventParser()
    began = time.process_time()
    parser.feed(b"data: ")
    for _ in range(40_000):
        assert parser.feed(b"x" * 100) == []
    assert time.process_time() - began < 10
    assert len(parser.feed(b"\n\n")) == 1
