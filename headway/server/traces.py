"""Traces of requests, sent to an OpenTelemetry collector when their ledgers are closed.

A request is a span, and the phases of its ledger are spans below it that tile it, in the order in which they first
came. They are built from the closed ledger in a thread, so that requests pay a microsecond for them and their times are
those of `timings` to the nanosecond. Names are those of OpenTelemetry's conventions for generative AI (semantic
conventions 1.37, gen_ai.*) where they have one, and begin with `headway.` where they have none.
"""

from __future__ import annotations

import logging
import os
import random
import re
import threading
import time
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway import __version__
from headway.engine.messages import SequenceTimings
from headway.policy.step.sampling_params import SamplingParams
from headway.server.classes import Terms
from headway.server.timings import ChoiceTimings, Stamps

if TYPE_CHECKING:
    from opentelemetry.proto.common.v1.common_pb2 import KeyValue
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

PATH = "/v1/traces"
# Requests that wait to be sent; further ones are dropped, and counted.
MOST_WAITING, MOST_AT_ONCE = 4096, 512
EVERY_S, TIMEOUT_S, COMPLAINS_EVERY_S = 1.0, 5.0, 60.0
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
logger = logging.getLogger("headway.server")


@dataclass(frozen=True, slots=True)
class TraceParent:
    """Where a request's span belongs (W3C Trace Context, level 1).

    Args:
        trace_id, span_id: 16 and 8 bytes; without a span, the trace begins here.
        sampled: whoever began the trace wants it to be kept.
    """

    trace_id: bytes
    span_id: bytes = b""
    sampled: bool = True


def parent_in(headers: Mapping[str, str]) -> TraceParent:
    """The parent in a request's headers; a new trace where there is none, or none that is valid."""
    found = _PARENT.fullmatch(headers.get("traceparent", ""))
    if found is not None and found[1] != "ff" and int(found[2], 16) and int(found[3], 16):
        return TraceParent(bytes.fromhex(found[2]), bytes.fromhex(found[3]), bool(int(found[4], 16) & 1))
    return TraceParent(random.randbytes(16))


@dataclass(frozen=True, slots=True)
class Traced:
    """One choice of a request that has ended.

    Args:
        timings: None where the engine's part is not known.
        error: why it failed; empty where it did not.
    """

    parent: TraceParent
    name: str
    operation: str
    model: str
    index: int
    reason: str
    stamps: Stamps
    timings: SequenceTimings | None
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    params: SamplingParams
    terms: Terms
    ended_ns: int
    error: str = ""


class Tracer:
    """Sends spans in a thread, which begins with the first of them.

    Args:
        endpoint: the collector's address; PATH is added unless it has a path.
        share: the share of requests that are kept, 0 to 1. Those that missed an objective or failed always are.
        headers: further headers of what is sent.
        resource: attributes of this server.

    Attributes:
        sent, dropped: how many spans were, since the start.
    """

    def __init__(
        self, endpoint: str, share: float = 1.0, headers: Mapping[str, str] | None = None, resource: str = ""
    ) -> None:
        self._url = endpoint if re.search(r"\w/.", endpoint.partition("://")[2]) else endpoint.rstrip("/") + PATH
        self._share, self._headers = share, dict(headers or {})
        self._resource = {"service.name": "headway", "service.version": __version__} | _pairs(resource)
        self._waiting: deque[Traced] = deque()
        self._wake, self._closed = threading.Event(), False
        self._thread: threading.Thread | None = None
        self._complained = -COMPLAINS_EVERY_S
        self.sent = self.dropped = 0

    def ended(self, traced: Traced) -> None:
        """A choice has ended. It is sent later."""
        if len(self._waiting) >= MOST_WAITING:
            self.dropped += 1
            return
        self._waiting.append(traced)
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_all, name="traces", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Send what waits, and end the thread."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(TIMEOUT_S + EVERY_S)

    def is_kept(self, traced: Traced) -> bool:
        """Whether a request is sent: by the trace's id, so that all servers of a trace decide alike."""
        verdicts = traced.terms.verdicts(traced.stamps.ttft_ns, traced.stamps.tpot_ns(traced.tokens))
        if traced.error or not all(verdicts.values()):
            return True
        return traced.parent.sampled and int.from_bytes(traced.parent.trace_id[-7:]) < self._share * 2**56

    def _send_all(self) -> None:
        while not self._closed or self._waiting:
            if not self._closed:
                self._wake.wait(EVERY_S)
            taken = [self._waiting.popleft() for _ in range(min(len(self._waiting), MOST_AT_ONCE))]
            kept = [each for each in taken if self.is_kept(each)]
            if kept:
                self._post(kept)

    def _post(self, kept: list[Traced]) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        request = ExportTraceServiceRequest()
        of_resource = request.resource_spans.add()
        of_resource.resource.attributes.extend(_attributes(self._resource))
        scope = of_resource.scope_spans.add()
        scope.scope.name, scope.scope.version = "headway", __version__
        offset = time.time_ns() - time.monotonic_ns()
        for each in kept:
            scope.spans.extend(_spans(each, offset))
        headers = {"content-type": "application/x-protobuf", **self._headers}
        posted = urllib.request.Request(self._url, request.SerializeToString(), headers)
        try:
            with urllib.request.urlopen(posted, timeout=TIMEOUT_S):
                self.sent += len(scope.spans)
        except (OSError, ValueError) as error:
            self.dropped += len(scope.spans)
            if time.monotonic() - self._complained >= COMPLAINS_EVERY_S:
                self._complained = time.monotonic()
                logger.warning("%d spans could not be sent to %s: %s", len(scope.spans), self._url, error)


