"""A request as it comes to the engine, and its sequences: one for each choice, from arrival to the last token."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from headway.policy.admission.lengths import context_left
from headway.policy.admission.tenants import DEFAULT_TENANT
from headway.policy.cache.handle import Handle
from headway.policy.cache.kv_groups import PASSED
from headway.policy.cache.prefix_index import PrefixMatch
from headway.policy.cache.swap import Handed, Swapped
from headway.policy.objectives.service_class import BUILT_IN, ClassTable, ServiceClass
from headway.policy.step.ledger import Ledger, Phase
from headway.policy.step.pooling import PoolingParams
from headway.policy.step.sampling_params import SamplingParams

NEVER = 2**62  # in nanoseconds: later than anything
# Share of an objective for the first token that is kept for the client's side of it: until the first byte is read here,
# and from the last write until it is there. In a server that refuses what it cannot serve, all are served just in time.
ON_THE_WIRE = 0.1


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"  # it waited longer than max_queue_time
    LATE = "late"  # its first token would have been late, and its class refuses such requests


class Status(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Resumed(msgspec.Struct, array_like=True, gc=False):
    """How far an engine process had got with a choice that its successor goes on with."""

    index: int
    token_ids: list[int]  # generated until now
    cached_tokens: int = 0  # prompt tokens that were found in the prefix cache then


class Request(msgspec.Struct, array_like=True, gc=False):
    """A prompt, already tokenized, and what is asked of it."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: list[int]
    priority: int = 0
    cache_salt: str = ""
    arrival_ns: int = 0  # when the server received it; decides order among equals
    sent_ns: int = 0  # when the API process handed it over; the engine's part of the ledger starts here
    seed: int | None = None  # for params that have none; drawn by the API process, so that it is the same when resumed
    resumed: list[Resumed] | None = None  # the choices to go on with; None begins all of them
    service_class: str = ""  # name of its class; empty for the default one
    ttft_ms: float = math.inf  # its own objectives, where they are tighter than those of its class
    tpot_ms: float = math.inf
    pins_prompt: bool = False  # its prompt's blocks stay in the pool for good; it has no objectives
    way_back_ns: int = 0  # what a token takes from the engine to the API process, in busy times
    tenant: str = DEFAULT_TENANT  # who it is charged to
    pooling: PoolingParams | None = None  # a vector is wanted of the prompt, and no tokens
    prediction: list[int] = []  # what the answer may say in parts; drafts are found in it
    hands_over: bool = False  # what is computed of its prompt is kept for another engine, which goes on with it
    handle: Handle | None = None  # what another engine has computed of its prompt
    adapter: str = ""  # digest of its adapter; empty for the base model

    @property
    def choices(self) -> list[Resumed]:
        """The choices that are to be computed."""
        return [Resumed(index, []) for index in range(self.params.n)] if self.resumed is None else self.resumed


