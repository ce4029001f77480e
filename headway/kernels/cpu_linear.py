"""Linear layers on CPU: weights stay row-major as they were loaded, so that nothing is held twice.

Few tokens: each weight row is streamed once from memory and dotted with every token. Many tokens: the
tokens are packed sixteen to a vector (tokens are far fewer bytes than weights) and each weight word is
broadcast against them. Both read the same memory, so one layout serves decode and prefill, and a tied
embedding can share it.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels.cpu_compile import compiled
from headway.kernels.cpu_ir import LANES
from headway.kernels.cpu_simd import (
    KINDS,
    has_bfloat16_dot,
    has_matrix_tiles,
    has_wide_vectors,
    pause,
    read_shared,
    take_ticket,
)
from headway.kernels.cpu_team import Team, arg, job, once_per_kind, tickets
from headway.kernels.cpu_tiles import dot_rows, product_tile_transposed, transpose_words
from headway.kernels.interface import Linear
from headway.kernels.reference import ReferenceLinear

# Up to so many tokens are dotted, at most _DOTTED_AT_ONCE of them in one pass over a tile of weight rows,
# which then lies in the first-level cache for the next pass.
MOST_DOTTED = 24
_DOTTED_AT_ONCE = 6
_TILE_ROWS = 8
_TILE_PANELS = 3
# A share of weight rows is what one thread takes at a time, small enough that threads finish together.
_SHARE_BYTES = 256 * 1024
# Packed tokens that stay in a core's second-level cache while a share of rows passes by.
_PACKED_BYTES = 384 * 1024


@compiled()
def _dot(kind, tokens, weight, x, words, bias, out, stride):  # type: ignore[no-untyped-def]
    """dot_rows for a token count known only now."""
    if tokens == 1:
        dot_rows(kind, 8, 1, weight, x, words, bias, out, stride)
    elif tokens == 2:
        dot_rows(kind, 8, 2, weight, x, words, bias, out, stride)
    elif tokens == 3:
        dot_rows(kind, 4, 3, weight, x, words, bias, out, stride)
    elif tokens == 4:
        dot_rows(kind, 4, 4, weight, x, words, bias, out, stride)
    elif tokens == 5:
        dot_rows(kind, 4, 5, weight, x, words, bias, out, stride)
    else:
        dot_rows(kind, 4, 6, weight, x, words, bias, out, stride)


@compiled()
def _dot_shares(kind, size, tile, share, tickets, weight, bias, x, out, tokens, in_words, features):  # type: ignore[no-untyped-def]
    """Take shares of weight rows until none is left; the last tile of all overlaps the one before it."""
    passes = (tokens + _DOTTED_AT_ONCE - 1) // _DOTTED_AT_ONCE
    while True:
        first = take_ticket(tickets) * share
        if first >= features:
            return
        for row in range(first, min(first + share, features), tile):
            row = min(row, features - tile)
            row_bias = bias + row * size if bias != 0 else 0
            for index in range(passes):
                token = index * tokens // passes
                _dot(
                    kind, (index + 1) * tokens // passes - token, weight + row * in_words * 4,
                    x + token * in_words * 4, in_words, row_bias, out + (token * features + row) * size,
                    features * size,
                )  # fmt: skip


_FEW = struct.Struct("10q")


@once_per_kind
def _few_job(kind: Any) -> int:
    def few(a: int) -> None:
        _dot_shares(
            kind, arg(a, 0), arg(a, 1), arg(a, 2), tickets(a, 0), arg(a, 3),
            arg(a, 4), arg(a, 5), arg(a, 6), arg(a, 7), arg(a, 8), arg(a, 9),
        )  # fmt: skip

    return job(few)


@compiled()
def _pack_panel(panel, x, packed, tokens, words, rows):  # type: ignore[no-untyped-def]
    """Sixteen tokens from x [tokens, words] to packed[panel, word, lane]; past the end the last one repeats."""
    for lane in range(LANES):
        rows[lane] = x + min(panel * LANES + lane, tokens - 1) * words * 4
    for word in range(0, words, LANES):
        transpose_words(rows.ctypes.data, word * 4, packed + (panel * words + word) * 64)


@compiled()
def _pack_panels(tickets, packed_panels, x, packed, tokens, words):  # type: ignore[no-untyped-def]
    """Pack panels until none is left, then wait for those that other threads are still at."""
    rows = np.empty(LANES, np.int64)
    panels = (tokens + LANES - 1) // LANES
    while True:
        panel = take_ticket(tickets)
        if panel >= panels:
            break
        _pack_panel(panel, x, packed, tokens, words, rows)
        take_ticket(packed_panels)
    while read_shared(packed_panels) < panels:
        pause()


@compiled()
def _product_row_tile(kind, size, weight, words, bias, packed, out, out_stride, first_token, last_token):  # type: ignore[no-untyped-def]
    """Eight weight rows against the packed tokens first_token .. last_token - 1."""
    panel_bytes = words * 64
    token = first_token
    while token < last_token:
        left = last_token - token
        base = packed + token // LANES * panel_bytes
        target = out + token * out_stride
        if left > 2 * LANES and (left <= 3 * LANES or left > 4 * LANES):
            product_tile_transposed(
                kind, 8, 3, weight, words * 4, base, panel_bytes, words, bias, target, out_stride, left
            )  # fmt: skip
            token += 3 * LANES
        elif left > LANES:
            product_tile_transposed(
                kind, 8, 2, weight, words * 4, base, panel_bytes, words, bias, target, out_stride, left
            )  # fmt: skip
            token += 2 * LANES
        else:
            product_tile_transposed(
                kind, 8, 1, weight, words * 4, base, panel_bytes, words, bias, target, out_stride, left
            )  # fmt: skip
            token += LANES


@compiled()
def _product_shares(kind, size, share, chunk, tickets, weight, bias, packed, out, tokens, words, features):  # type: ignore[no-untyped-def]
    while True:
        first = take_ticket(tickets) * share
        if first >= features:
            return
        last = min(first + share, features)
        for token in range(0, tokens, chunk):
            for row in range(first, last, _TILE_ROWS):
                row = min(row, features - _TILE_ROWS)
                row_bias = bias + row * size if bias != 0 else 0
                _product_row_tile(
                    kind, size, weight + row * words * 4, words, row_bias, packed, out + row * size,
                    features * size, token, min(token + chunk, tokens),
                )  # fmt: skip


_MANY = struct.Struct("11q")


@once_per_kind
def _many_job(kind: Any) -> int:
    def many(a: int) -> None:
        x, packed, tokens, words = arg(a, 5), arg(a, 6), arg(a, 8), arg(a, 9)
        _pack_panels(tickets(a, 0), tickets(a, 1), x, packed, tokens, words)
        _product_shares(
            kind, arg(a, 0), arg(a, 1), arg(a, 2), tickets(a, 2), arg(a, 3),
            arg(a, 4), packed, arg(a, 7), tokens, words, arg(a, 10),
        )  # fmt: skip

    return job(many)


class TiledLinear:
    """A row-major weight multiplied by our own tiles; bfloat16 with AVX512-BF16, or float32.

    Steps of more than most_tokens tokens go to torch.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, team: Team, most_tokens: int | None = None) -> None:
        self.weight = weight.contiguous()
        self.bias = bias.contiguous() if bias is not None else None
        self.out_features, in_features = weight.shape
        self._team = team
        self._most_tokens = most_tokens
        self._kind = KINDS[weight.dtype]
        self._size = weight.element_size()
        self._words = in_features * self._size // 4
        self._weight_address = self.weight.data_ptr()
        self._bias_address = self.bias.data_ptr() if self.bias is not None else 0
        row_bytes = self._words * 4
        self._share = max(_TILE_ROWS, _SHARE_BYTES // row_bytes // _TILE_ROWS * _TILE_ROWS)
        self._chunk = max(LANES, _PACKED_BYTES // row_bytes // LANES * LANES)

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Whether tiles cover this weight: whole vectors along its input, at least one tile along its output."""
        return (
            weight.dtype in (torch.bfloat16, torch.float32)
            and weight.shape[1] * weight.element_size() % (4 * LANES) == 0
            and weight.shape[0] >= _TILE_ROWS
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        tokens = x.shape[0]
        if self._most_tokens is not None and tokens > self._most_tokens:
            return F.linear(x, self.weight, self.bias)
        x = x.contiguous()
        out = torch.empty((tokens, self.out_features), dtype=x.dtype)
        if tokens == 0:
            return out
        weight, bias, size, words = self._weight_address, self._bias_address, self._size, self._words
        if tokens <= MOST_DOTTED:
            tile = 8 if tokens <= 2 else 4
            arguments = (size, tile, self._share, weight, bias, x.data_ptr(), out.data_ptr(), tokens, words)
            self._team.run(_few_job(self._kind), _FEW, (*arguments, self.out_features))
            return out
        packed = torch.empty(-(-tokens // LANES) * words * LANES, dtype=torch.int32)
        self._team.run(
            _many_job(self._kind),
            _MANY,
            (
                size, self._share, self._chunk, weight, bias, x.data_ptr(), packed.data_ptr(), out.data_ptr(), tokens,
                words, self.out_features,
            ),
        )  # fmt: skip
        return out


def linear_for(weight: Tensor, bias: Tensor | None, team: Team) -> Linear:
    """The fastest way to multiply weight [out, in] on this processor, sharing the weight's memory."""
    has_tiles = has_bfloat16_dot() if weight.dtype == torch.bfloat16 else has_wide_vectors()
    if not (has_tiles and TiledLinear.takes(weight)):
        return ReferenceLinear(weight, bias)
    # AMX multiplies many tokens several times faster than vectors do, and oneDNN, under torch, has it.
    leave_to_torch = weight.dtype == torch.bfloat16 and has_matrix_tiles()
    return TiledLinear(weight, bias, team, most_tokens=MOST_DOTTED if leave_to_torch else None)
