"""What is tuned: a server that is started with given settings and measured, and its simulation where there is one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from headway.advisor.tuning.options import TUNABLE, TuneOptions
from headway.bench.interrupts import unless_stopped
from headway.bench.options import Target
from headway.bench.profile.local_server import LocalServer, StartedServer
from headway.bench.runs import Load, is_made_up, load_of
from headway.bench.session import Session
from headway.bench.start_command import free_port, placeholders, words
from headway.load.record import RequestRecord
from headway.load.workload.arrivals import make_arrival
from headway.policy.step.options import SchedulingOptions
from headway.simulator.engine import Host
from headway.simulator.learnt import RecordedStep
from headway.simulator.recording import Recording, read_recordings
from headway.simulator.verify import Measured, host_of, measure, recorded_steps, serve_flags, simulated

LEARN_SEEDS = (1_000_003, 1_000_033)  # added to the seed for the runs of the baseline
OTHER_DEVICE = "cuda"  # the default of --max-num-batched-tokens is that of a GPU, whatever another server has
Records = Sequence[RequestRecord]


class Subject:
    """A server under a load. It is started for each measurement, and a client puts the load on it.

    Attributes:
        device: cpu or cuda, once learn() has run or somebody who knows has set it.
        tunable: fields of SchedulingOptions that can be changed; None for all that candidates have.
    """

    def __init__(self, options: TuneOptions, stop: asyncio.Event) -> None:
        self._options, self._stop = options, stop
        self.device = ""
        self.tunable: frozenset[str] | None = None
        spec = options.workload
        arrival = make_arrival(options.arrivals, None if spec.mix else spec.dataset_name)
        self._load = load_of(dataclasses.replace(spec, arrival=arrival), options.max_concurrency)

    async def learn(self) -> list[Records]:
        """Measure the settings as given, with LEARN_SEEDS, and learn what a simulation needs."""
        return await self.measured(self._options.scheduling, LEARN_SEEDS)

    async def measured(self, scheduling: SchedulingOptions, seeds: Sequence[int]) -> list[Records]:
        """Start the server with these settings; what came of the load with each seed."""
        raise NotImplementedError

    async def simulated(self, scheduling: SchedulingOptions, seed: int) -> Records | None:
        """The same, simulated; None where nothing is known. Raises ValueError where settings contradict each other."""
        return None

    async def _runs(
        self, server: AbstractAsyncContextManager[LocalServer | StartedServer], seeds: Sequence[int]
    ) -> list[Measured]:
        async with server as started:
            target = Target(base_url=started.url)
            session = await unless_stopped(self._stop, Session.open(target, made_up=is_made_up(self._load.spec)))
            return [await measure(session, self._of_seed(seed), self._stop) for seed in seeds]

    def _of_seed(self, seed: int) -> Load:
        spec = dataclasses.replace(self._load.spec, seed=self._load.spec.seed + seed)
        return dataclasses.replace(self._load, spec=spec)


class HeadwayServer(Subject):
    """`headway serve`. Steps of the baseline are recorded, and the simulator learns from them how long they take."""

    def __init__(self, options: TuneOptions, stop: asyncio.Event) -> None:
        super().__init__(options, stop)
        self._learnt: tuple[Recording, list[RecordedStep], Host] | None = None

    async def learn(self) -> list[Records]:
        """See Subject."""
        file = self._options.output / "steps.jsonl"
        file.unlink(missing_ok=True)
        runs = await self._runs(self._server(self._options.scheduling, "--record-steps", str(file)), LEARN_SEEDS)
        recording = read_recordings(file)[-1]
        steps = recorded_steps(recording, runs)
        self._learnt = recording, steps, host_of(recording, runs, steps)
        self.device = "cpu" if recording.engine.device == "cpu" else "cuda"
        return [each.result.records for each in runs]

    async def measured(self, scheduling: SchedulingOptions, seeds: Sequence[int]) -> list[Records]:
        """See Subject."""
        return [each.result.records for each in await self._runs(self._server(scheduling), seeds)]

    async def simulated(self, scheduling: SchedulingOptions, seed: int) -> Records | None:
        """See Subject. What an interrupted tuning had learnt is learnt again first."""
        if self._learnt is None:
            await self.learn()
        assert self._learnt is not None
        recording, steps, host = self._learnt
        await unless_stopped(self._stop, asyncio.sleep(0))
        return simulated(recording, steps, self._of_seed(seed), host, scheduling).records

    def _server(self, scheduling: SchedulingOptions, *more: str) -> LocalServer:
        options = self._options
        named = [options.model] if options.model is not None else []
        return LocalServer([*named, *serve_flags(options.model_options, scheduling), *more], options.ready_timeout_s)


class OtherServer(Subject):
    """Any server with an OpenAI API, by the command that starts it. Nothing is known of its steps.

    Args:
        options: `start` has {port}, and the names of settings where their values belong.
    """

    def __init__(self, options: TuneOptions, stop: asyncio.Event) -> None:
        super().__init__(options, stop)
        self._start = options.start or ""
        self.device = OTHER_DEVICE
        self.tunable = placeholders(self._start) & frozenset(TUNABLE)

    async def measured(self, scheduling: SchedulingOptions, seeds: Sequence[int]) -> list[Records]:
        """See Subject."""
        port = free_port()
        command = start_command(self._start, scheduling, self.device, port)
        server = StartedServer(command, f"http://127.0.0.1:{port}", self._options.ready_timeout_s)
        return [each.result.records for each in await self._runs(server, seeds)]


def start_command(start: str, scheduling: SchedulingOptions, device: str, port: int | str = "{port}") -> list[str]:
    """The words of a start command with the values of these settings."""
    values = {"max_num_seqs": scheduling.max_num_seqs, "max_num_batched_tokens": scheduling.batched_tokens(device)}
    return words(start, {name: str(value) for name, value in (values | {"port": port}).items()})


def subject_of(options: TuneOptions, stop: asyncio.Event) -> Subject:
    """The server that is to be tuned."""
    return HeadwayServer(options, stop) if options.start is None else OtherServer(options, stop)
