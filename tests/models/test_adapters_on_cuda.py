"""Adapters on CUDA: the logits of the merged weights, on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headway.models.loading import load_model
from tests.kernels.test_cpu_linear import relative_error
from tests.models import lora, test_grouped_checkpoints, tiny
from tests.models.test_adapters import PROMPTS, adapted, check_parity, together
from tests.models.test_gguf import ROUNDING, with_weights

pytest.importorskip("triton")
import tests.kernels.interpreted  # noqa: F401
from headway.kernels.cuda.kernels import CudaKernels

pytestmark = pytest.mark.timeout(600)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("case", ["llama", pytest.param("glm4", marks=pytest.mark.slow)])
def test_logits_are_those_of_the_merged_weights(case: str, tmp_path: Path) -> None:
    check_parity(tmp_path, case, CudaKernels(), DEVICE, sizes={"num_hidden_layers": 1})


def test_over_packed_weights(tmp_path: Path) -> None:
    """Whose gate and up rows are by turns."""
    form, sizes = test_grouped_checkpoints.FORMATS["awq"], {"num_hidden_layers": 1}
    dense = test_grouped_checkpoints.save(tmp_path / "base", form, sizes=sizes)
    hugging_face = with_weights(tiny.build("qwen2", **sizes), dense)
    deltas = lora.save(tmp_path / "a", hugging_face)
    decoder = load_model(tmp_path / "base", torch.float32, CudaKernels(), DEVICE)
    ours = together(adapted(decoder, tmp_path / "a"), PROMPTS[:1], [0])
    expected = tiny.logits(lora.merge(hugging_face, deltas), PROMPTS[0])
    assert relative_error(ours[0], expected) < ROUNDING
