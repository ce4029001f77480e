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
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headway import __version__
from headway.server.aside import LONGEST_S, Aside
from headway.server.ended import Ended

if TYPE_CHECKING:
    from opentelemetry.proto.common.v1.common_pb2 import KeyValue
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

PATH = "/v1/traces"
TIMEOUT_S = LONGEST_S


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
        super().__init__("traces")
        self._url = endpoint if re.search(r"\w/.", endpoint.partition("://")[2]) else endpoint.rstrip("/") + PATH
        self._share, self._headers = share, dict(headers or {})
        self._resource = {"service.name": "headway", "service.version": __version__} | _pairs(resource)
        self.sent = 0

    def is_kept(self, ended: Ended) -> bool:
        """Whether a request is sent: by the trace's id, so that all servers of a trace decide alike."""
        if ended.error or not all(ended.verdicts.values()):
            return True
        return ended.parent.sampled and int.from_bytes(ended.parent.trace_id[-7:]) < self._share * 2**56

    def handle(self, taken: list[Ended]) -> None:
        if kept := [each for each in taken if self.is_kept(each)]:
            self._post(kept)

    def _post(self, kept: list[Ended]) -> None:
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
            self.complain("%d spans could not be sent to %s: %s", len(scope.spans), self._url, error)


def _spans(ended: Ended, offset: int) -> Iterator[Span]:
    """The span of a choice, and below it one for each phase.

    Args:
        offset: what is added to time.monotonic_ns() for the time since 1970.
    """
    from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

    stamps, parent = ended.stamps, ended.parent
    began = at = stamps.arrived_ns + offset
    root = Span(
        trace_id=parent.trace_id,
        span_id=random.randbytes(8),
        parent_span_id=parent.span_id,
        name=f"{ended.operation} {ended.model}",
        kind=Span.SPAN_KIND_SERVER,
        start_time_unix_nano=began,
        attributes=_attributes(_described(ended)),
    )
    if ended.error:
        root.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message=ended.error))
    if stamps.first_token_ns:
        root.events.add(name="headway.first_token", time_unix_nano=stamps.first_token_ns + offset)
    phases = []
    for phase, length in ended.phases_ns.items():
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
    root.end_time_unix_nano = at if phases else max(began, ended.ended_ns + offset)
    yield root
    yield from phases


def _described(ended: Ended) -> dict[str, Any]:
    """The attributes of a choice's span. Those that are None are left out."""
    params, stamps, timings = ended.params, ended.stamps, ended.timings
    tpot_ns = stamps.tpot_ns(ended.tokens)
    verdicts = ended.verdicts
    return {
        "gen_ai.operation.name": ended.operation,
        "gen_ai.provider.name": "headway",
        "gen_ai.request.model": ended.model,
        "gen_ai.response.model": ended.model,
        "gen_ai.response.id": ended.name,
        "gen_ai.response.finish_reasons": [ended.reason],
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        "gen_ai.usage.input_tokens": ended.prompt_tokens,
        "gen_ai.usage.output_tokens": ended.tokens,
        "headway.choice.index": ended.index if params.n > 1 else None,
        "headway.usage.cached_tokens": ended.cached_tokens,
        "headway.service_class": ended.terms.service.name,
        "headway.tenant": ended.terms.tenant,
        "headway.ttft_ns": ended.ttft_ns,
        "headway.tpot_ns": None if tpot_ns is None else round(tpot_ns),
        "headway.ttft_met": verdicts.get("ttft"),
        "headway.tpot_met": verdicts.get("tpot"),
        "headway.e2e_met": verdicts.get("e2e"),
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
