"""A server that has been looked at and can be measured, as often as needed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway.bench.client.asker import Asker
from headway.bench.client.load import LoadListener, LoadOutcome, Pace, run_load
from headway.bench.client.openai_client import OpenAIClient
from headway.bench.client.probe import Server, probe
from headway.bench.client.processes import ClientProcesses, Share, shares_of
from headway.bench.client.serving_process import runs_here
from headway.bench.options import Target
from headway.bench.tokens import token_source
from headway.load.errors import BenchError
from headway.load.measures.energy import EnergyMeter, energy_meter
from headway.load.measures.server_metrics import read_gauges, server_metrics
from headway.load.record import RunResult
from headway.load.request import PlannedRequest
from headway.load.workload.build import Workload
from headway.load.workload.prompts import TokenSource

EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Session:
    """A server that can be measured."""

    server: Server
    source: TokenSource
    tokens: str  # in words, what prompts are made of

    @classmethod
    async def open(cls, target: Target, made_up: bool = True) -> Session:
        """Look at the server.

        Args:
            made_up: prompts will be, so that their answers' lengths are only those asked for if the end token is
                ignored.

        Raises:
            BenchError: it cannot be reached, or cannot be asked for what is wanted.
        """
        if target.ignore_eos and not target.generates:
            raise BenchError(f"--ignore-eos and --backend {target.backend} exclude each other: nothing is generated")
        to_the_end = target.generates and made_up and target.ignore_eos is None
        server = await probe(target.endpoint(), target.ready_timeout_s, may_ignore_eos=to_the_end)
        return cls(server, *await token_source(target, server))

    async def is_here(self) -> bool:
        """Whether the server is known to run on this machine, so that the machine's energy is the server's."""
        address = self.server.endpoint.address
        return await asyncio.to_thread(runs_here, address.host, address.port)

    async def measure(
        self,
        workload: Workload,
        pace: Pace,
        *,
        settings: dict[str, Any],
        cache_salt: str = "",
        warm_ups: Sequence[PlannedRequest] = (),
        probes: Iterator[PlannedRequest] | None = None,
        stop: asyncio.Event | None = None,
        listener: LoadListener | None = None,
        keep_text: bool = False,
        processes: int = 1,
    ) -> RunResult:
        """Run the workload once.

        Args:
            pace: but for the users of a mix's classes, which the workload knows.
            settings: what is kept with the result as what was asked for.
            cache_salt: the salt of all requests; for a server that honours one.
            keep_text: whether to keep the texts of all answers. Those that later turns need are kept in any case.
            processes: how many processes send the requests, if there are enough of them; 1 is this one.
            The rest: see `run_load`.

        Raises:
            BenchError: the workload does not fit, or every warm-up failed.
        """
        follow = any(request.follows is not None for request in workload.requests)
        endpoint = replace(self.server.endpoint, cache_salt=cache_salt)
        client, pace = OpenAIClient(endpoint, keep_text=keep_text or follow), replace(pace, users=workload.users)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(client)
            surroundings = await stack.enter_async_context(_surroundings(self))
            elsewhere = None
            if processes > 1:
                shares = shares_of(Share(endpoint, keep_text or follow, workload.requests, pace), processes)
                settings = settings | {"client_processes": len(shares)}
                children = ClientProcesses(shares, listener or LoadListener())
                elsewhere = (await stack.enter_async_context(children)).go
            outcome = await run_load(
                client,
                workload.requests,
                pace,
                probes=probes,
                warm_ups=warm_ups,
                as_messages=endpoint.is_chat,
                before_load=surroundings.begin,
                elsewhere=elsewhere,
                stop=stop,
                listener=listener,
                sockets=client.busy_sockets,
            )
            metrics, joules = await surroundings.end(outcome.began_ns)
            about = self.server.about | {"on_this_machine": surroundings.is_here}
        if outcome.gave_up is not None:
            raise BenchError(f"{endpoint.base_url}: {outcome.gave_up}")
        outcome.settings = {**settings, **_departures(outcome)}
        outcome.server = about | ({"metrics": metrics} if metrics else {})
        outcome.energy_joules = joules
        return outcome


def _departures(outcome: LoadOutcome) -> dict[str, Any]:
    """How the run departed from its settings; empty when it did not."""
    happened = {
        "never_due": outcome.never_due,
        "waited_for_place": outcome.waited_for_place,
        "longest_wait_ms": round(outcome.longest_wait_ms, 3),
        "abandoned_in_flight": outcome.abandoned_in_flight,
        "warm_up_failures": len(outcome.warm_up_failures),
    }
    return {name: value for name, value in happened.items() if value}


class _Surroundings:
    """What is recorded around a run: the server's metrics before and after it, its gauges every second, and the energy
    of the machine if the server is known to run on it.
    """

    def __init__(self, asker: Asker | None, look: Callable[[], Awaitable[bool]]) -> None:
        self.is_here = False
        self._asker = asker
        self._look = look
        self._meter: EnergyMeter | None = None
        self._before = ""
        self._gauges: list[tuple[int, dict[str, float]]] = []
        self._watching: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Note that the measured part begins."""
        self._before = await self._scrape()
        self.is_here = await self._look()
        self._meter = energy_meter() if self.is_here else None
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            if self._meter is not None:
                self._meter.read()
            if self._before:
                now_ns = time.monotonic_ns()
                self._gauges.append((now_ns, read_gauges(await self._scrape())))

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching

    async def end(self, began_ns: int) -> tuple[dict[str, Any], float | None]:
        """The change of the server's metrics since begin(), {} where it has none; and the joules."""
        joules = self._meter.read() if self._meter is not None else None
        await self.stop()
        self.is_here = self.is_here and await self._look()  # a proxy may have had no connection to show before
        joules = joules if self.is_here else None
        after = await self._scrape() if self._before else ""
        if not after:
            return {}, joules
        gauges = [((at_ns - began_ns) / 1e9, values) for at_ns, values in self._gauges if at_ns >= began_ns]
        return server_metrics(self._before, after, gauges), joules

    async def _scrape(self) -> str:
        """The text of /metrics; "" where it cannot be had."""
        return "" if self._asker is None else await self._asker.metrics()


@contextlib.asynccontextmanager
async def _surroundings(session: Session) -> AsyncIterator[_Surroundings]:
    async with Asker.open(session.server.endpoint) as asker:
        surroundings = _Surroundings(asker if session.server.metrics else None, session.is_here)
        try:
            yield surroundings
        finally:
            await surroundings.stop()
