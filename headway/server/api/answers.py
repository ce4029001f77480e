"""What completions and chat completions share: they turn a generation into a body or a stream of chunks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headway.engine.messages import TokenLogprobs, of_prompt
from headway.outputs.choices import Piece
from headway.policy.step.ledger import Phase
from headway.server.api.choices import LOWEST_LOGPROB, ScoredToken, ServedChoice
from headway.server.api.handover import parameters_of
from headway.server.api.schemas import GenerationBody
from headway.server.edge.streaming import DONE, EventWriter, event
from headway.server.generation import Generation, clock
from headway.server.timings import ChoiceTimings, with_timings
from headway.text.tokenizer import Tokenizer

encode = msgspec.json.encode
ENTRIES_OF_A_TOKEN = 10
_MARK = "\0"  # stands for the text of a chunk that is encoded once for all
# A thread that writes for milliseconds on end would hold up the event loop by 5 ms at a time (sys.getswitchinterval).
TOKENS_BETWEEN_PAUSES, PAUSE_S = 128, 2e-5


def written(entries: Iterable[Any]) -> list[msgspec.Raw]:
    """Each entry encoded as JSON, with pauses for the event loop; to encode the list then only copies them."""
    done = []
    for number, entry in enumerate(entries, 1):
        done.append(msgspec.Raw(encode(entry)))
        if number % TOKENS_BETWEEN_PAUSES == 0:
            time.sleep(PAUSE_S)
    return done


def logprob_entries(
    tokens: Iterable[ScoredToken], tokenizer: Tokenizer, num_top: int, as_ids: bool = False
) -> Iterator[dict[str, Any]]:
    """Tokens with their log-probabilities and `num_top` alternatives, as chats and responses have them.

    Args:
        as_ids: they are named by their ids.
    """

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        name = f"token_id:{token_id}" if as_ids else raw.decode(errors="replace")
        return {"token": name, "logprob": logprob, "bytes": list(raw)}

    for token in tokens:
        yield {**one(token.token_id, token.logprob), "top_logprobs": [one(*each) for each in token.top[:num_top]]}


class _Whole(Response):
    """An answer in one piece; it tells when it was handed to the connection, in time.monotonic_ns()."""

    media_type = "application/json"

    def __init__(self, encoded: bytes, headers: dict[str, str], when_sent: Callable[[int], None]) -> None:
        super().__init__(encoded, headers=headers)
        self._when_sent = when_sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)
        self._when_sent(clock())


async def in_one_piece(
    generation: Generation, num_entries: Callable[[], int], render: Callable[[], bytes], timed: bool
) -> Response:
    """The answer when all choices are finished: `render` gives its JSON. Raises what Generation.run() raises.

    Args:
        num_entries: how much there is to write.
        timed: the answer has `timings`.
    """
    await generation.run()
    encoded, headers = await generation.render(num_entries(), render), {}
    timings = generation.timings() if timed else None
    if timings is not None:
        encoded = with_timings(encoded, timings, clock)
        headers["server-timing"] = timings.as_header()

    def sent(now_ns: int) -> None:
        for choice in generation.choices:
            generation.sent(choice, True, True, now_ns)

    return _Whole(encoded, headers, sent)


class Shaped(ABC):
    """Gives a generation the shape of an API's answers.

    Attributes:
        timed: an answer in one piece has `timings`.
    """

    timed = False

    def __init__(self, generation: Generation) -> None:
        self.generation = generation

    async def whole(self) -> Response:
        """The answer in one piece, when all choices are finished. Raises what Generation.run() raises."""
        return await in_one_piece(self.generation, self._num_entries, self._render, self.timed)

    def _num_entries(self) -> int:
        """How many entries there are to write: alternatives, and a few more for each token that has them."""
        return sum(
            len(choice.logprobs) * ((choice.params.logprobs or 0) + ENTRIES_OF_A_TOKEN)
            + len(choice.prompt.token_ids) * ((choice.params.prompt_logprobs or 0) + ENTRIES_OF_A_TOKEN)
            for choice in self.generation.choices
            if choice.params.logprobs is not None or choice.params.prompt_logprobs is not None
        )

    @abstractmethod
    def _render(self) -> bytes:
        """The answer in one piece, as JSON."""

    @abstractmethod
    async def events(self, writer: EventWriter) -> None:
        """Push server-sent events. Raises what Generation.run() raises before the first of them."""


class Answer(Shaped):
    """The shape of completions and chat completions.

    Attributes:
        id_prefix, whole_object, chunk_object: what OpenAI calls the answer and its chunks.
    """

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, generation: Generation, body: GenerationBody, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(generation)
        self.tokenizer = tokenizer
        self.with_token_ids = bool(body.return_token_ids)
        self.timed = body.include_timings
        self._with_prompt_logprobs = body.prompt_logprobs is not None
        self._written: dict[int, list[msgspec.Raw]] = {}  # id(prompt) -> its prompt_logprobs
        self._opened: set[int] = set()  # choices of which an event was pushed
        self._begun: dict[int, tuple[bytes, bytes] | None] = {}  # choices of which a piece was, to their _around_text()
        self._left = len(generation.choices)  # choices whose end was not pushed yet
        self._last: tuple[ServedChoice, bytes] | None = None  # the last chunk, without its timings
        options = body.stream_options
        self._usage_at_end = options is not None and options.include_usage
        self._usage_always = options is not None and options.continuous_usage_stats
        self._head = {
            "id": f"{self.id_prefix}-{generation.id}",
            "created": int(time.time()),
            "model": model,
            "service_tier": generation.terms.service_tier,
        }

    # --- the shapes ---------------------------------------------------------------------------------

    @abstractmethod
    def opening(self, choice: ServedChoice) -> list[dict[str, Any]]:
        """Entries of `choices` that go before the first piece of a choice, each as a chunk of its own."""

    @abstractmethod
    def growth(self, choice: ServedChoice, piece: Piece) -> dict[str, Any]:
        """The entry of `choices` for one piece."""

    @abstractmethod
    def entire(self, choice: ServedChoice) -> dict[str, Any]:
        """The entry of `choices` of an answer in one piece."""

    def entry(
        self,
        choice: ServedChoice,
        content: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        of: Piece | ServedChoice | None = None,
    ) -> dict[str, Any]:
        """An entry of `choices` for a piece or a whole choice; with neither, for a choice that has no token yet."""
        entry = {
            "index": choice.index,
            **content,
            "logprobs": logprobs,
            "finish_reason": of and of.finish_reason,
            "stop_reason": of and of.stop_reason,
        }
        return entry | ({"token_ids": of.token_ids if of else []} if self.with_token_ids else {})

    def opening_extras(self) -> dict[str, Any]:
        """Further keys of the chunks that opening() makes."""
        return {}

    def extras(self) -> dict[str, Any]:
        """Further keys of an answer in one piece."""
        return {}

    def usage(self) -> dict[str, Any]:
        """Token counts so far."""
        return self.generation.usage()

    # --- in one piece -------------------------------------------------------------------------------

    def _render(self) -> bytes:
        generation = self.generation
        return encode(
            {
                **self._head,
                "object": self.whole_object,
                "choices": [self.entire(choice) for choice in generation.choices],
                "usage": self.usage(),
                **self.extras(),
                **({"kv_transfer_params": parameters_of(generation.handle)} if generation.hands_over else {}),
            }
        )

    # --- in chunks ----------------------------------------------------------------------------------

    async def events(self, writer: EventWriter) -> None:
        """Push server-sent events, the last of them [DONE]. Raises what Generation.run() raises."""
        await self.generation.run(partial(self._grow_handed if self.generation.hands_over else self._grow, writer))
        if self._last is not None:
            await self._push_timed(writer, *self._last)
        if self._usage_at_end:
            writer.push(event(encode({**self._chunk(None), "usage": self.usage()})))
        writer.push(DONE)

    def _grow(self, writer: EventWriter, choice: ServedChoice, piece: Piece) -> None:
        """Push the events for one piece; the last one waits for its timings, if it has some."""
        if choice.index not in self._opened:
            self._open(writer, choice)
        if not self._is_worth_sending(piece):
            return
        is_last = piece.finish_reason is not None
        around = self._begun.get(choice.index)
        if around is not None and not is_last:
            return writer.push(around[0] + encode(piece.text) + around[1])
        self._left -= is_last
        encoded = encode(self._chunk(self.growth(choice, piece)))
        if self.timed and not self._left:
            self._last = choice, encoded
        else:
            self._push(writer, choice, is_last, encoded)

    def _grow_handed(self, writer: EventWriter, choice: ServedChoice, piece: Piece) -> None:
        """Do as _grow(), and before, with each chunk of a prompt that is handed over, tell what names it."""
        generation = self.generation
        engine = choice.timings or generation.begun
        if engine is not None:
            timings = ChoiceTimings(choice.stamps, engine, 0)
            timings.ledger.mark(Phase.TRANSPORT, clock())
            phases = {str(phase): length for phase, length in timings.ledger.phases_ns.items()}
            told = {"kv_transfer_params": parameters_of(generation.handle), "phases_ns": phases}
            writer.push(event(encode({**self._chunk(None), **told})))
        self._grow(writer, choice, piece)

    def _open(self, writer: EventWriter, choice: ServedChoice) -> None:
        self._opened.add(choice.index)
        for entry in self.opening(choice):
            writer.push(event(encode({**self._chunk(entry), **self.opening_extras()})))

    def _push(self, writer: EventWriter, choice: ServedChoice, is_last: bool, encoded: bytes) -> None:
        is_first = choice.index not in self._begun
        if is_first or is_last:
            writer.when_sent(partial(self.generation.sent, choice, is_first, is_last))
        writer.push(event(encoded))
        if is_first:
            self._begun[choice.index] = self._around_text(choice)

    def _around_text(self, choice: ServedChoice) -> tuple[bytes, bytes] | None:
        """What chunks of a choice have before and after the text; None where they differ in more than the text."""
        if self._usage_always or self.with_token_ids or choice.params.logprobs is not None:
            return None
        chunk = event(encode(self._chunk(self.growth(choice, Piece(_MARK, [])))))
        before, _, after = chunk.rpartition(encode(_MARK))
        return before, after

    def _is_worth_sending(self, piece: Piece) -> bool:
        """Whether a piece has news. A token adds no text as part of a character, or of a possible stop string."""
        return bool(piece.text or piece.finish_reason or piece.logprobs or (self.with_token_ids and piece.token_ids))

    def _chunk(self, entry: dict[str, Any] | None) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_object, "choices": [] if entry is None else [entry]}
        if self._usage_always:
            chunk["usage"] = self.usage()
        elif self._usage_at_end:
            chunk["usage"] = None
        return chunk

    async def _push_timed(self, writer: EventWriter, choice: ServedChoice, encoded: bytes) -> None:
        """Push the last chunk, with timings. They are made when the client has taken all chunks before it."""
        timings = self.generation.timings()
        if timings is not None:
            timings.ledger.mark(Phase.SEND, clock())
            if not writer.is_drained:
                await writer.drained()
                timings.ledger.mark(Phase.SEND_BLOCKED, clock())
            encoded = with_timings(encoded, timings, clock)
        self._push(writer, choice, True, encoded)

    # --- log-probabilities --------------------------------------------------------------------------

    def prompt_logprobs(self, choice: ServedChoice) -> list[msgspec.Raw]:
        """vLLM's `prompt_logprobs`: for each prompt token but the first, token id to its log-probability."""
        key = id(choice.prompt)
        if key not in self._written:
            found = self.found_prompt_logprobs(choice)
            self._written[key] = written(
                None if one is None else self._by_token_id(token_id, one)
                for token_id, one in zip(choice.prompt.token_ids, found, strict=True)
            )
        return self._written[key]

    def found_prompt_logprobs(self, choice: ServedChoice) -> list[TokenLogprobs | None]:
        """An entry for each token of the prompt. The engine reports them with the prompt's first choice."""
        sharing = (other for other in self.generation.choices if other.prompt is choice.prompt)
        found = next((other.prompt_logprobs for other in sharing if other.prompt_logprobs is not None), None)
        return [None] * len(choice.prompt.token_ids) if found is None else of_prompt(found)

    def _by_token_id(self, token_id: int, found: TokenLogprobs) -> dict[str, Any]:
        entries = {
            other: (logprob, rank)
            for rank, (other, logprob) in enumerate(zip(found.top_ids, found.top_logprobs, strict=True), 1)
        }
        entries[token_id] = (found.logprob, found.rank)
        return {
            str(one): {
                "logprob": max(logprob, LOWEST_LOGPROB),
                "rank": rank,
                "decoded_token": self.tokenizer.token_text(one),
            }
            for one, (logprob, rank) in entries.items()
        }
