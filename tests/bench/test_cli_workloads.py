"""That the flags of `headway bench` reach the server: read from what the scripted one was asked, and the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.command_line import CommandLine, Ran
from tests.bench.script import script
from tests.bench.scripted_server import ScriptedServer

SHORT = ("--random-input-len", 8, "--random-output-len", 3)


def asked(server: ScriptedServer, tokens: int = 3) -> list[dict[str, Any]]:
    """Bodies of the requests for so many tokens, which those that look at the server are not."""
    entries = sorted(server.logs()["requests"].values(), key=lambda entry: entry["received_ns"])
    return [entry["body"] for entry in entries if entry["body"].get("max_tokens") == tokens]


def scheduled_s(ran: Ran) -> list[float]:
    return [at / 1e9 for at in ran.result()["headway"]["requests"]["scheduled_ns"]]


def test_fields_of_the_body(headway: CommandLine, scripted: ScriptedServer) -> None:
    ran = headway(
        "bench", "--base-url", scripted.url, *SHORT, "--num-prompts", 2, "--num-warmups", 0, "--temperature", 0.5,
        "--top-p", 0.9, "--top-k", 7, "--extra-body", '{"min_p": 0.1, "top_k": 9}', "--no-ignore-eos",
    )  # fmt: skip
    assert ran.code == 0
    for body in asked(scripted):
        assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (0.5, 0.9, 9, 0.1)
        assert body["model"] == "scripted" and body["stream"] is True and "ignore_eos" not in body
        assert len(body["prompt"].split()) == 8


@pytest.mark.parametrize(("flags", "sent"), [((), True), (("--ignore-eos",), True), (("--no-ignore-eos",), None)])
def test_ignore_eos(headway: CommandLine, scripted: ScriptedServer, flags: tuple[str, ...], sent: bool | None) -> None:
    ran = headway("bench", "--base-url", scripted.url, *SHORT, "--num-prompts", 2, *flags)
    assert ran.settings()["ignore_eos"] is bool(sent)
    assert {body.get("ignore_eos") for body in asked(scripted)} == {sent}


def test_ignore_eos_is_refused(headway: CommandLine) -> None:
    with ScriptedServer(kind="openai") as server:
        error = headway("bench", "--base-url", server.url, *SHORT, "--num-prompts", 2, "--ignore-eos").error()
        assert "refuses the field 'ignore_eos'" in error
        assert headway("bench", "--base-url", server.url, *SHORT, "--num-prompts", 2).code == 0


def test_headers_and_route(headway: CommandLine) -> None:
    """A key in a header of the user's own, and a server under a prefix."""
    with ScriptedServer(api_key="k", path_prefix="/llm") as server:
        arguments = ["bench", "--base-url", server.url, *SHORT, "--num-prompts", 2]
        ran = headway(*arguments, "--header", "Authorization=Bearer k", "--header", "X-Other=1")
        assert ran.code == 0
        error = headway(*arguments, "--api-key", "k", "--endpoint", "/v2/completions").error()
        assert "/v2/completions" in error
        assert headway(*arguments, "--api-key", "k", "--endpoint", "/v1/completions").code == 0


def test_a_server_that_is_still_loading(headway: CommandLine) -> None:
    with ScriptedServer(loading_for=600) as server:
        arguments = ["bench", "--base-url", server.url, *SHORT, "--num-prompts", 2]
        assert "is not ready" in headway(*arguments).error()
        server.ready(0.7)
        assert headway(*arguments, "--ready-check-timeout-sec", 60).code == 0


def test_warm_ups(headway: CommandLine, scripted: ScriptedServer) -> None:
    for count in (0, 5):
        scripted.forget()
        ran = headway("bench", "--base-url", scripted.url, *SHORT, "--num-prompts", 4, "--num-warmups", count)
        assert len(asked(scripted)) == 4 + count and ran.result()["completed"] == 4


def test_seeds(headway: CommandLine, scripted: ScriptedServer) -> None:
    prompts = []
    for seed in (1, 1, 2):
        scripted.forget()
        headway("bench", "--base-url", scripted.url, *SHORT, "--num-prompts", 4, "--num-warmups", 0, "--seed", seed)
        prompts.append({body["prompt"] for body in asked(scripted)})
    assert prompts[0] == prompts[1] and not prompts[0] & prompts[2]


