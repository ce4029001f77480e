"""A choice that has ended, as those are told of it who trace, log or show requests."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

from headway.engine.messages import SequenceTimings
from headway.policy.step.sampling_params import SamplingParams
from headway.server.classes import Terms
from headway.server.timings import Stamps

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")


@dataclass(frozen=True, slots=True)
class TraceParent:
    """Where a request's span belongs (W3C Trace Context, level 1)."""

    # trace_id, span_id: 16 and 8 bytes; without a span, the trace begins here.
    trace_id: bytes
    span_id: bytes = b""
    sampled: bool = True  # whoever began the trace wants it to be kept


def parent_in(headers: Mapping[str, str]) -> TraceParent:
    """The parent in a request's headers; a new trace where there is none, or none that is valid."""
    found = _PARENT.fullmatch(headers.get("traceparent", ""))
    if found is not None and found[1] != "ff" and int(found[2], 16) and int(found[3], 16):
        return TraceParent(bytes.fromhex(found[2]), bytes.fromhex(found[3]), bool(int(found[4], 16) & 1))
    return TraceParent(random.randbytes(16))


@dataclass(slots=True)
class Ended:
    """One choice of a request that has ended. Nobody changes it; frozen, it would take thrice as long to make."""

    parent: TraceParent
    name: str
    operation: str
    model: str
    index: int
    reason: str
    stamps: Stamps
    timings: SequenceTimings | None  # None where the engine's part is not known
    phases_ns: dict[str, int]  # the closed ledger, without `send`; empty where the engine's part is not known
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    params: SamplingParams
    terms: Terms
    ended_ns: int
    error: str = ""  # why it failed; empty where it did not
    client_request_id: str = ""  # the client's x-request-id; empty where it sent none

    @property
    def e2e_ns(self) -> int:
        """The time from its first byte to the end of its ledger, or until it ended where there is none."""
        return sum(self.phases_ns.values()) or max(0, self.ended_ns - self.stamps.arrived_ns)

    @property
    def ttft_ns(self) -> int | None:
        """The time until its first token; None where it had none."""
        return self.stamps.ttft_ns if self.stamps.first_token_ns else None

    @property
    def verdicts(self) -> dict[str, bool]:
        """Whether each of its objectives was met, as far as that is known."""
        if not self.stamps.first_token_ns:
            return {}
        return self.terms.verdicts(self.stamps.ttft_ns, self.stamps.tpot_ns(self.tokens), self.stamps.e2e_ns)
