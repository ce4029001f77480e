"""The shape of a model, read from a Hugging Face config.json.

No torch here: the cost model and the API process may read a config too. What config.json asks for and
the decoder cannot do is refused with one line that names the file, the key and a way out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.models.rope_config import RopeConfig, read_rope
from headway.models.values import ConfigValues, ModelError

__all__ = ["FAMILIES", "Family", "ModelConfig", "ModelError", "RopeConfig"]

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture fixes. A bias that is a string is the config key that switches it on.

    Args:
        windows: which layers slide: "none", "all" (when sliding_window is set), or "layers"
            (use_sliding_window, with layer_types or max_window_layers saying which).
        defaults: values that the architecture assumes for keys missing from config.json.
    """

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    windows: str = "none"
    defaults: Mapping[str, Any] = field(default_factory=dict)


_QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults={"num_key_value_heads": None},
    ),
    "MistralForCausalLM": Family(windows="all", defaults={"sliding_window": 4096}),
    "Qwen2ForCausalLM": Family(qkv_bias=True, windows="layers", defaults=_QWEN_WINDOWS),
    "Qwen3ForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        windows="layers",
        defaults={**_QWEN_WINDOWS, "head_dim": 128},
    ),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape. Sizes are in elements, lengths in tokens.

    Args:
        sliding_windows: for each layer, how many positions a query sees (itself included), or None for all.
        dtype: the checkpoint's own dtype by name, None where config.json does not say.
        eos_token_ids: ids that end a generation; generation_config.json wins over config.json.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    rope: RopeConfig
    dtype: str | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read config.json, and generation_config.json where there is one.

        Raises:
            ModelError: a file is missing or not JSON, a key is missing or of the wrong kind, or the model
                needs something that the decoder does not have.
        """
        folder = Path(folder)
        raw = read_json(folder / "config.json", "a model folder holds the config.json of its checkpoint")
        generation = folder / "generation_config.json"
        extra = read_json(generation, "") if generation.is_file() else {}
        return cls.from_dict(raw, str(folder / "config.json"), _eos_ids(extra, str(generation)))

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], source: str = "config.json", eos_token_ids: tuple[int, ...] = ()
    ) -> ModelConfig:
        """The same from a parsed config.json; `source` is the file that errors name."""
        architecture, family = _family(raw, source)
        values = ConfigValues(raw, source, family.defaults)
        _refuse_unsupported(values)
        hidden_size = values.positive_int("hidden_size")
        num_heads = values.positive_int("num_attention_heads")
        num_kv_heads = values.positive_int("num_key_value_heads", or_none=num_heads)
        if num_heads % num_kv_heads:
            raise values.error(
                "num_key_value_heads", f"does not divide num_attention_heads, which is {num_heads}; correct either"
            )
        head_dim = _head_dim(values, hidden_size, num_heads)
        num_layers = values.positive_int("num_hidden_layers")
        max_positions = values.positive_int("max_position_embeddings")
        return cls(
            architecture=architecture,
            vocab_size=values.positive_int("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=values.positive_int("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=values.positive_number("rms_norm_eps"),
            max_position_embeddings=max_positions,
            tie_word_embeddings=values.boolean("tie_word_embeddings"),
            qkv_bias=_switch(family.qkv_bias, values),
            o_bias=_switch(family.o_bias, values),
            mlp_bias=_switch(family.mlp_bias, values),
            qk_norm=family.qk_norm,
            sliding_windows=_sliding_windows(family, values, num_layers),
            rope=read_rope(values, head_dim, max_positions),
            dtype=_dtype(values),
            eos_token_ids=eos_token_ids or _eos_ids(raw, source),
        )

    @property
    def max_model_len(self) -> int:
        """Context to serve when the user names none.

        Linear and yarn scaling stretch it by their factor. Dynamic scaling does not, because it leaves the
        model unchanged only up to max_position_embeddings (see rope.py); ask for more to get more.
        """
        return self.max_position_embeddings if self.rope.kind == "dynamic" else self.longest_model_len

    @property
    def longest_model_len(self) -> int:
        """Most tokens that the positions of this model are meant for, RoPE scaling included."""
        if self.rope.kind in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.kind == "yarn":
            return max(self.max_position_embeddings, int(self.rope.original_max_position * self.rope.factor))
        return self.max_position_embeddings

    def kv_cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, int, int, int]:
        """[N, G, B, D] of the keys of one layer, and of its values."""
        return (num_blocks, self.num_kv_heads, block_size, self.head_dim)

    def kv_bytes_per_token(self, dtype_size: int, scale_size: int = 0) -> int:
        """Bytes of cache for one token in all layers.

        2 (keys, values) * layers * KV heads * (head_dim * dtype_size + scale_size); scale_size is that of the one scale
        that a token and head has in a cache of int8, 0 where there is none.
        """
        return 2 * self.num_layers * self.num_kv_heads * (self.head_dim * dtype_size + scale_size)

    def kv_bytes_per_block(self, block_size: int, dtype_size: int, scale_size: int = 0) -> int:
        """Bytes of cache for one block of block_size tokens in all layers: as many times those of a token."""
        return block_size * self.kv_bytes_per_token(dtype_size, scale_size)


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


def _family(raw: Mapping[str, Any], source: str) -> tuple[str, Family]:
    named = raw.get("architectures")
    supported = ", ".join(FAMILIES)
    if not isinstance(named, list) or not named:
        raise ModelError(f"{source}: architectures is missing; it must name one of {supported}")
    for name in named:
        if isinstance(name, str) and name in FAMILIES:
            return name, FAMILIES[name]
    raise ModelError(f"{source}: architectures is {named}, which is not supported; choose a model of {supported}")


def _refuse_unsupported(values: ConfigValues) -> None:
    act = values.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise values.error("hidden_act", "is not supported; only silu is")
    for key in ("quantization_config", "compression_config"):
        quantization = values.get(key)
        if quantization is not None:
            method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
            raise ModelError(
                f"{values.source}: {key} asks for {method} quantisation, which is not supported; "
                "use the unquantised checkpoint"
            )


def _head_dim(values: ConfigValues, hidden_size: int, num_heads: int) -> int:
    if values.get("head_dim") is not None:
        head_dim = values.positive_int("head_dim")
    elif hidden_size % num_heads:
        raise values.error("hidden_size", f"is not a multiple of num_attention_heads, {num_heads}; give head_dim")
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ModelError(f"{values.source}: head_dim is {head_dim}; rotary embeddings need an even number")
    return head_dim


def _switch(bias: bool | str, values: ConfigValues) -> bool:
    return values.boolean(bias) if isinstance(bias, str) else bias


def _sliding_windows(family: Family, values: ConfigValues, num_layers: int) -> tuple[int | None, ...]:
    window = None if values.get("sliding_window") is None else values.positive_int("sliding_window")
    if family.windows == "none":
        return (None,) * num_layers
    if family.windows == "all":
        return (window,) * num_layers
    if not values.boolean("use_sliding_window"):
        window = None
    kinds = values.get("layer_types")
    if kinds is None:
        first = values.non_negative_int("max_window_layers")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return tuple(window if kind == "sliding_attention" else None for kind in _layer_types(values, num_layers, window))


def _layer_types(values: ConfigValues, num_layers: int, window: int | None) -> list[str]:
    kinds = values.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelError(f"{values.source}: layer_types must be a list of num_hidden_layers, {num_layers}, names")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(
                f"{values.source}: layer_types holds {kind!r}; only full_attention and sliding_attention are supported"
            )
    if window is None and "sliding_attention" in kinds:
        raise ModelError(
            f"{values.source}: layer_types holds sliding_attention but use_sliding_window is false or "
            "sliding_window is missing; correct either"
        )
    return kinds


def _dtype(values: ConfigValues) -> str | None:
    key = "dtype" if values.get("dtype") is not None else "torch_dtype"
    name = values.get(key)
    if name is None:
        return None
    if isinstance(name, str) and name.removeprefix("torch.") in DTYPES:
        return name.removeprefix("torch.")
    raise values.error(key, f"is not supported; it must be one of {', '.join(DTYPES)}")


def _eos_ids(raw: Mapping[str, Any], source: str) -> tuple[int, ...]:
    value = raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ModelError(f"{source}: eos_token_id is {value!r}; it must be a token id or a list of them")
    return tuple(token for token in ids if token >= 0)
