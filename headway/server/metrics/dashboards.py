"""A Grafana dashboard and Prometheus rules, made from the server's own metrics.

Each query takes its names from a registry as a server has it, and what a panel explains is the help of its metrics. So
a metric that is renamed or gone is an error when the files are made, and not an empty panel.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from headway.engine.config import EngineConfig
from headway.engine.messages import EngineStats, Ready
from headway.server.metrics.metrics import Metrics, of_clients
from headway.server.metrics.telemetry import METRICS

# The share of requests that are to meet all their objectives, by which burn rates are reckoned: a rate of 1 spends the
# other share just within its period. The pairs of windows and their thresholds are those of Beyer et al., The Site
# Reliability Workbook, 2018, chapter 5.
GOAL = 0.99
BURNS = (("fast", "5m", "1h", 14.4, "page"), ("slow", "30m", "6h", 6.0, "ticket"))
QUANTILES = (0.5, 0.9, 0.95, 0.99)
RATE, SELECTED = "$__rate_interval", 'model_name=~"$model"'
WIDTH, HEIGHT, ACROSS = 8, 8, 24  # of a panel, and of the dashboard, in Grafana's units


@dataclass(frozen=True, slots=True)
class Query:
    """A query and the legend of its series. `names` are the metrics that it reads, without the prefix."""

    expr: str
    legend: str
    names: tuple[str, ...]


class Panel:
    def __init__(self, title: str, unit: str, *queries: Query) -> None:
        self.title, self.unit, self.queries = title, unit, queries


class Queries:
    """Writes queries about metrics that exist.

    Args:
        prefix: what the names of metrics begin with.

    Attributes:
        help: the help of each metric, by its name without the prefix.
    """

    def __init__(self, prefix: str) -> None:
        ready = Ready(0, {}, 1, 16, 1, "cpu", "auto", 1, 1)
        engine = SimpleNamespace(
            config=EngineConfig(),
            stats=EngineStats(0, 0, 0.0),
            ready=ready,
            num_waiting=0,
            restarts=0,
            hangs=0,
            pid=os.getpid(),
        )
        metrics = Metrics(prefix, "", engine)
        metrics.add(lambda families: of_clients(families, (0, 0)))
        families = list(metrics.registry.collect())
        self.prefix = prefix
        told = METRICS.items()  # of which this machine has only some
        self.help = {name: each.text for name, each in told}
        self.help |= {each.name.removeprefix(prefix): each.documentation for each in families}
        self._kinds = {name: each.kind for name, each in told}
        self._kinds |= {each.name.removeprefix(prefix): each.type for each in families}

    def name(self, name: str, kind: str) -> str:
        """The whole name of a metric. Raises ValueError where the server has no such metric of this kind."""
        if self._kinds.get(name) != kind:
            raise ValueError(f"{name} is no {kind} of the server, but {self._kinds.get(name, 'nothing')}")
        return self.prefix + name

    def quantile(self, name: str, at: float, by: str = "", legend: str = "") -> Query:
        """The value below which a share of a histogram's observations are."""
        labels, bucket = f"le, {by}" if by else "le", self.name(name, "histogram")
        expr = f"histogram_quantile({at:g}, sum by ({labels}) (rate({bucket}_bucket{{{SELECTED}}}[{RATE}])))"
        return Query(expr, legend or f"P{100 * at:g}" + f" {{{{{by}}}}}" * bool(by), (name,))

    def quantiles(self, name: str, by: str = "") -> list[Query]:
        return [self.quantile(name, at, by) for at in QUANTILES]

    def rate(self, name: str, by: str = "", legend: str = "", where: str = "", window: str = RATE) -> Query:
        """A counter's increase in a second."""
        inner = f"rate({self.name(name, 'counter')}_total{{{SELECTED}{where}}}[{window}])"
        return Query(f"sum{f' by ({by})' * bool(by)} ({inner})", legend or f"{{{{{by}}}}}", (name,))

    def gauge(self, name: str, by: str = "", legend: str = "") -> Query:
        full = f"{self.name(name, 'gauge')}{{{SELECTED}}}"
        return Query(f"sum{f' by ({by})' * bool(by)} ({full})", legend or f"{{{{{by}}}}}", (name,))

    def ratio(self, part: Query, whole: Query, legend: str) -> Query:
        return Query(f"{part.expr} / {whole.expr}", legend, part.names + whole.names)

    def cores_in_steps(self) -> Query:
        """How many cores the engine has while it runs steps."""
        steps = self.name("step_duration_seconds", "histogram")
        took = Query(f"sum(rate({steps}_sum{{{SELECTED}}}[{RATE}]))", "", ("step_duration_seconds",))
        return self.ratio(self.rate("engine_cpu_seconds"), took, "cores")

    def missed(self, by: str, window: str = RATE) -> Query:
        """The share of choices that missed an objective; 0 where none did, for which there is no series yet."""
        missed, every = (
            self.rate("class_objectives", by, "", f', objective="all"{result}', window)
            for result in (', result="missed"', "")
        )
        return Query(f"({missed.expr} or 0 * {every.expr}) / {every.expr}", f"{{{{{by}}}}}", every.names)

    def burn(self, window: str) -> Query:
        """How many times as often objectives are missed as the goal allows."""
        missed = self.missed("service_class", window)
        return Query(f"{missed.expr} / {1 - GOAL:.2g}", f"{{{{service_class}}}}, {window}", missed.names)


