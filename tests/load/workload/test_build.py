"""Whole workloads: reproducible, as many as asked for, at the times asked for, and nothing changed in silence."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headway.bench.client.conversations import Conversations
from headway.load.errors import BenchError
from headway.load.workload.arrivals import AllAtOnce, Constant, Poisson, Trace
from headway.load.workload.build import Workload, build_workload, warm_up_requests
from headway.load.workload.lengths import Fixed, LogNormal, Uniform
from headway.load.workload.mix import bundled_mixes
from headway.load.workload.schedule import MOST_PER_USER_S
from headway.load.workload.spec import WorkloadSpec
from headway.load.workload.token_sources import TokenIdSource, TokenizerSource, WordSource
from headway.text.tokenizer import Tokenizer
from tests.load.workload.files import AZURE, MOONCAKE, jsonl, sharegpt, write
from tests.text.tiny_tokenizers import save, sentencepiece_style

SMALL: dict[str, Any] = {"num_prompts": 20, "random_input_len": 30, "random_output_len": 10}


def build(source: Any, chat: bool = False, **options: Any) -> Workload:
    return build_workload(WorkloadSpec(**options), source, chat=chat)


def plain(workload: Workload) -> list[Any]:
    """Its requests without their prompts."""
    return [(r.prompt_tokens, r.output_tokens, r.arrival_s, r.class_name, r.follows) for r in workload.requests]


def test_random_lengths_prefix_and_times(text: TokenizerSource) -> None:
    ratio = '{"input": 0.5, "output": 0.2}'
    made = build(text, random_prefix_len=16, random_range_ratio=ratio, arrival=Poisson(10), seed=3, **SMALL)
    assert [request.index for request in made.requests] == list(range(20))
    assert {request.prompt_tokens for request in made.requests} <= set(range(16 + 15, 16 + 46))
    assert {request.output_tokens for request in made.requests} <= set(range(8, 13))
    encoded = [text.tokenizer.encode(request.prompt.text or "") for request in made.requests]
    assert [len(ids) for ids in encoded] == [request.prompt_tokens for request in made.requests]
    assert len({tuple(ids[:16]) for ids in encoded}) == 1 and len({tuple(ids[16:18]) for ids in encoded}) == 20
    times = [request.arrival_s for request in made.requests]
    expected = Poisson(10).offsets(20, np.random.default_rng([3, 1]))
    np.testing.assert_allclose(times, expected, atol=1e-9)
    assert (made.arrivals, made.notes, made.classes) == ("Poisson, 10 requests/s", [], {})
    assert len(made.requests) == 20 and made.longest_tokens == max(
        (r.prompt_tokens or 0) + r.output_tokens for r in made.requests
    )


def test_the_same_seed_is_the_same_workload_and_another_is_not(text: TokenizerSource, words: WordSource) -> None:
    for source in (text, words):
        first, second = (build(source, arrival=Poisson(3), seed=5, **SMALL) for _ in range(2))
        assert first.requests == second.requests and first.fingerprint() == second.fingerprint()
        assert build(source, arrival=Poisson(3), seed=6, **SMALL).fingerprint() != first.fingerprint()


PROGRAM = """
from headway.load.workload.build import build_workload
from headway.load.workload.spec import WorkloadSpec
from headway.load.workload.token_sources import WordSource
from headway.load.workload.arrivals import Gamma
print(build_workload(WorkloadSpec(mix="assistants", num_prompts=60, seed=9, arrival=Gamma(4, 0.5)), WordSource(1.25),
                     chat=True).fingerprint())
