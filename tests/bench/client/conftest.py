"""One scripted server for all tests that need no options of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from headway.bench.client.endpoint import Endpoint, OpenAIClient
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
