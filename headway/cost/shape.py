"""The shape of a dense decoder and its parameters, counted exactly.

Symbols used in this room: L layers, h hidden size, H query heads, G key/value heads, D head dimension, F size of
the feed-forward layer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Keys whose presence means that the model is not of the dense kind with grouped-query attention.
_OTHER_KINDS = {
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "kv_lora_rank": "multi-head latent attention",
}


class ShapeError(ValueError):
    """A config.json that gives no shape that can be costed; one line that names the file and the key."""


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture fixes; a bias that is a string is the config key that switches it on."""

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    windows: str = "none"  # none, all, or layers (use_sliding_window, then layer_types or max_window_layers)
    window: int | None = None  # where sliding_window is missing
    all_heads: bool = False  # num_key_value_heads may be missing, and then is the number of query heads
    head_dim: int | None = None  # where head_dim is missing; None: hidden size / query heads


_FAMILIES = {
    "LlamaForCausalLM": _Family(
        qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias", all_heads=True
    ),
    "MistralForCausalLM": _Family(windows="all", window=4096),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, windows="layers", window=4096),
    "Qwen3ForCausalLM": _Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        windows="layers",
        window=4096,
        head_dim=128,
    ),
}


def kv_elements_per_token(layers: int, kv_heads: int, head_dim: int) -> int:
    """Keys and values of one token: 2 * layers * KV heads * head dimension (document 000, KV cache formula)."""
    return 2 * layers * kv_heads * head_dim


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder with a gated feed-forward layer. Sizes are in elements, lengths in tokens.

    Args:
        tied_embeddings: the head is the embedding, held once.
        sliding_windows: for each layer, how many positions a query sees (itself included), or None for all.
        max_positions: what max_position_embeddings says.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    max_positions: int = 0

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ShapeError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.heads % self.kv_heads:
            raise ShapeError(f"heads is {self.heads}, which is not a multiple of kv_heads, {self.kv_heads}")
        if not self.sliding_windows:
            object.__setattr__(self, "sliding_windows", (None,) * self.layers)
        if len(self.sliding_windows) != self.layers:
            raise ShapeError(f"sliding_windows has {len(self.sliding_windows)} entries for {self.layers} layers")

    @classmethod
    def from_config(cls, raw: Mapping[str, Any], source: str = "config.json") -> ModelShape:
        """The shape that a parsed config.json describes; `source` is the file that errors name.

        Raises:
            ShapeError: the architecture is not known or not dense, or a key is missing or of the wrong kind.
        """
        config = _Config(raw, source)
        family = config.family()
        heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
        layers = config.size("num_hidden_layers")
        every = family.all_heads or config.is_null("num_key_value_heads")
        kv_heads = config.size("num_key_value_heads", heads if every else None)
        if heads % kv_heads:
            raise config.error("num_attention_heads", f"is not a multiple of num_key_value_heads, {kv_heads}")
        if raw.get("head_dim") is None and hidden % heads and family.head_dim is None:
            raise config.error("hidden_size", f"is not a multiple of num_attention_heads, {heads}; give head_dim")
        fallback = hidden // heads if config.is_null("head_dim") or family.head_dim is None else family.head_dim
        return cls(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=config.size("head_dim", fallback),
            ffn=config.size("intermediate_size"),
            vocab=config.size("vocab_size"),
            tied_embeddings=config.switch("tie_word_embeddings"),
            qkv_bias=config.switch(family.qkv_bias),
            o_bias=config.switch(family.o_bias),
            mlp_bias=config.switch(family.mlp_bias),
            qk_norm=family.qk_norm,
            sliding_windows=config.windows(family, layers),
            max_positions=config.size("max_position_embeddings"),
        )

    @property
    def qkv_rows(self) -> int:
        """Outputs of the fused query, key and value projection: (H + 2 G) D."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of cache for one token in all layers, sliding windows apart."""
        return kv_elements_per_token(self.layers, self.kv_heads, self.head_dim)

    def parameters(self) -> dict[str, int]:
        """Parameters by component; a tied head has none of its own."""
        attended = self.heads * self.head_dim
        attention = self.qkv_rows * self.hidden + attended * self.hidden
        attention += self.qkv_rows * self.qkv_bias + self.hidden * self.o_bias
        ffn = 3 * self.hidden * self.ffn + (2 * self.ffn + self.hidden) * self.mlp_bias
        norms = 2 * self.hidden + 2 * self.head_dim * self.qk_norm
        return {
            "embedding": self.vocab * self.hidden,
            "attention": self.layers * attention,
            "ffn": self.layers * ffn,
            "norms": self.layers * norms + self.hidden,
            "head": 0 if self.tied_embeddings else self.vocab * self.hidden,
        }

    @property
    def num_parameters(self) -> int:
        return sum(self.parameters().values())


@dataclass(frozen=True, slots=True)
class _Config:
    """Typed reading of a config.json."""

    raw: Mapping[str, Any]
    source: str

    def error(self, key: str, problem: str) -> ShapeError:
        return ShapeError(f"{self.source}: {key} is {self.raw.get(key)!r}, which {problem}")

    def is_null(self, key: str) -> bool:
        return key in self.raw and self.raw[key] is None

    def family(self) -> _Family:
        for key, kind in _OTHER_KINDS.items():
            if self.raw.get(key):
                raise ShapeError(f"{self.source}: {key} says that the model has {kind}; only dense decoders are costed")
        named = self.raw.get("architectures")
        for name in named if isinstance(named, list) else []:
            if name in _FAMILIES:
                return _FAMILIES[name]
        raise ShapeError(f"{self.source}: architectures is {named!r}; known are {', '.join(_FAMILIES)}")

    def size(self, key: str, fallback: int | None = None) -> int:
        value = self.raw.get(key)
        if value is None:
            value = fallback
        if value is None:
            raise ShapeError(f"{self.source}: {key} is missing; the model's shape is not known without it")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, "is not a whole number of at least 1")
        return value

    def switch(self, key: bool | str) -> bool:
        value = self.raw.get(key) if isinstance(key, str) else key
        if value is not None and not isinstance(value, bool):
            raise self.error(str(key), "is neither true nor false")
        return bool(value)

    def windows(self, family: _Family, layers: int) -> tuple[int | None, ...]:
        window = None if self.is_null("sliding_window") or family.windows == "none" else self._window(family)
        if family.windows == "layers" and not self.switch("use_sliding_window"):
            window = None
        kinds = self.raw.get("layer_types")
        if family.windows != "layers" or window is None:
            return (window,) * layers
        if kinds is not None:
            if not isinstance(kinds, list) or len(kinds) != layers:
                raise ShapeError(f"{self.source}: layer_types must be a list of num_hidden_layers, {layers}, names")
            return tuple(window if kind == "sliding_attention" else None for kind in kinds)
        first = self.raw.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise self.error("max_window_layers", "is not a whole number of at least 0")
        return tuple(window if layer >= first else None for layer in range(layers))

    def _window(self, family: _Family) -> int:
        return self.size("sliding_window", family.window)
