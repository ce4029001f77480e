"""A short, bounded probe of a running server: some forty small requests in five stages, and its metrics around each.

Prompts are made anew each time, so that no earlier probe has left them in the server's prefix cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from headway.advisor import machine
from headway.advisor.evidence import Evidence, Stage, increase, median
from headway.bench.client.asker import Asker
from headway.bench.client.load import LoadMode, Pace, run_load
from headway.bench.client.openai_client import OpenAIClient
from headway.bench.client.request_body import BodyBuilder
from headway.bench.client.serving_process import serving_family
from headway.bench.options import Target
from headway.bench.session import Session
from headway.load.errors import BenchError
from headway.load.measures.server_metrics import parse_metrics, read_gauges
from headway.load.request import PlannedRequest, Prompt
from headway.load.workload.prompts import PromptMaker

SHORT, LONG = 48, 768  # tokens of prompts, where the context has room for them
ALONE, REPEATED, CROWD, STREAMS, PROMPTS = 5, 3, 16, 3, 6
ANSWER, LONGEST_ANSWER = 32, 160
STAGE_S = 3.0  # answers are shorter on servers that would need longer for a stage
GAUGES_EVERY_S = 0.2
OPEN_ENDED = 8192  # tokens of the context of a server that does not tell


@dataclass(frozen=True, slots=True)
class Limits:
    """How far a probe may go."""

    seconds: float = 30.0  # no stage is begun later than this, and no request waits longer
    requests: bool = True  # False to read the metrics alone, twice, so many seconds apart
    machine: bool = True  # whether to look at the processes of a server on this machine


async def probe(target: Target, limits: Limits) -> Evidence:
    """Probe a server.

    Raises:
        BenchError: it cannot be reached, answers nothing that can be read, or has no metrics where only those are
            wanted.
    """
    session = await Session.open(target)
    salt = secrets.token_hex(8) if session.server.endpoint.cache_salt else ""
    endpoint = replace(session.server.endpoint, cache_salt=salt, timeout_s=limits.seconds)
    session = replace(session, server=replace(session.server, endpoint=endpoint))
    if not limits.requests and not session.server.metrics:
        raise BenchError(f"{endpoint.base_url} has no /metrics, so nothing is known without requests")
    async with Asker.open(endpoint) as asker, OpenAIClient(endpoint) as client:
        return await _Probe(session, asker, client, limits).run()


class _Probe:
    def __init__(self, session: Session, asker: Asker, client: OpenAIClient, limits: Limits) -> None:
        self._session, self._asker, self._client, self._limits = session, asker, client, limits
        self._until = time.monotonic() + limits.seconds
        self._maker = PromptMaker(session.source, secrets.randbits(32))
        self._gauges: dict[str, float] = {}
        self._clocks: list[tuple[float, str]] = []
        self._skipped: list[str] = []
        context = session.server.max_model_len or OPEN_ENDED
        self._long = max(1, min(LONG, context * 3 // 4))
        self._short = max(1, min(SHORT, self._long // 4))
        self._room = max(2, context - self._long - 8)

    async def run(self) -> Evidence:
        server, began = self._session.server, await self._scrape()
        found = Evidence(
            server.kind,
            server.about,
            lengths=(self._short, self._long),
            lifetime=increase("", began),
            metrics=frozenset(parse_metrics(began).series) if began else frozenset(),
        )
        found = await (self._stages(found) if self._limits.requests else self._watch(found))
        ended = await self._scrape()
        return replace(
            found,
            counted=increase(began, ended),
            gauges=dict(self._gauges),
            skipped=tuple(self._skipped),
            traced_steps=await self._traced_steps(),
        )

    async def _traced_steps(self) -> int | None:
        events = (await self._asker.look("GET", "/debug/profile?steps=20")).content.get("traceEvents")
        return sum(each.get("name") == "step" for each in events) if isinstance(events, list) else None

    async def _limits_told(self) -> dict[str, str]:
        """The headers of a tiny request's answer that tell limits."""
        endpoint = self._session.server.endpoint
        fields = BodyBuilder(endpoint).fields(Prompt(text="Hello"), 1, {}) | {"stream": False}
        fields.pop("stream_options", None)
        reply = await self._asker.look("POST", endpoint.route, fields)
        pairs = ((name.decode().lower(), value.decode()) for name, value in reply.response_headers.items())
        return {name: value for name, value in pairs if name.startswith("x-ratelimit-limit")}

    async def _watch(self, found: Evidence) -> Evidence:
        """Look at the server while others use it."""
        family = self._family()
        before = machine.read(family)
        async with self._watched():
            await asyncio.sleep(self._limits.seconds)
        return replace(found, machine=self._look(family, before))

    async def _stages(self, found: Evidence) -> Evidence:
        await self._send("warm-up", [self._long, *[self._short] * 4], 8, 4)
        found = replace(found, limits=await self._limits_told())
        alone = await self._send("single requests", [self._short] * ALONE, ANSWER, 1)
        if alone.records and not alone.answered:
            raise BenchError(f"none of the probe's requests was answered: {alone.records[0].reason}")
        answer, streamed = self._answers(alone)
        found = replace(found, alone=alone)
        requests = [self._request(number, self._long, 4) for number in range(REPEATED)]
        found = replace(found, first=await self._send_all("long prompts", requests, 1))
        # The last one first: a cache that has room for a single prompt still has that one.
        found = replace(found, again=await self._send_all("repeated prompts", requests[::-1], 1))
        found = replace(found, tokenize_ms=await self._tokenizing(requests[0]))
        family = self._family()
        before = machine.read(family)
        async with self._watched():
            found = replace(found, crowd=await self._send("a crowd", [self._short] * CROWD, answer, CROWD))
            streams, prompts = await self._beside(alone, streamed)
        return replace(found, beside=streams, prompts=prompts, machine=self._look(family, before))

    def _answers(self, alone: Stage) -> tuple[int, int]:
        """Tokens of answers in a crowd and of streams, so that a slow server is not asked for too much."""
        tpot_ms = alone.tpot_ms or 1.0
        affordable = min(self._room, int(STAGE_S * 1e3 / tpot_ms))
        return max(4, min(ANSWER, affordable)), max(12, min(LONGEST_ANSWER, affordable))

    async def _beside(self, alone: Stage, streamed: int) -> tuple[Stage, Stage]:
        """Streams, and long prompts that come once those have some tokens."""
        streams = [self._request(number, self._short, streamed, 0.0) for number in range(STREAMS)]
        at_s = ((median(alone.ttft_ms) or 0.0) * STREAMS + 6 * (alone.tpot_ms or 0.0)) / 1e3
        prompts = [self._request(STREAMS + number, self._long, 2, at_s) for number in range(PROMPTS)]
        both = await self._send_all("streams beside long prompts", streams + prompts, None)
        parts = [record.index < STREAMS for record in both.records]
        kept = list(zip(both.records, parts, strict=True))
        return (
            Stage([record for record, is_stream in kept if is_stream], both.counted),
            Stage([record for record, is_stream in kept if not is_stream], both.counted),
        )

    async def _send(self, name: str, prompts: list[int], answer: int, at_once: int) -> Stage:
        """Send prompts of these lengths, with new text each."""
        requests = [self._request(number, length, answer) for number, length in enumerate(prompts)]
        return await self._send_all(name, requests, at_once)

    async def _send_all(self, name: str, requests: list[PlannedRequest], at_once: int | None) -> Stage:
        """Send requests, so many at once, or at their times; none where the time is over."""
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            self._skipped.append(name)
            return Stage([])
        before = await self._scrape()
        mode = LoadMode.OPEN if at_once is None else LoadMode.CLOSED
        outcome = await run_load(self._client, requests, Pace(mode, at_once, drain_s=left_s, grace_s=0.0))
        return Stage(outcome.records, increase(before, await self._scrape()))

    def _request(self, index: int, tokens: int, answer: int, arrival_s: float | None = None) -> PlannedRequest:
        made = self._maker.make(tokens)
        fields = {"temperature": 0.0}
        return PlannedRequest(index, made.prompt, made.tokens, answer, arrival_s=arrival_s, extra_body=fields)

    async def _tokenizing(self, request: PlannedRequest) -> float | None:
        """Milliseconds that the server's tokenizer takes for a prompt, less those of an empty text."""
        text = request.prompt.text
        if not self._session.server.tokenize or text is None:
            return None
        key = "content" if self._session.server.kind == "llamacpp" else "prompt"
        model = self._session.server.endpoint.model
        named = {"model": model} if model and key == "prompt" else {}
        whole = [await self._timed({key: f"{text} {number}", **named}) for number in range(3)]
        little = [await self._timed({key: "a", **named}) for _ in range(3)]
        return max(0.0, min(whole) - min(little))

    async def _timed(self, body: dict[str, str]) -> float:
        began = time.perf_counter()
        await self._asker.look("POST", "/tokenize", body)
        return (time.perf_counter() - began) * 1e3

    # --- what is around the requests ------------------------------------------------------------------

    async def _scrape(self) -> str:
        """The text of /metrics; "" where it cannot be had."""
        return await self._asker.metrics() if self._session.server.metrics else ""

    @contextlib.asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        """Note the highest values of the gauges inside, and the clocks of the processors."""
        watching = asyncio.create_task(self._watch_gauges())
        try:
            yield
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

    async def _watch_gauges(self) -> None:
        while True:
            for name, value in read_gauges(await self._scrape()).items():
                self._gauges[name] = max(value, self._gauges.get(name, 0.0))
            if self._limits.machine and (clock := machine.frequency()) is not None:
                self._clocks.append(clock)
            await asyncio.sleep(GAUGES_EVERY_S)

    def _family(self) -> set[int]:
        address = self._session.server.endpoint.address
        return serving_family(address.host, address.port) if self._limits.machine else set()

    def _look(self, family: set[int], before: machine.Reading) -> machine.MachineLook | None:
        after = machine.read(family)
        return machine.look(before, after, self._clocks) if after.ran else None
