"""What becomes of requests when engines die: each token comes once, in order, and who kills engines is ended."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.engine.messages import (
    AddRequest,
    EngineOutputs,
    EngineStats,
    SequenceOutput,
    SequenceTimings,
)
from headway.engine.requests import MOST_DEATHS, InFlight, Requests, StreamItem
from headway.policy.step.request import Resumed
from headway.policy.step.sampling_params import SamplingParams

GONE = RuntimeError("the engine is gone")


def token(name: str, index: int, seed: int | None, position: int) -> int:
    return hash((name, index, seed, position)) % 1000


class Engine:
    """An engine process: one token of each choice a step, each a function of its place; killers kill it with `at`."""

    def __init__(self, killers: dict[str, int], seats: int) -> None:
        self.killers, self.seats = killers, seats
        self.received = 0
        self.choices: dict[tuple[str, int], tuple[AddRequest, Resumed]] = {}

    def send(self, request: AddRequest) -> None:
        self.received += 1
        assert request.seed is not None
        if request.params.stop:
            raise OverflowError
        resumed = request.resumed
        for choice in resumed if resumed is not None else [Resumed(i, []) for i in range(request.params.n)]:
            place = request.request_id, choice.index
            assert place not in self.choices
            self.choices[place] = request, Resumed(choice.index, list(choice.token_ids), choice.cached_tokens)

    def step(self, now: int) -> EngineOutputs | None:
        """What comes of a step; None where the engine dies in it."""
        outputs: list[SequenceOutput] = []
        running = list(self.choices.items())[: self.seats]
        if any(len(c.token_ids) == self.killers.get(name) for (name, _), (_, c) in running):
            return None
        for (name, index), (request, choice) in running:
            choice.cached_tokens = choice.cached_tokens or 16 + index
            new = token(name, index, request.seed, len(choice.token_ids))
            choice.token_ids.append(new)
            output = SequenceOutput(name, index, [new], cached_tokens=choice.cached_tokens)
            if len(choice.token_ids) == request.params.max_tokens:
                del self.choices[name, index]
                output.finish_reason = "length"
                output.timings = SequenceTimings({"decode_compute": now - request.sent_ns}, now, 1, 0)
            outputs.append(output)
        return EngineOutputs(outputs, EngineStats(len(running), 0, 0.0, received=self.received), now)


def ask(name: str, max_tokens: int, n: int = 1, sent_ns: int = 0, seed: int | None = None) -> AddRequest:
    params = SamplingParams(max_tokens=max_tokens, n=n, seed=seed)
    return AddRequest(name, [1, 2], params, [], sent_ns=sent_ns)


def taken(entry: InFlight) -> list[StreamItem]:
    return entry.take.__self__  # type: ignore[attr-defined, no-any-return]


class World:
    """Requests and the engines that they are handed to."""

    def __init__(self, killers: dict[str, int], seats: int = 100, replay: bool = True) -> None:
        self.requests = Requests(replay)
        self.killers, self.seats = killers, seats
        self.now = 1000
        self.deaths = 0
        self.entries: dict[str, InFlight] = {}
        self.start()

    def start(self) -> None:
        self.engine = Engine(self.killers, self.seats)
        self.requests.send_due(self.engine.send, self.now)

    def submit(self, request: AddRequest) -> InFlight:
        entry = self.entries[request.request_id] = self.requests.add(request, [].append)
        self.requests.send_due(self.engine.send, self.now)
        return entry

    def die(self) -> None:
        self.deaths += 1
        self.now += 50
        self.requests.engine_died(self.now, GONE)
        self.now += 500
        self.start()

    def step(self) -> None:
        self.now += 10
        message = self.engine.step(self.now)
        if message is None:
            return self.die()
        self.now += 1
        self.requests.deliver(message)
        self.requests.send_due(self.engine.send, self.now)

    def run(self, limit: int = 1000) -> None:
        for _ in range(limit):
            if not any(entry.choices for entry in self.entries.values()):
                return
            self.step()
        raise AssertionError("some request never ends")


def check(entry: InFlight, ended_ns: int | None = None) -> str:
    """Every token once and in order, and ledgers that close; how the first choice ended."""
    reasons: dict[int, str] = {}
    tokens: dict[int, list[int]] = {index: [] for index in range(entry.request.params.n)}
    for output in taken(entry):
        assert isinstance(output, SequenceOutput)
        assert output.index not in reasons
        tokens[output.index] += output.token_ids
        if output.token_ids:
            assert output.cached_tokens == 16 + output.index
        if output.finish_reason is not None:
            reasons[output.index] = output.finish_reason
            assert output.timings is not None
            lasted = output.timings.ended_ns - entry.request.sent_ns
            assert sum(output.timings.phases_ns.values()) == lasted
    name, seed = entry.request.request_id, entry.request.seed
    for index, found in tokens.items():
        assert found == [token(name, index, seed, i) for i in range(len(found))]
        assert reasons[index] != "length" or len(found) == entry.request.params.max_tokens
    assert len(set(reasons.values())) == 1
    return reasons[0]


def test_all_go_on_where_they_were_when_an_engine_dies() -> None:
    world = World({}, seats=4)
    for number in range(8):
        world.submit(ask(str(number), 5 + number, n=1 + number % 3, seed=number if number % 2 else None))
    for _ in range(3):
        world.step()
    world.die()
    assert list(dict.fromkeys(name for name, _ in world.engine.choices)) == [str(number) for number in range(8)]
    world.run()
    assert [check(entry) for entry in world.entries.values()] == ["length"] * 8
    assert world.requests.num_unreported == 0


def test_without_replay_all_end() -> None:
    world = World({}, replay=False)
    entry = world.submit(ask("a", 5))
    world.step()
    world.die()
    assert taken(entry)[-1] is GONE
    assert not world.engine.choices and len(world.requests) == 0


@pytest.mark.parametrize("at", [0, 3])
def test_a_request_that_kills_engines_is_ended_and_the_others_are_not(at: int) -> None:
    world = World({"7": at})
    for number in range(32):
        world.submit(ask(str(number), 8))
    world.run()
    ends = {name: check(entry) for name, entry in world.entries.items()}
    assert ends.pop("7") == "error"
    assert set(ends.values()) == {"length"}
    assert world.deaths == MOST_DEATHS + 1  # with all, with all, in its turn, and alone


def test_suspects_are_handed_over_one_at_a_time_and_before_all_others() -> None:
    world = World({})
    for number in range(3):
        world.submit(ask(str(number), 8))
    world.die()
    late = world.submit(ask("late", 8))
    world.die()
    assert [name for name, _ in world.engine.choices] == ["0"]
    newest = world.submit(ask("newest", 8))
    world.step()
    assert [name for name, _ in world.engine.choices] == ["0", "1"]
    assert world.requests.remove(world.entries.pop("1"))  # its client has left
    del world.engine.choices["1", 0]
    world.requests.send_due(world.engine.send, world.now)
    assert [name for name, _ in world.engine.choices] == ["0", "2"]
    world.step()
    assert [name for name, _ in world.engine.choices] == ["0", "2", "late", "newest"]
    world.run()
    assert check(late) == check(newest) == "length"
    assert late.deaths == 0


def test_choices_that_were_to_be_dropped_end_when_the_engine_dies() -> None:
    world = World({})
    entry = world.submit(ask("a", 5, n=2))
    world.step()
    assert world.requests.abort("a", 1, world.now)
    world.die()
    outputs = taken(entry)
    last = outputs[-1]
    assert isinstance(last, SequenceOutput) and last.timings is not None
    assert (last.index, last.finish_reason) == (1, "abort")
    assert list(last.timings.phases_ns) == ["engine_lost"]
    assert list(world.engine.choices) == [("a", 0)]
    world.requests.engine_died(world.now, GONE)
    assert not world.requests.abort("a", 0, world.now + 5), "no engine has it"
    assert not entry.choices
    world.start()
    assert not world.engine.choices


def test_a_request_that_cannot_be_sent_says_so_and_is_not_counted() -> None:
    world = World({})
    bad = ask("bad", 5)
    bad.params.stop = ["no"]
    entry = world.submit(bad)
    assert isinstance(taken(entry)[0], OverflowError)
    assert not world.requests.remove(entry)
    world.submit(ask("good", 3))
    world.step()
    assert world.requests.num_unreported == 0


@given(
    seed=st.integers(0, 2**32),
    killers=st.dictionaries(st.integers(0, 11).map(str), st.integers(0, 6), max_size=4),
    seats=st.integers(1, 20),
)
def test_random_deaths_lose_no_token_and_end_only_killers(seed: int, killers: dict[str, int], seats: int) -> None:
    rng = random.Random(seed)
    world = World(killers, seats)
    left: set[str] = set()
    for number in range(12):
        world.submit(ask(str(number), rng.randrange(1, 12), rng.randrange(1, 3), world.now))
        for _ in range(rng.randrange(3)):
            world.step()
        if rng.random() < 0.1:
            leaver = rng.choice(list(world.entries))
            if world.requests.remove(world.entries[leaver]):
                for place in [place for place in world.engine.choices if place[0] == leaver]:
                    del world.engine.choices[place]
            world.requests.send_due(world.engine.send, world.now)
            world.entries.pop(leaver)
            left.add(leaver)
    world.run()
    for name, entry in world.entries.items():
        assert check(entry) == "length" or name in killers
        assert not world.requests.remove(entry)
    assert len(world.requests) == 0 and world.requests.num_unreported == 0
