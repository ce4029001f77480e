"""What a person reads off the page, `headway top` and the dashboard, and concludes by the table of docs/observe.md."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.server.browser import Browser

# What a request waits for, and the problem that it is a sign of.
SIGNS = {
    "queue_capacity": "noisy-neighbour",
    "decode_stall_prefill": "long-prompts",
    "prefill_stall": "long-prompts",
    "queue_blocks": "thrashing-kv",
    "decode_stall_preempted": "thrashing-kv",
    "decode_stall_recompute": "thrashing-kv",
}
ON_THE_PAGE = {
    "queue: capacity": "queue_capacity",
    "stalled by prompts": "decode_stall_prefill",
    "prefill stalled": "prefill_stall",
    "queue: KV blocks": "queue_blocks",
    "preempted": "decode_stall_preempted",
    "recomputing": "decode_stall_recompute",
}
FEW, MUCH = 0.4, 0.3  # of the usual cores, and of the time of requests
PHASES, CORES, UNREAD = (
    "Choices in each phase of the ledger",
    "Engine: cores in use while steps run",
    "Answers that clients do not take",
)


@dataclass(frozen=True)
class Reading:
    """The figures that decide.

    Args:
        unread: clients that are behind, or what they have yet to take.
        cores: of the engine while it runs steps.
        shares: of the time of requests, by phase, as far as they are shown.
    """

    unread: float
    cores: float
    shares: Mapping[str, float]

    def problem(self, usual: float) -> str:
        """What the table says, where steps usually have so many cores."""
        if self.unread:
            return "slow-client"
        if self.cores < FEW * usual:
            return "throttled-cpu"
        waits: dict[str, float] = {}
        for phase, share in self.shares.items():
            if phase in SIGNS:
                waits[SIGNS[phase]] = waits.get(SIGNS[phase], 0.0) + share
        worst = max(waits, key=waits.__getitem__, default="none")
        return worst if waits.get(worst, 0.0) >= MUCH else "none"


def of_top(screen: str) -> Reading:
    """Reads what `headway top` shows of class chat."""
    words = " ".join(screen.split())  # a line may be folded
    behind = re.search(r"(\d+) clients? behind", words)
    (cores,) = re.findall(r"([\d.]+) cores in a step", words)
    (row,) = [line for line in screen.splitlines() if re.match(r"\W*chat\b", line)]
    shares = {phase: int(share) / 100 for phase, share in re.findall(r"([a-z_]+) (\d+)%", row)}
    return Reading(float(behind[1]) if behind else 0.0, float(cores), shares)


def of_page(page: Browser, which: str = "P99") -> Reading:
    """Reads the figures above, and the strip of the slowest whole requests, or of the median one."""
    figures = dict(
        zip(
            page.run("return [...document.querySelectorAll('#figures dt')].map((each) => each.textContent)"),
            page.run("return [...document.querySelectorAll('#figures dd')].map((each) => each.textContent)"),
            strict=True,
        )
    )
    strips = page.run("return [...document.querySelectorAll('#slowest .strip')].map((each) => each.ariaLabel)")
    (slowest,) = [each for each in strips if each.startswith(f"{which}, whole request")]
    found = re.findall(r"([a-zKV:, ]+?) (\d+) %", slowest.split(": ", 2)[2])
    shares = {ON_THE_PAGE.get(name.strip(", "), name): int(share) / 100 for name, share in found}
    return Reading(float(figures["clients behind"]), float(figures["cores in steps"]), shares)


def of_queries(answers: Mapping[str, list[Any]]) -> Reading:
    """Reads what panels show of class chat. Prometheus has answered their queries: results by the panel's title."""
    mine = [each for each in answers[PHASES] if each["metric"]["service_class"] == "chat"]
    amounts = {each["metric"]["phase"]: float(each["value"][1]) for each in mine}
    total = sum(each for each in amounts.values() if math.isfinite(each)) or 1.0
    (cores,), (unread,) = ([float(each["value"][1]) for each in answers[title]] for title in (CORES, UNREAD))
    return Reading(unread, cores, {phase: amount / total for phase, amount in amounts.items()})
