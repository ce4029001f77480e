"""What is asked of a prompt that nothing is generated for: one vector, of the model's last hidden states."""

from __future__ import annotations

import msgspec


class PoolingParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How the hidden states of a prompt's tokens become one vector."""

    pooling: str = "last"  # last, the last token's state; or mean, of all tokens
    normalize: bool = True  # to length 1, behind the cut
    dimensions: int | None = None  # keep only so many of the first numbers; None keeps all
    # With these, the vector has the logits of these tokens behind the last one, and nothing else applies.
    token_ids: tuple[int, ...] = ()

    @property
    def takes_all(self) -> bool:
        """Every token's state is needed, also those that the prefix cache knows."""
        return self.pooling == "mean" and not self.token_ids
