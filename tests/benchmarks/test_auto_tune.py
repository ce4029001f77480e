"""The study of tuning online: both servers get the same requests, those of the traces too."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import auto_tune

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{46 + second}.6805900,{100 + second},{4 + second}\n" for second in range(3)
)
MOONCAKE = "".join(
    f'{{"timestamp": {1000 * second}, "input_length": 1030, "output_length": 3, "hash_ids": [0, {second}]}}\n'
    for second in range(3)
)


def test_both_servers_answer_the_same_requests() -> None:
    found = auto_tune.study("two classes, good settings", Path(), 20.0, 0)
    assert found["worse"] == 0.0 and found["moves"] == [] and found["static"] == found["tuned"]
    assert found["static"]["others_s"] > 0 and found["steps"] > 100
    assert "| two classes, good settings |" in auto_tune.table([found])


@pytest.mark.parametrize(("case", "prompts"), [("chat", [100, 101, 102]), ("conversations", [1030, 1030, 1030])])
def test_real_traces_are_read(tmp_path: Path, case: str, prompts: list[int]) -> None:
    (tmp_path / "azure_conv_2023.csv").write_text(AZURE)
    (tmp_path / "mooncake_synthetic.jsonl").write_text(MOONCAKE)
    whole = auto_tune.replace(auto_tune.CASES[f"{case}, good settings"], rate=1.0, shorter=1)
    found = list(auto_tune.requests(whole, tmp_path, 2.5))
    assert [len(each.request.prompt_token_ids) for each in found] == prompts
    assert [each.at_ns // auto_tune.S for each in found] == [0, 1, 2]
    if case == "conversations":
        first, second = (each.request.prompt_token_ids for each in found[:2])
        assert first[:512] == second[:512] and first[512] != second[512]
