"""The API process's part of a request's ledger, joined with the engine's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headway.engine.messages import SequenceTimings
from headway.policy.step.ledger import Ledger, Phase
from headway.server.classes import Terms

Clock = Callable[[], int]
_PHASES = {str(phase): phase for phase in Phase}  # a look-up takes a sixth of a call of Phase


@dataclass(slots=True)
class Stamps:
    """When the API process did what with one choice, by time.monotonic_ns(); 0 is not yet."""

    arrived_ns: int = 0  # the request's first byte
    checked_ns: int = 0  # the body is read and valid
    sent_ns: int = 0  # handed to the engine
    first_token_ns: int = 0
    last_token_ns: int = 0
    received_ns: int = 0  # the engine's last output came
    detokenized_ns: int = 0
    detokenizing_ns: int = 0  # a duration: how long it took to turn all tokens into text, most of it outside the chain
    tokenized_ns: int = 0  # the prompt was, before the grammar that the answer is held to was checked
    compiled_ns: int = 0  # that grammar was checked

    @property
    def ttft_ns(self) -> int:
        """Time from the request's first byte until the API process had the first token."""
        return self.first_token_ns - self.arrived_ns

    @property
    def e2e_ns(self) -> int:
        """Time from the request's first byte until the API process had the last token."""
        return self.last_token_ns - self.arrived_ns

    def tpot_ns(self, tokens: int) -> float | None:
        """The mean time of a token after the first; None for a choice that has no other."""
        return (self.last_token_ns - self.first_token_ns) / (tokens - 1) if tokens > 1 else None


@dataclass(slots=True)
class ChoiceTimings:
    """One choice's chain, from the request's first byte until the answer that contains it is made."""

    stamps: Stamps
    engine: SequenceTimings
    tokens: int
    terms: Terms = field(default_factory=Terms)
    drafts: tuple[int, int] = (0, 0)  # how many were tried, and how many accepted
    ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.stamps.arrived_ns)
        self.ledger.mark(Phase.RECEIVE, self.stamps.checked_ns)
        self.ledger.mark(Phase.TOKENIZE, self.stamps.tokenized_ns)
        self.ledger.mark(Phase.GRAMMAR, self.stamps.compiled_ns)
        self.ledger.mark(Phase.TOKENIZE, self.stamps.sent_ns)
        self.ledger.mark_parts({_PHASES[name]: length for name, length in self.engine.phases_ns.items()})
        self.ledger.mark(Phase.TRANSPORT, self.stamps.received_ns)
        self.ledger.mark(Phase.DETOKENIZE, self.stamps.detokenized_ns)

    def as_object(self) -> dict[str, Any]:
        """`timings` of an answer; phases_ns sums to e2e_ns exactly."""
        terms, stamps = self.terms, self.stamps
        verdicts = terms.verdicts(stamps.ttft_ns, stamps.tpot_ns(self.tokens), stamps.e2e_ns)
        return {
            "e2e_ns": self.ledger.total_ns,
            "ttft_ns": self.stamps.ttft_ns,
            "phases_ns": {str(phase): length for phase, length in self.ledger.phases_ns.items()},
            "detokenize_ns": self.stamps.detokenizing_ns,
            "tokens": self.tokens,
            "steps": self.engine.steps,
            "preemptions": self.engine.preemptions,
            "drafts": self.drafts[0],
            "accepted_drafts": self.drafts[1],
            "service_class": terms.service.name,
            "ttft_objective_ns": _objective_ns(terms.ttft_ms),
            "ttft_met": verdicts.get("ttft"),
            "tpot_objective_ns": _objective_ns(terms.tpot_ms),
            "tpot_met": verdicts.get("tpot"),
            "e2e_objective_ns": _objective_ns(terms.service.e2e_ms),
            "e2e_met": verdicts.get("e2e"),
            "yielded": self.engine.yielded,
            "passed_over": self.engine.passed_over,
        }

    def as_header(self) -> str:
        """The chain as a Server-Timing header, in milliseconds."""
        lengths = [*self.ledger.phases_ns.items(), ("total", self.ledger.total_ns)]
        return ", ".join(f"{name};dur={length / 1e6:.3f}" for name, length in lengths)


def _objective_ns(ms: float) -> int | None:
    return None if math.isinf(ms) else round(ms * 1e6)


def with_timings(encoded: bytes, timings: ChoiceTimings, clock: Clock) -> bytes:
    """Add `timings` to an encoded JSON object. The chain ends here, when everything else is encoded."""
    timings.ledger.mark(Phase.SEND, clock())
    return encoded[:-1] + b',"timings":' + msgspec.json.encode(timings.as_object()) + b"}"
