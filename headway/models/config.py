"""Reads what the decoder must know of a model from a Hugging Face config.json.

No torch here: the cost model and the API process may read a config too. Sizes are read by `cost.config`, with those of
models that are only costed. What config.json asks for and the decoder cannot do is refused with one line that names the
file, the key and a way out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from headway.cost.config import read_shape, text_part, without_head
from headway.cost.layers import AttentionSinks, CacheSpec, Latent, StateSpec
from headway.cost.shape import ModelShape
from headway.cost.values import ConfigValues, ModelError
from headway.models.families import ACTS, ARCHITECTURES, LACKING, OTHER_PARTS, PLAIN, WITHIN, Traits
from headway.models.quantization import PackedMatrices, read_packed
from headway.models.rope_config import RopeConfig, read_rope, read_two_ropes, without_image_positions
from headway.models.routing import Routing, read_routing

__all__ = ["ARCHITECTURES", "ModelConfig", "ModelError", "RopeConfig"]

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Numbers that parts of a model are multiplied with (Granite, Gemma).

    A model is the same with all of its residual stream divided by `embedding`: then what is added to it is multiplied
    with residual / embedding, and the norms' epsilon divided by the square. So the embedding stays as it is.
    """

    embedding: float = 1.0
    residual: float = 1.0
    attention: float | None = None  # None: 1 / sqrt(head_dim)
    logits: float = 1.0

    @property
    def added(self) -> float:
        """The factor of what a layer adds to the residual stream."""
        return self.residual / self.embedding


class SoftCaps(NamedTuple):
    """Bounds of attention scores and of logits, which a tanh keeps within +-bound (Gemma 2); None for no bound."""

    attention: float | None = None
    logits: float | None = None


_NO_CAPS = SoftCaps()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder."""

    shape: ModelShape  # its sizes, the same that the cost model has
    caches: tuple[CacheSpec | StateSpec, ...]  # what each layer keeps of a token, or of a sequence
    routing: Routing | None  # None where every layer has the plain feed-forward layer
    packed: PackedMatrices | None  # the matrices that the checkpoint holds as whole numbers; None where there are none
    rms_norm_eps: float  # the epsilon of norms, those of the residual stream apart (see `residual_eps`)
    rope: RopeConfig
    dtype: str | None  # the checkpoint's own dtype by name, None where config.json does not say
    rotated: tuple[bool, ...]  # whether queries and keys have rotary positions, for each layer
    traits: Traits = PLAIN
    multipliers: Multipliers = Multipliers()
    local_rope: RopeConfig | None = None  # the RoPE of layers with a window, where it is another one
    softcaps: SoftCaps = _NO_CAPS
    left_out: tuple[str, ...] = ()
    # What turns latents into keys and values is a matrix of each head, that of keys the other way round (GGUF).
    by_heads: bool = False
    heads_by_turns: bool = False
    headless: bool = False  # the checkpoint has no output layer, so nothing can be generated

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
        _refuse_lacking(raw, source)
        whole, raw = raw, without_head(raw)
        text = text_part(raw)
        shape = read_shape(text, source, tuple(ARCHITECTURES))
        name = next(each for each in text["architectures"] if each in ARCHITECTURES)
        traits = ARCHITECTURES[name]
        values = ConfigValues(text, source, traits.defaults)
        if text is not raw:
            values = replace(values, raw=without_image_positions(text))
        packed = read_packed(values)
        if text is not raw:
            traits = replace(traits, within=True, unused=(*traits.unused, *OTHER_PARTS))
            if packed is not None:
                packed = replace(packed, ignored=tuple(map(_inner_name, packed.ignored)))
        acts = ACTS.get(traits.gate, ACTS["silu"])
        if values.get(traits.act, "silu") not in acts:
            raise values.error(traits.act, f"is not supported; only {acts[0]} is")
        if shape.head_dim % 2:
            raise ModelError(f"{source}: head_dim is {shape.head_dim}; rotary embeddings need an even number")
        rope, local_rope = _ropes(values, traits.local_theta, shape)
        if shape.latent is not None:
            _check_latent(values, shape.latent)
            traits = replace(traits, turns_neighbours=values.boolean("rope_interleave", True))
        if values.boolean("linear_gate_apart"):
            traits = replace(traits, fused=("in_proj_ba",))
        if name == "GptOssForCausalLM":
            _check_gpt_oss(values, shape)
        return cls(
            shape=shape,
            caches=shape.caches,
            routing=None if shape.experts is None else read_routing(values, shape.experts),
            packed=packed,
            rms_norm_eps=values.positive_number(traits.eps),
            rope=rope,
            dtype=_dtype(values),
            rotated=_rotated(values, name, shape),
            traits=traits,
            multipliers=_multipliers(values, name, shape, rope),
            local_rope=local_rope,
            softcaps=_softcaps(values) if name.startswith("Gemma") else _NO_CAPS,
            left_out=(*_left_out(values, shape.layers), *_borrowed(shape)),
            by_heads=values.boolean("kv_b_by_heads"),
            heads_by_turns=values.boolean("linear_value_heads_by_turns"),
            headless=raw is not whole,
        )

    def with_attention_sinks(self, sinks: AttentionSinks) -> ModelConfig:
        """The same with sinks, see ModelShape. Raises ValueError where it has layers that cannot have them."""
        if self.rope.query_growth:
            raise ModelError("attention_sinks does not go with queries that grow with their position; leave it out")
        shape = self.shape.with_attention_sinks(sinks)
        return replace(self, shape=shape, caches=shape.caches)

    @property
    def residual_eps(self) -> float:
        """The epsilon of the norms of the residual stream."""
        return self.rms_norm_eps / self.multipliers.embedding**2

    @property
    def max_model_len(self) -> int:
        """The context to serve when the user names none.

        Linear and yarn scaling stretch it by their factor. Dynamic scaling does not, because it leaves the
        model unchanged only up to max_position_embeddings (see rope.py); ask for more to get more.
        """
        return self.shape.max_positions if self.rope.kind == "dynamic" else self.longest_model_len

    @property
    def longest_model_len(self) -> int:
        """The most tokens that the positions of this model are meant for, RoPE scaling included."""
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


def _refuse_lacking(raw: Mapping[str, Any], source: str) -> None:
    named = raw.get("architectures")
    named = [each for each in named if isinstance(each, str)] if isinstance(named, list) else []
    if lacking := next((each for each in named if each in LACKING), None):
        raise ModelError(f"{source}: {lacking} needs {LACKING[lacking]}, which this version does not have")


def _ropes(values: ConfigValues, local_theta: str | None, shape: ModelShape) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary positions, and those of layers with a window where they are others."""
    local = None
    if local_theta is not None:
        of_kinds = [part.head_dim for part in shape.parts if part.sliding_windows[0] is None]
        head_dims = of_kinds[0] if shape.kinds else shape.head_dim, shape.head_dim
        rope, local = read_two_ropes(values, local_theta, head_dims, shape.max_positions)
    else:
        turned = shape.head_dim if shape.latent is None else shape.latent.rope_dim
        rope = read_rope(values, turned, shape.max_positions)
    if rope.query_growth and rope.dim != shape.head_dim:
        raise values.error("rope_parameters", "scales queries of which only a part is turned; that is not supported")
    return rope, local


