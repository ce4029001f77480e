"""Which levers of the playbook are due on a server: a diagnosis for each pitfall, made from evidence alone.

A diagnosis compares what was measured with what the same server did without the fault in question, such as a prompt
that is sent again with the first time. So it needs no knowledge of the model or the hardware. Its prediction is the
figure without the fault's share; the bar says how far that share may be wrong.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from headway.advisor.evidence import ACCEPTED, DRAFTED, MS, Evidence, Stage, median
from headway.advisor.playbook import BY_KEY, Lever
from headway.changes import Change
from headway.load.measures.server_metrics import HITS, PREEMPTIONS, QUERIES

GIB = 2**30
# Below these nothing is found: a share of a figure, and its milliseconds.
LEAST_SHARE, LEAST_MS = 0.2, 2.0
BLOCKS_PRESSED = 0.95  # share of the KV cache in use
OFTEN = 0.01  # preemptions of a finished request
FEW_DRAFTS, FEW_ACCEPTED = 24, 0.35
FEW_QUERIES = 20_000  # prompt tokens before a hit rate of a lifetime says anything
CHUNK, SMALL_CHUNK = 512, 128  # tokens: document 003 takes chunks of 256 to 1024
LARGE = 2  # long prompts of the probe, which a step had room for
STOLEN, WAITED, SLOW_CLOCK = 0.05, 0.25, 0.75
BUSY = 0.5  # processor seconds in a second, below which threads and clocks say nothing
HUGE_MATTERS = 1 * GIB  # resident memory from which the size of pages counts


@dataclass(frozen=True, slots=True)
class Gain:
    """A predicted change of a figure."""

    figure: str  # what is measured, such as TTFT of a crowd
    now_ms: float  # as measured
    then_ms: float  # predicted without the fault; low_ms and high_ms are its 80 % bar
    low_ms: float
    high_ms: float

    @classmethod
    def share(cls, figure: str, now_ms: float | None, saved: float, error: float) -> Gain | None:
        """The gain of a share of the figure; None where the figure is not known."""
        return None if now_ms is None else cls.of(figure, now_ms, saved * now_ms, error)

    @classmethod
    def of(cls, figure: str, now_ms: float, saved_ms: float, error: float = 0.3) -> Gain:
        """The gain of a saving that may be wrong by a share of itself; what remains is at least a tenth."""
        floor = now_ms / 10

        def left(times: float) -> float:
            return min(now_ms, max(floor, now_ms - saved_ms * times))

        return cls(figure, now_ms, left(1.0), left(1 + error), left(1 - error))

    @property
    def times(self) -> float:
        """How many times as good the figure gets."""
        return self.now_ms / self.then_ms

    @property
    def bar(self) -> tuple[float, float]:
        return self.now_ms / self.high_ms, self.now_ms / self.low_ms


@dataclass(frozen=True, slots=True)
class Finding:
    """A lever that is due."""

    lever: Lever
    evidence: tuple[str, ...]  # what was measured, a sentence each
    confidence: float  # the chance that the fault is there and costs what is said, 0 to 1
    gain: Gain | None  # None where no figure is known that it could change
    kind: str
    values: dict[str, object] = field(default_factory=dict)  # what the lever's flags are filled in with

    @property
    def changes(self) -> tuple[Change, ...]:
        return self.lever.changes(self.kind, self.values)

    @property
    def weight(self) -> float:
        """What findings are ranked by: the expected gain, in the logarithm; a small one where none is known."""
        return self.confidence * math.log(1 + LEAST_SHARE if self.gain is None else max(1.0, self.gain.times))


Diagnosis = Callable[[Evidence], Iterator[Finding]]


def findings(evidence: Evidence) -> list[Finding]:
    """All levers that are due, the one with the largest expected gain first."""
    found = [each for diagnose in DIAGNOSES for each in diagnose(evidence)]
    return sorted(found, key=lambda each: each.weight, reverse=True)


def _finding(
    evidence: Evidence, key: str, said: list[str], confidence: float, gain: Gain | None, **values: object
) -> Finding:
    return Finding(BY_KEY[key], tuple(said), confidence, gain, evidence.kind, values)


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _tokens(count: float) -> str:
    return f"{count:,.0f} tokens"


# --- in front of the engine and in it ---------------------------------------------------------------


def _queue(evidence: Evidence) -> Iterator[Finding]:
    crowd = evidence.crowd
    waited = _waited_for_seats(crowd)
    now, sent, seats = median(crowd.ttft_ms), len(crowd.records), crowd.at_once
    if waited is None or now is None or sent < 4 or seats > 0.75 * sent or _is_pressed(evidence):
        return
    if waited < max(LEAST_SHARE * now, LEAST_MS):
        return
    said = [f"of {sent} requests at once, at most {seats} ran together; the median TTFT is {_ms(now)}"]
    if refused := sum(record.failed for record in crowd.records):
        said.append(f"{refused} of them were not answered")
    ledger = crowd.phases_ms("queue_capacity", "queue_policy")
    if ledger is not None:
        said.append(f"the ledger has {_ms(ledger)} of a request in queue_capacity and queue_policy")
    if (waiting := evidence.gauges.get("waiting")) is not None:
        said.append(f"up to {waiting:.0f} requests waited")
    confidence = 0.95 if ledger is not None or waiting else 0.75
    gain = Gain.of("TTFT of a crowd", now, min(waited, now))
    yield _finding(evidence, "queue", said, confidence, gain, sequences=max(16, 2 * sent))


def _waited_for_seats(crowd: Stage) -> float | None:
    """Milliseconds that a request of a crowd waited on average for the end of others' answers; None: unknown.

    By the ledger, or by the order of events: who began after others had ended waited until the last of these ends.
    """
    told = crowd.phases_ms("queue_capacity", "queue_policy")
    if told is not None or not crowd.answered:
        return told
    ends = sorted(record.end_ns for record in crowd.answered)
    seats = (bisect.bisect_right(ends, record.chunk_ns[0]) for record in crowd.answered)
    waits = [
        max(0, ends[before - 1] - record.sent_ns) * MS if before else 0.0
        for record, before in zip(crowd.answered, seats, strict=True)
    ]
    return sum(waits) / len(waits)


def _is_pressed(evidence: Evidence) -> bool:
    """Whether the KV cache was full during the probe, or its sequences waited for blocks or lost them."""
    if evidence.gauges.get("kv_cache_usage", 0.0) >= BLOCKS_PRESSED:
        return True
    if any((_of_stage(stage) or 0) > 0 for stage in (evidence.crowd, evidence.beside)):
        return True
    waited, now = evidence.crowd.phases_ms("queue_blocks"), median(evidence.crowd.ttft_ms)
    return waited is not None and now is not None and waited > max(LEAST_MS, 0.1 * now)


def _of_stage(stage: Stage) -> float | None:
    return None if stage.counted is None else stage.counted.total(PREEMPTIONS)


def _kv(evidence: Evidence) -> Iterator[Finding]:
    """The requests of the probe say it where there are some, else what the server counted and shows."""
    stages = evidence.crowd, evidence.beside, evidence.prompts
    lost, stage = max(((_lost_to_blocks(each), each) for each in stages), key=lambda pair: pair[0])
    preempted = sum(_of_stage(each) or 0 for each in (evidence.crowd, evidence.beside))
    since = (None if evidence.lifetime is None else evidence.lifetime.total(PREEMPTIONS)) or 0.0
    used = evidence.gauges.get("kv_cache_usage", 0.0)
    now = _whole(stage)
    shown = now is not None and (_is_pressed(evidence) or lost >= max(LEAST_MS, LEAST_SHARE * now))
    if now is not None and shown:
        gain: Gain | None = Gain.of("a request", now, max(lost, LEAST_SHARE * now))
    elif since > OFTEN * (evidence.finished or 0.0) or used >= BLOCKS_PRESSED:
        gain = Gain.share("a request", evidence.usual_ms("e2e"), LEAST_SHARE, 0.9)
    else:
        return
    pool = _pool_tokens(evidence)
    facts = (
        (lost >= LEAST_MS, f"the ledger has {_ms(lost)} of a request in waiting for blocks and in preemptions"),
        (preempted, f"{preempted:.0f} preemptions during the probe"),
        (since, f"{since:,.0f} preemptions since its start"),
        (used >= BLOCKS_PRESSED, f"{used:.0%} of the KV cache was in use"),
        (
            pool,
            f"the cache has room for {_tokens(pool or 0)}; a sequence may have {evidence.about.get('max_model_len')}",
        ),
    )
    said = [words for is_so, words in facts if is_so]
    context = 8 * (evidence.about.get("max_model_len") or 1024)
    yield _finding(evidence, "kv", said, 0.9 if shown else 0.6, gain, pool_tokens=context)


def _lost_to_blocks(stage: Stage) -> float:
    """Milliseconds of a request of a stage that waited for blocks, or were lost to preemptions; 0 if unknown."""
    return stage.phases_ms("queue_blocks", "decode_stall_preempted", "decode_stall_recompute") or 0.0


def _pool_tokens(evidence: Evidence) -> float | None:
    """Tokens that the KV cache has room for, by the labels of cache_config_info; None where they are not there."""
    series = {} if evidence.lifetime is None else evidence.lifetime.labels("cache_config_info")
    blocks, size = series.get("num_gpu_blocks", ""), series.get("block_size", "")
    return float(blocks) * float(size) if blocks.isdecimal() and size.isdecimal() else None


def _prefix(evidence: Evidence) -> Iterator[Finding]:
    first, again = median(evidence.first.ttft_ms), median(evidence.again.ttft_ms)
    found = evidence.again.cached_tokens
    if first is not None and again is not None:
        sent = evidence.lengths[1] * len(evidence.again.answered)
        missed = found < 0.1 * sent if found is not None else min(evidence.again.ttft_ms) > 0.8 * first
        if missed and not _is_pressed(evidence):
            single = median(evidence.alone.ttft_ms) or again
            said = [f"a prompt of {_tokens(evidence.lengths[1])} had a TTFT of {_ms(first)}, and again of {_ms(again)}"]
            if found is not None:
                said.append(f"{_tokens(found)} of {_tokens(sent)} were found in the cache")
            gain = Gain.of("TTFT of a repeated prompt", again, max(0.0, again - single), 0.4)
            if gain.times > 1 / (1 - LEAST_SHARE):
                yield _finding(evidence, "prefix", said, 0.8 if found is not None else 0.6, gain)
                return
    hits, queries = (None if evidence.lifetime is None else evidence.lifetime.total(each) for each in (HITS, QUERIES))
    if hits is not None and queries is not None and queries >= FEW_QUERIES and hits < 0.01 * queries:
        said = [f"of {_tokens(queries)} of prompts since its start {hits / queries:.1%} were found in the cache"]
        now = first if first is not None else evidence.usual_ms("ttft")
        yield _finding(evidence, "prefix", said, 0.3, Gain.share("TTFT", now, 0.3, 0.9))


def _chunk_large(evidence: Evidence) -> Iterator[Finding]:
    gaps, single = evidence.beside.gaps_ms, median(evidence.first.ttft_ms)
    usual = median(evidence.alone.gaps_ms)
    if not gaps or single is None or usual is None or _is_pressed(evidence):
        return
    worst = max(gaps)
    at_once = evidence.lengths[1] * (worst - usual) / single  # as long as so many prompt tokens take
    if worst < 50 or worst < 4 * usual or at_once < LARGE * evidence.lengths[1]:
        return
    largest = _largest_step(evidence.beside)
    if largest is not None and largest < LARGE * evidence.lengths[1]:
        return  # the machine stood still, or something else did
    came = f"{len(evidence.prompts.answered)} prompts of {_tokens(evidence.lengths[1])}"
    said = [
        f"a stream stood still for {_ms(worst)} while {came} came; alone, its gaps are {_ms(usual)}",
        f"that is as long as about {_tokens(at_once)} of prompts take",
    ]
    if largest is not None:
        said.append(f"the largest step had up to {_tokens(largest)}")
    gain = Gain.of("the longest gap", worst, worst * (1 - min(1.0, CHUNK / at_once)), 0.2)
    yield _finding(evidence, "chunk-large", said, 0.9 if largest is not None else 0.7, gain, chunk=CHUNK)


def _largest_step(stage: Stage) -> float | None:
    """At least as many tokens as the largest step of a stage had, by the buckets of its histogram; None: unknown."""
    names = "step_prompt_tokens_bucket", "iteration_tokens_total_bucket", "iteration_tokens_bucket"
    buckets = None if stage.counted is None else stage.counted.by_label(names, "le")
    if not buckets or not (most := max(buckets.values())):
        return None
    return min(float(bound) for bound, count in buckets.items() if count >= most)


def _chunk_small(evidence: Evidence) -> Iterator[Finding]:
    first, step = median(evidence.first.ttft_ms), evidence.alone.tpot_ms
    counted = evidence.first.counted
    if first is None or step is None or counted is None:
        return
    steps, tokens = counted.total(("step_prompt_tokens_count",)), counted.total(("step_prompt_tokens_sum",))
    if not steps or not tokens or tokens / steps > SMALL_CHUNK:
        return
    each = steps / max(1, len(evidence.first.answered))
    if tokens / steps > evidence.lengths[1] / 4 or each < 4:
        return
    said = [f"a prompt of {_tokens(evidence.lengths[1])} took {each:.0f} steps, of {_tokens(tokens / steps)} each"]
    said.append(f"its TTFT is {_ms(first)}; a step that does little else than read the weights takes {_ms(step)}")
    needed = math.ceil(evidence.lengths[1] / CHUNK)
    saved = min(0.9 * first, (each - needed) * step)
    if saved >= LEAST_SHARE * first:
        yield _finding(evidence, "chunk-small", said, 0.85, Gain.of("TTFT of a long prompt", first, saved), chunk=2048)


def _window(evidence: Evidence) -> Iterator[Finding]:
    waited, now = evidence.alone.phases_ms("queue_window"), median(evidence.alone.ttft_ms)
    if waited is None or now is None or waited < max(10.0, LEAST_SHARE * now):
        return
    said = [f"a request that comes alone waits {_ms(waited)} of its TTFT of {_ms(now)} for others to join"]
    yield _finding(evidence, "window", said, 0.95, Gain.of("TTFT at a low rate", now, waited, 0.1))


# --- around the engine --------------------------------------------------------------------------------


def _tokenizer(evidence: Evidence) -> Iterator[Finding]:
    now = median(evidence.first.ttft_ms)
    told = evidence.first.phases_ms("tokenize", "receive")
    took = told if told is not None else evidence.tokenize_ms
    if now is None or took is None or took < max(LEAST_MS, LEAST_SHARE * now):
        return
    said = [f"a prompt of {_tokens(evidence.lengths[1])} is read and tokenized in {_ms(took)}; its TTFT is {_ms(now)}"]
    confidence = 0.8 if told is not None else 0.6
    yield _finding(evidence, "tokenizer", said, confidence, Gain.of("TTFT of a long prompt", now, 0.7 * took))


def _host(evidence: Evidence) -> Iterator[Finding]:
    phases = ("schedule", "transport", "detokenize", "send")
    lost, now = evidence.crowd.phases_ms(*phases), _whole(evidence.crowd)
    if lost is not None and now is not None and lost >= max(LEAST_MS, 0.4 * now):
        said = [f"the ledger has {_ms(lost)} of {_ms(now)} of a request in {', '.join(phases)}"]
        yield _finding(evidence, "host", said, 0.7, Gain.of("a request of a crowd", now, 0.6 * lost))
    elif lost is None and any("--enforce-eager" in each for each in _commands(evidence)) and now is not None:
        said = ["the server runs with --enforce-eager: each kernel of a step is launched by itself"]
        yield _finding(evidence, "host", said, 0.6, Gain.of("a request of a crowd", now, 0.3 * now, 0.8))


def _whole(stage: Stage) -> float | None:
    return median([(record.end_ns - record.sent_ns) / 1e6 for record in stage.answered])


def _commands(evidence: Evidence) -> tuple[str, ...]:
    return () if evidence.machine is None else evidence.machine.commands


def _drafts(evidence: Evidence) -> Iterator[Finding]:
    tried, accepted = evidence.total(DRAFTED), evidence.total(ACCEPTED)
    if not tried or accepted is None or tried < FEW_DRAFTS or accepted >= FEW_ACCEPTED * tried:
        return
    said = [
        f"of {tried:,.0f} drafts {accepted / tried:.0%} were accepted; from about {FEW_ACCEPTED:.0%} on they may pay"
    ]
    now, streams = _tpot(evidence), evidence.beside.answered
    tokens = sum(sum(record.chunk_tokens) for record in streams) / max(1, len(streams))
    told = evidence.beside.phases_ms("draft", "verify")
    share = 0.1
    if told is not None and tokens and now:
        said.append(f"drafting and verifying took {told / tokens:.3g} ms of each token of a stream")
        share = max(0.05, told / tokens / now)
    gain = Gain.share("TPOT", now, share * (1 - accepted / tried), 0.5)
    yield _finding(evidence, "drafts", said, 0.85, gain)


def _tpot(evidence: Evidence) -> float | None:
    """TPOT in a crowd, or alone, or since the server's start."""
    measured = evidence.crowd.tpot_ms or evidence.beside.tpot_ms or evidence.alone.tpot_ms
    return measured if measured is not None else evidence.usual_ms("tpot")


