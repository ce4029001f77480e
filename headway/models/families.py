"""What each architecture calls its tensors, and what of its layers is not a size: a row for each. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple


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


PLAIN = Traits()
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
WITHIN_ALL = Traits(stored=(("model.", "model.language_model."),), unused=("mtp.", "model.visual."))
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
LACKING = {
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
ACTS = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}
_QWEN_DEFAULTS = {"partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "norm_topk_prob": True}
# What architectures assume for keys that only the decoder reads.
_GEMMA_DEFAULTS = {"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256}
DEFAULTS: dict[str, dict[str, Any]] = {
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
LOCAL_THETAS = {"Gemma3ForCausalLM": "rope_local_base_freq", "Olmo3ForCausalLM": "rope_theta"}