"""


def test_a_workload_is_the_same_in_another_process_and_on_another_day() -> None:
    """A new value here means that results before and after cannot be paired: say so where changes are listed."""
    said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout.strip()
    assert said == "d35ffde0cc3f30da"


def test_rate_and_arrivals_do_not_change_what_is_sent(text: TokenizerSource) -> None:
    options: dict[str, Any] = {"input_len": LogNormal(40, 0.5), "num_prompts": 15}
    slow, fast = (build(text, arrival=Poisson(rate), **options) for rate in (1.0, 2.0))
    assert [request.prompt for request in slow.requests] == [request.prompt for request in fast.requests]
    halved = [(request.arrival_s or 0) / 2 for request in slow.requests]
    np.testing.assert_allclose(halved, [request.arrival_s for request in fast.requests], atol=2e-9)
    closed = build(text, users=4, **options)
    assert [request.prompt for request in closed.requests] == [request.prompt for request in slow.requests]
    assert {request.arrival_s for request in closed.requests} == {None} and closed.arrivals == "closed loop"


def test_a_duration_limits_what_arrives(text: TokenizerSource) -> None:
    made = build(text, arrival=Constant(5), duration_s=2.0, random_input_len=8)
    assert len(made.requests) == 10 and (made.requests[-1].arrival_s or 0) < 2.0
    assert len(build(text, arrival=Constant(5), duration_s=2.0, num_prompts=4, random_input_len=8).requests) == 4
    assert len(build(text, arrival=Constant(5), duration_s=2.0, num_prompts=40, random_input_len=8).requests) == 10
    with pytest.raises(BenchError, match=r"no request arrives within --duration 0.001 s"):
        build(text, arrival=Poisson(1), duration_s=0.001)


def test_a_closed_loop_with_a_duration_has_more_requests_than_its_users_can_send(text: TokenizerSource) -> None:
    made = build(text, users=3, duration_s=5.0, random_input_len=8)
    assert len(made.requests) == 3 * 5 * MOST_PER_USER_S
    assert any("--num-prompts plans more" in note for note in made.notes)
    assert len(build(text, users=3, duration_s=5.0, **SMALL).requests) == 20


def test_a_trace_is_replayed_at_its_own_times(tmp_path: Path, text: TokenizerSource) -> None:
    path = write(tmp_path / "azure.csv", AZURE)
    options: dict[str, Any] = {"dataset_name": "azure", "dataset_path": path}
    whole = build(text, **options)
    assert [(r.prompt_tokens, r.output_tokens) for r in whole.requests][:3] == [(374, 44), (396, 109), (30, 12)]
    assert [r.arrival_s for r in whole.requests] == [0.0, 4.314579, 4.541877, 4.541877, 13.3194101]
    assert whole.arrivals == "as recorded"
    faster = build(text, time_scale=2.0, **options)
    assert [r.arrival_s for r in faster.requests][-1] == 6.65970505
    assert faster.arrivals == "as recorded, 2x as fast"
    assert len(build(text, duration_s=4.4, **options).requests) == 2
    assert len(build(text, duration_s=4.4, time_scale=10, **options).requests) == 5
    assert len(build(text, num_prompts=3, **options).requests) == 3
    more = build(text, num_prompts=9, **options)
    assert more.notes == ["9 requests were asked for and the trace has 5: all are sent"]


def test_an_arrival_process_overrides_the_times_of_a_trace(tmp_path: Path, text: TokenizerSource) -> None:
    path = write(tmp_path / "azure.csv", AZURE)
    options: dict[str, Any] = {"dataset_name": "azure", "dataset_path": path}
    made = build(text, arrival=Constant(2), **options)
    assert [r.arrival_s for r in made.requests] == [0, 0.5, 1.0, 1.5, 2.0]
    closed = build(text, users=4, **options)
    assert [r.arrival_s for r in closed.requests] == [None] * 5
    again = build(text, arrival=Constant(2), num_prompts=7, **options)
    assert [r.prompt_tokens for r in again.requests] == [374, 396, 30, 3000, 200, 374, 396]
    assert again.requests[0].prompt != again.requests[5].prompt
    assert again.notes == [
        "Azure trace azure.csv: 7 requests were asked for and 5 are there; taken again from the start, with new prompts"
    ]
    once = build(text, arrival=Constant(2), num_prompts=7, no_oversample=True, **options)
    assert len(once.requests) == 5 and "each is sent once" in once.notes[0]
    with pytest.raises(BenchError, match="--time-scale does not apply, because no recorded times"):
        build(text, arrival=Constant(2), time_scale=2, **options)


def test_times_of_one_trace_for_another_dataset(text: TokenizerSource) -> None:
    made = build(text, arrival=Trace((3.0, 3.5, 9.0), 2.0), random_input_len=9)
    assert [r.arrival_s for r in made.requests] == [0, 0.25, 3.0]


def test_mooncake_prompts_share_what_their_hashes_say(
    tmp_path: Path, text: TokenizerSource, ids: TokenIdSource
) -> None:
    path = jsonl(tmp_path / "moon.jsonl", MOONCAKE)
    options: dict[str, Any] = {"dataset_name": "mooncake", "dataset_path": path}
    as_ids = [r.prompt.token_ids or () for r in build(ids, **options).requests]
    as_text = [tuple(text.tokenizer.encode(r.prompt.text or "")) for r in build(text, **options).requests]
    assert as_ids == as_text and [len(prompt) for prompt in as_ids] == [1300, 1100, 600, 512]
    assert as_ids[0][:1024] == as_ids[1][:1024] and as_ids[0][1024] != as_ids[1][1024]
    assert as_ids[3] == as_ids[0][:512] and as_ids[2][0] != as_ids[0][0]
    clipped = build(ids, max_input_len=1050, max_output_len=5, **options)
    assert [r.prompt_tokens for r in clipped.requests] == [1050, 1050, 600, 512]
    assert (clipped.requests[0].prompt.token_ids or ()) == as_ids[0][:1050]
    assert clipped.notes == ["2 of 4 prompts clipped to 1050 tokens", "2 of 4 answers clipped to 5 tokens"]
    again = build(ids, arrival=AllAtOnce(), num_prompts=8, **options)
    assert "the same prompts, as a prefix cache notices" in again.notes[0]


def test_answers_of_any_dataset_may_have_another_length(tmp_path: Path, text: TokenizerSource) -> None:
    prompt = {"prompt": "Tell me of the fox by the sea.", "output_tokens": 77}
    paths = {
        "azure": write(tmp_path / "azure.csv", AZURE),
        "custom": jsonl(tmp_path / "own.jsonl", [prompt] * 5),
        "mooncake": jsonl(tmp_path / "moon.jsonl", MOONCAKE),
    }
    for name, path in paths.items():
        options: dict[str, Any] = {"dataset_name": name, "dataset_path": path}
        assert {r.output_tokens for r in build(text, output_len=Fixed(3), **options).requests} == {3}
        varied = [r.output_tokens for r in build(text, output_len=Uniform(200, 900), **options).requests]
        assert len(set(varied)) > 2 and min(varied) >= 200
    with pytest.raises(BenchError, match="--output-len and --custom-output-len set the same"):
        build(text, dataset_name="custom", dataset_path=paths["custom"], custom_output_len=4, output_len=Fixed(3))
    only = build(text, dataset_name="custom", dataset_path=paths["custom"], custom_output_len=4)
    assert {r.output_tokens for r in only.requests} == {4}


def test_prefix_repetition(ids: TokenIdSource) -> None:
    made = build(
        ids,
        dataset_name="prefix_repetition",
        prefix_repetition_num_prefixes=4,
        prefix_repetition_prefix_len=20,
        prefix_repetition_suffix_len=5,
        prefix_repetition_output_len=3,
        num_prompts=22,
    )
    prompts = [request.prompt.token_ids or () for request in made.requests]
    groups = Counter(prompt[:20] for prompt in prompts)
    assert sorted(groups.values()) == [5, 5, 6, 6] and len(set(prompts)) == 22
    assert {len(prompt) for prompt in prompts} == {25} and {r.output_tokens for r in made.requests} == {3}
    order = [prompt[:20] for prompt in prompts]
    assert order != sorted(order)
    few = build(ids, dataset_name="prefix_repetition", num_prompts=3)
    assert few.notes == ["3 prompts use 3 of 10 prefixes, each once"]


@pytest.mark.parametrize("chat", [True, False])
def test_conversations(text: TokenizerSource, chat: bool) -> None:
    made = build(
        text,
        chat,
        dataset_name="multi_turn",
        multi_turn_turns=Fixed(3),
        multi_turn_prefix_len=10,
        multi_turn_think_s=Fixed(1.5),
        input_len=Fixed(20),
        output_len=Fixed(7),
        num_prompts=8,
        arrival=Constant(1),
    )
    assert [r.follows for r in made.requests] == [None, 0, 1, None, 3, 4, None, 6]
    assert [r.arrival_s for r in made.requests] == [0, None, None, 1, None, None, 2, None]
    assert [r.think_s for r in made.requests[:3]] == [0, 1.5, 1.5]
    # A prompt has all that was said before: 30, then 7 of the answer and 20 more.
    assert [r.prompt_tokens for r in made.requests[:3]] == [30, 57, 84]
    assert made.longest_tokens == 91
    assert made.notes == ["arrivals are of conversations and single requests: 3 with 8 requests in all"]
    assert len(Conversations(made.requests).graphs) == 3
    for request in made.requests:
        if chat:
            assert request.prompt.messages is not None and request.prompt.messages[0]["role"] == "user"
            said = request.prompt.messages[0]["content"]
        else:
            said = request.prompt.text or ""
        assert text.count(said) == (30 if request.follows is None else 20)


def test_turns_of_a_text_do_not_run_into_answers(text: TokenizerSource, words: WordSource) -> None:
    for source in (text, words):
        made = build(source, dataset_name="multi_turn", multi_turn_turns=Fixed(3), num_prompts=9)
        assert all((r.prompt.text or "").startswith(" ") for r in made.requests if r.follows is not None)


def test_conversations_end_before_they_are_too_long(text: TokenizerSource, ids: TokenIdSource) -> None:
    options: dict[str, Any] = {
        "dataset_name": "multi_turn",
        "multi_turn_turns": Fixed(5),
        "input_len": Fixed(20),
        "output_len": Fixed(10),
        "max_input_len": 85,
    }
    made = build(text, num_prompts=9, **options)
    assert max(r.prompt_tokens or 0 for r in made.requests) == 80
    assert [r.follows is None for r in made.requests] == [True, False, False] * 3
    assert made.notes[0] == "3 of 3 conversations end early: one turn more, and the prompt were too long"
    with pytest.raises(BenchError, match="cannot be sent as token ids"):
        build(ids, num_prompts=9, **options)


def test_texts_are_sent_as_they_are(tmp_path: Path, text: TokenizerSource, ids: TokenIdSource) -> None:
    pair = ("Tell me of the fox by the sea.", "There was a fox by the sea, and it ran.")
    path = sharegpt(tmp_path / "s.json", [pair])
    options: dict[str, Any] = {"dataset_name": "sharegpt", "dataset_path": path}
    made = build(text, **options)
    assert [r.prompt.text for r in made.requests] == [pair[0]] and made.notes == []
    assert made.requests[0].prompt_tokens == len(text.tokenizer.encode(pair[0]))
    assert build(ids, **options).requests[0].prompt.token_ids == tuple(text.tokenizer.encode(pair[0]))
    twice = build(text, num_prompts=2, output_len=Fixed(6), **options)
    assert [r.prompt.text for r in twice.requests] == [pair[0]] * 2
    assert [r.output_tokens for r in twice.requests] == [6, 6]
    assert "2 requests were asked for and 1 are there" in twice.notes[0]
    guessed = build(WordSource(1.2), **options)
    assert guessed.requests[0].prompt_tokens is None


MIX = """
[[class]]
name = "chat"
share = 0.7
random_input_len = 20
random_output_len = 5
goodput = { ttft = 100 }
priority = 1
[[class]]
name = "replay"
share = 0.2
dataset_name = "azure"
dataset_path = "azure.csv"
max_input_len = 300
[[class]]
name = "talk"
share = 0.1
dataset_name = "multi_turn"
multi_turn_turns = 2
multi_turn_prefix_len = 12
input_len = 9
"""


def test_a_mix_has_its_shares(tmp_path: Path, text: TokenizerSource) -> None:
    write(tmp_path / "azure.csv", AZURE)
    path = write(tmp_path / "mix.toml", MIX)
    made = build(text, mix=path, num_prompts=100, arrival=Poisson(9))
    by_class = Counter(request.class_name for request in made.requests)
    assert by_class == {"chat": 70, "replay": 20, "talk": 10}
    assert made.classes == {"chat": {"ttft": 100.0}, "replay": {}, "talk": {}}
    assert all(r.extra_body == ({"priority": 1} if r.class_name == "chat" else {}) for r in made.requests)
    times = [r.arrival_s for r in made.requests if r.follows is None]
    assert len(times) == 95 and times == sorted(times, key=lambda at: at or 0)
    order = [r.class_name for r in made.requests]
    assert len({tuple(order[i : i + 10]) for i in range(0, 100, 10)}) > 5, "classes are mixed, not one after the other"
    replayed = [r.prompt_tokens for r in made.requests if r.class_name == "replay"]
    assert replayed[:5] == [300, 300, 30, 300, 200]
    short = build(text, mix=path, num_prompts=100, max_input_len=25)
    assert max(r.prompt_tokens or 0 for r in short.requests if r.class_name != "talk") == 25
    within = build(text, mix=path, duration_s=20.0, arrival=Poisson(10))
    shares = Counter(r.class_name for r in within.requests)
    assert shares["chat"] / len(within.requests) == pytest.approx(0.7, abs=0.02)
    assert shares["talk"] / len(within.requests) == pytest.approx(0.1, abs=0.02)


def test_classes_of_a_mix_share_no_blocks(tmp_path: Path, ids: TokenIdSource) -> None:
    """Both prefixes are block 0 of their class."""
    one = '[[class]]\nname = "{}"\nshare = 1\nrandom_prefix_len = 20\nrandom_input_len = 5\n'
    path = write(tmp_path / "mix.toml", one.format("a") + one.format("b"))
    made = build(ids, mix=path, num_prompts=10)
    prefixes = {(r.class_name, (r.prompt.token_ids or ())[:20]) for r in made.requests}
    assert len(prefixes) == 2 == len({prefix[0] for _, prefix in prefixes})


@pytest.mark.parametrize("name", bundled_mixes())
@pytest.mark.parametrize("chat", [True, False])
def test_bundled_mixes_can_be_built(name: str, chat: bool, text: TokenizerSource) -> None:
    made = build(text, chat, mix=name, num_prompts=100, arrival=Poisson(5))
    assert len(made.requests) == 100 and set(made.classes) == {r.class_name for r in made.requests}
    small = build(text, chat, mix=name, num_prompts=100, max_input_len=900, max_output_len=100)
    assert small.longest_tokens <= 1000


def test_warm_ups_are_like_the_workload_and_not_of_it(text: TokenizerSource) -> None:
    made = build(text, **SMALL)
    warm = warm_up_requests(made, text, 5)
    assert [(r.index, r.prompt_tokens, r.output_tokens, r.arrival_s) for r in warm] == [
        (i, 30, 10, None) for i in range(5)
    ]
    beginnings = {" ".join((r.prompt.text or "").split()[:2]) for r in warm + made.requests}
    assert len(beginnings) == 25
    assert warm_up_requests(made, text, 0) == []


def test_progress_is_told(text: TokenizerSource) -> None:
    told: list[tuple[int, int]] = []
    spec = WorkloadSpec(num_prompts=130, random_input_len=3)
    build_workload(spec, text, chat=False, progress=lambda done, total: told.append((done, total)))
    assert told == [(50, 130), (100, 130), (130, 130)]


def test_lengths_that_are_off_or_guessed_are_said(words: WordSource, tmp_path: Path) -> None:
    assert "lengths estimates" in build(words, **SMALL).notes[0]
    unusual = TokenizerSource(Tokenizer.load(save(tmp_path / "m", sentencepiece_style(), bos_token="<s>")))
    made = build(unusual, num_prompts=30, random_input_len=1)
    assert made.notes == ["30 of 30 prompts are not exactly as long as wanted: up to 2 tokens off"]
    assert {r.prompt_tokens for r in made.requests} == {2, 3}


def test_requests_can_be_kept_as_json(text: TokenizerSource) -> None:
    made = build(text, mix="assistants", num_prompts=30, chat=True)
    assert len(msgspec.json.encode(made.requests)) > 1000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dataset_name": "sharegtp"}, "no dataset 'sharegtp'; did you mean 'sharegpt'?"),
        ({"dataset_name": "azure"}, "--dataset-name azure needs --dataset-path"),
        ({"dataset_path": Path("x")}, "--dataset-path does not apply to --dataset-name random"),
        ({"prefix_repetition_num_prefixes": 3}, "--prefix-repetition-num-prefixes does not apply to"),
        ({"dataset_name": "multi_turn", "random_input_len": 3}, "--random-input-len does not apply to"),
        ({"num_prompts": 0}, "--num-prompts is 0; it must be 1 or more"),
        ({"seed": -1}, "--seed is -1; it must be 0 or more"),
        ({"duration_s": 0.0}, "--duration is 0"),
        ({"duration_s": math.nan}, "--duration is nan"),
        ({"time_scale": -1.0}, "--time-scale is -1"),
        ({"time_scale": 2.0}, "--time-scale does not apply, because no recorded times are replayed"),
        ({"users": 4, "arrival": Poisson(2)}, "a closed loop has no arrival process"),
        ({"random_range_ratio": "2"}, "--random-range-ratio is 2"),
        ({"random_input_len": 0}, "--random-input-len is 0"),
        ({"random_output_len": 0}, "--random-output-len is 0"),
        ({"random_prefix_len": -1}, "--random-prefix-len is -1"),
        ({"max_input_len": 0}, "--max-input-len is 0"),
        (
            {"random_input_len": 10**8, "num_prompts": 1},
            "100000000 tokens that ask for 128; clip it with --max-input-len",
        ),
        ({"dataset_name": "prefix_repetition", "prefix_repetition_num_prefixes": 0}, "num-prefixes is 0"),
        ({"mix": "assistants", "dataset_name": "azure"}, "--dataset-name and --mix both"),
        ({"mix": "assistants", "output_len": Fixed(3)}, "--output-len and --mix both"),
        ({"mix": "assistents"}, "did you mean 'assistants'?"),
        ({"arrival": AllAtOnce(), "duration_s": 3.0}, "give --num-prompts"),
        ({"cancel_share": 0.5}, "--cancel-share and --cancel-after-s need each other"),
        ({"cancel_after_s": Fixed(2)}, "--cancel-share and --cancel-after-s need each other"),
        ({"cancel_share": 1.5, "cancel_after_s": Fixed(2)}, "--cancel-share is 1.5; it must be from 0 to 1"),
        ({"arrival": Trace((0.0, 1.0)), "num_prompts": 3}, "3 arrivals were asked for and the trace has 2"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str, text: TokenizerSource) -> None:
    with pytest.raises(BenchError, match=words.replace("?", r"\?")) as caught:
        build(text, **options)
    assert "\n" not in str(caught.value)


def test_errors_in_a_class_name_the_class(tmp_path: Path, text: TokenizerSource) -> None:
    content = '[[class]]\nname = "late"\nshare = 1\ndataset_name = "azure"\ndataset_path = "none.csv"\n'
    with pytest.raises(BenchError, match=r"class 'late' of the mix: the dataset .*none.csv cannot be read"):
        build(text, mix=write(tmp_path / "mix.toml", content))


def test_token_ids_are_no_chat(ids: TokenIdSource) -> None:
    with pytest.raises(BenchError, match="a chat cannot carry token ids"):
        build(ids, True)


def test_another_prompt_seed_changes_the_words_and_nothing_else(text: TokenizerSource, tmp_path: Path) -> None:
    options: dict[str, Any] = {"random_range_ratio": 0.5, "random_prefix_len": 16, "seed": 3, **SMALL}
    one = build(text, arrival=Poisson(10), **options)
    two = build(text, arrival=Poisson(20), prompt_seed=4, **options)
    assert [r.prompt_tokens for r in one.requests] == [r.prompt_tokens for r in two.requests]
    assert [r.output_tokens for r in one.requests] == [r.output_tokens for r in two.requests]
    times = [np.array([r.arrival_s for r in made.requests]) for made in (one, two)]
    np.testing.assert_allclose(times[0], 2 * times[1], atol=1e-8)
    prompts = [{(r.prompt.text or "")[:20] for r in made.requests} for made in (one, two)]
    assert not prompts[0] & prompts[1]
    warm = [warm_up_requests(made, text, 2)[0].prompt.text for made in (one, two)]
    assert warm[0] != warm[1]
    # Texts of a file are as they are: others are taken.
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": f"prompt {i}", "output_tokens": 3} for i in range(200)])
    of_file = [
        build(text, dataset_name="custom", dataset_path=path, num_prompts=20, prompt_seed=seed) for seed in (0, 1)
    ]
    assert len({r.prompt.text for made in of_file for r in made.requests}) > 30