# --- the machine --------------------------------------------------------------------------------------


def _threads(evidence: Evidence) -> Iterator[Finding]:
    look = evidence.machine
    if look is None or look.cores_used < BUSY or max(look.cores, look.workers) < 2:
        return
    said = [f"{look.workers} threads did the engine's work, and it may use {look.cores} physical cores"]
    if look.workers > look.cores:
        gain = Gain.share("TPOT", _tpot(evidence), 0.3, 0.7)
        yield _finding(evidence, "threads", said, 0.8, gain, cores=look.cores)
    elif look.workers < 0.7 * look.cores and look.cores_used > 0.5 * look.workers:
        said.append(f"they used {look.cores_used:.1f} processor seconds in a second")
        gain = Gain.share("TPOT", _tpot(evidence), 0.7 * (1 - max(look.workers / look.cores, 0.25)), 0.6)
        yield _finding(evidence, "threads", said, 0.7, gain, cores=look.cores)


def _parallel(evidence: Evidence) -> Iterator[Finding]:
    sizes = [re.search(r"--(?:tensor-parallel-size|tp-size|tp)[= ](\d+)", each) for each in _commands(evidence)]
    size = max((int(each[1]) for each in sizes if each), default=1)
    if size > 4:
        said = [
            f"the server's command has a tensor parallel size of {size}; each layer of a step ends in an all-reduce"
        ]
        yield _finding(evidence, "parallel", said, 0.3, Gain.share("TPOT", _tpot(evidence), 0.2, 0.9))


