"""A request's life as a chain of contiguous phases in integer nanoseconds.

The chain closes by construction: every entry runs from the end of the one before it, so the phases sum
to the time between the first and the last mark exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Phase(StrEnum):
    """What a nanosecond of a request was spent on."""

    # API process, before the engine
    RECEIVE = "receive"  # reading, parsing and checking the request
    GRAMMAR = "grammar"  # checking the grammar of a structured output, and in the engine compiling it
    TOKENIZE = "tokenize"  # chat template and tokenizer
    # engine process
    TRANSPORT = "transport"  # between the processes, in either direction
    KV_TRANSFER = "kv_transfer"  # keys and values on their way from the server that has computed the prompt
    QUEUE_POLICY = "queue_policy"  # waiting: others go first by priority or objective, or the first choice
    QUEUE_CAPACITY = "queue_capacity"  # waiting: max_num_seqs or the step's token budget is used up
    QUEUE_BLOCKS = "queue_blocks"  # waiting: not enough free KV blocks
    QUEUE_WINDOW = "queue_window"  # waiting: an idle engine waits for more requests
    QUEUE_ADAPTER = "queue_adapter"  # waiting: for a slot for its adapter, and until that is loaded
    SCHEDULE = "schedule"  # bookkeeping between steps
    PREFILL_COMPUTE = "prefill_compute"
    PREFILL_STALL = "prefill_stall"  # in the batch, waiting on others' work or for its next chunk
    DECODE_COMPUTE = "decode_compute"
    DRAFT = "draft"  # making drafts, its own and those of others, before steps in which it decoded
    VERIFY = "verify"  # what drafts, its own and those of others, added to steps in which it decoded
    DECODE_STALL_PREFILL = "decode_stall_prefill"  # waited for someone else's prefill
    DECODE_STALL_LOGPROBS = "decode_stall_logprobs"  # waited for the log-probabilities of someone else's prompt
    DECODE_STALL_PREEMPTED = "decode_stall_preempted"  # out of the batch after a preemption
    DECODE_STALL_RECOMPUTE = "decode_stall_recompute"  # computing again what a preemption threw away
    DECODE_STALL_POLICY = "decode_stall_policy"  # left out of steps for those who have an objective
    SAMPLING = "sampling"
    STEP_RETRY = "step_retry"  # a step that failed and was run again in parts
    # API process, when the engine process died and the next one went on with the request
    ENGINE_LOST = "engine_lost"  # spent in the engine that died, with its account
    ENGINE_RESTART = "engine_restart"  # from there until the request was handed to the next one
    # a gateway, in front of whatever the phases above are told of
    ROUTE = "route"  # choosing a backend and connecting to it, and attempts that gave nothing
    NETWORK = "network"  # on the way to the backend and back
    BACKEND = "backend"  # in a backend that does not tell its phases, and on the way there and back
    # API process, after the engine
    DETOKENIZE = "detokenize"
    SEND = "send"
    SEND_BLOCKED = "send_blocked"  # the client did not read


QUEUE_PHASES = (Phase.QUEUE_POLICY, Phase.QUEUE_CAPACITY, Phase.QUEUE_BLOCKS, Phase.QUEUE_WINDOW, Phase.QUEUE_ADAPTER)
DECODE_STALLS = (
    Phase.DECODE_STALL_PREFILL,
    Phase.DECODE_STALL_LOGPROBS,
    Phase.DECODE_STALL_POLICY,
    Phase.DECODE_STALL_PREEMPTED,
    Phase.DECODE_STALL_RECOMPUTE,
)


class Ledger:
    """Contiguous phases from `began_ns` to `last_ns`."""

    __slots__ = ("began_ns", "last_ns", "phases_ns")

    def __init__(self, began_ns: int = 0) -> None:
        self.began_ns = began_ns
        self.last_ns = began_ns
        self.phases_ns: dict[Phase, int] = {}

    def mark(self, phase: Phase, now_ns: int) -> None:
        """The time from the last mark to now was spent in `phase`. A clock that stands still adds nothing."""
        if now_ns > self.last_ns:
            self.phases_ns[phase] = self.phases_ns.get(phase, 0) + now_ns - self.last_ns
            self.last_ns = now_ns

    def mark_parts(self, parts: Mapping[Phase, int], since: Mapping[Phase, int] = {}) -> None:
        """Append phases of known length, in order; where they have grown, only by what was added `since`."""
        for phase, until_ns in parts.items():
            length_ns = until_ns - since.get(phase, 0)
            if length_ns > 0:
                self.phases_ns[phase] = self.phases_ns.get(phase, 0) + length_ns
                self.last_ns += length_ns

    def tell_apart(self, phase: Phase, length_ns: int, parts: Mapping[Phase, int]) -> None:
        """So much of the time of a phase was spent on these, in proportion. Nothing changes where there are none."""
        left_ns, total = max(0, min(length_ns, self.phases_ns.get(phase, 0))), sum(parts.values())
        for part, share in parts.items():
            if share > 0:
                taken_ns = left_ns * share // total
                left_ns, total = left_ns - taken_ns, total - share
                self.phases_ns[phase] -= taken_ns
                self.phases_ns[part] = self.phases_ns.get(part, 0) + taken_ns

    @property
    def total_ns(self) -> int:
        return self.last_ns - self.began_ns
