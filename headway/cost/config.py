"""The shape that a Hugging Face config.json describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.cost.shape import Experts, Latent, ModelShape, ShapeError


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture fixes; a bias that is a string is the config key that switches it on.

    Args:
        windows: none, all, switched (all, with use_sliding_window), layers (use_sliding_window, then layer_types or
            max_window_layers), or types (layer_types alone).
        window: where sliding_window is missing.
        all_heads: num_key_value_heads may be missing, and then is the number of query heads.
        head_dim: where head_dim is missing; None: hidden size / query heads.
        experts: the names of the keys that describe a mixture of experts, or None.
        latent: attention is of the kind with a latent.
        biased: a bias whose key is missing is there.
        refused: switches of parts that are not counted, which no published model has.
    """

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    windows: str = "none"
    window: int | None = None
    all_heads: bool = False
    head_dim: int | None = None
    experts: _ExpertKeys | None = None
    latent: bool = False
    sinks: bool = False
    refused: tuple[str, ...] = ()
    biased: bool = False


@dataclass(frozen=True, slots=True)
class _ExpertKeys:
    """Where an architecture keeps the numbers of its experts.

    Args:
        count: key of how many there are, and `other` another name of it.
        width: key of an expert's F.
        step, first, but: keys that say which layers have experts: every n-th, from which on, and a list of those
            that do not.
        shared: key of how many further experts every token goes through.
    """

    count: str
    per_token: str
    width: str
    bias: bool = False
    router_bias: bool = False
    step: str | None = None
    first: str | None = None
    but: str | None = None
    shared: str | None = None
    other: str | None = None


def _deepseek(router_bias: bool) -> _Family:
    keys = _ExpertKeys(
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        router_bias=router_bias,
        step="moe_layer_freq",
        first="first_k_dense_replace",
        shared="n_shared_experts",
    )
    return _Family(latent=True, experts=keys, refused=("attention_bias", "mlp_bias"))


_QWEN3_EXPERTS = _ExpertKeys(
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    step="decoder_sparse_step",
    but="mlp_only_layers",
    other="num_local_experts",
)
_FAMILIES: dict[str, _Family] = {
    "LlamaForCausalLM": _Family(
        qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias", all_heads=True
    ),
    "MistralForCausalLM": _Family(windows="all", window=4096),
    "MixtralForCausalLM": _Family(
        windows="all", experts=_ExpertKeys("num_local_experts", "num_experts_per_tok", "intermediate_size")
    ),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, windows="layers", window=4096),
    "Qwen3ForCausalLM": _Family(
        qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True, windows="layers", window=4096, head_dim=128
    ),
    "Qwen3MoeForCausalLM": _Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        windows="switched",
        window=4096,
        experts=_QWEN3_EXPERTS,
    ),
    "DeepseekV2ForCausalLM": _deepseek(router_bias=False),
    "DeepseekV3ForCausalLM": _deepseek(router_bias=True),
    "GptOssForCausalLM": _Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        biased=True,
        windows="types",
        sinks=True,
        experts=_ExpertKeys(
            "num_local_experts", "num_experts_per_tok", "intermediate_size", bias=True, router_bias=True
        ),
    ),
}
_GPTJ = "GPTJForCausalLM"

# Keys whose presence means that a model is not what its architecture says, as far as costs go.
_OTHER_KINDS = {
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "kv_lora_rank": "multi-head latent attention",
}


def known_architectures() -> tuple[str, ...]:
    """Names that `architectures` may hold."""
    return (*_FAMILIES, _GPTJ)


def read_shape(raw: Mapping[str, Any], source: str = "config.json") -> ModelShape:
    """The shape that a parsed config.json describes; `source` is the file that errors name.

    Raises:
        ShapeError: the architecture is not known, or a key is missing or of the wrong kind.
    """
    config = _Config(raw, source)
    name = config.architecture()
    return _gpt_j(config) if name == _GPTJ else _decoder(config, _FAMILIES[name], name)


def _decoder(config: _Config, family: _Family, name: str) -> ModelShape:
    config.refuse_other_kinds(family, name)
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    layers = config.size("num_hidden_layers")
    latent = config.latent() if family.latent else None
    kv_heads, head_dim = (heads, latent.nope_dim + latent.rope_dim) if latent else config.heads(family, heads, hidden)
    experts = config.experts(family.experts, layers) if family.experts else None
    # Where every layer has experts, "intermediate_size" may be left out or stand for the experts' own.
    fallback = experts.width if experts and experts.layers == layers else None
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=config.size("intermediate_size", fallback),
        vocab=config.size("vocab_size"),
        tied_embeddings=config.switch("tie_word_embeddings"),
        qkv_bias=config.switch(family.qkv_bias, family.biased),
        o_bias=config.switch(family.o_bias, family.biased),
        mlp_bias=config.switch(family.mlp_bias),
        qk_norm=family.qk_norm,
        sliding_windows=config.windows(family, layers),
        max_positions=config.size("max_position_embeddings"),
        sinks=family.sinks,
        latent=latent,
        experts=experts,
    )


