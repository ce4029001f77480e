"""What tokens cost: money and energy (document 003, section 13)."""

from __future__ import annotations


def cost_per_million(price_per_hour: float, tokens_per_s: float) -> float:
    """Price of a million tokens: price of an hour / 3600 * 10^6 / tokens a second (document 003).

    Raises:
        ValueError: the price is below 0, or no tokens come.
    """
    if price_per_hour < 0 or tokens_per_s <= 0:
        raise ValueError(
            f"price_per_hour is {price_per_hour} and tokens_per_s {tokens_per_s}; the first can't be below 0, and the "
            "second must be above 0"
        )
    return price_per_hour / 3600.0 * 1e6 / tokens_per_s


def split_cost(
    price_per_hour: float, requests_per_s: float, prompt: int, output: int, prompt_share: float
) -> tuple[float, float]:
    """Price of a million input and of a million output tokens, when each pays for the time that it takes.

    Args:
        prompt_share: of the time, that goes to prompts; what remains goes to output tokens.

    Raises:
        ValueError: as `cost_per_million`, or a share outside 0 to 1.
    """
    if not 0 <= prompt_share <= 1:
        raise ValueError(f"prompt_share is {prompt_share}; it must be between 0 and 1")
    of_input = cost_per_million(price_per_hour * prompt_share, requests_per_s * prompt)
    return of_input, cost_per_million(price_per_hour * (1 - prompt_share), requests_per_s * output)


def tokens_per_s_per_watt(tokens_per_s: float, watts: float) -> float:
    """Output tokens a second for each watt, which is tokens a joule. Raises ValueError unless watts are above 0."""
    if watts <= 0:
        raise ValueError(f"watts are {watts}; they must be above 0")
    return tokens_per_s / watts


def kwh_per_million(tokens_per_s: float, watts: float) -> float:
    """Energy of a million tokens at so many watts. Raises ValueError unless both are above 0."""
    if tokens_per_s <= 0:
        raise ValueError(f"tokens_per_s is {tokens_per_s}; it must be above 0")
    return 1e6 / tokens_per_s_per_watt(tokens_per_s, watts) / 3.6e6