def panels(of: Queries) -> dict[str, list[Panel]]:
    """The panels of each row."""
    rate, gauge, ratio, quantile, quantiles = of.rate, of.gauge, of.ratio, of.quantile, of.quantiles
    by = "service_class"
    return {
        "Latency by class": [
            Panel("Time to first token", "s", *quantiles("class_time_to_first_token_seconds", by)),
            Panel("Time per output token", "s", *quantiles("class_request_time_per_output_token_seconds", by)),
            Panel("End to end", "s", *quantiles("class_e2e_request_latency_seconds", by)),
            Panel("Between outputs", "s", *quantiles("class_inter_token_latency_seconds", by)),
            Panel(
                "Where a request's time goes, P95",
                "s",
                *[
                    quantile(f"request_{part}_time_seconds", 0.95, legend=part)
                    for part in ("tokenize", "queue", "prefill", "decode")
                ],
            ),
            Panel("Waiting for work of others", "s", rate("stall_seconds", "cause")),
            Panel(
                "Choices in each phase of the ledger",
                "short",
                rate("class_request_phase_seconds", f"{by}, phase", "{{service_class}}: {{phase}}"),
            ),
        ],
        "Objectives": [
            Panel(
                "Goodput: choices a second that met all",
                "reqps",
                rate("class_objectives", by, "", ', objective="all", result="met"'),
            ),
            Panel("Missed", "percentunit", of.missed(by)),
            Panel(f"Burn rate of a goal of {GOAL:.0%}", "short", of.burn("5m"), of.burn("1h")),
        ],
        "Load": [
            Panel(
                "Tokens a second",
                "short",
                rate("prompt_tokens", legend="prompts"),
                rate("generation_tokens", legend="generated"),
            ),
            Panel(
                "Choices",
                "short",
                gauge("class_requests_running", by, "running {{service_class}}"),
                gauge("class_requests_waiting", by, "waiting {{service_class}}"),
            ),
            Panel("Ends by reason", "reqps", rate("request_success", "finished_reason")),
            Panel("Rejections by reason", "reqps", rate("class_requests_refused", "reason")),
            Panel("Answers that clients do not take", "bytes", gauge("clients_unread_bytes", legend="not taken")),
        ],
        "KV cache": [
            Panel("In use", "bytes", gauge("kv_cache_used_bytes", legend="in use")),
            Panel(
                "Blocks",
                "short",
                gauge("kv_blocks_free", legend="free"),
                gauge("class_kv_blocks_used", by, "{{service_class}}"),
            ),
            Panel(
                "Prompt tokens found in the prefix cache",
                "percentunit",
                ratio(rate("prefix_cache_hits"), rate("prefix_cache_queries"), "found"),
            ),
            Panel("Cached blocks given up", "short", rate("kv_evictions", "reason")),
            Panel("Preemptions a second", "short", rate("num_preemptions", legend="preemptions")),
        ],
        "Steps": [
            Panel("Duration", "s", *quantiles("step_duration_seconds")),
            Panel("Batching windows a second", "short", rate("batching_windows", legend="opened")),
            Panel("Choices in a step", "short", *quantiles("iteration_sequences")),
            Panel("Prompt tokens of a step that has some", "short", *quantiles("step_prompt_tokens")),
            Panel("Slack when a step begins", "s", *[quantile("step_slack_seconds", at) for at in (0.01, 0.1, 0.5)]),
            Panel(
                "Predictor: measured time / predicted time",
                "short",
                *[quantile("step_time_measured_to_predicted_ratio", at) for at in (0.05, 0.5, 0.95)],
            ),
            Panel(
                "Distance to the roofline: measured time / least time",
                "short",
                *quantiles("step_time_to_roofline_ratio"),
            ),
            Panel(
                "Drafts that were accepted",
                "percentunit",
                ratio(rate("spec_decode_num_accepted_tokens"), rate("spec_decode_num_draft_tokens"), "accepted"),
            ),
        ],
        "Processes": [
            Panel(
                "Engine: cores in use, and page faults a second",
                "short",
                rate("engine_cpu_seconds", legend="cores"),
                rate("engine_page_faults", "kind"),
            ),
            Panel("Engine: cores in use while steps run", "short", of.cores_in_steps()),
            Panel("Memory of the engine", "bytes", gauge("engine_resident_memory_bytes", legend="resident memory")),
            Panel("Restarts of the engine", "short", gauge("engine_restarts", legend="restarts")),
            Panel(
                "Engine: memory of its allocators",
                "bytes",
                gauge("engine_allocator_bytes", "allocator, state", "{{allocator}} {{state}}"),
            ),
        ],
        "Machine": [
            Panel(
                "Kept from a core: seconds a second",
                "s",
                rate("engine_throttled_seconds", legend="engine, by its quota"),
                rate("engine_run_delay_seconds", legend="threads of the engine, by others"),
                rate("machine_cpu_steal_seconds", legend="cores, by other machines of the host"),
            ),
            Panel("Frequency of the cores", "hertz", gauge("machine_cpu_frequency_hertz", "of")),
            Panel(
                "Engine: switches and moves of threads a second",
                "short",
                rate("engine_context_switches", "kind"),
                rate("engine_migrations", legend="migrations"),
            ),
            Panel(
                "Engine: instructions a cycle",
                "short",
                ratio(rate("engine_instructions"), rate("engine_cycles"), "instructions"),
            ),
            Panel("Engine: cache misses a second", "short", rate("engine_cache_misses", legend="misses")),
            Panel(
                "Power", "watt", rate("machine_energy_joules", "domain"), gauge("gpu_power_watts", "gpu", "GPU {{gpu}}")
            ),
            Panel(
                "Generated tokens a joule",
                "short",
                ratio(rate("generation_tokens"), rate("machine_energy_joules"), "processors, memory"),
                ratio(rate("generation_tokens"), rate("gpu_energy_joules"), "GPUs"),
            ),
            Panel("GPU: share of the time with a kernel", "percentunit", gauge("gpu_utilization_ratio", "gpu")),
            Panel("GPU: memory", "bytes", gauge("gpu_memory_used_bytes", "gpu")),
            Panel("GPU: clocks", "hertz", gauge("gpu_clock_hertz", "gpu, clock", "{{gpu}} {{clock}}")),
            Panel("GPU: what holds its clocks down", "short", gauge("gpu_clocks_limited", "reason")),
            Panel("GPU: temperature", "celsius", gauge("gpu_temperature_celsius", "gpu")),
        ],
    }


