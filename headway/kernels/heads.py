"""The layout that kernels ask of queries, keys and values."""

from __future__ import annotations

from torch import Tensor


def check_heads(name: str, x: Tensor) -> None:
    """Raise ValueError unless x [T, H, D] is dense along heads and dimensions; tokens may be strided."""
    if x.dim() != 3 or x.stride(2) != 1 or (x.shape[1] > 1 and x.stride(1) != x.shape[2]):
        raise ValueError(
            f"{name} of shape {tuple(x.shape)} has strides {x.stride()}; its heads and dimensions must be dense: "
            "pass a view of shape [tokens, heads, head_dim] or call .contiguous()"
        )
