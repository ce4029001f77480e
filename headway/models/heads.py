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
from headway.models.checkpoint import Checkpoint, RandomWeights, StageClock, has_tensor
from headway.models.config import ModelConfig, ModelError, read_json
from headway.models.decoder import Decoder
from headway.models.gguf.config import gguf_files
from headway.models.tensors import STACKED, layer_tensors
from headway.models.weights import DecoderWeights

REPEATED = 64  # results of steps of up to so many tokens are read at the same address, so that steps can be repeated


class _Names(NamedTuple):
    """Names of a head's tensors beside those of its layer.

    Args:
        layer: what the checkpoint calls the layer; its number is that behind the decoder's last.
        is_normed: the result is normed before the head reads it again, and not only before the output layer.
    """

    layer: str
    token_norm: str
    hidden_norm: str
    projection: str
    norm: str
    is_normed: bool


_FURTHER_LAYER = _Names("{}", "{}.enorm", "{}.hnorm", "{}.eh_proj", "{}.shared_head.norm", is_normed=False)
_APART = _Names(
    "mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", is_normed=True
)
_NAMES = {
    **dict.fromkeys(("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"), _FURTHER_LAYER),
    **dict.fromkeys(("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), _APART),
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
    ) -> None:
        super().__init__(kernels, rows, rows.shape[1])
        self._embedding, self._norms, self._projection, self._eps = embedding, norms, projection, eps

    def __call__(self, token_ids: Tensor) -> Tensor:
        """See HeadInputs."""
        kernels, (of_tokens, of_hidden) = self.kernels, self._norms
        tokens = kernels.rms_norm(self._embedding(token_ids), of_tokens, self._eps)
        hidden = kernels.rms_norm(self.given(len(token_ids)), of_hidden, self._eps)
        return self._projection(kernels.join(tokens[:, None], hidden[:, None])[:, 0])


class NormedHead:
    """The decoder's output layer behind a norm."""

    def __init__(self, kernels: Kernels, head: Linear, norm: Tensor, eps: float) -> None:
        self.out_features = head.out_features
        self._kernels, self._head, self._norm, self._eps = kernels, head, norm, eps

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, vocab]."""
        return self._head(self._kernels.rms_norm(x, self._norm, self._eps))

    def rows(self, numbers: Tensor) -> Tensor:
        """See Linear."""
        return self._head.rows(numbers)


def load_mtp_head(folder: Path, model: Decoder, load_format: str, seed: int, quantization: str) -> Decoder:
    """Load the head of a folder for the decoder of the same folder, with whose embedding and output layer it works.

    Of several heads the first is taken, for all drafts. Its embedding is MtpInputs.

    Args:
        load_format, seed, quantization: see load_model.

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
    if load_format == "auto" and gguf_files(folder):
        raise ModelError(f"{folder}: heads of GGUF files are not supported; take the checkpoint in safetensors")
    config, index = _with_a_layer_more(text, model.config), model.config.shape.layers
    ours, names = f"model.layers.{index}", _NAMES[family]
    names = _Names._make([*(each.format(ours) for each in names[:-1]), names.is_normed])
    stored = ((f"{ours}.", f"{names.layer}."), *config.traits.stored)
    is_random = load_format == "dummy"
    if not is_random and not has_tensor(folder, f"{names.projection}.weight"):
        raise ModelError(
            f"{folder}: the checkpoint has no head for multi-token prediction: there is no {names.projection}.weight"
        )
    cache, hidden = config.caches[index], config.shape.hidden
    assert not isinstance(cache, StateSpec)
    stacked = not is_random and has_tensor(folder, f"{names.layer}.{STACKED[0]}")
    shapes = layer_tensors(config, index, stacked)
    shapes.update({f"{each}.weight": (hidden,) for each in (names.token_norm, names.hidden_norm, names.norm)})
    shapes[f"{names.projection}.weight"] = (hidden, 2 * hidden)
    clock = StageClock()
    source = (
        RandomWeights(seed, clock)
        if is_random
        else Checkpoint(folder, shapes, clock, config.packed, left_out=("",), stored=stored)
    )
    of_kernels = model.kernels, model.dtype, model.device, clock, quantization
    assembler = _HeadAssembler(source, shapes, config, *of_kernels)
    try:
        weights = assembler.head_weights(index, names, model.weights)
    finally:
        if isinstance(source, Checkpoint):
            source.__exit__()
    alone = replace(
        config.shape, layers=1, recurrent=(), state=None, experts=None, sliding_windows=(None,), attention_sinks=None
    )
    config = replace(config, shape=alone, caches=(cache,), routing=None)
    return Decoder(config, model.kernels, model.dtype, model.device, weights, model.max_model_len)


def _with_a_layer_more(text: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    """The decoder's config with the head's layer as one more, which has attention to all tokens."""
    layers, shape = config.shape.layers, config.shape
    more: dict[str, Any] = {"num_hidden_layers": layers + 1, "num_nextn_predict_layers": 0}
    if shape.recurrent:
        kinds = ["linear_attention" if layer in shape.recurrent else "full_attention" for layer in range(layers)]
        more["layer_types"] = [*kinds, "full_attention"]
    if isinstance(kinds_of_mlp := text.get("mlp_layer_types"), list):
        more["mlp_layer_types"] = [*kinds_of_mlp, "sparse"]
    made, packed = ModelConfig.from_dict({**text, **more}), config.packed
    if packed is not None:
        ours = f"model.layers.{layers}."
        named = tuple(each.replace("mtp.layers.0.", ours) for each in packed.ignored)
        packed = replace(packed, ignored=(*named, f"{ours}eh_proj", "mtp.fc"))
    return replace(made, traits=config.traits, packed=packed)


class _HeadAssembler(Assembler):
    """Lays out the tensors of a head."""

    def head_weights(self, index: int, names: _Names, decoder: DecoderWeights) -> DecoderWeights:
        config, kernels, cache = self._config, self._kernels, self._config.caches[index]
        rows = torch.zeros(REPEATED, config.shape.hidden, dtype=self._dtype, device=self._device)
        norms = self._norm(names.token_norm), self._norm(names.hidden_norm)
        inputs = MtpInputs(kernels, rows, decoder.embedding, norms, self._linear(names.projection), config.rms_norm_eps)
        norm, layer = self._norm(names.norm), self._layer(index, cache)
        if names.is_normed:
            return DecoderWeights(inputs, [layer], norm, decoder.lm_head)
        return DecoderWeights(inputs, [layer], None, NormedHead(kernels, decoder.lm_head, norm, config.rms_norm_eps))
