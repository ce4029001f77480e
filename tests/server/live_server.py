"""A real server on a loopback port, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx

from headway.server.app import create_app
from headway.server.edge.listening import Certificate, bind
from headway.server.lifecycle import Server
from headway.server.settings import ServerSettings
from headway.text.chat_template import ChatTemplate
from headway.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine

MODEL = "tiny"


def settings(**changes: Any) -> ServerSettings:
    return ServerSettings(**{"served_model_names": [MODEL], "log_level": "error", **changes})


def eventually(check: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until `check` holds; fail when it does not in time."""
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)


class LiveServer:
    """Runs from start() to stop(); `url` is where."""

    def __init__(
        self, engine: FakeEngine, tokenizer: Tokenizer, template: ChatTemplate | None = None, **changes: Any
    ) -> None:
        self.engine = engine
        self.app = create_app(engine, tokenizer, settings(**changes), template)
        self.service = self.app.state.service
        certificate = Certificate.of(self.service.settings)
        self.server = Server(self.app, self.service.settings, certificate)
        self._listener = bind("127.0.0.1", 0)
        self.port = self._listener.getsockname()[1]
        self.url = f"http{'s' * (certificate is not None)}://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=20, verify=certificate is None)
        self.loop = self.server.config.get_loop_factory()()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self.server.serve(sockets=[self._listener]))

    def start(self) -> LiveServer:
        self._thread.start()
        eventually(lambda: self.server.started)
        return self

    def call(self, function: Callable[[], Any]) -> None:
        """Run a function in the server's loop."""
        self.loop.call_soon_threadsafe(function)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def stop(self) -> None:
        self.client.close()
        self.call(self.server.drain)
        self.join()

    def join(self) -> None:
        self._thread.join(15)
        assert not self._thread.is_alive()
        self.loop.close()
