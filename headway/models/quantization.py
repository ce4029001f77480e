"""Finds the scheme in which each matrix is multiplied, from the checkpoint and --quantization. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headway.cost.values import ConfigValues, ModelError

EMBEDDING = "model.embed_tokens"
# Routers, by the last part of their name: few numbers that decide much.
ROUTERS = ("gate", "shared_expert_gate", "router")
# The same holds for what says how much each head of a delta net writes and forgets.
NUMBERS_OF_HEADS = ("in_proj_a", "in_proj_b", "in_proj_ba")
_FEW_NUMBERS = (*ROUTERS, *NUMBERS_OF_HEADS)
# Routers and the head, which AWQ, GPTQ and FP8 leave plain without saying so.
_LEFT_PLAIN = ("lm_head", *(rf"re:.*\.{router}$" for router in ROUTERS))
_PLAIN_ONLY = "use the unquantised checkpoint"
# For bitsandbytes: numbers that share a scale, scales that share a scale, and the start of the name of their tensor.
BLOCK_NUMBERS, BLOCK_SCALES, STATE = 64, 256, "quant_state.bitsandbytes__"
# For int4: inputs that share a factor, and the largest factor of a row's scale.
INT4_GROUP, MOST_STEPS = 32, 16
# A checkpoint of compressed-tensors must say this, so that its numbers mean what the kernels take them for.
_ROW_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
# For layouts of e2m1: the name of the tensor of codes, and that of the scale of all groups, if there is one.
_FLOAT4 = {
    "nvfp4": ("weight_packed", "weight_global_scale"),
    "nvfp4-modelopt": ("weight", "weight_scale_2"),
    "mxfp4-packed": ("weight_packed",),
}
_ROW_ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


@dataclass(frozen=True, slots=True)
class PackedMatrices:
    """Which matrices a checkpoint holds packed, and how."""

    # int8 or int8-weight-only with a scale for each row; gguf, whose tensors say themselves how they are packed; int4,
    # of whose row all scales are whole multiples of one; or int4-weight-only, int8-weight-only, float8-weight-only,
    # float4-weight-only or normal4-weight-only in groups.
    scheme: str
    # Names of the layers that are not packed; "re:" begins an expression that matches the start of names.
    ignored: tuple[str, ...] = ()
    # That of tensors: rows, gguf, awq, gptq, gptq_v2, pack-quantized, int-quantized (four bits in a byte), fp8, nvfp4,
    # nvfp4-modelopt, mxfp4-packed, nf4, fp4 and llm.int8 (of bitsandbytes), or mxfp4, of experts.
    layout: str = "rows"
    group_size: int | None = None  # inputs that share a scale; None: all of a row
    zero_points: bool = False  # there are some
    ordered: bool = False  # groups are of inputs that a tensor names
    nested: bool = False  # scales are packed themselves
    block_rows: int = 1  # rows that share a scale; 0: all of a matrix
    scale: str = "weight_scale"  # what its tensor is called
    method: str = field(default="", compare=False)  # one of FORMATS, as the checkpoint says

    @property
    def in_groups(self) -> bool:
        return self.layout not in ("rows", "gguf", "mxfp4")

    @property
    def bits(self) -> int:
        return 4 if self.scheme.startswith(("int4", "float4", "normal4")) else 8

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the tensors of a layer."""
        return tuple(self.tensors(32, 32 * (self.group_size or 1)))

    @property
    def kinds(self) -> dict[str, str]:
        """The types, by safetensors' names, of the tensors of an e2m1 layer that do not hold plain numbers."""
        if self.layout not in _FLOAT4:
            return {}
        return {_FLOAT4[self.layout][0]: "U8", "weight_scale": "U8" if self.layout == "mxfp4-packed" else "F8_E4M3"}

    def covers(self, layer: str) -> bool:
        """Whether the matrix of a linear layer is packed. The embedding is not one."""
        return layer != EMBEDDING and not any(
            name == layer or (name.startswith("re:") and re.match(name[3:], layer)) for name in self.ignored
        )

    def tensors(self, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        """The names and shapes of the tensors that a linear layer [rows, columns] has in place of `weight`.

        Raises:
            ModelError: the layer cannot be packed like this.
        """
        size, in_word = self.group_size or columns, 32 // self.bits
        groups = -(-columns // size)
        if self.layout == "rows":
            return {"weight": (rows, columns), "weight_scale": (rows, 1)}
        if self.layout == "llm.int8":
            return {"weight": (rows, columns), "SCB": (rows,)}
        if self.layout in ("nf4", "fp4"):
            return _bitsandbytes_shapes(self, rows, columns)
        if self.layout == "fp8":
            blocks = -(-rows // self.block_rows) if self.block_rows else 1
            return {"weight": (rows, columns), self.scale: (blocks, groups)}
        is_float4 = self.layout in _FLOAT4
        if self.layout == "int-quantized" and columns % size == 0:
            return {"weight": (rows, columns), "weight_scale": (rows, groups)}
        if columns % size or (not is_float4 and (columns % in_word or rows % in_word)):
            raise ModelError(
                f"quantization_config has group_size {size}, which does not fit a matrix of {rows} rows and {columns} "
                "inputs; use the unquantised checkpoint"
            )
        if is_float4:
            weight, *of_all = _FLOAT4[self.layout]
            return {weight: (rows, columns // 2), "weight_scale": (rows, groups), **dict.fromkeys(of_all, (1,))}
        if self.layout == "awq":
            zeros = (groups, rows // in_word)
            return {"qweight": (columns, rows // in_word), "qzeros": zeros, "scales": (groups, rows)}
        if self.layout.startswith("gptq"):
            packed = {"qweight": (columns // in_word, rows), "qzeros": (groups, rows // in_word)}
            return packed | {"scales": (groups, rows), "g_idx": (columns,)}
        shapes: dict[str, tuple[int, ...]] = {"weight_packed": (rows, columns // in_word)}
        shapes |= {"weight_scale": (rows, groups), "weight_shape": (2,)}
        if self.zero_points:
            shapes["weight_zero_point"] = (rows // in_word, groups)
        return shapes | ({"weight_g_idx": (columns,)} if self.ordered else {})


def _bitsandbytes_shapes(packed: PackedMatrices, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    """The matrix is cut into blocks row after row. The state is of any length, and says the shape that it has here."""
    blocks = -(-rows * columns // BLOCK_NUMBERS)
    shapes: dict[str, tuple[int, ...]] = {"weight": (-(-rows * columns // 2), 1), "weight.absmax": (blocks,)}
    shapes |= {"weight.quant_map": (16,), f"weight.{STATE}{packed.layout}": (rows, columns)}
    if packed.nested:
        shapes |= {"weight.nested_absmax": (-(-blocks // BLOCK_SCALES),), "weight.nested_quant_map": (256,)}
    return shapes


def read_packed(values: ConfigValues) -> PackedMatrices | None:
    """The packed matrices of a config.json; None where all are plain.

    Raises:
        ModelError: they are packed in a way that is not supported.
    """
    if values.get("compression_config") is not None:
        raise values.error("compression_config", f"is not supported; {_PLAIN_ONLY}")
    said = values.get("quantization_config")
    if said is None:
        return None
    section = _section(said, values.source, "quantization_config")
    method = section.get("quant_method")
    if method == "gguf":
        return PackedMatrices("gguf", ("re:",), "gguf", method="gguf")
    if method == "torchao":
        raise section.error(
            "quant_method", f"is not supported; {_PLAIN_ONLY}, and --quantization rounds it at the start"
        )
    if method not in _METHODS:
        raise section.error("quant_method", f"is not supported, only {', '.join(_METHODS)} are; {_PLAIN_ONLY}")
    return replace(_METHODS[method](section), method=method)


def _awq(section: ConfigValues) -> PackedMatrices:
    _check(section, {"bits": 4})  # where zero_point is false, all zero points are 8 (auto-round)
    if str(section.get("version", "gemm")).lower() != "gemm":
        raise section.error("version", f"is not supported, only 'gemm' is; {_PLAIN_ONLY}")
    plain = tuple(f"re:.*{re.escape(name)}" for name in _names(section, "modules_to_not_convert"))
    size = _group_size(section)
    return PackedMatrices("int4-weight-only", (*_LEFT_PLAIN, *plain), "awq", size, zero_points=True)


def _gptq(section: ConfigValues) -> PackedMatrices:
    bits = _one_of(section, "bits", (4, 8))
    if section.get("dynamic"):
        raise section.error("dynamic", f"is not supported; {_PLAIN_ONLY}")
    layout = _one_of(section, "checkpoint_format", ("gptq", "gptq_v2")) if section.get("checkpoint_format") else "gptq"
    plain = _LEFT_PLAIN[1:] if section.boolean("lm_head") else _LEFT_PLAIN
    size, ordered = _group_size(section), section.boolean("desc_act")
    return PackedMatrices(f"int{bits}-weight-only", plain, layout, size, zero_points=True, ordered=ordered)


def _fp8(section: ConfigValues) -> PackedMatrices:
    if section.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise section.error("fmt", f"is not supported, only e4m3 is; {_PLAIN_ONLY}")
    plain = tuple(
        rf"re:(.*\.)?{re.escape(name)}(\.|$)"
        for key in ("modules_to_not_convert", "ignored_layers")
        for name in _names(section, key)
    )
    ignored = (*_LEFT_PLAIN, *plain)
    if section.get("weight_block_size") is None:  # a null: as transformers writes it, which has another name for scales
        scale = "weight_scale_inv" if section.knows("weight_block_size") else "weight_scale"
        return PackedMatrices("float8-weight-only", ignored, "fp8", block_rows=0, scale=scale)
    rows, columns = _block(section, "weight_block_size")
    return PackedMatrices("float8-weight-only", ignored, "fp8", columns, block_rows=rows, scale="weight_scale_inv")


def _compressed_tensors(section: ConfigValues) -> PackedMatrices:
    _check(section, {"kv_cache_scheme": None})
    groups = section.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise section.error("config_groups", f"is not one group; {_PLAIN_ONLY}")
    name, described = next(iter(groups.items()))
    group = _section(described, section.source, f"quantization_config.config_groups.{name}")
    _check(group, {"targets": ["Linear"], "output_activations": None})
    weights = _section(group.get("weights"), section.source, f"{group.prefix}weights", {"dynamic": False})
    ignored = _ignored(section)
    form = group.get("format") or section.get("format")
    if form == "pack-quantized":
        _check(group, {"input_activations": None})
        return _grouped(weights, ignored, form)
    if form in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        return _float4(weights, ignored, str(form))
    if form == "float-quantized":
        return _float_quantized(weights, ignored)
    if form != "int-quantized":
        known = "int-quantized, pack-quantized, float-quantized, nvfp4-pack-quantized and mxfp4-pack-quantized"
        raise section.error("format", f"is not supported, only {known} are; {_PLAIN_ONLY}")
    rounds = group.get("input_activations") is not None
    if rounds:
        activations = _section(group.get("input_activations"), section.source, f"{group.prefix}input_activations")
        _check(activations, _ROW_ACTIVATIONS)
    if weights.get("num_bits") == 4:
        _check(weights, {"symmetric": True})
        packed = _grouped(weights, ignored, form)
        if packed.ordered:
            raise weights.error("actorder", f"is not supported with {form}; {_PLAIN_ONLY}")
        return replace(packed, scheme="int4") if _has_scale_steps(section, packed) else packed
    _check(weights, _ROW_WEIGHTS)
    return PackedMatrices("int8" if rounds else "int8-weight-only", ignored)


def _has_scale_steps(section: ConfigValues, packed: PackedMatrices) -> bool:
    """Whether the scales of each row are whole multiples of one, as `headway quantize` writes them."""
    steps = section.get("scale_steps")
    if steps is None:
        return False
    if steps != MOST_STEPS or packed.group_size is None or packed.group_size % INT4_GROUP:
        wanted = f"only {MOST_STEPS} in groups of a multiple of {INT4_GROUP} is"
        raise section.error("scale_steps", f"is not supported, {wanted}; {_PLAIN_ONLY}")
    return True


def _grouped(weights: ConfigValues, ignored: tuple[str, ...], layout: str) -> PackedMatrices:
    """Whole numbers of which groups or rows share a scale."""
    _check(weights, {"type": "int", "dynamic": False})
    bits, strategy = _one_of(weights, "num_bits", (4, 8)), _one_of(weights, "strategy", ("group", "channel"))
    if weights.get("actorder") not in (None, False, True, "group", "weight", "static", "dynamic"):
        raise weights.error("actorder", f"is not supported; {_PLAIN_ONLY}")
    return PackedMatrices(
        f"int{bits}-weight-only",
        ignored,
        layout,
        weights.positive_int("group_size") if strategy == "group" else None,
        zero_points=not weights.boolean("symmetric", True),
        ordered=weights.get("actorder") in (True, "group", "dynamic"),
    )


def _float_quantized(weights: ConfigValues, ignored: tuple[str, ...]) -> PackedMatrices:
    _check(weights, {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False})
    strategy = _one_of(weights, "strategy", ("tensor", "channel", "block"))
    rows, columns = _block(weights, "block_structure") if strategy == "block" else (int(strategy == "channel"), None)
    return PackedMatrices("float8-weight-only", ignored, "fp8", columns, block_rows=rows)


def _float4(weights: ConfigValues, ignored: tuple[str, ...], form: str) -> PackedMatrices:
    """Activations in four bits, which some of these checkpoints ask for, are not rounded."""
    is_nvfp4 = form.startswith("nvfp4")
    size, strategy = (16, "tensor_group") if is_nvfp4 else (32, "group")
    wanted = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy, "group_size": size}
    _check(weights, wanted | {"dynamic": False})
    return PackedMatrices("float4-weight-only", ignored, "nvfp4" if is_nvfp4 else "mxfp4-packed", size)


def _modelopt(section: ConfigValues) -> PackedMatrices:
    """NVIDIA's Model Optimizer; names may have a star at their ends."""
    _check(section, {"quant_algo": "NVFP4"})
    names = [*_names(section, "ignore"), *_names(section, "exclude_modules")]
    plain = tuple(rf"re:{re.escape(name).replace(re.escape('*'), '.*')}(\.|$)" for name in names)
    return PackedMatrices("float4-weight-only", (*_LEFT_PLAIN, *plain), "nvfp4-modelopt", 16)


def _bitsandbytes(section: ConfigValues) -> PackedMatrices:
    """Only the files say which matrices are packed (see found_packed)."""
    if section.boolean("load_in_8bit"):
        return PackedMatrices("int8-weight-only", layout="llm.int8", scale="SCB")
    _check(section, {"load_in_4bit": True})
    kind = _one_of(section, "bnb_4bit_quant_type", ("nf4", "fp4"))
    if section.get("bnb_4bit_quant_storage") not in (None, "uint8"):
        raise section.error("bnb_4bit_quant_storage", f"is not supported, only uint8 is; {_PLAIN_ONLY}")
    scheme = "normal4-weight-only" if kind == "nf4" else "float8-weight-only"
    nested = section.boolean("bnb_4bit_use_double_quant")
    return PackedMatrices(scheme, layout=str(kind), nested=nested, scale="weight.absmax")


def _mxfp4(section: ConfigValues) -> PackedMatrices:
    """gpt-oss's experts; what is not converted are all other matrices."""
    return PackedMatrices("float4-weight-only", ("re:",), "mxfp4", 32)


_METHODS = {
    "compressed-tensors": _compressed_tensors, "awq": _awq, "gptq": _gptq, "fp8": _fp8, "mxfp4": _mxfp4,
    "modelopt": _modelopt, "bitsandbytes": _bitsandbytes,
}  # fmt: skip
FORMATS = (*_METHODS, "gguf")


def rounds_to(quantization: str, packed: PackedMatrices | None) -> str:
    """The scheme that --quantization rounds plain matrices to; "none" if it names the checkpoint's own format.

    Raises:
        ModelError: it names another format.
    """
    if quantization not in FORMATS:
        return quantization
    method = packed.method if packed is not None else ""
    if method != quantization:
        found = f"in the format {method}" if method else "not quantised"
        raise ModelError(f"quantization is {quantization}, but the checkpoint is {found}; leave it out")
    return "none"


def _group_size(section: ConfigValues) -> int | None:
    return None if section.get("group_size") == -1 else section.positive_int("group_size")


def _block(section: ConfigValues, key: str) -> tuple[int, int]:
    block = section.get(key)
    if not isinstance(block, list) or [type(each) for each in block] != [int, int] or min(block) < 1:
        raise section.error(key, f"is not two numbers above 0; {_PLAIN_ONLY}")
    return block[0], block[1]


def _names(section: ConfigValues, key: str) -> list[str]:
    names = section.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise section.error(key, "is not a list of names; correct it")
    return names


def _ignored(section: ConfigValues) -> tuple[str, ...]:
    ignored = section.get("ignore") or []
    try:
        for each in ignored:
            re.compile(each.removeprefix("re:") if each.startswith("re:") else "")
    except (TypeError, AttributeError, re.error):
        raise section.error("ignore", "is not a list of names and expressions; correct it") from None
    return tuple(ignored)


def _section(said: Any, source: str, name: str, defaults: Mapping[str, Any] | None = None) -> ConfigValues:
    if not isinstance(said, Mapping):
        raise ModelError(f"{source}: {name} is not a JSON object; correct it")
    return ConfigValues(said, source, defaults or {}, f"{name}.")


def _one_of(section: ConfigValues, key: str, known: tuple[Any, ...]) -> Any:
    value = section.get(key)
    if value not in known:
        *others, last = known
        only = f"{', '.join(map(str, others))} and {last}"
        raise section.error(key, f"is not supported, only {only} are; {_PLAIN_ONLY}")
    return value


def _check(section: ConfigValues, wanted: Mapping[str, Any]) -> None:
    for key, value in wanted.items():
        if section.get(key) != value:
            raise section.error(key, f"is not supported, only {value!r} is; {_PLAIN_ONLY}")


def scheme_of(layer: str, quantization: str, packed: PackedMatrices | None) -> str:
    """The scheme of a linear layer's matrix where --quantization asks for `quantization`.

    Packed matrices keep theirs, and routers and the like are not quantised. The head, and with tied embeddings every
    token's first vector, suffers most from few bits.
    """
    if packed is not None and packed.covers(layer):
        return packed.scheme
    if layer.rpartition(".")[2] in _FEW_NUMBERS:
        return "none"
    is_head = layer in ("lm_head", EMBEDDING)
    return "int8" if is_head and quantization == "int4" else quantization