def test_token_ids(headway: CommandLine, scripted: ScriptedServer, tmp_path: Path) -> None:
    from tests.text.tiny_tokenizers import byte_level, save

    folder = save(tmp_path / "tokenizer", byte_level())
    ran = headway(
        "bench", "--base-url", scripted.url, *SHORT, "--num-prompts", 3, "--num-warmups", 0, "--prompts", "token-ids",
        "--model", folder, "--served-model-name", "scripted",
    )  # fmt: skip
    assert ran.code == 0 and ran.result()["model_id"] == "scripted"
    bodies = asked(scripted)
    assert len(bodies) == 3
    assert all(len(body["prompt"]) == 8 and all(isinstance(i, int) for i in body["prompt"]) for body in bodies)


@pytest.mark.parametrize("backend", ["openai-chat", "vllm"])
def test_conversations_hold_the_answers(headway: CommandLine, backend: str) -> None:
    with ScriptedServer(kind="vllm", script=script(texts=["forty ", "two "])) as server:
        ran = headway(
            "bench", "--base-url", server.url, "--backend", backend, "--dataset-name", "multi_turn", "--input-len", 6,
            "--output-len", 3, "--multi-turn-turns", 3, "--multi-turn-think-s", 0.01, "--multi-turn-prefix-len", 4,
            "--num-prompts", 3, "--num-warmups", 0, "--max-concurrency", 1,
        )  # fmt: skip
        assert ran.code == 0, ran.err
        first, second, third = asked(server)
    if backend == "vllm":
        assert len(first["prompt"].split()) == 10
        assert second["prompt"].startswith(first["prompt"] + "forty two tok ")
        assert third["prompt"].startswith(second["prompt"] + "forty two tok ")
        return
    assert [message["role"] for message in third["messages"]] == ["user", "assistant"] * 2 + ["user"]
    assert third["messages"][:3] == second["messages"] and second["messages"][:1] == first["messages"]
    assert all(each["content"] == "forty two tok " for each in third["messages"][1::2])
    assert [len(each["content"].split()) for each in third["messages"][::2]] == [10, 6, 6]


def test_agents_are_graphs_with_a_makespan(headway: CommandLine, tmp_path: Path) -> None:
    """A planner whose second turn waits for a worker and brings the plan; in the report graphs have a line."""
    file = tmp_path / "agents.jsonl"
    planner = [{"text": "plan", "spawns": ["worker"]}, {"text": "now act", "delay": 30}]
    sessions = [
        {"session_id": "planner", "turns": [{**turn, "output_length": 3} for turn in planner]},
        {"session_id": "worker", "turns": [{"text": "work", "output_length": 3}]},
    ]
    file.write_text("\n".join(map(json.dumps, sessions)))
    with ScriptedServer(kind="vllm", script=script(texts=["forty ", "two "])) as server:
        ran = headway(
            "bench", "--base-url", server.url, "--backend", "openai-chat", "--dataset-name", "agents", "--dataset-path",
            file, "--num-warmups", 0, verbose=False,
        )  # fmt: skip
        assert ran.code == 0, ran.err
        _, work, act = asked(server)
    assert [each["content"] for each in act["messages"]] == ["plan", "forty two tok ", "now act"]
    assert [each["content"] for each in work["messages"]] == ["work"] and "ignore_eos" not in act
    columns = ran.result()["headway"]["requests"]
    assert columns["graph"] == [0, 0, 0] and columns["graph_size"] == [3, 3, 3]
    assert columns["scheduled_ns"][2] == columns["end_ns"][1] + 30_000_000
    found = ran.result()["headway"]["summaries"][0]["graphs"]
    assert (found["complete"], found["total"]) == (1, 1) and found["makespan_ms"]["mean"] > 30
    assert "1 of 1 graph complete; makespan" in ran.out


