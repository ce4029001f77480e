"""Products on matrix tiles, on any x86: tile_machine carries out their instructions where the processor has none.

    python -m tests.kernels.on_tiles none|attention|int8|int4|int8-weight-only|groups|engine

NUMBA_CPU_FEATURES names them beside the processor's own. It prints how many products came out as the instructions'
order of sums has them, bit for bit; for an engine, how many answers.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from headway.kernels.cpu import choice as cpu_choice
from headway.kernels.cpu.choice import VARIABLE, ways_of
from headway.kernels.cpu.compile import callable_of
from headway.kernels.cpu.jobs import once_per_kind
from headway.kernels.cpu.matrix import configure, has_matrix_tiles, release
from headway.kernels.cpu.simd import BFLOAT16
from headway.kernels.cpu.tiles import keys_on_tiles, values_on_tiles
from headway.kernels.weights import Weight
from tests.kernels import tile_machine

if TYPE_CHECKING:
    from headway.kernels.cpu.kernels import CpuKernels


@contextmanager
def prescribed(ways: dict[str, str]) -> Iterator[None]:
    """Inside, kernels that are made take these ways, and the default for others."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps({"ways": ways}))
        file.flush()
        with patch.dict(os.environ, {VARIABLE: file.name}):
            yield


def kernels_with(ways: dict[str, str]) -> CpuKernels:
    """On tiles, in these ways."""
    from headway.kernels.cpu.kernels import CpuKernels

    with prescribed(ways):
        return CpuKernels(tiles=True)


def check_integers(scheme: str) -> int:
    """Sums of whole numbers are those of vectors, bit for bit, with a gate or without, wherever tiles begin."""
    from headway.kernels.cpu.kernels import CpuKernels
    from tests.kernels.steps import random

    vectors, checked = CpuKernels(tiles=False), 0
    for least in (1, 12):
        tiles = kernels_with({scheme: f"tiles from {least}"})
        for out, width in ((70, 64), (9, 1090), (130, 520)):
            weight, x = random(1, torch.bfloat16, 2 * out, width), random(2, torch.bfloat16, 49, width)
            x[7] *= 1000.0
            weight[3] = 0.0
            for gated in (False, True):
                products = [
                    (kernels.gated_linear if gated else kernels.linear)(Weight(weight.clone(), scheme), None)
                    for kernels in (vectors, tiles)
                ]
                for tokens in (1, 6, 10, 13, 16, 17, 33, 49):
                    expected, got = (linear(x[:tokens]) for linear in products)
                    assert torch.equal(got, expected), (scheme, least, out, width, gated, tokens)
                    checked += 1
            assert torch.equal(
                *(kernels.linear(Weight(weight, scheme), None).rows(torch.arange(out)) for kernels in (vectors, tiles))
            )
    return checked


def check_groups() -> int:
    """Weights with groups of every size and format give the bits of vectors; some are left on these."""
    from headway.kernels.cpu.kernels import CpuKernels
    from tests.kernels.grouped import CASES, UNROUNDED, random_weight
    from tests.kernels.steps import random

    vectors, checked = CpuKernels(tiles=False), 0
    tiles = kernels_with(
        {
            "int4-weight-only": "tiles from 1",
            "int8-weight-only in groups": "tiles from 12",
            "float4-weight-only": "tiles from 6",
        }
    )
    more = [
        ("int4-weight-only", 70, 192, 96, 1),
        ("int4-weight-only", 66, 40, 40, 1),
        ("int8-weight-only", 70, 288, 32, 1),
        ("int8-weight-only", 66, 2048, 1024, 1),
    ]
    for scheme, out, width, size, run in (*CASES, *more):
        for gated, ordered in ((False, False), (True, True)):
            if scheme in UNROUNDED or (gated and out % 2):
                continue
            weight, bias = random_weight(scheme, out, width, size, run, ordered), random(1, torch.float32, out)
            expected, got = (
                (kernels.gated_linear if gated else kernels.linear)(weight, bias) for kernels in (vectors, tiles)
            )
            on_tiles = size != 8 and size != 96  # too few, and no whole tiles
            assert bool(got._tiles) == on_tiles, size  # type: ignore[attr-defined]
            got = copy(got)  # as a process makes it that reads packed weights
            x = random(2, torch.float32, 300, width)
            x[7] *= 1000.0
            x[9, 3] = float("nan")
            for tokens in (1, 12, 15, 16, 17, 33, 300):
                same = torch.isclose(got(x[:tokens]), expected(x[:tokens]), 0, 0, equal_nan=True)
                assert same.all(), (scheme, size, gated, tokens)
                checked += 1
    return checked + check_grouped_experts(tiles)


