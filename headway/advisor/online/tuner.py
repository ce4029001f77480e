"""The policy of a server that tunes itself: what to try, when a trial has shown enough, and when to go back.

Time is cut into periods of some dozens of requests. When those of the last ones are further from their objectives than
they need to be, the simulator answers the same requests with each change of one setting. The best, if it is predicted
to gain, is tried. Each period under it is compared with one before it: not by how far its requests were from their
objectives, but by how much further than a simulation of the same requests without the change. So a period with more or
longer requests is not taken for a worse setting. A sequential test (`race`) says whether the change is kept. It is
rolled back if that is not proven, if the load has become another one, and at once if requests are clearly worse off.

What trials may cost is bounded: what they have cost in the last hour is kept account of, and without credit there is no
trial. So is the processor's time that simulations take. Going back to what the server began with needs no proof.

The policy has no clock and no thread: whoever has the records of a server, live or simulated, asks it now and then.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from headway.advisor.online.forecast import Forecast, Forecaster
from headway.advisor.online.levers import Levers
from headway.advisor.online.traffic import GOOD_ENOUGH, Load
from headway.advisor.tuning.candidates import Prediction
from headway.advisor.tuning.race import LEAST_GAIN, Race, loss
from headway.changes import Change, applied
from headway.policy.step.options import SchedulingOptions

S = 1_000_000_000
HOUR = 3600 * S
PERIOD_REQUESTS, PERIOD_NS, LONGEST_PERIOD_NS = 32, 10 * S, 300 * S
FEWEST_PERIODS, MOST_PERIODS = 6, 10  # that are known before anything is tried
FEWEST_PAIRS = 4  # of periods without and with a change
MOST_LEAD_NS, MOST_SETTLING_NS = 60 * S, 60 * S
# Above this, the slowest requests are further from their objectives than they need to be.
LACKS = math.log(0.6)
RANKED_EVERY_NS = 600 * S
# All changes are simulated over so many periods, and the best so many over all periods, twice.
SCREENED, FINALISTS = 2, 2
# How far apart a simulation and what was measured may be, in the mean of the logarithm, to be believed in differences.
OFF = 0.7
# Trials may make the loss of an hour worse by this much; the loss is the mean of a quarter of the requests.
MOST_HARM, TAIL = 0.01, 0.25
CLEARLY = 2.0  # standard errors
OTHERS_SLOWER = 1.05  # most that requests without objectives may be slowed down by, as predicted
CPU_SHARE, CPU_CREDIT_S = 0.02, 10.0

Kind = Literal["tried", "kept", "rolled back", "went back", "recommended"]


@dataclass(frozen=True, slots=True)
class Move:
    """Something that the server is to know."""

    kind: Kind
    words: str  # one line
    options: SchedulingOptions | None = None  # the settings from now on; None leaves them
    change: str = ""


@dataclass(slots=True)
class Period:
    """A time in which the settings were the same."""

    began: int
    ended: int
    measured: float = 0.0  # the loss of its requests
    simulated: float | None = None  # the same as simulated with the settings before a trial; None outside of one
    distances: list[float] = field(default_factory=list)  # of these requests

    @property
    def beside(self) -> float:
        """How much further its requests were than in the simulation."""
        return self.measured - (self.simulated or 0.0)


@dataclass(slots=True)
class Trial:
    """A change that is being tried."""

    prediction: Prediction
    before: SchedulingOptions  # settings without it
    periods: list[Period]  # the last ones before it
    load: Load
    usual: tuple[float, float]  # mean and standard deviation of the distances before it
    began: int
    engines: int
    after: list[Period] = field(default_factory=list)

    @property
    def race(self) -> Race:
        """Each period after the change with one before it."""
        pairs = zip(self.periods[::-1], self.after, strict=False)
        return Race(tuple(a.beside - b.beside for a, b in pairs), FEWEST_PAIRS, MOST_PERIODS)


class OnlineTuner:
    """The policy. Call `look` every few seconds.

    Args:
        forecaster: has the history of the server.
        start: the settings that it began with.
        cpu_s: the seconds of a processor that this has taken until now.

    Attributes:
        now: the settings as they are.
        trial: the change that is being tried; None where none is.
        doing: what it does, in words.
    """

    def __init__(
        self, forecaster: Forecaster, levers: Levers, start: SchedulingOptions, cpu_s: Callable[[], float]
    ) -> None:
        self._forecaster, self._history, self._levers = forecaster, forecaster.history, levers
        self._cpu_s = cpu_s
        self.start = self.now = start
        self.trial: Trial | None = None
        self.doing = "waiting for requests"
        self._began_ns = self._now_ns = self._period_began = self._history.now
        self._engines = self._history.engines
        self._open: deque[Period] = deque()  # whose requests have not all ended
        self._periods: deque[Period] = deque(maxlen=MOST_PERIODS)
        self._failed: dict[str, Load] = {}  # changes that were not proven, by the load
        self._harms: deque[tuple[int, float]] = deque()  # when, and how many requests times how much worse
        self._counts: deque[tuple[int, int]] = deque()  # when, and how many requests were judged
        self._proven: Load | None = None  # the load under which the last change was
        self._ranked_ns, self._pause_ns = -HOUR, RANKED_EVERY_NS  # when, and how soon again
        self._ranked_load: Load | None = None
        self._advised: Load | None = None  # the load by which restarts were thought of
        self._ranking: Iterator[Move | None] | None = None
        self._is_due = False  # whether it goes on whatever it takes
        self._told: set[str] = set()

    # --- asked --------------------------------------------------------------------------------------

    def look(self, now: int) -> list[Move]:
        """What is to be done now, in nanoseconds of the clock of the records."""
        self._now_ns, moves = now, list[Move]()
        if self.trial is not None and self.trial.engines != self._history.engines:
            moves.append(self._roll_back(now, "the engine was started again"))
        if self._engines != self._history.engines:
            self._engines = self._history.engines
            self._set(self.now, now)
        self._cut(now)
        while self._open and self._is_over(self._open[0], now):
            period = self._open.popleft()
            self._judge(period, now)
            moves += self._heed(period, now)
        if self.trial is not None:
            if (harm := self._harm(now)) is not None:
                moves.append(self._roll_back(now, harm))
        elif self._ranking is not None and (self._is_due or self._may_compute(now)):
            try:
                move = next(self._ranking)
            except StopIteration:
                self._ranking = None
            else:
                moves += [] if move is None else [move]
        return moves

    def reload(self, start: SchedulingOptions, now: int) -> list[Move]:
        """The operator has other settings: begin anew with these."""
        self.start, self._proven, self.trial = start, None, None
        self._failed.clear()
        self._ranked_ns, self._pause_ns = -HOUR, RANKED_EVERY_NS
        self._set(start, now)
        return [Move("went back", "the files were read again; their settings hold until something is proven", start)]

    # --- periods ------------------------------------------------------------------------------------

    def _cut(self, now: int) -> None:
        """End the period where it has enough requests, or is long."""
        length = now - self._period_began
        if length < PERIOD_NS:
            return
        judged = sum(each.is_judged for each in self._history.arrived(self._period_began, now))
        if judged >= PERIOD_REQUESTS or (length >= LONGEST_PERIOD_NS and judged >= PERIOD_REQUESTS // 4):
            self._open.append(Period(self._period_began, now))
            self._period_began = now
        elif length >= LONGEST_PERIOD_NS:
            self._period_began = now  # next to nothing came

    def _is_over(self, period: Period, now: int) -> bool:
        """Whether its requests have ended; those that take very long are judged by what is known of them."""
        waits_ns = min(max(period.ended - period.began, PERIOD_NS), MOST_SETTLING_NS)
        return now - period.ended > waits_ns or all(
            each.ended_ns for each in self._history.arrived(period.began, period.ended)
        )

    def _judge(self, period: Period, now: int) -> None:
        seen = [each for each in self._history.arrived(period.began, period.ended) if each.is_judged]
        period.distances = [each.distance(now) for each in seen]
        period.measured = loss(np.array(period.distances)) if seen else GOOD_ENOUGH
        self._counts.append((now, len(seen)))

    def _heed(self, period: Period, now: int) -> list[Move]:
        """A period is over."""
        if self.trial is not None:
            self.trial.after.append(period)
            return self._verdict(self.trial, now)
        self._periods.append(period)
        if len(self._periods) >= FEWEST_PERIODS and self._forecaster.is_ready:
            self._begin_ranking(now)
        return []

    def _begin_ranking(self, now: int) -> None:
        load = self._load(list(self._periods))
        changed = self._ranked_load is not None and load.unlike(self._ranked_load)
        unproven = self._proven is not None and load.unlike(self._proven)
        if self.now != self.start and unproven:
            self._ranking, self._is_due, self._proven = self._compare_with_start(), True, load
        elif self._lacks() and (changed or now - self._ranked_ns >= self._pause_ns):
            if changed:
                self._pause_ns = RANKED_EVERY_NS
            self._ranked_ns, self._ranked_load = now, load
            self._ranking, self._is_due = self._rank(load), False
        elif self._ranking is None:
            self.doing = "watching" if self._lacks() else "watching: objectives are met with room to spare"

    def _lacks(self) -> bool:
        return float(np.mean([each.measured for each in self._periods])) > LACKS

    def _load(self, periods: list[Period]) -> Load:
        return self._history.load(periods[0].began, periods[-1].ended)

    # --- ranking ------------------------------------------------------------------------------------

    def _rank(self, load: Load) -> Iterator[Move | None]:
        """Simulate each change, one at a time, and yield a move where there is something to do."""
        periods = list(self._periods)
        self.doing = "simulating what requests came to"
        self._pause_ns *= 2
        plain = self._forecast(self.now, periods)
        if plain is None or not self._believes(plain, periods):
            return
        yield None
        best = yield from self._best(self._untried(load), plain, periods)
        if best is not None and self._credit() > 0:
            yield self._try(best, plain, periods, load)
        if best is not None or (self._advised is not None and not load.unlike(self._advised)):
            return
        self._advised = load
        best = yield from self._best(self._levers.with_restart(self.now), plain, periods)
        if best is not None and best.low >= LEAST_GAIN and best.change.typed not in self._told:
            self._told.add(best.change.typed)
            words = f"{best.change.typed} is predicted to come {best} x nearer to objectives; it takes a restart"
            yield Move("recommended", words, None, best.change.typed)

    def _untried(self, load: Load) -> Iterator[Change]:
        """Changes that were not tried in vain under a like load."""
        for change in self._levers.changes(self.now, load.classes):
            if (failed := self._failed.get(change.typed)) is None or load.unlike(failed):
                yield change

    def _best(
        self, changes: Iterator[Change], plain: Forecast, periods: list[Period]
    ) -> Generator[None, None, Prediction | None]:
        """The change with the greatest predicted gain; None where none is predicted to gain enough."""
        latest, found = periods[-SCREENED:], list[Prediction]()
        of_latest = self._forecast(self.now, latest)
        if of_latest is None:
            return None
        for change in changes:
            self.doing = f"simulating {change.typed}"
            prediction = self._predicted(change, [of_latest], latest)
            if prediction is not None and prediction.times >= LEAST_GAIN:
                found.append(prediction)
            yield None
        found.sort(key=lambda each: each.times, reverse=True)
        again = self._forecast(self.now, periods, 1) if found else None
        several, sure = [plain, again] if again is not None else [plain], list[Prediction]()
        for each in found[:FINALISTS]:
            prediction = self._predicted(each.change, several, periods)
            if prediction is not None and prediction.low > 1.0 and prediction.times >= LEAST_GAIN:
                sure.append(prediction)
            yield None
        self.doing = "watching"
        return max(sure, key=lambda each: each.times, default=None)

    def _predicted(self, change: Change, plain: list[Forecast], periods: list[Period]) -> Prediction | None:
        """What a change is predicted to gain; None where it cannot be had, or slows others down.

        Args:
            plain: forecasts without it, by their seeds.
        """
        gains: list[float] = []
        for seed, now in enumerate(plain):
            then = self._forecast(applied(self.now, [change]), periods, seed)
            if then is None:
                return None
            common = now.others_ns.keys() & then.others_ns.keys()
            slower = [math.log((then.others_ns[each] + 1.0) / (now.others_ns[each] + 1.0)) for each in common]
            if slower and float(np.mean(slower)) > math.log(OTHERS_SLOWER):
                return None
            gains += [a - b for a, b in zip(self._losses(now, periods), self._losses(then, periods), strict=True)]
        return Prediction.of(change, gains)

    def _forecast(self, options: SchedulingOptions, periods: list[Period], seed: int = 0) -> Forecast | None:
        since = periods[0].began
        lead_ns = round(min(self._history.usual_length_ns(since), MOST_LEAD_NS))
        try:
            return self._forecaster.of(options, since, periods[-1].ended, lead_ns, seed)
        except ValueError:
            return None

    def _losses(self, found: Forecast, periods: list[Period]) -> list[float]:
        """The loss of each period in a forecast."""
        return [loss(np.array(self._of(found, each))) for each in periods]

    def _of(self, found: Forecast, period: Period) -> list[float]:
        numbers = (each.arrival.seq_id for each in self._history.arrived(period.began, period.ended))
        return [found.distances[number] for number in numbers if number in found.distances]

    def _believes(self, plain: Forecast, periods: list[Period]) -> bool:
        """Whether the simulation says of the settings as they are about what was measured."""
        said = self._losses(plain, periods)
        off = float(np.mean([each.measured - simulated for each, simulated in zip(periods, said, strict=True)]))
        if abs(off) > OFF:
            self.doing = f"watching: the simulation is off by {math.exp(abs(off)):.1f} x, so nothing is tried by it"
            return False
        return True

    # --- a trial ------------------------------------------------------------------------------------

    def _try(self, best: Prediction, plain: Forecast, periods: list[Period], load: Load) -> Move:
        for each, simulated in zip(periods, self._losses(plain, periods), strict=True):
            each.simulated = simulated
        distances = np.concatenate([each.distances for each in periods])
        usual = float(distances.mean()), float(distances.std())
        before, now, self._pause_ns = self.now, self._now_ns, RANKED_EVERY_NS
        settling_ns = round(min(max(PERIOD_NS / 2, self._history.usual_length_ns(periods[0].began)), MOST_SETTLING_NS))
        self._set(applied(before, [best.change]), now)
        self._period_began = now + settling_ns
        self.trial = Trial(best, before, periods, load, usual, now, self._history.engines)
        self.doing = f"trying {best.change.typed}"
        words = f"trying {best.change.typed}, which is predicted to come {best} x nearer to objectives"
        return Move("tried", words, self.now, best.change.typed)

    def _verdict(self, trial: Trial, now: int) -> list[Move]:
        load = self._load(trial.after)
        unlike = load.unlike(trial.load)
        if unlike and load.unlike(trial.load, may_be_more=True):
            return [self._roll_back(now, f"the load has changed: {unlike}")]
        if len(trial.after) < FEWEST_PAIRS or (len(trial.after) % 2 and len(trial.after) < len(trial.periods)):
            return []
        found = self._forecast(trial.before, trial.after)
        if found is None:
            return [self._roll_back(now, "the settings before cannot be simulated any more")]
        for each, simulated in zip(trial.after, self._losses(found, trial.after), strict=True):
            each.simulated = simulated
        race, change = trial.race, trial.prediction.change.typed
        low, high = race.interval
        shown = f"{race.times:.2f} ({low:.2f} to {high:.2f}) x in {len(race.gains)} periods"
        self.doing = f"trying {change}: {shown}"
        if race.verdict == "better":
            self.trial, self._proven = None, load
            self._set(self.now, now)
            self._ranked_ns, self._pause_ns = -HOUR, RANKED_EVERY_NS  # something else may help on top of it
            return [Move("kept", f"kept {change}: requests came {shown} nearer to objectives", None, change)]
        if unlike:
            return [self._roll_back(now, f"the load has changed: {unlike}")]
        if race.verdict != "undecided" or len(trial.after) >= len(trial.periods):
            return [self._roll_back(now, f"no gain is proven: {shown}")]
        return []

    def _harm(self, now: int) -> str | None:
        """Why a trial ends at once: its requests are clearly worse off than those before, and that costs too much."""
        trial = self.trial
        assert trial is not None
        mean, spread = trial.usual
        excess = [each - mean for each in self._so_far(trial, now)]
        worse = sum(excess)
        if worse > max(self._credit(), CLEARLY * spread * math.sqrt(len(excess) or 1)):
            return f"{len(excess)} requests came {math.exp(worse / len(excess)):.2f} x further from their objectives"
        return None

    def _so_far(self, trial: Trial, now: int) -> list[float]:
        """Distances of the requests since a change; of those under way only if they are worse than usual already."""
        seen = [each for each in self._history.arrived(trial.began, now + 1) if each.is_judged]
        known = [(each, each.distance(now)) for each in seen]
        return [distance for each, distance in known if each.ended_ns or distance > trial.usual[0]]

    def _roll_back(self, now: int, why: str) -> Move:
        trial = self.trial
        assert trial is not None
        excess = sum([each - trial.usual[0] for each in self._so_far(trial, now)])
        self._harms.append((now, max(0.0, excess)))
        change, self.trial = trial.prediction.change.typed, None
        self._failed[change] = trial.load
        self._set(trial.before, now)
        return Move("rolled back", f"rolled back {change}: {why}", trial.before, change)

    def _set(self, options: SchedulingOptions, now: int) -> None:
        """Have these settings from now on; periods before say nothing of them."""
        self.now, self._ranking, self._period_began = options, None, now
        self._open.clear()
        self._periods.clear()
        self.doing = "watching"

    # --- going back ---------------------------------------------------------------------------------

    def _compare_with_start(self) -> Iterator[Move | None]:
        """The load is not that under which changes were proven: go back where these are predicted to be worse."""
        periods = list(self._periods)
        self.doing = "simulating the load that has changed"
        plain = self._forecast(self.now, periods)
        yield None
        first = self._forecast(self.start, periods)
        yield None
        self.doing = "watching"
        if plain is None or first is None:
            yield self._go_back("the load has changed, and it cannot be simulated")
            return
        losses = zip(self._losses(plain, periods), self._losses(first, periods), strict=True)
        gain = float(np.mean([now - then for now, then in losses]))
        if gain > 0.0:
            yield self._go_back(
                f"the load has changed, and the settings of the start are predicted to come {math.exp(gain):.2f} x "
                "nearer to objectives"
            )

    def _go_back(self, why: str) -> Move:
        self._proven = None
        self._set(self.start, self._now_ns)
        return Move("went back", f"went back to the settings of the start: {why}", self.start)

    # --- what it may cost ---------------------------------------------------------------------------

    def _credit(self) -> float:
        """How many requests times how much worse trials may still make them."""
        now = self._now_ns
        for kept in (self._harms, self._counts):
            while kept and kept[0][0] < now - HOUR:
                kept.popleft()
        watched = min(HOUR, max(S, now - self._began_ns))
        judged = sum(count for _, count in self._counts) * HOUR / watched
        return MOST_HARM * TAIL * judged - sum(harm for _, harm in self._harms)

    def _may_compute(self, now: int) -> bool:
        return self._cpu_s() <= CPU_CREDIT_S + CPU_SHARE * (now - self._began_ns) / S
