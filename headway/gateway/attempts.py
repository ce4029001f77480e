"""The way of a request to a backend that answers it: tried again where one fails, and elsewhere where one is slow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from headway.config_files.gateway import DECODE
from headway.gateway.attempt import Attempt, Edit
from headway.gateway.failures import error_of, is_fault
from headway.gateway.gateway import Gateway
from headway.gateway.handover import Handover
from headway.gateway.member import Member, clock
from headway.gateway.replay import CannotReplay, Replay
from headway.gateway.upstream import UpstreamFailed
from headway.policy.fleet.backend import Ask, Backend
from headway.policy.step.step_time import StepWork
from headway.server.errors import ApiError, ClientGone

# Failures of a backend that works on nothing: what is sent elsewhere then is no further load, and costs no retry.
NOT_THERE = ("connect", "down")


class Attempts:
    """The attempts of one request.

    Args:
        is_work: it uses the model: what comes of it teaches how long backends take, and it may be asked of two.
        before: is called before each; may raise ApiError.
        request_to: the bytes that an attempt sends.
        edit, on_token: see Attempt.
        handover: of the prompt, which another backend may compute; None where that is not possible.
        with_body: the bytes that a backend is sent with another body, and to another path unless that is empty.

    Attributes:
        last: the latest one that may answer, or has answered.
        aborted: the error that ends the request: the gateway shuts down.
        is_gone: the client went away.
    """

    def __init__(
        self,
        gateway: Gateway,
        ask: Ask,
        is_work: bool,
        before: Callable[[], None],
        request_to: Callable[[Attempt], bytes],
        edit: Edit,
        on_token: Callable[[Attempt], None],
        handover: Handover | None,
        with_body: Callable[[Member, bytes, str], bytes],
    ) -> None:
        self._gateway, self._ask, self._is_work = gateway, ask, is_work
        self._before, self._request_to, self._edit, self._on_token = before, request_to, edit, on_token
        self._handover, self._with_body = handover, with_body
        self._serving: list[Member] = []
        self._tried: set[Member] = set()
        self._under_way: list[Attempt] = []
        self._of_prompt: Attempt | None = None  # at the backend that computes the prompt for another
        self.last: Attempt | None = None
        self.aborted: ApiError | None = None
        self.is_gone = False

    # --- the end, from outside --------------------------------------------------------------------------

    def abort(self, error: ApiError) -> None:
        """End with this error: the gateway shuts down."""
        self.aborted = error
        self._give_up(UpstreamFailed("aborted", error.message))

    def leave(self) -> None:
        """Note that the client has gone."""
        self.is_gone = True
        self._give_up(UpstreamFailed("gone", "the client went away"))

    def _give_up(self, failure: UpstreamFailed) -> None:
        for each in list(self._under_way):
            each.give_up(failure)

    def end(self) -> None:
        """Give back what attempts hold at backends.

        A prompt that was handed over is computed when there is an answer, but its backend may have yet to say so.
        """
        is_answered = not self.is_gone and self.aborted is None
        for each in list(self._under_way):
            if each is self._of_prompt and is_answered:
                continue
            self._end(each, "cancelled", None)
            self._gateway.let_go(each.member)

    # --- until one answers ------------------------------------------------------------------------------

    async def answered(self, serving: list[Member], home: Member | None) -> Attempt:
        """The attempt whose answer has begun.

        Args:
            serving: the backends that may have the request.
            home: the only one that may; None for any of `serving`.

        Raises:
            ApiError: no backend can be tried, or the last one has failed.
            ClientGone: the client went away meanwhile.
        """
        gateway, self._serving = self._gateway, serving
        gateway.retries.earn()
        gateway.hedges.earn()
        while not self.is_gone:
            if self.aborted is not None:
                raise self.aborted
            self._before()
            member = gateway.at_home(home) if home is not None else self._route()
            if self._handover is not None and not self._tried and home is None:
                await self._hand_over(self._handover, member)
                if self.is_gone:
                    break
                self._before()
            attempt = self._begin(member)
            try:
                attempt = await self._first(attempt)
            except UpstreamFailed as error:
                failed = self.last
                assert failed is not None
                self._end_failed(failed, error)
                if self.is_gone:
                    break
                if self.aborted is None and self._may_retry(is_free=error.kind in NOT_THERE):
                    gateway.metrics.count("retries", error.kind)
                    continue
                raise self.aborted or error_of(failed.member, error) from None
            finally:
                gateway.let_go(attempt.member)
            if not attempt.is_busy or not self._may_retry():
                return attempt
            gateway.metrics.count("retries", self._end_busy(attempt))
        raise ClientGone

    def _route(self) -> Member:
        return self._gateway.route(self._ask, self._serving, self._tried)

    async def _hand_over(self, handover: Handover, decode: Member) -> None:
        """Have a backend for prompts begin to compute the prompt, if that pays; it goes on while `decode` is asked.

        Where it fails, `decode` computes the prompt itself.
        """
        gateway, ask = self._gateway, self._ask
        member = gateway.computing(ask, self._serving, decode)
        if member is None:
            return
        work = member.seen.sent(ask)
        attempt = Attempt(member, ask, None, handover.read, lambda _: None, ask.tokens)
        self._under_way.append(attempt)
        try:
            await attempt.begin(self._with_body(member, handover.prompt_request, ""))
        except UpstreamFailed as error:
            self._end_failed(attempt, error)
            gateway.let_go(member)
            gateway.metrics.count("handovers", "failed")
        else:
            self._of_prompt = attempt
            attempt.attach(None, partial(self._prompt_ended, handover, attempt, work))
            gateway.metrics.count("handovers", "kept" if handover.is_kept else "not_kept")

    def _prompt_ended(
        self, handover: Handover, attempt: Attempt, work: StepWork, failure: UpstreamFailed | None
    ) -> None:
        """The answer of the backend for prompts has come to its end."""
        status = 0 if attempt.head is None else attempt.head.status
        if failure is not None:
            self._end_failed(attempt, failure)
        elif status != 200 or attempt.events.error:
            outcome = "error_event" if status == 200 else f"status_{status}"
            self._end(attempt, outcome, status == 200 or is_fault(status, bytes(attempt.body)))
        else:
            handover.ended_ns = clock()
            attempt.member.seen.answered(work, handover.ended_ns - attempt.sent_ns)
            self._end(attempt, "ok", False)
        self._gateway.let_go(attempt.member)

    def _begin(self, member: Member, edit: Edit | None = None) -> Attempt:
        learns, ask, seen = self._is_work and self._gateway.router.learns and edit is None, self._ask, member.seen
        when_sent, tokens = partial(_learning, seen, ask) if learns else None, ask.tokens
        if self._handover is not None and self._handover.is_kept and member.entry.role == DECODE:
            when_sent, tokens = partial(_receiving, seen, ask, self._handover), 0
        attempt = self.last = Attempt(member, ask, when_sent, edit or self._edit, self._on_token, tokens)
        self._under_way.append(attempt)
        self._tried.add(member)
        return attempt

    def _end(self, attempt: Attempt, outcome: str, is_failure: bool | None) -> None:
        attempt.end(outcome, is_failure)
        self._under_way.remove(attempt)

    def _end_failed(self, attempt: Attempt, failure: UpstreamFailed) -> None:
        outcome = "cancelled" if failure.kind == "gone" else failure.kind
        self._end(attempt, outcome, None if failure.kind in ("gone", "aborted") else True)

    def _end_busy(self, attempt: Attempt) -> str:
        assert attempt.head is not None
        status = attempt.head.status
        self._end(attempt, f"status_{status}", is_fault(status, bytes(attempt.body)))
        return f"status_{status}"

    def _may_retry(self, is_free: bool = False) -> bool:
        gateway = self._gateway
        is_allowed = len(self._tried) <= gateway.file.retries
        has_other = gateway.has_other(self._ask, self._serving, self._tried)
        return is_allowed and has_other and (is_free or gateway.retries.spend())

    # --- going on with a stream -----------------------------------------------------------------------------

    async def replayed(self, replay: Replay, edit: Edit) -> Attempt:
        """The attempt that goes on with a stream, at another Headway backend.

        Raises:
            CannotReplay, UpstreamFailed, ApiError: there is none that can.
        """
        gateway = self._gateway
        serving = [each for each in self._serving if each.entry.kind == "headway"]
        if not gateway.has_other(self._ask, serving, self._tried):
            raise CannotReplay("there is no other backend that can")
        if not gateway.retries.spend():
            raise CannotReplay("too many requests were sent again of late")
        member = gateway.route(self._ask, serving, self._tried)
        attempt = self._begin(member, edit)
        try:
            await attempt.begin(self._with_body(member, await replay.continued(member), "/v1/completions"))
        except (CannotReplay, UpstreamFailed) as error:
            if isinstance(error, UpstreamFailed):
                self._end_failed(attempt, error)
            else:
                self._end(attempt, "not_replayed", None)
            raise
        if attempt.head is None or not attempt.head.is_stream:
            self._end(attempt, "not_replayed", None)
            raise CannotReplay(f"backend {member.entry.name} did not go on")
        gateway.metrics.count("retries", "stream")
        return attempt

    # --- hedging ----------------------------------------------------------------------------------------

    async def _first(self, attempt: Attempt) -> Attempt:
        """The one that answers first: this, or where it takes longer than the file allows, another. Raises
        UpstreamFailed where all fail; `last` is the one that failed last.
        """
        after_s = self._gateway.file.hedge_after_ms / 1000
        if not (after_s and self._is_work):
            await attempt.begin(self._request_to(attempt))
            return attempt
        begun = {asyncio.create_task(attempt.begin(self._request_to(attempt))): attempt}
        try:
            done, _ = await asyncio.wait(begun, timeout=after_s)
            if not done and self._may_hedge():
                other = self._begin(self._route())
                begun[asyncio.create_task(other.begin(self._request_to(other)))] = other
                self._gateway.metrics.count("retries", "slow")
            return await self._winner(begun)
        finally:
            for task in begun:
                task.cancel()
            await asyncio.gather(*begun, return_exceptions=True)

    async def _winner(self, begun: dict[asyncio.Task[None], Attempt]) -> Attempt:
        while True:
            done, _ = await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                attempt = self.last = begun.pop(task)
                failure = task.exception()
                if failure is None and not (attempt.is_busy and begun):
                    for each in begun.values():
                        self._end(each, "hedged", None)
                        self._gateway.let_go(each.member)
                    return attempt
                if not begun:
                    await task
                if failure is None:
                    self._end_busy(attempt)
                elif isinstance(failure, UpstreamFailed):
                    self._end_failed(attempt, failure)
                else:
                    raise failure
                self._gateway.let_go(attempt.member)

    def _may_hedge(self) -> bool:
        gateway = self._gateway
        if self.is_gone or self.aborted is not None:
            return False
        return gateway.has_other(self._ask, self._serving, self._tried) and gateway.hedges.spend()


def _learning(seen: Backend, ask: Ask) -> Callable[[int], None]:
    """Note a prompt that a backend computes. What is returned learns how long its first token took."""
    return partial(seen.answered, seen.sent(ask))


def _receiving(seen: Backend, ask: Ask, handover: Handover) -> Callable[[int], None]:
    """The same of a prompt that another one computes."""
    seen.prefixes.add(ask.blocks)
    return partial(handover.received, seen)
