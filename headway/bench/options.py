"""What the user of the load generator asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from headway.bench.errors import BenchError
from headway.bench.measures.summary import PERCENTILES
from headway.bench.workload.spec import WorkloadSpec


@dataclass(frozen=True, slots=True)
class Target:
    """The endpoint, and what every request to it says.

    Args:
        backend: "openai-chat" asks /v1/chat/completions, anything else /v1/completions.
        path: route in place of the backend's own.
        model: name that requests give; None takes the one that is served.
        tokenizer: folder, or Hugging Face id, of the tokenizer that measures prompts; None looks for it.
        token_ids: send prompts of random tokens as token ids, which need no tokenizer.
        ignore_eos: ask for all the tokens; None does for prompts that are made up, where the server honours it.
        ready_timeout_s: how long to wait for a server that is not up yet.
        request_timeout_s: a request that takes longer has failed.
    """

    base_url: str
    backend: str = "openai"
    path: str | None = None
    model: str | None = None
    tokenizer: str | None = None
    token_ids: bool = False
    api_key: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    insecure: bool = False
    ready_timeout_s: float = 0.0
    request_timeout_s: float = 3600.0
    ignore_eos: bool | None = None
    extra_body: dict[str, Any] = field(default_factory=dict)

    @property
    def chat(self) -> bool:
        return self.backend == "openai-chat"


@dataclass(frozen=True, slots=True)
class Claims:
    """What the numbers are asked for.

    Args:
        percentiles: between 0 and 100.
        objectives: {"ttft": 200.0, ...} in ms, for requests whose class has none of its own.
        price_per_hour: of the hardware, in any currency.
        max_failed_share: a run with a larger share of failed requests is not valid.
        attainment: share of requests that must meet their objectives at the rate that is looked for.
    """

    percentiles: tuple[float, ...] = PERCENTILES
    objectives: dict[str, float] = field(default_factory=dict)
    price_per_hour: float | None = None
    max_failed_share: float = 0.01
    attainment: float = 0.99


@dataclass(frozen=True, slots=True)
class Output:
    """Where results go. `save` off writes nothing; `report` is the HTML file, or None for no report."""

    save: bool = True
    detailed: bool = False
    result_dir: Path = Path("bench-results")
    result_filename: str | None = None
    report: Path | None = None
    csv: bool = False
    label: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sweep:
    """Runs at one value after the other: of the request rate (per second), or of the users of a closed loop."""

    over: Literal["rate", "concurrency"]
    values: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """From "rate:1,2,4" or "concurrency:1,8,64".

        Raises:
            BenchError: it is neither, or has a value that is not above 0 (for a concurrency, not whole).
        """
        over, colon, rest = text.partition(":")
        if not colon or over not in ("rate", "concurrency"):
            raise BenchError(f"--sweep is {text!r}; write rate:1,2,4 (requests per second) or concurrency:1,8,64")
        values = []
        for part in rest.split(","):
            try:
                value = float(part)
            except ValueError:
                value = math.nan
            if not (0 < value < math.inf) or (over == "concurrency" and value != int(value)):
                needed = "a whole number above 0" if over == "concurrency" else "a number above 0"
                raise BenchError(f"--sweep {over} has {part!r}; each value must be {needed}")
            values.append(value)
        return cls("rate" if over == "rate" else "concurrency", tuple(dict.fromkeys(values)))


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """All of a `headway bench`.

    Args:
        max_concurrency: with a rate, most requests under way; without, users of a closed loop.
        num_warmups: requests sent first and not measured.
        drain_timeout_s: a run ends when nothing is left to send and no request has ended for so long.
        find_max_rate: look for the highest rate at which the objectives hold.
        max_search_seconds: after which no probe of that search begins.
        stall_s: misses within so many seconds may be one event, see `SearchOptions`.
        sweep: measure at several values.
    """

    target: Target
    workload: WorkloadSpec
    max_concurrency: int | None = None
    num_warmups: int = 3
    drain_timeout_s: float = 600.0
    find_max_rate: bool = False
    max_search_seconds: float = 3600.0
    stall_s: float = 1.0
    sweep: Sweep | None = None
    claims: Claims = field(default_factory=Claims)
    output: Output = field(default_factory=Output)
