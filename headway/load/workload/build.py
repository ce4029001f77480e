"""Plans the requests of a run from its specification, before the first is sent.

The same specification and seed make the same workload, byte by byte.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from headway.load.errors import BenchError
from headway.load.request import PlannedRequest, Prompt, text_of
from headway.load.workload.datasets import Links, SampleRequest
from headway.load.workload.mix import MixClass, load_mix, options_beside_a_mix
from headway.load.workload.prompts import MadePrompt, PromptMaker, Texts, TokenSource
from headway.load.workload.schedule import (
    PROBES,
    Conversation,
    Part,
    Schedule,
    make_schedule,
    parts_of,
    with_cancellations,
)
from headway.load.workload.spec import WorkloadSpec
from headway.load.workload.synthetic import check_whole

Progress = Callable[[int, int], None]  # prompts made, prompts in all
MOST_TOKENS = 10_000_000  # most tokens of a prompt or an answer; more is an error in the file or the flag
PROGRESS_EVERY = 50
PROBE_INPUT, PROBE_OUTPUT = 32, 16  # tokens of a probe


@dataclass
class Workload:
    """The requests of a run."""

    description: str  # what is sent, for titles; arrivals: when
    arrivals: str
    # Requests by index, the turns of a conversation one after the other; first turns in order of time.
    requests: list[PlannedRequest]
    seed: int  # the seed that their prompts were made with
    notes: list[str] = field(default_factory=list)  # what was left out, clipped, repeated or estimated, a sentence each
    # The classes of a mix: name to objectives in ms (empty: the run's own); empty without a mix.
    classes: dict[str, dict[str, float]] = field(default_factory=dict)
    # The users of those classes of a mix that are closed loops, by name.
    users: dict[str, int] = field(default_factory=dict)

    @property
    def num_prompts(self) -> int:
        """Made for these requests, of which one may have several."""
        return sum(len(request.prompt.several or (None,)) for request in self.requests)

    @property
    def longest_tokens(self) -> int:
        """Prompt and answer of the longest request, to be compared with the model's context."""
        return max((request.prompt_tokens or 0) + request.output_tokens for request in self.requests)

    def fingerprint(self) -> str:
        """The same for the same requests at the same times, on any machine."""
        encoded = hashlib.sha256()
        for request in self.requests:
            encoded.update(msgspec.json.encode(_hashed_fields(request)))
        return encoded.hexdigest()[:16]


def build_workload(
    spec: WorkloadSpec,
    source: TokenSource,
    *,
    chat: bool,
    context: int | None = None,
    progress: Progress | None = None,
    texts: Texts | None = None,
) -> Workload:
    """Schedule a run.

    Args:
        source: makes the prompts.
        chat: requests go to /v1/chat/completions: conversations become messages.
        context: tokens that the model has room for, for lengths that were left open; None where it is not known.
        progress: called now and then while prompts are made.
        texts: the texts of a request, where nothing is generated; None where answers are.

    Raises:
        BenchError: a flag, a file or a combination that cannot be; one line.
    """
    _check(spec, source, chat)
    mix = load_mix(spec.mix) if spec.mix is not None else None
    if mix is not None and mix.has_own_arrivals:
        _check_alone(spec)
    parts = parts_of(spec, mix.classes if mix else (MixClass("", 1.0, spec),), source, context)
    schedule = make_schedule(spec, parts)
    if texts is not None:
        _check_texts(texts, schedule)
    clipped = _clip(schedule)
    schedule.conversations = with_cancellations(spec, parts, schedule.conversations)
    writer = _Writer(PromptMaker(source, spec.seed_of_prompts), len(parts), chat, texts)
    requests = writer.requests(schedule, progress)
    return Workload(
        description=": ".join(filter(None, (f"mix {mix.name}", mix.description)))
        if mix
        else parts[0].dataset.describe(),
        arrivals=_describe_arrivals(spec, parts, schedule),
        requests=requests,
        seed=spec.seed_of_prompts,
        notes=[note for part in parts for note in part.dataset.notes] + schedule.notes + clipped + writer.notes(),
        classes={each.name: each.objectives for each in mix.classes} if mix else {},
        users={
            part.of_class.name: part.of_class.load.users
            for part in parts
            if part.of_class.load is not None and part.of_class.load.users is not None
        },
    )


def _hashed_fields(request: PlannedRequest) -> dict[str, Any]:
    """The fields of a request. Later ones are left out if they are empty, so that fingerprints stay the same."""
    fields: dict[str, Any] = msgspec.to_builtins(request)
    for name in ("headers", "cancel_after_s", "tenant", "after", "not_before_s"):
        if not fields[name] and (name != "cancel_after_s" or fields[name] is None):
            del fields[name]
    del fields["graph"], fields["graph_size"]  # they follow from what waits for what
    if fields["prompt"]["several"] is None:
        del fields["prompt"]["several"]
    return fields


