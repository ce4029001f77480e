"""What each architecture fixes of a model's sizes, and which keys of its config.json say the rest: a row for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture fixes; a bias that is a string is the config key that switches it on."""

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool | str = False
    # None, all (when sliding_window is set), switched (all, with use_sliding_window), layers (use_sliding_window, then
    # layer_types or max_window_layers), or types (layer_types alone, or of as many layers as sliding_window_pattern
    # says all but the last).
    windows: str = "none"
    experts: ExpertKeys | None = None  # the names of the keys that describe a mixture of experts, or None
    latent: bool = False  # attention is of the kind with a latent
    # What `layer_types` calls layers that have no attention: linear_attention, of Gated DeltaNet, or conv, of short
    # convolutions; None where there are none.
    recurrent: str | None = None
    output_gate: bool = False  # see ModelShape
    sinks: bool = False
    layer_norms: int = 2  # norms in a layer, with the whole hidden state
    ffn: str = "intermediate_size"  # the key of F
    kinds: bool = False  # layers with a window and layers without have sizes of their own, as Gemma 4's
    refused: tuple[str, ...] = ()  # keys that switch on parts that are not counted, which no published model has
    defaults: Mapping[str, Any] = field(default_factory=dict)  # what the architecture assumes for keys that are missing


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """Where an architecture keeps the numbers of its experts.

    Args:
        count: key of how many there are, and `other` another name of it.
        width: key of an expert's F.
        step, first, last, but, types: keys that say which layers have experts: every n-th, from which on and up to
            which (-1: to the end), a list of those that do not, and a list of each layer's kind, sparse or dense.
        from_one: n-th layers are counted from 1.
        shared: key of how many further experts every token goes through.
        shared_width: key of the F of a further expert with a gate, which every token goes through.
    """

    count: str
    per_token: str
    width: str
    bias: bool = False
    router_bias: bool | str = False
    step: str | None = None
    from_one: bool = False
    first: str | None = None
    last: str | None = None
    but: str | None = None
    types: str | None = None
    shared: str | None = None
    shared_width: str | None = None
    other: str | None = None


