"""The protocol between the API process and the engine process.

Messages are msgspec structs in MessagePack, one to a frame (engine.frames). Times are time.monotonic_ns(), which
on Linux is one clock for all processes. The engine answers Configure with Progress messages, then Ready
or Failed; afterwards each step yields at most one EngineOutputs.
"""

from __future__ import annotations

import msgspec

from headway.engine.config import EngineConfig
from headway.policy.cache.handle import Handle
from headway.policy.objectives.service_class import ClassTable
from headway.policy.step.request import Request
from headway.policy.step.scheduler_config import StepLimits

PROTOCOL_VERSION = 11


class _Message(msgspec.Struct, tag=True, array_like=True, gc=False):
    pass


# --- API process to engine --------------------------------------------------------------------------


class Configure(_Message):
    """What the engine reads from its standard input; it refuses another protocol version."""

    config: EngineConfig
    protocol: int = PROTOCOL_VERSION


class AddRequest(Request, tag=True):
    """A request to run. Choice i of it is named (request_id, i) in outputs."""


class AbortRequest(_Message):
    request_id: str
    index: int = -1  # one choice, or -1 for all of them


class SetClasses(_Message):
    """Sets the classes of new requests, the weights of tenants, and what a step may hold; None leaves the latter."""

    classes: ClassTable
    weights: dict[str, float]
    limits: StepLimits | None = None


class LoadAdapter(_Message):
    """Asks for the adapter in a folder; the answer is an AdapterFound."""

    name: str
    path: str


class DropAdapter(_Message):
    """An adapter is not asked for by its name any more."""

    digest: str


class Explain(_Message):
    """Asks for the last steps, at most so many that were decided after a time; the answer is an Explanation."""

    most: int
    after_ns: int = 0
    most_sequences: int = 0  # how many of the sequences are told of, those that run first
    with_parts: bool = False  # whether steps have their times and parts
    with_words: bool = True  # whether steps have their reasons, which are long in a crowd
    kernels: bool | None = None  # whether kernels are timed from now on; None leaves it as it is
    with_memory: bool = False  # whether it says what allocators hold


class Shutdown(_Message):
    pass


# --- engine to API process --------------------------------------------------------------------------


class Progress(_Message):
    stage: str
    elapsed_ns: int


class AdapterFound(_Message):
    """An adapter, or why there is none: one line for the user."""

    name: str
    path: str
    digest: str = ""  # of its weights and settings
    rank: int = 0  # the greatest of its layers
    num_bytes: int = 0  # in the host's memory
    error: str = ""


class Ready(_Message):
    protocol: int
    startup_ns: dict[str, int]  # stage of start-up -> nanoseconds
    num_blocks: int
    block_size: int
    max_model_len: int
    device: str
    kv_cache_dtype: str  # what auto came to
    max_num_seqs: int  # sequences that run at once
    pool_tokens: int  # tokens that the KV pool holds
    pinned_blocks: int = 0  # blocks of preloaded prompts
    left_out: list[str] = []  # why prompts were not preloaded, a line for each
    checkpoints: int | None = None  # slots for states of prefixes; None for a model without recurrent layers
    generates: bool = True  # the model has an output layer
    kernels: str = ""  # which of several were chosen by measuring, for people
    block_bytes: int = 0  # bytes of a KV block in all layers
    kept_bytes: int = 0  # bytes of packed weights that are being written to the cache
    draft_block_bytes: int = 0  # bytes of a block of the draft model's KV cache, if there is one
    roofline: str = ""  # the calibrated machine by which steps have a least time; empty for none
    adapters: list[AdapterFound] = []  # those of lora_modules


class Failed(_Message):
    """The engine could not start, or cannot go on; `message` is one line for the user."""

    message: str


class TokenLogprobs(_Message):
    """Log-probability of the chosen token and of the likeliest alternatives, likeliest first."""

    logprob: float
    rank: int  # 1 is the likeliest
    top_ids: list[int]
    top_logprobs: list[float]


class PromptLogprobs(_Message):
    """TokenLogprobs of T consecutive prompt tokens, packed: a long prompt has hundreds of thousands of numbers."""

    top: int  # alternatives of each token
    integers: bytes  # int32 [T, 1 + top]: rank, and ids of the likeliest alternatives
    reals: bytes  # float32 [T, 1 + top]: log-probability, and those of the alternatives

    def unpack(self) -> list[TokenLogprobs]:
        integers, reals = memoryview(self.integers).cast("i"), memoryview(self.reals).cast("f")
        width = 1 + self.top
        return [
            TokenLogprobs(
                reals[at], integers[at], list(integers[at + 1 : at + width]), list(reals[at + 1 : at + width])
            )
            for at in range(0, len(integers), width)
        ]


def of_prompt(parts: list[PromptLogprobs]) -> list[TokenLogprobs | None]:
    """One entry for each token of a prompt; the first token has none."""
    return [None, *(entry for part in parts for entry in part.unpack())]


class SequenceTimings(_Message):
    """The engine's part of a choice's ledger: nanoseconds from AddRequest.sent_ns to ended_ns, summing exactly.

    When an engine process has died, the next adds to the phases; `steps` and `preemptions` are those of the last.
    """

    phases_ns: dict[str, int]
    ended_ns: int
    steps: int
    preemptions: int
    yielded: str = ""  # why others were put before it: late, oversized or overload
    passed_over: int = 0  # times that it was another tenant's turn


