"""What the decoder must know of a model, read from a Hugging Face config.json.

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

from headway.cost.config import read_shape, text_part
from headway.cost.shape import CacheSpec, Latent, ModelShape, StateSpec
from headway.cost.values import ConfigValues, ModelError
from headway.models.quantization import PackedMatrices, read_packed
from headway.models.rope_config import RopeConfig, read_rope, read_two_ropes, without_image_positions
from headway.models.routing import Routing, read_routing

__all__ = ["ARCHITECTURES", "ModelConfig", "ModelError", "RopeConfig"]

DTYPES = ("float32", "bfloat16", "float16")


class NormNames(NamedTuple):
    """A checkpoint's names of the norms of a layer: before attention and behind it, before the MLP and behind it.

    What stands behind a part norms what it adds to the residual stream; None for nothing.
    """

    attention: str | None = "input_layernorm"
    attended: str | None = None
    mlp: str | None = "post_attention_layernorm"
    mlp_out: str | None = None


_PLAIN_NORMS = NormNames()
_GEMMA_NORMS = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
_OLMO_NORMS = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_GLM4_NORMS = NormNames(attended="post_self_attn_layernorm", mlp_out="post_mlp_layernorm")


@dataclass(frozen=True, slots=True)
class Traits:
    """What a family's tensors are called, and what of its layers is not a size.

    Args:
        gate: what the gate of a feed-forward layer does: silu, gelu_tanh, or clamped, as gpt-oss's experts have it.
        act, eps: the keys of the gate's name, and of the norms' epsilon.
        fused: tensors that hold the rows of several projections: qkv_proj, gate_up_proj.
        norm_offset: how much more the weights of norms are than what is stored.
        stored: parts of tensors' names as the decoder has them, and as the checkpoint does.
        unused: how names of tensors begin that the decoder does not need.
        turns_neighbours: of queries and keys, neighbours are turned together, not halves of what is turned.
    """

    norms: NormNames = _PLAIN_NORMS
    gate: str = "silu"
    act: str = "hidden_act"
    eps: str = "rms_norm_eps"
    fused: tuple[str, ...] = ()
    norm_offset: float = 0.0
    stored: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()
    turns_neighbours: bool = False


_GEMMA = Traits(_GEMMA_NORMS, "gelu_tanh", "hidden_activation", norm_offset=1.0)
_NEIGHBOURS = Traits(turns_neighbours=True)
_NEXT = Traits(norm_offset=1.0, unused=("mtp.",), fused=("in_proj_qkvz", "in_proj_ba"))
_QWEN_3_5 = replace(_NEXT, fused=())
_LFM2 = Traits(
    norms=NormNames("operator_norm", mlp="ffn_norm"),
    eps="norm_eps",
    stored=(
        (".mlp.gate_proj.", ".feed_forward.w1."),
        (".mlp.up_proj.", ".feed_forward.w3."),
        (".mlp.down_proj.", ".feed_forward.w2."),
        (".self_attn.o_proj.", ".self_attn.out_proj."),
        (".self_attn.q_norm.", ".self_attn.q_layernorm."),
        (".self_attn.k_norm.", ".self_attn.k_layernorm."),
        ("model.norm.", "model.embedding_norm."),
    ),
)
# Of a checkpoint that reads images too.
_WITHIN_ALL = Traits(stored=(("model.", "model.language_model."),), unused=("mtp.", "model.visual."))
_GLM = Traits(fused=("gate_up_proj",), turns_neighbours=True)
# Of those that are known, the ones whose tensors and operations the decoder has.
ARCHITECTURES: dict[str, Traits] = {
    "LlamaForCausalLM": Traits(),
    "MistralForCausalLM": Traits(),
    "MixtralForCausalLM": Traits(),
    "Qwen2ForCausalLM": Traits(),
    "Qwen2MoeForCausalLM": Traits(),
    "Qwen3ForCausalLM": Traits(),
    "Qwen3MoeForCausalLM": Traits(),
    "GraniteForCausalLM": Traits(),
    "Phi3ForCausalLM": Traits(fused=("qkv_proj", "gate_up_proj")),
    "SmolLM3ForCausalLM": Traits(),
    "GptOssForCausalLM": Traits(gate="clamped"),
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "Olmo2ForCausalLM": Traits(_OLMO_NORMS),
    "Olmo3ForCausalLM": Traits(_OLMO_NORMS),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(_GLM, norms=_GLM4_NORMS),
    "Glm4MoeForCausalLM": Traits(),
    "Glm4MoeLiteForCausalLM": _NEIGHBOURS,
    "DeepseekV2ForCausalLM": _NEIGHBOURS,
    "DeepseekV3ForCausalLM": _NEIGHBOURS,
    "Qwen3NextForCausalLM": _NEXT,
    "Qwen3_5ForCausalLM": _QWEN_3_5,
    "Qwen3_5MoeForCausalLM": _QWEN_3_5,
    "Lfm2ForCausalLM": _LFM2,
}
# What known families need that the decoder does not have.
_LACKING = {
    "DeepseekV32ForCausalLM": "a sparse indexer",
    "DeepseekV4ForCausalLM": "hyper-connections",
    "Gemma3ForConditionalGeneration": "an encoder of images",
    "GlmMoeDsaForCausalLM": "a sparse indexer",
    "KimiK25ForConditionalGeneration": "an encoder of images",
    "KimiLinearForCausalLM": "layers of Kimi Delta Attention",
    "Lfm2MoeForCausalLM": "routing by sigmoid scores beside short convolutions",
    "Lfm2VlForConditionalGeneration": "an encoder of images",
    "Llama4ForConditionalGeneration": "an encoder of images",
}
# What config.json calls what gates do.
_ACTS = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}
_QWEN_DEFAULTS = {"partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "norm_topk_prob": True}
# What architectures assume for keys that only the decoder reads.
_GEMMA_DEFAULTS = {"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Gemma2ForCausalLM": _GEMMA_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "Gemma3ForCausalLM": _GEMMA_DEFAULTS | {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0},
    "Olmo2ForCausalLM": {"rms_norm_eps": 1e-5},
    "Olmo3ForCausalLM": {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
    "GptOssForCausalLM": {"torch_dtype": "bfloat16"},
    "Qwen3NextForCausalLM": _QWEN_DEFAULTS,
    "Qwen3_5ForCausalLM": _QWEN_DEFAULTS,
    "Qwen3_5MoeForCausalLM": _QWEN_DEFAULTS,
    "Lfm2ForCausalLM": {"norm_eps": 1e-5, "rope_theta": 1_000_000.0},
    "GlmForCausalLM": {"partial_rotary_factor": 0.5},
    "Glm4ForCausalLM": {"partial_rotary_factor": 0.5},
    "Glm4MoeForCausalLM": {"partial_rotary_factor": 0.5},
}
# Where layers with a window have positions of their own: the key of their theta.
_LOCAL_THETAS = {"Gemma3ForCausalLM": "rope_local_base_freq", "Olmo3ForCausalLM": "rope_theta"}


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
        """Of what a layer adds to the residual stream."""
        return self.residual / self.embedding


class SoftCaps(NamedTuple):
    """Between which bounds, up and down, products of attention and logits are bent (Gemma 2); None for none."""

    attention: float | None = None
    logits: float | None = None


_NO_CAPS = SoftCaps()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder.

    Args:
        shape: its sizes, the same that the cost model has.
        caches: what each layer keeps of a token, or of a sequence.
        routing: None where every layer has the plain feed-forward layer.
        packed: the matrices that the checkpoint holds as whole numbers; None where there are none.
        dtype: the checkpoint's own dtype by name, None where config.json does not say.
        rms_norm_eps: of norms, those of the residual stream apart (see `residual_eps`).
        rotated: for each layer, whether queries and keys have rotary positions.
        local_rope: of layers with a window, where it is another one.
        left_out: how names of a checkpoint's tensors begin that are of other use (layers that predict further tokens).
        by_heads: what turns latents into keys and values is a matrix of each head, that of keys the other way round
            (GGUF).
    """

    shape: ModelShape
    caches: tuple[CacheSpec | StateSpec, ...]
    routing: Routing | None
    packed: PackedMatrices | None
    rms_norm_eps: float
    rope: RopeConfig
    dtype: str | None
    rotated: tuple[bool, ...]
    traits: Traits = Traits()
    multipliers: Multipliers = Multipliers()
    local_rope: RopeConfig | None = None
    softcaps: SoftCaps = _NO_CAPS
    left_out: tuple[str, ...] = ()
    by_heads: bool = False

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
        named = raw.get("architectures")
        named = [each for each in named if isinstance(each, str)] if isinstance(named, list) else []
        if lacking := next((each for each in named if each in _LACKING), None):
            raise ModelError(f"{source}: {lacking} needs {_LACKING[lacking]}, which this version does not have")
        text = text_part(raw)
        shape = read_shape(text, source, tuple(ARCHITECTURES))
        name = next(each for each in text["architectures"] if each in ARCHITECTURES)
        values, traits = ConfigValues(text, source, _DEFAULTS.get(name, {})), ARCHITECTURES[name]
        if name.startswith("Qwen3_5"):
            values = replace(values, raw=without_image_positions(text))
        packed = read_packed(values)
        if text is not raw:
            traits = replace(traits, stored=_WITHIN_ALL.stored, unused=_WITHIN_ALL.unused)
            if packed is not None:
                ours, theirs = _WITHIN_ALL.stored[0]
                packed = replace(packed, ignored=tuple(name.replace(theirs, ours) for name in packed.ignored))
        acts = _ACTS.get(traits.gate, _ACTS["silu"])
        if values.get(traits.act, "silu") not in acts:
            raise values.error(traits.act, f"is not supported; only {acts[0]} is")
        if shape.head_dim % 2:
            raise ModelError(f"{source}: head_dim is {shape.head_dim}; rotary embeddings need an even number")
        multipliers, local_rope, softcaps = Multipliers(), None, _NO_CAPS
        if name in _LOCAL_THETAS:
            rope, local_rope = read_two_ropes(values, _LOCAL_THETAS[name], shape.head_dim, shape.max_positions)
        else:
            turned = shape.head_dim if shape.latent is None else shape.latent.rope_dim
            rope = read_rope(values, turned, shape.max_positions)
        if shape.latent is not None:
            _check_latent(values, shape.latent)
            traits = replace(traits, turns_neighbours=values.boolean("rope_interleave", True))
            multipliers = Multipliers(attention=shape.head_dim**-0.5 * rope.depth_factor**2)
        if name == "GraniteForCausalLM":
            multipliers = _multipliers(values)
        if name == "GptOssForCausalLM":
            _check_gpt_oss(values, shape)
        if name.startswith("Gemma"):
            multipliers, softcaps = _gemma(values, shape), _softcaps(values)
        return cls(
            shape=shape,
            caches=shape.caches,
            routing=None if shape.experts is None else read_routing(values, shape.experts),
            packed=packed,
            rms_norm_eps=values.positive_number(traits.eps),
            rope=rope,
            dtype=_dtype(values),
            rotated=_rotated(values, shape.layers) if name == "SmolLM3ForCausalLM" else (True,) * shape.layers,
            traits=traits,
            multipliers=multipliers,
            local_rope=local_rope,
            softcaps=softcaps,
            left_out=(*traits.unused, *_left_out(values, shape.layers)),
            by_heads=values.boolean("kv_b_by_heads"),
        )

    @property
    def residual_eps(self) -> float:
        """Of norms of the residual stream."""
        return self.rms_norm_eps / self.multipliers.embedding**2

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


