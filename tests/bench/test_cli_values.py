"""Values of `headway bench` that cannot be used, and flags that do not go together: one line, and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.cli.spellings import fold_objectives
from tests.bench.command_line import CommandLine
from tests.bench.scripted_server import ScriptedServer

BAD_ALONE = """
--bogus | --bogus
--port http | --port
--port 70000 | --port
--backend tgi | openai-chat
--base-url ftp://here | http:// or https://
--endpoint v1/chat | must begin with /
--api-key "a b" | API key
--header novalue | KEY=VALUE
--header =x | KEY=VALUE
--header Host=x | leave it out
--ready-check-timeout-sec -1 | --ready-check-timeout-sec
--request-timeout 0 | --request-timeout
--request-timeout inf | must be a finite number
--temperature -1 | --temperature
--temperature nan | --temperature
--top-k many | --top-k
--top-p high | --top-p
--extra-body [1] | must be an object
--extra-body {a} | not JSON
--num-prompts 0 | --num-prompts
--duration 0 | --duration
--request-rate -1 | the request rate is -1; it must be a finite number above 0
--request-rate nan | the request rate is nan; it must be a finite number above 0
--request-rate 0 | the request rate is 0; it must be a finite number above 0
--arrival sometimes | poisson
--arrival gamma --request-rate 2 | --burstiness
--arrival trace | dataset with times
--arrival ramp --request-rate 2 --ramp-up-start-rps 1 --ramp-up-end-rps 2 | --request-rate
--burstiness 0 --request-rate 2 | burstiness
--burstiness 0.5 | --request-rate
--on-seconds 2 --request-rate 2 | --off-seconds
--off-seconds 2 --request-rate 2 | --on-seconds
--ramp-up-start-rps 2 | --ramp-up-end-rps
--ramp-up-strategy steep | linear
--ramp-up-strategy linear | --ramp-up-start-rps
--max-concurrency 0 | --max-concurrency
--num-warmups -1 | --num-warmups
--seed -1 | --seed
--sweep rate | rate:1,2,4
--sweep speed:1 | rate:1,2,4
--sweep rate:1,0 | above 0
--sweep rate:1, | above 0
--sweep concurrency:1.5 | whole number
--sweep rate:1,2 --request-rate 4 | leave out --request-rate
--max-search-seconds 60 | only with --find-max-rate
--find-max-rate --goodput ttft:9 --max-search-seconds 0 | --max-search-seconds
--slo-attainment 0.9 | only with --goodput
--goodput ttft:9 --slo-attainment 0.2 | --slo-attainment
--goodput ttft | KEY:MS
--goodput speed:1 | ttft, tpot, e2el
--goodput ttft:0 | ttft
--metric-percentiles 50,100 | '100'
--metric-percentiles p50 | 'p50'
--price-per-hour -1 | --price-per-hour
--max-failed-share 1.5 | --max-failed-share
--metadata gpu | KEY=VALUE
--probe-rate inf | --probe-rate
--price-per-hour inf | --price-per-hour
--tenant-key a= | the API key is empty
--base-url http://127.0.0.1:1 --port 8000 | --port works only without --base-url
--base-url http://127.0.0.1:1 --host a | --host works only without --base-url
--insecure | only with an https:// address
--no-save-result --save-detailed | only with --save-result
--no-save-result --csv | only with --save-result
--no-save-result --result-filename a.json | only with --save-result
--no-save-result --metadata a=b | only with --save-result
--no-save-result --label a | only with --save-result or --report
--csv --result-filename a.csv | end it in .json
--report /dev/null/report.html | --report
--report / | --report
extra | extra
--prompts letters | token-ids
""".strip().splitlines()

BAD_FOR_A_SERVER = """
--model scriptde | scripted
--time-scale 2 | --time-scale
--no-oversample | --no-oversample
--duration 3 | --num-prompts
--num-prompts 99999999999 | at most 100,000,000
--duration 1e9 --request-rate 100 | at most 100,000,000
--request-rate 1e-300 --num-prompts 2 | raise the rate
--dataset-name rnadom | random
--dataset-name azure | --dataset-path
--dataset-path /tmp | --dataset-path
--dataset-name custom --dataset-path /no/such/file | /no/such/file
--dataset-name mooncake --dataset-path /no/such/file --trace-block-size 0 | --trace-block-size
--dataset-name burstgpt --dataset-path /no/such/file --burstgpt-model a | /no/such/file
--mix nothing-like-it | nothing-like-it
--mix /no/such.toml | /no/such.toml
--mix assistants --input-len 4 | --input-len
--input-len few | few
--output-len lognormal:mean=0 | mean
--input-len 4 --random-input-len 8 | leave one of the two out
--output-len 4 --random-output-len 8 | leave one of the two out
--random-input-len 0 | --random-input-len
--random-output-len 0 | --random-output-len
--random-range-ratio 1 | --random-range-ratio
--random-prefix-len -1 | --random-prefix-len
--prefix-repetition-prefix-len 9 | does not apply to --dataset-name random
--prefix-repetition-suffix-len 9 | does not apply to --dataset-name random
--prefix-repetition-num-prefixes 9 | does not apply to --dataset-name random
--prefix-repetition-output-len 9 | does not apply to --dataset-name random
--dataset-name prefix_repetition --prefix-repetition-num-prefixes 0 | --prefix-repetition-num-prefixes
--sharegpt-output-len 9 | does not apply to --dataset-name random
--custom-output-len 9 | does not apply to --dataset-name random
--multi-turn-turns 3 | does not apply to --dataset-name random
--multi-turn-prefix-len 9 | does not apply to --dataset-name random
--multi-turn-think-s 1 | does not apply to --dataset-name random
--dataset-name multi_turn --multi-turn-turns few | few
--dataset-name multi_turn --multi-turn-turns 0 | a mean of 0 is too small
--dataset-name multi_turn --multi-turn-think-s -1 | -1
--burstgpt-model a | does not apply to --dataset-name random
--trace-block-size 9 | does not apply to --dataset-name random
--disable-shuffle | does not apply to --dataset-name random
--max-input-len 0 | --max-input-len
--max-output-len 0 | --max-output-len
--random-input-len 4000 | context of 4096
--find-max-rate | --goodput
--find-max-rate --goodput ttft:9 --sweep rate:1 | contradict each other; give one
--find-max-rate --goodput ttft:9 --arrival all-at-once | a constant rate
--sweep rate:1 --on-seconds 1 --off-seconds 1 | --request-rate
--sweep rate:1 --arrival all-at-once | a constant rate
--sweep rate:1 --ramp-up-start-rps 1 --ramp-up-end-rps 2 | a constant rate
--sweep concurrency:1 --max-concurrency 4 | leave out --max-concurrency
--sweep concurrency:1 --request-rate 4 | leave out
--prompts token-ids --tokenizer /no/such/folder | /no/such/folder
--prompts token-ids --backend openai-chat | /v1/completions
--tokenizer /no/such/folder | /no/such/folder
""".strip().splitlines()


def arguments_of(line: str) -> tuple[list[str], str]:
    before, _, says = line.partition(" | ")
    return [part.replace("\0", " ") for part in before.replace('"a b"', "a\0b").split()], says


@pytest.mark.parametrize("line", BAD_ALONE)
def test_it_is_refused_before_a_server_is_asked(
    headway: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, says = arguments_of(line)
    address = [] if {"--base-url", "--port", "--host"} & set(arguments) else ["--base-url", "http://127.0.0.1:1"]
    assert says in headway("bench", *address, *arguments, results=False).error()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("line", BAD_FOR_A_SERVER)
def test_it_is_refused_when_the_server_is_known(headway: CommandLine, scripted: ScriptedServer, line: str) -> None:
    arguments, says = arguments_of(line)
    ran = headway("bench", "--base-url", scripted.url, *arguments)
    assert says in ran.error()
    assert not ran.files("")


def test_results_that_could_not_be_written(headway: CommandLine, tmp_path: Path) -> None:
    """Said before anything is measured: here there is not even a server."""
    file = tmp_path / "file"
    file.write_text("")
    error = headway("bench", "--base-url", "http://127.0.0.1:1", "--result-dir", file, results=False).error()
    assert "cannot write" in error and "--result-dir" in error


def test_flags_before_a_command_are_its_own(headway: CommandLine) -> None:
    error = headway("bench", "--request-rate", 3, "profile", results=False).error()
    assert "--request-rate does not apply to headway bench profile" in error


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--prompt-lens few", "'few'"),
        ("--prompt-lens 16,-1", "-1"),
        ("--prompt-lens 0", "0"),
        ("--output-len 1", "--output-len"),
        ("--repeats 0", "--repeats"),
        ("--metric-percentiles 0", "--metric-percentiles"),
        ("--device tpu", "cuda"),
        ("--dtype int3", "bfloat16"),
        ("--quantization int3", "int8-weight-only"),
        ("--kv-cache-dtype fp4", "int8"),
        ("--metric-percentiles 50,100", "'100'"),
        ("--load-format gguf", "safetensors"),
        ("--threads 0", "--threads"),
        ("--max-model-len 0", "--max-model-len"),
        ("--kv-cache-memory lots", "'lots' is not a size"),
        ("--calibration /no/such.json", "/no/such.json"),
        ("--ready-timeout 0", "--ready-timeout"),
        ("--timeout 0", "--timeout"),
        ("--seed -1", "--seed"),
        ("/no/such/folder", "/no/such/folder"),
        ("one two", "two"),
        ("--bogus", "--bogus"),
    ],
)
def test_bad_values_of_a_profile(headway: CommandLine, line: str, says: str) -> None:
    ran = headway("bench", "profile", *line.split())
    assert says in ran.error()
    assert not ran.files("")


def test_lists_are_folded() -> None:
    assert fold_objectives(["--goodput", "ttft:1", "tpot:2", "--seed", "1"]) == [
        "--goodput", "ttft:1 tpot:2", "--seed", "1",
    ]  # fmt: skip
    assert fold_objectives(["--slo=ttft:1", "e2el:2", "profile"]) == ["--slo=ttft:1 e2el:2", "profile"]
    assert fold_objectives(["--label", "a:b", "c:d"]) == ["--label", "a:b", "c:d"]
    assert fold_objectives(["--slo", "ttft:1", "tpot", "30", "--x"]) == ["--slo", "ttft:1 tpot 30", "--x"]
    assert fold_objectives(["--slo", "ttft:1", "@L40S:tp=2"]) == ["--slo", "ttft:1", "@L40S:tp=2"]
