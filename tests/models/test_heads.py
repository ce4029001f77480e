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
from headway.models.gguf.config import folder_of
from headway.models.heads import MtpInputs, load_mtp_head
from headway.models.loading import load_model
from tests.models import gguf_files, tiny
from tests.models.paging import PagedModel

TOLERANCE = 2e-4
CASES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_hidden_layers": 3},
    "glm4_moe": {"num_hidden_layers": 3},
    "glm4_moe_lite": {"num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    "qwen3_next": {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "full_attention"]},
    "qwen3_5": {"num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "full_attention"]},
    "mimo": {"num_hidden_layers": 3},
    "qwen3_5_moe": {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "full_attention"]},
}
NAMES = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
# What checkpoints call these, and the layer, where they are not of the layer behind the last.
THEIRS = {
    "qwen": ("mtp.layers.0.", "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
    "mimo": (
        "model.mtp_layers.0.",
        "model.mtp_layers.0.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    ),
}


def save(case: str, folder: Path, **further: Any) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A model whose last layer is saved as that of a head; the model, and the head's other tensors by NAMES."""
    changes = CASES[case] | further
    model = tiny.build("qwen2" if case == "mimo" else case, **changes)
    model.save_pretrained(folder)
    layers, hidden = changes["num_hidden_layers"] - 1, model.config.hidden_size
    offset, generator = int(case.startswith("qwen")), torch.Generator().manual_seed(1)
    more = {name: 1 - offset + 0.3 * torch.randn(hidden, generator=generator) for name in NAMES if "norm" in name}
    more["eh_proj"] = torch.randn(hidden, 2 * hidden, generator=generator) / hidden**0.5
    last = f"model.layers.{layers}."
    layer, rest, named = THEIRS.get(case[:4], (last, last, NAMES))
    tensors = {name.replace(last, layer): each for name, each in load_file(folder / "model.safetensors").items()}
    tensors |= {f"{rest}{theirs}.weight": more[name] for name, theirs in zip(NAMES, named, strict=True)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"} if case == "mimo" else {}
    for key in ("layer_types", "mlp_layer_types"):
        if isinstance(config.get(key), list):
            config[key] = config[key][:layers]
    (folder / "config.json").write_text(json.dumps(config))
    return model, more


def save_gguf(case: str, folder: Path, **further: Any) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """The same with a GGUF file beside it, model.gguf, which has all of it."""
    model, more = save(case, folder, **further)
    last = model.config.num_hidden_layers - 1
    head = {f"model.layers.{last}.{name}.weight": each for name, each in more.items()}
    gguf_files.write(folder / "model.gguf", model, lambda name: "F32", head=head)
    return model, more


class Reference:
    """The head by its published description, around Hugging Face's layer."""

    def __init__(self, case: str, model: PreTrainedModel, more: dict[str, Tensor]) -> None:
        self.model, self.more, self.case, self.offset = model, more, case, int(case.startswith("qwen"))
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
        parts = [self.norm(embedded, "enorm"), self.norm(hidden, "hnorm")]
        x = torch.cat(parts[::-1] if self.case == "mimo" else parts, 1) @ self.more["eh_proj"].T
        count, positions = len(tokens), torch.arange(len(tokens))[None]
        turned = self.model.model.rotary_emb(x[None], positions)
        mask = torch.full((count, count), torch.finfo(x.dtype).min).triu(1)[None, None]
        made = self.layer(x[None], attention_mask=mask, position_ids=positions, position_embeddings=turned)
        made = (made[0] if isinstance(made, tuple) else made).view(count, -1)
        normed = self.norm(made, "shared_head.norm")
        return self.model.lm_head(normed), normed if self.case[:4] in THEIRS else made


@pytest.mark.parametrize("kernels", [ReferenceKernels(), kernels_for("cpu", torch.float32)], ids=["reference", "cpu"])
@pytest.mark.parametrize("case", CASES)
def test_logits_of_a_head_equal_the_reference(tmp_path: Path, case: str, kernels: Kernels) -> None:
    check(Reference(case, *save(case, tmp_path)), tmp_path, kernels)


@pytest.mark.parametrize(
    ("case", "further"),
    [
        ("glm4_moe", {"n_group": 1, "topk_group": 1}),
        ("qwen3_next", {"num_hidden_layers": 4, "layer_types": None, "full_attention_interval": 2}),
        ("qwen3_5", {"num_hidden_layers": 4, "layer_types": None, "full_attention_interval": 2}),
    ],
)
def test_a_head_of_a_gguf_file_is_that_of_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, further: dict[str, Any]
) -> None:
    monkeypatch.setattr("headway.models.gguf.config.cache_folder", lambda: tmp_path / "cache")
    reference = Reference(case, *save_gguf(case, tmp_path, **further))
    check(reference, folder_of(tmp_path / "model.gguf"), kernels_for("cpu", torch.float32))


@torch.inference_mode()
def check(reference: Reference, folder: Path, kernels: Kernels) -> None:
    """Compare logits of results of the decoder in two steps, and then of the head's own."""
    (tokens,) = tiny.prompts([21])
    given = reference.hidden(tokens[:-1])
    logits, carried = reference(given, tokens[1:])
    next_token = int(logits[-1].argmax())
    further, _ = reference(torch.cat([given, carried[-1:]]), [*tokens[1:], next_token])
    assert logits.std() > 0.5
    model = load_model(folder, torch.float32, kernels)
    head = load_mtp_head(folder, model, "auto", 0, "none")
    inputs = head.weights.embedding
    assert isinstance(inputs, MtpInputs) and len(head.config.caches) == 1
    paged = PagedModel(head, [[*tokens[1:], next_token]])
    (sequence,) = paged.sequences
    for rows in (given[:13], given[13:], carried[-1:]):
        inputs.give(rows)
        paged.step([(sequence, len(rows))])
    (ours,) = paged.all_logits()
    assert (ours - further).abs().max() <= TOLERANCE


def test_what_has_no_head_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(folder: Path = tmp_path) -> str:
        model = load_model(folder, torch.float32, ReferenceKernels())
        with pytest.raises(ModelError) as error:
            load_mtp_head(folder, model, "auto", 0, "none")
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
    monkeypatch.setattr("headway.models.gguf.config.cache_folder", lambda: tmp_path / "cache")
    file = tmp_path / "alone.gguf"
    gguf_files.write(file, tiny.build("glm4_moe", n_group=1, topk_group=1), lambda name: "F32")
    assert "the checkpoint has no head for multi-token prediction: there is no nextn_predict" in refused(
        folder_of(file)
    )
