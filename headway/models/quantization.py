"""The scheme in which each matrix is multiplied: by what the checkpoint holds, and by --quantization. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.cost.values import ConfigValues, ModelError

EMBEDDING = "model.embed_tokens"
# Routers, by the last part of their name: few numbers that decide much.
ROUTERS = ("gate", "shared_expert_gate")
# What a packed checkpoint must say, so that its whole numbers mean what the kernels take them for.
_FORMAT = {"quant_method": "compressed-tensors", "format": "int-quantized", "kv_cache_scheme": None}
_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


@dataclass(frozen=True, slots=True)
class PackedMatrices:
    """Which matrices a checkpoint holds as whole numbers, with a scale for each row.

    Args:
        scheme: int8, int8-weight-only or gguf.
        ignored: names of the layers that are not packed; "re:" begins an expression that matches the start of names.
    """

    scheme: str
    ignored: tuple[str, ...] = ()

    def covers(self, layer: str) -> bool:
        """Whether the matrix of a linear layer is packed. The embedding is not one."""
        return layer != EMBEDDING and not any(
            name == layer or (name.startswith("re:") and re.match(name[3:], layer)) for name in self.ignored
        )


def read_packed(values: ConfigValues) -> PackedMatrices | None:
    """The packed matrices of a config.json; None where all are plain.

    Raises:
        ModelError: they are packed in a way that is not supported.
    """
    if values.get("compression_config") is not None:
        raise values.error("compression_config", "is not supported; use the unquantised checkpoint")
    said = values.get("quantization_config")
    if said is None:
        return None
    section = _section(said, values.source, "quantization_config")
    if section.get("quant_method") == "gguf":
        return PackedMatrices("gguf", ("re:",))  # each of its tensors says itself how it is packed
    _check(section, _FORMAT)
    groups = section.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise section.error("config_groups", "is not one group; use the unquantised checkpoint")
    name, described = next(iter(groups.items()))
    group = _section(described, values.source, f"quantization_config.config_groups.{name}")
    _check(group, {"targets": ["Linear"], "output_activations": None})
    weights = _section(group.get("weights"), values.source, f"{group.prefix}weights", {"dynamic": False})
    _check(weights, _WEIGHTS)
    ignored = section.get("ignore") or []
    try:
        for each in ignored:
            re.compile(each.removeprefix("re:") if each.startswith("re:") else "")
    except (TypeError, AttributeError, re.error):
        raise section.error("ignore", "is not a list of names and expressions; correct it") from None
    if group.get("input_activations") is None:
        return PackedMatrices("int8-weight-only", tuple(ignored))
    _check(_section(group.get("input_activations"), values.source, f"{group.prefix}input_activations"), _ACTIVATIONS)
    return PackedMatrices("int8", tuple(ignored))


def _section(said: Any, source: str, name: str, defaults: Mapping[str, Any] | None = None) -> ConfigValues:
    if not isinstance(said, Mapping):
        raise ModelError(f"{source}: {name} is not a JSON object; correct it")
    return ConfigValues(said, source, defaults or {}, f"{name}.")


def _check(section: ConfigValues, wanted: Mapping[str, Any]) -> None:
    for key, value in wanted.items():
        if section.get(key) != value:
            raise section.error(key, f"is not supported, only {value!r} is; use the unquantised checkpoint")


def scheme_of(layer: str, quantization: str, packed: PackedMatrices | None) -> str:
    """The scheme of a linear layer's matrix where --quantization asks for `quantization`.

    Packed matrices keep theirs, and routers are not quantised. The head, and with tied embeddings every token's first
    vector, suffers most from few bits.
    """
    if packed is not None and packed.covers(layer):
        return packed.scheme
    if layer.rpartition(".")[2] in ROUTERS:
        return "none"
    is_head = layer in ("lm_head", EMBEDDING)
    return "int8" if is_head and quantization == "int4" else quantization