@pytest.mark.parametrize(
    "flags",
    [
        ("--goodput", "ttft:5000", "tpot:0.001"),
        ("--goodput", "ttft:5000,tpot:0.001"),
        ("--goodput", "ttft:5000", "--goodput", "tpot:0.001"),
        ("--goodput=ttft:5000 tpot:0.001",),
    ],
)
def test_objectives(headway: CommandLine, scripted: ScriptedServer, flags: tuple[str, ...]) -> None:
    ran = headway("bench", *flags, "--base-url", scripted.url, *SHORT, "--num-prompts", 5, "--num-warmups", 0)
    assert ran.code == 0 and ran.settings()["goodput"] == {"ttft": 5000, "tpot": 0.001}
    attainment = ran.result()["headway"]["summaries"][0]["attainment"]
    assert attainment["share"] == 0 and attainment["missed_by"]["tpot"] == 5 and not attainment["missed_by"].get("ttft")
    assert "TPOT by 5" in ran.out


def test_a_mix_with_objectives_of_its_classes(headway: CommandLine, scripted: ScriptedServer, tmp_path: Path) -> None:
    mix = tmp_path / "two.toml"
    mix.write_text(
        'description = "two"\n[[class]]\nname = "easy"\nshare = 3\nrandom_input_len = 8\nrandom_output_len = 3\n'
        'goodput = { ttft = 60000 }\n[[class]]\nname = "hard"\nshare = 1\nrandom_input_len = 4\n'
        "random_output_len = 5\ngoodput = { ttft = 0.001 }\npriority = 7\n"
    )
    ran = headway("bench", "--base-url", scripted.url, "--mix", mix, "--num-prompts", 20, "--num-warmups", 0)
    assert ran.code == 0
    assert len(asked(scripted, 3)) == 15 and len(asked(scripted, 5)) == 5
    assert {body["priority"] for body in asked(scripted, 5)} == {7}
    shares = {each["name"]: each["attainment"]["share"] for each in ran.result()["headway"]["summaries"]}
    assert (shares["whole run"], shares["class easy"], shares["class hard"]) == (0.75, 1.0, 0.0)
    assert "Objectives missed (class hard)" in ran.out and ran.settings()["mix"] == str(mix)


OWN = """
[[class]]
name = "chat"
arrival = "constant"
request_rate = 50
random_input_len = 8
random_output_len = 3
goodput = { ttft = 60000 }
service_class = "interactive"
headers = { x-request-id = "of chat" }
[[class]]
name = "offline"
max_concurrency = 2
num_prompts = 5
random_input_len = 8
random_output_len = 4
goodput = { e2el = 0.001 }
[[class]]
name = "hasty"
arrival = "all-at-once"
num_prompts = 3
random_input_len = 8
random_output_len = 2000
cancel_share = 1
cancel_after_s = 0.05
goodput = { ttft = 60000 }
"""


def test_a_mix_of_classes_with_arrivals_of_their_own_and_probes(
    headway: CommandLine, scripted: ScriptedServer, tmp_path: Path
) -> None:
    mix = tmp_path / "own.toml"
    mix.write_text(OWN)
    ran = headway(
        "bench", "--base-url", scripted.url, "--mix", mix, "--duration", 0.4, "--time-scale", 2, "--probe-rate", 50,
        "--num-warmups", 0,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    content = ran.result()["headway"]
    views = {each["name"]: each for each in content["summaries"]}
    counts = {name: (views[name]["completed"], views[name]["cancelled"], views[name]["failed"]) for name in views}
    assert counts["class chat"] == (40, 0, 0) and counts["class offline"] == (5, 0, 0)
    assert counts["class hasty"] == (0, 3, 0) and counts["whole run"] == (45, 3, 0)
    assert views["whole run"]["attainment"]["met"] == 40 and views["whole run"]["attainment"]["total"] == 45
    goodput = [views[name]["attainment"]["requests_per_s"] for name in ("class chat", "whole run")]
    assert goodput[0] == goodput[1] > 0
    assert views["probe stream"]["completed"] >= 15 and content["probes"]["count"] >= 15
    (named,) = [entry for name, entry in scripted.logs()["requests"].items() if name == "of chat"]
    assert named["body"]["service_class"] == "interactive"
    assert ran.settings()["arrivals"].startswith("chat: constant, 50 requests/s; offline: closed loop of 2; hasty: all")
    assert "Probes" in ran.out and "cancelled" in ran.out
    assert ran.settings()["probe_rate"] == 50


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{46 + second:02}.0000000,{8 + second},3\n" for second in range(4)
)
MOONCAKE = "".join(
    json.dumps(
        {
            "timestamp": 1000 * second,
            "input_length": 8 + second,
            "output_length": 3,
            "hash_ids": [0, *range(8 * second + 1, 8 * second + 3 - (second == 0))],
        }
    )
    + "\n"
    for second in range(4)
)
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + "".join(
    f"{second},{'ChatGPT' if second % 2 else 'GPT-4'},{8 + second},3,{11 + second},API log\n" for second in range(8)
)


