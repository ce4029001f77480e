"""Datasets that are files: what is read, what is left out, and what is said of a broken one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.load.errors import BenchError
from headway.load.workload.datasets import SampleRequest
from headway.load.workload.lengths import Fixed
from headway.load.workload.texts import Custom, ShareGPT
from headway.load.workload.token_sources import TokenizerSource
from headway.load.workload.traces import TraceRows, read_azure, read_burstgpt, read_mooncake
from tests.load.workload.files import AZURE, BURSTGPT, MOONCAKE, jsonl, sharegpt, write

PROMPT = "Tell me a story about a fox and a house by the sea."
ANSWER = "Once upon a time there was a fox. It lived in a house by the sea."


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def firsts(dataset: Any, count: int | None = None) -> list[SampleRequest]:
    drawn = dataset.draw(count, rng())
    assert all(len(turns) == 1 for turns in drawn)
    return [turns[0] for turns in drawn]


def times(trace: TraceRows) -> tuple[float | None, ...]:
    return tuple(request.arrival_s for request in firsts(trace))


@pytest.mark.parametrize(
    "change",
    [
        str,
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace("\n", "\r"),
        lambda text: "\ufeff" + text + "\n\n",
    ],
)
def test_azure(tmp_path: Path, change: Callable[[str], str]) -> None:
    trace = read_azure(write(tmp_path / "azure.csv", change(AZURE)))
    assert [(row.input_tokens, row.output_tokens) for row in firsts(trace)] == [
        (374, 44),
        (396, 109),
        (30, 12),
        (3000, 5),
        (200, 60),
    ]
    # Seven digits of a second, exactly.
    assert times(trace) == (0.0, 4.3145790, 4.5418770, 4.5418770, 13.3194101)
    assert trace.notes == [] and trace.has_times and not trace.repeats_prompts


def test_azure_of_2024_has_a_time_zone_and_more_columns(tmp_path: Path) -> None:
    rows = "2024-05-10 00:00:00.009930+00:00,10,2,x\n2024-05-10 00:00:01Z,3,1,\n"
    later = f"TIMESTAMP,ContextTokens,GeneratedTokens,Other\n{rows}"
    assert times(read_azure(write(tmp_path / "a.csv", later))) == (0.0, 0.99007)


def test_burstgpt_leaves_out_failures_and_takes_one_model_if_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "burst.csv", BURSTGPT)
    trace = read_burstgpt(path)
    assert [row.input_tokens for row in firsts(trace)] == [472, 1087, 88]
    assert times(trace) == (0.0, 40.0, 113.5)
    assert trace.notes == ["burst.csv: 1 without an answer of 4 requests left out"]
    assert [row.input_tokens for row in firsts(read_burstgpt(path, "GPT-4"))] == [88]
    with pytest.raises(BenchError, match=r"no requests to the model 'GPT-5'; it has ChatGPT, GPT-4"):
        read_burstgpt(path, "GPT-5")


def test_mooncake_blocks(tmp_path: Path) -> None:
    trace = read_mooncake(jsonl(tmp_path / "moon.jsonl", MOONCAKE))
    rows = firsts(trace)
    assert rows[0].shared == ((0, 512), (1, 512), (2, 276))
    assert rows[2].shared == ((4, 512), (5, 88))
    assert rows[3].shared == ((0, 512),)
    assert times(trace) == (0.0, 0.04, 0.041, 2.5)
    assert trace.repeats_prompts
    with pytest.raises(BenchError, match=r"line 1: 3 hash_ids for 1300 tokens; 82 blocks of 16 .*block-size"):
        read_mooncake(tmp_path / "moon.jsonl", block_size=16)


def test_mooncake_without_hashes_and_out_of_order(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"timestamp": 10, "input_length": 5, "output_length": 2, "more": 1},
        {"timestamp": 5, "input_length": 6, "output_length": 2, "tenant": "acme"},
        {"timestamp": 20, "input_length": 0, "output_length": 2},
    ]
    trace = read_mooncake(jsonl(tmp_path / "m.jsonl", rows))
    assert [row.input_tokens for row in firsts(trace)] == [6, 5] and not trace.repeats_prompts
    assert [row.tenant for row in firsts(trace)] == ["acme", ""]
    assert trace.notes == [
        "m.jsonl: 1 without a prompt of 3 requests left out",
        "m.jsonl: 1 requests come before the one above them; put in order of time",
    ]


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = "2023-11-16 18:15:46.6805900,374,44\n"
BURST_HEAD = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
GOOD = '{"timestamp": 0, "input_length": 10, "output_length": 6}\n'


@pytest.mark.parametrize(
    ("reader", "content", "words"),
    [
        (read_azure, "", "is empty"),
        (read_azure, " \n\n", "is empty"),
        (read_azure, HEAD, "has a header and no requests"),
        (read_azure, HEAD + ROW + "2023-11-16 18:15:47,1\n", "line 3: 2 values; the header has 3 columns"),
        (read_azure, HEAD + ROW + "\n\n2023-11-16 18:15:47,1,x\n", "line 5: GeneratedTokens is 'x'; a whole number"),
        (read_azure, HEAD + "2023-11-16 18:15:47,-4,3\n", "line 2: ContextTokens is '-4'"),
        (read_azure, HEAD + "2023-11-16 18:15:47,4.5,3\n", "line 2: ContextTokens is '4.5'"),
        (read_azure, HEAD + "2023-11-16 18:15:47,inf,3\n", "line 2: ContextTokens is 'inf'"),
        (read_azure, HEAD + "yesterday,4,3\n", "line 2: TIMESTAMP is 'yesterday'; expected as 2023-11-16"),
        (read_azure, HEAD + "2023-11-16 18:15:47.12x,4,3\n", "line 2: TIMESTAMP is '2023-11-16 18:15:47.12x'"),
        (read_azure, "time,prompt\n1,2\n", "line 1: no column TIMESTAMP; an Azure trace begins with TIMESTAMP,Con"),
        (read_azure, HEAD + "2023-11-16 18:15:47,4,0\n", "no request with a prompt and an answer"),
        (read_azure, HEAD.encode() + b"2023\xff", "line 2: byte 0xff is not UTF-8"),
        (read_burstgpt, HEAD + ROW, "no column Timestamp; a BurstGPT trace begins with Timestamp,Request tokens"),
        (read_burstgpt, BURST_HEAD + "soon,GPT-4,1,2,3,API log\n", "line 2: Timestamp is 'soon'; a number"),
        (read_burstgpt, BURST_HEAD + "nan,GPT-4,1,2,3,API log\n", "line 2: Timestamp is 'nan'"),
        (read_mooncake, GOOD + "{broken\n", 'line 2: .*; expected as {"timestamp": 40'),
        (read_mooncake, GOOD + '{"timestamp": 0, "input_length": 10}\n', "line 2: .*output_length"),
        (read_mooncake, GOOD + '{"timestamp": "0", "input_length": 1, "output_length": 6}', "line 2: .*timestamp"),
        (read_mooncake, GOOD + GOOD.replace("10", "-10"), "line 2: a length or hash id below 0"),
        (read_mooncake, GOOD.replace("}", ', "hash_ids": [-1]}'), "line 1: a length or hash id below 0"),
        (read_mooncake, GOOD.replace("}", ', "hash_ids": [1, 2]}'), "line 1: 2 hash_ids for 10 tokens; 1 blocks"),
        (read_mooncake, "[1, 2]\n", "line 1: .*object"),
        (read_mooncake, GOOD + '{"x": ' + "[" * 5000, "line 2: .*recursion"),
        (read_azure, HEAD + ROW + '"' + "1" * 200_000 + '",4,3\n', "line 3: field larger than field limit"),
        (read_azure, HEAD + '2023-11-16 18:15:47,"4\n",x\n', "line 3: GeneratedTokens is 'x'"),
        (read_azure, HEAD + f"{'2023' * 1000},4,3\n", r"line 2: TIMESTAMP is '[0-9]+\.\.\.; expected as"),
    ],
)
def test_a_broken_trace_is_named_with_its_line(
    tmp_path: Path, reader: Callable[[Path], object], content: str | bytes, words: str
) -> None:
    path = write(tmp_path / "trace.csv", content)
    with pytest.raises(BenchError, match=words) as caught:
        reader(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 400


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"none.csv cannot be read: No such file"):
        read_azure(tmp_path / "none.csv")
    with pytest.raises(BenchError, match="cannot be read: Is a directory"):
        read_mooncake(tmp_path)
    with pytest.raises(BenchError, match="--trace-block-size is 0"):
        read_mooncake(tmp_path, 0)


def test_sharegpt_takes_first_pairs_of_sensible_length(tmp_path: Path, text: TokenizerSource) -> None:
    long = "many words and more of them " * 300
    pairs = [(PROMPT, ANSWER, "and then?"), ("Hi", ANSWER), (PROMPT, "No"), (long, ANSWER), (PROMPT,), (ANSWER, PROMPT)]
    dataset = ShareGPT(sharegpt(tmp_path / "s.json", pairs), text, shuffle=False)
    rows = firsts(dataset, 10)
    assert [row.text for row in rows] == [PROMPT, ANSWER]
    assert rows[0].output_tokens == text.count(ANSWER) and rows[0].input_tokens == text.count(PROMPT)
    used = "4 to 1024 prompt tokens and at most 2048 tokens in all"
    assert dataset.notes == [
        "s.json: 1 of 6 conversations have no answer; left out",
        f"s.json: 3 of 5 conversations left out: only those with {used} are used",
    ]


def test_sharegpt_lengths_may_be_overridden(tmp_path: Path, text: TokenizerSource) -> None:
    long = "many words and more of them " * 200
    path = sharegpt(tmp_path / "s.json", [(PROMPT, "No"), (long, ANSWER)])
    overridden = firsts(ShareGPT(path, text, output_len=Fixed(7), shuffle=False))
    assert [(row.text, row.output_tokens) for row in overridden] == [(PROMPT, 7)]
    assert [row.text for row in firsts(ShareGPT(path, text, longest_prompt=3000))] == [long]


def test_texts_come_in_random_order_unless_told_otherwise(tmp_path: Path, text: TokenizerSource) -> None:
    prompts = [f"{PROMPT} {number}" for number in range(30)]
    share = sharegpt(tmp_path / "s.json", [(prompt, ANSWER) for prompt in prompts])
    own = jsonl(tmp_path / "c.jsonl", [{"prompt": prompt, "output_tokens": 5} for prompt in prompts])
    for kind, path in ((ShareGPT, share), (Custom, own)):
        ordered = [row.text for row in firsts(kind(path, text, shuffle=False), 30)]
        shuffled = [row.text for row in firsts(kind(path, text), 30)]
        assert ordered == prompts and shuffled != prompts and sorted(map(str, shuffled)) == sorted(prompts)
        assert [row.text for row in firsts(kind(path, text), 30)] == shuffled
        assert len(firsts(kind(path, text), 3)) == 3


def test_custom_prompts_and_their_answers(tmp_path: Path, text: TokenizerSource) -> None:
    path = jsonl(tmp_path / "c.jsonl", [{"prompt": PROMPT, "output_tokens": 5}, {"prompt": "Hi", "extra": 1}])
    dataset = Custom(path, text, shuffle=False)
    assert [(row.text, row.output_tokens) for row in firsts(dataset)] == [(PROMPT, 5), ("Hi", 256)]
    assert dataset.notes == ["c.jsonl: 1 of 2 prompts have no output_tokens; 256 taken"]
    assert [row.output_tokens for row in firsts(Custom(path, text, output_len=Fixed(9)))] == [9, 9]
    short = Custom(path, text, longest_prompt=3)
    assert [row.text for row in firsts(short)] == ["Hi"]
    assert short.notes[-1] == "c.jsonl: 1 prompts longer than 3 tokens left out"


@pytest.mark.parametrize(
    ("kind", "content", "words"),
    [
        (ShareGPT, "", "is empty"),
        (ShareGPT, '[{"conversations": [\n{"value": "a"},\n', r"line \d: .*; the file must be one JSON list"),
        (ShareGPT, '[{"from": ' + "[" * 5000, "line 1: .*recursion"),
        (ShareGPT, '[{"from": ' + "9" * 5000, "line 1: .*; the file must be one JSON list"),
        (ShareGPT, '{"conversations": []}', "Expected `array`.*; expected as"),
        (ShareGPT, '[{"conversations": [{"from": "human"}]}]', r"missing required field `value`.*\$\[0\]"),
        (ShareGPT, "[]", "no conversation with a prompt and an answer"),
        (
            ShareGPT,
            '[{"conversations": [{"value": "a"}, {"value": "b"}]}]',
            "none of 1 conversations has 4 to 1024 prompt tokens",
        ),
        (Custom, '{"prompt": "a"}\n{"question": "b"}\n', "line 2: .*prompt"),
        (Custom, '{"prompt": "a"}\n{"prompt": 5}\n', "line 2: Expected `str`"),
        (Custom, '{"prompt": "a"}\n\n{"prompt": ""}\n', "line 3: the prompt is empty"),
        (Custom, '{"prompt": "a", "output_tokens": 0}\n', "line 1: output_tokens is 0"),
        (Custom, '{"prompt": "a", "output_tokens": 1.5}\n', "line 1: .*output_tokens"),
        (Custom, "What is this?\n", "line 1: .*; expected as"),
    ],
)
def test_broken_texts_are_named(tmp_path: Path, text: TokenizerSource, kind: Any, content: str, words: str) -> None:
    path = write(tmp_path / "texts.json", content)
    with pytest.raises(BenchError, match=words) as caught:
        kind(path, text).draw(1, rng())
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_every_prompt_too_long(tmp_path: Path, text: TokenizerSource) -> None:
    path = jsonl(tmp_path / "c.jsonl", [{"prompt": PROMPT}])
    with pytest.raises(BenchError, match="every prompt is longer than --max-input-len 2"):
        Custom(path, text, longest_prompt=2).draw(1, rng())


REAL = Path(os.environ.get("HEADWAY_TRACES", "."))


@pytest.mark.skipif(not (REAL / "azure_conv_2023.csv").is_file(), reason="HEADWAY_TRACES has no azure_conv_2023.csv")
def test_the_real_azure_trace() -> None:
    trace = read_azure(REAL / "azure_conv_2023.csv")
    assert trace.rows == 19_366 and trace.notes == []
    assert times(trace)[-1] == pytest.approx(3501.7, abs=0.1)
    assert max(row.input_tokens for row in firsts(trace)) == 14_050


@pytest.mark.skipif(
    not (REAL / "mooncake_synthetic.jsonl").is_file(), reason="HEADWAY_TRACES has no mooncake_synthetic.jsonl"
)
def test_the_real_mooncake_trace() -> None:
    trace = read_mooncake(REAL / "mooncake_synthetic.jsonl")
    rows = firsts(trace)
    assert trace.rows == 3993 and trace.notes == []
    assert sum(row.input_tokens for row in rows) == 61_194_628
    assert all(sum(length for _, length in row.shared) == row.input_tokens for row in rows)