def _spans(traced: Traced, offset: int) -> Iterator[Span]:
    """The span of a choice, and below it one for each phase.

    Args:
        offset: what is added to time.monotonic_ns() for the time since 1970.
    """
    from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

    stamps, parent = traced.stamps, traced.parent
    began = at = stamps.arrived_ns + offset
    root = Span(
        trace_id=parent.trace_id,
        span_id=random.randbytes(8),
        parent_span_id=parent.span_id,
        name=f"{traced.operation} {traced.model}",
        kind=Span.SPAN_KIND_SERVER,
        start_time_unix_nano=began,
        attributes=_attributes(_described(traced)),
    )
    if traced.error:
        root.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message=traced.error))
    if stamps.first_token_ns:
        root.events.add(name="headway.first_token", time_unix_nano=stamps.first_token_ns + offset)
    phases = []
    if traced.timings is not None:
        ledger = ChoiceTimings(stamps, traced.timings, traced.tokens, traced.terms).ledger
        for phase, length in ledger.phases_ns.items():
            phases.append(
                Span(
                    trace_id=parent.trace_id,
                    span_id=random.randbytes(8),
                    parent_span_id=root.span_id,
                    name=f"headway.{phase}",
                    kind=Span.SPAN_KIND_INTERNAL,
                    start_time_unix_nano=at,
                    end_time_unix_nano=at + length,
                )
            )
            at += length
    root.end_time_unix_nano = at if phases else max(began, traced.ended_ns + offset)
    yield root
    yield from phases


def _described(traced: Traced) -> dict[str, Any]:
    """The attributes of a choice's span. Those that are None are left out."""
    params, stamps, timings = traced.params, traced.stamps, traced.timings
    tpot_ns = stamps.tpot_ns(traced.tokens)
    verdicts = traced.terms.verdicts(stamps.ttft_ns, tpot_ns) if stamps.first_token_ns else {}
    return {
        "gen_ai.operation.name": traced.operation,
        "gen_ai.provider.name": "headway",
        "gen_ai.request.model": traced.model,
        "gen_ai.response.model": traced.model,
        "gen_ai.response.id": traced.name,
        "gen_ai.response.finish_reasons": [traced.reason],
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        "gen_ai.usage.input_tokens": traced.prompt_tokens,
        "gen_ai.usage.output_tokens": traced.tokens,
        "headway.choice.index": traced.index if params.n > 1 else None,
        "headway.usage.cached_tokens": traced.cached_tokens,
        "headway.service_class": traced.terms.service.name,
        "headway.tenant": traced.terms.tenant,
        "headway.ttft_ns": stamps.ttft_ns if stamps.first_token_ns else None,
        "headway.tpot_ns": None if tpot_ns is None else round(tpot_ns),
        "headway.ttft_met": verdicts.get("ttft"),
        "headway.tpot_met": verdicts.get("tpot"),
        "headway.steps": None if timings is None else timings.steps,
        "headway.preemptions": None if timings is None else timings.preemptions,
    }


def _attributes(values: Mapping[str, Any]) -> list[KeyValue]:
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue

    def value(given: Any) -> AnyValue:
        if isinstance(given, bool):
            return AnyValue(bool_value=given)
        if isinstance(given, int):
            return AnyValue(int_value=given)
        if isinstance(given, float):
            return AnyValue(double_value=given)
        if isinstance(given, list):
            return AnyValue(array_value=ArrayValue(values=[value(each) for each in given]))
        return AnyValue(string_value=str(given))

    return [KeyValue(key=key, value=value(given)) for key, given in values.items() if given is not None]


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
