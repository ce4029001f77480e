"""How tokens find their experts, read from a config.json. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headway.cost.config import layers_with_experts
from headway.cost.layers import Experts
from headway.cost.values import ConfigValues

# Keys of routers that choose in another way, with the values that change nothing.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "scoring_func": (None, "softmax"),
    "n_group": (None, 1),
    "topk_group": (None, 1),
    "routed_scaling_factor": (None, 1),
}
_BY_NUMBER = ("w1", "w3", "w2")
_SOFTMAX = {"scoring_func": (None, "softmax"), "topk_method": (None, "greedy", "group_limited_greedy")}
_SIGMOID = {"scoring_func": (None, "sigmoid"), "topk_method": (None, "noaux_tc")}


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens find their experts, of which `ModelShape.experts` has the sizes."""

    layers: tuple[int, ...]  # numbers of the layers that have experts
    normalized: bool  # the weights of a token's experts are divided by their sum
    block: str = "mlp"  # what a checkpoint calls the mixture within its layer
    # What it calls the gate, up and down projection of an expert.
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    # The experts of a layer are one tensor, inputs before outputs, gate and up outputs by turns (gpt-oss).
    by_turns: bool = False
    shared: str = "shared_expert"  # what it calls the expert that every token goes through
    bias: str | None = None  # what it calls the numbers that are added to scores to choose
    # sigmoid, groups, best_groups, factor: see `kernels.weights.Scores`.
    sigmoid: bool = False
    groups: int = 1
    best_groups: int = 1
    factor: float = 1.0
    beside: bool = False  # norms are around the experts, and around what every token goes through (Gemma 4)


def read_routing(values: ConfigValues, experts: Experts) -> Routing:
    """Raises ModelError for a way to choose that is not supported."""
    layers, named = layers_with_experts(values.raw, values.source), values.get("architectures")
    if "DeepseekV2ForCausalLM" in named:
        _allow(values, _SOFTMAX | {"norm_topk_prob": (None, False)})
        limited = values.get("topk_method") == "group_limited_greedy"
        return _with_groups(values, experts, Routing(layers, False, shared="shared_experts"), limited)
    if "Lfm2MoeForCausalLM" in named:
        routing = Routing(layers, values.boolean("norm_topk_prob"), "feed_forward", _BY_NUMBER, sigmoid=True)
        bias = "expert_bias" if values.boolean("use_expert_bias") else None
        return _with_groups(values, experts, replace(routing, bias=bias), False)
    if any(name.startswith(("DeepseekV3", "Glm4Moe")) for name in named):
        _allow(values, _SIGMOID)
        normalized = values.boolean("norm_topk_prob", True)
        bias = "gate.e_score_correction_bias"
        routing = Routing(layers, normalized, shared="shared_experts", bias=bias, sigmoid=True)
        return _with_groups(values, experts, routing, True)
    if "MiniMaxM2ForCausalLM" in named:
        _allow(values, _SIGMOID)
        bias = "e_score_correction_bias"
        return Routing(layers, True, "block_sparse_moe", _BY_NUMBER, bias=bias, sigmoid=True)
    if "Gemma4ForCausalLM" in named:
        return Routing(layers, True, shared="", beside=True)
    _allow(values, _PLAIN)
    if "MixtralForCausalLM" in named:
        return Routing(layers, normalized=True, block="block_sparse_moe", parts=_BY_NUMBER)
    if "GraniteMoeForCausalLM" in named:
        return Routing(layers, normalized=True)
    if "Ernie4_5_MoeForCausalLM" in named:
        bias = "moe_statics.e_score_correction_bias"
        return Routing(layers, normalized=True, shared="shared_experts", bias=bias)
    if "HunYuanMoEV1ForCausalLM" in named:
        return Routing(layers, normalized=True, shared="shared_mlp")
    if "GptOssForCausalLM" in named:
        return Routing(layers, normalized=True, by_turns=not values.boolean("experts_one_by_one"))
    return Routing(layers, values.boolean("norm_topk_prob"))


def _allow(values: ConfigValues, allowed: dict[str, tuple[Any, ...]]) -> None:
    for key, known in allowed.items():
        if values.get(key) not in known:
            raise values.error(key, f"is not supported, only {' and '.join(repr(each) for each in known[1:])} is")


def _with_groups(values: ConfigValues, experts: Experts, routing: Routing, limited: bool) -> Routing:
    """The routing with its factor and, where they count, its groups."""
    factor = values.positive_number("routed_scaling_factor", 1.0)
    groups = values.positive_int("n_group", 1) if limited and values.get("n_group") is not None else 1
    if groups == 1:
        return replace(routing, factor=factor)
    best, size = values.positive_int("topk_group"), experts.count // groups
    if experts.count % groups or size <= routing.sigmoid:
        raise values.error("n_group", f"does not divide {experts.count} experts into groups of several")
    if best > groups or experts.per_token > best * size:
        raise values.error(
            "topk_group", f"of {groups} groups of {size} experts does not fit num_experts_per_tok, {experts.per_token}"
        )
    return replace(routing, factor=factor, groups=groups, best_groups=best)
