"""Names of tensors, and traits of layers that are not sizes, for each architecture. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
    """The names of a family's tensors, and the traits of its layers that are not sizes."""

    norms: NormNames = _PLAIN_NORMS
    # What the gate of a feed-forward layer does: silu, gelu_tanh, or clamped, as gpt-oss's experts have it.
    gate: str = "silu"
    # act, eps: the keys of the gate's name, and of the norms' epsilon.
    act: str = "hidden_act"
    eps: str = "rms_norm_eps"
    fused: tuple[str, ...] = ()  # tensors that hold the rows of several projections: qkv_proj, gate_up_proj
    norm_offset: float = 0.0  # how much more the weights of norms are than what is stored
    # Parts of tensors' names as the decoder has them, and as the checkpoint does.
    stored: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()  # how names of tensors begin that the decoder does not need
    # Rotation takes neighbours in queries and keys together, not the halves of what is rotated.
    turns_neighbours: bool = False
    within: bool = False  # the checkpoint has parts that read images too
    norms_behind: bool = False  # queries and keys are normed behind their rotation
    inputs_first: bool = False  # stacked experts are stored as [E, in, out]
    # Norms subtract the mean. All that is added to the residual stream gets a mean of 0 while loading, so that the
    # norms need not.
    centred: bool = False
    beside: bool = False  # attention and the feed-forward layer read the same, and are added together
    local_theta: str | None = None  # the key of the theta of layers with a window, where these have their own positions
    # What the architecture assumes for keys that only the decoder reads.
    defaults: dict[str, Any] = field(default_factory=dict)


PLAIN = Traits()
_SMALL, _SMALLER = ({"rms_norm_eps": eps} for eps in (1e-5, 1e-6))
_SMALL_EPS, _SMALLER_EPS = Traits(defaults=_SMALL), Traits(defaults=_SMALLER)
_GEMMA = Traits(
    _GEMMA_NORMS,
    "gelu_tanh",
    "hidden_activation",
    norm_offset=1.0,
    defaults=_SMALLER | {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256},
)
_OLMO = Traits(_OLMO_NORMS, defaults=_SMALL)
_NEIGHBOURS = Traits(turns_neighbours=True)
_ERNIE = replace(_NEIGHBOURS, defaults=_SMALL | {"rope_theta": 500_000.0})
_QWEN_3_5 = Traits(
    norm_offset=1.0, unused=("mtp.",), defaults=_SMALLER | {"partial_rotary_factor": 0.25, "norm_topk_prob": True}
)
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
    defaults={"norm_eps": 1e-5, "rope_theta": 1_000_000.0},
)
_LFM2_MOE = replace(
    _LFM2,
    stored=(
        *_LFM2.stored,
        (".mlp.gate.", ".feed_forward.gate."),
        (".mlp.expert_bias", ".feed_forward.expert_bias"),
        (".mlp.experts.", ".feed_forward.experts."),
    ),
    defaults=_LFM2.defaults | {"norm_topk_prob": True, "use_expert_bias": True},
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
    defaults=_SMALL,
)
_COHERE = Traits(
    norms=NormNames(mlp=None),
    eps="layer_norm_eps",
    turns_neighbours=True,
    centred=True,
    beside=True,
    defaults={"layer_norm_eps": 1e-5},
)
_HALF_TURNED = {"partial_rotary_factor": 0.5}
_GLM = Traits(fused=("gate_up_proj",), turns_neighbours=True, defaults=_HALF_TURNED)
_GEMMA_4_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
# The architectures whose tensors and operations the decoder has.
ARCHITECTURES: dict[str, Traits] = {
    "LlamaForCausalLM": Traits(),
    "MistralForCausalLM": Traits(),
    "MixtralForCausalLM": Traits(),
    "Ministral3ForCausalLM": _SMALL_EPS,
    "Qwen2ForCausalLM": Traits(),
    "Qwen2MoeForCausalLM": Traits(),
    "MiMoForCausalLM": Traits(unused=("model.mtp_layers.",)),
    "Qwen3ForCausalLM": Traits(),
    "Qwen3MoeForCausalLM": Traits(),
    "OlmoeForCausalLM": _SMALL_EPS,
    "MiniMaxM2ForCausalLM": Traits(defaults=_SMALLER | {"rope_theta": 5_000_000.0}),
    "Ernie4_5ForCausalLM": _ERNIE,
    "Ernie4_5_MoeForCausalLM": replace(_ERNIE, unused=("model.mtp_",)),
    "SeedOssForCausalLM": _SMALLER_EPS,
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
        stored=((".mlp.gate_up_proj.", ".shared_mlp.input_linear."), (".mlp.down_proj.", ".shared_mlp.output_linear.")),
    ),
    "Phi3ForCausalLM": Traits(fused=("qkv_proj", "gate_up_proj")),
    "SmolLM3ForCausalLM": Traits(),
    "GptOssForCausalLM": Traits(gate="clamped", defaults={"torch_dtype": "bfloat16"}),
    "GemmaForCausalLM": replace(
        _GEMMA,
        norms=_PLAIN_NORMS,
        # The first files of Gemma have the exact GELU in "hidden_act" by mistake.
        defaults=_SMALLER | {"hidden_activation": "gelu_pytorch_tanh"},
    ),
    "Gemma2ForCausalLM": replace(
        _GEMMA, defaults=_GEMMA.defaults | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    ),
    "Gemma3ForCausalLM": replace(
        _GEMMA,
        local_theta="rope_local_base_freq",
        defaults=_GEMMA.defaults | {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0},
    ),
    "Gemma4ForCausalLM": replace(
        _GEMMA,
        norm_offset=0.0,
        stored=(("mlp.experts.", "experts."), (".mlp.gate.", ".router.proj.")),
        local_theta="rope_local_base_freq",
        defaults=_GEMMA.defaults | {"rope_parameters": _GEMMA_4_ROPES},
    ),
    "Olmo2ForCausalLM": _OLMO,
    "Olmo3ForCausalLM": replace(_OLMO, local_theta="rope_theta", defaults=_SMALL | {"rope_theta": 500_000.0}),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(_GLM, norms=_GLM4_NORMS),
    "Glm4MoeForCausalLM": Traits(defaults=_HALF_TURNED),
    "Glm4MoeLiteForCausalLM": _NEIGHBOURS,
    "DeepseekV2ForCausalLM": _NEIGHBOURS,
    "DeepseekV3ForCausalLM": _NEIGHBOURS,
    "Qwen3NextForCausalLM": replace(_QWEN_3_5, fused=("in_proj_qkvz", "in_proj_ba")),
    "Qwen3_5ForCausalLM": _QWEN_3_5,
    "Qwen3_5MoeForCausalLM": _QWEN_3_5,
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": _LFM2_MOE,
    "Qwen3VLMoeForCausalLM": Traits(inputs_first=True, defaults={"norm_topk_prob": True}),
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
