"""What tokens cost: money and energy (document 003, section 13)."""

from __future__ import annotations


def cost_per_million(price_per_hour: float, tokens_per_s: float) -> float:
    """Price of a million tokens: price of an hour / 3600 * 10^6 / tokens a second (document 003)."""
    return price_per_hour / 3600.0 * 1e6 / tokens_per_s


def split_cost(
    price_per_hour: float, requests_per_s: float, prompt: int, output: int, prompt_share: float
) -> tuple[float, float]:
    """Price of a million input and of a million output tokens, when each pays for the time that it takes.

    Args:
        prompt_share: share of the time that goes to prompts; what remains goes to output tokens.
    """
    of_input = cost_per_million(price_per_hour * prompt_share, requests_per_s * prompt)
    return of_input, cost_per_million(price_per_hour * (1 - prompt_share), requests_per_s * output)


def tokens_per_s_per_watt(tokens_per_s: float, watts: float) -> float:
    """Output tokens a second for each watt, which is tokens a joule."""
    return tokens_per_s / watts


def kwh_per_million(tokens_per_s: float, watts: float) -> float:
    """Energy of a million tokens at so many watts."""
    return 1e6 / tokens_per_s_per_watt(tokens_per_s, watts) / 3.6e6