def _machine(evidence: Evidence) -> Iterator[Finding]:
    look, now = evidence.machine, _tpot(evidence)
    if look is None:
        return
    if look.waited is not None and look.waited > WAITED and look.cores_used >= BUSY:
        said = [f"the engine's threads waited {look.waited:.0%} of the time for a core that other work had"]
        yield _finding(evidence, "contended", said, 0.8, Gain.share("TPOT", now, look.waited, 0.3))
    if look.steal is not None and look.steal > STOLEN:
        said = [f"the hypervisor took {look.steal:.0%} of the processors' time"]
        yield _finding(evidence, "steal", said, 0.9, Gain.share("TPOT", now, look.steal, 0.3))
    if look.swapped_bytes > 0.02 * max(1, look.resident_bytes):
        said = [f"{look.swapped_bytes / GIB:.2f} GiB of the processes are in the swap space"]
        if look.swapping:
            said.append(f"{look.swapping:,.0f} pages a second were swapped during the probe")
        gain = Gain.share("TPOT", now, 0.5 if look.swapping else 0.1, 0.8)
        yield _finding(evidence, "swap", said, 0.9 if look.swapping else 0.5, gain)
    small_bytes = look.resident_bytes - (look.huge_bytes or 0)
    if look.huge_pages == "never" and small_bytes >= HUGE_MATTERS:
        said = [f"{small_bytes / GIB:.1f} GiB of memory are in pages of 4 kB: transparent huge pages are off"]
        yield _finding(evidence, "huge-pages", said, 0.6, Gain.share("TPOT", now, 0.05, 0.8))
    if look.frequency is not None and look.frequency < SLOW_CLOCK and look.cores_used >= BUSY:
        said = [f"under load the processors have {look.frequency:.0%} of their highest frequency ({look.governor})"]
        yield _finding(evidence, "frequency", said, 0.7, Gain.share("TPOT", now, 0.5 * (1 - look.frequency), 0.8))


DIAGNOSES: tuple[Diagnosis, ...] = (
    _queue,
    _kv,
    _prefix,
    _chunk_large,
    _chunk_small,
    _window,
    _tokenizer,
    _host,
    _drafts,
    _threads,
    _parallel,
    _machine,
)
