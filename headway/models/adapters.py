"""Adapters in peft's format or GGUF: read, checked against the base model, and brought to where its rows are.

A product stacks the rows of several layers, may have them in another order, and has factors multiplied in. B of an
adapter goes through the same, and A stays as it is. Scales (lora_alpha / r, or by the root of r) are multiplied into B.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headway.files import not_a_file
from headway.kernels.adapters import AdapterSpec
from headway.models.checkpoint import stored_name
from headway.models.config import ModelConfig, ModelError, read_json
from headway.models.families import WITHIN
from headway.models.gguf.adapters import read_gguf_adapter
from headway.models.part import Part
from headway.models.tensors import STACKED, Shapes, plain_tensors
from headway.models.weights import LayerWeights, Placed, PlacedExperts

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MOST_RANK = 256
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<layer>.+)\.lora_(?P<matrix>[AB])(?:\.default)?\.weight")
# What else of an adapter's keys changes what it computes, and the values that change nothing.
_NOTHING: tuple[Any, ...] = (None, False, [], {}, "none")
_REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "bias": "biases",
    "lora_bias": "biases of B",
    "modules_to_save": "whole modules beside it (modules_to_save)",
    "trainable_token_indices": "trained tokens (trainable_token_indices)",
    "target_parameters": "parameters of experts (target_parameters)",
    "layer_replication": "repeated layers (layer_replication)",
    "alora_invocation_tokens": "an invocation (aLoRA)",
    "arrow_config": "routing (Arrow)",
}
# Ways to begin a training that change the base model, too.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_LEFT_OUT = re.compile(r"\.kv_b_proj$")
_DTYPES = ("F32", "F16", "BF16")
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True, slots=True)
class LowRank:
    """The adapter of a layer: down [r, in], up [out, r], scale included."""

    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter in the host's memory."""

    digest: str  # hexadecimal, of its weights and of the settings that change what it computes
    base: str  # the model that it was trained on, as its config has it
    layers: dict[str, LowRank]  # by the decoder's name of the layer

    @property
    def rank(self) -> int:
        """The greatest of all layers."""
        return max(len(each.down) for each in self.layers.values())

    @property
    def num_bytes(self) -> int:
        return sum(each.down.nbytes + each.up.nbytes for each in self.layers.values())


