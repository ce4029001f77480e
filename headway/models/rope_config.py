"""How a model's rotary embeddings are scaled, read from the old and the new keys of config.json.

Old: rope_theta beside rope_scaling {"type" or "rope_type", ...}. New (transformers 5): rope_parameters
{"rope_type", "rope_theta", ...}. Where both stand, rope_scaling wins, as it does in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.cost.values import ConfigValues, ModelError

DEFAULT_THETA = 10_000.0

_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
# Hunyuan's files have keys of yarn too, which have no effect.
_OF_YARN = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "alpha", *_OF_YARN},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "finetuned",  # says how the checkpoint was made; changes nothing
        "llama_4_scaling_beta",
        "max_position_embeddings",  # the model's, once more
    },
    "proportional": {"factor"},
    "longrope": {"factor", "short_factor", "long_factor", "original_max_position_embeddings", "attention_factor"},
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding of one model."""

    kind: str  # default, linear, dynamic, llama3, yarn, longrope or proportional
    theta: float
    dim: int  # dimensions of a head that are rotated, even, at most head_dim
    factor: float = 1.0  # how much longer the context is than in training; 1 for default
    # Tokens of context in training (llama3, yarn, longrope), or up to which nothing is scaled (dynamic).
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    attention_factor: float = 1.0  # multiplies both tables (yarn, longrope)
    depth_factor: float = 1.0  # multiplies queries and keys of latent attention, all of them (yarn's mscale_all_dim)
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    still: int = 0  # pairs of them, the last, that stay as they are (proportional)
    # Queries at position p are multiplied with 1 + query_growth * ln(1 + p // original_max_position) (Ministral 3).
    query_growth: float = 0.0
    # short_factors, long_factors: what each pair's frequency is divided by, for a context of up to
    # original_max_position and for a longer one (longrope).
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