def dashboard(prefix: str) -> str:
    """The dashboard as Grafana imports it: JSON of its schema 39."""
    of = Queries(prefix)
    source = {"type": "prometheus", "uid": "${source}"}
    made: list[dict[str, Any]] = []
    top = 0
    for row, of_row in panels(of).items():
        made.append(
            {"type": "row", "title": row, "collapsed": False, "panels": [], "gridPos": _place(0, top, ACROSS, 1)}
        )
        for at, panel in enumerate(of_row):
            place = _place(at * WIDTH % ACROSS, top + 1 + at * WIDTH // ACROSS * HEIGHT, WIDTH, HEIGHT)
            made.append(_panel(panel, of, source, place))
        top += 1 + -(-len(of_row) * WIDTH // ACROSS) * HEIGHT
    for number, each in enumerate(made, start=1):
        each["id"] = number
    models = f"label_values({prefix}num_requests_running, model_name)"
    variables = [
        {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {
            "name": "model",
            "label": "Model",
            "type": "query",
            "datasource": source,
            "query": models,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "refresh": 2,
            "current": {"value": "$__all"},
        },
    ]
    whole = {
        "uid": "headway",
        "title": "Headway",
        "tags": ["llm", "headway"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": made,
    }
    return json.dumps(whole, indent=1) + "\n"


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(panel: Panel, of: Queries, source: dict[str, str], place: dict[str, int]) -> dict[str, Any]:
    names = dict.fromkeys(name for query in panel.queries for name in query.names)
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "gridPos": place,
        "description": "\n".join(of.help[name] for name in names),
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 8}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": source, "expr": query.expr, "legendFormat": query.legend}
            for at, query in enumerate(panel.queries)
        ],
    }


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule. `summary` says what is wrong, `action` where to look first."""

    name: str
    expr: str
    lasts: str
    severity: str
    summary: str
    action: str


def alerts(of: Queries) -> list[Alert]:
    """The alerts, without the variables of dashboards."""
    found = [
        Alert(
            f"HeadwayBurnRate{name.capitalize()}",
            f"{of.burn(short).expr} > {limit:g}\nand\n{of.burn(long).expr} > {limit:g}",
            "2m",
            severity,
            f"Class {{{{ $labels.service_class }}}} misses its objectives {limit:g} times as often as a goal of "
            f"{GOAL:.0%} allows",
            "The page at /#live shows the phase that most of the time goes to; docs/ledger.md says what helps.",
        )
        for name, short, long, limit, severity in BURNS
    ]
    by = "instance"
    refused, ended = of.rate("class_requests_refused", by, window="5m"), of.rate("request_success", by, window="5m")
    free, used = of.gauge("kv_blocks_free", by), of.gauge("class_kv_blocks_used", by)
    preempted, generated = of.rate("num_preemptions", by, window="10m"), of.rate("generation_tokens", by, window="5m")
    ratio = of.quantile("step_time_measured_to_predicted_ratio", 0.5, by).expr.replace(RATE, "10m")
    found += [
        Alert(
            "HeadwayEngineRestarted",
            f"changes({of.name('engine_restarts', 'gauge')}[15m]) > 0",
            "0m",
            "page",
            "The engine process has ended and was started again",
            "The server's log has the reason; docs/faults.md lists them.",
        ),
        Alert(
            "HeadwayStalled",
            f"{of.gauge('num_requests_waiting', by).expr} > 0\nand\n{generated.expr} == 0",
            "5m",
            "page",
            "Requests wait, and no token is generated",
            "GET /health and GET /debug/schedule say what the engine waits for.",
        ),
        Alert(
            "HeadwayRejects",
            f"{refused.expr} / ({refused.expr} + {ended.expr}) > 0.05",
            "5m",
            "ticket",
            "More than one request in twenty is refused",
            "The panel of rejections tells the reason; more seats, another server or quotas help.",
        ),
        Alert(
            "HeadwayKvCacheFull",
            f"{preempted.expr} > 0.1\nand\n{free.expr} < 0.05 * ({free.expr} + {used.expr})",
            "10m",
            "ticket",
            "The KV cache is full, and running requests are preempted",
            "docs/memory.md: more memory for the cache, fewer sequences, or shorter ones.",
        ),
        Alert(
            "HeadwayPredictionsOff",
            f"{ratio} > 1.5\nor\n{ratio} < 0.67",
            "15m",
            "ticket",
            "Steps take much longer or shorter than predicted, so promises are not kept",
            "The machine may be throttled or shared; the dashboard's row Machine tells by whom.",
        ),
    ]
    return found


def rules(prefix: str) -> str:
    """The alerts as a file of rules for Prometheus."""
    lines = ["# Made by `headway dashboard`. Do not edit.", "groups:", "  - name: headway", "    rules:"]
    for alert in alerts(Queries(prefix)):
        expr = alert.expr.replace(f"{{{SELECTED}, ", "{").replace(f"{{{SELECTED}}}", "")
        lines += [f"      - alert: {alert.name}", "        expr: |-"]
        lines += [f"          {line}" for line in expr.splitlines()]
        lines += [f"        for: {alert.lasts}", f"        labels: {{severity: {alert.severity}}}"]
        lines += ["        annotations:", f"          summary: {json.dumps(alert.summary)}"]
        lines += [f"          description: {json.dumps(alert.action)}"]
    return "\n".join(lines) + "\n"
