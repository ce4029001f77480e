"""The file of a gateway: what it may say, and what is said of it where it is wrong."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from headway.config_files.gateway import parse_gateway_file

ONE = '[[backend]]\nname = "a"\nurl = "http://h:1"\n'


def test_a_whole_file_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_B", "secret")
    file = parse_gateway_file(
        "gateway.toml",
        'routing = "least-loaded=2,slack"\nretries = 0\n[timeouts]\nstall_s = 5\n[health]\nfailures = 7\n'
        + ONE
        + '[[backend]]\nname = "b"\nurl = "https://[::1]/api/v1/"\nkind = "headway"\nkey_env = "KEY_OF_B"\n'
        'models = ["m"]\nlabels = { tier = "fp8" }\nweight = 2.5\nmax_requests = 3\nmax_prompt_tokens = 10\n'
        'health_path = ""\ndrain = true\n',
    )
    first, second = file.backends
    assert (first.host, first.port, first.prefix, first.is_tls, first.key) == ("h", 1, "", False, "")
    assert first.max_prompt_tokens == math.inf and first.health_path == "/health" and first.kind == "openai"
    assert (second.host, second.port, second.prefix, second.is_tls) == ("::1", 443, "/api", True)
    assert second.key == "secret" and "secret" not in repr(file) and second.models == ("m",)
    assert file.timeouts.stall_s == 5 and file.timeouts.connect_s == 5 and file.health.failures == 7
    assert file.retries == 0 and file.routing == "least-loaded=2,slack"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1: there are no backends"),
        ("[[backend]", "is not TOML"),
        ("backend = 1", "line 1: backend must be a list"),
        ("what = 1\n", "line 1: 'what' is unknown"),
        ('routing = "nearest"\n' + ONE, "line 1: routing is 'nearest': scorer 'nearest' is unknown; choose one of"),
        ("routing = 5\n" + ONE, "line 1: routing is 5"),
        ("hedge_after_ms = -1\n" + ONE, "line 1: hedge_after_ms is -1; give a number from 1"),
        ("continue_streams = 1\n" + ONE, "line 1: continue_streams is 1; it must be true or false"),
        ("continue_streams = true\nhedge_after_ms = 5\n" + ONE, "line 1: continue_streams and hedge_after_ms are both"),
        ("retries = 11\n" + ONE, "line 1: retries is 11; give a whole number from 0 to 10"),
        ("timeouts = 5\n" + ONE, "line 1: timeouts must be a table"),
        ("[timeouts]\nstall_s = 0\n" + ONE, "line 2: stall_s is 0; give a number from 0.01"),
        ("[timeouts]\nlunch_s = 0\n" + ONE, "line 2: 'lunch_s' is unknown"),
        ("[health]\nfailures = 1.5\n" + ONE, "line 2: failures is 1.5; give a whole number"),
        (ONE + ONE, "line 5: two backends are named 'a'"),
        (ONE + 'kind = "tgi"', "line 4: kind is 'tgi'; choose one of headway, openai"),
        (ONE + "weight = true", "line 4: weight is True; give a number"),
        (ONE + 'drain = "no"', "line 4: drain is 'no'"),
        (ONE + "models = [1]", "line 4: models must be a list of names"),
        (ONE + 'labels = { a = "b c" }', "line 4: labels must be names with names"),
        (ONE + 'health_path = "health"', "line 4: health_path is 'health'; it must begin with /"),
        (ONE + 'key = "a b"', "line 4: the key has characters that a header cannot carry"),
        (ONE + 'key = "a"\nkey_env = "B"', "line 5: key and key_env are both there"),
        (ONE + 'key_env = "NOT_THERE_1"', "line 4: key_env names 'NOT_THERE_1'"),
        (ONE + "min_prompt_tokens = 9\nmax_prompt_tokens = 8", "line 5: max_prompt_tokens is 8"),
        (ONE + "batches = 1", "line 4: batches is 1; it must be true or false"),
        ('handover = "often"\n' + ONE, "line 1: handover is 'often'; choose one of auto, always, never"),
        (ONE + 'kind = "headway"\nrole = "both"', "line 5: role is 'both'; choose one of prefill, decode"),
        (ONE + 'role = "decode"', "line 4: role is 'decode', which needs kind = \"headway\""),
        (ONE + 'kind = "headway"\nrole = "decode"', "line 5: no backend has the role prefill; give it to some"),
        ("shared = 1\n" + ONE, "line 1: shared must be a table"),
        ("[shared]\nfoo = 1\n" + ONE, "line 2: 'foo' is unknown; shared has redis"),
        ("[shared]\n" + ONE, "line 1: the address of Redis must be like redis://"),
        ('[shared]\nredis = "http://h"\n' + ONE, "line 2: the address of Redis must be like redis://"),
        ('[shared]\nredis_env = "NOT_THERE_2"\n' + ONE, "line 2: redis_env names 'NOT_THERE_2'"),
        (
            '[shared]\nredis = "redis://h"\nwhen_down = "stop"\n' + ONE,
            "line 3: when_down is 'stop'; choose one",
        ),
        ('[shared]\nredis = "redis://h"\nprefix = "a b"\n' + ONE, "line 3: prefix is 'a b'"),
        (ONE + "colour = 1", "line 4: 'colour' is unknown; a backend has name"),
        ('[[backend]]\nname = ""\nurl = "http://h"', "line 2: name is ''"),
        ('[[backend]]\nname = "a"\nurl = "h:1"', "line 3: url is 'h:1': it must begin with http://"),
        ('[[backend]]\nname = "a"\nurl = "http://h:99999"', "line 3: url is"),
        ('[[backend]]\nname = "a"\nurl = "http://u:p@h"', "line 3: url has a user name or password"),
        ('[[backend]]\nname = "a"\nurl = "http://h/?a"', "line 3: url is 'http://h/?a': it needs a host"),
        ('[[backend]]\nname = "a"', "line 1: url is ''"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse_gateway_file("gateway.toml", text)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/nowhere.toml"], "cannot read /nowhere.toml"),
        ([], "Missing argument"),
        (["/nowhere.toml", "--port", "99999"], "--port is '99999'"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_line(arguments: list[str], said: str) -> None:
    ran = subprocess.run([sys.executable, "-m", "headway", "gateway", *arguments], capture_output=True, text=True)
    assert ran.returncode == 2 and said in ran.stderr and ran.stderr.count("\n") == 1
