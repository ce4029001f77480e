"""Traces of requests, sent to an OpenTelemetry collector when their ledgers are closed.

A request is a span, and the phases of its ledger are spans below it that tile it, in the order in which they first
came. They are built from the closed ledger in a thread, so that requests pay a microsecond for them and their times are
those of `timings` to the nanosecond. Names are those of OpenTelemetry's conventions for generative AI (semantic
conventions 1.37, gen_ai.*) where they have one, and begin with `headway.` where they have none.
"""

from __future__ import annotations

import os
import random
import re
import struct
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from typing import Any

from headway import __version__
from headway.server.aside import LONGEST_S, Aside
from headway.server.ended import Ended

PATH = "/v1/traces"
TIMEOUT_S = LONGEST_S
EVERY_S = 5.0
# A span's id, its beginning and its end, with the tags of the latter two.
_TIMES = struct.Struct("<QcQcQ").pack


class Tracer(Aside):
    """Sends spans in a thread, which begins with the first of them.

    Args:
        endpoint: the collector's address; PATH is added unless it has a path.
        share: the share of requests that are kept, 0 to 1. Those that missed an objective or failed always are.
        headers: further headers of what is sent.
        resource: attributes of this server.

    Attributes:
        sent: how many spans were, since the start.
    """

    def __init__(
        self, endpoint: str, share: float = 1.0, headers: Mapping[str, str] | None = None, resource: str = ""
    ) -> None:
        super().__init__("traces", EVERY_S)
        self._url = endpoint if re.search(r"\w/.", endpoint.partition("://")[2]) else endpoint.rstrip("/") + PATH
        self._share, self._headers = share, dict(headers or {})
        about = {"service.name": "headway", "service.version": __version__} | _pairs(resource)
        self._resource = _field(0x0A, b"".join(_attribute(key, value, 0x0A) for key, value in about.items()))
        self.sent = 0

    def is_kept(self, ended: Ended) -> bool:
        """Whether a request is sent: by the trace's id, so that all servers of a trace decide alike."""
        if ended.parent.sampled and int.from_bytes(ended.parent.trace_id[-7:]) < self._share * 2**56:
            return True
        return bool(ended.error) or not all(ended.verdicts.values())

    def ended(self, ended: Ended) -> None:
        if self.is_kept(ended):
            super().ended(ended)

    def handle(self, taken: list[Ended]) -> None:
        offset = time.time_ns() - time.monotonic_ns()
        spans = [span for each in taken for span in _spans(each, offset)]
        body = _field(0x0A, self._resource + _field(0x12, _SCOPE + b"".join(spans)))
        posted = urllib.request.Request(self._url, body, {"content-type": "application/x-protobuf", **self._headers})
        try:
            with urllib.request.urlopen(posted, timeout=TIMEOUT_S):
                self.sent += len(spans)
        except (OSError, ValueError) as error:
            self.dropped += len(spans)
            self.complain("%d spans could not be sent to %s: %s", len(spans), self._url, error)


def _spans(ended: Ended, offset: int) -> list[bytes]:
    """The span of a choice, and below it one for each phase, as fields of ScopeSpans.

    Args:
        offset: what is added to time.monotonic_ns() for the time since 1970.
    """
    stamps, parent = ended.stamps, ended.parent
    began = at = stamps.arrived_ns + offset
    trace = b"\x0a\x10" + parent.trace_id
    span_id = 1 + random.getrandbits(63)  # those of phases count on from it
    below = trace + b"\x22\x08" + span_id.to_bytes(8, "little") + b"\x12\x08"
    phases = []
    for number, (phase, length) in enumerate(ended.phases_ns.items(), span_id + 1):
        phases.append(_phase(phase) + below + _TIMES(number, b"\x39", at, b"\x41", at + length))
        at += length
    if not phases:
        at = max(began, ended.ended_ns + offset)
    own = [trace, b"\x12\x08", _TIMES(span_id, b"\x39", began, b"\x41", at), *_described(ended)]
    if parent.span_id:
        own.append(_field(0x22, parent.span_id))
    if stamps.first_token_ns:
        own += _EVENT, (stamps.first_token_ns + offset).to_bytes(8, "little"), _EVENT_NAME
    return [_field(0x12, b"".join(own)), *phases]


@cache
def _phase(phase: str) -> bytes:
    """What spans of a phase begin with: tag and length, name, and kind INTERNAL. IDs and times have 56 bytes."""
    named = _field(0x2A, f"headway.{phase}") + b"\x30\x01"
    return b"\x12" + _varint(len(named) + 56) + named


