"""A model's sizes as a Hugging Face config.json says them: read here once, for the decoder and for the cost model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from headway.cost.families import FAMILIES, OTHER_KINDS, TEXT_TYPES, WRAPPERS, ExpertKeys, Family
from headway.cost.layer_kinds import with_kinds
from headway.cost.layers import Experts, Latent, StateSpec
from headway.cost.shape import ModelShape
from headway.cost.values import ConfigValues, ModelError

_GPTJ = "GPTJForCausalLM"
# A damaged file can hold any number.
_MOST_LAYERS, _MOST_EXPERTS, _MOST_POSITIONS = 1000, 4096, 1 << 24
_MOST_OF_ALL_EXPERTS = 1 << 17


def known_architectures() -> tuple[str, ...]:
    """Names that `architectures` may hold."""
    return (*FAMILIES, _GPTJ)


def read_shape(raw: Mapping[str, Any], source: str = "config.json", among: Collection[str] | None = None) -> ModelShape:
    """The shape that a parsed config.json describes.

    Args:
        source: the file that errors name.
        among: architectures that will do; None: all that are known.

    Raises:
        ModelError: the architecture is not one of them, or a key is missing or of the wrong kind.
    """
    raw = text_part(without_head(raw))
    name = _architecture(raw, source, known_architectures() if among is None else among)
    if name == _GPTJ:
        return _gpt_j(ConfigValues(raw, source))
    family = FAMILIES[name]
    values = ConfigValues(raw, source, family.defaults)
    _refuse_other_kinds(values, family, name)
    return _decoder(values, family)


def without_head(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """A parsed config.json with the family of a model that was saved without its output layer, as embedders are.

    Its embedding stands for that layer. A file of another model is returned as it is.
    """
    named = raw.get("architectures")
    for name in named if isinstance(named, list) else []:
        family = f"{name.removesuffix('Model')}ForCausalLM" if isinstance(name, str) and name.endswith("Model") else ""
        if family in FAMILIES:
            return {**raw, "architectures": [family], "tie_word_embeddings": True}
    return raw


def text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a parsed config.json says of the part that reads text; all of it, where a model has no other part."""
    named, text = raw.get("architectures"), raw.get("text_config")
    named = [each for each in named if isinstance(each, str)] if isinstance(named, list) else []
    found = next((WRAPPERS[each] for each in named if each in WRAPPERS), None)
    if found is None:
        return raw
    if not isinstance(text, Mapping):
        return {**raw, "architectures": [found]}
    whole = {key: raw[key] for key in ("quantization_config", "torch_dtype", "dtype") if key in raw}
    tied = {key: raw[key] for key in ("tie_word_embeddings",) if key in raw}
    stated = TEXT_TYPES.get(str(text.get("model_type")), found)
    return whole | dict(text) | tied | {"architectures": [stated]}


def _architecture(raw: Mapping[str, Any], source: str, among: Collection[str]) -> str:
    named = raw.get("architectures")
    for name in named if isinstance(named, list) else []:
        if name in among:
            return str(name)
    raise ModelError(f"{source}: architectures is {named!r}; it must name one of {', '.join(among)}")


def _decoder(values: ConfigValues, family: Family) -> ModelShape:
    if family.kinds and not values.boolean("enable_moe_block"):
        family = replace(family, experts=None)
    heads, hidden = values.positive_int("num_attention_heads"), values.positive_int("hidden_size")
    layers = _count(values, "num_hidden_layers", _MOST_LAYERS)
    latent = _latent(values) if family.latent else None
    kv_heads, head_dim = (heads, latent.nope_dim + latent.rope_dim) if latent else _heads(values, heads, hidden)
    experts = _experts(values, family.experts, layers) if family.experts else None
    recurrent = _recurrent(values, family.recurrent, layers) if family.recurrent else ()
    # Where every layer has experts, "intermediate_size" may be left out or stand for the experts' own.
    fallback = experts.width if experts and experts.layers == layers else None
    shape = ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=_adjusted_ffn(values) if family.recurrent == "conv" else values.positive_int(family.ffn, fallback),
        vocab=values.positive_int("vocab_size"),
        tied_embeddings=values.boolean("tie_embedding", values.boolean("tie_word_embeddings")),
        qkv_bias=_switch(family.qkv_bias, values),
        o_bias=_switch(family.o_bias, values),
        mlp_bias=_switch(family.mlp_bias, values),
        qk_norm="whole" if family.qk_norm == "whole" else _switch(family.qk_norm, values),
        sliding_windows=_windows(values, family, layers - len(recurrent)),
        max_positions=_count(values, "max_position_embeddings", _MOST_POSITIONS),
        layer_norms=family.layer_norms,
        sinks=family.sinks,
        output_gate=family.output_gate,
        latent=latent,
        experts=experts,
        state=_state(values, hidden, is_delta=family.output_gate) if recurrent else None,
        recurrent=recurrent,
    )
    return with_kinds(values, shape) if family.kinds else shape