def _multipliers(values: ConfigValues) -> Multipliers:
    return Multipliers(
        embedding=values.positive_number("embedding_multiplier", 1.0),
        residual=values.positive_number("residual_multiplier", 1.0),
        attention=values.positive_number("attention_multiplier", 1.0),
        logits=1 / values.positive_number("logits_scaling", 1.0),
    )


def _gemma(values: ConfigValues, shape: ModelShape) -> Multipliers:
    """Embeddings are multiplied with sqrt(h), and attention's products with a number of their own."""
    return Multipliers(embedding=shape.hidden**0.5, attention=values.positive_number("query_pre_attn_scalar") ** -0.5)


def _check_latent(values: ConfigValues, latent: Latent) -> None:
    for key, size in (("kv_lora_rank", latent.kv_rank), ("qk_rope_head_dim", latent.rope_dim)):
        if size % 2:
            raise values.error(key, "is not supported; it must be even")


def _left_out(values: ConfigValues, layers: int) -> tuple[str, ...]:
    """DeepSeek and GLM store multi-token prediction as further layers."""
    key = "num_nextn_predict_layers"
    further = 0 if values.get(key) is None else values.non_negative_int(key, 0)
    return tuple(f"model.layers.{number}." for number in range(layers, layers + min(further, 100)))


def _softcaps(values: ConfigValues) -> SoftCaps:
    keys = ("attn_logit_softcapping", "final_logit_softcapping")
    return SoftCaps(*(None if values.get(key) is None else values.positive_number(key) for key in keys))


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
