"""Names of tensors, and traits of layers that are not sizes, for each architecture. No torch here."""

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
    """The names of a family's tensors, and the traits of its layers that are not sizes.

    Args:
        gate: what the gate of a feed-forward layer does: silu, gelu_tanh, or clamped, as gpt-oss's experts have it.
        act, eps: the keys of the gate's name, and of the norms' epsilon.
        fused: tensors that hold the rows of several projections: qkv_proj, gate_up_proj.
        norm_offset: how much more the weights of norms are than what is stored.
        stored: parts of tensors' names as the decoder has them, and as the checkpoint does.
        unused: how names of tensors begin that the decoder does not need.
        turns_neighbours: rotation takes neighbours in queries and keys together, not the halves of what is rotated.
        within: the checkpoint has parts that read images too.
        norms_behind: queries and keys are normed behind their rotation.
        inputs_first: stacked experts are stored as [E, in, out].
        centred: norms subtract the mean. All that is added to the residual stream gets a mean of 0 while loading, so
            that the norms need not.
        beside: attention and the feed-forward layer read the same, and are added together.
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
    within: bool = False
    norms_behind: bool = False
    inputs_first: bool = False
    centred: bool = False
    beside: bool = False


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
_LFM2_MOE = replace(
    _LFM2,
    stored=(
        *_LFM2.stored,
        (".mlp.gate.", ".feed_forward.gate."),
        (".mlp.expert_bias", ".feed_forward.expert_bias"),
        (".mlp.experts.", ".feed_forward.experts."),
    ),
)
# A checkpoint that also reads images has one of these ways to name the parts that read text.
WITHIN: tuple[tuple[tuple[str, str], ...], ...] = (
    (("model.", "model.language_model."),),
    (("model.", "language_model.model."), ("lm_head", "language_model.lm_head")),
    (),
)
# How names of its other parts begin.
OTHER_PARTS = (
    "mm_projector.",
    "model.mm_projector.",
    "model.audio_tower.",
    "model.embed_audio.",
    "model.embed_vision.",
    "model.multi_modal_projector.",
    "model.vision_tower.",
    "model.visual.",
    "mtp.",
    "multi_modal_projector.",
    "vision_tower.",
    "visual.",
)
_HUNYUAN = Traits(
    stored=((".self_attn.q_norm.", ".self_attn.query_layernorm."), (".self_attn.k_norm.", ".self_attn.key_layernorm.")),
    norms_behind=True,
)
_COHERE = Traits(norms=NormNames(mlp=None), eps="layer_norm_eps", turns_neighbours=True, centred=True, beside=True)
_GLM = Traits(fused=("gate_up_proj",), turns_neighbours=True)
# The architectures whose tensors and operations the decoder has.
ARCHITECTURES: dict[str, Traits] = {
    "LlamaForCausalLM": Traits(),
    "MistralForCausalLM": Traits(),
    "MixtralForCausalLM": Traits(),
    "Ministral3ForCausalLM": Traits(),
    "Qwen2ForCausalLM": Traits(),
    "Qwen2MoeForCausalLM": Traits(),
    "Qwen3ForCausalLM": Traits(),
    "Qwen3MoeForCausalLM": Traits(),
    "OlmoeForCausalLM": Traits(),
    "MiniMaxM2ForCausalLM": Traits(),
    "Ernie4_5ForCausalLM": _NEIGHBOURS,
    "Ernie4_5_MoeForCausalLM": replace(_NEIGHBOURS, unused=("model.mtp_",)),
    "SeedOssForCausalLM": Traits(),
    "GraniteForCausalLM": Traits(),
    "GraniteMoeForCausalLM": Traits(
        stored=(
            ("mlp.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
            ("mlp.experts.down_proj", "block_sparse_moe.output_linear.weight"),
            (".mlp.gate.", ".block_sparse_moe.router.layer."),
        )
    ),
    "GraniteMoeHybridForCausalLM": Traits(
        fused=("gate_up_proj",),
        stored=(
            (".mlp.gate_up_proj.", ".shared_mlp.input_linear."),
            (".mlp.down_proj.", ".shared_mlp.output_linear."),
        ),
    ),
    "Phi3ForCausalLM": Traits(fused=("qkv_proj", "gate_up_proj")),
    "SmolLM3ForCausalLM": Traits(),
    "GptOssForCausalLM": Traits(gate="clamped"),
    "GemmaForCausalLM": replace(_GEMMA, norms=_PLAIN_NORMS),
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "Gemma4ForCausalLM": replace(
        _GEMMA, norm_offset=0.0, stored=(("mlp.experts.", "experts."), (".mlp.gate.", ".router.proj."))
    ),
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
    "Lfm2MoeForCausalLM": _LFM2_MOE,
    "Qwen3VLMoeForCausalLM": Traits(inputs_first=True),
    "CohereForCausalLM": _COHERE,
    "Cohere2ForCausalLM": _COHERE,
    "HunYuanDenseV1ForCausalLM": _HUNYUAN,
    "HunYuanMoEV1ForCausalLM": replace(_HUNYUAN, stored=(*_HUNYUAN.stored, (".mlp.gate.", ".mlp.gate.wg."))),
}
_MAMBA = "layers of Mamba"
_LAYER_NORM = "LayerNorm and feed-forward layers without a gate"
_BOTH_WAYS = "attention to later tokens, as an encoder"
# Parts that known families need and the decoder does not have.
LACKING = {
    "BambaForCausalLM": _MAMBA,
    **dict.fromkeys(
        (
            "BertForMaskedLM",
            "BertForSequenceClassification",
            "BertModel",
            "Gemma3TextModel",
            "ModernBertForMaskedLM",
            "ModernBertForSequenceClassification",
            "ModernBertModel",
            "MPNetModel",
            "NewModel",
            "NomicBertModel",
            "RobertaForSequenceClassification",
            "RobertaModel",
            "T5EncoderModel",
            "XLMRobertaForSequenceClassification",
            "XLMRobertaModel",
        ),
        _BOTH_WAYS,
    ),
    "DeepseekV32ForCausalLM": "a sparse indexer",
    "DeepseekV4ForCausalLM": "hyper-connections",
    "FalconH1ForCausalLM": _MAMBA,
    "GPTNeoXForCausalLM": _LAYER_NORM,
    "Gemma3nForConditionalGeneration": "several residual streams",
    "GlmMoeDsaForCausalLM": "a sparse indexer",
    "JambaForCausalLM": _MAMBA,
    "KimiLinearForCausalLM": "layers of Kimi Delta Attention",
    "Lfm2VlForConditionalGeneration": "the names of its part that reads text",
    "Llama4ForCausalLM": "attention in chunks",
    "Llama4ForConditionalGeneration": "attention in chunks",
    "MambaForCausalLM": _MAMBA,
    "MllamaForConditionalGeneration": "attention to images between layers",
    "NemotronForCausalLM": _LAYER_NORM,
    "NemotronHForCausalLM": _MAMBA,
    "Phi4MMForCausalLM": "adapters for images and sounds",
    "PhiForCausalLM": _LAYER_NORM,
    "PhiMoEForCausalLM": "routing by sparse mixing",
    "Starcoder2ForCausalLM": _LAYER_NORM,
}
# The names of gates' functions in config.json.
ACTS = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}
_QWEN_DEFAULTS = {"partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "norm_topk_prob": True}
# Defaults that architectures assume for keys that only the decoder reads.
_GEMMA_DEFAULTS = {"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256}
DEFAULTS: dict[str, dict[str, Any]] = {
    # The first files of Gemma have the exact GELU in "hidden_act" by mistake.
    "GemmaForCausalLM": {"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6},
    "Gemma2ForCausalLM": _GEMMA_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "Gemma4ForCausalLM": _GEMMA_DEFAULTS
    | {
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        }
    },
    "Gemma3ForCausalLM": _GEMMA_DEFAULTS | {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0},
    "Olmo2ForCausalLM": {"rms_norm_eps": 1e-5},
    "Olmo3ForCausalLM": {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
    "GptOssForCausalLM": {"torch_dtype": "bfloat16"},
    "Qwen3NextForCausalLM": _QWEN_DEFAULTS,
    "Qwen3_5ForCausalLM": _QWEN_DEFAULTS,
    "Qwen3_5MoeForCausalLM": _QWEN_DEFAULTS,
    "Lfm2ForCausalLM": {"norm_eps": 1e-5, "rope_theta": 1_000_000.0},
    "Lfm2MoeForCausalLM": {
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "norm_topk_prob": True,
        "use_expert_bias": True,
    },
    "Qwen3VLMoeForCausalLM": {"norm_topk_prob": True},
    "CohereForCausalLM": {"layer_norm_eps": 1e-5},
    "Cohere2ForCausalLM": {"layer_norm_eps": 1e-5},
    "HunYuanDenseV1ForCausalLM": {"rms_norm_eps": 1e-5},
    "HunYuanMoEV1ForCausalLM": {"rms_norm_eps": 1e-5},
    "MiniMaxM2ForCausalLM": {"rms_norm_eps": 1e-6, "rope_theta": 5_000_000.0},
    "Ernie4_5ForCausalLM": {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
    "Ernie4_5_MoeForCausalLM": {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
    "OlmoeForCausalLM": {"rms_norm_eps": 1e-5},
    "SeedOssForCausalLM": {"rms_norm_eps": 1e-6},
    "Ministral3ForCausalLM": {"rms_norm_eps": 1e-5},
    "GlmForCausalLM": {"partial_rotary_factor": 0.5},
    "Glm4ForCausalLM": {"partial_rotary_factor": 0.5},
    "Glm4MoeForCausalLM": {"partial_rotary_factor": 0.5},
}
# The key of the theta of layers with a window, if these have their own positions.
LOCAL_THETAS = {
    "Gemma4ForCausalLM": "rope_local_base_freq",
    "Gemma3ForCausalLM": "rope_local_base_freq",
    "Olmo3ForCausalLM": "rope_theta",
}
