"""One scripted server for all tests that need no options of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import uvloop

from headway.bench.client import alarm
from headway.bench.client.openai_client import OpenAIClient
from headway.load.endpoint import Endpoint
from tests.bench.client.senders import Run
from tests.bench.scripted_server import ScriptedServer


@pytest.fixture(scope="session")
def shared_scripted_server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def server(shared_scripted_server: ScriptedServer) -> ScriptedServer:
    shared_scripted_server.forget()
    return shared_scripted_server


@pytest.fixture
async def client(server: ScriptedServer) -> AsyncIterator[OpenAIClient]:
    async with OpenAIClient(Endpoint(server.url, model="scripted")) as client:
        yield client


@pytest.fixture(params=["asyncio", "uvloop", "no timerfd"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a coroutine in each kind of event loop that a user may have."""
    if request.param == "no timerfd":
        monkeypatch.setattr(alarm, "_libc", lambda: None)
    return uvloop.run if request.param == "uvloop" else asyncio.run
