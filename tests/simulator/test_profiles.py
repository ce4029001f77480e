"""Schedulers of others: their rules as settings of ours, and their defaults by hardware."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from headway.bench.results import load_json
from headway.policy.step.options import SchedulingOptions
from headway.simulator.deployed import ServerOptions, deploy
from headway.simulator.server import simulate as run
from headway.simulator.timing import Fixed
from headway.simulator.traffic import arrival
from tests.simulator.test_run import LOAD, MODEL, simulate

MS = 1_000_000
VLLM = ["--engine", "vllm"]


@pytest.mark.parametrize(
    ("engine", "hardware", "tokens", "seqs"),
    [
        ("vllm", "H100-SXM", 8192, 1024),
        ("vllm", "MI300X", 8192, 1024),
        ("vllm", "A100-80GB-SXM", 2048, 256),
        ("vllm", "L40S", 2048, 256),
        ("sglang", "H100-SXM", 8192, 2048),
        ("sglang", "MI300X", 16384, 2048),
        ("tensorrt-llm", "L40S", 8192, 2048),
    ],
)
def test_the_defaults_are_those_of_the_engine_and_the_hardware(
    engine: str, hardware: str, tokens: int, seqs: int
) -> None:
    options = ServerOptions(model="llama-3.1-8b", hardware=hardware, engine=engine, max_model_len=4096)
    made = deploy(options, SchedulingOptions())
    config = made.scheduler.config
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (tokens, seqs)
    assert config.sharing.prefill_first == (engine == "sglang")
    assert config.enable_chunked_prefill == (engine != "tensorrt-llm")
    assert (config.policy, config.lookahead, config.watermark) == ("fcfs", 0, 0.0)
    assert math.isinf(config.max_prefill_stall_ms) and math.isinf(made.limits.choices + made.limits.tokens)


def test_who_is_given_overrides_the_profile_and_who_is_not_does_not(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('scheduling-policy = "priority"')
    files = ["--result-dir", tmp_path, "--result-filename", "run.json", "--config", tmp_path / "config.toml"]
    given = ["--max-num-seqs", "256", "--what-if", "hardware=L40S", "--what-if", "max-num-batched-tokens=4096"]
    assert simulate(*MODEL, *LOAD, *VLLM, *files, *given)[0] == 0
    asked, other, more = (load_json(tmp_path / f"run-{number}.json").server for number in (1, 2, 3))
    assert [each["max_num_seqs"] for each in (asked, other, more)] == [256] * 3  # our own default, which was given
    assert [each["max_num_batched_tokens"] for each in (asked, other, more)] == [8192, 2048, 4096]
    assert (asked["engine"], asked["efficiency"]) == ("vllm", "vllm")
    code, said = simulate(*MODEL, *LOAD, "--engine", "ollama", "--no-save-result")
    assert code == 2 and "sglang" in said


def first_tokens(profile: str) -> list[int]:
    """TTFTs, in ms, of a long prompt that does not fit beside a running one, and of a short one after it that would."""
    options = ServerOptions(
        model="llama-3.1-8b",
        hardware="H100-SXM",
        engine=profile,
        kv_cache_memory=64 * 16 * 131072,
        max_model_len=1000,
    )
    made = deploy(options, SchedulingOptions(scheduling_policy="fcfs", enable_prefix_caching=False))
    coming = [arrival(0, 0, 600, 20), arrival(1, MS, 600, 2), arrival(2, 2 * MS, 30, 2)]
    answers = run(made.scheduler, coming, Fixed(10 * MS)).answers
    return [answer.token_ns[0] // MS for answer in answers]


def test_one_that_does_not_fit_lets_nobody_past_it() -> None:
    assert first_tokens("headway") == [10, 210, 20]
    assert first_tokens("vllm") == [10, 210, 210]


def test_prefill_first_lets_nobody_decode_while_a_prompt_is_computed() -> None:
    """A second prompt of two steps comes while the first request decodes, in steps of equal length. Milliseconds."""
    seen = {}
    for engine in ("headway", "sglang"):
        options = ServerOptions(model="llama-3.1-8b", hardware="H100-SXM", engine=engine)
        made = deploy(options, SchedulingOptions(scheduling_policy="fcfs", max_prefill_stall_ms=math.inf))
        coming = [arrival(0, 0, 8, 4), arrival(1, 15 * MS, 12_000, 2)]
        first, second = run(made.scheduler, coming, Fixed(10 * MS)).answers
        seen[engine] = [[at // MS for at in answer.token_ns] for answer in (first, second)]
    assert seen == {"headway": [[10, 20, 30, 40], [40, 50]], "sglang": [[10, 20, 50, 60], [40, 50]]}
