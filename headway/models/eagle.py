"""Heads of EAGLE-3 (Li et al., 2025, arXiv:2503.01840), in the format of SpecForge and AngelSlim.

Such a head is a checkpoint of its own, trained for a model. For position p it reads what three of the model's layers
give there, projected to the width of one, beside the embedding of the token at p + 1; for further drafts, it reads its
own result. Its one layer is Llama's, with attention over both inputs side by side. Its output layer knows the most
frequent tokens only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from headway.kernels.interface import Kernels, Linear
from headway.models.assembler import Assembler
from headway.models.checkpoint import Checkpoint, StageClock, has_tensor
from headway.models.config import ModelConfig, ModelError, read_json
from headway.models.decoder import Decoder
from headway.models.folder import weight_files
from headway.models.heads import REPEATED, HeadInputs, NormedHead
from headway.models.tensors import layer_tensors
from headway.models.weights import AttentionWeights, DecoderWeights

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
_LAYER = ("midlayer.", "layers.0.")  # what checkpoints call the layer
_READ = 3  # layers of the model


class EagleInputs(HeadInputs):
    """What the head reads, as it is; the tokens beside it come to the layer itself.

    Args:
        model: the decoder whose layers are read.
        projection: what the layers give, side by side -> hidden.

    Attributes:
        tokens: the normed embeddings [T, hidden] of the step.
    """

    def __init__(
        self,
        kernels: Kernels,
        rows: Tensor,
        model: Decoder,
        embedding: Callable[[Tensor], Tensor],
        norm: Tensor,
        projection: Linear,
        eps: float,
    ) -> None:
        super().__init__(kernels, rows, _READ * model.config.shape.hidden)
        self.tokens = rows[:0]
        self._model, self._embedding, self._norm, self._projection, self._eps = model, embedding, norm, projection, eps

    def kept(self, hidden: Tensor) -> Tensor:
        return torch.cat(self._model.tapped, 1)

    def read(self, kept: Tensor) -> Tensor:
        return self._projection(kept)

    def __call__(self, token_ids: Tensor) -> Tensor:
        self.tokens = self.kernels.rms_norm(self._embedding(token_ids), self._norm, self._eps)
        hidden = self.given(len(token_ids))[:, None]
        return self.kernels.join(hidden, hidden[..., :0])[:, 0]  # a copy


class _Beside:
    """The product of normed embeddings and the layer's input, side by side."""

    def __init__(self, product: Linear, inputs: EagleInputs) -> None:
        self.out_features = product.out_features
        self._product, self._inputs = product, inputs

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, out]."""
        return self._product(self._inputs.kernels.join(self._inputs.tokens[:, None], x[:, None])[:, 0])

    def rows(self, numbers: Tensor) -> Tensor:
        return self._product.rows(numbers)


def load_eagle_head(folder: Path, model: Decoder, quantization: str) -> Decoder:
    """Load the head of a folder for a decoder, which gives the head what its layers make from now on.

    Its embedding is EagleInputs.

    Args:
        quantization: see load_model.

    Raises:
        ModelError: the folder has no such head, or one for another model; one line.
    """
    raw = read_json(folder / "config.json", "a folder with an EAGLE-3 head holds its config.json")
    _check(folder, raw, model)
    config = ModelConfig.from_dict({**raw, "architectures": ["LlamaForCausalLM"], "quantization_config": None})
    shape, read = config.shape, _READ * model.config.shape.hidden
    named = next((each for each in _LAYER if has_tensor(folder, f"{each}hidden_norm.weight")), _LAYER[0])
    stored = ("model.layers.0.", named), ("model.", "")
    config = replace(config, traits=replace(config.traits, stored=stored))
    layer = "model.layers.0"
    shapes = layer_tensors(config, 0, stacked=False)
    for part in "qkv":
        name = f"{layer}.self_attn.{part}_proj.weight"
        shapes[name] = (shapes[name][0], 2 * shape.hidden)
    shapes |= {f"{name}.weight": (shape.hidden,) for name in (f"{layer}.hidden_norm", "model.norm")}
    drafted = int(raw.get("draft_vocab_size") or shape.vocab)
    shapes |= {"model.fc.weight": (shape.hidden, read), "lm_head.weight": (drafted, shape.hidden)}
    has_embedding = has_tensor(folder, "embed_tokens.weight")
    if has_embedding:
        shapes["model.embed_tokens.weight"] = (shape.vocab, shape.hidden)
    elif shape.hidden != model.config.shape.hidden:
        raise ModelError(f"{folder}: there is no embed_tokens.weight, and the model's embedding has another width")
    clock = StageClock()
    with Checkpoint(folder, shapes, clock, left_out=("",), stored=stored) as source:
        of_kernels = model.kernels, model.dtype, model.device, clock, quantization
        weights = _EagleAssembler(source, shapes, config, *of_kernels).head_weights(model, has_embedding)
    inputs = weights.embedding
    assert isinstance(inputs, EagleInputs)
    if drafted < shape.vocab:
        inputs.ids = _ids(folder, drafted, shape.vocab)
    model.taps = _taps(folder, raw, model.config.shape.layers)
    alone = replace(shape, vocab=drafted)
    return Decoder(replace(config, shape=alone), model.kernels, model.dtype, model.device, weights, model.max_model_len)


class _EagleAssembler(Assembler):
    """Lays out the tensors of a head."""

    def head_weights(self, model: Decoder, has_embedding: bool) -> DecoderWeights:
        config, kernels, name = self._config, self._kernels, "model.layers.0"
        layer = self._layer(0, config.caches[0])
        assert isinstance(layer.mixer, AttentionWeights) and layer.mixer_norm is not None
        inputs = EagleInputs(
            kernels,
            torch.zeros(REPEATED, config.shape.hidden, dtype=self._dtype, device=self._device),
            model,
            self._table("model.embed_tokens") if has_embedding else model.weights.embedding,
            layer.mixer_norm,
            self._linear("model.fc"),
            config.rms_norm_eps,
        )
        layer.mixer_norm = self._norm(f"{name}.hidden_norm")
        layer.mixer = replace(layer.mixer, qkv=_Beside(layer.mixer.qkv, inputs))
        head = NormedHead(kernels, self._linear("lm_head", wide=True), self._norm("model.norm"), config.rms_norm_eps)
        return DecoderWeights(inputs, [layer], None, head)


def _check(folder: Path, raw: dict[str, Any], model: Decoder) -> None:
    named = raw.get("architectures")
    if not isinstance(named, list) or not {*named} & {*ARCHITECTURES} or not has_tensor(folder, "fc.weight"):
        raise ModelError(
            f"{folder}: is no head of EAGLE-3: its config.json names {named!r}, and there must be a tensor fc.weight; "
            f"{ARCHITECTURES[0]} is supported"
        )
    if raw.get("vocab_size") != (vocab := model.config.shape.vocab):
        raise ModelError(
            f"{folder}: is a head for a model with a vocabulary of {raw.get('vocab_size')} tokens; this one has {vocab}"
        )
    if model.config.multipliers.embedding != 1.0:
        raise ModelError(f"{folder}: heads of EAGLE-3 are not supported for models that scale their embedding")
    stated = raw.get("eagle_config") or {}
    if raw.get("norm_before_residual") or not stated.get("use_aux_hidden_state", True):
        raise ModelError(f"{folder}: norm_before_residual, and heads that read one layer, are not supported")
    if raw.get("num_hidden_layers", 1) != 1:
        raise ModelError(f"{folder}: has {raw['num_hidden_layers']} layers; only heads of one are supported")


def _ids(folder: Path, drafted: int, vocab: int) -> list[int]:
    """The model's ids of the tokens that the head knows: `d2t` has how much larger each is than the head's."""
    for path in weight_files(folder):
        with safe_open(str(path), framework="pt") as file:
            if "d2t" in file.keys():  # noqa: SIM118
                ids = (file.get_tensor("d2t") + torch.arange(drafted)).tolist()
                if len(ids) == drafted and min(ids) >= 0 and max(ids) < vocab:
                    return [int(each) for each in ids]
    raise ModelError(f"{folder}: d2t, which says what its {drafted} tokens are among {vocab}, is missing or wrong")


def _taps(folder: Path, raw: dict[str, Any], layers: int) -> tuple[int, ...]:
    """The layers whose results are read: as stated, else the second, the middle one and the fourth to last."""
    stated = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    taps = stated or [1, layers // 2 - 1, layers - 4]
    if len(taps) != _READ or not all(type(each) is int and 0 <= each < layers for each in taps):
        raise ModelError(f"{folder}: reads the layers {taps}, of which this model with {layers} layers lacks some")
    return tuple(taps)