def _gpt_j(config: _Config) -> ModelShape:
    """GPT-J: one LayerNorm before attention and feed-forward layer, which run side by side; no gate."""
    hidden, heads = config.size("n_embd"), config.size("n_head")
    if hidden % heads:
        raise config.error("n_embd", f"is not a multiple of n_head, {heads}")
    return ModelShape(
        layers=config.size("n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=config.size("n_inner", 4 * hidden),
        vocab=config.size("vocab_size"),
        tied_embeddings=config.switch("tie_word_embeddings"),
        mlp_bias=True,
        max_positions=config.size("n_positions"),
        gated=False,
        layer_norms=1,
        norm_bias=True,
        head_bias=True,
    )


@dataclass(frozen=True, slots=True)
class _Config:
    """Typed reading of a config.json."""

    raw: Mapping[str, Any]
    source: str

    def error(self, key: str, problem: str) -> ShapeError:
        return ShapeError(f"{self.source}: {key} is {self.raw.get(key)!r}, which {problem}")

    def is_null(self, key: str) -> bool:
        return key in self.raw and self.raw[key] is None

    def architecture(self) -> str:
        named = self.raw.get("architectures")
        for name in named if isinstance(named, list) else []:
            if name in known_architectures():
                return str(name)
        raise ShapeError(f"{self.source}: architectures is {named!r}; known are {', '.join(known_architectures())}")

    def refuse_other_kinds(self, family: _Family, name: str) -> None:
        keys = family.experts
        own = {keys.count, keys.other} if keys else set()
        own |= {"kv_lora_rank"} if family.latent else set()
        for key in family.refused:
            if self.switch(key):
                raise self.error(key, f"is not supported for {name}")
        for key, kind in _OTHER_KINDS.items():
            if self.raw.get(key) and key not in own:
                raise ShapeError(f"{self.source}: {key} says that the model has {kind}, which {name} has not")

    def heads(self, family: _Family, heads: int, hidden: int) -> tuple[int, int]:
        """Key/value heads and the size of a head."""
        every = family.all_heads or self.is_null("num_key_value_heads")
        kv_heads = self.size("num_key_value_heads", heads if every else None)
        if heads % kv_heads:
            raise self.error("num_attention_heads", f"is not a multiple of num_key_value_heads, {kv_heads}")
        if self.raw.get("head_dim") is None and hidden % heads and family.head_dim is None:
            raise self.error("hidden_size", f"is not a multiple of num_attention_heads, {heads}; give head_dim")
        fallback = hidden // heads if self.is_null("head_dim") or family.head_dim is None else family.head_dim
        return kv_heads, self.size("head_dim", fallback)

    def latent(self) -> Latent:
        return Latent(
            q_rank=self.size("q_lora_rank") if self.raw.get("q_lora_rank") is not None else None,
            kv_rank=self.size("kv_lora_rank"),
            nope_dim=self.size("qk_nope_head_dim"),
            rope_dim=self.size("qk_rope_head_dim"),
            value_dim=self.size("v_head_dim"),
        )

    def experts(self, keys: _ExpertKeys, layers: int) -> Experts | None:
        """None where no layer has experts."""
        with_experts = self._layers_with_experts(keys, layers)
        count_key = keys.other if keys.other in self.raw and keys.count not in self.raw else keys.count
        count, per_token, width = (self.size(key) for key in (str(count_key), keys.per_token, keys.width))
        if per_token > count:
            raise self.error(keys.per_token, f"is more than {count_key}, {count}")
        if not with_experts:
            return None
        return Experts(
            count=count,
            per_token=per_token,
            width=width,
            layers=with_experts,
            shared_width=width * self.number(keys.shared, 0) if keys.shared else 0,
            bias=keys.bias,
            router_bias=keys.router_bias,
        )

    def _layers_with_experts(self, keys: _ExpertKeys, layers: int) -> int:
        step = self.size(keys.step, 1) if keys.step else 1
        first = self.number(keys.first, 0) if keys.first else 0
        without = self.raw.get(keys.but) or [] if keys.but else []
        if not isinstance(without, list):
            raise self.error(str(keys.but), "is not a list of layers")
        if keys.step == "decoder_sparse_step":  # Qwen counts layers from 1
            return sum((layer + 1) % step == 0 and layer not in without for layer in range(layers))
        return sum(layer >= first and layer % step == 0 for layer in range(layers))

    def number(self, key: str, fallback: int) -> int:
        value = self.raw.get(key)
        value = fallback if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(key, "is not a whole number of at least 0")
        return value

    def size(self, key: str, fallback: int | None = None) -> int:
        value = self.raw.get(key)
        if value is None:
            value = fallback
        if value is None:
            raise ShapeError(f"{self.source}: {key} is missing; the model's shape is not known without it")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, "is not a whole number of at least 1")
        return value

    def switch(self, key: bool | str, fallback: bool = False) -> bool:
        value = self.raw.get(key, fallback) if isinstance(key, str) else key
        if value is not None and not isinstance(value, bool):
            raise self.error(str(key), "is neither true nor false")
        return bool(value)

    def windows(self, family: _Family, layers: int) -> tuple[int | None, ...]:
        if family.windows == "none" or self.is_null("sliding_window"):
            return (None,) * layers
        if family.windows in ("layers", "switched") and not self.switch("use_sliding_window"):
            return (None,) * layers
        if family.windows in ("all", "switched"):
            # Mixtral's files say null or nothing: without the key there is no window.
            window = self.size("sliding_window", family.window) if self._has_window(family) else None
            return (window,) * layers
        window = self.size("sliding_window", family.window)
        kinds = self.raw.get("layer_types")
        if kinds is not None:
            if not isinstance(kinds, list) or len(kinds) != layers:
                raise ShapeError(f"{self.source}: layer_types must be a list of num_hidden_layers, {layers}, names")
            return tuple(window if kind == "sliding_attention" else None for kind in kinds)
        if family.windows == "types":  # gpt-oss alternates, the first layer with a window
            return tuple(None if layer % 2 else window for layer in range(layers))
        first = self.number("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(layers))

    def _has_window(self, family: _Family) -> bool:
        return family.window is not None or self.raw.get("sliding_window") is not None
