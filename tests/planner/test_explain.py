"""--explain: every right-hand side, computed again from the numbers that are printed, gives the result."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headway.planner.console import print_explained
from headway.planner.formula import Formula, added, given, larger, plain
from headway.planner.formulas import formulas
from headway.planner.json import as_object
from headway.planner.make import make_plan
from headway.planner.request import PlanRequest, Speculation

LOADS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama-3.1-8b", "H100-SXM", {"price_per_hour": 2.0, "speculation": Speculation(4, 0.7, "llama-3.2-1b")}),
    ("llama-3.1-8b", "A100-80GB-SXM", {"batch_size": 24, "prompt_tokens": 3000, "cached_tokens": 1000}),
    ("llama-3.1-70b", "H100-SXM", {"count": 8, "tensor_parallel_size": 4, "concurrency": 40, "price_per_hour": 2.0}),
    ("deepseek-v3", "H200", {"count": 8, "request_rate": 2.0}),
    ("gpt-oss-20b", "H100-SXM", {"batch_size": 8, "kv_cache_dtype": "fp8"}),
    ("mixtral-8x7b", "H100-SXM", {"count": 4, "pipeline_parallel_size": 2, "batch_size": 16, "quantization": "fp8"}),
    ("qwen2.5-7b", "L40S", {"quantization": "int4", "flash_attention": False}),
    ("llama-3.1-8b", "H100-SXM", {"request_rate": 1000.0}),
    ("llama-3.1-70b", "H100-SXM", {"count": 1}),
    ("llama-3.1-70b", "H100-SXM", {"concurrency": 4, "engine": "sglang"}),
    ("llama-3.1-8b", "H100-SXM", {"speculation": Speculation(3, 1.0)}),
    ("llama-3.1-8b", "H100-SXM", {"batch_size": 16, "output_len": "lognormal:mean=211,cv=0.8"}),
    ("llama-3.1-8b", "H100-SXM", {"output_tokens": 1, "concurrency": 2}),
    ("llama-3.1-8b", "H100-SXM", {"attention_sinks": 4, "max_model_len": 200_000, "prompt_tokens": 150_000}),
]


def computed(numbers: str) -> float:
    """What an expression of a formula comes to."""
    text = re.sub(r"(?<=\d),(?=\d{3})", "", numbers).replace("^", "**")
    assert not set(re.findall(r"[a-zA-Z_]+", text)) - {"max", "min", "floor", "ceil", "e"}, numbers
    names = {"max": max, "min": min, "floor": math.floor, "ceil": math.ceil, "__builtins__": {}}
    return float(eval(text, names))


def printed(line: str) -> float:
    """The number of a last line such as "= 131,072 bytes"."""
    return float(line.removeprefix("= ").split()[0].replace(",", ""))


@pytest.mark.parametrize(("model", "hardware", "more"), LOADS)
def test_every_right_hand_side_gives_its_result(model: str, hardware: str, more: dict[str, Any]) -> None:
    found = list(formulas(make_plan(PlanRequest(model, hardware, **more))))
    for formula in found:
        _, numbers, result = formula.lines
        assert formula.source and formula.rule
        if numbers:
            assert computed(numbers.removeprefix("= ")) == pytest.approx(printed(result), rel=2e-4, abs=1e-9), formula
    assert sum(bool(formula.lines[1]) for formula in found) > 20


def by_name(**more: Any) -> dict[str, float]:
    return {each.name: each.value for each in formulas(make_plan(PlanRequest(hardware="H100-SXM", **more)))}


def test_documents_are_quoted_by_their_own_definitions() -> None:
    """Document 001, chapter 8: 190,000 and 1.9 FLOP/byte; document 002: 0.8 p, 4 and 4; beside ours, which are less."""
    found = by_name(model="llama-3.1-405b", prompt_tokens=100_000, count=16)
    assert found["Arithmetic intensity of the prefill, as document 001 counts it"] == pytest.approx(190_000, rel=0.01)
    assert found["Arithmetic intensity of the prefill"] < 140_000
    assert found["Arithmetic intensity of the decode step, as document 001 counts it"] == pytest.approx(1.9, abs=0.05)
    found = by_name(model="llama-3.1-8b", prompt_tokens=1000)
    for name, of_document, ours in (
        ("attention in the prefill", 800, 400),
        ("attention in the decode step", 4, 4),
        ("norms in the prefill", 4, 0.5),
        ("norms in the decode step", 4, 0.4),
    ):
        assert found[f"Arithmetic intensity of {name}, as document 002 counts it"] == pytest.approx(
            of_document, rel=0.03
        )
        assert found[f"Arithmetic intensity of {name}"] == pytest.approx(ours, rel=0.03)


def test_a_cached_prefix_changes_the_bytes_of_a_prefill_and_those_of_a_decode() -> None:
    """Document 002: "prefix sharing does help", where attention reads the prefix once for all."""
    plain_, cached = (
        by_name(model="llama-3.1-8b", prompt_tokens=4000, batch_size=8, cached_tokens=tokens) for tokens in (0, 3900)
    )
    saved = plain_["Bytes of the prefill"] - cached["Bytes of the prefill"]
    assert saved == pytest.approx(3900 * 131_072, rel=0.1)  # which are not written; and the rows of the embedding
    assert plain_["Bytes of the decode step"] - cached["Bytes of the decode step"] == 7 * 3584 * 131_072
    each = cached["Bytes of the decode step, if each sequence read the shared prefix"]
    assert each == plain_["Bytes of the decode step"]


# Which formula each headline figure of the JSON object is the result of.
PROMPTS_PAY = "where prompts pay for the time that they take alone"
HEADLINES = {
    "weights_bytes": "Bytes of weights",
    "kv_bytes_per_token": "Cache of a token",
    "kv_cache_bytes": "Cache of the batch",
    "flops_prefill": "FLOPs of the prefill",
    "flops_decode_step": "FLOPs of the decode step",
    "bytes_prefill": "Bytes of the prefill",
    "bytes_decode_step": "Bytes of the decode step",
    "intensity_prefill": "Arithmetic intensity of the prefill",
    "intensity_decode": "Arithmetic intensity of the decode step",
    "ridge_flops_per_byte": "Ridge",
    "parameters": "Parameters",
    "ttft_ms": "TTFT",
    "ttft_ms_low": "TTFT, low end of the 80 % bar",
    "tpot_ms_high": "TPOT, high end of the 80 % bar",
    "tpot_ms": "TPOT",
    "ttlt_ms": "TTLT",
    "output_tokens_per_s": "Output tokens/s",
    "max_batch": "Largest batch",
    "saturation_requests_per_s": "Saturation",
    "compute_bound_batch": "Batch from which on whole decode steps are compute-bound",
    "compute_bound_batch_weights": "Batch from which on products with weights are compute-bound",
    "cost_per_million_output_tokens": "Price of 1M output tokens",
    "split_cost_per_million_input_tokens": f"Price of 1M input tokens, {PROMPTS_PAY}",
    "split_cost_per_million_output_tokens": f"Price of 1M output tokens, {PROMPTS_PAY}",
    "tokens_per_s_per_watt": "Tokens/s/W",
    "kwh_per_million_output_tokens": "Energy of 1M output tokens",
    "kv_pool_bytes_per_device": "Memory left for the cache, of a device",
    "prefill_ms": "Time of the prefill",
    "prefill_floor_ms": "Least time of the prefill",
    "decode_step_ms": "Time of the decode step",
    "decode_step_floor_ms": "Least time of the decode step",
}


@pytest.mark.parametrize(("model", "hardware", "more"), LOADS)
def test_every_headline_figure_is_explained(model: str, hardware: str, more: dict[str, Any]) -> None:
    plan = make_plan(PlanRequest(model, hardware, **more))
    values = {formula.name: formula.value for formula in formulas(plan)}
    assert len(values) == len(list(formulas(plan))), "two formulas have the same name"
    figures = as_object(plan)
    for key, name in HEADLINES.items():
        if figures[key] is not None and not (name.endswith("bar") and plan.load == "rate"):
            assert values[name] == pytest.approx(figures[key]), key
    for key, name in (("total", "Loading the model"), ("layout", "Layout, loading the model")):
        assert values[name] == pytest.approx(figures["loading_s"][key])
    if plan.speculated is not None:
        assert values["Tokens of a step with speculation"] == pytest.approx(plan.speculated.accepted)


def test_a_cache_saves_a_pass_over_all_tokens_but_the_last() -> None:
    """Document 001, chapter 6, section 3: of N tokens about N times the work; the head is computed once anyway."""
    saved = {}
    for tokens in (1000, 4000):
        plan = make_plan(PlanRequest("llama-3.1-405b", "H200", count=8, prompt_tokens=tokens, output_tokens=2))
        saved[tokens] = {each.name: each.value for each in formulas(plan)}["Arithmetic that the cache saves"]
    assert 0.95 * 1002 < saved[1000] < 1002
    assert 0.95 * 4002 < saved[4000] < 4002


def test_numbers_are_written_so_that_they_can_be_put_in() -> None:
    assert [plain(n) for n in (3, 131072, 2.0, 0.0123456789, 1.5e30)] == ["3", "131,072", "2", "0.0123457", "1.5e+30"]
    assert Formula("", "", 1024.0, "bytes", "").lines == ("", "", "= 1,024 bytes")
    five = given(5)
    for number, text, value in (
        ((five + 1) * 2 - (five - 1) / (2 * five), "(5 + 1) * 2 - (5 - 1) / (2 * 5)", 11.6),
        (2 - (five - (five - 1)) ** (1 / (five + 1)), "2 - (5 - (5 - 1))^(1 / (5 + 1))", 1),
        (
            larger(0, 10**18 * five / 2) * added([five, five]),
            "max(0, 1000000000000000000 * 5 / 2) * (5 + 5)",
            25 * 10**18,
        ),
    ):
        assert (number.text, number.value) == (text, value)
        assert computed(text) == pytest.approx(value)


def test_it_is_printed_with_sources_also_on_a_narrow_terminal() -> None:
    plan = make_plan(PlanRequest("llama-3.1-8b", "H100-SXM"))
    for width in (40, 200):
        console = Console(width=width, file=io.StringIO())
        print_explained(plan, console)
        assert isinstance(console.file, io.StringIO)
        lines = console.file.getvalue().splitlines()
        assert all(len(line) <= width for line in lines)
        words = " ".join(" ".join(lines).split())
        assert "= 2 * 32 * 8 * 128 * 16 / 8 = 131,072 bytes" in words
        assert "document 001, chapter 8" in words


def test_a_step_of_a_model_with_recurrent_layers_is_the_sum_of_all_its_parts(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4}
    sizes |= {"intermediate_size": 4096, "vocab_size": 65_536, "max_position_embeddings": 32_768}
    config = {"architectures": ["Lfm2ForCausalLM"], "full_attn_idxs": [2, 5], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = make_plan(PlanRequest(str(tmp_path), "H100-SXM"))
    found = {formula.name: formula for formula in formulas(plan)}
    for name, flops in (("prefill", plan.prefill.flops), ("decode step", plan.decode.flops)):
        whole = found[f"FLOPs of the {name}"]
        assert whole.value == flops
        assert whole.rule.endswith("+ recurrent layers")
