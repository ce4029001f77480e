"""The stages of document 000, made of the phases of the server's ledger and of what the client saw around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.load.measures.phases import FAULTS, NETWORK_AND_CLIENT, STALL, phases_of
from headway.load.record import RequestRecord
from headway.policy.step.ledger import QUEUE_PHASES, Phase

NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a request."""

    key: str
    label: str
    phases: tuple[str, ...]  # the phases of the ledger, that it sums
    colour: str  # a name of report.style.PALETTE
    advice: str  # what makes it shorter


STAGES = (
    Stage(
        "network",
        "network and client",
        (NETWORK_AND_CLIENT,),
        "network",
        "a client near the server, connections kept open, larger chunks for clients that only want the whole answer",
    ),
    Stage(
        "input",
        "input processing",
        (Phase.RECEIVE, Phase.GRAMMAR, Phase.TOKENIZE),
        "intake",
        "token ids instead of text, shorter prompts, a faster core for the API process",
    ),
    Stage(
        "transport",
        "between processes",
        (Phase.TRANSPORT, Phase.ROUTE, Phase.NETWORK, Phase.BACKEND),
        "transport",
        "a core left free for the API process (--threads one below the cores)",
    ),
    Stage(
        "schedule",
        "scheduling",
        (*QUEUE_PHASES, *STALL, *FAULTS, Phase.SCHEDULE, Phase.KV_TRANSFER),
        "schedule",
        "less host work in a step, a faster core for the engine process",
    ),
    Stage(
        "prefill",
        "prefill",
        (Phase.PREFILL_COMPUTE,),
        "prefill-compute",
        "prefix caching, shorter prompts, faster products (lower precision, more cores)",
    ),
    Stage(
        "decode",
        "decode",
        (Phase.DECODE_COMPUTE, Phase.DRAFT, Phase.VERIFY),
        "decode-compute",
        "fewer bytes of weights (quantisation), more bandwidth",
    ),
    Stage(
        "sampling",
        "sampling",
        (Phase.SAMPLING,),
        "sampling",
        "greedy or plain temperature sampling, no penalties or log-probabilities",
    ),
    Stage(
        "output",
        "output processing",
        (Phase.DETOKENIZE, Phase.SEND, Phase.SEND_BLOCKED),
        "output",
        "a client that reads as fast as tokens come",
    ),
)
BY_KEY = {stage.key: stage for stage in STAGES}


def stage_lengths(record: RequestRecord) -> dict[str, float] | None:
    """Milliseconds in each stage; they sum to the time from the send to the end of the response.

    None without a ledger. A phase that no stage names counts as scheduling.
    """
    phases = phases_of(record)
    if phases is None or record.timings is None:
        return None
    outside = record.end_ns - record.sent_ns - int(record.timings["e2e_ns"])
    lengths = {stage.key: 0.0 for stage in STAGES}
    home = {str(phase): stage.key for stage in STAGES for phase in stage.phases}
    for phase, length in (*phases.items(), (NETWORK_AND_CLIENT, max(0, outside))):
        lengths[home.get(phase, "schedule")] += length / NS_PER_MS
    return lengths


def typical_stages(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Mean milliseconds in each stage over the middle half of the requests, by their whole time.

    A mean of whole requests, because parts of means add up and medians of parts do not; of the middle half, because a
    busy machine now and then delays one of them. {} when no request has a ledger.
    """
    known = [lengths for lengths in map(stage_lengths, records) if lengths is not None]
    known.sort(key=lambda lengths: sum(lengths.values()))
    middle = known[len(known) // 4 : len(known) - len(known) // 4]
    return {stage.key: float(np.mean([each[stage.key] for each in middle])) for stage in STAGES} if middle else {}


def median_phase(records: Sequence[RequestRecord], phase: Phase) -> float | None:
    """The median over the requests of their milliseconds in a phase; None when no request has a ledger."""
    known = [phases.get(phase, 0) / NS_PER_MS for phases in map(phases_of, records) if phases is not None]
    return float(np.median(known)) if known else None
