"""What the decoder must know of a model, read from a Hugging Face config.json.

No torch here: the cost model and the API process may read a config too. Sizes are read by `cost.config`, with those of
models that are only costed. What config.json asks for and the decoder cannot do is refused with one line that names the
file, the key and a way out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.cost.config import layers_with_experts, read_shape
from headway.cost.shape import CacheSpec, ModelShape
from headway.cost.values import ConfigValues, ModelError
from headway.models.quantization import PackedMatrices, read_packed
from headway.models.rope_config import RopeConfig, read_rope

__all__ = ["ARCHITECTURES", "ModelConfig", "ModelError", "RopeConfig"]

DTYPES = ("float32", "bfloat16", "float16")
# Of those that are known, the ones whose tensors and operations the decoder has.
ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "GraniteForCausalLM",
    "Phi3ForCausalLM",
    "SmolLM3ForCausalLM",
)
# Keys of routers that choose in another way, with the values that change nothing.
_PLAIN_ROUTER = {"scoring_func": "softmax", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1}


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens find their experts, of which `ModelShape.experts` has the sizes.

    Args:
        layers: numbers of the layers that have experts.
        normalized: the weights of a token's experts are divided by their sum.
        block: what a checkpoint calls the mixture within its layer.
        parts: what it calls the gate, up and down projection of an expert.
    """

    layers: tuple[int, ...]
    normalized: bool
    block: str = "mlp"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Numbers that parts of a model are multiplied with (Granite).

    A model is the same with all of its residual stream divided by `embedding`: then what is added to it is multiplied
    with residual / embedding, and the norms' epsilon divided by the square. So the embedding stays as it is.
    """

    embedding: float = 1.0
    residual: float = 1.0
    attention: float | None = None  # None: 1 / sqrt(head_dim)
    logits: float = 1.0

    @property
    def added(self) -> float:
        """Of what a layer adds to the residual stream."""
        return self.residual / self.embedding


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder.

    Args:
        shape: its sizes, the same that the cost model has.
        caches: what each layer keeps of a token.
        routing: None where every layer has the plain feed-forward layer.
        packed: the matrices that the checkpoint holds as whole numbers; None where there are none.
        dtype: the checkpoint's own dtype by name, None where config.json does not say.
        rotated: for each layer, whether queries and keys have rotary positions.
        fused: a layer's query, key and value rows are one tensor, and so are its gate and up rows.
    """

    shape: ModelShape
    caches: tuple[CacheSpec, ...]
    routing: Routing | None
    packed: PackedMatrices | None
    rms_norm_eps: float
    rope: RopeConfig
    dtype: str | None
    rotated: tuple[bool, ...]
    fused: bool = False
    multipliers: Multipliers = Multipliers()

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read config.json.

        Raises:
            ModelError: a file is missing or not JSON, a key is missing or of the wrong kind, or the model
                needs something that the decoder does not have.
        """
        folder = Path(folder)
        raw = read_json(folder / "config.json", "a model folder holds the config.json of its checkpoint")
        return cls.from_dict(raw, str(folder / "config.json"))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """The same from a parsed config.json; `source` is the file that errors name."""
        values, shape = ConfigValues(raw, source), read_shape(raw, source, ARCHITECTURES)
        act = values.get("hidden_act", "silu")
        if act not in ("silu", "swish"):
            raise values.error("hidden_act", "is not supported; only silu is")
        if shape.head_dim % 2:
            raise ModelError(f"{source}: head_dim is {shape.head_dim}; rotary embeddings need an even number")
        families, multipliers = raw["architectures"], Multipliers()
        if "GraniteForCausalLM" in families:
            multipliers = _multipliers(values)
        return cls(
            shape=shape,
            caches=shape.caches,
            routing=None if shape.experts is None else _routing(values),
            packed=read_packed(values),
            rms_norm_eps=values.positive_number("rms_norm_eps") / multipliers.embedding**2,
            rope=read_rope(values, shape.head_dim, shape.max_positions),
            dtype=_dtype(values),
            rotated=_rotated(values, shape.layers) if "SmolLM3ForCausalLM" in families else (True,) * shape.layers,
            fused="Phi3ForCausalLM" in families,
            multipliers=multipliers,
        )

    @property
    def max_model_len(self) -> int:
        """Context to serve when the user names none.

        Linear and yarn scaling stretch it by their factor. Dynamic scaling does not, because it leaves the
        model unchanged only up to max_position_embeddings (see rope.py); ask for more to get more.
        """
        return self.shape.max_positions if self.rope.kind == "dynamic" else self.longest_model_len

    @property
    def longest_model_len(self) -> int:
        """Most tokens that the positions of this model are meant for, RoPE scaling included."""
        if self.rope.kind in ("linear", "dynamic"):
            return int(self.shape.max_positions * self.rope.factor)
        if self.rope.kind == "yarn":
            return max(self.shape.max_positions, int(self.rope.original_max_position * self.rope.factor))
        return self.shape.max_positions


def read_json(path: Path, hint: str) -> dict[str, Any]:
    """The JSON object in a file; `hint` ends the message when there is no such file. Raises ModelError."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path}: not found; {hint}") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: holds a {type(content).__name__}, not a JSON object; download it again")
    return content


def _routing(values: ConfigValues) -> Routing:
    for key, plain in _PLAIN_ROUTER.items():
        if values.get(key) not in (None, plain):
            raise values.error(key, f"is not supported, only {plain!r} is")
    layers = layers_with_experts(values.raw, values.source)
    if "MixtralForCausalLM" in values.get("architectures"):
        return Routing(layers, normalized=True, block="block_sparse_moe", parts=("w1", "w3", "w2"))
    return Routing(layers, values.boolean("norm_topk_prob"))


def _multipliers(values: ConfigValues) -> Multipliers:
    return Multipliers(
        embedding=values.positive_number("embedding_multiplier", 1.0),
        residual=values.positive_number("residual_multiplier", 1.0),
        attention=values.positive_number("attention_multiplier", 1.0),
        logits=1 / values.positive_number("logits_scaling", 1.0),
    )


def _rotated(values: ConfigValues, layers: int) -> tuple[bool, ...]:
    """SmolLM3: `no_rope_layers` has 1 for layers that do have rotary positions."""
    stated = values.get("no_rope_layers")
    if stated is None:
        interval = values.positive_int("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if not isinstance(stated, list) or len(stated) != layers or not all(each in (0, 1) for each in stated):
        raise ModelError(
            f"{values.source}: no_rope_layers must be a list of num_hidden_layers, {layers}, ones and zeros"
        )
    return tuple(each == 1 for each in stated)


def _dtype(values: ConfigValues) -> str | None:
    key = "dtype" if values.get("dtype") is not None else "torch_dtype"
    name = values.get(key)
    if name is None:
        return None
    if isinstance(name, str) and name.removeprefix("torch.") in DTYPES:
        return name.removeprefix("torch.")
    raise values.error(key, f"is not supported; it must be one of {', '.join(DTYPES)}")