class AdapterPlaces:
    """Where adapters go in a model.

    Args:
        config: of the model, or of this rank's part.
        part: which part that is.

    Attributes:
        placed: the products that can have adapters, layer by layer.
        placed_experts: the mixtures that can.
    """

    def __init__(
        self, config: ModelConfig, layers: list[LayerWeights], dtype: torch.dtype, part: Part | None = None
    ) -> None:
        self._dtype, self._part = dtype, part
        turned = ".linear_attn." if config.heads_by_turns else None  # GGUF has these heads in an order of its own
        self.placed = [
            placed for layer in layers for placed in layer.placed if turned is None or turned not in placed.layers[0]
        ]
        whole = config if part is None else part.config
        shapes = plain_tensors(whole) if part is None else part.plain
        own = shapes if part is None else part.plain_parts
        names = {name for placed in self.placed for name in placed.layers}
        self.placed_experts = [layer.placed_experts for layer in layers if layer.placed_experts is not None]
        names |= {name for placed in self.placed_experts for names in placed.layers for name in names}
        self._own: Shapes = {name: own[f"{name}.weight"] for name in names}
        names = set(map(self._of_whole, names))
        if whole.shape.layers > config.shape.layers:  # and those of other stages, which adapters have too
            others = (name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2)
            names |= {name for name in others if ".layers." in name and not _LEFT_OUT.search(name)}
        self._shapes: Shapes = {name: shapes[f"{name}.weight"] for name in names}
        ways = (whole.traits.stored, *WITHIN, *((*pairs, *whole.traits.stored) for pairs in WITHIN))
        self._names = {stored_name(f"{name}.", pairs)[:-1]: name for pairs in ways for name in names}
        self._num_layers = whole.shape.layers
        self._heads = {"q_proj": whole.shape.heads, "k_proj": whole.shape.kv_heads}

    def _of_whole(self, name: str) -> str:
        """The whole model's name of a layer."""
        return name if self._part is None else self._part.stored(f"{name}.")[:-1]

    def spec(self, placed: Placed, slots: int, rank: int, device: torch.device) -> AdapterSpec:
        """What of a product is adapted."""
        sizes = [self._own[name][0] for name in placed.layers]
        part_of = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        part_of = part_of if placed.rows is None else part_of[placed.rows.cpu()]
        return AdapterSpec(self._own[placed.layers[0]][1], part_of.to(device), self._dtype, device, slots, rank)

    def matrices(self, placed: Placed, adapter: Adapter) -> tuple[Tensor, Tensor]:
        """The A of each part [parts, r, in] and B of all [r, out] for a product; r is 0 where it stays as it is."""
        found = [self._part_of(name, adapter.layers.get(self._of_whole(name))) for name in placed.layers]
        rank = max((len(each.down) for each in found if each is not None), default=0)
        shapes = [self._own[name] for name in placed.layers]
        down = torch.zeros(len(found), rank, shapes[0][1], dtype=self._dtype)
        up = torch.zeros(rank, sum(rows for rows, _ in shapes))
        for part, (each, into) in enumerate(zip(found, up.split([rows for rows, _ in shapes], 1), strict=True)):
            if each is not None:
                down[part, : len(each.down)] = each.down
                columns = each.up.T.float() * placed.factor
                into[: len(columns)] = columns - columns.mean(1, keepdim=True) if placed.centred else columns
        return down, (up if placed.rows is None else up[:, placed.rows.cpu()]).to(self._dtype)

    def matrices_of_experts(self, placed: PlacedExperts, adapter: Adapter) -> list[tuple[Tensor, Tensor]]:
        """The same for the products of gate and up of all experts, and for those of down, stacked."""
        return [_stacked([self.matrices(each, adapter) for each in products]) for products in self._of_experts(placed)]

    def specs_of_experts(self, placed: PlacedExperts, slots: int, rank: int, device: torch.device) -> list[AdapterSpec]:
        """What of these products is adapted."""
        return [self.spec(products[0], slots, rank, device) for products in self._of_experts(placed)]

    def _of_experts(self, placed: PlacedExperts) -> tuple[list[Placed], list[Placed]]:
        gate_up = [Placed(placed.mixture, tuple(gated)) for *gated, _ in placed.layers]
        pairs = zip(placed.layers, placed.factors, strict=True)
        return gate_up, [Placed(placed.mixture, (down,), factor=factor) for (*_, down), factor in pairs]

    def _part_of(self, name: str, lora: LowRank | None) -> LowRank | None:
        """This rank's inputs of A and outputs of B."""
        if lora is None or self._part is None:
            return lora
        name = f"{name}.weight"
        return LowRank(self._part.cut_plain(name, lora.down, 1), self._part.cut_plain(name, lora.up, 0))

    # --- reading ------------------------------------------------------------------------------------

    def read(self, path: Path, max_rank: int) -> Adapter:
        """Read a folder in peft's format, or a GGUF file of llama.cpp's converter.

        Raises:
            ModelError: it is no adapter of this model, is damaged, or asks for what is not supported; one line.
        """
        if path.suffix == ".gguf":
            return self._read_gguf(path, max_rank)
        if not path.is_dir():
            raise ModelError(f"adapter {path}: there is no such folder; give one that peft's save_pretrained() wrote")
        weights = path / WEIGHTS_FILE
        if not_a_file(weights) and (path / "adapter_model.bin").is_file():
            raise ModelError(f"adapter {path}: its weights are a pickle, adapter_model.bin; save it as safetensors")
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if problem := not_a_file(path / name):
                raise ModelError(f"adapter {path}: {name}: {problem}")
        config = read_json(path / CONFIG_FILE, "save the adapter again with peft")
        _check_settings(path, config)
        base = str(config.get("base_model_name_or_path") or "")
        layers: dict[str, LowRank] = {}
        try:
            content = weights.read_bytes()
            with safe_open(str(weights), framework="pt") as file:
                tensors = {name: file.get_slice(name) for name in sorted(file.keys())}
                for layer, matrices in _pairs(path, tensors).items():
                    scaled = self._scaled(f"adapter {path}: {layer}", layer, matrices, config, max_rank)
                    layers |= self._places_of(f"adapter {path}: {layer}", layer, scaled, base or "?")
        except SafetensorError as error:
            raise ModelError(f"adapter {path}: {WEIGHTS_FILE} is not a whole safetensors file ({error})") from None
        except OSError as error:
            raise ModelError(f"adapter {path}: {WEIGHTS_FILE} cannot be read ({error})") from None
        settings = [config.get(key) for key in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")]
        return Adapter(_digest(settings, content), base, layers)

    def _read_gguf(self, path: Path, max_rank: int) -> Adapter:
        adapter = read_gguf_adapter(path, self._shapes, self._heads)
        layers: dict[str, LowRank] = {}
        for layer, matrices in adapter.layers.items():
            where, rank = f"adapter {path}: {layer}", len(matrices.get("A", ()))
            if layer not in self._shapes:
                raise ModelError(f"{where} {self._why_not(layer, adapter.base)}")
            settings = {"r": rank, "lora_alpha": adapter.alpha or rank}
            scaled = self._scaled(where, layer, matrices, settings, max_rank)
            layers |= self._checked(where, [layer], scaled, adapter.base)
        return Adapter(_digest([], adapter.content), adapter.base, layers)

    def _scaled(
        self, where: str, layer: str, matrices: Mapping[str, Tensor], config: Mapping[str, Any], max_rank: int
    ) -> LowRank:
        """The two matrices of a layer, checked, with the scale that its settings give it."""
        if len(matrices) < 2:
            raise ModelError(f"{where} has lora_{next(iter(matrices))} alone; A and B are needed")
        down, up = matrices["A"], matrices["B"]
        rank = _setting(config, "rank_pattern", layer, config["r"])
        if down.dim() != 2 or up.dim() != 2 or len(down) != rank or up.shape[1] != rank:
            shapes = f"{list(down.shape)} and {list(up.shape)}"
            source = CONFIG_FILE if "peft_type" in config else "A"
            raise ModelError(f"{where} has A and B of shapes {shapes}, but {source} says that its rank is {rank}")
        if rank > max_rank:
            raise ModelError(f"{where} has rank {rank}, and --max-lora-rank is {max_rank}; raise that")
        if not (down.isfinite().all() and up.isfinite().all()):
            raise ModelError(f"{where} has numbers that are not finite; its training has failed")
        alpha = float(_setting(config, "alpha_pattern", layer, config["lora_alpha"]))
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        return LowRank(down.to(self._dtype), (up.float() * scale).to(self._dtype))

    def _places_of(self, where: str, layer: str, lora: LowRank, base: str) -> dict[str, LowRank]:
        """The adapter of a layer by the decoder's names: several where the base has apart what it has fused."""
        block, _, last = layer.rpartition(".")
        parts = [f"{block}.{part}" for part in _FUSED.get(last, ())]
        if layer in self._names or not parts or not all(part in self._names for part in parts):
            parts = [layer]
        if missing := [part for part in parts if part not in self._names]:
            raise ModelError(f"{where} {self._why_not(missing[0], base)}")
        return self._checked(where, [self._names[part] for part in parts], lora, base)

    def _checked(self, where: str, names: list[str], lora: LowRank, base: str) -> dict[str, LowRank]:
        """The adapter of layers whose rows are one under the other. Raises ModelError where it has another shape."""
        rows, inputs = [self._shapes[name][0] for name in names], self._shapes[names[0]][1]
        given = len(lora.up), lora.down.shape[1]
        if given != (sum(rows), inputs):
            raise ModelError(
                f"{where} is for a layer [{given[0]}, {given[1]}], and that of the base model is [{sum(rows)}, "
                f"{inputs}]; it was trained on {base!r}, so serve that"
            )
        return {name: LowRank(lora.down, up) for name, up in zip(names, lora.up.split(rows), strict=True)}

    def _why_not(self, layer: str, base: str) -> str:
        if re.search(r"(^|\.)(embed_tokens|lm_head)$", layer):
            return "is an embedding or the head, of which adapters are not supported; train it without"
        if ".experts." in layer or layer.endswith(STACKED):
            return "is of experts, whose adapters need a CPU and names of single experts; train it on the other layers"
        if layer.endswith(".kv_b_proj"):
            return "makes keys and values of latents, where adapters are not supported; train it on the other layers"
        number = re.search(r"\.layers\.(\d+)\.", layer)
        if number is not None and int(number[1]) >= self._num_layers:
            return f"is beyond the base model's {self._num_layers} layers; it was trained on {base!r}, so serve that"
        known = ", ".join(sorted({name.rpartition(".")[2] for name in self._names.values()}))
        return f"is no linear layer of the base model, which has {known}; it was trained on {base!r}"


def _stacked(matrices: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The matrices of several products, [N, parts, r, in] and [N, r, out], r being the greatest."""
    most = max(len(up) for _, up in matrices)
    downs = [F.pad(down, (0, 0, 0, most - down.shape[1])) for down, _ in matrices]
    return torch.stack(downs), torch.stack([F.pad(up, (0, 0, 0, most - len(up))) for _, up in matrices])


def adapted_layers(layers: list[LayerWeights], products: Mapping[int, Any]) -> list[LayerWeights]:
    """The layers with other products in place of some; `products` has these by the id() of those."""
    return [_swapped(layer, products) for layer in layers]


def _swapped(part: Any, products: Mapping[int, Any]) -> Any:
    if (other := products.get(id(part))) is not None:
        return other
    if not is_dataclass(part) or isinstance(part, type | Placed | PlacedExperts):
        return part
    old = {each.name: getattr(part, each.name) for each in fields(part) if each.init and "placed" not in each.name}
    new = {name: _swapped(value, products) for name, value in old.items()}
    changed = {name: value for name, value in new.items() if value is not old[name]}
    return replace(part, **changed) if changed else part


def _pairs(folder: Path, tensors: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """A and B by the layer's name."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            raise ModelError(f"adapter {folder}: {_of_tensor(name)}")
        if tensor.get_dtype() not in _DTYPES:
            kinds = ", ".join(_DTYPES)
            raise ModelError(f"adapter {folder}: {name} is stored as {tensor.get_dtype()}; it must be of {kinds}")
        found.setdefault(match["layer"], {})[match["matrix"]] = tensor[:]
    if not found:
        raise ModelError(f"adapter {folder}: {WEIGHTS_FILE} has no tensors")
    return found


def _digest(settings: list[Any], content: bytes) -> str:
    """The digest of an adapter, of its file's content and what else changes what it computes."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    digest.update(content)
    return digest.hexdigest()[:32]


def _check_settings(folder: Path, config: dict[str, Any]) -> None:
    """Refuse settings of an adapter that are wrong, or change what it computes in ways that are not supported."""
    where = f"adapter {folder}: {CONFIG_FILE}"
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{where} has peft_type {config.get('peft_type')!r}; only LORA is supported")
    for key, name in _REFUSED.items():
        if config.get(key) not in _NOTHING:
            raise ModelError(f"{where} has {key} {json.dumps(config[key])[:60]}: {name} are not supported")
    begun = str(config.get("init_lora_weights")).lower()
    if begun.startswith(_CHANGES_BASE):
        raise ModelError(
            f"{where} has init_lora_weights {begun!r}, which changes the base model too; convert it to LoRA"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= MOST_RANK:
        raise ModelError(f"{where} has r {rank!r}; it must be a whole number from 1 to {MOST_RANK}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ModelError(f"{where} has lora_alpha {alpha!r}; it must be a number")
    for key in ("rank_pattern", "alpha_pattern"):
        given = config.get(key) or {}
        if not isinstance(given, dict) or not all(
            isinstance(each, int | float) and each > 0 for each in given.values()
        ):
            raise ModelError(f"{where} has {key} {given!r}; it must have a number for each pattern of names")
        for pattern in given:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ModelError(f"{where}: {key} has {pattern!r}, which is no pattern ({error})") from None


def _setting(config: Mapping[str, Any], key: str, layer: str, default: Any) -> Any:
    """A layer's own rank or alpha: that of the first pattern which its name ends with, as peft has it."""
    for pattern, value in (config.get(key) or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", layer):
            return value
    return default


def _of_tensor(name: str) -> str:
    """Why a tensor of an adapter is not supported."""
    if "lora_magnitude_vector" in name:
        return f"{name} is of DoRA, which is not supported"
    if "lora_embedding" in name:
        return f"{name} is of an embedding, of which adapters are not supported; train it without"
    return f"tensor {name} is none of LoRA (lora_A.weight, lora_B.weight), so it is not supported"
