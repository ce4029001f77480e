"""What a server does, from its /metrics: Headway's, vLLM's or llama.cpp's, as far as each of them tells."""

from __future__ import annotations

import itertools
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group, RenderableType
from rich.text import Text

from headway.report.console import fitted
from headway.report.parts import Cell, Table

TIMEOUT_S, MOST_BYTES = 5.0, 16 * 2**20
WINDOW_S, RATE_S = 60.0, 5.0  # of quantiles, and of rates
BARS, HISTORY = "▁▂▃▄▅▆▇█", 40
# What each figure is called, without the prefix: by Headway and vLLM, by older vLLM, by llama.cpp.
RUNNING = ("num_requests_running", "requests_processing")
WAITING = ("num_requests_waiting", "requests_deferred")
KV = ("kv_cache_usage_perc", "gpu_cache_usage_perc", "kv_cache_usage_ratio")
PROMPT, GENERATED = ("prompt_tokens_total",), ("generation_tokens_total", "tokens_predicted_total")
PREEMPTIONS = ("num_preemptions_total",)
TPOT = ("request_time_per_output_token_seconds", "inter_token_latency_seconds", "time_per_output_token_seconds")
TIMES = {
    "TTFT": ("time_to_first_token_seconds",),
    "TPOT": TPOT,
    "E2E": ("e2e_request_latency_seconds",),
    "queue": ("request_queue_time_seconds",),
    "step": ("step_duration_seconds",),
}
PREDICTED, ROOFLINE = ("step_time_measured_to_predicted_ratio",), ("step_time_to_roofline_ratio",)
SLACK = ("step_slack_seconds",)
CPU, STEPS = ("engine_cpu_seconds_total",), ("step_duration_seconds_sum",)
BEHIND, UNREAD = ("clients_behind",), ("clients_unread_bytes",)
PHASES, MOST_PHASES = "class_request_phase_seconds_total", 2
SHOWN = (0.5, 0.9, 0.95, 0.99)
Labels = frozenset[tuple[str, str]]


class TopError(ValueError):
    """The server's metrics cannot be read; one line that says what to do."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The metrics of a server at one time.

    Args:
        at: seconds of the monotonic clock.
        samples: the value of each sample by its labels, by its name without the prefix.
    """

    at: float
    prefix: str
    samples: Mapping[str, Mapping[Labels, float]]

    def total(self, names: Sequence[str], **where: str) -> float | None:
        """The sum over all samples of the first of the names that is there; None where none is."""
        for name in names:
            if name in self.samples:
                return sum(
                    value for labels, value in self.samples[name].items() if where.items() <= dict(labels).items()
                )
        return None

    def buckets(self, name: str, **where: str) -> dict[float, float]:
        """The cumulative counts of a histogram by their upper bounds."""
        found: dict[float, float] = {}
        for labels, value in self.samples.get(f"{name}_bucket", {}).items():
            named = dict(labels)
            if where.items() <= named.items():
                bound = float(named["le"])
                found[bound] = found.get(bound, 0.0) + value
        return dict(sorted(found.items()))

    def values(self, name: str, label: str) -> dict[str, float]:
        """The sums of a metric by the values of a label."""
        found: dict[str, float] = {}
        for labels, value in self.samples.get(name, {}).items():
            if (of := dict(labels).get(label)) is not None:
                found[of] = found.get(of, 0.0) + value
        return found


