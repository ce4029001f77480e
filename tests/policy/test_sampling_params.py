"""Every range of SamplingParams, at its ends and beyond, and what the messages say."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from decimal import Decimal
from fractions import Fraction

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headway.policy.step.sampling_params import InvalidParameter, SamplingParams

INTEGERS = {
    "n": (1, 128),
    "top_k": (0, 2**31 - 1),
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "seed": (-(2**63), 2**63 - 1),
}
REALS = {
    "temperature": (0.0, 100.0),
    "top_p": (5e-324, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
OPTIONAL = ("max_tokens", "logprobs", "prompt_logprobs", "seed")
FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")


def make(**values: object) -> SamplingParams:
    if "min_tokens" in values:
        values.setdefault("max_tokens", None)
    return SamplingParams(**values)  # type: ignore[arg-type]


def refused(*parts: str, **values: object) -> None:
    """Check that values are refused under the name of the only (or last) one, in one line that has these parts."""
    name = list(values)[-1]
    with pytest.raises(InvalidParameter) as caught:
        make(**values)
    message = str(caught.value)
    assert caught.value.parameter == name
    assert "\n" not in message
    assert len(message) < 200
    for part in (name, *parts):
        assert part in message


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_within_and_beyond_their_range(name: str) -> None:
    low, high = INTEGERS[name]
    for value in (low, low + 1, high):
        assert getattr(make(**{name: value}), name) == value
    for value in (low - 1 if name != "top_k" else -2, high + 1, -(10**25)):
        refused(f"is {value};", f"between {low} and {high}", **{name: value})
    refused("bits", f"between {low} and {high}", **{name: 10**5000})


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [1.0, 2.5, math.nan, math.inf, -math.inf, "3", True, [1], 1j])
def test_what_is_not_an_integer(name: str, value: object) -> None:
    refused(f"is {value!r};", "must be an integer", **{name: value})


@pytest.mark.parametrize("name", INTEGERS)
def test_only_optional_integers_may_be_none(name: str) -> None:
    if name in OPTIONAL:
        assert getattr(make(**{name: None}), name) is None
    else:
        refused("is None", **{name: None})


@pytest.mark.parametrize("name", REALS)
def test_reals_within_and_beyond_their_range(name: str) -> None:
    low, high = REALS[name]
    for value in (low, (low + high) / 2, high, int(high)):
        kept = getattr(make(**{name: value}), name)
        assert kept == value
        assert type(kept) is float
    below, above = math.nextafter(low, -math.inf), math.nextafter(high, math.inf)
    limits = ("above 0", "at most 1") if name == "top_p" else (f"between {low:g} and {high:g}",)
    for value in (below, above, math.nan, math.inf, -math.inf, 10**400, -(10**20)):
        refused("bits" if value == 10**400 else f"is {value};", *limits, **{name: value})


@pytest.mark.parametrize("name", REALS)
@pytest.mark.parametrize("value", [None, "0.5", True, [0.5], 0.5j])
def test_what_is_not_a_number(name: str, value: object) -> None:
    refused(f"is {value!r};", "must be a number", **{name: value})


@pytest.mark.parametrize("name", FLAGS)
def test_flags(name: str) -> None:
    for value in (True, False):
        assert getattr(make(**{name: value}), name) is value
    for wrong in (None, 0, 1, "false"):
        refused(f"is {wrong!r};", "true or false", **{name: wrong})


def test_a_long_value_is_cut_in_the_message() -> None:
    refused("...", temperature="9" * 10_000)
    refused("...", stop=["a", list(range(10_000))])


def test_top_k_of_minus_one_keeps_all() -> None:
    assert make(top_k=-1).top_k == 0


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    assert make(max_tokens=5, min_tokens=5).min_tokens == 5
    refused("is 6", "max_tokens", "is 5", max_tokens=5, min_tokens=6)
    refused("is 17", "max_tokens", "is 16", max_tokens=SamplingParams().max_tokens, min_tokens=17)


def test_stop_strings() -> None:
    assert make(stop="END").stop == ["END"]
    assert make(stop=("a", "b")).stop == ["a", "b"]
    assert make(stop=None).stop == []
    assert len(make(stop=["x"] * 16).stop) == 16
    refused("17 strings", "at most 16", stop=["x"] * 17)
    refused("empty string", stop=["a", ""])
    refused("empty string", stop="")
    refused("3", "strings", stop=["a", 3])
    refused("is 3;", "list", stop=3)


def test_stop_token_ids() -> None:
    assert make(stop_token_ids={0, 7}).stop_token_ids == [0, 7]
    assert make(stop_token_ids=None).stop_token_ids == []
    for wrong in (-1, 1.0, "2", True, None, math.nan):
        refused(repr(wrong), "integers from 0", stop_token_ids=[4, wrong])
    refused("is '12';", "list", stop_token_ids="12")
    refused("is 12;", "list", stop_token_ids=12)


def test_logit_bias() -> None:
    assert make(logit_bias={0: -100, 5: 100.0}).logit_bias == {0: -100.0, 5: 100.0}
    assert make(logit_bias=None).logit_bias == {}
    for wrong in (math.nextafter(100.0, 101.0), -100.5, math.nan, math.inf, -math.inf, "1", None, True):
        refused("token 5", repr(wrong), "between -100 and 100", logit_bias={5: wrong})
    for key in (-1, "5", 1.5, None, True):
        refused(repr(key), "token ids", logit_bias={key: 1.0})
    refused("is [1];", "dict", logit_bias=[1])


def test_lists_of_tokens_are_as_long_as_vllm_s_at_most() -> None:
    assert len(make(logit_bias=dict.fromkeys(range(1024), 1.0)).logit_bias) == 1024
    refused("logit_bias has 1025 token ids", "at most 1024", logit_bias=dict.fromkeys(range(1025), 1.0))
    assert len(make(stop_token_ids=list(range(128))).stop_token_ids) == 128
    refused("stop_token_ids has 129 token ids", "at most 128", stop_token_ids=list(range(129)))


def test_numbers_of_other_libraries_become_plain_ones() -> None:
    """Whatever is accepted can be sent to the engine, which takes plain numbers only."""
    params = make(
        temperature=np.float32(0.5),
        top_p=Fraction(1, 2),
        top_k=np.int64(7),
        seed=np.int32(3),
        stop_token_ids=[np.int64(4)],
        logit_bias={np.int64(5): np.float32(1.5)},
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.5, 7, 3)
    assert params.stop_token_ids == [4]
    assert params.logit_bias == {5: 1.5}


def test_lists_given_are_not_shared() -> None:
    stops, bias = [4], {1: 2.0}
    params = make(stop_token_ids=stops, logit_bias=bias)
    stops.append(5)
    bias[9] = 1.0
    assert (params.stop_token_ids, params.logit_bias) == ([4], {1: 2.0})
    assert make().stop is not make().stop


def test_replacing_a_value_checks_it() -> None:
    assert replace(make(), n=3).n == 3
    with pytest.raises(InvalidParameter):
        replace(make(), n=0)


@given(
    st.builds(
        make,
        temperature=st.floats(0, 100),
        top_p=st.floats(0, 1, exclude_min=True),
        top_k=st.integers(-1, 2**31 - 1),
        seed=st.none() | st.integers(-(2**63), 2**63 - 1),
        stop=st.lists(st.text(min_size=1), max_size=16),
        logit_bias=st.dictionaries(st.integers(0, 2**31), st.floats(-100, 100)),
    )
)
def test_accepted_parameters_survive_the_way_to_the_engine(params: SamplingParams) -> None:
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert asdict(decoded) == asdict(params)


@example({"top_k": Decimal("sNaN")})  # comparing it raises
@given(st.dictionaries(st.sampled_from(sorted(SamplingParams.__dataclass_fields__)), st.from_type(object), max_size=4))
def test_anything_else_is_refused_by_name(values: dict[str, object]) -> None:
    refused_by: str | None = None
    try:
        params = SamplingParams(**values)  # type: ignore[arg-type]
        msgspec.msgpack.encode(params)
    except InvalidParameter as error:
        refused_by = error.parameter
    assert refused_by is None or refused_by in SamplingParams.__dataclass_fields__