_BIASED = Family(qkv_bias="attention_bias", o_bias="attention_bias")
_AS_QUERIES: dict[str, Any] = {"num_key_value_heads": None}  # a file that says nothing has as many as query heads
_DEEPSEEK_EXPERTS = ExpertKeys(
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    router_bias=True,
    step="moe_layer_freq",
    first="first_k_dense_replace",
    shared="n_shared_experts",
)
_DEEPSEEK = Family(latent=True, experts=_DEEPSEEK_EXPERTS, refused=("attention_bias", "mlp_bias"))
_QWEN_EXPERTS = ExpertKeys(
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    step="decoder_sparse_step",
    from_one=True,
    but="mlp_only_layers",
    other="num_local_experts",
)
_MIXTRAL_EXPERTS = ExpertKeys("num_local_experts", "num_experts_per_tok", "intermediate_size")
_ERNIE_DEFAULTS = _AS_QUERIES | {"tie_word_embeddings": True}
_QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA = replace(_BIASED, windows="types", layer_norms=4, refused=("use_bidirectional_attention",))
_GEMMA_DEFAULTS: dict[str, Any] = {"head_dim": 256, "sliding_window": 4096, "tie_word_embeddings": True}
_OLMO = replace(_BIASED, qk_norm="whole", defaults=_AS_QUERIES)
_COHERE = replace(
    _BIASED, layer_norms=1, refused=("use_qk_norm",), defaults=_AS_QUERIES | {"tie_word_embeddings": True}
)
_HUNYUAN = replace(_BIASED, qk_norm=True, refused=("use_cla",), defaults=_AS_QUERIES)
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": replace(_BIASED, mlp_bias="mlp_bias", defaults=_AS_QUERIES),
    "MistralForCausalLM": Family(windows="all", defaults={"sliding_window": 4096}),
    "Ministral3ForCausalLM": Family(windows="all", defaults={"head_dim": 128}),
    "MixtralForCausalLM": Family(windows="all", experts=_MIXTRAL_EXPERTS),
    "Qwen2ForCausalLM": Family(qkv_bias=True, windows="layers", defaults=_QWEN_WINDOWS),
    "MiMoForCausalLM": Family(qkv_bias=True, windows="layers", defaults=_QWEN_WINDOWS),
    "Qwen2MoeForCausalLM": Family(
        qkv_bias="qkv_bias",
        experts=replace(_QWEN_EXPERTS, shared_width="shared_expert_intermediate_size"),
        refused=("use_sliding_window",),
        defaults={"qkv_bias": True},
    ),
    "Qwen3ForCausalLM": replace(_BIASED, qk_norm=True, windows="layers", defaults={**_QWEN_WINDOWS, "head_dim": 128}),
    "Qwen3MoeForCausalLM": replace(
        _BIASED, qk_norm=True, windows="switched", experts=_QWEN_EXPERTS, defaults=_QWEN_WINDOWS
    ),
    "Qwen3VLMoeForCausalLM": replace(_BIASED, qk_norm=True, experts=_QWEN_EXPERTS, defaults={"head_dim": 128}),
    "CohereForCausalLM": _COHERE,
    "Cohere2ForCausalLM": replace(
        _COHERE, windows="types", defaults={**_COHERE.defaults, "sliding_window": 4096, "sliding_window_pattern": 4}
    ),
    "HunYuanDenseV1ForCausalLM": _HUNYUAN,
    "HunYuanMoEV1ForCausalLM": replace(
        _HUNYUAN,
        experts=ExpertKeys(
            "num_experts", "moe_topk", "intermediate_size", shared="num_shared_expert", other="num_local_experts"
        ),
        defaults=_AS_QUERIES | {"num_shared_expert": 1},
    ),
    "OlmoeForCausalLM": replace(
        _BIASED,
        qk_norm="whole",
        experts=ExpertKeys("num_experts", "num_experts_per_tok", "intermediate_size"),
        refused=("clip_qkv",),
    ),
    "MiniMaxM2ForCausalLM": Family(
        qk_norm="whole", experts=replace(_MIXTRAL_EXPERTS, router_bias=True), defaults={"head_dim": 128}
    ),
    "Ernie4_5ForCausalLM": Family(
        qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias", defaults=_ERNIE_DEFAULTS | {"head_dim": 128}
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        experts=ExpertKeys(
            "moe_num_experts",
            "moe_k",
            "moe_intermediate_size",
            router_bias=True,
            step="moe_layer_interval",
            from_one=True,
            first="moe_layer_start_index",
            last="moe_layer_end_index",
            shared="moe_num_shared_experts",
        ),
        refused=("use_bias",),
        defaults=_ERNIE_DEFAULTS | {"moe_layer_start_index": 1, "moe_num_shared_experts": 2},
    ),
    "SeedOssForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        defaults={"attention_bias": True, "head_dim": 128},
    ),
    "GraniteMoeForCausalLM": replace(_BIASED, experts=_MIXTRAL_EXPERTS, defaults=_AS_QUERIES),
    "GraniteMoeHybridForCausalLM": replace(_BIASED, ffn="shared_intermediate_size", defaults=_AS_QUERIES),
    "GraniteForCausalLM": replace(_BIASED, mlp_bias="mlp_bias"),
    "Phi3ForCausalLM": Family(windows="all"),
    "SmolLM3ForCausalLM": replace(_BIASED, mlp_bias="mlp_bias", refused=("use_sliding_window",)),
    "DeepseekV2ForCausalLM": replace(_DEEPSEEK, experts=replace(_DEEPSEEK_EXPERTS, router_bias=False)),
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "Glm4MoeForCausalLM": Family(
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        experts=_DEEPSEEK_EXPERTS,
        defaults={"head_dim": 128, "first_k_dense_replace": 1},
    ),
    "Glm4MoeLiteForCausalLM": replace(
        _DEEPSEEK, experts=replace(_DEEPSEEK_EXPERTS, types="mlp_layer_types"), defaults={"first_k_dense_replace": 1}
    ),
    "GptOssForCausalLM": replace(
        _BIASED,
        windows="types",
        sinks=True,
        experts=ExpertKeys(
            "num_local_experts", "num_experts_per_tok", "intermediate_size", bias=True, router_bias=True
        ),
        defaults={"attention_bias": True, "sliding_window": 128, "sliding_window_pattern": 2},
    ),
    "GemmaForCausalLM": replace(
        _GEMMA, windows="none", layer_norms=2, defaults={"head_dim": 256, "tie_word_embeddings": True}
    ),
    "Gemma2ForCausalLM": replace(_GEMMA, defaults=_GEMMA_DEFAULTS | {"sliding_window_pattern": 2}),
    "Gemma3ForCausalLM": replace(
        _GEMMA,
        qk_norm=True,
        defaults=_GEMMA_DEFAULTS
        | {
            "sliding_window_pattern": 6,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
    ),
    "Gemma4ForCausalLM": replace(
        _GEMMA,
        qk_norm=True,
        kinds=True,
        experts=ExpertKeys("num_experts", "top_k_experts", "moe_intermediate_size", router_bias=True),
        defaults={
            "head_dim": 256,
            "global_head_dim": 512,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
            "vocab_size": 262_144,
            "max_position_embeddings": 131_072,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262_144,
        },
    ),
    "Olmo2ForCausalLM": _OLMO,
    "Olmo3ForCausalLM": replace(
        _OLMO, windows="types", defaults={**_OLMO.defaults, "sliding_window": 4096, "sliding_window_pattern": 4}
    ),
    "GlmForCausalLM": Family(qkv_bias="attention_bias", defaults={"attention_bias": True, "head_dim": 128}),
    "Glm4ForCausalLM": Family(
        qkv_bias="attention_bias", layer_norms=4, defaults={"attention_bias": True, "head_dim": 128}
    ),
}
_DELTA_NET = replace(
    _BIASED,
    qk_norm=True,
    recurrent="linear_attention",
    output_gate=True,
    defaults={
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
)
_SHARED_EXPERT = replace(_QWEN_EXPERTS, shared_width="shared_expert_intermediate_size")
FAMILIES |= {
    "Qwen3NextForCausalLM": replace(_DELTA_NET, experts=_SHARED_EXPERT),
    "Qwen3_5ForCausalLM": _DELTA_NET,
    "Qwen3_5MoeForCausalLM": replace(_DELTA_NET, experts=_SHARED_EXPERT),
    "Lfm2ForCausalLM": Family(
        qk_norm=True,
        recurrent="conv",
        defaults={"tie_word_embeddings": True, "conv_L_cache": 3, "block_multiple_of": 256},
    ),
    "Lfm2MoeForCausalLM": Family(
        qk_norm=True,
        recurrent="conv",
        experts=replace(
            _MIXTRAL_EXPERTS,
            count="num_experts",
            width="moe_intermediate_size",
            first="num_dense_layers",
            router_bias="use_expert_bias",
        ),
        defaults={
            "tie_word_embeddings": True,
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
            "num_dense_layers": 2,
            "use_expert_bias": True,
        },
    ),
}
# Models that read images or sounds too, and the family of the part that reads text where it does not say itself.
WRAPPERS = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "InternVLForConditionalGeneration": "Qwen2ForCausalLM",
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "Kimi_K25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "LlavaForConditionalGeneration": "LlamaForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3VLMoeForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
# What config.json calls that part.
TEXT_TYPES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3VLMoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}

# Keys whose presence means that a model is not what its architecture says.
OTHER_KINDS = {
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "moe_num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "kv_lora_rank": "multi-head latent attention",
}
