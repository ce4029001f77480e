"""Money and energy against an hour's meter, an hour's bill, and what may not be asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cost.price import cost_per_million, kwh_per_million, split_cost, tokens_per_s_per_watt

HOUR_S = 3600
prices = st.floats(0, 1e3)
rates = st.floats(1e-3, 1e6)
watts = st.floats(1, 1e5)
shares = st.floats(0, 1)
lengths = st.integers(1, 100_000)


@given(price=prices, tokens_per_s=rates, hours=st.floats(0.1, 100))
def test_the_bill_of_some_hours_is_what_their_tokens_cost(price, tokens_per_s, hours):
    millions = hours * HOUR_S * tokens_per_s / 1e6
    assert cost_per_million(price, tokens_per_s) * millions == pytest.approx(hours * price)


@given(tokens_per_s=rates, watts=watts)
def test_the_meter_of_an_hour_is_what_its_tokens_took(tokens_per_s, watts):
    millions = HOUR_S * tokens_per_s / 1e6
    assert kwh_per_million(tokens_per_s, watts) * millions == pytest.approx(watts / 1000)


def test_energy_by_hand():
    """700 W for 1000 s are 700 kJ, which is 0.1944 kWh; 1000 tokens a second are a million by then."""
    assert kwh_per_million(1000, 700) == pytest.approx(700e3 / 3.6e6)
    assert tokens_per_s_per_watt(1400, 700) == 2  # tokens for each joule


@given(price=prices, requests_per_s=st.floats(1e-3, 1e3), prompt=lengths, output=lengths, share=shares)
def test_input_and_output_together_pay_for_the_hour(price, requests_per_s, prompt, output, share):
    of_input, of_output = split_cost(price, requests_per_s, prompt, output, share)
    requests = requests_per_s * HOUR_S
    assert of_input * prompt * requests / 1e6 == pytest.approx(price * share)
    assert of_output * output * requests / 1e6 == pytest.approx(price * (1 - share))


def test_a_split_by_hand():
    """3.6 $ an hour are 0.001 $ a second: a quarter of it for 2000 prompt tokens, the rest for 500 output tokens."""
    of_input, of_output = split_cost(3.6, requests_per_s=1, prompt=2000, output=500, prompt_share=0.25)
    assert (of_input, of_output) == (pytest.approx(0.125), pytest.approx(1.5))
    assert split_cost(3.6, 1, 2000, 500, 1.0)[1] == split_cost(3.6, 1, 2000, 500, 0.0)[0] == 0


@given(price=prices, requests_per_s=st.floats(1e-3, 1e3), prompt=lengths, output=lengths)
def test_both_cost_alike_where_each_token_takes_as_long(price, requests_per_s, prompt, output):
    share = prompt / (prompt + output)
    each = cost_per_million(price, requests_per_s * (prompt + output))
    assert split_cost(price, requests_per_s, prompt, output, share) == (pytest.approx(each), pytest.approx(each))


def test_free_hardware_has_free_tokens():
    assert cost_per_million(0.0, 100) == 0
