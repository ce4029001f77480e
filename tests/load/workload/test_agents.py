"""Recorded agents become graphs: who waits for whom, for how long, and with which prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.load.errors import BenchError
from headway.load.request import PlannedRequest
from headway.load.workload.build import Workload, build_workload
from headway.load.workload.spec import WorkloadSpec
from headway.load.workload.token_sources import TokenizerSource
from tests.load.workload.files import jsonl, write


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
SESSIONS: list[dict[str, Any]] = [
    {
        "session_id": "root",
        "pre_session_spawns": ["early"],
        "turns": [
            {"messages": user("Make a plan."), "max_tokens": 8, "tools": TOOLS,
             "spawns": ["one", {"children": ["two"], "join_at": 2}]},
            {"messages": user("Go on."), "max_tokens": 5, "delay": 250, "extra": {"temperature": 0.5}},
            {"messages": user("End."), "max_tokens": 6, "forks": ["branch", {"child": "aside", "background": True}]},
        ],
    },
    {"session_id": "one", "turns": [{"text": "Search."}]},
    {"session_id": "two", "turns": [{"text": "Read.", "output_length": 3}, {"text": "Tell.", "output_length": 2}]},
    {"session_id": "branch", "turns": [{"text": "More.", "model": "other", "output_length": 1}]},
    {"session_id": "aside", "turns": [{"text": "Aside.", "output_length": 1}]},
    {"session_id": "early", "turns": [{"text": "Early.", "output_length": 1}]},
    {"session_id": "all", "orchestrator": True, "spawns": ["one", "two"]},
]  # fmt: skip


def built(path: Path, source: TokenizerSource, chat: bool = True, **options: Any) -> Workload:
    name = options.pop("dataset_name", "agents")
    return build_workload(
        WorkloadSpec(dataset_name=name, dataset_path=path, disable_shuffle=name == "agents", **options),
        source,
        chat=chat,
    )


def links(requests: list[PlannedRequest]) -> list[tuple[int | None, tuple[int, ...]]]:
    return [(each.follows, each.after) for each in requests]


def test_sessions_fork_spawn_and_join(tmp_path: Path, text: TokenizerSource) -> None:
    made = built(jsonl(tmp_path / "dag.jsonl", SESSIONS), text)
    root, others = made.requests[:9], made.requests[9:]
    said = [(each.prompt.messages or ())[0]["content"] for each in root]
    assert said == ["Early.", "Make a plan.", "Search.", "Read.", "Tell.", "Go on.", "End.", "More.", "Aside."]
    # Go on. waits for Search., End. for Tell.; both branches go on from End.
    assert links(root) == [
        (None, ()), (None, ()), (None, (1,)), (None, (1,)), (3, ()), (1, (2,)), (5, (4,)), (6, ()), (6, ())
    ]  # fmt: skip
    assert [each.output_tokens for each in root] == [1, 8, 256, 3, 2, 5, 6, 1, 1]
    assert {each.graph for each in root} == {0} and {each.graph_size for each in root} == {9}
    assert [each.think_s for each in root] == [0, 0, 0, 0, 0, 0.25, 0, 0, 0]
    assert (root[1].extra_body, root[5].extra_body) == ({"tools": TOOLS}, {"temperature": 0.5})
    assert root[7].extra_body == {"model": "other"}
    # Prompts grow by what was said before: Go on. has the plan and its answer in front.
    assert root[5].prompt_tokens == (root[1].prompt_tokens or 0) + 8 + text.of_text("Go on.").tokens  # type: ignore[operator]
    assert links(others) == [(None, ()), (None, ()), (10, ())] and {each.graph for each in others} == {9}
    assert "2 turns have no number of output tokens; 256 taken" in " ".join(made.notes)
    assert built(tmp_path / "dag.jsonl", text, num_prompts=3).requests[-1].graph_size == 3
    again = [built(tmp_path / "dag.jsonl", text, num_prompts=count) for count in (12, 13)]
    assert ["taken again" in " ".join(each.notes) for each in again] == [False, True]
    assert [len(each.requests) for each in again] == [12, 13]
    flat = built(tmp_path / "dag.jsonl", text, chat=False)
    assert flat.requests[1].prompt.text == "Make a plan." and "their texts alone are used" in " ".join(flat.notes)


def test_rounds_of_an_orchestrator_wait_for_those_before(tmp_path: Path, text: TokenizerSource) -> None:
    children = [{"session_id": name, "turns": [{"text": name, "output_length": 2, "delay": 5}]} for name in "ab"]
    again = {"session_id": "o", "orchestrator": True, "rounds": 2, "think_time_ms": 100, "spawns": ["a", "b"]}
    listed = [{"spawns": ["a"]}, {"spawns": ["b", "b"], "think_time_ms": 30}]
    other = {"session_id": "p", "orchestrator": True, "think_time_ms": 100, "rounds": listed}
    made = built(jsonl(tmp_path / "rounds.jsonl", [again, other, *children]), text).requests
    assert links(made) == [
        (None, ()), (None, ()), (None, (0, 1)), (None, (0, 1)), (None, ()), (None, (4,)), (None, (4,))
    ]  # fmt: skip
    assert [each.think_s for each in made[2:4]] == [0.105] * 2 and [each.think_s for each in made[5:]] == [0.035] * 2


def test_rows_of_a_session_say_all_or_what_they_add(tmp_path: Path, text: TokenizerSource) -> None:
    rows: list[dict[str, Any]] = [
        {"session_id": "a", "messages": user("Hi"), "message_mode": "delta", "tools": TOOLS, "output_length": 4},
        {"session_id": "b", "messages": user("Hi"), "output_length": 5},
        {"session_id": "a", "messages": user("More"), "message_mode": "delta", "output_length": 6, "delay": 20},
        {"session_id": "b", "messages": user("Hi and more"), "output_length": 7},
        {"session_id": "c", "input_length": 9, "output_length": 8},
        {"session_id": "c", "input_length": 5, "output_length": 9},
    ]
    untold = built(jsonl(tmp_path / "untold.jsonl", [{"session_id": "a", "messages": user("Hi")}]), text)
    assert untold.requests[0].output_tokens == 256 and "1 turns have no number" in " ".join(untold.notes)
    made = built(jsonl(tmp_path / "rows.jsonl", rows), text).requests
    assert links(made) == [(None, ()), (0, ()), (None, ()), (None, (2,)), (None, ()), (4, ())]
    assert made[1].extra_body == {"tools": TOOLS} and made[1].think_s == 0.02
    # With times, rows are a trace; a later row comes neither before its time nor before the answer.
    timed = [row | {"timestamp": 100 * number} for number, row in enumerate(rows)]
    trace = built(jsonl(tmp_path / "timed.jsonl", timed), text, dataset_name="mooncake", time_scale=2.0).requests
    assert [each.arrival_s for each in trace] == [0, None, 0.05, None, 0.2, None]
    assert [each.not_before_s for each in trace] == [0, 0.1, 0, 0.1, 0, 0.05] and trace[1].think_s == 0.02


def test_weka_traces_wait_for_tools_and_sub_agents(tmp_path: Path, text: TokenizerSource) -> None:
    first = {"t": 0, "in": 40, "out": 5, "hash_ids": [1, 2, 3], "api_time": 1.0}
    inner = [{"t": 0, "in": 16, "out": 2, "hash_ids": [1], "api_time": 3.0}, {"t": 4, "in": 20, "out": 0}]
    trace = {
        "id": "x", "block_size": 16, "requests": [
            first,
            {"t": 1.5, "type": "subagent", "requests": inner},
            {"t": 1.75, "type": "subagent", "requests": [{"t": 1.75, "in": 16, "out": 2, "api_time": 2.0}]},
            {"t": 9, "in": 60, "out": 4, "hash_ids": [1, 2, 3], "api_time": 1.0},
            {"t": 12, "in": 70, "out": 4, "hash_ids": [1, 2, 3, 4], "think_time": 0.25},
        ],
    }  # fmt: skip
    path = write(tmp_path / "weka.json", json.dumps(trace, indent=1))
    made = built(path, text, chat=False).requests
    assert links(made) == [(None, ()), (None, (0,)), (None, (1,)), (None, (0,)), (None, (0, 2, 3)), (None, (4,))]
    # Where a recorded end is not known, the time since the begin is kept.
    assert [(each.think_s, each.not_before_s) for each in made] == [
        (0, 0),
        (0.5, 0),
        (1, 0),
        (0.75, 0),
        (0, 9),
        (0.25, 0),
    ]
    assert [each.prompt_tokens for each in made] == [40, 16, 20, 16, 60, 70] and made[2].output_tokens == 1
    said = [(each.prompt.text or "").split() for each in made]
    assert said[4][:32] == said[0][:32] and said[4][32:40] != said[0][32:40]  # a block that is not full is nobody's
    # Two traces share no block, unless they say so.
    two = built(jsonl(tmp_path / "two.jsonl", [trace, trace]), text, chat=False).requests
    assert two[0].prompt != two[6].prompt and two[6].graph == 6
    same = trace | {"hash_id_scope": "global"}
    two = built(jsonl(tmp_path / "same.jsonl", [same, same]), text, chat=False).requests
    assert (two[0].prompt.text or "").split()[:32] == (two[6].prompt.text or "").split()[:32]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"session_id": "a"}], "turns are missing"),
        ([{"session_id": "a", "turns": [{"text": "x"}]}] * 2, "line 2: session_id 'a' was there before"),
        ([{"session_id": "a", "turns": [{"text": "x", "forks": ["b"]}]}], "line 1: there is no session 'b'"),
        ([{"session_id": "a", "turns": [{"text": "x", "spawns": ["a"]}]}], "so none comes first"),
        (
            [
                {"session_id": "r", "turns": [{"text": "x", "spawns": ["a"]}]},
                {"session_id": "a", "turns": [{"text": "x", "spawns": ["b"]}]},
                {"session_id": "b", "turns": [{"text": "x", "forks": ["a"]}]},
            ],
            "session 'a' starts itself; r -> a -> b -> a",
        ),
        ([{"turns": [{"text": "x", "forks": ["b"]}, {"text": "y"}]}, {"session_id": "b", "turns": [{"text": "z"}]}],
         "turn 0 forks 'b' and goes on; background: true is expected"),
        ([{"turns": [{"text": "x", "spawns": [{"children": ["b"], "join_at": 4}]}]},
          {"session_id": "b", "turns": [{"text": "z"}]}], "join_at is 4"),
        ([{"turns": [{"text": "x", "max_token": 3}]}], "max_token"),
        ([{"session_id": "o", "orchestrator": True, "rounds": 10**9, "spawns": ["a"]}], "rounds is 1000000000"),
        (
            [{"session_id": str(n), "turns": [{"text": "x", "spawns": [str(n + 1)] * 2}]} for n in range(40)]
            + [{"session_id": "40", "turns": [{"text": "x"}]}],
            "a graph with too many requests; at most 100,000",
        ),
        (
            [{"session_id": str(n), "turns": [{"text": "x", "forks": [str(n + 1)]}]} for n in range(4000)]
            + [{"session_id": "4000", "turns": [{"text": "x"}]}],
            "start each other too deep",
        ),
        ([{"turns": [{"text": "x", "delay": -1}]}], "delay is -1"),
        ([{"turns": [{"messages": [{"content": "x"}]}]}], "a message without a role"),
        ([{"turns": [{}]}], "a turn without messages or text"),
        ([{"session_id": "a", "input_length": 4, "text_input": "x", "output_length": 3}], "not exactly one of"),
        ([{"session_id": "a", "input_length": 4, "output_length": 3, "timestamp": 1}], "--dataset-name mooncake"),
        ([{"requests": [{"t": 0, "in": 0, "out": 1}]}], "without a prompt"),
        ([[]], "this is no object"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_a_line(tmp_path: Path, text: TokenizerSource, rows: list[Any], says: str) -> None:
    with pytest.raises(BenchError) as error:
        built(jsonl(tmp_path / "wrong.jsonl", rows), text)
    assert says in str(error.value) and "\n" not in str(error.value)
