"""Traces as a collector receives them, from a live server."""

from __future__ import annotations

import http.server
import logging
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from headway.engine.messages import SequenceTimings
from headway.policy.objectives.service_class import ServiceClass
from headway.policy.step.sampling_params import SamplingParams
from headway.server import traces
from headway.server.aside import MOST_AT_ONCE, MOST_WAITING
from headway.server.classes import Terms
from headway.server.ended import Ended, TraceParent, parent_in
from headway.server.timings import Stamps
from headway.server.traces import Tracer, tracer_of
from tests.server.conftest import StartServer
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import MODEL, LiveServer, eventually

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
# Names of the conventions (semantic-conventions, gen-ai and resource) that a trace may have.
CONVENTIONS = {
    *("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "gen_ai.response.model"),
    *("gen_ai.response.id", "gen_ai.response.finish_reasons", "gen_ai.request.max_tokens"),
    *("gen_ai.request.temperature", "gen_ai.request.top_p", "gen_ai.request.choice.count"),
    *("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens", "service.name", "service.version"),
}


class Collector:
    """A receiver of OTLP over HTTP."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
                collector.requests.append(request)
                collector.paths.append(self.path)
                collector.headers.append({name.lower(): value for name, value in self.headers.items()})
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in list(self.requests)
            for of_resource in request.resource_spans
            for scope in of_resource.scope_spans
            for span in scope.spans
        ]

    def roots(self) -> list[Span]:
        return [span for span in self.spans if span.kind == Span.SPAN_KIND_SERVER]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "EVERY_S", 0.05)


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def values(span: Any) -> dict[str, Any]:
    """The attributes of a span, or of a resource."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def traced_server(start_server: StartServer, collector: Collector, **settings: Any) -> LiveServer:
    return start_server(otlp_endpoint=collector.url, **settings)


def test_phases_tile_the_request_and_are_those_of_its_timings(start_server: StartServer, collector: Collector) -> None:
    server = traced_server(start_server, collector)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0.5}
    answer = server.post("/v1/chat/completions", **body, max_tokens=5, include_timings=True).json()
    eventually(lambda: collector.roots())
    (root,), spans = collector.roots(), collector.spans
    phases = [span for span in spans if span.parent_span_id == root.span_id]
    assert len(phases) == len(spans) - 1 > 3
    at = root.start_time_unix_nano
    for phase in phases:
        assert (phase.trace_id, phase.start_time_unix_nano) == (root.trace_id, at)
        at = phase.end_time_unix_nano
    assert at == root.end_time_unix_nano
    told = {f"headway.{name}": length for name, length in answer["timings"]["phases_ns"].items() if name != "send"}
    assert {each.name: each.end_time_unix_nano - each.start_time_unix_nano for each in phases} == told
    found = values(root)
    assert root.name == f"chat {MODEL}" and not root.parent_span_id
    assert found["gen_ai.usage.output_tokens"] == 5 and found["gen_ai.request.temperature"] == 0.5
    assert [each.string_value for each in found["gen_ai.response.finish_reasons"].values] == ["length"]
    assert answer["id"].endswith(found["gen_ai.response.id"])
    assert found["headway.ttft_ns"] == answer["timings"]["ttft_ns"]
    assert [event.name for event in root.events] == ["headway.first_token"]


def test_every_name_is_of_the_conventions_or_our_own(start_server: StartServer, collector: Collector) -> None:
    server = traced_server(start_server, collector)
    server.post("/v1/completions", model=MODEL, prompt=["a", "b"], n=2, max_tokens=2)
    eventually(lambda: len(collector.roots()) == 4)
    resources = [each.resource for request in collector.requests for each in request.resource_spans]
    names = {name for each in [*collector.roots(), *resources] for name in values(each)}
    assert {name for name in names if not name.startswith("headway.")} <= CONVENTIONS
    assert all(span.name.startswith(("headway.", "text_completion ")) for span in collector.spans)
    assert len({values(root)["headway.choice.index"] for root in collector.roots()}) == 4


def test_a_trace_goes_on_that_a_client_began(start_server: StartServer, collector: Collector) -> None:
    server = traced_server(start_server, collector)
    body = {"model": MODEL, "prompt": "a", "max_tokens": 2}
    httpx.post(f"{server.url}/v1/completions", json=body, headers={"traceparent": PARENT})
    eventually(lambda: collector.roots())
    (root,) = collector.roots()
    assert root.trace_id.hex() in PARENT and root.parent_span_id.hex() == "b7ad6b7169203331"