def _recurrent(values: ConfigValues, kind: str, layers: int) -> tuple[int, ...]:
    """Numbers of the layers of this kind: listed by name, or all but every n-th (Qwen), or but those listed (LFM2)."""
    if values.get("layer_types") is not None:
        names = _layer_kinds(values, "layer_types", layers, ("full_attention", kind))
        found = tuple(layer for layer, name in enumerate(names) if name == kind)
    elif kind == "conv":
        others = values.get("full_attn_idxs")
        if others is not None and not isinstance(others, list):
            raise values.error("full_attn_idxs", "is not a list of layers")
        found = tuple(layer for layer in range(layers) if others is not None and layer not in others)
    else:
        interval = values.positive_int("full_attention_interval")
        found = tuple(layer for layer in range(layers) if (layer + 1) % interval)
    if len(found) == layers:
        raise ModelError(f"{values.source}: no layer has full_attention, which models without are not supported for")
    return found


def _state(values: ConfigValues, hidden: int, is_delta: bool) -> StateSpec:
    if not is_delta:
        return StateSpec(hidden, values.positive_int("conv_L_cache"), bias=values.boolean("conv_bias", False))
    heads, key_heads = (values.positive_int(f"linear_num_{kind}_heads") for kind in ("value", "key"))
    value_dim, key_dim = (values.positive_int(f"linear_{kind}_head_dim") for kind in ("value", "key"))
    if heads % key_heads:
        raise values.error("linear_num_value_heads", f"is not a multiple of linear_num_key_heads, {key_heads}")
    channels = 2 * key_heads * key_dim + heads * value_dim
    return StateSpec(channels, values.positive_int("linear_conv_kernel_dim"), heads, key_heads, key_dim, value_dim)


