"""A server that tunes itself keeps what is proven, takes back what is not, and costs little while it tries."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest

from benchmarks.tuned_server import Counted, TunedServer
from headway.advisor.online.forecast import Forecast
from headway.advisor.online.levers import Levers, limits_of
from headway.advisor.online.traffic import GOOD_ENOUGH, Load
from headway.advisor.online.tuner import CPU_CREDIT_S, CPU_SHARE, MOST_HARM, TAIL, S
from headway.advisor.tuning.race import FAILED, loss
from headway.changes import applied
from headway.policy.admission.queue_bound import QueueLimits
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.objectives.service_class import ClassTable, ServiceClass
from headway.policy.step.accounting import StepTimes
from headway.policy.step.bounds import Bounds, parse_bounds
from headway.policy.step.options import SchedulingOptions
from headway.policy.step.plan import StepPlan
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.scheduler_config import SchedulerConfig, StepLimits
from headway.policy.step.step_time import StepWork
from headway.simulator.answers import Answer
from headway.simulator.server import NO_TIME, Server
from headway.simulator.traffic import Arrival, arrival

CHAT = ServiceClass(name="chat", ttft_ms=1200.0, tpot_ms=200.0)
BOUNDS = Bounds(max_num_seqs=(1, 32), max_num_batched_tokens=(64, 512))
SEATS = "--max-num-seqs"


@dataclass
class Machine:
    """Steps take some milliseconds, and a little for each token, with noise."""

    chance: random.Random

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        return self._took(plan.work, now)

    def decode_times(self, work: StepWork, contexts: Callable[[], list[int]], now: int) -> StepTimes:
        return self._took(work, now)

    def _took(self, work: StepWork, now: int) -> StepTimes:
        exact = 60e6 + 0.3e6 * work.prefill_tokens + 1.5e6 * work.decode_tokens
        computed = now + round(exact * math.exp(self.chance.gauss(0.0, 0.05)))
        return StepTimes(now, computed, computed + 200_000)


def asked(rate: float, seconds: float, prompt: int = 60, output: int = 20) -> list[Arrival]:
    chance, now, found = random.Random(1), 0.0, list[Arrival]()
    while (now := now + chance.expovariate(rate)) < seconds:
        tokens, longest = chance.randint(1, 2 * prompt), chance.randint(1, 2 * output)
        found.append(arrival(len(found), round(now * S), tokens, longest, output_len=longest, service_class="chat"))
    return found


def _parts(seqs: int, chat: ServiceClass = CHAT) -> tuple[Scheduler, Machine, QueueLimits, StepLimits]:
    config = SchedulerConfig(32, 512, 1024, classes=ClassTable((chat,)), max_prefill_stall_ms=50.0)
    queue, limits = QueueLimits.for_engine(32, 32_000), StepLimits(seqs, 512, 50.0)
    return Scheduler(config, KVBlocks(2000, 16)), Machine(random.Random(7)), queue, limits


def static(arrivals: list[Arrival], seqs: int) -> list[Answer]:
    scheduler, machine, queue, limits = _parts(seqs)
    scheduler.set_classes(scheduler.config.classes, {}, limits)
    server = Server(scheduler, machine, queue, NO_TIME, None, None)
    server.expect(iter(arrivals))
    server.run()
    return server.answers


def tuned(
    arrivals: list[Arrival], seqs: int, simulates: type[Counted] = Counted, chat: ServiceClass = CHAT
) -> TunedServer:
    scheduler, machine, queue, limits = _parts(seqs, chat)
    server = TunedServer(scheduler, machine, queue, "cpu", limits, BOUNDS, simulates)
    server.expect(iter(arrivals))
    server.run()
    return server


def loss_of(answers: list[Answer]) -> float:
    far = [
        max(
            (each.token_ns[0] - each.arrived_ns) / 1e6 / CHAT.ttft_ms,
            (each.token_ns[-1] - each.token_ns[0]) / 1e6 / max(1, len(each.token_ns) - 1) / CHAT.tpot_ms,
        )
        if each.token_ns
        else math.exp(FAILED)
        for each in answers
    ]
    return loss(np.maximum(np.log(far), GOOD_ENOUGH))


# --- over minutes of traffic --------------------------------------------------------------------------------


def test_seats_that_are_too_few_are_raised_and_the_gain_is_proven() -> None:
    server, before = tuned(asked(2.0, 260.0), 3), static(asked(2.0, 260.0), 3)
    kinds = [(move.kind, move.change.split()[0]) for _, move in server.moves]
    assert kinds[:2] == [("tried", SEATS), ("kept", SEATS)]
    assert server.scheduler.config.max_num_seqs > 3
    tried_ns = server.moves[0][0]
    later = [[each for each in answers if each.arrived_ns > tried_ns] for answers in (server.answers, before)]
    assert loss_of(later[0]) < loss_of(later[1]) - 0.3
    # A trial is brought to its end whatever it takes.
    assert server.tuner._cpu_s() < CPU_CREDIT_S + CPU_SHARE * server.now / S + 5.0


def test_good_settings_stay_and_no_request_is_served_otherwise() -> None:
    server, before = tuned(asked(2.0, 200.0), 32), static(asked(2.0, 200.0), 32)
    assert not server.moves
    assert [each.token_ns for each in server.answers] == [each.token_ns for each in before]


class Lying(Counted):
    """Says that four seats are best, whatever happens."""

    def of(self, options: SchedulingOptions, since: int, until: int, lead_ns: int, seed: int = 0) -> Forecast:
        found = super().of(options, since, until, lead_ns, seed)
        if options.max_num_seqs == 4:
            return replace(found, distances=dict.fromkeys(found.distances, GOOD_ENOUGH))
        return found


def test_what_a_wrong_prediction_has_done_is_taken_back_before_it_costs_much() -> None:
    server = tuned(asked(2.0, 300.0), 12, Lying, replace(CHAT, ttft_ms=250.0, tpot_ms=100.0))
    (tried_ns, tried), (back_ns, back) = server.moves[:2]
    assert (tried.kind, tried.change) == ("tried", f"{SEATS} 4")
    assert back.kind == "rolled back" and back.change == tried.change and "further from their objectives" in back.words
    assert back_ns - tried_ns < 90 * S
    assert [move.change for _, move in server.moves].count(tried.change) == 2  # it is not tried again
    assert server.scheduler.config.max_num_seqs == 12
    excess = sum(harm for _, harm in server.tuner._harms)
    assert excess < 3 * MOST_HARM * TAIL * 2.0 * 3600  # of an hour of such requests


class Changing(Counted):
    """Says, once prompts are long, that few seats would be better than what there is."""

    def of(self, options: SchedulingOptions, since: int, until: int, lead_ns: int, seed: int = 0) -> Forecast:
        found = super().of(options, since, until, lead_ns, seed)
        prompts = [each.arrival.prompt_len for each in self.history.arrived(since, until)]
        if options.max_num_seqs == 3 and sum(prompts) / len(prompts) > 200:
            return replace(found, distances=dict.fromkeys(found.distances, GOOD_ENOUGH))
        return found


@pytest.mark.slow
def test_when_the_load_changes_it_goes_back_to_the_start_without_a_trial() -> None:
    first, later = asked(2.0, 250.0), asked(2.0, 200.0, prompt=300)
    for number, each in enumerate(later):
        each.at_ns, each.request.request_id = each.at_ns + 250 * S, str(len(first) + number)
    server = tuned([*first, *later], 3, Changing)
    kinds = [move.kind for _, move in server.moves]
    assert kinds[:3] == ["tried", "kept", "went back"]
    assert server.moves[2][0] > 250 * S and "the load has changed" in server.moves[2][1].words


@pytest.mark.slow
def test_a_trial_ends_with_the_engine() -> None:
    server = tuned(asked(2.0, 200.0), 3)
    tuner, history = server.tuner, server.history
    assert tuner.trial is not None and history.engine is not None
    history.take(msgspec.structs.replace(history.engine, began_ns=server.now))
    moves = tuner.look(server.now + S)
    assert [(move.kind, move.words.split(": ")[1]) for move in moves] == [
        ("rolled back", "the engine was started again")
    ]
    assert tuner.now == tuner.start


def test_without_processor_time_nothing_is_simulated() -> None:
    class Expensive(Counted):
        steps = 10**9

    server = tuned(asked(2.0, 150.0), 3, Expensive)
    assert not server.moves and server.forecaster.steps == 10**9


# --- its parts ----------------------------------------------------------------------------------------------


def test_loads_are_told_apart() -> None:
    load = Load(4.0, 500.0, 100.0, {"chat": 1.0})
    assert not load.unlike(replace(load, rate=5.0))
    assert load.unlike(replace(load, rate=8.0)) == "rate was 8 and is 4"
    assert "were of class" in load.unlike(replace(load, classes={"batch": 1.0}))


def test_changes_stay_within_their_bounds() -> None:
    classes = ClassTable((CHAT, ServiceClass(name="batch", seats=0.25), ServiceClass(name="idle")))
    start = SchedulingOptions(classes=classes, max_num_seqs=16, max_num_batched_tokens=512)
    bounds = parse_bounds("max-num-seqs=8:32,max-num-batched-tokens=64:1024,window-ms=0:20,share=0.1:0.25")
    levers = Levers(bounds, start, "cpu", 32, 1024)
    found = list(levers.changes(start, ["chat", "batch"]))
    typed = {each.typed for each in found}
    assert {"--max-num-seqs 8", "--max-num-seqs 32", "--max-num-batched-tokens 1024"} <= typed
    assert "chat: window_ms = [0, 2]" in typed and "chat: seats = 0.1" in typed and "batch: seats = 0.1" in typed
    assert not any("idle" in each for each in typed)
    for each in found:
        then = applied(start, [each])
        limits = limits_of(then, "cpu")
        assert 8 <= limits.max_num_seqs <= 32 <= limits.max_num_batched_tokens <= 1024
        assert all(kind.window_ms[1] <= 20 and kind.seats <= 0.25 for kind in then.classes)
    restarts = {each.typed for each in levers.with_restart(start)}
    assert "--max-num-seqs 64" in restarts and "--scheduling-policy fcfs" in restarts and not restarts & typed


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seats=1:2", "'seats' is no setting that the server changes; there are max-num-seqs,"),
        ("max-num-seqs=2:x", "max-num-seqs is '2:x'; write LEAST:MOST, such as max-num-seqs=8:64"),
        ("max-num-seqs=4:2", "max-num-seqs is 4:2; give LEAST:MOST, from 1 to 1e+09"),
        ("share=0:0.95", "share is 0:0.95; give LEAST:MOST, from 0 to 0.9"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_bounds(text)


def test_the_engine_gets_room_for_the_upper_bounds() -> None:
    options = SchedulingOptions(max_num_seqs=16)
    limits = parse_bounds("max-num-seqs=8:64,max-num-batched-tokens=128:1024").make_room(options)
    assert (options.max_num_seqs, options.max_num_batched_tokens) == (64, 1024)
    assert limits == StepLimits(16, 1024) and limits.changed == {"max_num_seqs": 16, "max_num_batched_tokens": 1024}
    with pytest.raises(ValueError, match="leaves out --max-num-seqs 128, where it begins"):
        parse_bounds("max-num-seqs=8:64").make_room(SchedulingOptions(max_num_seqs=128))
    with pytest.raises(ValueError, match="may become 32, and there are up to 64 sequences"):
        parse_bounds("max-num-batched-tokens=32:1024").make_room(SchedulingOptions(max_num_seqs=64))
