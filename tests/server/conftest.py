"""A tokenizer trained on the spot, a scripted engine, and a live server over both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from headway.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer, eventually
from tests.text.tiny_tokenizers import save_chat_model

StartServer = Callable[..., LiveServer]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


@pytest.fixture(scope="session")
def shared_server(tokenizer: Tokenizer) -> Iterator[LiveServer]:
    """One server for all tests that need no settings of their own: starting one takes half a second."""
    server = LiveServer(FakeEngine(tokenizer), tokenizer).start()
    yield server
    server.stop()


@pytest.fixture
def engine(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Iterator[FakeEngine]:
    """The engine behind `server`, or behind what `start_server` starts."""
    if "start_server" in request.fixturenames:
        yield FakeEngine(tokenizer)
        return
    engine = request.getfixturevalue("shared_server").engine
    engine.reset()
    yield engine
    engine.reset()
    eventually(lambda: not engine.running)


@pytest.fixture
def server(shared_server: LiveServer, engine: FakeEngine) -> LiveServer:
    return shared_server


@pytest.fixture
def start_server(engine: FakeEngine, tokenizer: Tokenizer) -> Iterator[StartServer]:
    """Start servers with other settings than the defaults; all are stopped at the end."""
    running: list[LiveServer] = []

    def start(**changes: Any) -> LiveServer:
        server = LiveServer(engine, tokenizer, **changes).start()
        running.append(server)
        return server

    yield start
    engine.open, engine.step_s = True, 0.0
    for server in running:
        server.stop()


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
