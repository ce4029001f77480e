"""The whole server with adapters: by name, loaded while it runs, and again in the next engine process."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from tests.models import lora
from tests.server.live.test_live_engine import CONFIG, GREEDY, Live
from tests.server.live.test_live_engine import folder as folder
from tests.server.live_server import eventually

ASKED: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 120, "return_token_ids": True, **GREEDY}


def test_adapters_of_a_server(folder: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, vocab_size=300))
    for seed, name in enumerate("abc"):
        lora.save(tmp_path / name, model, 4, seed, lora_alpha=64)
    modules = [f"{name}={tmp_path / name}" for name in "ab"]
    with closing(Live(folder, "--lora-modules", *modules, "--max-loras", "1", "--api-key", "secret")) as server:
        server.http.headers["authorization"] = "Bearer secret"
        eventually(server.is_ready, 90)
        told = {"lora_name": "c", "lora_path": str(tmp_path / "c")}
        assert server.http.post("/v1/load_lora_adapter", json=told).status_code == 200
        cards = server.http.get("/v1/models").json()["data"]
        assert [(each["id"], each["parent"]) for each in cards] == [("random", None)] + [(n, "random") for n in "abc"]
        tokens = {}
        for name in ("random", "a", "b", "c"):
            answer = server.complete(model=name, include_timings=True, **ASKED)
            tokens[name], timings = answer["choices"][0]["token_ids"], answer["timings"]
            assert sum(timings["phases_ns"].values()) == timings["e2e_ns"]
            assert ("queue_adapter" in timings["phases_ns"]) == (name != "random")
        assert len({tuple(each) for each in tokens.values()}) == 4
        found: list[int] = []
        for chunk in server.stream(model="c", **ASKED):
            if len(found) < 20 <= len(found) + len(chunk["choices"][0]["token_ids"]):
                os.kill(server.engine_process().pid, signal.SIGKILL)
            found += chunk["choices"][0]["token_ids"]
        assert found == tokens["c"]
        bad = {"lora_name": "d", "lora_path": "/none"}
        refused = server.http.post("/v1/load_lora_adapter", json=bad)
        assert refused.status_code == 400 and "there is no such folder" in refused.json()["error"]["message"]