def warm_up_requests(
    workload: Workload, source: TokenSource, count: int, texts: Texts | None = None
) -> list[PlannedRequest]:
    """Requests to send before the first is measured: of the workload's median lengths, with prompts of their own.

    Args:
        source, texts: those that the workload was built with.
    """
    prompts = sorted(request.prompt_tokens or 1 for request in workload.requests if not request.parents)
    answers = sorted(request.output_tokens for request in workload.requests)
    maker = PromptMaker(source, workload.seed, made=workload.num_prompts)
    length = prompts[len(prompts) // 2]
    if texts is not None:
        length = texts.longest(length)
    make = functools.partial(maker.make, length)
    made = [make() if texts is None else texts.made(maker, make(), make) for _ in range(count)]
    return [
        PlannedRequest(index, each.prompt, each.tokens, answers[len(answers) // 2]) for index, each in enumerate(made)
    ]


def probe_requests(workload: Workload, source: TokenSource, rate: float, made: int) -> Iterator[PlannedRequest]:
    """Short requests without end, Poisson, so that they meet the server as it is over time; numbered from 0.

    Args:
        source: the one that the workload was built with.
        rate: per second.
        made: prompts made beside the workload's: they are unlike those too.
    """
    maker = PromptMaker(source, workload.seed, made=workload.num_prompts + made)
    rng = np.random.default_rng([workload.seed, PROBES])
    at_s = 0.0
    for index in itertools.count():
        at_s += rng.standard_exponential() / rate
        prompt = maker.make(PROBE_INPUT)
        yield PlannedRequest(index, prompt.prompt, prompt.tokens, PROBE_OUTPUT, arrival_s=at_s)


def _check(spec: WorkloadSpec, source: TokenSource, chat: bool) -> None:
    if chat and source.token_ids:
        raise BenchError("a chat cannot carry token ids; send texts, or use /v1/completions")
    check_whole("--seed", spec.seed, 0)
    if spec.num_prompts is not None:
        check_whole("--num-prompts", spec.num_prompts, 1)
    for flag, value in (("--duration", spec.duration_s), ("--time-scale", spec.time_scale)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise BenchError(f"{flag} is {value:g}; it must be a finite number above 0")
    if spec.users and spec.arrival is not None:
        raise BenchError(f"a closed loop has no arrival process, and one was given: {spec.arrival.describe()}")
    beside = options_beside_a_mix(spec) if spec.mix is not None else []
    if beside:
        raise BenchError(f"{beside[0]} and --mix both define the requests; leave one of the two out")


def _check_texts(texts: Texts, schedule: Schedule) -> None:
    for _, turns in schedule.conversations:
        if len(turns) > 1:
            raise BenchError("embeddings and scores have no answers that a conversation could go on from")
        if texts.count > 1 and turns[0].text is not None:
            raise BenchError("--random-batch-size needs made-up prompts; this dataset has texts of its own")


def _check_alone(spec: WorkloadSpec) -> None:
    """Raises BenchError where the command line says of all requests what each class of the mix says of its own."""
    if spec.arrival is not None or spec.users:
        raise BenchError(
            "the classes of the mix have arrivals of their own; leave out --request-rate and other arrivals, "
            "--max-concurrency, --sweep and --find-max-rate, or make all faster with --time-scale"
        )
    if spec.num_prompts is not None:
        raise BenchError(
            f"--num-prompts is {spec.num_prompts}, but the classes of the mix have arrivals of their own; set "
            "num_prompts in each class, or give --duration"
        )


def _describe_arrivals(spec: WorkloadSpec, parts: Sequence[Part], schedule: Schedule) -> str:
    own = [f"{part.of_class.name}: {part.of_class.load.describe()}" for part in parts if part.of_class.load]
    if own:
        return "; ".join(own) + (f"; {spec.time_scale:g}x as fast" if spec.time_scale != 1 else "")
    if spec.arrival is not None:
        return spec.arrival.describe()
    if schedule.recorded:
        return "as recorded" + (f", {spec.time_scale:g}x as fast" if spec.time_scale != 1 else "")
    return "closed loop"


def _clip(schedule: Schedule) -> list[str]:
    """Made-up prompts no longer than max_input_len, answers than max_output_len; what was done, a sentence each."""
    clipped: Counter[str] = Counter()
    kept: list[Conversation] = []
    for part, turns in schedule.conversations:
        kept.append((part, tuple(_clipped(part, request, clipped) for request in turns)))
    schedule.conversations = kept
    total = sum(len(turns) for _, turns in kept)
    notes = [f"{count} of {total} {what}" for what, count in clipped.items()]
    early = sum(turns[-1].ends_early for _, turns in kept)
    if early:
        notes.append(f"{early} of {len(kept)} conversations end early: one turn more, and the prompt were too long")
    if len(kept) < total:
        notes.append(f"arrivals are of conversations and single requests: {len(kept)} with {total} requests in all")
    return notes


def _clipped(part: Part, request: SampleRequest, clipped: Counter[str]) -> SampleRequest:
    longest, longest_answer = part.of_class.options.max_input_len, part.of_class.options.max_output_len
    if longest is not None and request.input_tokens > longest and request.text is None:
        clipped[f"prompts clipped to {longest} tokens"] += 1
        request = replace(request, input_tokens=longest)
    if longest_answer is not None and request.output_tokens > longest_answer:
        clipped[f"answers clipped to {longest_answer} tokens"] += 1
        request = replace(request, output_tokens=longest_answer)
    if max(request.input_tokens, request.output_tokens) > MOST_TOKENS:
        lengths = f"{request.input_tokens} tokens that ask for {request.output_tokens}"
        raise BenchError(f"a request has {lengths}; clip it with --max-input-len and --max-output-len")
    return request


@dataclass
class _Writer:
    """Makes the requests, and keeps count of prompts that are not as wanted."""

    maker: PromptMaker
    classes: int
    chat: bool
    texts: Texts | None = None
    made: int = 0
    flattened: int = 0
    off: list[int] = field(default_factory=list)

    def requests(self, schedule: Schedule, progress: Progress | None) -> list[PlannedRequest]:
        total = sum(len(turns) for _, turns in schedule.conversations)
        # Times are rounded to nanoseconds, because further digits depend on the machine's logarithm.
        times = np.round(schedule.times, 9).tolist()
        requests: list[PlannedRequest] = []
        told = 0
        for conversation, arrival_s in zip(schedule.conversations, times, strict=True):
            self._write(requests, conversation, None if math.isnan(arrival_s) else arrival_s)
            if progress is not None and (len(requests) >= told + PROGRESS_EVERY or len(requests) == total):
                progress(told := len(requests), total)
        return requests

    def _write(self, requests: list[PlannedRequest], conversation: Conversation, arrival_s: float | None) -> None:
        part, turns = conversation
        first, said = len(requests), list[int]()  # tokens of each turn's prompt and answer
        for turn, request in enumerate(turns):
            links = request.links or Links(turn - 1 if turn else None)
            before = 0 if links.follows is None else said[links.follows]
            made = self._prompt(part, request, links.follows is not None, len(turns))
            tokens = None if made.tokens is None else before + made.tokens
            answer = request.output_tokens if self.texts is None else 0
            is_first = links.follows is None and not links.after
            requests.append(
                PlannedRequest(
                    index=first + turn,
                    prompt=made.prompt,
                    prompt_tokens=tokens,
                    output_tokens=answer,
                    class_name=part.of_class.name,
                    arrival_s=arrival_s if is_first else None,
                    follows=None if links.follows is None else first + links.follows,
                    after=tuple(first + place for place in links.after),
                    graph=first if len(turns) > 1 else None,
                    graph_size=len(turns),
                    think_s=request.think_s,
                    not_before_s=request.not_before_s,
                    extra_body={**part.of_class.extra_body, **request.extra_body},
                    headers=dict(part.of_class.headers),
                    cancel_after_s=request.cancel_after_s,
                    tenant=request.tenant or part.of_class.tenant,
                )
            )
            said.append((tokens or 0) + answer)

    def _prompt(self, part: Part, request: SampleRequest, continues: bool, turns: int) -> MadePrompt:
        make = functools.partial(self._one_prompt, part, request, continues, turns)
        return make() if self.texts is None else self.texts.made(self.maker, make(), make)

    def _one_prompt(self, part: Part, request: SampleRequest, continues: bool, turns: int) -> MadePrompt:
        if request.messages:
            made = self.maker.source.of_text("\n".join(map(text_of, request.messages)))
            if self.chat:
                return MadePrompt(Prompt(messages=request.messages), made.tokens)
            self.flattened += 1
        elif request.text is not None:
            made = self.maker.source.of_text(request.text)
        else:
            # Classes do not share blocks, whatever their ids.
            shared = [(block * self.classes + part.number, length) for block, length in request.shared]
            made = self.maker.make(request.input_tokens, shared, continues=continues)
            self.made += 1
            if made.tokens is not None and made.tokens != request.input_tokens:
                self.off.append(abs(made.tokens - request.input_tokens))
        if turns == 1:
            return made
        said = made.prompt.text or ""
        if self.chat:
            return MadePrompt(Prompt(messages=({"role": "user", "content": said},)), made.tokens)
        # This text follows an answer, whose last word must not run into its first word.
        return MadePrompt(Prompt(text=said if not continues or said.startswith(" ") else " " + said), made.tokens)

    def notes(self) -> list[str]:
        notes = []
        if self.flattened:
            notes.append(f"{self.flattened} prompts are messages; their texts alone are used, as in /v1/completions")
        if self.maker.source.estimates and self.made:
            what = "stretches of a text" if self.maker.source.is_text else "everyday words"
            return [*notes, f"prompts are {what} and their lengths estimates; the server's usage says the real ones"]
        if self.off:
            how_far = f"up to {max(self.off)} tokens off"
            notes.append(f"{len(self.off)} of {self.made} prompts are not exactly as long as wanted: {how_far}")
        return notes
