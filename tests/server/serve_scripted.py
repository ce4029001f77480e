"""The `headway` command with the scripted engine in the place of the real one.

Attributes of the engine come as a JSON object in the environment variable FAKE_ENGINE.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import headway.engine.client
from headway.cli import main
from headway.engine.config import EngineConfig
from headway.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine


def scripted(
    config: EngineConfig, on_progress: Callable[[str, int], None], replay: bool, timeout_s: float | None = None
) -> FakeEngine:
    engine = FakeEngine(Tokenizer.load(config.model))
    for name, value in json.loads(os.environ.get("FAKE_ENGINE", "{}")).items():
        setattr(engine, name, value)
    on_progress("storage_read", 5_000_000)
    return engine


headway.engine.client.EngineClient = scripted  # type: ignore[assignment,misc]
main()