@dataclass(slots=True)
class BlockTable:
    """A sequence's blocks in one KV cache group, in order of position."""

    first: int = 0  # the entry of the first block; a window has passed those before
    blocks: list[int] = field(default_factory=list)
    # The blocks of the first entries, which stay where a window has passed those behind them.
    sinks: list[int] = field(default_factory=list)

    @property
    def held(self) -> list[int]:
        """All its blocks, in order."""
        return self.sinks + self.blocks if self.sinks else self.blocks

    @property
    def end(self) -> int:
        """How many entries the table has, those before the first block included."""
        return self.first + len(self.blocks)

    def entries(self, start: int, end: int) -> list[int]:
        """The blocks of these entries, as far as it has them; PASSED for those that a window has passed."""
        first = self.first
        if start >= first:
            return self.blocks[start - first : end - first]
        return (self.sinks + [PASSED] * (first - len(self.sinks)))[start:end] + self.blocks[: max(0, end - first)]


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request. `tokens` is the prompt followed by what was generated so far.

    The prefix index keeps the list beyond the sequence's end, so tokens that are computed never change in it.

    `num_computed` tokens have their keys and values in the cache. A step gives the sequence a number of tokens to
    compute: a chunk of its prompt, or its newest token.
    """

    request_id: str
    index: int
    params: SamplingParams
    tokens: list[int]
    prompt_len: int
    max_len: int  # prompt plus output, never exceeded
    stop_ids: frozenset[int]  # ids that end it: the model's eos unless ignored, and stop_token_ids
    seed: int  # of this choice; draws depend on it and on the position alone
    priority: int = 0
    arrival_ns: int = 0
    service: ServiceClass = BUILT_IN.default_class
    tenant: str = DEFAULT_TENANT
    rank: int = 0  # of its class; 0 is the most urgent
    due_ns: int = NEVER  # its first token, by its objective
    tpot_ns: int = NEVER  # most time between two tokens, by its objective
    cache_salt: str = ""
    parent: Sequence | None = None  # first choice of the same request, whose prompt blocks this one shares
    ledger: Ledger = field(default_factory=Ledger)

    status: Status = Status.WAITING
    num_computed: int = 0
    tables: list[BlockTable] = field(default_factory=list)  # while it runs: one for each KV cache group
    cache_node: int = 0  # where the registered part of its tables ends in the prefix index
    room: int = 0  # tokens for which it has blocks that are its own from num_computed on; 0 is not known
    num_registered: int = 0  # blocks of each table that are in the prefix index, or were
    cached_tokens: int = 0  # prompt tokens found in the prefix cache when first admitted
    expected_len: int = 0  # of its prompt and its output, if that is as long as others of its class
    has_starved: bool = False  # it has waited so long that nobody goes before it
    work_ns: float = 0.0  # what is left of its prompt takes, as predicted some steps ago
    yielded: str = ""  # why others were put before it, and its first token is late: late, oversized or overload
    renewed_ns: int = 0  # when it has yielded: its first token is planned for then
    retry_after_s: int = 0  # when it was refused: after which time it might be served
    last_token_ns: int = 0  # when its newest token was known
    preemptions: int = 0
    steps: int = 0
    drafts: int = 0  # that were tried
    accepted_drafts: int = 0
    line: int = 0  # level at which it was admitted last, where tenants take turns
    charged: int = 0  # of its tokens, those that its tenant was charged
    passed_over: int = 0  # times that another tenant's came before it by turn, and after it by the policy
    passes: int = 0  # of these, while it waits: those that it is the last of its tenant to have had
    displacements: int = 0  # of its preemptions, those that gave its place to a better priority
    times_bypassed: int = 0
    prefix_match: PrefixMatch | None = None  # while it waits: what was found of its tokens in the prefix index
    checkpoint: int = -1  # until its first step: the slot of the state behind its computed tokens
    keeps_at: tuple[int, ...] = ()  # tokens of its prompt behind which its state, or what windows see, is to be kept
    rolling: int = 0  # node of the last checkpoint that was made while it decodes
    swapped: Swapped | None = None  # while it waits: what the host holds of it
    hands_over: bool = False
    handed: Handed | None = None  # what the host holds of its prompt for another engine
    named: tuple[int, bytes] = (0, b"")  # how many of its pages have a name for `offload`, and that of the last
    seq_id: int = 0  # its number at the scheduler, in order of arrival
    in_executor: bool = False  # a plan has told of it since it was last admitted
    clock_marks: dict[Phase, int] | None = None  # reading of the shared clock that this sequence lives on
    pins_prompt: bool = False
    seats: int = 1  # of max_num_seqs: those that it has, or takes when it is admitted
    is_unreserved: bool = False  # admission had no blocks in mind for all tokens that it computes again
    pooling: PoolingParams | None = None  # of one that ends with its prompt
    prediction: list[int] = field(default_factory=list)  # what its output may say in parts
    adapter: str = ""  # digest of its adapter; empty for the base model
    slot: int = -1  # of its adapter, while it runs
    slot_wanted_since: int = -1  # while it waits and lacks a slot: how many with adapters had been admitted before
    finish_reason: FinishReason | None = None

    def __lt__(self, other: Sequence) -> bool:
        """Whether it came before another, which decides between equal keys."""
        return self.seq_id < other.seq_id

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    def reason_to_end(self) -> FinishReason | None:
        """Why it ends with its newest token, or None when it goes on.

        Stop strings are found where tokens become text, and end a choice by an abort of its sequence.
        """
        params = self.params
        if self.tokens[-1] in self.stop_ids and (self.output_len > params.min_tokens or params.structured_outputs):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.max_len else None

    def logit_rows(self, start: int, count: int) -> int:
        """How many of `count` tokens after the first `start` need logits for prompt_logprobs: none of later choices."""
        if self.params.prompt_logprobs is None or self.index or self.output_len:
            return 0
        return max(0, min(start + count, self.prompt_len - 1) - start)

    @property
    def needs_every_token(self) -> bool:
        """Every token of the prompt is computed, whatever the prefix cache has: for its logits, or for the mean."""
        return self.logit_rows(0, self.prompt_len) > 0 or (self.pooling is not None and self.pooling.takes_all)

    @property
    def held_blocks(self) -> list[int]:
        """The blocks of all its tables, table by table."""
        if len(self.tables) == 1:
            return self.tables[0].held
        return [block for table in self.tables for block in table.held]

    @property
    def num_to_compute(self) -> int:
        """How many tokens are known but not yet in the cache."""
        return len(self.tokens) - self.num_computed

    @property
    def planned_ns(self) -> int:
        """When its first token is to be there: by its objective, or as planned when it yielded."""
        return self.renewed_ns or self.due_ns

    @property
    def has_yielded(self) -> bool:
        """It waits for a first token that is not promised any more."""
        return self.yielded != "" and self.output_len == 0

    @property
    def is_behind(self) -> bool:
        """It has no objective for its first token, or has yielded for so long that it will starve first."""
        if self.has_starved:
            return False
        return self.due_ns == NEVER or self.renewed_ns > self.arrival_ns + self.service.starvation_s * 1e9

    @property
    def is_decoding(self) -> bool:
        """Only its newest token is left to compute, and it has produced one."""
        known = len(self.tokens)
        return self.num_computed + 1 == known and known > self.prompt_len


def check(request: Request, max_model_len: int, vocab_size: int | None) -> None:
    """Refuse a request that would break a step that others share.

    Args:
        vocab_size: None where token ids are made up.

    Raises:
        ValueError: one line for the user.
    """
    known, least = len(request.prompt_token_ids), int(request.pooling is None)
    if not known:
        raise ValueError("the prompt is empty; give at least one token")
    if known + least > max_model_len:
        context_left(known, max_model_len, least)
    if request.resumed:
        known += max(len(choice.token_ids) for choice in request.resumed)
        if known + least > max_model_len:  # the engine that began the request had memory for more
            raise ValueError(
                f"{known} tokens are known, and the context is now {max_model_len}: there is no room to go on"
            )
    if vocab_size is None:
        return
    for name, ids in (
        ("prompt", request.prompt_token_ids),
        ("prediction", request.prediction),
        ("logit_bias", request.params.logit_bias),
        ("stop_token_ids", request.params.stop_token_ids),
        ("allowed_token_ids", request.params.allowed_token_ids or ()),
        ("token_ids", request.pooling.token_ids if request.pooling is not None else ()),
    ):
        for token in (min(ids), max(ids)) if ids else ():
            if not 0 <= token < vocab_size:
                raise ValueError(f"{name} has token id {token}; the model's vocabulary has ids 0 to {vocab_size - 1}")


def cache_key(salt: str, adapter: str) -> str:
    """What prefixes must have in common to be shared: a salt, and the digest of an adapter's weights and settings.

    No two pairs have the same key, whatever the salts are. The key of the base model is the salt, unless that begins
    as keys with adapters do.
    """
    if adapter:
        return f"\0{adapter}\0{salt}"
    return f"\0\0{salt}" if salt.startswith("\0") else salt


def sequences_of(request: Request, max_model_len: int, classes: ClassTable = BUILT_IN) -> list[Sequence]:
    """A sequence for each choice that is to be computed; the others share the prompt of the first.

    One whose class is no longer in the table is of the default class. The first token is due in the engine before it is
    due at the client: by the time that it takes to the API process, and by ON_THE_WIRE of the objective for what nobody
    here sees. That is never before half of its time.
    """
    ranked = {each.name: (rank, each) for rank, each in enumerate(classes.classes)}
    rank, service = ranked.get(request.service_class) or ranked.get(classes.default) or (0, classes.classes[0])
    ttft_ms, tpot_ms = min(service.ttft_ms, request.ttft_ms), min(service.tpot_ms, request.tpot_ms)
    if service.e2e_ms < math.inf:
        further = 0 if request.pooling is not None else (request.params.max_tokens or math.inf) - 1
        ttft_ms, tpot_ms = service.within_e2e(ttft_ms, tpot_ms, further)
    due_ns = NEVER
    if ttft_ms < math.inf and not request.pins_prompt:
        in_time_ns = (1 - ON_THE_WIRE) * ttft_ms * 1e6 - request.way_back_ns
        due_ns = request.arrival_ns + round(max(in_time_ns, ttft_ms * 0.5e6))
    params, prompt = request.params, request.prompt_token_ids
    seed, salt = (request.seed or 0) if params.seed is None else params.seed, request.cache_salt
    if request.adapter or salt.startswith("\0"):
        salt = cache_key(salt, request.adapter)
    longest = len(prompt) + (0 if request.pooling is not None else params.max_tokens or max_model_len)
    eos = request.eos_token_ids if params.ends_at_eos else ()
    choices = request.choices
    if params.use_beam_search:
        params, choices = params.for_beams(len({*eos, *params.stop_token_ids})), choices[:1]
    sequences: list[Sequence] = []
    for choice in choices:
        sequence = Sequence(
            request_id=request.request_id,
            index=choice.index,
            params=params,
            tokens=[*prompt, *choice.token_ids],
            prompt_len=len(prompt),
            max_len=min(max_model_len, longest),
            stop_ids=frozenset((*eos, *params.stop_token_ids)),
            seed=seed + choice.index,
            priority=request.priority,
            arrival_ns=request.arrival_ns,
            service=service,
            tenant=request.tenant,
            rank=rank,
            due_ns=due_ns,
            tpot_ns=NEVER if math.isinf(tpot_ms) else round(tpot_ms * 1e6),
            cache_salt=salt,
            parent=sequences[0] if sequences else None,
            cached_tokens=choice.cached_tokens,
            pins_prompt=request.pins_prompt,
            pooling=request.pooling,
            prediction=request.prediction,
            hands_over=request.hands_over,
            adapter=request.adapter,
        )
        sequence.ledger.began_ns = sequence.ledger.last_ns = request.sent_ns
        sequences.append(sequence)
    return sequences