@pytest.mark.parametrize(
    ("name", "content", "flags", "lengths", "seconds"),
    [
        ("azure", AZURE, (), [8, 9, 10, 11], 3.0),
        ("mooncake", MOONCAKE, ("--trace-block-size", 4), [8, 9, 10, 11], 3.0),
        ("burstgpt", BURST, ("--burstgpt-model", "ChatGPT"), [9, 11, 13, 15], 6.0),
    ],
)
def test_traces_are_replayed(
    headway: CommandLine,
    scripted: ScriptedServer,
    tmp_path: Path,
    name: str,
    content: str,
    flags: tuple[Any, ...],
    lengths: list[int],
    seconds: float,
) -> None:
    path = tmp_path / name
    path.write_text(content)
    ran = headway(
        "bench", "--base-url", scripted.url, "--dataset-name", name, "--dataset-path", path, "--time-scale", 20,
        "--num-warmups", 0, *flags,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert [len(body["prompt"].split()) for body in asked(scripted)] == lengths
    times = scheduled_s(ran)
    assert times[-1] - times[0] == pytest.approx(seconds / 20)
    prompts = [body["prompt"].split() for body in asked(scripted)]
    shared = [words[:4] for words in prompts]
    assert (shared.count(shared[0]) == 4) == (name == "mooncake")


@pytest.mark.parametrize(
    ("flags", "prompts", "answers"),
    [
        (("--input-len", "uniform:min=5,max=6", "--output-len", 4), {5, 6}, {4}),
        (("--random-input-len", 40, "--random-output-len", 3, "--random-range-ratio", 0.1), set(range(36, 45)), None),
        (("--random-input-len", 4, "--random-prefix-len", 6, "--random-output-len", 3), {10}, {3}),
        (("--random-input-len", 40, "--max-input-len", 9, "--max-output-len", 2), {9}, {2}),
        (
            ("--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", 5,
             "--prefix-repetition-suffix-len", 4, "--prefix-repetition-num-prefixes", 2,
             "--prefix-repetition-output-len", 3),
            {9}, {3},
        ),
    ],
)  # fmt: skip
def test_lengths(
    headway: CommandLine,
    scripted: ScriptedServer,
    flags: tuple[Any, ...],
    prompts: set[int],
    answers: set[int] | None,
) -> None:
    ran = headway("bench", "--base-url", scripted.url, "--num-prompts", 12, "--num-warmups", 0, *flags)
    assert ran.code == 0, ran.err
    columns = ran.result()["headway"]["requests"]
    assert set(columns["prompt_tokens"]) <= prompts and len(set(columns["prompt_tokens"])) >= min(2, len(prompts))
    assert answers is None or set(columns["output_tokens"]) == answers
    bodies = [entry["body"] for entry in scripted.logs()["requests"].values()]
    starts = {body["prompt"][:12] for body in bodies if isinstance(body["prompt"], str)}
    if "--prefix-repetition-num-prefixes" in flags or "--random-prefix-len" in flags:
        assert len(starts) <= 5  # two prefixes at most, and what looks at the server


def test_texts_of_a_file(headway: CommandLine, scripted: ScriptedServer, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"text {i}"}) + "\n" for i in range(5)))
    arguments = ["bench", "--base-url", scripted.url, "--dataset-name", "custom", "--dataset-path", path]
    arguments += ["--num-warmups", 0, "--custom-output-len", 3, "--max-concurrency", 1]
    in_order = [f"text {i}" for i in range(5)]
    ran = headway(*arguments, "--disable-shuffle", "--num-prompts", 7, "--no-oversample")
    assert ran.code == 0 and [body["prompt"] for body in asked(scripted)] == in_order
    scripted.forget()
    headway(*arguments, "--num-prompts", 7)
    texts = [body["prompt"] for body in asked(scripted)]
    assert len(texts) == 7 and texts[:5] != in_order and sorted(texts[:5]) == in_order