def _adjusted_ffn(values: ConfigValues) -> int:
    """LFM2's F: two thirds of what the file says, times a factor, rounded up to a multiple."""
    width = values.positive_int("block_ff_dim", values.positive_int("intermediate_size", 12_288))
    if not values.boolean("block_auto_adjust_ff_dim", True):
        return width
    width = int(values.positive_number("block_ffn_dim_multiplier", 1.0) * (2 * width // 3))
    step = values.positive_int("block_multiple_of")
    return -(-width // step) * step


def _gpt_j(values: ConfigValues) -> ModelShape:
    """GPT-J: one LayerNorm before attention and feed-forward layer, which run side by side; no gate."""
    hidden, heads = values.positive_int("n_embd"), values.positive_int("n_head")
    if hidden % heads:
        raise values.error("n_embd", f"is not a multiple of n_head, {heads}")
    return ModelShape(
        layers=values.positive_int("n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=values.positive_int("n_inner", 4 * hidden),
        vocab=values.positive_int("vocab_size"),
        tied_embeddings=values.boolean("tie_word_embeddings"),
        mlp_bias=True,
        max_positions=values.positive_int("n_positions"),
        gated=False,
        layer_norms=1,
        norm_bias=True,
        head_bias=True,
    )


def _refuse_other_kinds(values: ConfigValues, family: Family, name: str) -> None:
    keys = family.experts
    own = {keys.count, keys.other} if keys else set()
    own |= {"kv_lora_rank"} if family.latent else set()
    for key in family.refused:
        if values.get(key) and values.get(key) != "vision":  # text does not need what is for images only
            raise values.error(key, f"is not supported for {name}")
    kinds = values.get("layer_types")
    if name == "GraniteMoeHybridForCausalLM" and isinstance(kinds, list) and {"mamba", "linear_attention"} & {*kinds}:
        raise ModelError(f"{values.source}: layer_types has layers of Mamba, which are not supported")
    for key, kind in OTHER_KINDS.items():
        if values.get(key) and key not in own:
            raise ModelError(f"{values.source}: {key} says that the model has {kind}, which {name} has not")


def _count(values: ConfigValues, key: str, most: int) -> int:
    """A number that decides how long a list gets, or how many tensors are looked for: it must not exceed `most`."""
    number = values.positive_int(key)
    if number > most:
        raise values.error(key, f"is more than any model has; it must be at most {most}")
    return number


def _switch(bias: bool | str, values: ConfigValues) -> bool:
    return values.boolean(bias) if isinstance(bias, str) else bias


def _heads(values: ConfigValues, heads: int, hidden: int) -> tuple[int, int]:
    """How many key/value heads there are (a null stands for as many as query heads), and the size of a head."""
    kv_heads = values.positive_int("num_key_value_heads", heads if values.knows("num_key_value_heads") else None)
    if heads % kv_heads:
        raise values.error("num_attention_heads", f"is not a multiple of num_key_value_heads, {kv_heads}")
    if values.get("head_dim") is None and hidden % heads:
        raise values.error("hidden_size", f"is not a multiple of num_attention_heads, {heads}; give head_dim")
    return kv_heads, values.positive_int("head_dim", hidden // heads)


def _latent(values: ConfigValues) -> Latent:
    return Latent(
        q_rank=values.positive_int("q_lora_rank") if values.get("q_lora_rank") is not None else None,
        kv_rank=values.positive_int("kv_lora_rank"),
        nope_dim=values.positive_int("qk_nope_head_dim"),
        rope_dim=values.positive_int("qk_rope_head_dim"),
        value_dim=values.positive_int("v_head_dim"),
    )


def _experts(values: ConfigValues, keys: ExpertKeys, layers: int) -> Experts | None:
    """The mixture of experts; None where no layer has one."""
    stated = {key: values.get(key) for key in (keys.per_token, keys.shared) if key is not None}
    # Hunyuan's files have a number for each layer.
    same = {
        key: each[0] for key, each in stated.items() if isinstance(each, list) and each and len({*map(str, each)}) == 1
    }
    values = replace(values, raw={**values.raw, **same}) if same else values
    with_experts = len(_layers_with_experts(values, keys, layers))
    count_key = keys.other if keys.other in values.raw and keys.count not in values.raw else keys.count
    count, per_token, width = (values.positive_int(key) for key in (str(count_key), keys.per_token, keys.width))
    _count(values, str(count_key), _MOST_EXPERTS)
    if per_token > count:
        raise values.error(keys.per_token, f"is more than {count_key}, {count}")
    if not with_experts:
        return None
    if count * layers > _MOST_OF_ALL_EXPERTS:  # each expert has tensors with names of its own
        raise values.error(str(count_key), f"is more than any model has in {layers} layers")
    return Experts(
        count=count,
        per_token=per_token,
        width=width,
        layers=with_experts,
        shared_width=_shared_width(values, keys, width),
        shared_gate=keys.shared_width is not None,
        bias=keys.bias,
        router_bias=_switch(keys.router_bias, values),
    )


def _shared_width(values: ConfigValues, keys: ExpertKeys, width: int) -> int:
    if keys.shared_width is not None:
        return values.positive_int(keys.shared_width)
    return width * values.non_negative_int(keys.shared, 0) if keys.shared else 0


def layers_with_experts(raw: Mapping[str, Any], source: str = "config.json") -> tuple[int, ...]:
    """Numbers of the layers that have experts, of a parsed config.json that read_shape() takes."""
    raw = text_part(raw)
    family = FAMILIES[_architecture(raw, source, known_architectures())]
    keys, values = family.experts, ConfigValues(raw, source, family.defaults)
    return _layers_with_experts(values, keys, values.positive_int("num_hidden_layers")) if keys else ()


def _layers_with_experts(values: ConfigValues, keys: ExpertKeys, layers: int) -> tuple[int, ...]:
    if keys.types and values.get(keys.types) is not None:
        kinds = _layer_kinds(values, keys.types, layers, ("sparse", "dense"))
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")
    step = values.positive_int(keys.step, 1) if keys.step else 1
    first = values.non_negative_int(keys.first, 0) if keys.first else 0
    without = values.get(keys.but) or [] if keys.but else []
    if not isinstance(without, list):
        raise values.error(str(keys.but), "is not a list of layers")
    last = values.get(keys.last, -1) if keys.last else -1
    end = layers if last == -1 else min(layers, values.non_negative_int(str(keys.last)) + 1)
    return tuple(layer for layer in range(first, end) if (layer + keys.from_one) % step == 0 and layer not in without)


def _windows(values: ConfigValues, family: Family, layers: int) -> tuple[int | None, ...]:
    """The window of each layer; None where it sees all tokens. Mixtral's files say null or nothing for no window."""
    if family.windows == "none":
        return (None,) * layers
    window = None if values.get("sliding_window") is None else values.positive_int("sliding_window")
    if family.windows in ("layers", "switched") and not values.boolean("use_sliding_window"):
        window = None
    if family.windows in ("all", "switched"):
        return (window,) * layers
    if values.get("layer_types") is not None:
        kinds = _layer_kinds(values, "layer_types", layers, ("full_attention", "sliding_attention"))
        if window is None and "sliding_attention" in kinds:
            raise ModelError(
                f"{values.source}: layer_types has sliding_attention but use_sliding_window is false or "
                "sliding_window is missing; correct either"
            )
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if family.windows == "types":
        pattern = values.positive_int("sliding_window_pattern")
        return tuple(window if (layer + 1) % pattern else None for layer in range(layers))
    first = values.non_negative_int("max_window_layers")
    return tuple(window if layer >= first else None for layer in range(layers))


def _layer_kinds(values: ConfigValues, key: str, layers: int, known: tuple[str, str]) -> list[str]:
    kinds = values.get(key)
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ModelError(f"{values.source}: {key} must be a list of num_hidden_layers, {layers}, names")
    for kind in kinds:
        if kind not in known:
            raise ModelError(f"{values.source}: {key} has {kind!r}; only {' and '.join(known)} are supported")
    return kinds