def check_grouped_experts(kernels: CpuKernels) -> int:
    """Also where each expert has another number of rows, and where pieces of a step are on vectors and on tiles."""
    from tests.kernels.grouped import random_weight
    from tests.kernels.steps import random

    def products(out: int, width: int) -> list[tuple[Weight, None]]:
        weight = random_weight("int8-weight-only", out, width, 32, 1)
        assert weight.groups is not None
        scales = [weight.groups.scales * factor for factor in (1, -2, 3)]
        return [(replace(weight, groups=replace(weight.groups, scales=each)), None) for each in scales]

    gate_up, down = products(2 * 64, 96), products(96, 64)
    mixture = kernels.mixture(gate_up, down, 3)
    chosen = torch.tensor([0] * 5 + [2] * 34).view(-1, 1)
    x = random(7, torch.float32, len(chosen), 96)
    got = mixture(x, chosen, torch.ones(len(chosen), 1), None)
    for number in (0, 2):
        first, second = kernels.gated_linear(*gate_up[number]), kernels.linear(*down[number])
        mine = chosen[:, 0] == number
        assert torch.equal(got[mine], second(first(x[mine]))), number
    return 2


def check_experts(scheme: str) -> int:
    """Rows of a plan, whose experts have different numbers of them, come out as those of each expert alone."""
    from headway.kernels.cpu.kernels import CpuKernels
    from tests.kernels.operations import random_experts
    from tests.kernels.steps import random

    kernels, checked = CpuKernels(tiles=True), 0
    gate_up, down = (
        [(replace(weight, scheme=scheme), bias) for weight, bias in products]
        for products in random_experts(torch.bfloat16, 3, 40, 33)
    )
    mixture = kernels.mixture(gate_up, down, 3)
    chosen = torch.tensor([0] * 19 + [2] * 34).view(-1, 1)
    x = random(7, torch.bfloat16, len(chosen), 40)
    got = mixture(x, chosen, torch.ones(len(chosen), 1), None)
    for number in (0, 2):
        first, second = kernels.gated_linear(*gate_up[number]), kernels.linear(*down[number])
        mine = chosen[:, 0] == number
        assert torch.equal(got[mine], second(first(x[mine]))), number
        checked += 1
    return checked


def check_choice(product: str) -> int:
    """All ways can be timed; what is found of them is one of them."""
    from headway.kernels.cpu.choice import fastest, measured, ways_of

    rates = measured(product, True)
    assert fastest(product, True, rates) in ways_of(product, True) and "tiles" in rates, (product, rates)
    return 1


def check_floats() -> int:
    """A token gets the same among any number of others, and what the instruction's order of sums comes to."""
    from headway.kernels.cpu.kernels import CpuKernels
    from tests.kernels.steps import random
    from tests.kernels.tile_sums import products_of_tiles

    checked = 0
    for out, width in ((70, 64), (9, 1090), (130, 40)):
        weight, bias, x = (
            random(i, torch.bfloat16, *shape) for i, shape in enumerate([(out, width), (out,), (99, width)])
        )
        linear = CpuKernels(tiles=True).linear(Weight(weight), bias)
        expected = products_of_tiles(x, weight, bias)
        for tokens in (1, 7, 16, 17, 33, 49, 99):
            assert torch.equal(linear(x[:tokens]), expected[:tokens]), (out, width, tokens)
            checked += 1
        assert torch.equal(linear.rows(torch.arange(out)), weight)
    return checked


@once_per_kind
def _attention_products(kind: np.uint16) -> Any:
    """The products of one tile of queries with a group of panels, then of the weights with lines, in four tiles."""

    def multiply(tiles, rows, x, x_stride, panels, step_words, steps, scores, weights, weight_stride, lines, out):  # type: ignore[no-untyped-def]
        configure(tiles + rows * 64)
        keys_on_tiles(kind, x, x_stride, panels, panels, step_words, steps, scores, 64 * 4)
        values_on_tiles(kind, weights, weight_stride, lines, 64 * 4, 2, out, 64 * 4)
        release()

    return callable_of(multiply)


