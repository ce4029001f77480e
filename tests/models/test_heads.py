"""Heads for drafts say what a few lines of torch around Hugging Face's own layer say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from headway.kernels import kernels_for
from headway.kernels.interface import Kernels
from headway.kernels.reference import ReferenceKernels
from headway.models.config import ModelError
from headway.models.heads import MtpInputs, load_mtp_head
from headway.models.loading import load_model
from tests.models import tiny
from tests.models.paging import PagedModel

TOLERANCE = 2e-4
CASES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_hidden_layers": 3},
    "glm4_moe": {"num_hidden_layers": 3},
    "glm4_moe_lite": {"num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    "qwen3_next": {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "full_attention"]},
    "qwen3_5": {"num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "full_attention"]},
    "qwen3_5_moe": {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "full_attention"]},
}
NAMES = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
APART = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")


def save(case: str, folder: Path, **further: Any) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A model whose last layer is saved as that of a head; the model, and the head's other tensors by NAMES."""
    changes = CASES[case] | further
    model = tiny.build(case, **changes)
    model.save_pretrained(folder)
    layers, hidden = changes["num_hidden_layers"] - 1, model.config.hidden_size
    offset, generator = int(case.startswith("qwen")), torch.Generator().manual_seed(1)
    more = {name: 1 - offset + 0.3 * torch.randn(hidden, generator=generator) for name in NAMES if "norm" in name}
    more["eh_proj"] = torch.randn(hidden, 2 * hidden, generator=generator) / hidden**0.5
    last, apart = f"model.layers.{layers}.", "mtp.layers.0." if offset else f"model.layers.{layers}."
    tensors = {name.replace(last, apart): each for name, each in load_file(folder / "model.safetensors").items()}
    for name, theirs in zip(NAMES, APART, strict=True):
        tensors[f"mtp.{theirs}.weight" if offset else f"{last}{name}.weight"] = more[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    for key in ("layer_types", "mlp_layer_types"):
        if isinstance(config.get(key), list):
            config[key] = config[key][:layers]
    (folder / "config.json").write_text(json.dumps(config))
    return model, more


class Reference:
    """The head by its published description, around Hugging Face's layer."""

    def __init__(self, case: str, model: PreTrainedModel, more: dict[str, Tensor]) -> None:
        self.model, self.more, self.offset = model, more, int(case.startswith("qwen"))
        self.layer = model.model.layers[-1]
        model.config.num_hidden_layers -= 1
        model.model.layers = model.model.layers[:-1]

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.model.config.rms_norm_eps).rsqrt()
        return x * scale * (self.more[name] + self.offset)

    def hidden(self, tokens: list[int]) -> Tensor:
        """The decoder's results [T, hidden]."""
        return self.model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]

    def __call__(self, hidden: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Logits [T, vocab], and what the head reads next [T, hidden]; of results and the tokens behind each."""
        embedded = self.model.model.embed_tokens(torch.tensor(tokens))
        x = torch.cat([self.norm(embedded, "enorm"), self.norm(hidden, "hnorm")], 1) @ self.more["eh_proj"].T
        count, positions = len(tokens), torch.arange(len(tokens))[None]
        turned = self.model.model.rotary_emb(x[None], positions)
        mask = torch.full((count, count), torch.finfo(x.dtype).min).triu(1)[None, None]
        made = self.layer(x[None], attention_mask=mask, position_ids=positions, position_embeddings=turned)
        made = (made[0] if isinstance(made, tuple) else made).view(count, -1)
        normed = self.norm(made, "shared_head.norm")
        return self.model.lm_head(normed), normed if self.offset else made


@pytest.mark.parametrize("kernels", [ReferenceKernels(), kernels_for("cpu", torch.float32)], ids=["reference", "cpu"])
@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_logits_of_a_head_equal_the_reference(tmp_path: Path, case: str, kernels: Kernels) -> None:
    """Of results of the decoder in two steps, and then of its own."""
    reference = Reference(case, *save(case, tmp_path))
    (tokens,) = tiny.prompts([21])
    given = reference.hidden(tokens[:-1])
    logits, carried = reference(given, tokens[1:])
    next_token = int(logits[-1].argmax())
    further, _ = reference(torch.cat([given, carried[-1:]]), [*tokens[1:], next_token])
    assert logits.std() > 0.5
    model = load_model(tmp_path, torch.float32, kernels)
    head = load_mtp_head(tmp_path, model, "auto", 0, "none")
    inputs = head.weights.embedding
    assert isinstance(inputs, MtpInputs) and len(head.config.caches) == 1
    paged = PagedModel(head, [[*tokens[1:], next_token]])
    (sequence,) = paged.sequences
    for rows in (given[:13], given[13:], carried[-1:]):
        inputs.give(rows)
        paged.step([(sequence, len(rows))])
    (ours,) = paged.all_logits()
    assert (ours - further).abs().max() <= TOLERANCE


def test_what_has_no_head_is_refused_by_name(tmp_path: Path) -> None:
    def refused(**options: Any) -> str:
        model = load_model(tmp_path, torch.float32, ReferenceKernels())
        with pytest.raises(ModelError) as error:
            load_mtp_head(tmp_path, model, "auto", 0, "none", **options)
        assert "\n" not in str(error.value)
        return str(error.value)

    tiny.save("llama", tmp_path)
    assert "no head for multi-token prediction is known of this architecture" in refused()
    tiny.save("deepseek_v3", tmp_path)
    assert "the checkpoint has no head for multi-token prediction: there is no model.layers.3.eh_proj" in refused()
    save("glm4_moe", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"model.layers.2.hnorm.weight": torch.ones(5)}, path, {"format": "pt"})
    assert "tensor model.layers.2.hnorm.weight has shape [5], but config.json asks for [48]" in refused()
