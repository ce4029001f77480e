"""Heads for drafts that a checkpoint brings: multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2).

For position p such a head reads the decoder's result there and the embedding of the token at p + 1. Both are normed,
put side by side and projected to the width of one, which goes through a layer like the decoder's. By the decoder's
output layer, the result says what comes at p + 2. For the token behind that, the head reads its own result.

So a head is a decoder of one layer whose embedding knows these results, and runs as any decoder does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.cost.config import text_part
from headway.cost.layers import StateSpec
from headway.kernels.interface import Kernels, Linear
from headway.models.assembler import Assembler
from headway.models.checkpoint import StageClock, has_tensor
from headway.models.config import ModelConfig, ModelError, read_json
from headway.models.decoder import Decoder
from headway.models.gguf.config import gguf_files
from headway.models.loading import open_weights
from headway.models.tensors import STACKED, layer_tensors
from headway.models.weights import DecoderWeights

REPEATED = 64  # results of steps of up to so many tokens are read at the same address, so that steps can be repeated


class _Names(NamedTuple):
    """Names of a head's tensors beside those of its layer."""

    layer: str  # what the checkpoint calls the layer; its number is that behind the decoder's last
    token_norm: str
    hidden_norm: str
    projection: str
    norm: str
    is_normed: bool  # the result is normed before the head reads it again, and not only before the output layer
    hidden_first: bool = False  # the projection reads the result before the token, and not behind it


