"""`headway plan MODEL --hardware ...`: what it prints, its exit codes, and what it says of bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planner.command_line import CommandLine

KEYS = {
    "weights_bytes",
    "kv_bytes_per_token",
    "kv_cache_bytes",
    "flops_prefill",
    "flops_decode_step",
    "bytes_prefill",
    "bytes_decode_step",
    "intensity_prefill",
    "intensity_decode",
    "ridge_flops_per_byte",
    "bound_prefill",
    "bound_decode",
    "ttft_ms",
    "tpot_ms",
    "output_tokens_per_s",
    "max_batch",
    "cost_per_million_output_tokens",
}


def test_the_answer_comes_first_and_then_tables(headway: CommandLine) -> None:
    asked = ("plan", "llama-3.1-8b", "--hardware", "h100-sxm", "--price-per-hour", 2, "--slo", "ttft:200,tpot:5")
    ran = headway(*asked)
    assert (ran.code, ran.err) == (0, "")
    assert 10 <= len(ran.out.splitlines()) <= 22
    first = ran.out.splitlines()[0]
    assert first.startswith("llama-3.1-8b on 1 × H100-SXM") and "batch 1" in first
    labels = [line.split("  ")[0] for line in ran.out.splitlines()[1:] if not line.startswith(" ")]
    assert labels == ["Fits", "TTFT", "TPOT", "Tokens/s", "Maximum", "Cost", "SLO", "Ranges", "Next"]
    assert "TTFT ≤ 200 ms: met" in ran.out and "TPOT ≤ 5 ms: missed" in ran.out
    whole = headway(*asked, "--verbose").out
    assert whole.startswith(ran.out.split("Ranges")[0])
    for title in ("Prefill of one prompt", "A decode step of 1", "Serving", "Loading the model", "Cost and energy"):
        assert title in whole and title not in ran.out
    assert whole.index("Cost and energy") < whole.index("Assumptions")
    assert "--json and --verbose contradict" in headway(*asked, "--json", "--verbose").error()


@pytest.mark.parametrize("flag", ["--slo", "--goodput"])
def test_objectives_are_written_as_for_a_benchmark(headway: CommandLine, flag: str) -> None:
    asked = ("plan", "llama-3.1-8b", "--hardware", "H100-SXM", "--json")
    wanted = {"ttft": {"limit_ms": 200.0, "met": True}, "tpot": {"limit_ms": 5.0, "met": False}}
    for given in ((flag, "ttft:200", "tpot:5"), (flag, "ttft:200,tpot:5"), (flag, "ttft:200", flag, "tpot:5")):
        assert json.loads(headway(*asked, *given).out)["slo"] == wanted
    compared = headway("plan", "compare", "llama-3.1-8b@H100-SXM", flag, "ttft:200", "tpot:5", "@L40S:quantization=fp8")
    assert compared.code == 0 and "llama-3.1-8b on 1 × L40S, fp8" in compared.out


@pytest.mark.parametrize("columns", [40, 60, 80, 160])
def test_no_line_is_wider_than_the_terminal(headway: CommandLine, columns: int) -> None:
    for more in ([], ["--verbose"], ["--explain"]):
        ran = headway("plan", "mixtral-8x7b", "--hardware", "H100-SXM", "--count", 4, *more, columns=columns)
        assert ran.code == 0
        assert max(map(len, ran.out.splitlines())) <= columns


def test_json_is_one_object_and_nothing_else(headway: CommandLine) -> None:
    ran = headway("plan", "llama-3.1-8b", "--hardware", "H100-SXM", "--json", "--concurrency", 32, "--slo", "ttft:9")
    assert (ran.code, ran.err) == (0, "")
    figures = json.loads(ran.out)
    assert set(figures) >= KEYS
    assert figures["fits"] is True and figures["problem"] is None
    assert figures["kv_bytes_per_token"] == 131072
    assert (figures["bound_prefill"], figures["bound_decode"]) == ("compute", "memory")
    assert figures["slo"] == {"ttft": {"limit_ms": 9.0, "met": False}} and figures["slo_met"] is False
    for key in ("ttft_ms", "tpot_ms", "ttlt_ms", "output_tokens_per_s"):
        assert 0 < figures[f"{key}_low"] < figures[key] < figures[f"{key}_high"]
    for name in ("prefill", "decode"):
        parts = figures["operations"][name]
        step = "prefill" if name == "prefill" else "decode_step"
        assert sum(part["flops"] for part in parts) == figures[f"flops_{step}"]
        assert sum(part["weight_bytes"] + part["kv_bytes"] for part in parts) == figures[f"bytes_{step}"]
        assert sum(part["activation_bytes"] for part in parts) == figures[f"activation_bytes_{step}"]


def test_intensity_is_flops_by_bytes(headway: CommandLine) -> None:
    figures = json.loads(headway("plan", "qwen2.5-7b", "--hardware", "A100-80GB-SXM", "--json").out)
    for name, step in (("prefill", "prefill"), ("decode", "decode_step")):
        assert figures[f"intensity_{name}"] == pytest.approx(figures[f"flops_{step}"] / figures[f"bytes_{step}"])


def test_a_model_that_does_not_fit_is_answered_with_exit_code_1(headway: CommandLine) -> None:
    ran = headway("plan", "llama-3.1-405b", "--hardware", "H100-SXM", "--count", 2)
    assert (ran.code, ran.err) == (1, "")
    assert ran.out.splitlines()[1].startswith("Problem") and "Ranges" not in ran.out
    assert "are missing, even for one request of" in " ".join(ran.out.split())
    figures = json.loads(headway("plan", "llama-3.1-405b", "--hardware", "H100-SXM", "--count", 1, "--json").out)
    assert figures["fits"] is False and figures["shortfall_bytes"] > 0 and figures["max_batch"] == 0
    assert figures["ttft_ms"] is figures["tpot_ms"] is figures["cost_per_million_output_tokens"] is None
    assert figures["flops_prefill"] > 8e14


def test_a_rate_that_cannot_be_served_is_null_and_exit_code_1(headway: CommandLine) -> None:
    ran = headway("plan", "llama-3.1-8b", "--hardware", "H100-SXM", "--request-rate", 500, "--json")
    figures = json.loads(ran.out)
    assert ran.code == 1 and figures["fits"] is True and figures["ttft_ms"] is None
    assert 0 < figures["saturation_requests_per_s"] < 500
    assert "grows without limit" in figures["problem"]


def test_a_bar_without_an_end_is_null(headway: CommandLine) -> None:
    command = ("plan", "llama-3.1-8b", "--hardware", "H100-SXM", "--output-tokens", 32, "--request-rate")
    most = json.loads(headway(*command, 1, "--json").out)["saturation_requests_per_s"]
    figures = json.loads(headway(*command, 0.9 * most, "--json").out)
    assert figures["ttft_ms"] > 0 and figures["ttft_ms_high"] is None
    assert "or more" in headway(*command, 0.9 * most).out


def test_explain_prints_formulas(headway: CommandLine) -> None:
    ran = headway("plan", "llama-3.1-8b", "--hardware", "H100-SXM", "--explain")
    assert ran.code == 0
    assert "= 2 * 32 * 8 * 128 * 16 / 8" in ran.out and "= 131,072 bytes" in ran.out
    assert "document 000, KV Cache Formula" in ran.out


def test_help_lists_the_flags(headway: CommandLine) -> None:
    for arguments in (["plan", "--help"], ["plan"]):
        ran = headway(*arguments)
        assert ran.code == 0
        for flag in ("--hardware", "--tensor-parallel-size", "--kv-cache-dtype", "--request-rate", "--slo", "--json"):
            assert flag in ran.out


BAD = """
llama-3.1-8b | --hardware
nope --hardware H100-SXM | model 'nope' is not known
llama3.1-9b --hardware H100-SXM | llama-3.1-8b
llama-3.1-8b --hardware H101-SXM | H100-SXM
llama-3.1-8b --hardware Z80 | known are
llama-3.1-8b --hardware H100-SXM --prompt-tokens 0 | --prompt-tokens is 0
llama-3.1-8b --hardware H100-SXM --output-tokens -5 | --output-tokens is -5
llama-3.1-8b --hardware H100-SXM --prompt-tokens many | --prompt-tokens
llama-3.1-8b --hardware H100-SXM --batch-size 0 | --batch-size is 0
llama-3.1-8b --hardware H100-SXM --concurrency 0 | concurrency is 0
llama-3.1-8b --hardware H100-SXM --request-rate 0 | --request-rate is 0
llama-3.1-8b --hardware H100-SXM --request-rate nan | --request-rate is nan
llama-3.1-8b --hardware H100-SXM --batch-size 1 --request-rate 2 | give only one
llama-3.1-8b --hardware H100-SXM --batch-size 1 --concurrency 2 | --concurrency and --batch-size are different loads
llama-3.1-8b --hardware H100-SXM --count 0 | count is 0
llama-3.1-8b --hardware H100-SXM --tensor-parallel-size 3 | use 1, 2, 4, 8
llama-3.1-8b --hardware H100-SXM --tensor-parallel-size 64 | does not divide both
llama-3.1-8b --hardware H100-SXM --storage-gb-per-s 0 | --storage-gb-per-s is 0
llama-3.1-8b --hardware H100-SXM --quantization int4-experts | has no experts
llama-3.1-8b --hardware H100-SXM --tensor-parallel-size 2 --count 3 | a multiple of that
llama-3.1-8b --hardware H100-SXM --pipeline-parallel-size 64 | 32 layers
llama-3.1-8b --hardware H100-SXM --quantization q4_k_m | must be one of auto, none, fp8
llama-3.1-8b --hardware H100-SXM --dtype fp4 | bfloat16
llama-3.1-8b --hardware H100-SXM --kv-cache-dtype fp4 | fp8
llama-3.1-8b --hardware H100-SXM --slo ttft | KEY:MS
llama-3.1-8b --hardware H100-SXM --slo ttft:-1 | slo: ttft:-1.0 is not a limit; give milliseconds above 0
llama-3.1-8b --hardware H100-SXM --concurrency 1000000000 | at most 1,000,000
llama-3.1-8b --hardware H100-SXM --draft-model= --num-speculative-tokens 2 --acceptance-rate 0.5 | draft model ''
llama-3.1-8b --hardware H100-SXM --slo speed:1 | ttft, tpot, e2el
llama-3.1-8b --hardware H100-SXM --price-per-hour 0 | --price-per-hour is 0
llama-3.1-8b --hardware H100-SXM --prompt-tokens 200000 | max_position_embeddings, 131,072
llama-3.1-8b --hardware H100-SXM --gpu-memory-utilization 2 | --gpu-memory-utilization is 2
llama-3.1-8b --hardware H100-SXM --acceptance-rate 0.5 | --num-speculative-tokens
llama-3.1-8b --hardware H100-SXM --num-speculative-tokens 3 | --acceptance-rate
llama-3.1-8b --hardware H100-SXM --num-speculative-tokens 3 --acceptance-rate 2 | give 0 to 1
llama-3.1-8b --hardware H100-SXM --engine nope | vllm
llama-3.1-8b --hardware H100-SXM --json --explain | contradict each other
llama-3.1-8b --hardware H100-SXM extra | extra
llama-3.1-8b --hardware H100-SXM --bogus | --bogus
/no/such/folder --hardware H100-SXM | cannot be read
""".strip().splitlines()


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line_and_exit_code_2(headway: CommandLine, line: str) -> None:
    arguments, _, says = line.partition(" | ")
    assert says in headway("plan", *arguments.split()).error()


def test_it_answers_fast_and_without_torch(tmp_path: Path) -> None:
    """In a process of its own: a plan needs no device, so nothing loads what talks to one."""
    code = "import sys; from headway.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    ran = subprocess.run(
        [sys.executable, "-c", code, "plan", "llama-3.1-70b", "--hardware", "H100-SXM", "--count", "4", "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        timeout=60,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout)["tensor_parallel_size"] == 4


def test_a_calibrated_machine_that_cannot_be_read_is_named(headway: CommandLine, no_calibrated_machines: Path) -> None:
    no_calibrated_machines.mkdir(parents=True)
    (no_calibrated_machines / "mine.json").write_text("{}")
    assert "mine.json" in headway("plan", "llama-3.1-8b", "--hardware", "Mine").error()
    assert headway("plan", "llama-3.1-8b", "--hardware", "H100-SXM").code == 0


def test_the_guide_names_every_key(headway: CommandLine) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    figures = json.loads(headway("plan", "llama-3.1-8b", "--hardware", "H100-SXM", "--slo", "ttft:9", "--json").out)
    ends = tuple(f"`_{end}`" for end in ("low", "high"))
    for key in [*figures, *figures["loading_s"], *figures["operations"]["prefill"][0]]:
        root = key.removesuffix("_low").removesuffix("_high")
        assert f"`{key}`" in guide or (f"`{root}`" in guide and all(end in guide for end in ends)), key
