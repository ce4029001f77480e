"""A checkpoint with another number of KV heads: groups of heads averaged, or heads repeated (Ainslie et al., 2023)."""

from __future__ import annotations

import json
import re
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from headway.quantize.folder import new_folder

_KEYS_OR_VALUES = re.compile(r"\.self_attn\.[kv]_proj\.(weight|bias)$")


def pool_heads(folder: Path, output: Path, kv_heads: int) -> None:
    """Write the checkpoint in `folder` with so many KV heads in each layer, and train nothing.

    Fewer heads are means of neighbours, whose queries then share them; more are copies, which change no answer.

    Raises:
        ValueError: the model has no KV heads of this kind, or these do not divide each other and the query heads.
    """
    config = json.loads((folder / "config.json").read_text())
    heads, now = config.get("num_attention_heads"), config.get("num_key_value_heads")
    files = sorted(folder.glob("*.safetensors"))
    if not isinstance(heads, int) or not isinstance(now, int) or not files or "quantization_config" in config:
        raise ValueError(f"--kv-heads {kv_heads}: {folder} is no plain checkpoint of a model with KV heads")
    if heads % kv_heads or max(now, kv_heads) % min(now, kv_heads):
        raise ValueError(
            f"--kv-heads is {kv_heads}; it must divide the {heads} query heads, and divide or be a multiple of the "
            f"{now} KV heads of the model"
        )
    changed = 0
    with new_folder(output) as draft:
        for file in files:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                    tensor = tensors.get_tensor(name)
                    if _KEYS_OR_VALUES.search(name):
                        tensor, changed = _with_heads(tensor, now, kv_heads), changed + 1
                    draft.add(name, tensor)
        if not changed:
            raise ValueError(f"--kv-heads {kv_heads}: {folder} has no matrices of keys and values of their own")
        draft.finish(folder, config | {"num_key_value_heads": kv_heads})


def _with_heads(tensor: Tensor, now: int, wanted: int) -> Tensor:
    """A projection of shape [now * head dimension, ...] as one of `wanted` heads."""
    apart = tensor.unflatten(0, (now, -1))
    if wanted > now:
        return apart.repeat_interleave(wanted // now, 0).flatten(0, 1)
    return apart.unflatten(0, (wanted, -1)).float().mean(1).to(tensor.dtype).flatten(0, 1)