_FURTHER_LAYER = _Names("{}", "{}.enorm", "{}.hnorm", "{}.eh_proj", "{}.shared_head.norm", is_normed=False)
_APART = _Names(
    "mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", is_normed=True
)
_MIMO = "model.mtp_layers.0"
_NAMES = {
    **dict.fromkeys(("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"), _FURTHER_LAYER),
    **dict.fromkeys(("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), _APART),
    "MiMoForCausalLM": _Names(
        _MIMO,
        f"{_MIMO}.token_layernorm",
        f"{_MIMO}.hidden_layernorm",
        f"{_MIMO}.input_proj",
        f"{_MIMO}.final_layernorm",
        is_normed=True,
        hidden_first=True,
    ),
}


class HeadInputs(ABC):
    """The embedding of a head's decoder.

    Args:
        rows: [REPEATED, hidden], where results are for a step that may be repeated.

    Attributes:
        width: numbers of what is kept of a token of the model.
        ids: the model's ids of the tokens that the head knows; None where it knows all.
    """

    def __init__(self, kernels: Kernels, rows: Tensor, width: int) -> None:
        self.kernels, self.rows, self.width = kernels, rows, width
        self.ids: list[int] | None = None
        self._given: Tensor | None = None

    def give(self, hidden: Tensor) -> None:
        """The next step reads these results [T, hidden] of the decoder, or of the head itself, one for each token."""
        if len(hidden) <= len(self.rows):
            self.rows[: len(hidden)] = hidden
        else:
            self._given = hidden

    def given(self, count: int) -> Tensor:
        """The results for a step of so many tokens; zeros where none were given, as before the first."""
        hidden = self.rows[:count] if count <= len(self.rows) else self._given
        return self.rows.new_zeros(count, self.rows.shape[1]) if hidden is None or len(hidden) != count else hidden

    def kept(self, hidden: Tensor) -> Tensor:
        """What is kept of a step of the model [T, width], which had these results [T, hidden]."""
        return hidden

    def read(self, kept: Tensor) -> Tensor:
        """What the head reads [T, hidden] of what was kept."""
        return kept

    @abstractmethod
    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64, which follow those of the results, -> [T, hidden]."""


class MtpInputs(HeadInputs):
    """Token and result, each normed, and projected to the width of one."""

    def __init__(
        self,
        kernels: Kernels,
        rows: Tensor,
        embedding: Callable[[Tensor], Tensor],
        norms: tuple[Tensor, Tensor],
        projection: Linear,
        eps: float,
        hidden_first: bool,
    ) -> None:
        super().__init__(kernels, rows, rows.shape[1])
        self._embedding, self._norms, self._projection, self._eps = embedding, norms, projection, eps
        self._hidden_first = hidden_first

    def __call__(self, token_ids: Tensor) -> Tensor:
        kernels, (of_tokens, of_hidden) = self.kernels, self._norms
        tokens = kernels.rms_norm(self._embedding(token_ids), of_tokens, self._eps)
        hidden = kernels.rms_norm(self.given(len(token_ids)), of_hidden, self._eps)
        first, second = (hidden, tokens) if self._hidden_first else (tokens, hidden)
        return self._projection(kernels.join(first[:, None], second[:, None])[:, 0])


class NormedHead:
    """The decoder's output layer behind a norm."""

    def __init__(self, kernels: Kernels, head: Linear, norm: Tensor, eps: float) -> None:
        self.out_features = head.out_features
        self._kernels, self._head, self._norm, self._eps = kernels, head, norm, eps

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, vocab]."""
        return self._head(self._kernels.rms_norm(x, self._norm, self._eps))

    def rows(self, numbers: Tensor) -> Tensor:
        return self._head.rows(numbers)


def load_mtp_head(
    folder: Path,
    model: Decoder,
    load_format: str,
    seed: int,
    quantization: str,
    ends: tuple[Callable[[Tensor], Tensor], Linear] | None = None,
) -> Decoder:
    """Load the head of a folder for the decoder of the same folder, with whose embedding and output layer it works.

    Of several heads the first is taken, for all drafts. Its embedding is MtpInputs.

    Args:
        load_format, seed, quantization: see load_model.
        ends: embedding and output layer, where the decoder has parts of them.

    Raises:
        ModelError: the checkpoint has none, or one that is not supported; one line.
    """
    text = text_part(read_json(folder / "config.json", "a model folder holds the config.json of its checkpoint"))
    family = next((each for each in text.get("architectures", ()) if each in _NAMES), None)
    if family is None or model.config.headless:
        raise ModelError(
            f"{folder}: no head for multi-token prediction is known of this architecture; those of "
            f"{', '.join(each.removesuffix('ForCausalLM') for each in _NAMES)} are"
        )
    index, is_gguf = model.config.shape.layers, load_format == "auto" and bool(gguf_files(folder))
    ours, names = f"model.layers.{index}", _NAMES[family]
    if is_gguf:  # whose converters have one way to name them
        names = _FURTHER_LAYER._replace(is_normed=names.is_normed)
    names = _Names._make([*(each.format(ours) for each in names[:5]), *names[5:]])
    config = _with_a_layer_more(text, model.config, names)
    stored = ((f"{ours}.", f"{names.layer}."), *config.traits.stored)
    is_random = load_format == "dummy"
    sign = "nextn_predict_layers" if is_gguf else f"{names.projection}.weight"
    has_head = text.get("num_nextn_predict_layers") if is_gguf else is_random or has_tensor(folder, sign)
    if not has_head:
        raise ModelError(f"{folder}: the checkpoint has no head for multi-token prediction: there is no {sign}")
    cache, hidden = config.caches[index], config.shape.hidden
    assert not isinstance(cache, StateSpec)
    stacked = not (is_random or is_gguf) and has_tensor(folder, f"{names.layer}.{STACKED[0]}")
    shapes = layer_tensors(config, index, stacked)
    shapes.update({f"{each}.weight": (hidden,) for each in (names.token_norm, names.hidden_norm, names.norm)})
    shapes[f"{names.projection}.weight"] = (hidden, 2 * hidden)
    clock, traits = StageClock(), replace(config.traits, stored=stored)
    opened = open_weights(folder, shapes, replace(config, traits=traits), load_format, seed, clock, is_whole=False)
    of_kernels = model.kernels, model.dtype, model.device, clock, quantization
    with opened as source:
        assembler = _HeadAssembler(source, shapes, config, *of_kernels)
        weights = assembler.head_weights(index, names, *(ends or (model.weights.embedding, model.weights.lm_head)))
    alone = replace(
        config.shape, layers=1, recurrent=(), state=None, experts=None, sliding_windows=(None,), attention_sinks=None
    )
    config = replace(config, shape=alone, caches=(cache,), routing=None)
    return Decoder(config, model.kernels, model.dtype, model.device, weights, model.max_model_len)


def _with_a_layer_more(text: Mapping[str, Any], config: ModelConfig, names: _Names) -> ModelConfig:
    """The decoder's config with the head's layer as one more, which has attention to all tokens."""
    layers, shape = config.shape.layers, config.shape
    more: dict[str, Any] = {"num_hidden_layers": layers + 1, "num_nextn_predict_layers": 0}
    kinds = text.get("layer_types")
    if shape.recurrent:
        kinds = ["linear_attention" if layer in shape.recurrent else "full_attention" for layer in range(layers)]
    if isinstance(kinds, list):
        more["layer_types"] = [*kinds, "full_attention"]
    if isinstance(kinds_of_mlp := text.get("mlp_layer_types"), list):
        more["mlp_layer_types"] = [*kinds_of_mlp, "sparse"]
    made, packed = ModelConfig.from_dict({**text, **more}), config.packed
    if packed is not None:
        ours, theirs = f"model.layers.{layers}.", f"{names.layer}."
        packed = replace(packed, ignored=(*(each.replace(theirs, ours) for each in packed.ignored), names.projection))
    return replace(made, traits=config.traits, packed=packed)


class _HeadAssembler(Assembler):
    """Lays out the tensors of a head."""

    def head_weights(
        self, index: int, names: _Names, embedding: Callable[[Tensor], Tensor], lm_head: Linear
    ) -> DecoderWeights:
        config, kernels, cache = self._config, self._kernels, self._config.caches[index]
        rows = torch.zeros(REPEATED, config.shape.hidden, dtype=self._dtype, device=self._device)
        norms = self._norm(names.token_norm), self._norm(names.hidden_norm)
        projection, eps = self._linear(names.projection), config.rms_norm_eps
        inputs = MtpInputs(kernels, rows, embedding, norms, projection, eps, names.hidden_first)
        norm, layer = self._norm(names.norm), self._layer(index, cache)
        if names.is_normed:
            return DecoderWeights(inputs, [layer], norm, lm_head)
        return DecoderWeights(inputs, [layer], None, NormedHead(kernels, lm_head, norm, eps))
