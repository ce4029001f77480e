"""Whether the engine says the same: with its kernels and with plain torch on this device, alone and in company.

Log-probabilities of prompts with the engine's kernels are held against those with the reference kernels in float32. In
half precision the reference kernels lose something too, which is the measure of what is allowed. Tokens of greedy
requests are compared alone, in a batch, in chunks and after a cached prefix: in float32 they must be the same; in
bfloat16 products differ in their last bits with the number of rows, so there it is said how many are. Products with
packed matrices, and mixtures of experts, are held against those of the same numbers in float64.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks.checkpoint import SHAPES
from benchmarks.gpu import formats
from benchmarks.gpu.part import Flaw, Machine, Row, Tasks
from headway import LLM, SamplingParams
from headway.kernels.reference import ReferenceKernels

# More than rounding alone explains: of the reference's own loss in half precision, and beside it.
_MOST_OF_THEIRS, _MORE = 1.5, 2e-3
_WORST_FLOAT32 = 3e-4
_ANSWER = 32

_TWO_LAYERS = {"num_hidden_layers": 2, "max_position_embeddings": 2048}
MODELS: dict[str, dict[str, Any]] = {
    "llama, heads of 128": {**SHAPES["llama-3.1-8b"], **_TWO_LAYERS, "vocab_size": 32000, "intermediate_size": 4096},
    "qwen2, biases, heads of 64": {**SHAPES["qwen2.5-0.5b"], **_TWO_LAYERS},
    "mistral, a window": {
        **SHAPES["llama-3.1-8b"], **_TWO_LAYERS, "architectures": ["MistralForCausalLM"], "model_type": "mistral",
        "vocab_size": 32000, "intermediate_size": 4096, "sliding_window": 100, "rope_scaling": None,
    },
}  # fmt: skip
PROMPTS = [[(7 * i + 31 * j) % 30000 + 5 for j in range(length)] for i, length in enumerate((1, 7, 65, 300, 700))]
SMALL = [[(7 * i + 31 * j) % 500 + 5 for j in range(length)] for i, length in enumerate((3, 40))]


def tasks(machine: Machine) -> Tasks:
    """One for each format of weights and type, then for each model and type, then tokens by type."""
    models = {"tiny": SHAPES["tiny"]} if machine.small else MODELS
    found = formats.agreement(machine)
    for name, config in models.items():
        exact = functools.cache(partial(_logprobs, machine, config, "float32", True))
        for dtype in ("float32", "bfloat16", "float16"):
            found[f"{name}, {dtype}"] = partial(_against_torch, machine, config, dtype, exact)
    shape = "tiny" if machine.small else "qwen2.5-0.5b"
    for dtype in ("float32", "bfloat16"):
        found[f"tokens of {shape}, {dtype}"] = partial(_in_company, machine, SHAPES[shape], dtype)
    return found


def _engine(machine: Machine, config: dict[str, Any], dtype: str, by_torch: bool = False, **settings: Any) -> LLM:
    """An engine of random weights, which are the same for every kind of kernels."""
    folder = machine.folder / "agreement"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    kernels: AbstractContextManager[object] = nullcontext()
    if by_torch:
        kernels = mock.patch("headway.engine.prepare.kernels_for", return_value=ReferenceKernels())
    defaults = {"kv_cache_memory": 1 << (24 if machine.small else 30), "max_model_len": 512 if machine.small else 2048}
    with kernels:
        return LLM(
            str(folder), load_format="dummy", device=machine.device, dtype=dtype, skip_tokenizer_init=True,
            **{**defaults, **settings},
        )  # fmt: skip


def _logprobs(machine: Machine, config: dict[str, Any], dtype: str, by_torch: bool) -> torch.Tensor:
    """The log-probability of every token of all prompts, except the first of each."""
    llm = _engine(machine, config, dtype, by_torch)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in _prompts(machine)], params)
    found = [each.logprob for output in outputs for each in output.prompt_logprobs or [] if each is not None]
    return torch.tensor(found, dtype=torch.float64)


def _prompts(machine: Machine) -> list[list[int]]:
    return SMALL if machine.small else PROMPTS


def _against_torch(machine: Machine, config: dict[str, Any], dtype: str, exact: Any) -> Iterable[Row]:
    """Raises Flaw where the engine's kernels lose more than plain torch does in that type."""
    ours = _logprobs(machine, config, dtype, False)
    error = _error(ours, exact())
    theirs = _error(_logprobs(machine, config, dtype, True), exact()) if dtype != "float32" else 0.0
    yield {"dtype": dtype, "rms_error": error, "of_torch": theirs, "tokens": len(ours)}
    allowed = _WORST_FLOAT32 if dtype == "float32" else _MOST_OF_THEIRS * theirs + _MORE
    if not error <= allowed:
        raise Flaw(f"log-probabilities are {error:.2g} off those of plain torch in float32; {allowed:.2g} is allowed")


def _error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Root of the mean square, as a share of how far log-probabilities lie apart."""
    return float((ours - exact).square().mean().sqrt() / exact.std())


def _in_company(machine: Machine, config: dict[str, Any], dtype: str) -> Iterable[Row]:
    """Raises Flaw where tokens in float32 are others in company."""
    llm = _engine(machine, config, dtype)
    prompts = _prompts(machine)
    alone = [_tokens(llm, [prompt])[0] for prompt in prompts]
    ways = {"in a batch": llm, "after a cached prefix": llm}
    wrong: list[str] = []
    for way, engine in ways.items():
        yield _compared(way, dtype, alone, _tokens(engine, prompts), wrong)
    chunked = _engine(machine, config, dtype, max_num_batched_tokens=48, max_num_seqs=4)
    yield _compared("in chunks", dtype, alone, _tokens(chunked, prompts), wrong)
    if wrong and dtype == "float32":
        raise Flaw(f"tokens of greedy requests are others {', '.join(wrong)} than alone")


def _tokens(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    greedy = SamplingParams(temperature=0.0, max_tokens=_ANSWER, ignore_eos=True)
    return [o.outputs[0].token_ids for o in llm.generate([{"prompt_token_ids": p} for p in prompts], greedy)]


def _compared(way: str, dtype: str, alone: list[list[int]], found: list[list[int]], wrong: list[str]) -> Row:
    same = sum(one == other for one, other in zip(alone, found, strict=True))
    if same < len(alone):
        wrong.append(way)
    return {"dtype": dtype, "how": way, "same": same, "of": len(alone)}
