"""Packed checkpoints on CUDA: the logits of their dense matrices, on a GPU where there is one, else interpreted."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import PreTrainedModel

from headway.llm import LLM, SamplingParams
from headway.models.folder import resolve_model
from headway.models.loading import load_model
from tests.models import gguf_files, test_grouped_checkpoints, test_packed_checkpoints, tiny
from tests.models.paging import whole
from tests.models.test_gguf import WIDE, mixed, with_weights
from tests.models.test_grouped_checkpoints import FORMATS, MIXTURES, STEPS

pytest.importorskip("triton")
import tests.kernels.interpreted  # noqa: F401
from headway.kernels.cuda.experts import CudaMixture
from headway.kernels.cuda.kernels import CudaKernels, PackedLinear

pytestmark = pytest.mark.timeout(600)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = tiny.prompts([7, 1])
LATENTS = {"kv_lora_rank": 40, "q_lora_rank": 24, "qk_nope_head_dim": 16, "v_head_dim": 16}


def check(path: Path, model: PreTrainedModel, packed_parts: bool = True, quantization: str = "none") -> None:
    decoder = load_model(
        resolve_model(str(path)), torch.float32, CudaKernels(), DEVICE, quantization=quantization
    )  # fmt: skip
    ours = torch.cat(whole(decoder, PROMPTS))
    expected = torch.cat([tiny.logits(model, prompt) for prompt in PROMPTS])
    torch.testing.assert_close(ours, expected, atol=3e-5, rtol=1e-4)
    layer = decoder.weights.layers[-1]
    kinds = [
        type(part) for part in (layer.mixer.o, getattr(layer.mlp, "down", None), getattr(layer.mlp, "experts", None))
    ]
    assert (PackedLinear in kinds or CudaMixture in kinds) == packed_parts


@pytest.mark.parametrize(
    "name",
    [
        "awq",
        "fp8_but",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("gptq_ordered", "gptq_8_bits", "nvfp4", "nf4_nested")
        ),
    ],
)
def test_layers_in_groups(name: str, tmp_path: Path) -> None:
    dense = test_grouped_checkpoints.save(tmp_path, FORMATS[name])
    check(tmp_path, with_weights(tiny.build("qwen2"), dense))


def test_scales_in_steps(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 16}
    dense = test_grouped_checkpoints.save(tmp_path, STEPS[32], "llama", sizes)
    check(tmp_path, with_weights(tiny.build("llama", **sizes), dense))


@pytest.mark.parametrize(
    ("name", "case"), [("gptq", "qwen2_moe"), pytest.param("packed", "deepseek_v3", marks=pytest.mark.slow)]
)
def test_experts_and_latents_in_groups(name: str, case: str, tmp_path: Path) -> None:
    sizes = LATENTS if case == "deepseek_v3" else {"num_hidden_layers": 1}
    dense = test_grouped_checkpoints.save(tmp_path, MIXTURES[name], case, sizes)
    check(tmp_path, with_weights(tiny.build(case, **sizes), dense))


def test_rows_of_eight_bits(tmp_path: Path) -> None:
    plain = test_packed_checkpoints.save(tmp_path, test_packed_checkpoints.W8A8)
    check(tmp_path, with_weights(tiny.build("qwen2"), plain))


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    check(tmp_path, test_packed_checkpoints.save_mxfp4(tmp_path))


@pytest.mark.slow
def test_a_gguf_file(tmp_path: Path) -> None:
    """The embedding packed too, and parts of a product in other types."""
    model = tiny.build("qwen2_tied", **WIDE | {"num_hidden_layers": 1})
    plain = gguf_files.write(tmp_path / "model.gguf", model, mixed)
    check(tmp_path / "model.gguf", with_weights(model, plain))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "quantization"), [("qwen2_moe", "int8-weight-only"), ("qwen3_next", "none")])
def test_the_engine_answers_as_on_a_cpu(case: str, quantization: str, tmp_path: Path) -> None:
    """Prompts come in chunks, in company and token by token, to experts with their counts and layers with states."""
    tiny.save(case, tmp_path)
    interpreted = mock.patch("headway.engine.prepare.kernels_for", return_value=CudaKernels())
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    answers = []
    for device, kernels in (("cpu", nullcontext()), (DEVICE, interpreted if DEVICE == "cpu" else nullcontext())):
        with kernels:
            llm = LLM(
                str(tmp_path), dtype="float32", device=device, quantization=quantization, skip_tokenizer_init=True,
                kv_cache_memory=1 << 24, max_model_len=32, max_num_batched_tokens=8, max_num_seqs=4,
            )  # fmt: skip
        answers.append(
            [o.outputs[0].token_ids for o in llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params)]
        )
    assert answers[0] == answers[1]


def test_weights_that_are_rounded_while_they_are_loaded(tmp_path: Path) -> None:
    plain = test_packed_checkpoints.save(tmp_path, None)
    config = json.loads((tmp_path / "config.json").read_text())
    plain["lm_head.weight"] = torch.eye(*plain["lm_head.weight"].shape)  # the head is rounded too
    test_packed_checkpoints.rewrite(tmp_path, config, plain)
    check(tmp_path, with_weights(tiny.build("qwen2"), plain), quantization="int8-weight-only")