class SequenceOutput(_Message):
    request_id: str
    index: int
    token_ids: list[int]  # new tokens since the last output
    finish_reason: str | None = None  # stop | length | abort | error | late | timeout
    stop_token_id: int | None = None  # the stop or eos token that ended it, which is also the last of token_ids
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    logprobs: list[TokenLogprobs] | None = None  # one for each of token_ids
    prompt_logprobs: list[PromptLogprobs] | None = None  # in order, with the first output only
    timings: SequenceTimings | None = None  # with the last output, for finished choices; so far, where it has a handle
    error: str | None = None  # with finish_reason "error", "late" and "timeout": what happened, for the user
    retry_after_s: int = 0  # with finish_reason "late": when there should be room
    drafts: int = 0  # that were tried for it until now
    accepted_drafts: int = 0
    vector: bytes | None = None  # the vector of a request with pooling: float32, with the last output
    handle: Handle | None = None  # of a request that hands over, with each chunk and its last output


class EngineStats(_Message):
    """State after a step, for metrics. Counters are increments since the last message."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float  # share of blocks referenced by sequences, 0..1
    step_ns: int = 0
    prompt_tokens: int = 0  # prompt tokens computed
    generation_tokens: int = 0
    prefix_cache_queries: int = 0  # tokens looked up
    prefix_cache_hits: int = 0  # tokens found
    preemptions: int = 0
    scheduled_tokens: int = 0
    received: int = 0  # requests that have reached the engine since its start
    stall_ns: dict[str, int] = {}  # cause -> nanoseconds of all sequences of this step
    scheduled_sequences: int = 0
    predicted_ns: float = 0.0  # predicted time of the step's forward pass; 0 where nothing is predicted as yet
    forward_ns: int = 0  # measured time of the forward pass
    slack_ns: float = 0.0  # time that promised tokens had left when the step was decided; 0 where none is promised
    left_out: int = 0  # decoding sequences without a promise that got no token
    windows: int = 0  # windows that were opened, in which an idle engine waits for more requests
    running_of_class: dict[str, int] = {}
    waiting_of_class: dict[str, int] = {}
    protected_blocks: int = 0  # blocks whose contents are given up last, or never
    watermark_blocks: int = 0  # blocks that admission leaves free
    blocks_of_class: dict[str, int] = {}  # blocks in use; those of several classes under an empty name
    evictions: dict[str, dict[str, int]] = {}  # class -> reason -> cached blocks that were given up
    queries_of_class: dict[str, int] = {}  # prompt tokens looked up
    hits_of_class: dict[str, int] = {}  # prompt tokens found
    allocated_blocks: int = 0
    allocated_runs: int = 0  # runs of consecutive blocks that the allocated ones make in block tables
    swaps: dict[str, int] = {}  # what HostPool counts: tokens, decisions and predicted nanoseconds
    adapters: dict[str, int] = {}  # what AdapterSlots counts: hits, misses and loads
    adapter_slots_used: int = 0
    swap_usage: float = 0.0  # share of the host's blocks in use, 0..1
    fairness_lead: float = 0.0  # most tokens that a tenant was ahead of another that waited, by weight
    fairness_bound: float = 0.0  # most tokens that it could have been ahead
    least_ns: float = 0.0  # what the machine would need at least for the forward pass; 0 where that is not known
    longest_step_ns: float = 0.0  # what any step is predicted to take at most; 0 where nothing is predicted as yet
    moe_mixtures: int = 0  # times that a layer's experts were asked
    moe_expert_tokens: int = 0  # pairs of a token and an expert that it went to
    moe_experts_touched: int = 0  # experts that had any token
    moe_busiest_expert_tokens: int = 0  # tokens of the expert that had most
    spec_decode_num_drafts: int = 0  # sequences that tried drafts
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    drafts_of_kind: dict[str, list[int]] = {}  # kind -> drafts that were tried, and accepted
    accepted_at: list[int] = []  # how many sequences accepted their first draft, their second one, and so on


class StepPart(_Message):
    """A sequence's part of a step."""

    seq_id: int
    request_id: str  # empty where it began before the steps that are told of, and has ended
    start: int  # tokens that were computed before
    tokens: int
    decoding: bool


class ExplainedStep(_Message):
    """A step with its reasons. Times that are not known are 0."""

    planned_ns: int
    words: str  # one line
    decoding: int = 0  # sequences that decoded
    prompt_tokens: int = 0
    took_ns: int = 0  # measured time of the forward pass
    predicted_ns: float = 0.0
    least_ns: float = 0.0  # what the machine would need at least; told of one step in sixteen
    launched_ns: int = 0
    computed_ns: int = 0
    sampled_ns: int = 0
    waiting: int = 0
    running: int = 0
    parts: list[StepPart] = []


class LiveSequence(_Message):
    """A choice in the engine as it is now."""

    request_id: str
    index: int
    service_class: str
    arrival_ns: int
    phase: str  # where it is: a phase of the ledger
    phases_ns: dict[str, int]  # the engine's part of its ledger until now
    prompt_len: int
    computed: int  # of its tokens
    tokens: int  # generated
    blocks: int
    slack_ns: int | None  # until its next token is due, by its objective; None without one


class Explanation(_Message):
    """The last steps and the reasons for them, the newest last; and who is in them, where that was asked for."""

    steps: list[ExplainedStep]
    sequences: list[LiveSequence] = []
    cached_blocks: int = 0  # that nobody uses, but whose contents are kept
    kernels: list[tuple[str, int, int]] = []  # with parts: names, begin and end of the kernels that were timed
    allocators: dict[str, int] = {}  # bytes by allocator and state


class EngineOutputs(_Message):
    outputs: list[SequenceOutput]
    stats: EngineStats
    made_ns: int  # when the engine sent it


ToEngine = Configure | AddRequest | AbortRequest | SetClasses | LoadAdapter | DropAdapter | Explain | Shutdown
FromEngine = Progress | Ready | Failed | EngineOutputs | Explanation | AdapterFound
