"""One request on its way through the gateway: attempts at backends, the answer, its ledger and what it is charged."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headway.gateway.asked import Api, Body, ask_of, with_usage
from headway.gateway.attempt import Attempt, Head
from headway.gateway.events import ABSENT, EventReader, Part, decode_part, is_error
from headway.gateway.gateway import Gateway
from headway.gateway.joined import Joined, as_header, phases_of_header
from headway.gateway.member import Member, clock
from headway.gateway.relay import Relay
from headway.gateway.upstream import UpstreamFailed
from headway.policy.admission.queue_bound import Place
from headway.server.classes import CLASS_HEADER, TPOT_HEADER, TTFT_HEADER, Terms
from headway.server.edge.connection import ARRIVED
from headway.server.edge.edge import REQUEST_ID
from headway.server.edge.streaming import EventWriter, event
from headway.server.errors import ApiError, ClientGone, anthropic_error, unavailable
from headway.server.quotas import Charge

# Headers that are passed on, each way; of others only those that begin like these.
PASSED = (b"accept", b"content-type", b"user-agent", b"traceparent", b"tracestate")
PASSED_LIKE = (b"anthropic-", b"openai-", b"x-headway-", b"x-llm-d-", b"x-session-id", b"x-stainless-")
RETURNED = (b"content-type", b"retry-after", b"retry-after-ms")
RETURNED_LIKE = (b"anthropic-", b"openai-", b"x-headway-", b"x-llm-d-")
# Answers of a backend that cannot serve this request now, while another one may.
BUSY = (429, 502, 503, 504)
# Codes of a 503 by which a class refuses what would be late.
LATE = ("deadline_unreachable", "queue_timeout")
_OWN = (b"x-headway-backend", b"x-headway-ignored-headers")
logger = logging.getLogger("headway.server")


class _Coded(msgspec.Struct):
    code: str | None = None


class Exchange:
    """A request that was let in.

    Args:
        raw: its body.
        done: called when a stream that it was answered with has ended.
    """

    def __init__(
        self,
        gateway: Gateway,
        request: Request,
        path: str,
        api: Api,
        body: Body,
        raw: bytes,
        terms: Terms,
        done: Callable[[Exchange], None],
    ) -> None:
        self._gateway, self._request, self._path, self._api = gateway, request, path, api
        self._body, self._raw, self.terms, self._done = body, raw, terms, done
        self._place: Place | None = None
        self._joined = Joined(request.scope[ARRIVED], clock())
        self.ask = ask_of(body, request.headers, terms.service.name, terms.ttft_ms)
        self.charge: Charge | None = None
        self._hides_usage = False
        self._abort: ApiError | None = None
        self._is_gone = False
        self._attempt: Attempt | None = None

    # --- the end, from outside --------------------------------------------------------------------------

    def abort(self, error: ApiError) -> None:
        """End it with this error: the gateway shuts down."""
        self._abort = error
        attempt = self._attempt
        if attempt is not None:
            attempt.give_up(UpstreamFailed("aborted", error.message))

    def leave(self, gone: asyncio.Future[None]) -> None:
        """Note that the client has gone."""
        if not gone.cancelled():
            self._is_gone = True
            if self._attempt is not None:
                self._attempt.give_up(UpstreamFailed("gone", "the client went away"))

    def release(self) -> None:
        """Give back all that it holds; may be called again."""
        if self._attempt is not None:
            self._attempt.end("cancelled", None)
            self._gateway.let_go(self._attempt.member)
        if self.charge is not None:
            events = self._attempt.events if self._attempt is not None else None
            used = self.ask.tokens + events.pieces if events is not None and events.pieces else None
            self.charge.settle(used)
        if self._place is not None:
            self._place.close(clock())
        self._gateway.generations.discard(self)

    # --- attempts ---------------------------------------------------------------------------------------

    async def answer(self) -> Response:
        """The answer, or the stream that will make it. Raises ApiError, and ClientGone."""
        gateway, tried, attempts = self._gateway, set[Member](), 0
        gateway.retries.earn()
        home = gateway.home_of(self._body.previous_response_id)
        serving = [] if home else gateway.serving(self._body)
        while not self._is_gone:
            self.ask.ttft_ms = self._left_ms(self.terms.ttft_ms)
            self._refuse_if_late()
            member = gateway.route(self.ask, serving, tried, home)
            attempt = self._attempt = Attempt(
                member, self.ask, gateway.router.learns and self._api.is_work, self._edited, self._had_token
            )
            tried.add(member)
            attempts += 1
            try:
                await attempt.begin(self._request_for(member))
            except UpstreamFailed as error:
                if self._is_gone:
                    break
                attempt.end(error.kind, None if error.kind == "aborted" else True)
                if self._abort is None and self._may_retry(attempts, serving, tried):
                    gateway.metrics.retried(error.kind)
                    continue
                raise self._error(member, error) from None
            finally:
                gateway.let_go(member)
            head = attempt.head
            assert head is not None
            if head.status in BUSY and self._may_retry(attempts, serving, tried):
                attempt.end(f"status_{head.status}", _is_fault(head.status, bytes(attempt.body)))
                gateway.metrics.retried(f"status_{head.status}")
                continue
            return self._streamed(attempt, head) if head.is_stream else self._whole(attempt, head)
        raise ClientGone

    def _may_retry(self, attempts: int, serving: list[Member], tried: set[Member]) -> bool:
        gateway = self._gateway
        is_allowed = attempts <= gateway.file.retries and gateway.has_other(self.ask, serving, tried)
        return is_allowed and gateway.retries.spend()

    def _left_ms(self, objective_ms: float) -> float:
        """What is left of an objective: its deadline stands since the request's first byte came."""
        return objective_ms - (clock() - self._joined.arrived_ns) / 1e6

    def _refuse_if_late(self) -> None:
        if self.ask.ttft_ms <= 0 and self.terms.service.when_late == "refuse":
            raise unavailable(
                f"the first token was due {self.terms.ttft_ms:g} ms after the request came, which is over",
                "deadline_unreachable",
                1,
            )

    def _request_for(self, member: Member) -> bytes:
        """The bytes that are sent to a backend."""
        entry, raw = member.entry, self._raw
        shown = f"[{entry.host}]" if ":" in entry.host else entry.host
        is_usual = entry.port == (443 if entry.is_tls else 80)
        query = self._request.scope["query_string"]
        target = f"{entry.prefix}{self._path}".encode() + (b"?" + query if query else b"")
        lines = [
            b"%b %b HTTP/1.1" % (self._request.method.encode(), target),
            b"host: %b" % (shown if is_usual else f"{shown}:{entry.port}").encode(),
            b"accept-encoding: identity",
            b"x-request-id: %b" % self._request.scope[REQUEST_ID].encode(),
        ]
        own = self._own_headers(member)
        for name, value in self._request.scope["headers"]:
            if (name in PASSED or name.startswith(PASSED_LIKE)) and name not in own:
                lines.append(b"%b: %b" % (name, value))
        lines += [b"%b: %b" % pair for pair in own.items() if pair[1]]
        if entry.key:
            lines.append(b"authorization: Bearer %b" % entry.key.encode())
        if raw or self._request.method == "POST":
            lines.append(b"content-length: %d" % len(raw))
        return b"\r\n".join(lines) + b"\r\n\r\n" + raw

    def _own_headers(self, member: Member) -> dict[bytes, bytes]:
        """Headers that say what the gateway has decided; empty ones are not passed on."""
        if not self._gateway.has_files:
            given = self._request.headers.get(TTFT_HEADER)
            return {} if given is None or math.isinf(self.terms.ttft_ms) else self._deadline()
        if member.entry.kind != "headway":
            return {name.encode(): b"" for name in (CLASS_HEADER, TTFT_HEADER, TPOT_HEADER)}
        names_class = self._body.service_class is not None or self._body.service_tier not in (None, "auto")
        name = b"" if names_class else self.terms.service.name.encode()
        tpot = f"{self.terms.tpot_ms:.6g}".encode() if self.terms.tpot_ms < math.inf else b""
        return {CLASS_HEADER.encode(): name, TPOT_HEADER.encode(): tpot} | self._deadline()

    def _deadline(self) -> dict[bytes, bytes]:
        left = max(0.001, self.ask.ttft_ms)
        return {TTFT_HEADER.encode(): f"{left:.3f}".encode() if left < math.inf else b""}

    # --- answers ----------------------------------------------------------------------------------------

    def _headers(self, attempt: Attempt, head: Head) -> dict[str, str]:
        found = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in head.headers.items()
            if (name in RETURNED or name.startswith(RETURNED_LIKE)) and name not in _OWN
        }
        found["x-headway-backend"] = attempt.member.label
        if self._gateway.quotas is not None:
            found |= self._gateway.quotas.headers(self.terms.tenant)
        return found

    def _whole(self, attempt: Attempt, head: Head) -> Response:
        """The answer in one piece. Raises ApiError where the backend's is none."""
        body, ended_ns, status = bytes(attempt.body), clock(), head.status
        part = _part_of(body)
        if part is None and not _is_json(body):
            attempt.end("malformed", status < 400 or status >= 500)
            failure = UpstreamFailed("malformed", f"its answer with status {status} is not JSON")
            raise self._error(attempt.member, failure, status if status >= 400 else 502)
        if not 200 <= status < 300 and status < 400:
            attempt.end("malformed", True)
            failure = UpstreamFailed("malformed", f"its answer has status {status}, and redirects are not followed")
            raise self._error(attempt.member, failure)
        is_ok = status < 300 and not (part is not None and is_error(part))
        attempt.end("ok" if is_ok else f"status_{status}", _is_fault(status, body) or (status < 300 and not is_ok))
        headers = self._headers(attempt, head)
        if is_ok and part is not None:
            self._settle(attempt, part)
            body, headers["server-timing"] = self._told(attempt, head, body, part, ended_ns)
        self._count(attempt)
        return Response(body, head.status, headers)

    def _told(self, attempt: Attempt, head: Head, body: bytes, part: Part, ended_ns: int) -> tuple[bytes, str]:
        """The body with the joined ledger, where it has one, and the ledger as a header."""
        joined, told = self._joined, head.headers.get(b"server-timing", b"")
        phases = phases_of_header(told) if attempt.member.entry.kind == "headway" else {}
        if part.timings is not ABSENT and (timings := joined.timings(part.timings, attempt.sent_ns, ended_ns)):
            body = with_field(body, b"timings", part.timings, timings)
        return body, as_header(joined.phases(phases, attempt.sent_ns, ended_ns))

    def _streamed(self, attempt: Attempt, head: Head) -> Relay:
        timing = as_header(self._joined.phases({}, attempt.sent_ns, clock()))
        headers = self._headers(attempt, head) | {"server-timing": timing}
        headers["content-type"] = "text/event-stream; charset=utf-8"
        return Relay(attempt, self._gateway.settings, headers, self._finish, lambda: self._done(self))

    def _finish(self, writer: EventWriter, failure: UpstreamFailed | None) -> None:
        """The backend's stream has ended."""
        attempt = self._attempt
        assert attempt is not None
        said = attempt.events
        if failure is None:
            attempt.end("error_event" if said.error else "ok", said.error)
            if not said.error:
                self._settle(attempt, None)
            self._count(attempt)
        elif not self._is_gone:
            attempt.end(f"stream_{failure.kind}", None if failure.kind == "aborted" else True)
            logger.warning("a stream of %s failed: %s", attempt.member.entry.name, failure)
            if self.charge is not None:
                self.charge.settle(None)
            writer.push(_error_event(self._api, self._error(attempt.member, failure)))

    # --- what comes -------------------------------------------------------------------------------------

    def _had_token(self) -> None:
        if self._place is not None:
            self._place.had_output(0, clock())

    def _edited(self, raw: bytes, part: Part | None, events: EventReader) -> bytes:
        """What the client gets of an event."""
        if part is None:
            return raw
        if part.timings is not ABSENT and self._body.include_timings and self._attempt is not None:
            timings = self._joined.timings(part.timings, self._attempt.sent_ns, clock())
            if timings:
                return with_field(raw, b"timings", part.timings, timings)
        if not self._hides_usage:
            return raw
        if part.usage is not None and part.choices == []:
            return b""
        return raw.replace(b',"usage":null', b"", 1)  # quotes within texts have a backslash

    def _count(self, attempt: Attempt) -> None:
        joined, first_ns = self._joined, attempt.first_token_ns
        self._gateway.metrics.ended(joined.arrived_ns, joined.received_ns, attempt.sent_ns, first_ns)

    def _settle(self, attempt: Attempt, part: Part | None) -> None:
        """Charge what an answer without a failure has used."""
        usage = attempt.events.usage if part is None else part.usage
        if part is None:
            if attempt.events.response_id:
                self._gateway.remember(attempt.events.response_id, attempt.member)
        elif self._api.streams == "responses" and part.id:
            self._gateway.remember(part.id, attempt.member)
        if self.charge is None:
            return
        if usage is None:
            return self.charge.settle(self.ask.tokens + attempt.events.pieces)
        outputs = usage.completion_tokens + usage.output_tokens
        self.charge.settle(usage.tokens, [outputs // self.ask.choices] * self.ask.choices if outputs else ())

    def enter(self) -> None:
        """Take a place in the queue, and reserve what it is expected to use. Raises ApiError 429 where none is left."""
        quotas, body, admission = self._gateway.quotas, self._body, self._gateway.admission
        self._place = admission.admit(body.choices, self.terms.service, self.terms.tenant)
        admission.add_prompts(self._place, [self.ask.tokens])
        if quotas is None:
            return
        outputs = [(body.choices, body.most_output)] if self._api.streams else []
        self.charge = quotas.reserve(self.terms.tenant, self.ask.tokens, outputs)
        options = body.stream_options
        if self._api.streams == "openai" and body.stream and not (options is not None and options.include_usage):
            self._raw, self._hides_usage = with_usage(self._raw), True

    def _error(self, member: Member, failure: UpstreamFailed, status: int = 502) -> ApiError:
        """What the client is told of a backend's failure."""
        if self._abort is not None:
            return self._abort
        codes = {"timeout": (504, "backend_timeout"), "connect": (502, "backend_unreachable")}
        status, code = codes.get(failure.kind, (status, "backend_failed"))
        return ApiError(status, f"backend {member.entry.name}: {failure}", code=code, kind="backend_error")


def _part_of(body: bytes) -> Part | None:
    try:
        return decode_part(body)
    except (msgspec.MsgspecError, RecursionError):
        return None


def _is_json(body: bytes) -> bool:
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True


def _is_fault(status: int, body: bytes) -> bool:
    """Whether a backend that answers like this is at fault. One that has no room, or no time, is not."""
    if status != 503:
        return status >= 500
    part = _part_of(body)
    if part is None or part.error is ABSENT:
        return True
    try:
        return msgspec.json.decode(part.error, type=_Coded).code not in LATE
    except msgspec.MsgspecError:
        return True


def with_field(body: bytes, name: bytes, old: msgspec.Raw, new: bytes) -> bytes:
    """A JSON object, or an event of one, with another value of the field, whose last place in it counts."""
    given = bytes(old)
    at = body.find(given, max(0, body.rfind(b'"%b"' % name)))
    return body if at < 0 else body[:at] + new + body[at + len(given) :]


def _error_event(api: Api, error: ApiError) -> bytes:
    """The last event of a stream that has failed, as clients of the API expect it."""
    if api.streams == "messages":
        return b"event: error\n" + event(msgspec.json.encode(anthropic_error(error)))
    if api.streams == "responses":
        told = {"type": "error", "code": error.code, "message": error.message, "param": None}
        return b"event: error\n" + event(msgspec.json.encode(told))
    return event(msgspec.json.encode(error.body()))
