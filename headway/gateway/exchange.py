"""One request on its way through the gateway: attempts at backends, the answer, its ledger and what it is charged."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headway.config_files.gateway import DECODE
from headway.gateway.asked import OF_BATCHES, Api, Body, ask_of, with_usage
from headway.gateway.attempt import Attempt, Head
from headway.gateway.attempts import Attempts
from headway.gateway.events import ABSENT, BrokenStream, Part, is_error
from headway.gateway.failures import error_event, error_of, is_fault, is_json, part_of
from headway.gateway.gateway import Gateway
from headway.gateway.handover import Handover
from headway.gateway.joined import Joined, as_header, phases_of_header
from headway.gateway.member import Member, clock
from headway.gateway.passing import Headers, request_to, returned
from headway.gateway.relay import Relay
from headway.gateway.replay import CannotReplay, Replay
from headway.gateway.upstream import UpstreamFailed
from headway.policy.admission.queue_bound import Place
from headway.policy.step.ledger import Phase
from headway.server.classes import CLASS_HEADER, TPOT_HEADER, TTFT_HEADER, Terms
from headway.server.edge.connection import ARRIVED
from headway.server.edge.edge import HEADERS
from headway.server.edge.streaming import EventWriter, SlowReader
from headway.server.errors import ApiError, unavailable
from headway.server.quotas import Charge

# The code of an error with which a server ends the streams that it has no time for: another one goes on with them.
_ENDS = b'"shutting_down"'
logger = logging.getLogger("headway.server")


class Exchange:
    """A request that was let in.

    Args:
        raw: its body.
        home: the backend that has what it goes on with; None where that does not matter.
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
        home: Member | None = None,
    ) -> None:
        self._gateway, self._request, self._path, self._api = gateway, request, path, api
        self._body, self._raw, self.terms, self._done, self._home = body, raw, terms, done, home
        self._place: Place | None = None
        self._joined = Joined(request.scope[ARRIVED], clock())
        self.ask = ask_of(body, request.scope[HEADERS], terms.service.name, terms.ttft_ms)
        self.charge: Charge | None = None
        self._hides_usage = False
        self._replay: Replay | None = None
        self._relay: Relay | None = None
        self._going_on: asyncio.Task[None] | None = None
        self._pieces_before = 0  # of attempts before the last one
        self._first_ns = 0  # when the first token had come, of a stream that another backend goes on with
        self._handover = Handover.of(api, path, body, raw) if gateway.hands_over else None
        self._attempts = Attempts(
            gateway,
            self.ask,
            api.is_work,
            self._look_at_clock,
            self._request_to,
            self._edited,
            self._had_token,
            self._handover,
            self._with_body,
        )
        self._has_ended = False

    # --- the end, from outside --------------------------------------------------------------------------

    def abort(self, error: ApiError) -> None:
        """End it with this error: the gateway shuts down."""
        self._attempts.abort(error)

    def leave(self) -> None:
        """Note that the client has gone."""
        if not self._has_ended:
            self._attempts.leave()

    def release(self) -> None:
        """Give back all that it holds."""
        self._has_ended = True
        if self._going_on is not None:
            self._going_on.cancel()
        self._attempts.end()
        if self.charge is not None:
            last = self._attempts.last
            pieces = self._pieces_before + (0 if last is None else last.events.pieces)
            self.charge.settle(self.ask.tokens + pieces if pieces else None)
        if self._place is not None:
            self._place.close(clock())
        self._gateway.generations.discard(self)
        del self._attempts, self._relay  # they know each other, and would wait for the garbage collector

    # --- what backends are asked --------------------------------------------------------------------------

    async def answer(self) -> Response | Relay:
        """The answer, or the stream that will make it. Raises ApiError, and ClientGone."""
        serving = [] if self._home is not None else self._gateway.serving(self._body, self._api.stores)
        attempt = await self._attempts.answered(serving, self._home)
        assert attempt.head is not None
        return self._streamed(attempt, attempt.head) if attempt.head.is_stream else self._whole(attempt, attempt.head)

    def _look_at_clock(self) -> None:
        """Note what is left of the objective, whose deadline stands since the first byte came. Raises ApiError 503."""
        self.ask.ttft_ms = self.terms.ttft_ms - (clock() - self._joined.arrived_ns) / 1e6
        if self.ask.ttft_ms <= 0 and self.terms.service.when_late == "refuse":
            message = f"the first token was due {self.terms.ttft_ms:g} ms after the request came, which is over"
            raise unavailable(message, "deadline_unreachable", 1)

    def _request_to(self, attempt: Attempt) -> bytes:
        member = attempt.member
        can_replay = self._gateway.file.continue_streams and member.entry.kind == "headway"
        self._replay = Replay.of(self._api, self._path, self._body, self._raw) if can_replay else None
        if not (self._hides_usage or self._body.include_timings or self._replay is not None):
            attempt.edit = None
        body = self._raw if self._replay is None else self._replay.request
        if self._handover is not None and member.entry.role == DECODE:
            self._joined.before, body = self._handover.phases, self._handover.request(body)
        return self._with_body(member, body)

    def _with_body(self, member: Member, body: bytes, path: str = "") -> bytes:
        """The bytes that a backend is sent with a body of the gateway's own, at another path where one is given."""
        return request_to(member, self._request, path or self._path, self._own_headers(member), body)

    def _own_headers(self, member: Member) -> dict[bytes, bytes]:
        """Headers that say what the gateway has decided; empty ones are not passed on."""
        if not self._gateway.has_files:
            return {} if math.isinf(self.terms.ttft_ms) else self._deadline()
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

    def _headers(self, attempt: Attempt, head: Head) -> Headers:
        found = returned(head, attempt.member)
        if self._gateway.quotas is not None:
            told = self._gateway.quotas.headers(self.terms.tenant)
            found += [(name.encode(), value.encode()) for name, value in told.items()]
        return found

    def _whole(self, attempt: Attempt, head: Head) -> Response:
        """The answer in one piece. Raises ApiError where the backend's is none."""
        body, ended_ns, status = bytes(attempt.body), clock(), head.status
        part = part_of(body)
        if part is None and not is_json(body) and (self._api.is_json or status >= 400):
            attempt.end("malformed", status < 400 or status >= 500)
            failure = UpstreamFailed("malformed", f"its answer with status {status} is not JSON")
            raise self._error(attempt.member, failure, status if status >= 400 else 502)
        if not 200 <= status < 300 and status < 400:
            attempt.end("malformed", True)
            failure = UpstreamFailed("malformed", f"its answer has status {status}, and redirects are not followed")
            raise self._error(attempt.member, failure)
        is_ok = status < 300 and not (part is not None and is_error(part))
        attempt.end("ok" if is_ok else f"status_{status}", is_fault(status, body) or (status < 300 and not is_ok))
        headers = self._headers(attempt, head)
        if is_ok and self._api.stores in OF_BATCHES and self._api.is_json:
            self._gateway.homes.note(body, attempt.member, self.terms.tenant)
        elif is_ok and part is not None:
            self._settle(attempt, part)
            body, timing = self._told(attempt, head, body, part, ended_ns)
            headers.append((b"server-timing", timing.encode()))
        self._count(attempt)
        answer = Response(body, head.status)
        answer.raw_headers += headers
        return answer

    def _told(self, attempt: Attempt, head: Head, body: bytes, part: Part, ended_ns: int) -> tuple[bytes, str]:
        """The body with the joined ledger, where it has one, and the ledger as a header."""
        joined, told = self._joined, head.headers.get(b"server-timing", b"")
        phases = phases_of_header(told) if attempt.member.entry.kind == "headway" else {}
        if part.timings is not ABSENT and (timings := joined.timings(part.timings, attempt.sent_ns, ended_ns)):
            body = with_field(body, b"timings", part.timings, timings)
        return body, as_header(joined.phases(phases, attempt.sent_ns, ended_ns))

    def _streamed(self, attempt: Attempt, head: Head) -> Relay:
        headers = [pair for pair in self._headers(attempt, head) if pair[0] != b"content-type"]
        headers.append((b"server-timing", self._joined.so_far(attempt.sent_ns).encode()))
        relay = Relay(attempt, self._gateway.settings, headers, self._finish, lambda: self._done(self))
        self._relay = relay if self._replay is not None else None
        return relay

    def _finish(self, writer: EventWriter, failure: UpstreamFailed | None) -> bool:
        """A backend's stream has ended. Returns whether another one is asked to go on with it."""
        if self._has_ended:
            return False
        attempt = self._attempts.last
        assert attempt is not None
        said = attempt.events
        if failure is None:
            attempt.end("error_event" if said.error else "ok", said.error)
            if not said.error:
                self._settle(attempt, None)
            self._count(attempt)
        elif not self._attempts.is_gone:
            attempt.end(f"stream_{failure.kind}", None if failure.kind == "aborted" else True)
            logger.warning("a stream of %s failed: %s", attempt.member.entry.name, failure)
            if self._replay is not None and self._attempts.aborted is None:
                self._going_on = asyncio.create_task(self._go_on(self._replay, writer, attempt, failure))
                return True
            self._fail(writer, attempt, failure)
        return False

    def _fail(self, writer: EventWriter, attempt: Attempt, failure: UpstreamFailed) -> None:
        if self.charge is not None:
            self.charge.settle(None)
        writer.push(error_event(self._api, self._error(attempt.member, failure)))

    async def _go_on(self, replay: Replay, writer: EventWriter, failed: Attempt, failure: UpstreamFailed) -> None:
        """Have another backend go on with a stream; where none can, end it with the error."""
        try:
            attempt = await self._attempts.replayed(replay, self._replayed)
        except (CannotReplay, UpstreamFailed, ApiError) as error:
            if not self._attempts.is_gone:
                logger.info("the stream is not gone on with: %s", error)
                with contextlib.suppress(SlowReader):
                    self._fail(writer, failed, failure)
            return writer.close()
        logger.info("%s goes on with the stream", attempt.member.entry.name)
        self._first_ns = self._first_ns or failed.first_token_ns
        known = self._joined.before
        lost_ns = known.get(str(Phase.ENGINE_LOST), 0) + attempt.sent_ns - failed.sent_ns
        self._joined.before = {**known, str(Phase.ENGINE_LOST): lost_ns}
        assert self._relay is not None
        self._pieces_before += failed.events.pieces
        self._relay.follow(attempt, writer)

    # --- what comes -------------------------------------------------------------------------------------

    def _had_token(self, attempt: Attempt) -> None:
        if self._place is not None:
            self._place.had_output(0, attempt.first_token_ns)
        for tell in self._gateway.when_first:
            took_ms = (attempt.first_token_ns - self._joined.arrived_ns) / 1e6
            tell(attempt.member, self.ask, self.terms.ttft_ms, took_ms)

    def _edited(self, raw: bytes, part: Part | None, attempt: Attempt) -> bytes:
        """What the client gets of an event."""
        if part is None:
            return raw
        if self._replay is not None:
            if _ENDS in bytes(part.error):
                raise BrokenStream("its server shuts down")
            raw = self._replay.passed(raw)
        if part.timings is not ABSENT and self._body.include_timings:
            timings = self._joined.timings(part.timings, attempt.sent_ns, clock())
            if timings:
                return with_field(raw, b"timings", part.timings, timings)
        return self._without_usage(raw, part) if self._hides_usage else raw

    def _replayed(self, raw: bytes, part: Part | None, attempt: Attempt) -> bytes:
        """What the client gets of an event of a backend that goes on with its stream."""
        if part is None or is_error(part) or self._replay is None:
            return raw
        timings = b""
        if part.timings is not ABSENT and self._body.include_timings:
            of_first = self._first_ns, self._replay.replayed
            timings = self._joined.timings(part.timings, attempt.sent_ns, clock(), *of_first)
        raw = self._replay.joined(raw, timings)
        return self._without_usage(raw, part) if self._hides_usage else raw

    def _without_usage(self, raw: bytes, part: Part) -> bytes:
        if part.usage is not None and part.choices == []:
            return b""
        return raw.replace(b',"usage":null', b"", 1)  # quotes within texts have a backslash

    def _count(self, attempt: Attempt) -> None:
        joined, first_ns = self._joined, attempt.first_token_ns
        self._gateway.metrics.ended(joined.arrived_ns, joined.received_ns, attempt.sent_ns, first_ns)

    def _settle(self, attempt: Attempt, part: Part | None) -> None:
        """Charge what an answer without a failure has used."""
        usage = attempt.events.usage if part is None else part.usage
        response_id = attempt.events.response_id if part is None else part.id
        if response_id and self._api.stores:
            self._gateway.homes.remember(response_id, attempt.member, self.terms.tenant)
        if self.charge is None:
            return
        if usage is None:
            return self.charge.settle(self.ask.tokens + self._pieces_before + attempt.events.pieces)
        outputs = usage.completion_tokens + usage.output_tokens
        self.charge.settle(usage.tokens, [outputs // self.ask.choices] * self.ask.choices if outputs else ())

    async def enter(self) -> None:
        """Take a place in the queue, and reserve what it is expected to use. Raises ApiError 429 where none is left."""
        quotas, body, admission = self._gateway.quotas, self._body, self._gateway.admission
        self._place = admission.admit(body.choices, self.terms.service, self.terms.tenant, [self.ask.tokens])
        if quotas is None:
            return
        outputs = [(body.choices, body.most_output)] if self._api.streams else []
        self.charge = await quotas.reserved(self.terms.tenant, self.ask.tokens, outputs)
        options = body.stream_options
        if self._api.streams == "openai" and body.stream and not (options is not None and options.include_usage):
            self._raw, self._hides_usage = with_usage(self._raw), True

    def _error(self, member: Member, failure: UpstreamFailed, status: int = 502) -> ApiError:
        return self._attempts.aborted or error_of(member, failure, status)


def with_field(body: bytes, name: bytes, old: msgspec.Raw, new: bytes) -> bytes:
    """A JSON object, or an event of one, with another value of the field, whose last place in it counts."""
    given = bytes(old)
    at = body.find(given, max(0, body.rfind(b'"%b"' % name)))
    return body if at < 0 else body[:at] + new + body[at + len(given) :]