def _check_gpt_oss(values: ConfigValues, shape: ModelShape) -> None:
    for key, published in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if values.get(key) not in (None, published):
            raise values.error(key, f"is not supported, only {published:g} is")
    width = shape.experts.width if shape.experts else 0
    said = values.get("quantization_config")
    if said and said != {"quant_method": "gguf"} and (shape.hidden % 32 or width % 32):
        raise values.error(
            "hidden_size", f"is no multiple of 32, or intermediate_size, {width}, is none, as MXFP4 needs"
        )


def _multipliers(values: ConfigValues, architecture: str, shape: ModelShape, rope: RopeConfig) -> Multipliers:
    if architecture.startswith("Gemma"):
        # Embeddings are multiplied with sqrt(h), and attention's products with a number of their own.
        size = 1.0 if shape.kinds else values.positive_number("query_pre_attn_scalar", shape.head_dim)
        return Multipliers(embedding=shape.hidden**0.5, attention=size**-0.5)
    if architecture.startswith("Granite"):
        return Multipliers(
            embedding=values.positive_number("embedding_multiplier", 1.0),
            residual=values.positive_number("residual_multiplier", 1.0),
            attention=values.positive_number("attention_multiplier", 1.0),
            logits=1 / values.positive_number("logits_scaling", 1.0),
        )
    if architecture.startswith("Cohere"):
        return Multipliers(logits=values.positive_number("logit_scale", 0.0625))
    if shape.latent is not None:
        return Multipliers(attention=shape.head_dim**-0.5 * rope.depth_factor**2)
    return Multipliers()


def _check_latent(values: ConfigValues, latent: Latent) -> None:
    for key, size in (("kv_lora_rank", latent.kv_rank), ("qk_rope_head_dim", latent.rope_dim)):
        if size % 2:
            raise values.error(key, "is not supported; it must be even")


def _left_out(values: ConfigValues, layers: int) -> tuple[str, ...]:
    """Prefixes of tensors of multi-token prediction, which DeepSeek and GLM store as further layers."""
    key = "num_nextn_predict_layers"
    further = 0 if values.get(key) is None else values.non_negative_int(key, 0)
    return tuple(f"model.layers.{number}." for number in range(layers, layers + min(further, 100)))


def _borrowed(shape: ModelShape) -> tuple[str, ...]:
    """Prefixes of tensors that are not used: projections of layers that attend to the keys and values of others."""
    layers = [layer for kind in shape.kinds if kind.source is not None for layer in kind.layers]
    return tuple(f"model.layers.{layer}.self_attn.{part}_" for layer in layers for part in ("k", "v"))


def _softcaps(values: ConfigValues) -> SoftCaps:
    keys = ("attn_logit_softcapping", "final_logit_softcapping")
    return SoftCaps(*(None if values.get(key) is None else values.positive_number(key) for key in keys))


def _inner_name(name: str) -> str:
    """The name of a tensor without what it lies in."""
    for pairs in WITHIN:
        for ours, theirs in pairs:
            name = name.replace(theirs, ours)
    return name


def _rotated(values: ConfigValues, architecture: str, shape: ModelShape) -> tuple[bool, ...]:
    """Which layers have rotary positions.

    SmolLM3: those with a 1 in `no_rope_layers`. Granite 4: all have, or none. Cohere2: those with a window.
    """
    layers = shape.layers
    if architecture == "Cohere2ForCausalLM":
        return tuple(window is not None for window in shape.sliding_windows)
    if architecture == "GraniteMoeHybridForCausalLM":
        return (values.get("position_embedding_type") == "rope",) * layers
    if architecture != "SmolLM3ForCausalLM":
        return (True,) * layers
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