def snapshot(text: str, at: float) -> Snapshot:
    """The snapshot that a server's answer tells.

    Raises:
        TopError: it is no text of metrics, or not that of a server of models.
    """
    samples: dict[str, dict[Labels, float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    except (ValueError, KeyError, IndexError):
        raise TopError("its answer is no text of Prometheus metrics") from None
    prefix = next((n.removesuffix(known) for known in RUNNING for n in samples if n.endswith(known)), None)
    if prefix is None:
        raise TopError("its metrics have neither num_requests_running nor requests_processing; is it a model's server?")
    return Snapshot(at, prefix, {name.removeprefix(prefix): values for name, values in samples.items()})


def fetch(url: str, key: str | None = None) -> Snapshot:
    """Ask a server.

    Raises:
        TopError: it is not there, needs a key, or has no metrics.
    """
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        request = urllib.request.Request(f"{url}/metrics", headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            text = answer.read(MOST_BYTES).decode(errors="replace")
    except urllib.error.HTTPError as error:
        advice = {401: "; give its key with --api-key", 404: "; is the address right?"}.get(error.code, "")
        advice = "; start llama-server with --metrics" if error.code == 501 else advice
        raise TopError(f"{url}/metrics answered {error.code}{advice}") from None
    except (OSError, ValueError) as error:
        raise TopError(f"no answer from {url}: {getattr(error, 'reason', error)}") from None
    return snapshot(text, time.monotonic())


def quantile(buckets: Mapping[float, float], at: float) -> float | None:
    """The value below which a share of observations are, as Prometheus' histogram_quantile; None without any.

    Args:
        buckets: cumulative counts by upper bound, ascending, the last one infinite.
    """
    count = max(buckets.values(), default=0.0)
    if count <= 0:
        return None
    below, low = 0.0, 0.0
    for bound, cumulative in buckets.items():
        if cumulative >= at * count:
            if bound == float("inf") or cumulative == below:
                return low
            return low + (bound - low) * (at * count - below) / (cumulative - below)
        below, low = cumulative, bound
    return low


@dataclass(slots=True)
class View:
    """The last snapshots of a server, and what they say. Figures that it does not tell are left out."""

    url: str
    snapshots: deque[Snapshot] = field(default_factory=deque)
    history: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    problem: str = ""

    def add(self, new: Snapshot) -> None:
        """Take a snapshot. One of a server that was started anew is the first."""
        if self.snapshots and (new.total(GENERATED) or 0) < (self.snapshots[-1].total(GENERATED) or 0):
            self.snapshots.clear()
        self.snapshots.append(new)
        while len(self.snapshots) > 2 and self.snapshots[1].at < new.at - WINDOW_S:
            self.snapshots.popleft()
        self.problem = ""
        if (rate := self.rate(GENERATED)) is not None:
            self.history.append(rate)

    def rate(self, names: Sequence[str], **where: str) -> float | None:
        """A counter's increase in a second; None before there are two snapshots."""
        last = self.snapshots[-1]
        before = next((each for each in self.snapshots if each.at >= last.at - RATE_S), last)
        now, then = last.total(names, **where), before.total(names, **where)
        return None if now is None or before is last else max(0.0, now - (then or 0.0)) / (last.at - before.at)

    def quantiles(self, names: Sequence[str], *shares: float, **where: str) -> list[float | None]:
        """Quantiles of what was observed in the window; of all since the server's start before there is one.

        Args:
            shares: the quantiles, 0 to 1; SHOWN where none are given.
        """
        last, first = self.snapshots[-1], self.snapshots[0]
        name = next((each for each in names if f"{each}_bucket" in last.samples), "")
        buckets = last.buckets(name, **where)
        if first is not last:
            before = first.buckets(name, **where)
            buckets = {bound: count - before.get(bound, 0.0) for bound, count in buckets.items()}
        return [quantile(buckets, at) for at in shares or SHOWN]

    # --- the screen -----------------------------------------------------------------------------------

    def render(self, width: int) -> RenderableType:
        """The screen, of so many columns."""
        last = self.snapshots[-1]
        head = Text.assemble((last.prefix.rstrip(":_") or "server", "bold"), f"  {self.url}")
        if self.problem:
            head.append(f"  {self.problem}", "bold red")
        parts: list[RenderableType] = [head, Text(" · ".join(self._figures(last)))]
        if len(self.history) > 1:
            parts.append(Text.assemble("generated tokens/s  ", (sparkline(self.history), "cyan")))
        tables = (self._times(), self._classes(last), self._reasons())
        return Group(*parts, *(fitted(table, width) for table in tables if table.rows))

    def _figures(self, last: Snapshot) -> Iterator[str]:
        counts: tuple[tuple[str, Sequence[str]], ...] = (("running", RUNNING), ("waiting", WAITING))
        for words, names in counts:
            if (value := last.total(names)) is not None:
                yield f"{value:,.0f} {words}"
        if (used := last.total(KV)) is not None:
            yield f"KV cache {used:.0%}"
        for words, names in (("prompt tokens/s", PROMPT), ("tokens/s", GENERATED), ("preemptions/s", PREEMPTIONS)):
            if (rate := self.rate(names)) is not None:
                yield f"{rate:,.1f} {words}"
        drafts, accepted = (self.rate((f"spec_decode_num_{of}_tokens_total",)) for of in ("draft", "accepted"))
        if drafts and accepted is not None:
            yield f"{accepted / drafts:.0%} of drafts accepted"
        for words, names in (("of the predicted time", PREDICTED), ("of the roofline's time", ROOFLINE)):
            if (middle := self.quantiles(names)[0]) is not None:
                yield f"a step takes {middle:.0%} {words}"
        if (least := self.quantiles(SLACK, 0.01)[0]) is not None:
            yield f"P1 of slack {shown_s(least)}"
        if (cpu := self.rate(CPU)) is not None and (steps := self.rate(STEPS)):
            yield f"{cpu / steps:.2f} cores in a step"
        if behind := last.total(BEHIND):
            yield f"{behind:,.0f} clients behind, by {(last.total(UNREAD) or 0) / 1024:,.0f} KiB"

    def _times(self) -> Table:
        span = "since its start" if len(self.snapshots) < 2 else f"last {WINDOW_S:g} s"
        found = {name: self.quantiles(names) for name, names in TIMES.items()}
        rows = (_row(name, *map(shown_s, times)) for name, times in found.items() if times[0] is not None)
        return Table(f"times, {span}", ("", *(f"P{100 * at:g}" for at in SHOWN)), tuple(rows))

    def _classes(self, last: Snapshot) -> Table:
        running, waiting = (last.values(f"class_requests_{each}", "service_class") for each in ("running", "waiting"))
        headings = ("class", "running", "waiting", "TTFT P50", "TTFT P99", "TPOT P99", "missed", "most of its time")
        rows = []
        for name in running:
            where = {"service_class": name}
            ttft = self.quantiles(("class_time_to_first_token_seconds",), **where)
            tpot = self.quantiles(("class_request_time_per_output_token_seconds",), **where)
            either, missed = (
                self.rate(("class_objectives_total",), **where, objective="all", **result)
                for result in ({}, {"result": "missed"})
            )
            share = f"{missed / either:.0%}" if either and missed is not None else "–"
            counts = f"{running[name]:.0f}", f"{waiting.get(name, 0):.0f}"
            times = shown_s(ttft[0]), shown_s(ttft[-1]), shown_s(tpot[-1])
            rows.append(_row(name, *counts, *times, share, self._most_of(last, name)))
        return Table("", headings, tuple(rows), left=frozenset({len(headings) - 1}))

    def _most_of(self, last: Snapshot, service_class: str) -> str:
        """The phases that most time of a class' choices went to, of those that ended in the window."""
        first = self.snapshots[0]
        spent: dict[str, float] = {}
        for labels, value in last.samples.get(PHASES, {}).items():
            named = dict(labels)
            if named["service_class"] == service_class:
                before = 0.0 if first is last else first.samples.get(PHASES, {}).get(labels, 0.0)
                spent[named["phase"]] = value - before
        total = sum(spent.values())
        most = sorted(spent.items(), key=lambda pair: -pair[1])[:MOST_PHASES] if total > 0 else []
        return ", ".join(f"{phase} {value / total:.0%}" for phase, value in most) or "–"

    def _reasons(self) -> Table:
        """What sequences wait for and why requests are refused, in the last seconds."""
        rows, last = [], self.snapshots[-1]
        for metric, label, words in (
            ("stall_seconds_total", "cause", "sequences in {}"),
            ("class_requests_refused_total", "reason", "refused a second: {}"),
        ):
            rates = {each: self.rate((metric,), **{label: each}) for each in last.values(metric, label)}
            for each, rate in sorted(rates.items(), key=lambda pair: -(pair[1] or 0.0)):
                if rate:
                    rows.append(_row(words.format(each), f"{rate:.2f}"))
        return Table("", ("in the last seconds", ""), tuple(rows))


def _row(*texts: str) -> tuple[Cell, ...]:
    return tuple(map(Cell, texts))


def shown_s(seconds: float | None) -> str:
    """A time for a narrow column."""
    if seconds is None:
        return "–"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def sparkline(values: Sequence[float] | deque[float]) -> str:
    """A bar for each value, up to the largest."""
    top = max(values) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int(value / top * len(BARS)))] for value in values)


def follow(url: str, key: str | None, every_s: float) -> Iterator[View]:
    """The view after each snapshot, for ever.

    Raises:
        TopError: the first snapshot cannot be had. Later ones are tried again.
    """
    view = View(url)
    for number in itertools.count():
        try:
            view.add(fetch(url, key))
        except TopError as error:
            if not number:
                raise
            view.problem = str(error)
        yield view
        time.sleep(every_s)
