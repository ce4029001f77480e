"""The model that is profiled: its folder, its shape and its dtype, known before a server is started."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from headway.bench.errors import BenchError
from headway.bundled import STORY
from headway.cost.config import read_shape
from headway.cost.memory import kv_bytes_per_token, weight_bytes
from headway.cost.precision import Precision
from headway.cost.shape import ModelShape, ShapeError
from headway.models.config import ModelConfig
from headway.models.folder import resolve_model
from headway.models.values import ModelError


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """What is served.

    Args:
        dtype: that it runs in: float32, bfloat16 or float16.
        checkpoint_bytes: of its weight files; 0 where it has none (--load-format dummy).
        max_model_len: the context that is served where nothing else is asked for and the cache has room.
    """

    name: str
    folder: Path
    shape: ModelShape
    dtype: str
    checkpoint_bytes: int
    max_model_len: int

    @property
    def precision(self) -> Precision:
        return Precision.of(self.dtype)

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self.shape, self.precision)

    @property
    def kv_bytes_per_token(self) -> int:
        shape = self.shape
        return kv_bytes_per_token(shape.layers, shape.kv_heads, shape.head_dim, self.precision.kv.bits)


def find_model(name: str | None, dtype: str = "auto", load_format: str = "auto") -> ProfiledModel:
    """A folder or Hugging Face id (None: the bundled model) as what will be served.

    Raises:
        BenchError: there is no such model, or it cannot be served.
    """
    try:
        folder = STORY if name is None else resolve_model(name)
        config = ModelConfig.from_folder(folder)
        shape = read_shape(json.loads((folder / "config.json").read_bytes()), str(folder / "config.json"))
    except (ModelError, ShapeError) as error:
        raise BenchError(str(error)) from None
    runs_in = (config.dtype or "float32") if dtype == "auto" else dtype
    if runs_in not in ("float32", "bfloat16", "float16"):
        raise BenchError(f"--dtype is {dtype!r}; it must be auto, float32, bfloat16 or float16")
    files = [] if load_format == "dummy" else sorted(folder.glob("*.safetensors"))
    if not files and load_format != "dummy":
        raise BenchError(f"{folder} holds no *.safetensors; give a complete checkpoint, or --load-format dummy")
    shown = f"headway/{STORY.name}" if name is None else name
    checkpoint_bytes = sum(file.stat().st_size for file in files)
    return ProfiledModel(shown, folder, shape, runs_in, checkpoint_bytes, config.max_model_len)
