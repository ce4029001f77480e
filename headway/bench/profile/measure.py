"""Sending the profile's requests one at a time, the lengths in turn: a drift of the machine meets all of them alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from headway.bench.client.endpoint import Endpoint
from headway.bench.client.load import LoadListener, LoadMode, LoadOutcome, run_load
from headway.bench.client.openai_client import OpenAIClient
from headway.bench.errors import BenchError
from headway.bench.record import RequestRecord
from headway.bench.request import PlannedRequest
from headway.bench.workload.prompts import PromptMaker
from headway.bench.workload.token_sources import TokenizerSource
from headway.text.tokenizer import TextError, Tokenizer


def plan_requests(
    folder: Path, lengths: Sequence[int], repeats: int, output_len: int, seed: int = 0
) -> tuple[list[PlannedRequest], list[PlannedRequest]]:
    """Warm-ups, one of each length, and the requests themselves, round by round.

    Prompts are text, so that tokenizing them is measured; no two share a beginning, so that no prefix cache helps.

    Raises:
        BenchError: the model's tokenizer is missing or can make no prompts.
    """
    try:
        maker = PromptMaker(TokenizerSource(Tokenizer.load(folder)), seed)
    except TextError as error:
        raise BenchError(str(error)) from None

    def plan(index: int, length: int) -> PlannedRequest:
        made = maker.make(length)
        return PlannedRequest(index, made.prompt, length, output_len)

    warm_ups = [plan(index, length) for index, length in enumerate(lengths)]
    rounds = [length for _ in range(repeats) for length in lengths]
    return warm_ups, [plan(index, length) for index, length in enumerate(rounds)]


async def send_all(
    base_url: str,
    warm_ups: Sequence[PlannedRequest],
    requests: Sequence[PlannedRequest],
    timeout_s: float,
    stop: asyncio.Event,
    on_done: Callable[[], None],
) -> LoadOutcome:
    """Send them to the server and see how each went; `stop` ends it with what there is by then.

    Raises:
        BenchError: every warm-up failed, so that there is nothing to measure.
    """
    endpoint = Endpoint(
        base_url,
        ignore_eos=True,
        extra_body={"temperature": 0.0},
        include_timings=True,
        continuous_usage=True,
        timeout_s=timeout_s,
    )
    async with OpenAIClient(endpoint) as client:
        outcome = await run_load(
            client,
            requests,
            mode=LoadMode.CLOSED,
            max_concurrency=1,
            warm_ups=warm_ups,
            grace_s=0.0,
            stop=stop,
            listener=_Progress(on_done),
            sockets=client.busy_sockets,
        )
    if outcome.gave_up is not None:
        raise BenchError(outcome.gave_up)
    return outcome


class _Progress(LoadListener):
    def __init__(self, on_done: Callable[[], None]) -> None:
        self._on_done = on_done

    def ended(self, record: RequestRecord) -> None:
        self._on_done()
