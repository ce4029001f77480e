"""One request in the engine: hands over its prompts, lets its choices grow, keeps its ledger and metrics."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from headway.engine.client import EngineDead
from headway.engine.messages import AddRequest, SequenceOutput, SequenceTimings
from headway.outputs.choices import Piece, TokenizedPrompt
from headway.policy.admission.queue_bound import Place
from headway.policy.cache.handle import Handle
from headway.policy.step.ledger import Phase
from headway.policy.step.pooling import PoolingParams
from headway.policy.step.sampling_params import SamplingParams
from headway.server.api.choices import ServedChoice
from headway.server.api.schemas import RequestBody
from headway.server.classes import Terms
from headway.server.ended import Ended, TraceParent, parent_in
from headway.server.errors import ApiError, request_failed, unavailable
from headway.server.quotas import Charge
from headway.server.service import Service
from headway.server.timings import ChoiceTimings, Stamps

T = TypeVar("T")
OnPiece = Callable[[ServedChoice, Piece], None]
clock = time.monotonic_ns
SETTLE_TIMEOUT_S = 30.0
# Prompts of a request that are handed over to the engine in one turn of the event loop, and choices that are counted at
# its end.
IN_ONE_TURN = 64


class Generation:
    """Every choice of one request, from its prompts to its finish reasons.

    Choice i of prompt p has the index p * n + i. At its end, also when it is cancelled, run() frees all that it has in
    the engine.

    Args:
        body: the checked body. With `include_timings`, the end of a choice is held back until the engine's part of its
            ledger has come.
        params: the parameters of each prompt, all with the same n.
        place: the request's share of the queue, given back as choices end.
        terms: its class, what it is promised, and the tenant that it is charged to.
        stamps: its times so far, until its body was found valid, or the grammar that it is held to.
        operation: what OpenTelemetry calls the request.
        prediction: what the answer may say in parts; drafts are found in it.
        keep: choices keep their whole text, for an answer in one piece.
        pooling: a vector is wanted of each prompt, and no tokens.
        prompt_only: no tokens are wanted, though `params` have max_tokens 1.
        hands_over: what is computed of the prompt is kept for another server.
        handle: of what another server has computed of the prompt.
        make_choice: makes the choices.

    Raises:
        ApiError: 429 or 503 where there is no room for its prompts, or no budget left, or the server shuts down.
    """

    def __init__(
        self,
        service: Service,
        request: Request,
        body: RequestBody,
        prompts: list[TokenizedPrompt],
        params: list[SamplingParams],
        place: Place,
        terms: Terms,
        stamps: Stamps,
        operation: str,
        *,
        prediction: Sequence[int] = (),
        keep: bool = True,
        pooling: PoolingParams | None = None,
        prompt_only: bool = False,
        hands_over: bool = False,
        handle: Handle | None = None,
        make_choice: Callable[..., ServedChoice] = ServedChoice,
    ) -> None:
        lengths = [len(prompt.token_ids) for prompt in prompts]
        service.admission.add_prompts(place, lengths)
        self.id = uuid.uuid4().hex
        self.prompts, self.terms, self.hands_over = prompts, terms, hands_over
        self.adapter = service.adapter_of(body.model)  # its digest; empty for the base model
        self._service, self._engine, self._metrics = service, service.engine, service.metrics
        self._include_timings = body.include_timings
        self._operation, self._headers = operation, request.headers
        self._aborted: ApiError | None = None
        self._failed = False
        self._error: Exception | None = None  # the error that ended it
        self._ended, self._settled = asyncio.Event(), asyncio.Event()
        self._on_piece: OnPiece | None = None
        self._leaves: list[Callable[[], None]] = []  # end what submit() began
        self._requests: list[AddRequest] = []
        self._choice_of: dict[tuple[str, int], ServedChoice] = {}
        self._place = place
        self._held: dict[int, Piece] = {}  # choices whose end waits for their last output of the engine
        self.last: ServedChoice | None = None  # the choice that finished last
        self.handle: Handle | None = None  # of the prompt that is kept
        self.begun: SequenceTimings | None = None  # the engine's part of the ledger when the handle came last
        tokenizer = service.tokenizer if pooling is None else None
        make = partial(make_choice, tokenizer=tokenizer, keep=keep, prompt_only=prompt_only)
        of_prompts = {"prediction": list(prediction), "pooling": pooling, "hands_over": hands_over, "handle": handle}
        for number, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            self._add(number, prompt, one, body, stamps, make, of_prompts)
        self.choices = list(self._choice_of.values())
        # Choices that have not ended for the client, and those that have not ended in the engine.
        self._unfinished = self._unsettled = len(self.choices)
        service.enlist(self)
        try:
            self._charge: Charge | None = None
            if service.quotas is not None:
                outputs = [(each.n, each.max_tokens or 1) for each in params] if pooling is None else []
                self._charge = service.quotas.reserve(terms.tenant, sum(lengths), outputs)
        except ApiError:
            service.generations.discard(self)
            raise

    def _add(
        self,
        number: int,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        body: RequestBody,
        stamps: Stamps,
        make: Callable[..., ServedChoice],
        of_prompts: dict[str, Any],
    ) -> None:
        """Add a prompt and its choices."""
        terms, eos = self.terms, self._service.tokenizer.eos_token_ids
        request = AddRequest(
            request_id=f"{self.id}-{number}",
            prompt_token_ids=prompt.token_ids,
            params=params,
            eos_token_ids=eos,
            priority=body.priority,
            cache_salt=body.cache_salt or "",
            adapter=self.adapter,
            arrival_ns=stamps.arrived_ns,
            service_class=terms.service.name,
            ttft_ms=terms.ttft_ms,
            tpot_ms=terms.tpot_ms,
            tenant=terms.tenant,
            **of_prompts,
        )
        self._requests.append(request)
        for at in range(params.n):
            index, own = number * params.n + at, replace(stamps)
            choice = make(index=index, prompt=prompt, params=params, eos_token_ids=eos, stamps=own)
            self._choice_of[request.request_id, at] = choice

    # --- usage --------------------------------------------------------------------------------------

    def usage(self) -> dict[str, Any]:
        """Token counts so far, as OpenAI's `usage`."""
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        completion_tokens = sum(choice.num_tokens for choice in self.choices)
        firsts = {id(choice.prompt): choice for choice in reversed(self.choices)}
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in firsts.values())},
        }
        drafts = sum(choice.drafts for choice in self.choices)
        if drafts or self._requests[0].prediction:
            accepted = sum(choice.accepted_drafts for choice in self.choices)
            details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafts - accepted}
            usage["completion_tokens_details"] = details
        return usage

    def timings(self) -> ChoiceTimings | None:
        """The timings of the choice that finished last; None when the engine's part is not known."""
        choice = self.last
        if choice is None or choice.timings is None:
            return None
        drafts = choice.drafts, choice.accepted_drafts
        return ChoiceTimings(choice.stamps, choice.timings, choice.num_tokens, self.terms, drafts)

    async def render(self, size: int, function: Callable[[], T]) -> T:
        """Run `function`, which writes `size` entries of the answer: in a thread when they are many."""
        return await self._service.text_work.finish(size, function)

    def sent(self, choice: ServedChoice, is_first: bool, is_last: bool, now_ns: int) -> None:
        """Note when the first tokens of a choice, or its last ones, were handed to the connection."""
        since_arrival_ns = now_ns - choice.stamps.arrived_ns
        if is_first:
            self._metrics.on_sent("ttft", since_arrival_ns, self.terms.service.name)
        if is_last:
            self._metrics.on_sent("e2e", since_arrival_ns, self.terms.service.name)

    # --- running ------------------------------------------------------------------------------------

    def abort(self, error: ApiError) -> None:
        """End the request from outside: run() raises `error` as soon as the engine has dropped it."""
        self._aborted = error
        for (request_id, index), choice in self._choice_of.items():
            if not choice.engine_done:
                self._engine.abort(request_id, index)

    def release(self) -> None:
        """Give back what the constructor took. Needed also when run() was never called."""
        self._place.close(clock())
        self._service.generations.discard(self)
        if self._charge is not None:
            self._settle_charge(self._charge)

    def _settle_charge(self, charge: Charge) -> None:
        """Charge what came of the request, also where its client went away; nothing where the server failed."""
        ends = [choice for choice in self.choices if choice.finish_reason in ("stop", "length")]
        failed = self._failed or not any(choice.stamps.first_token_ns for choice in self.choices)
        used = None if failed else self.usage()["total_tokens"]
        charge.settle(used, [choice.num_tokens for choice in ends if choice.num_tokens])

    async def run(self, on_piece: OnPiece | None = None) -> None:
        """Let all choices grow to their ends.

        Args:
            on_piece: told of each piece in the turn of the event loop in which its tokens came; what it raises, run()
                raises. None for an answer in one piece: many end in one step, and the rest of each takes its turn.

        Raises:
            ApiError: the engine failed, died, or the server is shutting down.
        """
        self._on_piece = on_piece
        try:
            await self._submit()
            await self._ended.wait()
            if self._error is not None:
                raise self._error
            if on_piece is None:
                await self._service.pace.turn()
        except EngineDead as error:
            self._failed = True
            for choice in self.choices:
                choice.finish_reason = choice.finish_reason or "error"
            raise self._aborted or unavailable(str(error), "engine_dead", 5) from None
        finally:
            self._ended.set()
            self.release()
            if not self._unfinished and not self._settled.is_set():
                self._service.background(self._settle())
            else:
                self._close()

    async def _submit(self) -> None:
        now_ns = clock()
        for choice in self.choices:
            choice.stamps.sent_ns = now_ns
        for at in range(0, len(self._requests), IN_ONE_TURN):
            if at:
                await self._service.pace.turn()
            if self._aborted is not None:  # while the engine did not know of all of it yet
                raise self._aborted
            requests = self._requests[at : at + IN_ONE_TURN]
            for request in requests:
                request.sent_ns = now_ns
            self._leaves.append(self._engine.submit(requests, self._take))

    def _take(self, item: SequenceOutput | Exception) -> None:
        """Take what comes from the engine: an output, or the reason why there will be none."""
        try:
            if isinstance(item, Exception):
                raise item
            choice = self._choice_of[item.request_id, item.index]
            if self._ended.is_set():  # the answer has ended, but the engine has not heard of the stop string
                if item.finish_reason is not None:
                    self._settle_one(choice, item, clock())
                return
            piece = self._grow(choice, item, clock())
            if piece is None:
                return
            if piece.finish_reason is not None:
                self.last = choice
                self._unfinished -= 1
            if self._on_piece is not None:
                self._on_piece(choice, piece)
            if not self._unfinished:
                self._ended.set()
        except Exception as error:
            self._error = self._error or error
            self._ended.set()
            self._settled.set()

    def _grow(self, choice: ServedChoice, output: SequenceOutput, received_ns: int) -> Piece | None:
        """What an output adds to its choice; None while nothing can be sent."""
        if choice.finish_reason is None:
            piece = self._accept(choice, output, received_ns)
            if piece.finish_reason is not None and self._include_timings and not choice.engine_done:
                self._held[choice.index] = piece
                return None
            return piece
        if output.finish_reason is None:
            return None  # tokens that the engine made before it heard of the stop string
        self._settle_one(choice, output, received_ns)
        return self._held.pop(choice.index, None)

    def _failure(self, output: SequenceOutput) -> ApiError | None:
        """The error that answers a choice which ends like this; None where it is no failure."""
        said = output.error or ""
        match output.finish_reason:
            case "error":
                return request_failed(said or "the engine failed on this request")
            case "timeout":
                return unavailable(said or "it waited too long", "queue_timeout", 1, "rejected-ttl-expired")
            case "late":
                after_s = max(1, output.retry_after_s)
                return unavailable(
                    said or "its first token would be late", "deadline_unreachable", after_s, "rejected-saturated"
                )
            case "abort":
                return self._aborted or unavailable("the engine dropped this request", "aborted", 1)
        return None

    def _accept(self, choice: ServedChoice, output: SequenceOutput, received_ns: int) -> Piece:
        failure = None if output.finish_reason is None else self._failure(output)
        if failure is not None:
            self._failed = True
            self._settle_one(choice, output, received_ns)
            choice.finish_reason = output.finish_reason
            self._metrics.on_refused(failure, self.terms.service.name)
            raise failure
        stamps = choice.stamps
        piece = choice.take(output)
        detokenized_ns = clock()
        stamps.detokenizing_ns += detokenized_ns - received_ns
        if output.token_ids or output.vector is not None:
            if stamps.last_token_ns:
                self._metrics.by_class.gaps.add(self.terms.service.name, received_ns - stamps.last_token_ns)
            else:
                stamps.first_token_ns = received_ns
                self._place.had_output(choice.index // choice.params.n, received_ns)
            stamps.last_token_ns = received_ns
        elif output.handle is not None:
            self.handle, self.begun = output.handle, output.timings
        if output.finish_reason is not None:
            self._settle_one(choice, output, received_ns, detokenized_ns)
        elif piece.finish_reason is not None:
            self._engine.abort(output.request_id, output.index)
        return piece

    def _settle_one(
        self, choice: ServedChoice, output: SequenceOutput, received_ns: int, detokenized_ns: int | None = None
    ) -> None:
        choice.settle(output)
        self.handle = output.handle
        self._unsettled -= 1
        if not self._unsettled:
            self._settled.set()
        self._place.ended(received_ns)
        choice.stamps.received_ns = received_ns
        choice.stamps.detokenized_ns = detokenized_ns or received_ns

    async def _settle(self) -> None:
        """After the answer, wait for the last outputs of choices that a stop string ended, for the metrics."""
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                await self._settled.wait()
        except TimeoutError:
            pass
        finally:
            self._close()

    def _close(self) -> None:
        for leave in self._leaves:
            leave()
        self._leaves.clear()
        self._on_piece = self._error = None  # they know this object, too
        if len(self.choices) <= IN_ONE_TURN:
            self._count(self.choices)
        else:
            self._service.background(self._count_in_turns())

    async def _count_in_turns(self) -> None:
        for at in range(0, len(self.choices), IN_ONE_TURN):
            await self._service.pace.turn()
            self._count(self.choices[at : at + IN_ONE_TURN])

    def _count(self, choices: list[ServedChoice]) -> None:
        parent = parent_in(self._headers) if self._service.when_ended else None
        for choice in choices:
            phases_ns = _closed(choice)
            self._metrics.on_finish(choice, phases_ns, self.terms)
            if parent is not None:
                ended = self._ended_choice(parent, choice, phases_ns)
                for tell in self._service.when_ended:
                    tell(ended)

    def _ended_choice(self, parent: TraceParent, choice: ServedChoice, phases_ns: Mapping[Phase, int]) -> Ended:
        reason = choice.finish_reason or "abort"
        failed = self._failed or reason not in ("stop", "length", "abort")
        return Ended(
            parent,
            self.id,
            self._operation,
            self._service.settings.served_model_names[0],
            choice.index,
            reason,
            choice.stamps,
            choice.timings,
            {str(phase): length for phase, length in phases_ns.items()},
            len(choice.prompt.token_ids),
            choice.cached_tokens,
            choice.num_tokens,
            choice.params,
            self.terms,
            clock(),
            reason if failed else "",
            self._headers.get("x-request-id", ""),
        )


def _closed(choice: ServedChoice) -> Mapping[Phase, int]:
    """The closed ledger of a choice, without `send`; empty where the engine's part is not known."""
    if choice.timings is None:
        return {}
    return ChoiceTimings(choice.stamps, choice.timings, choice.num_tokens).ledger.phases_ns