@pytest.mark.parametrize(
    "header",
    ["", "nonsense", PARENT[:-3], PARENT.upper(), "ff" + PARENT[2:], f"00-{'0' * 32}-b7ad6b7169203331-01", "0" * 55],
)
def test_a_context_that_is_none_begins_a_new_trace(header: str) -> None:
    parent = parent_in({"traceparent": header})
    assert len(parent.trace_id) == 16 and parent.span_id == b"" and parent.sampled
    assert parent_in({"traceparent": header}).trace_id != parent.trace_id


def test_later_versions_of_the_context_are_read() -> None:
    parent = parent_in({"traceparent": "01" + PARENT[2:-2] + "00-further"})
    assert parent.span_id.hex() == "b7ad6b7169203331" and not parent.sampled


def traced(**changes: Any) -> Ended:
    stamps = Stamps(arrived_ns=1_000, first_token_ns=2_000_000, last_token_ns=3_000_000)
    given: dict[str, Any] = {
        "parent": TraceParent(b"\xff" * 16),
        "name": "n",
        "operation": "chat",
        "model": MODEL,
        "index": 0,
        "reason": "stop",
        "stamps": stamps,
        "timings": None,
        "phases_ns": {},
        "prompt_tokens": 3,
        "cached_tokens": 0,
        "tokens": 2,
        "params": SamplingParams(),
        "terms": Terms(),
        "ended_ns": 4_000_000,
    }
    return Ended(**given | changes)


