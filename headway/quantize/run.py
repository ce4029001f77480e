"""Quantise a checkpoint: each matrix in turn, with the inputs that it has behind those that were quantised before."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from headway.cost.values import ConfigValues, ModelError
from headway.engine.memory import zero_caches
from headway.kernels.interface import LayerCache, LayerState, Span, StepGeometry
from headway.models.assembler import Assembler
from headway.models.checkpoint import (
    Checkpoint,
    StageClock,
    found_traits,
    has_stacked_experts,
    other_parts,
    stored_name,
)
from headway.models.config import ModelConfig, read_json
from headway.models.decoder import Decoder
from headway.models.families import OTHER_PARTS
from headway.models.gguf.config import gguf_files
from headway.models.loading import open_checkpoint, resolve_dtype
from headway.models.quantization import NUMBERS_OF_HEADS, ROUTERS, PackedMatrices, read_packed
from headway.models.tensors import Shapes, expected_tensors
from headway.quantize.apart import TakenApart
from headway.quantize.calibration import Calibration
from headway.quantize.folder import FolderDraft, check_place, new_folder, packed_tensors
from headway.quantize.folds import Feeder, Folds
from headway.quantize.rounding import Rounded, awq_scales, gptq, nearest
from headway.quantize.schemes import Recipe, Scheme
from headway.quantize.watched import NamedWeights, WatchedKernels, WatchedLinear

_ROWS = 4096  # rows of inputs that are summed up at once


@dataclass(frozen=True, slots=True)
class Result:
    """Bytes of the tensors before and after, and how many matrices were quantised."""

    before: int
    after: int
    matrices: int


def quantize(
    folder: Path, output: Path, recipe: Recipe, calibration: Calibration, on_progress: Callable[[float, str], None]
) -> Result:
    """Write a quantised checkpoint of the one in `folder`.

    Memory: a matrix and the moments of its inputs; with a method that looks at text, a few activations of all of its
    tokens; and what is to be written, up to the size of a file.

    Args:
        on_progress: called with the share that is done, and what is being done.

    Raises:
        ValueError: the checkpoint, the text or the output is none that this can be done with.
    """
    check_place(output)
    config = ModelConfig.from_folder(folder)
    _check(folder, config)
    raw = read_json(folder / "config.json", "")
    config = replace(config, traits=found_traits(folder, config.traits))
    stacked = has_stacked_experts(folder, config.traits)
    said = recipe.quantization_config(_ignored(config))
    packed = read_packed(ConfigValues({"quantization_config": said}, "config.json"))
    assert packed is not None
    shapes = expected_tensors(config)
    layers = _matrices(shapes, packed, recipe.scheme)
    windows = []
    if recipe.method != "rtn":
        on_progress(0.0, "reading the text" if calibration.calibration else "writing a text")
        windows = calibration.windows(folder, config.longest_model_len)
        gc.collect()
    dtype = resolve_dtype("auto", config)
    checkpoint = open_checkpoint(folder, expected_tensors(config, stacked), config, StageClock())
    with checkpoint, new_folder(output) as draft, torch.inference_mode():
        source = TakenApart(checkpoint, config) if stacked else checkpoint
        quantizer = _Quantizer(config, source, shapes, draft, recipe, packed, layers, dtype, on_progress)
        quantizer.go(windows)
        for name, tensor in other_parts(folder) if config.traits.within else ():
            draft.add(name, tensor)
        after = draft.finish(folder, raw | {"quantization_config": said})
    before = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
    return Result(before, after, len(layers))


def _ignored(config: ModelConfig) -> list[str]:
    """Matrices that stay as they are, as a checkpoint names them."""
    plain = [*(ROUTERS if config.routing else ()), *(["kv_b_proj"] if config.shape.latent else ())]
    plain += NUMBERS_OF_HEADS if config.shape.state and config.shape.state.heads else ()
    ignored = ["lm_head", *(rf"re:.*\.{each}$" for each in plain)]
    if config.traits.within:
        ignored += [rf"re:.*{part}.*" for part in dict.fromkeys(each.split(".")[-2] for each in OTHER_PARTS)]
    return ignored


def _check(folder: Path, config: ModelConfig) -> None:
    """Raises ModelError for a checkpoint of which no quantised one is written."""
    if config.packed is not None and config.packed.layout == "mxfp4":
        raise ModelError(
            f"{folder}: its experts, nearly all of its weights, are MXFP4 already; serve it as it is, and round "
            "its other matrices with --quantization int8-weight-only"
        )
    if files := gguf_files(folder):
        raise ModelError(f"{files[0].name}: GGUF files are served as they are; take the checkpoint that it was made of")
    if config.packed is not None:
        raise ModelError(f"{folder}: is quantised already; take the unquantised checkpoint")
    if config.routing is not None and config.routing.by_turns:
        raise ModelError(
            f"{folder}: experts with outputs by turns (gpt-oss) are not written; take the published checkpoint, whose "
            "experts are MXFP4, or give --quantization to `headway serve`"
        )
    if config.traits.centred:
        raise ModelError(
            f"{folder}: a model whose norms subtract the mean (Command R) is served from unquantised weights alone; "
            "give --quantization to `headway serve`"
        )


def _matrices(shapes: Shapes, packed: PackedMatrices, scheme: Scheme) -> Shapes:
    """Layers that are to be quantised, with their shapes. Raises ModelError for one that the scheme does not fit."""
    found: Shapes = {}
    for name, shape in shapes.items():
        layer = name.removesuffix(".weight")
        if len(shape) == 2 and layer != name and packed.covers(layer):
            size = scheme.group_size or 8
            if shape[1] % size:
                fitting = [each for each in (128, 64, 32, 16) if shape[1] % each == 0]
                way_out = f"--group-size {fitting[0]}" if scheme.group_size and fitting else "another --scheme"
                raise ModelError(f"{layer} has {shape[1]} inputs, which groups of {size} do not divide; use {way_out}")
            packed.tensors(*shape)
            found[layer] = shape
    return found


def _run(decoder: Decoder, windows: list[list[int]]) -> None:
    """All windows in one step, so that each layer is done with before the next. Layers share a cache."""
    count, tokens = len(windows), len(windows[0])
    specs = decoder.config.caches
    one: dict[object, LayerCache | LayerState] = {
        spec: zero_caches([spec], count, tokens, decoder.dtype, decoder.device, count)[0] for spec in set(specs)
    }
    ids = torch.tensor([token for window in windows for token in window])
    decoder.forward(ids, _one_step(count, tokens), [one[spec] for spec in specs])


class _Quantizer:
    """Quantises what a decoder comes to, and writes it when the layers that follow cannot change it any more."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint | TakenApart,
        tensors: Shapes,
        draft: FolderDraft,
        recipe: Recipe,
        packed: PackedMatrices,
        layers: Shapes,
        dtype: torch.dtype,
        on_progress: Callable[[float, str], None],
    ) -> None:
        self._config, self._checkpoint, self._tensors, self._draft = config, checkpoint, tensors, draft
        self._recipe, self._scheme, self._packed = recipe, recipe.scheme, packed
        self._dtype = dtype
        self._shapes, self._on_progress = layers, on_progress
        self._total, self._done = sum(torch.Size(shape).numel() for shape in layers.values()), 0
        self._changed: dict[str, Tensor] = {}  # tensors that are written in another way than they were read
        self._rounded: dict[str, Rounded] = {}  # by layer: matrices of this block of the model that are not written yet
        self._scales: dict[str, Tensor] = {}  # divisors of a norm's outputs, by norm
        self._written: set[str] = set()
        self._folds = Folds(config) if recipe.method == "awq" else None

    def go(self, windows: list[list[int]]) -> None:
        """Write all tensors; matrices that a token of the windows comes to are rounded for its inputs."""
        weights = NamedWeights(self._checkpoint)
        kernels, device = WatchedKernels(weights), torch.device("cpu")
        assembler = Assembler(weights, self._tensors, self._config, kernels, self._dtype, device, StageClock(), "none")
        decoder = Decoder(self._config, kernels, self._dtype, device, assembler.decoder_weights())
        wanted = set(self._shapes) | (self._folds.plain if self._folds else set())
        linears = [each for each in kernels.layers if set(each.names) & wanted]
        for each in linears:
            each.exchange = self._exchange
        if windows:
            _run(decoder, windows)
        for each in linears:  # no token came to those that still have an exchange
            if each.exchange is not None:
                self._exchange(each, None)
        self._finish()

    def _exchange(self, linear: WatchedLinear, x: Tensor | None) -> Tensor:
        """Quantise the matrix of a linear layer with inputs x [T, in], and return the matrix that takes its place.

        Args:
            x: None if the inputs are not looked at, or if there are none.
        """
        linear.exchange = None
        names = linear.names
        self._write([name for name in self._rounded if _block(name) != _block(names[0])])
        moments = None if x is None or self._recipe.method == "rtn" else _moments(x)
        if not set(names) <= set(self._shapes):
            self._fold_plain(names, moments)
            return linear.matrix
        self._on_progress(self._done / max(1, self._total), names[0].removeprefix("model."))
        weight = torch.cat([self._stored(f"{name}.weight").float() for name in names])
        scales = self._input_scales(names, weight, moments)
        rounded = self._round(weight, scales, moments)
        rows = [self._shapes[name][0] for name in names]
        parts = (rounded.codes.split(rows), rounded.scales.split(rows))
        zeros = [None] * len(rows) if rounded.zeros is None else rounded.zeros.split(rows)
        for name, codes, of_codes, zero in zip(names, *parts, zeros, strict=True):
            self._rounded[name] = Rounded(codes, of_codes, zero, rounded.of_all)
        self._done += weight.numel()
        given = linear.matrix.float()
        if not torch.equal(given, weight):  # its rows in another order
            rounded = self._round(given, scales, moments)
        return rounded.dense / scales

    def _finish(self) -> None:
        """Write what is left, and all that is not quantised."""
        self._write(list(self._rounded))
        for name in self._tensors:
            if name.removesuffix(".weight") not in self._written:
                self._draft.add(stored_name(name, self._config.traits.stored), self._stored(name))
        self._on_progress(1.0, "done")

    def _round(self, weight: Tensor, scales: Tensor, moments: Tensor | None) -> Rounded:
        if moments is not None and self._recipe.method == "gptq":
            return gptq(weight, moments, self._scheme, self._dtype, self._recipe.act_order)
        return nearest(weight * scales, self._scheme, self._dtype)

    def _input_scales(self, names: tuple[str, ...], weight: Tensor, moments: Tensor | None) -> Tensor:
        """Factors for the weights of each input. The layer or norm that makes the inputs is changed to match."""
        plain = torch.ones(weight.shape[1])
        if self._folds is None:
            return plain
        if (norm := self._folds.norms.get(names)) is not None:
            if norm not in self._scales:
                self._scales[norm] = plain if moments is None else self._fold_norm(norm, weight, moments)
            return self._scales[norm]
        if (feeder := self._folds.feeder(names, self._shapes)) is None or moments is None:
            return plain
        scales = awq_scales(weight, moments, self._scheme, self._dtype, feeder.alike)
        self._divide_rows(feeder, feeder.outputs(scales))
        return scales

    def _fold_norm(self, norm: str, weight: Tensor, moments: Tensor) -> Tensor:
        """Choose scales, divide the norm's weights by them, and return what these were divided by when stored."""
        wanted = awq_scales(weight, moments, self._scheme, self._dtype, lambda sizes: sizes)
        name, offset = f"{norm}.weight", self._config.traits.norm_offset
        stored = self._stored(name)
        self._changed[name] = ((stored.float() + offset) / wanted - offset).to(stored.dtype)
        divided = self._changed[name].float() + offset
        scales = (stored.float() + offset) / divided
        return torch.where(scales.isfinite() & (scales > 0), scales, 1.0)

    def _fold_plain(self, names: tuple[str, ...], moments: Tensor | None) -> None:
        """Routers see what experts see: some rows of all experts decide. Others see what was folded before."""
        assert self._folds is not None
        norm, experts = self._folds.norms[names], self._folds.experts.get(names)
        if moments is None:
            return
        if experts is not None:
            some = [self._stored(f"{name}.weight")[:: len(experts)].float() for name in experts]
            self._scales[norm] = self._fold_norm(norm, torch.cat(some), moments)
        for name in names:
            stored = self._stored(f"{name}.weight")
            self._changed[f"{name}.weight"] = (stored.float() * self._scales[norm]).to(stored.dtype)

    def _divide_rows(self, feeder: Feeder, scales: Tensor) -> None:
        rounded, rows = self._rounded[feeder.layer], slice(feeder.first, feeder.first + len(scales))
        rounded.scales = rounded.scales.clone()
        rounded.scales[rows] = (rounded.scales[rows].float() / scales.unsqueeze(1)).to(self._dtype)
        if (name := f"{feeder.layer}.bias") in self._tensors:
            bias = self._stored(name).clone()
            bias[rows] = (bias[rows].float() / scales).to(bias.dtype)
            self._changed[name] = bias

    def _stored(self, name: str) -> Tensor:
        changed = self._changed.get(name)
        return self._checkpoint.stored(name) if changed is None else changed

    def _write(self, layers: list[str]) -> None:
        for layer in layers:
            for part, tensor in packed_tensors(self._rounded.pop(layer), self._packed).items():
                self._draft.add(stored_name(f"{layer}.{part}", self._config.traits.stored), tensor)
            self._written.add(layer)


def _block(layer: str) -> str:
    """The part of a name that a transformer block has in common."""
    return ".".join(layer.split(".")[:3])


def _moments(x: Tensor) -> Tensor:
    """The sum of x x^T over tokens, of x [T, in], float32."""
    total = torch.zeros(x.shape[1], x.shape[1])
    for some in x.split(_ROWS):
        wide = some.float()
        total.addmm_(wide.T, wide)
    return total


def _one_step(count: int, tokens: int) -> StepGeometry:
    """All windows in one step, a block for each."""
    lens = [tokens] * count
    return StepGeometry(
        query_start=torch.arange(count + 1, dtype=torch.int32) * tokens,
        context_lens=torch.tensor(lens, dtype=torch.int32),
        block_tables=torch.arange(count, dtype=torch.int32).unsqueeze(1),
        slots=torch.arange(count * tokens),
        positions=torch.arange(tokens).repeat(count),
        num_sequences=count,
        max_query_len=tokens,
        max_context_len=tokens,
        query_lens_host=lens,
        context_lens_host=lens,
        spans=torch.tensor([[count] * len(Span._fields), *(Span(n * tokens, tokens, -1, n) for n in range(count))]),
    )
