"""A head of EAGLE-3 says what the published description says, around Hugging Face's attention of Llama."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from headway.kernels import kernels_for
from headway.kernels.interface import Kernels
from headway.kernels.reference import ReferenceKernels
from headway.models.config import ModelError
from headway.models.eagle import EagleInputs, load_eagle_head
from headway.models.loading import load_model
from tests.models import tiny
from tests.models.paging import PagedModel

HIDDEN, VOCAB, DRAFTED, TAPS = 48, 131, 90, [0, 2, 3]
MODEL = {"num_hidden_layers": 5, "head_dim": 12, "max_position_embeddings": 256, "eos_token_id": 0}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFTED,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": TAPS},
}
SHAPES = {
    "fc": (HIDDEN, 3 * HIDDEN),
    "midlayer.self_attn.q_proj": (64, 2 * HIDDEN),
    "midlayer.self_attn.k_proj": (32, 2 * HIDDEN),
    "midlayer.self_attn.v_proj": (32, 2 * HIDDEN),
    "midlayer.self_attn.o_proj": (HIDDEN, 64),
    "midlayer.mlp.gate_proj": (64, HIDDEN),
    "midlayer.mlp.up_proj": (64, HIDDEN),
    "midlayer.mlp.down_proj": (HIDDEN, 64),
    "lm_head": (DRAFTED, HIDDEN),
}
NORMS = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")


def save(folder: Path, **changes: Any) -> dict[str, Tensor]:
    """A random head for a tiny model: its tensors."""
    generator = torch.Generator().manual_seed(3)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) * 1.2 / shape[1] ** 0.5
        for name, shape in SHAPES.items()
    }
    tensors |= {f"{name}.weight": 1 + 0.3 * torch.randn(HIDDEN, generator=generator) for name in NORMS}
    ids = torch.randperm(VOCAB, generator=generator)[:DRAFTED].sort().values
    tensors |= {"d2t": ids - torch.arange(DRAFTED), "t2d": torch.isin(torch.arange(VOCAB), ids)}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return tensors


class Reference:
    def __init__(self, model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
        self.model, self.tensors = model, tensors
        config = LlamaConfig(**{key: value for key, value in CONFIG.items() if key != "architectures"})
        config._attn_implementation = "eager"
        self.attention, self.rotary = LlamaAttention(config, 0).eval(), LlamaRotaryEmbedding(config)
        for part in "qkvo":
            linear = nn.Linear(1, 1, bias=False)
            linear.weight = nn.Parameter(tensors[f"midlayer.self_attn.{part}_proj.weight"])
            setattr(self.attention, f"{part}_proj", linear)
        self.ids = tensors["d2t"] + torch.arange(DRAFTED)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * self.tensors[f"{name}.weight"]

    def layers(self, tokens: list[int]) -> Tensor:
        """What the three layers of the model give [T, 3 hidden]."""
        states = self.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
        return torch.cat([states[tap + 1][0] for tap in TAPS], 1)

    def hidden(self, tokens: list[int]) -> Tensor:
        return self.layers(tokens) @ self.tensors["fc.weight"].T

    def __call__(self, hidden: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Logits [T, drafted], and what the head reads next [T, hidden]."""
        count, positions = len(tokens), torch.arange(len(tokens))[None]
        embedded = self.model.model.embed_tokens(torch.tensor(tokens))
        x = torch.cat([self.norm(embedded, NORMS[0]), self.norm(hidden, NORMS[1])], 1)[None]
        mask = torch.full((count, count), torch.finfo(x.dtype).min).triu(1)[None, None]
        turned = self.rotary(x, positions)
        added = self.attention(hidden_states=x, position_embeddings=turned, attention_mask=mask)[0]
        carried = hidden + added.view(count, -1)
        normed, weights = self.norm(carried, NORMS[2]), self.tensors
        gate, up, down = (weights[f"midlayer.mlp.{part}_proj.weight"].T for part in ("gate", "up", "down"))
        carried = carried + (nn.functional.silu(normed @ gate) * (normed @ up)) @ down
        return self.norm(carried, "norm") @ weights["lm_head.weight"].T, carried


@pytest.mark.parametrize("kernels", [ReferenceKernels(), kernels_for("cpu", torch.float32)], ids=["reference", "cpu"])
@torch.inference_mode()
def test_logits_of_a_head_equal_the_reference(tmp_path: Path, kernels: Kernels) -> None:
    """Of what the model's layers give in two steps, and then of its own result."""
    reference = Reference(tiny.save("llama", tmp_path, MODEL), save(tmp_path / "head"))
    (tokens,) = tiny.prompts([21])
    given = reference.hidden(tokens[:-1])
    logits, carried = reference(given, tokens[1:])
    further = int(reference.ids[int(logits[-1].argmax())])
    expected, _ = reference(torch.cat([given, carried[-1:]]), [*tokens[1:], further])
    assert expected.std() > 0.5
    model = load_model(tmp_path, torch.float32, kernels)
    head = load_eagle_head(tmp_path / "head", model, "none")
    inputs = head.weights.embedding
    assert isinstance(inputs, EagleInputs) and inputs.ids == reference.ids.tolist() and model.taps == tuple(TAPS)
    paged = PagedModel(model, [tokens[:-1]])
    paged.step([(paged.sequences[0], 20)])
    kept = inputs.kept(torch.empty(0))
    assert (kept - reference.layers(tokens[:-1])).abs().max() < 1e-4
    drafting = PagedModel(head, [[*tokens[1:], further]])
    (sequence,) = drafting.sequences
    for rows in (inputs.read(kept[:13]), inputs.read(kept[13:]), carried[-1:]):
        inputs.give(rows)
        drafting.step([(sequence, len(rows))])
    (ours,) = drafting.all_logits()
    assert (ours - expected).abs().max() <= 2e-4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["MedusaModel"]}, "is no head of EAGLE-3: its config.json names ['MedusaModel']"),
        ({"vocab_size": 200}, "for a model with a vocabulary of 200 tokens; this one has 131"),
        ({"num_hidden_layers": 2}, "has 2 layers; only heads of one are supported"),
        ({"norm_before_residual": True}, "norm_before_residual, and heads that read one layer, are not supported"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}}, "reads the layers [0, 2, 5]"),
        ({"draft_vocab_size": 91}, "tensor lm_head.weight has shape [90, 48], but config.json asks for [91, 48]"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_what_differs(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    tiny.save("llama", tmp_path, MODEL)
    save(tmp_path / "head", **changes)
    model = load_model(tmp_path, torch.float32, ReferenceKernels())
    with pytest.raises(ModelError) as error:
        load_eagle_head(tmp_path / "head", model, "none")
    assert said in str(error.value) and "\n" not in str(error.value)