def _described(ended: Ended) -> Iterator[bytes]:
    """What the span of a choice says beside its times. What many choices have in common is encoded once."""
    params, terms, timings = ended.params, ended.terms, ended.timings
    yield _common(
        (ended.operation, ended.model, ended.reason, ended.error, terms.service.name, terms.tenant),
        (params.max_tokens, params.temperature, params.top_p),
        (params.n, ended.index),
        *ended.verdicts.items(),
    )
    yield _number("gen_ai.usage.input_tokens", ended.prompt_tokens)
    yield _number("gen_ai.usage.output_tokens", ended.tokens)
    yield _number("headway.usage.cached_tokens", ended.cached_tokens)
    if timings is not None:
        yield _number("headway.steps", timings.steps)
        yield _number("headway.preemptions", timings.preemptions)
    yield _attribute("gen_ai.response.id", ended.name)
    if ended.ttft_ns is not None:
        yield _duration("headway.ttft_ns", ended.ttft_ns)
    if (tpot_ns := ended.stamps.tpot_ns(ended.tokens)) is not None:
        yield _duration("headway.tpot_ns", round(tpot_ns))


@lru_cache(1024)
def _common(
    names: tuple[str, ...], asked: tuple[float | None, ...], of_choices: tuple[int, int], *verdicts: tuple[str, bool]
) -> bytes:
    """Name, kind SERVER, status, and those attributes of a choice that many have alike."""
    operation, model, reason, error, service_class, tenant = names
    max_tokens, temperature, top_p = asked
    choices, index = of_choices
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "headway",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": (reason,),
        "gen_ai.request.max_tokens": max_tokens,
        "gen_ai.request.temperature": temperature,
        "gen_ai.request.top_p": top_p,
        "headway.service_class": service_class,
        "headway.tenant": tenant,
        **{f"headway.{objective}_met": met for objective, met in verdicts},
    }
    if choices > 1:
        attributes |= {"gen_ai.request.choice.count": choices, "headway.choice.index": index}
    status = _field(0x7A, _field(0x12, error) + b"\x18\x02") if error else b""
    encoded = (_attribute(key, value) for key, value in attributes.items() if value is not None)
    return _field(0x2A, f"{operation} {model}") + b"\x30\x02" + status + b"".join(encoded)


def _duration(key: str, value: int) -> bytes:
    """An attribute whose value hardly comes twice."""
    encoded = _varint(value)
    return _before(key, len(encoded)) + encoded


@cache
def _before(key: str, size: int) -> bytes:
    """What an attribute has before the `size` bytes of its number."""
    key_and_tag = _field(0x0A, key) + bytes((0x12, 1 + size, 0x18))
    return bytes((0x4A, len(key_and_tag) + size)) + key_and_tag


def _attribute(key: str, value: Any, tag: int = 0x4A) -> bytes:
    """An attribute of a span, or with tag 0x0A of a resource."""
    return _field(tag, _field(0x0A, key) + _field(0x12, _value(value)))


_number = lru_cache(4096)(_attribute)


def _value(value: Any) -> bytes:
    match value:
        case str():
            return _field(0x0A, value)
        case bool():
            return b"\x10" + _varint(value)
        case int():
            return b"\x18" + _varint(value)
        case float():
            return b"\x21" + struct.pack("<d", value)
    return _field(0x2A, b"".join(_field(0x0A, _value(each)) for each in value))


def _field(tag: int, content: bytes | str) -> bytes:
    """A field of protobuf that has a length: a text, bytes or a message. Its tag is 8 * the field's number + 2."""
    if isinstance(content, str):
        content = content.encode(errors="replace")
    size = len(content)
    return (bytes((tag, size)) if size < 128 else bytes((tag, *_varint(size)))) + content


def _varint(value: int) -> bytes:
    """A number as protobuf has it: 7 bits a byte, the lowest first; below 0, the 64 bits of its complement."""
    value, found = value % 2**64, bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


# The event of the first token, around its time.
_EVENT_NAME = _field(0x12, "headway.first_token")
_EVENT = bytes((0x5A, 9 + len(_EVENT_NAME), 0x09))
_SCOPE = _field(0x0A, _field(0x0A, "headway") + _field(0x12, __version__))


def _pairs(text: str) -> dict[str, str]:
    """The pairs of "a=b,c=d", as OpenTelemetry's environment variables have them."""
    pairs = (each.partition("=") for each in text.split(",") if "=" in each)
    return {urllib.parse.unquote(key.strip()): urllib.parse.unquote(value.strip()) for key, _, value in pairs}


def tracer_of(endpoint: str | None, share: float) -> Tracer | None:
    """The tracer for an endpoint, with what OpenTelemetry's environment variables say; None without an endpoint."""
    env = os.environ
    if endpoint is None or env.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    headers = _pairs(env.get("OTEL_EXPORTER_OTLP_TRACES_HEADERS") or env.get("OTEL_EXPORTER_OTLP_HEADERS", ""))
    resource = env.get("OTEL_RESOURCE_ATTRIBUTES", "")
    if name := env.get("OTEL_SERVICE_NAME"):
        resource = f"{resource},service.name={name}"
    return Tracer(endpoint, share, headers, resource)