def test_sharegpt(headway: CommandLine, scripted: ScriptedServer, tmp_path: Path) -> None:
    path = tmp_path / "shared.json"
    said = "one two three four five six seven eight nine ten"
    rows = [{"conversations": [{"from": "human", "value": said}, {"from": "gpt", "value": said}]}] * 3
    path.write_text(json.dumps(rows))
    arguments = ["bench", "--base-url", scripted.url, "--dataset-name", "sharegpt", "--dataset-path", path]
    ran = headway(*arguments, "--num-warmups", 0, "--sharegpt-output-len", 3)
    assert ran.code == 0 and [body["prompt"] for body in asked(scripted)] == [said] * 3


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--request-rate", 200), "Poisson"),
        (("--request-rate", 200, "--burstiness", 0.5), "gamma"),
        (("--request-rate", 200, "--arrival", "constant"), "constant"),
        (("--request-rate", 400, "--on-seconds", 0.02, "--off-seconds", 0.02), "on"),
        (("--ramp-up-start-rps", 100, "--ramp-up-end-rps", 400, "--ramp-up-strategy", "exponential"), "exponential"),
        (("--request-rate", "inf"), "once"),
        (("--max-concurrency", 2), "closed loop"),
    ],
)
def test_arrivals(headway: CommandLine, scripted: ScriptedServer, flags: tuple[Any, ...], says: str) -> None:
    ran = headway("bench", "--base-url", scripted.url, *SHORT, "--num-prompts", 20, "--num-warmups", 0, *flags)
    assert ran.code == 0, ran.err
    assert says.lower() in ran.settings()["arrivals"].lower()
    assert len(set(scheduled_s(ran))) == (
        1 if says == "once" else 20 if says != "closed loop" else len(set(scheduled_s(ran)))
    )


def test_a_duration(headway: CommandLine, scripted: ScriptedServer) -> None:
    arguments = ["bench", "--base-url", scripted.url, *SHORT, "--num-warmups", 0, "--arrival", "constant"]
    ran = headway(*arguments, "--request-rate", 40, "--duration", 0.5)
    assert ran.code == 0 and ran.result()["completed"] == pytest.approx(20, abs=1)
    ran = headway(*arguments, "--request-rate", 40, "--duration", 0.5, "--num-prompts", 4)
    assert ran.result()["completed"] == 4


def test_requests_of_tenants_carry_their_keys(headway: CommandLine, tmp_path: Path) -> None:
    mix = tmp_path / "tenants.toml"
    parts = ('[[class]]\nname = "{0}"\nshare = 1\ntenant = "{0}"\nrandom_input_len = 8\nrandom_output_len = 3\n',) * 2
    mix.write_text("".join(part.format(name) for part, name in zip(parts, ("acme", "lab"), strict=True)))
    with ScriptedServer(api_key="k") as server:
        arguments = ["bench", "--base-url", server.url, "--api-key", "k", "--mix", mix, "--num-prompts", 4]
        error = headway(*arguments, "--tenant-key", "acme=k").error()
        assert "requests belong to tenant 'lab', whose API key is unknown; give --tenant-key lab=KEY" in error
        ran = headway(*arguments, "--tenant-key", "acme=k", "--tenant-key", "lab=wrong", "--num-warmups", 0)
        views = {each["name"]: each for each in ran.result()["headway"]["summaries"]}
        assert views["tenant acme"]["completed"] == 2 and views["tenant lab"]["failures"] == {"auth": 2}
        assert "wrong" not in json.dumps(ran.settings())
