"""Which model a name or a file means, and how it is published."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.bundled import bundled_folder
from headway.cost import catalogue
from headway.cost.config import read_shape
from headway.cost.shape import ModelShape
from headway.planner.request import PlanError

# What `quantization_config.quant_method` of a config.json stands for, where it decides by itself.
_METHODS = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4", "awq": "int4", "moe_wna16": "int4-experts"}
# The scheme that a type of GGUF's tensors is planned as: its own, or the next wider one. All other types are q4_k.
_GGUF_TYPES = {
    **dict.fromkeys(("F32", "F16", "BF16"), "none"),
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K", "Q6_K"), "q6_k"),
    "Q8_0": "q8_0",
    "MXFP4": "mxfp4",
}
# Names that config.json and --dtype have for number formats, and ours.
DTYPES = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
}
MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class Model:
    """A model, and how its checkpoint is published: `dtype` of what is not quantised, and `quantization`."""

    name: str
    shape: ModelShape
    dtype: str
    quantization: str


def find_model(name: str, quantization: str = "auto") -> Model:
    """A GGUF file, a folder with a config.json or such a file, the bundled model, or a name of the catalogue.

    Args:
        quantization: how weights are kept; "auto" takes it from the files.

    Raises:
        PlanError: a path without a config.json that can be read.
        ValueError: no such name, or a file that describes no known model.
    """
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf" and path.is_file():
        return _model_of_gguf(path, quantization)
    if not path.exists() and (bundled := bundled_folder(name)) is not None:
        return replace(_model_of_files(bundled, quantization), name=name.strip().lower())
    if path.is_file() or (path / "config.json").is_file() or name.startswith(("/", ".", "~")):
        return _model_of_files(path, quantization)
    try:
        known = catalogue.find_model(name)
    except catalogue.UnknownName:
        if name.strip() and path.is_dir():
            return _model_of_files(path, quantization)
        raise
    quantized = known.weights not in DTYPES
    return Model(
        name=known.key,
        shape=known.shape,
        dtype="bfloat16" if quantized else DTYPES[known.weights],
        quantization=known.weights if quantized else "none",
    )


def names_taken(model: str, found_model: str, hardware: str, found_hardware: str) -> str:
    """Which entries of the catalogue were taken for other names; "" where it has both names.

    Args:
        model, hardware: names as they were asked for.
        found_model, found_hardware: names of what was found.
    """
    known = catalogue.models().get(found_model)
    names = {found_model.lower()} | ({known.name.lower(), known.name.lower().rpartition("/")[2]} if known else set())
    pairs = [] if known is None or model.strip().lower() in names else [(model, found_model)]
    if hardware.strip().lower() != found_hardware.lower():
        pairs.append((hardware, found_hardware))
    said = ", and ".join(f"{asked} is taken as {found}" for asked, found in pairs)
    return f"{said}. `headway plan --list` lists all." if said else ""


def _model_of_files(path: Path, quantization: str) -> Model:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{file} cannot be read: {error.strerror}; give a model's name or its config.json") from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{file} is not JSON: {error}; give a model's config.json") from None
    if not isinstance(config, dict):
        raise PlanError(f"{file} holds no JSON object; give a model's config.json")
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise PlanError(f"{file}: the model has {layers:,} layers; at most {MOST_LAYERS:,} are planned")
    named = config.get("dtype") or config.get("torch_dtype")
    return Model(
        name=file.resolve().parent.name,
        shape=read_shape(config, str(file)),
        dtype=DTYPES.get(str(named), "bfloat16"),
        quantization=_published_quantization(config, str(file)) if quantization == "auto" else quantization,
    )


def _model_of_gguf(path: Path, quantization: str) -> Model:
    """What the file says of itself; kept as most of its layers' weights are, or in the next wider type that is known.

    Raises:
        ValueError: it is damaged, or its architecture is not supported.
    """
    from headway.models.gguf.config import config_of
    from headway.models.gguf.files import read_gguf  # not at the top: few plans are of such files

    model = read_gguf(path)
    config = config_of(model)
    weights: Counter[str] = Counter()
    for name, tensor in model.tensors.items():
        if name.startswith("blk.") and len(tensor.shape) > 1:
            weights[_GGUF_TYPES.get(tensor.kind, "q4_k")] += math.prod(tensor.shape)
    return Model(
        name=path.stem,
        shape=read_shape(config, str(path)),
        dtype=config["dtype"],
        quantization=weights.most_common(1)[0][0] if quantization == "auto" and weights else quantization,
    )


def _published_quantization(config: Mapping[str, Any], source: str) -> str:
    """The name in `cost.precision.QUANTIZATIONS` of what `quantization_config` says."""
    said = config.get("quantization_config")
    if not isinstance(said, dict):
        return "none"
    method = str(said.get("quant_method", "")).lower()
    bits = said.get("bits")
    if method == "bitsandbytes":
        return "int8-weight-only" if said.get("load_in_8bit") else "nf4"
    if method == "fp8" and said.get("weight_block_size"):
        return "fp8-block"
    if method == "compressed-tensors":
        method, bits = _compressed_tensors(said), None
    if method in ("modelopt", "modelopt_fp4") and str(said.get("quant_algo", "NVFP4")).upper() in ("NVFP4", "FP8"):
        return "fp8" if str(said.get("quant_algo")).upper() == "FP8" else "nvfp4"
    if method in _METHODS:
        return _METHODS[method]
    if method == "gptq" and bits in (4, 8):
        return "int4" if bits == 4 else "int8-weight-only"
    if method in ("int8", "int8-weight-only", "int4", "w4a8", "fp8-weight-only", "fp8-block"):
        return method
    raise PlanError(
        f"{source}: quantization_config says {method or 'nothing that is known'!r}; give --quantization yourself"
    )


def _compressed_tensors(said: Mapping[str, Any]) -> str:
    """The scheme of a checkpoint in compressed-tensors' format, as its first group of layers has it.

    It follows from the bits and type of the weights, and from whether activations are quantised too.
    """
    groups = said.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(group, dict) or not isinstance(weights, dict):
        return "compressed-tensors without weights"
    kind = f"{'fp' if weights.get('type') == 'float' else 'int'}{weights.get('num_bits')}"
    if kind == "fp4":
        return "mxfp4" if weights.get("group_size") == 32 else "nvfp4"
    if kind == "fp8" and weights.get("strategy") == "block":
        return "fp8-block"
    if kind == "int4":
        if said.get("scale_steps"):
            return "w4a8"
        return "int4-experts" if _spares_attention(said) else kind
    return kind if group.get("input_activations") else f"{kind}-weight-only"


def _spares_attention(said: Mapping[str, Any]) -> bool:
    """Whether the layers' attention is left as it was, as in mixtures of which only the experts are quantised."""
    ignored = said.get("ignore")
    return isinstance(ignored, list) and any("self_attn" in str(name) for name in ignored)