def read_rope(values: ConfigValues, head_dim: int, max_positions: int) -> RopeConfig:
    """The RoPE settings of a config. Raises ModelError for a kind or key that cannot be served."""
    scaling = _section(values)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in _KEYS:
        raise ModelError(
            f"{values.source}: {scaling.prefix}rope_type is {kind!r}, which is not supported; "
            f"it must be one of {', '.join(_KEYS)}"
        )
    _refuse_unknown(scaling, kind)
    theta = scaling.positive_number("rope_theta", default=values.positive_number("rope_theta", DEFAULT_THETA))
    dim = _rotated(values, scaling, head_dim, kind)
    if kind == "proportional":
        return RopeConfig(kind, theta, head_dim, scaling.positive_number("factor", 1.0), still=(head_dim - dim) // 2)
    if kind == "dynamic" and scaling.get("alpha"):  # Hunyuan: whatever the length
        return RopeConfig("default", theta * scaling.positive_number("alpha") ** (dim / (dim - 2)), dim)
    if kind == "default":
        return RopeConfig(kind, theta, dim)
    original = _original_length(values, scaling, max_positions)
    if kind == "longrope":
        return _longrope(scaling, theta, dim, max_positions, original)
    if kind == "yarn" and scaling.get("factor") is None:
        factor = max_positions / original
    else:
        factor = scaling.positive_number("factor")
    if factor < 1:
        raise ModelError(f"{values.source}: {scaling.prefix}factor is {factor:g}; it must be at least 1")
    if kind == "llama3":
        return _llama3(scaling, theta, dim, factor, original)
    if kind == "yarn":
        return _yarn(scaling, theta, dim, factor, original)
    return RopeConfig(kind, theta, dim, factor, max_positions)


def without_image_positions(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config whose rotary sections are turned by places in an image (Qwen-VL): of text, all by the same position."""
    plain = dict(raw)
    for section in ("rope_parameters", "rope_scaling"):
        if isinstance(said := raw.get(section), Mapping):
            kept = {key: value for key, value in said.items() if key not in ("mrope_section", "mrope_interleaved")}
            plain[section] = {key: "default" if value == "mrope" else value for key, value in kept.items()}
    return plain


def read_two_ropes(
    values: ConfigValues, local_theta: str, head_dims: tuple[int, int], max_positions: int
) -> tuple[RopeConfig, RopeConfig]:
    """The settings of layers without a window and of those with one (Gemma 3, OLMo-3). Raises as read_rope.

    Old: those of layers with a window are the theta of the key `local_theta` alone. New: rope_parameters has one for
    each kind.
    """
    kinds = ("full_attention", "sliding_attention")
    stated = values.get("rope_parameters", values.defaults.get("rope_parameters"))
    if isinstance(stated, Mapping) and all(isinstance(stated.get(kind), Mapping) for kind in kinds):
        each = [ConfigValues({"rope_parameters": stated[kind]}, values.source, values.defaults) for kind in kinds]
    else:
        each = [values, ConfigValues({"rope_theta": values.get(local_theta)}, values.source)]
    plain, local = (read_rope(section, dim, max_positions) for section, dim in zip(each, head_dims, strict=True))
    return plain, local


def _section(values: ConfigValues) -> ConfigValues:
    for key in ("rope_scaling", "rope_parameters"):
        section = values.get(key)
        if section is not None and not isinstance(section, Mapping):
            raise values.error(key, "is not a JSON object; correct it")
        if section:
            nested = [name for name, value in section.items() if isinstance(value, Mapping)]
            if nested:
                raise ModelError(
                    f"{values.source}: {key} differs by layer ({', '.join(nested)}), which is not supported; "
                    "choose a model with one RoPE for all layers"
                )
            return ConfigValues(section, values.source, prefix=f"{key}.")
    return ConfigValues({}, values.source, prefix="rope_parameters.")


def _refuse_unknown(scaling: ConfigValues, kind: str) -> None:
    for key, value in scaling.raw.items():
        if value is not None and key not in _COMMON_KEYS | _KEYS[kind]:
            raise ModelError(
                f"{scaling.source}: {scaling.prefix}{key} is not supported for rope_type {kind}; "
                "remove it if the model does not depend on it"
            )


def _rotated(values: ConfigValues, scaling: ConfigValues, head_dim: int, kind: str) -> int:
    whole = 1.0 if values.get("rotary_dim") is None else values.positive_int("rotary_dim") / head_dim
    share = scaling.positive_number("partial_rotary_factor", values.positive_number("partial_rotary_factor", whole))
    dim = int(head_dim * share)
    smallest = 4 if kind == "dynamic" else 2
    if share > 1 or dim % 2 or dim < smallest:
        raise ModelError(
            f"{values.source}: partial_rotary_factor is {share:g}, which rotates {dim} of {head_dim} dimensions; "
            f"it must give an even number of {smallest} to {head_dim}"
        )
    return dim


def _original_length(values: ConfigValues, scaling: ConfigValues, max_positions: int) -> int:
    key = "original_max_position_embeddings"
    if values.get(key) is not None:
        return values.positive_int(key)
    return scaling.positive_int(key) if scaling.get(key) is not None else max_positions


def _llama3(scaling: ConfigValues, theta: float, dim: int, factor: float, original: int) -> RopeConfig:
    low = scaling.positive_number("low_freq_factor")
    high = scaling.positive_number("high_freq_factor")
    if high <= low:
        raise scaling.error("high_freq_factor", f"is not above low_freq_factor, {low:g}; correct either")
    return RopeConfig("llama3", theta, dim, factor, original, low_freq_factor=low, high_freq_factor=high)


def _longrope(scaling: ConfigValues, theta: float, dim: int, max_positions: int, original: int) -> RopeConfig:
    """sqrt(1 + ln(factor) / ln(original)) multiplies the tables (LongRoPE, arXiv:2402.13753; Phi-3)."""
    factor = scaling.positive_number("factor", max_positions / original)
    stretch = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return RopeConfig(
        "longrope",
        theta,
        dim,
        factor,
        original,
        attention_factor=scaling.positive_number("attention_factor", stretch),
        short_factors=_factors(scaling, "short_factor", dim // 2),
        long_factors=_factors(scaling, "long_factor", dim // 2),
    )


def _factors(scaling: ConfigValues, key: str, pairs: int) -> tuple[float, ...]:
    found = scaling.get(key)
    if not isinstance(found, list) or len(found) != pairs:
        raise ModelError(f"{scaling.source}: {scaling.prefix}{key} is not a list of {pairs} numbers; correct it")
    if not all(isinstance(each, int | float) and 0 < each < math.inf for each in found):
        raise ModelError(f"{scaling.source}: {scaling.prefix}{key} has what is not a number above 0; correct it")
    return tuple(map(float, found))


def _yarn(scaling: ConfigValues, theta: float, dim: int, factor: float, original: int) -> RopeConfig:
    attention_factor = scaling.positive_number("attention_factor", _yarn_attention_factor(scaling, factor))
    of_all = scaling.positive_number("mscale_all_dim") if scaling.get("mscale_all_dim") else 0.0
    return RopeConfig(
        "yarn",
        theta,
        dim,
        factor,
        original,
        attention_factor=attention_factor,
        depth_factor=0.1 * of_all * math.log(factor) + 1.0,
        beta_fast=scaling.positive_number("beta_fast", 32.0),
        beta_slow=scaling.positive_number("beta_slow", 1.0),
        truncate=scaling.boolean("truncate", True),
        query_growth=scaling.positive_number("llama_4_scaling_beta") if scaling.get("llama_4_scaling_beta") else 0.0,
    )


def _yarn_attention_factor(scaling: ConfigValues, factor: float) -> float:
    """0.1 * ln(factor) + 1 (YaRN, arXiv:2309.00071, section 3.4); mscale and mscale_all_dim weigh its logarithm."""
    if not (scaling.get("mscale") and scaling.get("mscale_all_dim")):
        return 0.1 * math.log(factor) + 1.0
    over, under = (0.1 * scaling.positive_number(key) * math.log(factor) + 1.0 for key in ("mscale", "mscale_all_dim"))
    return over / under
