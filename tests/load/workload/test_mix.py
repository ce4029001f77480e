"""Mixes of classes: what a file says, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.load.errors import BenchError
from headway.load.workload.arrivals import OnOff, Poisson
from headway.load.workload.lengths import Exponential, Fixed, LogNormal, Normal
from headway.load.workload.mix import ClassLoad, bundled_mixes, load_mix
from tests.load.workload.files import write

WHOLE = """
description = "two classes"
[[class]]
name = "chat"
share = 3
input_len = "lognormal:mean=200,cv=0.8,max=2000"
output_len = { distribution = "normal", mean = 100, cv = 0.3 }
goodput = { ttft = 200, tpot = 50.5 }
priority = -1
extra_body = { temperature = 0.5 }
[[class]]
name = "replay"
share = 1
dataset_name = "azure"
dataset_path = "traces/azure.csv"
max_input_len = 1000
"""


def test_a_whole_mix(tmp_path: Path) -> None:
    mix = load_mix(write(tmp_path / "mine.toml", WHOLE))
    assert (mix.name, mix.description) == ("mine", "two classes")
    chat, replay = mix.classes
    assert (chat.name, chat.share, replay.share) == ("chat", 0.75, 0.25)
    assert chat.options.input_len == LogNormal(200, 0.8, maximum=2000)
    assert chat.options.output_len == Normal(100, 0.3)
    assert chat.objectives == {"ttft": 200.0, "tpot": 50.5}
    assert chat.extra_body == {"temperature": 0.5, "priority": -1}
    assert replay.options.dataset_name == "azure" and replay.options.max_input_len == 1000
    assert replay.options.dataset_path == tmp_path / "traces" / "azure.csv"
    assert replay.objectives == {} and replay.extra_body == {}


def test_classes_with_arrivals_of_their_own(tmp_path: Path) -> None:
    content = """
    [[class]]
    name = "chat"
    request_rate = 2
    service_class = "interactive"
    headers = { x-llm-d-slo-ttft-ms = 200 }
    tenant = "acme"
    cancel_share = 1
    cancel_after_s = "exponential:mean=2"
    [[class]]
    name = "bursts"
    request_rate = 4
    on_seconds = 1
    off_seconds = 3
    service_tier = "flex"
    [[class]]
    name = "offline"
    max_concurrency = 4
    num_prompts = 50
    """
    mix = load_mix(write(tmp_path / "own.toml", content))
    assert mix.has_own_arrivals and not load_mix("assistants").has_own_arrivals
    chat, bursts, offline = mix.classes
    assert [each.load for each in mix.classes] == [
        ClassLoad(Poisson(2.0), None, None),
        ClassLoad(OnOff(4.0, 1.0, 3.0), None, None),
        ClassLoad(None, 4, 50),
    ]
    assert chat.extra_body == {"service_class": "interactive"} and bursts.extra_body == {"service_tier": "flex"}
    assert chat.headers == {"x-llm-d-slo-ttft-ms": "200"} and offline.headers == {}
    assert (chat.tenant, offline.tenant) == ("acme", "")
    assert (chat.options.cancel_share, chat.options.cancel_after_s) == (1, Exponential(2.0))


def test_the_bundled_mixes_load_by_name() -> None:
    assert bundled_mixes() == ["assistants", "interactive-and-batch", "structured"]
    for name in bundled_mixes():
        mix = load_mix(name)
        assert mix.name == name and mix.description
        assert sum(each.share for each in mix.classes) == pytest.approx(1)
        assert all(each.objectives for each in mix.classes)
    adversarial = load_mix("interactive-and-batch").classes[-1]
    assert adversarial.options.input_len == Fixed(30_000)


OWN = '[[class]]\nname = "a"\n'
CLASS = OWN + "share = 1\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no classes"),
        ("class = 3", "has no classes"),
        ("[class]\nname = 'a'", "has no classes"),
        ("[[class]\n", "is not TOML: .*line 1"),
        (b"\xff", "is not TOML"),
        ("descripton = 'x'\n" + CLASS, "unknown key 'descripton'; did you mean 'description'?"),
        ("description = 5\n" + CLASS, "description is 5; a text is expected"),
        ("[[class]]\nshare = 1", "class 1 has no name"),
        ("[[class]]\nname = 5\nshare = 1", "class 1: name is 5; a text is expected"),
        ("[[class]]\nname = 'a'", "class 'a': share is None; every class needs one"),
        ("[[class]]\nname = 'a'\nshare = 0", "share is 0"),
        ("[[class]]\nname = 'a'\nshare = nan", "share is nan"),
        ("[[class]]\nname = 'a'\nshare = true", "share is True"),
        (CLASS + CLASS, "two classes named 'a'"),
        (CLASS + "goodputs = {}", "class 'a': unknown key 'goodputs'; did you mean 'goodput'?"),
        (CLASS + "random_input_length = 5", "did you mean 'random_input_len'?"),
        (CLASS + "goodput = { ttf = 3 }", "class 'a': unknown objective 'ttf'"),
        (CLASS + "goodput = { ttft = -3 }", "class 'a': ttft:-3 is not a limit"),
        (CLASS + "goodput = 5", "goodput is 5; a table is expected"),
        (CLASS + "priority = 'high'", "priority is 'high'; a whole number is expected"),
        (CLASS + "priority = true", "priority is True; a whole number is expected"),
        (CLASS + "random_input_len = 5.5", "random_input_len is 5.5; a whole number is expected"),
        (CLASS + "max_input_len = '5'", "max_input_len is '5'; a whole number is expected"),
        (CLASS + "burstgpt_model = 5", "burstgpt_model is 5; a text is expected"),
        (CLASS + "disable_shuffle = 1", "disable_shuffle is 1; true or false is expected"),
        (CLASS + "input_len = 'norml:mean=3'", "class 'a', input_len: 'norml' .* did you mean 'normal'?"),
        (CLASS + "seed = 3", "unknown key 'seed'"),
        (CLASS + "cancel_share = true", "cancel_share is True; a number is expected"),
        (CLASS + "headers = { host = 'x' }", "class 'a': the header 'host' is the client's own"),
        (CLASS + "service_class = 5", "service_class is 5; a text is expected"),
        (CLASS + "request_rate = 3", "class 'a': share is 1, and it has arrivals of its own"),
        (OWN + "request_rate = -3", "class 'a': the request rate is -3; it must be a finite number above 0"),
        (OWN + "request_rate = '3'", "class 'a': request_rate is '3'; a number is expected"),
        (OWN + "request_rate = 3\non_seconds = 2", "class 'a': --arrival on-off needs --off-seconds"),
        (OWN + "arrival = 'trace'", "class 'a': --arrival trace needs a dataset with times"),
        (OWN + "request_rat = 3", "class 'a': unknown key 'request_rat'; did you mean 'request_rate'?"),
        (OWN + "max_concurrency = 0", "class 'a': max_concurrency is 0; it must be 1 or more"),
        (OWN + "request_rate = 3\nmax_concurrency = 2", "class 'a' has both arrivals and max_concurrency"),
        (OWN + "num_prompts = 3", "class 'a' has neither arrivals nor max_concurrency"),
        (OWN + "request_rate = 3\n" + CLASS.replace('"a"', '"b"'), "class 'b' has no arrivals of its own, and others"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: str | bytes, words: str) -> None:
    path = write(tmp_path / "mix.toml", content)
    with pytest.raises(BenchError, match=words.replace("?", r"\?")) as caught:
        load_mix(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_mix_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"no bundled mix 'interactive'.*; did you mean 'interactive-and-batch'"):
        load_mix("interactive")
    with pytest.raises(BenchError, match="did you mean 'assistants'"):
        load_mix("assistant")
    with pytest.raises(BenchError, match=r"nowhere.toml cannot be read: No such file"):
        load_mix(tmp_path / "nowhere.toml")
