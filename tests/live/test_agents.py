"""Agents and clients of others, in environments of their own, against the bundled model: see agent_loops.py.

`make test-agents` makes the environments. HEADWAY_AGENTS names others: folders of environments, separated by colons.
What is in this one runs here, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jsonschema_rs
import pytest
from pydantic import TypeAdapter

from tests.live import agent_loops
from tests.live.conftest import SOURCE, Served
from tests.server.test_tools import TEMPLATE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
MADE = f"{SOURCE}/.venv-agents:{SOURCE}/.venv-openai2"
FOLDERS = [sys.prefix, *os.environ.get("HEADWAY_AGENTS", MADE).split(":")]
LOOKS = "import importlib.util, sys; print(importlib.util.find_spec(sys.argv[1]) is not None)"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("template") / "tools.jinja"
    path.write_text(TEMPLATE)
    served = Served("--chat-template", str(path), "--reasoning-parser", "none").until_ready()
    yield served.url
    served.stop()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: Path(folder).name)
@pytest.mark.parametrize("client", agent_loops.CLIENTS)
def test_a_loop_of_three_turns(url: str, client: str, folder: str) -> None:
    python = Path(folder) / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no environment {folder}; make test-agents makes it")
    environment = {**os.environ, "OPENAI_API_KEY": "none", "PYTHONPATH": ""}
    if "True" not in subprocess.run([python, "-c", LOOKS, client], capture_output=True, text=True, check=True).stdout:
        pytest.skip(f"{client} is not in {folder}")
    done = subprocess.run(
        [python, agent_loops.__file__, client, url], capture_output=True, text=True, timeout=400, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    calls = json.loads(done.stdout.splitlines()[-1])
    assert len(calls) >= agent_loops.TURNS
    for name, arguments in calls:
        schema = TypeAdapter(agent_loops.FUNCTIONS[name]).json_schema()
        jsonschema_rs.validate(schema, arguments)
