"""Requests of tests: what the scripted server shall do, sent, and the record of it."""

from __future__ import annotations

from typing import Any

from headway.bench.client.openai_client import OpenAIClient
from headway.load.record import RequestRecord
from headway.load.request import PlannedRequest, Prompt
from tests.bench.script import script


def planned(index: int = 0, *, output_tokens: int = 4, **fields: Any) -> PlannedRequest:
    """A request whose script has these fields, logged under its index unless an id is given."""
    prompt = Prompt(text=script(**{"id": str(index), **fields}))
    return PlannedRequest(index, prompt, None, output_tokens)


async def send(client: OpenAIClient, index: int = 0, **fields: Any) -> RequestRecord:
    record = RequestRecord(index)
    await client.send(planned(index, **fields), record)
    return record
