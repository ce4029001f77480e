"""Mixes whose classes have arrivals of their own, clients that cancel, and probes."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.load.errors import BenchError
from headway.load.workload.arrivals import Poisson
from headway.load.workload.build import Workload, build_workload, probe_requests, warm_up_requests
from headway.load.workload.lengths import Uniform
from headway.load.workload.schedule import MOST_PER_USER_S
from headway.load.workload.spec import WorkloadSpec
from headway.load.workload.token_sources import TokenizerSource
from tests.load.workload.files import AZURE, write


def build(source: TokenizerSource, **options: Any) -> Workload:
    return build_workload(WorkloadSpec(**options), source, chat=False)


OWN = """
[[class]]
name = "chat"
request_rate = 20
random_input_len = 9
service_class = "interactive"
headers = { x-tenant = "a" }
[[class]]
name = "steady"
arrival = "constant"
request_rate = 4
random_input_len = 10
num_prompts = 5
[[class]]
name = "replay"
arrival = "trace"
dataset_name = "azure"
dataset_path = "azure.csv"
[[class]]
name = "offline"
max_concurrency = 2
num_prompts = 6
random_input_len = 11
"""


def own_mix(folder: Path, content: str = OWN) -> Path:
    write(folder / "azure.csv", AZURE)
    return write(folder / "own.toml", content)


def times_of(workload: Workload, name: str) -> list[float | None]:
    return [request.arrival_s for request in workload.requests if request.class_name == name]


def test_each_class_of_a_mix_may_have_arrivals_of_its_own(tmp_path: Path, text: TokenizerSource) -> None:
    made = build(text, mix=own_mix(tmp_path), duration_s=5.0)
    timed = [request.arrival_s for request in made.requests if request.arrival_s is not None]
    assert timed == sorted(timed) and {request.arrival_s for request in made.requests[len(timed) :]} == {None}
    chat = Poisson(20).offsets_until(5.0, np.random.default_rng([0, 1]))
    np.testing.assert_allclose(times_of(made, "chat"), chat, atol=1e-9)  # type: ignore[arg-type]
    assert times_of(made, "steady") == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert times_of(made, "replay") == [0.0, 4.314579, 4.541877, 4.541877]
    assert times_of(made, "offline") == [None] * 6
    assert (made.users, set(made.classes)) == ({"offline": 2}, {"chat", "steady", "replay", "offline"})
    first = next(request for request in made.requests if request.class_name == "chat")
    assert first.extra_body == {"service_class": "interactive"} and first.headers == {"x-tenant": "a"}
    told = "chat: Poisson, 20 requests/s; steady: constant, 4 requests/s; replay: as recorded"
    assert made.arrivals == f"{told}; offline: closed loop of 2"
    assert build(text, mix=own_mix(tmp_path), duration_s=5.0).fingerprint() == made.fingerprint()


def test_the_arrivals_of_a_class_do_not_move_when_another_class_changes(tmp_path: Path, text: TokenizerSource) -> None:
    two = OWN.replace('arrival = "constant"\nrequest_rate = 4', "request_rate = 8")
    first = build(text, mix=own_mix(tmp_path, two), duration_s=5.0)
    second = build(text, mix=own_mix(tmp_path, two.replace("request_rate = 20", "request_rate = 30")), duration_s=5.0)
    assert times_of(first, "steady") == times_of(second, "steady")
    assert times_of(first, "steady") != times_of(first, "chat")[:5]
    lengths = [
        [each.prompt_tokens for each in made.requests if each.class_name == "replay"] for made in (first, second)
    ]
    assert lengths[0] == lengths[1]


def test_all_classes_may_come_faster(tmp_path: Path, text: TokenizerSource) -> None:
    made, faster = (build(text, mix=own_mix(tmp_path), duration_s=2.5 * 2 / k, time_scale=k) for k in (1.0, 2.0))
    for name in ("chat", "steady", "replay"):
        halved = [(each or 0.0) / 2 for each in times_of(made, name)]
        np.testing.assert_allclose(halved, times_of(faster, name), atol=2e-9)  # type: ignore[arg-type]
    assert faster.arrivals.endswith("; 2x as fast") and times_of(faster, "offline") == [None] * 6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "class 'chat' of the mix: its requests never end; set num_prompts, or give --duration"),
        ({"duration_s": 5.0, "arrival": Poisson(3)}, "the classes of the mix have arrivals of their own; leave out"),
        ({"duration_s": 5.0, "users": 4}, "the classes of the mix have arrivals of their own; leave out"),
        ({"duration_s": 5.0, "num_prompts": 3}, "--num-prompts is 3, but the classes of the mix have arrivals"),
    ],
)
def test_what_is_said_of_all_classes_beside_their_own_arrivals(
    tmp_path: Path, text: TokenizerSource, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(BenchError, match=words):
        build(text, mix=own_mix(tmp_path), **options)


def test_a_closed_loop_of_a_mix_may_end_with_the_run(tmp_path: Path, text: TokenizerSource) -> None:
    made = build(text, mix=own_mix(tmp_path, OWN.replace("num_prompts = 6", "")), duration_s=5.0)
    offline = [each for each in made.requests if each.class_name == "offline"]
    assert len(offline) == made.users["offline"] * 5 * MOST_PER_USER_S


def lengths_and_times(workload: Workload) -> list[Any]:
    return [(each.prompt_tokens, each.output_tokens, each.arrival_s) for each in workload.requests]


def test_some_clients_cancel(tmp_path: Path, text: TokenizerSource) -> None:
    options: dict[str, Any] = {"random_input_len": 5, "num_prompts": 400, "arrival": Poisson(4)}
    patient = build(text, **options)
    made = build(text, cancel_share=0.25, cancel_after_s=Uniform(1, 9), **options)
    given_up = [each.cancel_after_s for each in made.requests if each.cancel_after_s is not None]
    assert 70 < len(given_up) < 130 and set(given_up) == set(range(1, 10))
    assert lengths_and_times(made) == lengths_and_times(patient) and {
        each.cancel_after_s for each in patient.requests
    } == {None}
    assert build(text, cancel_share=0.25, cancel_after_s=Uniform(1, 9), **options).requests == made.requests
    assert made.fingerprint() != patient.fingerprint()
    content = OWN.replace('name = "chat"', 'name = "chat"\ncancel_share = 1\ncancel_after_s = 2')
    mixed = build(text, mix=own_mix(tmp_path, content), duration_s=5.0)
    assert {(each.class_name, each.cancel_after_s) for each in mixed.requests} == {
        ("chat", 2.0), ("steady", None), ("replay", None), ("offline", None)
    }  # fmt: skip


def test_probes_are_poisson_and_like_nothing_else(text: TokenizerSource) -> None:
    made = build(text, num_prompts=20, random_input_len=30)
    probes = list(islice(probe_requests(made, text, 4.0, made=3), 400))
    assert [each.index for each in probes[:3]] == [0, 1, 2]
    assert {(each.prompt_tokens, each.output_tokens) for each in probes} == {(32, 16)}
    gaps = np.diff([each.arrival_s or 0.0 for each in probes])
    assert np.mean(gaps) == pytest.approx(0.25, rel=0.15) and np.std(gaps) == pytest.approx(0.25, rel=0.2)
    others = [*made.requests, *warm_up_requests(made, text, 3)]
    beginnings = {" ".join((each.prompt.text or "").split()[:2]) for each in [*probes, *others]}
    assert len(beginnings) == 423
    assert list(islice(probe_requests(made, text, 4.0, made=3), 5)) == probes[:5]
