"""What recorded traffic would have come to with other settings: the simulator answers the same requests again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from headway.advisor.online.traffic import History, Seen, distance_of
from headway.advisor.tuning.race import FAILED
from headway.policy.admission.queue_bound import QueueLimits
from headway.policy.cache.sizing import PoolSize
from headway.policy.step.options import SchedulingOptions
from headway.policy.step.recording import RecordedEngine
from headway.policy.step.request import NEVER, ON_THE_WIRE, FinishReason
from headway.policy.step.scheduler import Scheduler
from headway.simulator.answers import Answer, Stuck
from headway.simulator.drafts import DraftPlan, Drafts
from headway.simulator.learnt import FEWEST_STEPS, Learnt, teach
from headway.simulator.server import NO_TIME, Server
from headway.simulator.traffic import Arrival, arrival, made_prompt

TAUGHT = 200  # steps that a scheduler's own step-time model is given


@dataclass(frozen=True, slots=True)
class Forecast:
    """A simulated time."""

    distances: Mapping[int, float]  # of the requests with objectives, by seq_id
    others_ns: Mapping[int, float]  # the time from arrival to end of each of the others
    steps: int  # that were simulated


class Forecaster:
    """Simulates the traffic of a history.

    Args:
        history: what was recorded.
    """

    def __init__(self, history: History) -> None:
        self.history = history

    @property
    def is_ready(self) -> bool:
        """Whether there are enough steps to learn from."""
        return len(self.history.steps) >= FEWEST_STEPS

    def of(self, options: SchedulingOptions, since: int, until: int, lead_ns: int, seed: int = 0) -> Forecast:
        """What the requests between two times come to with these settings.

        Those that came up to `lead_ns` before, or had no token then, are simulated too, so that the server is as full
        as it was. How long answers are is known of those that have ended; others go on as long as these in the mean.

        Raises:
            ValueError: the settings contradict each other, or something could never run.
        """
        history, began = self.history, since - lead_ns
        engine = history.engine
        assert engine is not None, "nothing is recorded"
        steps = list(history.steps)
        scheduler = scheduler_of(engine, options)
        teach(scheduler.accounting.step_time, steps[-TAUGHT:])
        seen = [*history.open_at(began), *history.arrived(began, until)]
        lengths = [each.tokens for each in seen if each.tokens]
        usual = max(1, round(sum(lengths) / len(lengths))) if lengths else 1
        coming = [_arrival(place, each, began, usual, engine.block_size) for place, each in enumerate(seen)]
        built = engine.scheduler_config()
        limits = QueueLimits.for_engine(built.max_num_seqs, scheduler.blocks.pool_tokens(built.max_model_len))
        server = Server(scheduler, Learnt.of(steps, seed), limits, NO_TIME, None, None)
        share, right = history.drafts()
        if (most := drafts_of(engine)) and share:
            server.drafts = Drafts(DraftPlan(most, (right,), found=share), scheduler)
        server.expect(iter(coming))
        try:
            server.run()
        except Stuck as stuck:
            raise ValueError(str(stuck)) from None
        distances, others = dict[int, float](), dict[int, float]()
        for answer in server.answers:
            each = seen[int(answer.request_id)]
            if each.arrival.now < since:
                continue
            if each.is_judged:
                distances[each.arrival.seq_id] = _distance(each, answer)
            else:
                others[each.arrival.seq_id] = float(answer.ended_ns - answer.arrived_ns)
        return Forecast(distances, others, len(server.steps))


def scheduler_of(engine: RecordedEngine, options: SchedulingOptions) -> Scheduler:
    """An empty scheduler of a recorded engine with other settings. Raises ValueError where these are contradictory."""
    built = engine.scheduler_config()
    pool = PoolSize(engine.num_blocks, built.max_model_len, None, engine.num_checkpoints, tuple(engine.groups))
    return options.scheduler("cpu" if engine.device == "cpu" else "cuda", pool, swap=built.swap)


def drafts_of(engine: RecordedEngine) -> int:
    """Most drafts behind a token that an engine was built for; 0 for none."""
    config = engine.settings.get("speculative_config")
    return 0 if config is None else int(config["num_speculative_tokens"])


def options_of(engine: RecordedEngine) -> SchedulingOptions:
    """The settings that a recorded engine was built for."""
    built = engine.scheduler_config()
    return SchedulingOptions(
        classes=built.classes,
        weights=dict(built.weights),
        block_size=engine.block_size,
        max_num_seqs=built.max_num_seqs,
        max_num_batched_tokens=built.max_num_batched_tokens,
        max_prefill_stall_ms=built.max_prefill_stall_ms,
        most_drafts=min(built.most_drafts, drafts_of(engine)),
        enable_prefix_caching=engine.enable_prefix_caching,
        enable_chunked_prefill=built.enable_chunked_prefill,
        scheduling_policy=built.policy,
        watermark=built.watermark,
        protected_kv=engine.protected_share,
        max_queue_time=None if math.isinf(built.max_queue_time) else built.max_queue_time,
    )


def _arrival(place: int, seen: Seen, began: int, usual: int, block_size: int) -> Arrival:
    """A request as the simulator takes it, on a clock that begins at `began`."""
    of = seen.arrival
    ids = made_prompt(place, of.known, [(number, block_size) for number in of.blocks])
    output = max(1, seen.tokens or min(usual, of.max_len - of.known))
    gone = seen.reason is FinishReason.ABORT and not seen.first_ns
    return arrival(
        place,
        max(0, of.now - began),
        ids,
        max(1, of.max_len - of.known),
        output_len=output,
        cancel_ns=max(0, seen.ended_ns - began) if gone else None,
        priority=of.priority,
        service_class=of.service_class,
        tenant=of.tenant,
        ttft_ms=_ms(of.due_ns - of.arrival_ns if of.due_ns < NEVER else NEVER) / (1 - ON_THE_WIRE),
        tpot_ms=_ms(of.tpot_ns),
    )


def _ms(ns: int) -> float:
    return ns / 1e6 if ns < NEVER else math.inf


def _distance(seen: Seen, answer: Answer) -> float:
    of, tokens = seen.arrival, answer.token_ns
    if not tokens:
        waited_ns = answer.ended_ns - answer.arrived_ns
        return distance_of(of, waited_ns, 0.0) if answer.finish_reason is FinishReason.ABORT else FAILED
    before_ns = of.now - of.arrival_ns  # until the engine had it
    tpot_ns = (tokens[-1] - tokens[0]) / (len(tokens) - 1) if len(tokens) > 1 else 0.0
    return distance_of(of, tokens[0] - answer.arrived_ns + before_ns, tpot_ns)
