"""Loads the decoder of a model's name onto a device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from headway.cost.layers import AttentionSinks
from headway.kernels.interface import Kernels, Linear
from headway.kernels.ranks import Ranks
from headway.kernels.weights import QUANTIZATIONS
from headway.models.assembler import Assembler
from headway.models.checkpoint import (
    Checkpoint,
    RandomWeights,
    StageClock,
    WeightSource,
    as_saved,
    found_packed,
    found_traits,
    has_stacked_experts,
    stored_name,
)
from headway.models.config import ModelConfig, ModelError
from headway.models.decoder import Decoder
from headway.models.folder import read_ahead
from headway.models.folder import resolve_model as resolve_model
from headway.models.gguf.checkpoint import GGUFCheckpoint
from headway.models.gguf.config import gguf_files
from headway.models.quantization import EMBEDDING
from headway.models.sharding import divided
from headway.models.tensors import Shapes, expected_tensors
from headway.models.weights import DecoderWeights

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOAD_FORMATS = ("auto", "safetensors", "dummy")


def resolve_dtype(name: str, config: ModelConfig) -> torch.dtype:
    """The dtype that --dtype names; auto is the checkpoint's own, float32 where config.json names none.

    Raises:
        ModelError: an unknown name.
    """
    if name != "auto" and name not in TORCH_DTYPES:
        raise ModelError(f"dtype is {name!r}; it must be one of auto, {', '.join(TORCH_DTYPES)}")
    return TORCH_DTYPES[(config.dtype or "float32") if name == "auto" else name]


def load_model(
    folder: str | Path,
    dtype: torch.dtype,
    kernels: Kernels,
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    seed: int = 0,
    on_stage: Callable[[str, int], None] | None = None,
    max_model_len: int | None = None,
    quantization: str = "none",
    weights: DecoderWeights | None = None,
    attention_sinks: AttentionSinks | None = None,
    ranks: Ranks | None = None,
) -> Decoder:
    """Build the decoder of a model folder.

    Weights go one at a time from the mapped file to their place in a fused matrix. So only the model and one matrix are
    in memory, or the model and one layer's experts where they are stacked. Mapped pages belong to the file and can be
    dropped.

    Args:
        load_format: auto or safetensors read the folder's safetensors; dummy needs only config.json.
        seed: the seed of the dummy weights.
        on_stage: called at the end with each stage of StageClock and its nanoseconds.
        max_model_len: see Decoder.
        quantization: one of QUANTIZATIONS, for the matrices that the checkpoint has not packed; norms and biases stay
            as they are.
        weights: the model's, where they are known; then none are read.
        attention_sinks: see ModelConfig.with_attention_sinks.
        ranks: those that share the model, of which only this rank's part is loaded; None where it is not shared.

    Raises:
        ModelError: the folder's files are missing, damaged, contradict each other or ask for what is not supported.
    """
    folder = Path(folder)
    config, quantization = _config_as_served(folder, load_format, quantization, attention_sinks)
    if weights is not None:
        return Decoder(config, kernels, dtype, device, weights, max_model_len)
    clock, config = StageClock(), _as_stored(folder, config)
    stacked = config.routing is not None and load_format != "dummy" and has_stacked_experts(folder, config.traits)
    expected = expected_tensors(config, stacked)
    if load_format != "dummy":
        read_ahead(folder)

    def assemble(source: WeightSource, shapes: Shapes, config: ModelConfig) -> DecoderWeights:
        of_kernels = kernels, dtype, torch.device(device), clock, quantization
        return Assembler(source, shapes, config, *of_kernels).decoder_weights()

    with open_weights(folder, expected, config, load_format, seed, clock) as opened:
        if ranks is None:
            weights = assemble(opened, expected, config)
        else:
            config, weights = divided(opened, config, stacked, ranks, kernels, dtype, assemble)
    if on_stage is not None:
        for stage, elapsed_ns in clock.ns.items():
            on_stage(stage, elapsed_ns)
    return Decoder(config, kernels, dtype, device, weights, max_model_len)


def load_ends(
    folder: Path, dtype: torch.dtype, kernels: Kernels, load_format: str, seed: int, quantization: str
) -> tuple[Callable[[Tensor], Tensor], Linear]:
    """The embedding and the output layer of a model folder, whole, on a CPU. See load_model().

    Raises:
        ModelError: as load_model().
    """
    config, quantization = _config_as_served(folder, load_format, quantization, None)
    clock, config = StageClock(), _as_stored(folder, config)
    ends = (f"{EMBEDDING}.", "lm_head.")
    shapes = {name: shape for name, shape in expected_tensors(config).items() if name.startswith(ends)}
    with open_weights(folder, shapes, config, load_format, seed, clock, is_whole=False) as source:
        of_kernels = kernels, dtype, torch.device("cpu"), clock, quantization
        return Assembler(source, shapes, config, *of_kernels).ends()


def _as_stored(folder: Path, config: ModelConfig) -> ModelConfig:
    """The config with the names that the folder's tensors have, and which of its matrices are packed."""
    config = replace(config, traits=found_traits(folder, config.traits))
    return replace(config, packed=found_packed(folder, config.packed, config.traits.stored))


def _config_as_served(
    folder: Path, load_format: str, quantization: str, sinks: AttentionSinks | None
) -> tuple[ModelConfig, str]:
    """The config with what is asked for, and how plain matrices are quantised. Raises ModelError."""
    if load_format not in LOAD_FORMATS:
        raise ModelError(f"load_format is {load_format!r}; it must be one of {', '.join(LOAD_FORMATS)}")
    if quantization not in QUANTIZATIONS:
        raise ModelError(
            f"quantization is {quantization!r}; it must be one of {', '.join(QUANTIZATIONS)}; "
            "the format of a quantised checkpoint is found without it"
        )
    config = ModelConfig.from_folder(folder)
    if sinks is not None:
        config = config.with_attention_sinks(sinks)
    packed = config.packed
    is_packed = packed is not None and packed.layout != "mxfp4"  # which leaves all but experts plain
    if packed is not None and is_packed and quantization not in ("none", packed.scheme):
        raise ModelError(
            f"quantization is {quantization}, but the matrices in {folder} are packed as {packed.scheme}; "
            "leave it out, or take the unquantised checkpoint"
        )
    if load_format == "dummy" and packed is not None and packed.layout != "rows":
        quantization = "int4" if packed.bits == 4 else "int8-weight-only"
        config = replace(config, packed=None)
    return as_saved(folder, config), quantization


def open_weights(
    folder: Path,
    expected: Shapes,
    config: ModelConfig,
    load_format: str,
    seed: int,
    clock: StageClock,
    is_whole: bool = True,
) -> AbstractContextManager[WeightSource]:
    """The tensors that are expected; see load_model().

    Args:
        is_whole: the folder has nothing but these, and what the decoder does not need.
    """
    if load_format == "dummy":
        return nullcontext(RandomWeights(seed, clock))
    if load_format == "auto" and gguf_files(folder):
        return GGUFCheckpoint(folder, expected, config, clock, is_whole)
    if not is_whole:
        return Checkpoint(folder, expected, clock, config.packed, ("",), config.traits.stored)
    return open_checkpoint(folder, expected, config, clock)


def open_checkpoint(folder: Path, expected: Shapes, config: ModelConfig, clock: StageClock) -> Checkpoint:
    """The safetensors of a folder; `config` has the names that it has (see found_traits). Raises ModelError."""
    left_out = (*config.traits.unused, *(stored_name(name, config.traits.stored) for name in config.left_out))
    return Checkpoint(folder, expected, clock, config.packed, left_out, config.traits.stored)
