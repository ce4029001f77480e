"""The way other load generators read streams: one aiohttp session, a coroutine for each stream, JSON of each chunk.

A stand-in for the client of `headway bench` in benchmarks/bench_client.py: everything around it is the same.
"""

from __future__ import annotations

import json
import time
from typing import Any, Self

import aiohttp

from headway.load.record import Failure, FailureKind, RequestRecord
from headway.load.request import PlannedRequest, Prompt


class AiohttpClient:
    """Sends requests and notes when chunks came. It expects what the trivial server sends."""

    def __init__(self, url: str) -> None:
        self._url = url + "/v1/completions"

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=3600))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def busy_sockets(self) -> list[int]:
        return []

    async def send(self, planned: PlannedRequest, record: RequestRecord, prompt: Prompt | None = None) -> None:
        body: dict[str, Any] = {
            "model": "trivial",
            "prompt": planned.prompt.text,
            "max_tokens": planned.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        record.sent_ns = time.monotonic_ns()
        try:
            record.text = await self._receive(body, record)
        except (aiohttp.ClientError, OSError) as error:
            record.failure = Failure(FailureKind.CONNECT, str(error))
        record.end_ns = time.monotonic_ns()

    async def _receive(self, body: dict[str, Any], record: RequestRecord) -> str:
        rest, texts = b"", []
        async with self._session.post(self._url, json=body) as response:
            async for data in response.content.iter_any():
                now = time.monotonic_ns()
                *events, rest = (rest + data).split(b"\n\n")
                for event in events:
                    content = event.removeprefix(b"data: ")
                    if content == b"[DONE]":
                        continue
                    message = json.loads(content)
                    if message["choices"] and message["choices"][0]["text"]:
                        record.chunk_ns.append(now)
                        record.chunk_tokens.append(1)
                        texts.append(message["choices"][0]["text"])
                    if usage := message.get("usage"):
                        record.output_tokens = usage["completion_tokens"]
        return "".join(texts)
