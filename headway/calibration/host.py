"""The engine itself on models so small that next to nothing but its host's work is left of a step."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from headway.calibration.samples import Kind, Piece
from headway.cost.config import read_shape
from headway.cost.shape import ModelShape
from headway.engine.build import build_engine
from headway.engine.config import EngineConfig
from headway.engine.core import EngineCore
from headway.engine.messages import AddRequest
from headway.policy.step.sampling_params import SamplingParams

PROMPT = 8  # tokens
UNTIMED = 3  # steps that bring everything into place
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def tiny_shape(layers: int) -> ModelShape:
    """The shape of the model that `HostBench` runs."""
    return read_shape({**CONFIG, "num_hidden_layers": layers}, "the tiny model")


class HostBench:
    """The engine with a tiny model of random weights, in this process.

    Args:
        layers: the number of layers of the model; each adds ten kernels to a step and little else.
        steps: the number of steps that are timed at a time.
        between: called before each of these. On a CPU, the weights of a model that is no tiny one drive what the host
            needs out of the near caches, and its work takes twice as long.
    """

    def __init__(
        self,
        layers: int,
        device: str,
        threads: int | None,
        steps: int,
        between: Callable[[], object] = lambda: None,
    ) -> None:
        self._layers = layers
        self._steps = steps
        self._between = between
        self._ids = count()
        with tempfile.TemporaryDirectory(prefix="headway-") as folder:
            config = {**CONFIG, "num_hidden_layers": layers}
            (Path(folder) / "config.json").write_text(json.dumps(config))
            self._core = build_engine(_settings(folder, device, threads)).core

    def piece(self, sequences: int) -> Piece:
        """A decode step of so many sequences."""
        context = PROMPT + UNTIMED + self._steps // 2
        return Piece(
            Kind.STEP,
            "bf16",
            f"{self._layers} layers",
            sequences,
            layers=self._layers,
            sequences=sequences,
            context=context,
        )

    def seconds(self, sequences: int) -> list[float]:
        """The seconds that each of some decode steps takes."""
        core = self._core
        with _decoding(core, sequences, UNTIMED + self._steps + 2, self._ids):
            for _ in range(UNTIMED):
                core.step()
            return [self._timed() for _ in range(self._steps)]

    def _timed(self) -> float:
        self._between()
        began = time.perf_counter()
        self._core.step()
        return time.perf_counter() - began


def _settings(folder: str, device: str, threads: int | None) -> EngineConfig:
    return EngineConfig(
        folder,
        dtype="bfloat16",
        load_format="dummy",
        device=device,
        num_threads=threads,
        scheduling_policy="fcfs",
        max_num_seqs=64,
        kv_cache_memory=64 * 2**20,
        enable_prefix_caching=False,
    )


@contextmanager
def _decoding(core: EngineCore, sequences: int, tokens: int, ids: Iterator[int]) -> Iterator[None]:
    """Let `sequences` sequences decode in every step inside. `tokens` must be more than any of them takes."""
    greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    names = [str(next(ids)) for _ in range(sequences)]
    for name in names:
        core.add(AddRequest(name, [1] * PROMPT, greedy, []))
    try:
        while not all(each.is_decoding for each in core.scheduler.running) or len(core.scheduler.waiting):
            core.step()
        yield
    finally:
        for name in names:
            core.abort(name)