def test_misses_and_failures_are_kept_whatever_the_share_and_decisions_follow_the_trace() -> None:
    none, half = Tracer("http://x", share=0.0), Tracer("http://x", share=0.5)
    assert not none.is_kept(traced())
    assert none.is_kept(traced(error="error"))
    service = ServiceClass(name="chat", ttft_ms=1.0)
    assert none.is_kept(traced(terms=Terms(service, ttft_ms=1.0)))
    assert not none.is_kept(traced(terms=Terms(service, ttft_ms=100.0)))
    ids = [bytes([9] * 9) + number.to_bytes(7) for number in range(0, 2**56, 2**56 // 1000)]
    kept = [half.is_kept(traced(parent=TraceParent(each))) for each in ids]
    assert abs(sum(kept) - 500) <= 1
    assert not half.is_kept(traced(parent=TraceParent(b"\0" * 16, sampled=False)))


def test_spans_are_those_that_the_official_package_makes(collector: Collector) -> None:
    phases, name = {"receive": 5, "decode_compute": 2**40}, "é" * 100
    params = SamplingParams(n=2, max_tokens=300, temperature=0.7)
    ended = traced(
        model=name,
        name=name,
        timings=SequenceTimings(phases, 0, 129, 0),
        phases_ns=phases,
        params=params,
        parent=TraceParent(b"p" * 16, b"s" * 8),
        reason="late",
        error="late",
        index=1,
        cached_tokens=-1,  # no number may end the thread
        terms=Terms(ServiceClass(name="chat", ttft_ms=1.0), ttft_ms=1.0),
    )
    tracer = Tracer(collector.url)
    tracer.ended(ended)
    tracer.close()
    root, first, second = collector.spans
    began = root.start_time_unix_nano
    expected = Span(
        trace_id=b"p" * 16,
        span_id=root.span_id,
        parent_span_id=b"s" * 8,
        name=f"chat {name}",
        kind=Span.SPAN_KIND_SERVER,
        start_time_unix_nano=began,
        end_time_unix_nano=began + 5 + 2**40,
        events=[Span.Event(name="headway.first_token", time_unix_nano=began + 1_999_000)],
        status=Status(code=Status.STATUS_CODE_ERROR, message="late"),
    )
    texts = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "headway", "headway.service_class": "chat"}
    texts |= dict.fromkeys(("gen_ai.request.model", "gen_ai.response.model", "gen_ai.response.id"), name)
    texts |= {"headway.tenant": "default"}
    numbers = {"gen_ai.request.max_tokens": 300, "gen_ai.request.choice.count": 2, "headway.choice.index": 1}
    numbers |= {"gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 2, "headway.usage.cached_tokens": -1}
    numbers |= {"headway.steps": 129, "headway.preemptions": 0}
    numbers |= {"headway.ttft_ns": 1_999_000, "headway.tpot_ns": 1_000_000}
    reasons = AnyValue(array_value=ArrayValue(values=[AnyValue(string_value="late")]))
    found = {
        **{key: AnyValue(string_value=text) for key, text in texts.items()},
        **{key: AnyValue(int_value=number) for key, number in numbers.items()},
        "gen_ai.request.temperature": AnyValue(double_value=0.7),
        "gen_ai.request.top_p": AnyValue(double_value=1.0),
        "gen_ai.response.finish_reasons": reasons,
        "headway.ttft_met": AnyValue(bool_value=False),
    }
    expected.attributes.extend(KeyValue(key=key, value=found[key]) for key in sorted(found))
    root.attributes.sort(key=lambda each: each.key)
    assert root == expected
    for span, phase, begins, length in ((first, "receive", began, 5), (second, "decode_compute", began + 5, 2**40)):
        assert span == Span(
            trace_id=b"p" * 16,
            span_id=span.span_id,
            parent_span_id=root.span_id,
            name=f"headway.{phase}",
            kind=Span.SPAN_KIND_INTERNAL,
            start_time_unix_nano=begins,
            end_time_unix_nano=begins + length,
        )
    assert len({root.span_id, first.span_id, second.span_id}) == 3 and root.span_id != b"\0" * 8


def test_many_are_sent_before_their_time(monkeypatch: pytest.MonkeyPatch, collector: Collector) -> None:
    monkeypatch.setattr(traces, "EVERY_S", 600.0)
    tracer = Tracer(collector.url)
    for _ in range(MOST_AT_ONCE):
        tracer.ended(traced())
    eventually(lambda: tracer.sent == MOST_AT_ONCE)
    tracer.close()


def test_what_fails_is_an_error(start_server: StartServer, collector: Collector, engine: FakeEngine) -> None:
    server = traced_server(start_server, collector, trace_sample=0.0)
    engine.drops = "timeout"
    assert server.post("/v1/completions", model=MODEL, prompt="a").status_code == 503
    eventually(lambda: collector.roots())
    (root,) = collector.roots()
    assert root.status.code == Status.STATUS_CODE_ERROR and root.status.message == "timeout"


def test_a_collector_that_is_not_there_harms_nobody(start_server: StartServer) -> None:
    server = start_server(otlp_endpoint="http://127.0.0.1:9")
    for _ in range(3):
        assert server.post("/v1/completions", model=MODEL, prompt="a", max_tokens=2).status_code == 200


def test_a_collector_that_is_not_there_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tracer = Tracer("http://127.0.0.1:9")
    with caplog.at_level(logging.WARNING, logger="headway.server"):
        for number in range(3):
            tracer.ended(traced(name=str(number)))
            eventually(lambda least=number: tracer.dropped > least)  # type: ignore[misc]
        tracer.close()
    assert caplog.text.count("could not be sent to http://127.0.0.1:9/v1/traces") == 1


def test_what_waits_is_bounded_and_is_sent_at_the_end(collector: Collector) -> None:
    tracer = Tracer(collector.url, headers={"x-team": "a"}, resource="service.name=mine,place=a%20b")
    for _ in range(MOST_WAITING + 10):
        tracer.ended(traced())
    tracer.close()
    assert tracer.dropped + tracer.sent == MOST_WAITING + 10 and tracer.dropped <= 10
    assert len(collector.spans) == tracer.sent and set(collector.paths) == {"/v1/traces"}
    assert collector.headers[0]["x-team"] == "a"
    resource = values(collector.requests[0].resource_spans[0].resource)
    assert resource["service.name"] == "mine" and resource["place"] == "a b"


def test_what_the_environment_says(monkeypatch: pytest.MonkeyPatch, collector: Collector) -> None:
    assert tracer_of(None, 1.0) is None
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x")
    tracer = tracer_of(f"{collector.url}/other/path", 1.0)
    assert tracer is not None
    tracer.ended(traced())
    tracer.close()
    assert collector.paths == ["/other/path"] and collector.headers[0]["authorization"] == "Bearer x"
    assert values(collector.requests[0].resource_spans[0].resource)["service.name"] == "mine"
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert tracer_of(collector.url, 1.0) is None


def test_without_an_endpoint_nothing_is_noted(server: LiveServer) -> None:
    assert server.post("/v1/completions", model=MODEL, prompt="a", max_tokens=2).status_code == 200
    assert not any(thread.name == "traces" for thread in threading.enumerate())