def check_attention_products() -> int:
    """Scores and sums of values have the bits of the instruction's order of sums, in steps of any size."""
    from headway.kernels.cpu.kernels import _tiles_of
    from tests.kernels.steps import random
    from tests.kernels.tile_sums import sums_of_tiles

    checked = 0
    for rows, width in ((1, 64), (7, 80), (16, 128), (3, 24)):
        query, keys = random(1, torch.bfloat16, rows, width), random(2, torch.bfloat16, 64, width)
        weights, values = random(3, torch.bfloat16, rows, 64), random(4, torch.bfloat16, 64, 64)
        panels = keys.view(4, 16, width // 2, 2).transpose(1, 2).contiguous()  # [panel, word, token, half]
        lines = values.view(32, 2, 64).transpose(1, 2).contiguous()  # [word, element, half]
        table = torch.tensor([panel.data_ptr() for panel in panels])
        tiles, step_words = _tiles_of(width)
        scores, out = torch.zeros(rows, 64), random(5, torch.float32, rows, 64)
        before = out.clone()
        _attention_products(BFLOAT16)(
            tiles, rows, query.data_ptr(), 2 * width, table.data_ptr(), step_words, width // 2 // step_words,
            scores.data_ptr(), weights.data_ptr(), 2 * 64, lines.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        assert np.array_equal(scores.numpy(), sums_of_tiles(query, keys, 2 * step_words)), (rows, width)
        assert np.array_equal(out.numpy(), sums_of_tiles(weights, values.T, start=before.numpy())), (rows, width)
        checked += 2
    return checked


def check_attention_on_tiles() -> int:
    """Attention is right for every layout of the cache, and a token gets the same in any company and any chunks."""
    from headway.kernels.interface import LayerCache
    from tests.kernels.operations import cache_of, check_attention, check_attention_over_latents
    from tests.kernels.steps import random, step_of

    kernels, checked = kernels_with({"attention": "tiles"}), 0
    before = carried_out()
    steps = [1, 7, 1, 20], [1, 7, 600, 150]
    for number, (heads, kv_heads, width, block_size) in enumerate(
        [(14, 2, 64, 16), (3, 3, 128, 32), (8, 1, 80, 48), (12, 2, 24, 8), (5, 1, 96, 16)]
    ):
        for window, sinks, softcap, keys in ((None, False, None, 0), (37, True, 0.7, 0), (100, False, None, 96)):
            check_attention(
                kernels, "cpu", torch.bfloat16, *steps, heads, kv_heads, width, block_size, window, number,
                has_sinks=sinks, softcap=softcap, first_keys=keys,
            )  # fmt: skip
            checked += 1
    for sizes in ((16, 128, 64, 16), (5, 36, 8, 8)):
        check_attention_over_latents(kernels, "cpu", torch.bfloat16, [1, 20], [300, 70], *sizes, 70, 2 * sizes[3])
        checked += 1
    step, blocks = step_of([30, 1], [1100, 77], 16)
    cache, query = cache_of(blocks, 2, 16, 64, torch.bfloat16, 5), random(6, torch.bfloat16, 31, 4, 64)
    assert isinstance(cache, LayerCache)
    whole = kernels.attention(query, cache, step, 0.125, None)
    for row, first, end, context in ((0, 0, 1, 1071), (0, 9, 27, 1097), (0, 29, 30, 1100), (1, 30, 31, 77)):
        few, _ = step_of([end - first], [context], 16)
        few.block_tables = step.block_tables[row : row + 1]
        assert torch.equal(kernels.attention(query[first:end], cache, few, 0.125, None), whole[first:end]), (row, first)
        checked += 1
    assert has_matrix_tiles() or carried_out() > before
    return checked


def answers(tiles: bool, quantization: str) -> list[list[tuple[int, float]]]:
    """The tokens of some prompts with their log-probabilities, together and then each alone, in chunks."""
    from headway import LLM, SamplingParams

    with patch.object(cpu_choice, "has_matrix_tiles", return_value=tiles):
        llm = LLM(
            "headway/story",
            quantization=quantization,
            num_threads=2,
            max_num_batched_tokens=24,
            max_num_seqs=8,
            weight_cache=False,
        )
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0, ignore_eos=True)
    prompts = ["Once upon a time there was a fox who " + "ran and " * count for count in (0, 1, 5, 12, 30)]
    outputs = llm.generate(prompts, params) + [llm.generate(prompt, params)[0] for prompt in prompts]
    given = [
        [(token, of_token.logprob) for token, of_token in zip(choice.token_ids, choice.logprobs or (), strict=True)]
        for choice in (output.outputs[0] for output in outputs)
    ]
    assert given[: len(prompts)] == given[len(prompts) :], quantization
    return given


def carried_out() -> int:
    """Instructions that tile_machine has carried out; 0 where the processor does it."""
    return 0 if has_matrix_tiles() else tile_machine.instructions()


def check_engine() -> int:
    """Whole models: with weights of whole numbers what comes out on vectors, bit for bit, with floats nearly so."""
    same, of_attention = 0, next(iter(ways_of("attention", False)))
    for quantization in ("none", "int8", "int4"):
        before = carried_out()
        on_vectors = answers(False, quantization)
        assert carried_out() == before
        # Attention's sums are of floats.
        with prescribed({} if quantization == "none" else {"attention": of_attention}):
            on_tiles = answers(True, quantization)
        assert has_matrix_tiles() or carried_out() > before
        for expected, got in zip(on_vectors, on_tiles, strict=True):
            if quantization == "none":
                assert expected[0][1] == pytest.approx(got[0][1], abs=0.05)
            else:
                assert expected == got, quantization
            same += 1
    return same


def main() -> None:
    if not has_matrix_tiles():
        tile_machine.install()
    torch.set_num_threads(2)
    os.environ["HEADWAY_CPU_KERNELS"] = "default"
    scheme = sys.argv[1]
    timed = {
        "int8": ("int8", "bfloat16"),
        "int4": ("int4",),
        "int8-weight-only": ("int8-weight-only",),
        "groups": ("int4-weight-only", "int8-weight-only in groups", "float4-weight-only"),
    }.get(scheme, ())
    alone = {"groups": check_groups, "engine": check_engine}
    if scheme == "attention":
        checked = check_attention_products() + check_attention_on_tiles()
    elif scheme in alone:
        checked = alone[scheme]()
    else:
        checked = (check_floats() if scheme == "none" else check_integers(scheme)) + check_experts(scheme)
    checked += sum(map(check_choice, timed))
    print(checked, "on tiles" if has_matrix_tiles() or carried_out() else "")


if __name__ == "__main__":
    main()
