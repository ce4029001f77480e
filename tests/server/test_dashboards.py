"""The dashboard and the rules: current, about metrics that there are, and taken by Prometheus' own tool."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from headway.cli.dashboard import dashboard as app
from headway.server.metrics.dashboards import Queries, dashboard, panels, rules
from tests.server.conftest import StartServer

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
FILES = ("grafana/headway.json", "prometheus/headway-rules.yml")
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")


def promtool(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], input=text, capture_output=True, text=True, timeout=30)


def test_the_files_are_current(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["--output", str(tmp_path)])
    assert ran.exit_code == 0 and ran.output.split() == [str(tmp_path / each) for each in FILES]
    for each in FILES:
        assert (tmp_path / each).read_text() == (DEPLOY / each).read_text(), "run: headway dashboard --output deploy"


def test_names_follow_the_prefix(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["--output", str(tmp_path), "--metrics-prefix", "vllm:"]).exit_code == 0
    for each in FILES:
        text = (tmp_path / each).read_text()
        assert "vllm:" in text and "headway:" not in text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--metrics-prefix", "9x"], "'9x' is not a Prometheus name"),
        (["--metrics-prefix", 'x"}'], "is not a Prometheus name"),
        (["--output", "/proc/nowhere"], "choose another folder with --output"),
    ],
)
def test_bad_input_is_one_line(given: list[str], said: str) -> None:
    ran = CliRunner().invoke(app, given)
    assert ran.exit_code == 2 and said in ran.output and ran.output.count("\n") == 1


def test_a_metric_that_is_gone_or_of_another_kind_is_an_error() -> None:
    of = Queries("headway:")
    for broken in (
        lambda: of.rate("nothing"),
        lambda: of.gauge("prompt_tokens"),
        lambda: of.quantile("prompt_tokens", 1),
    ):
        with pytest.raises(ValueError, match=r"is no \w+ of the server"):
            broken()


def test_panels_do_not_overlap_and_each_is_explained() -> None:
    made = json.loads(dashboard("headway:"))["panels"]
    taken = set()
    for panel in made:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells
        assert panel["type"] == "row" or (panel["description"] and panel["targets"])
    assert len({panel["id"] for panel in made}) == len(made)
    titles = [panel.title for row in panels(Queries("headway:")).values() for panel in row]
    assert len(set(titles)) == len(titles)


@needs_promtool
@pytest.mark.parametrize("prefix", ["headway:", "vllm:"])
def test_rules_are_valid(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "rules.yml").write_text(rules(prefix))
    ran = promtool("check", "rules", str(tmp_path / "rules.yml"))
    assert ran.returncode == 0 and "SUCCESS" in ran.stdout, ran.stderr
    assert promtool("check", "config", str(DEPLOY / "prometheus/prometheus.yml")).returncode == 0


@needs_promtool
def test_names_of_metrics_are_clean(start_server: StartServer) -> None:
    """Of the usual prefix, the tool would say that a colon is for recorded names; vLLM has it, and so have we."""
    server = start_server(metrics_prefix="headway_")
    server.post("/v1/completions", prompt="x")
    ran = promtool("check", "metrics", text=server.client.get("/metrics").text)
    assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")


@needs_promtool
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    """Series of a server that misses a fifth of its objectives, restarts and stalls, and of one that is well."""
    (tmp_path / "rules.yml").write_text(rules("headway:"))
    labels = 'instance="a",service_class="chat",objective="all"'
    ill = {
        f'headway:class_objectives_total{{{labels},result="met"}}': "0+80x120",
        f'headway:class_objectives_total{{{labels},result="missed"}}': "0+20x120",
        'headway:engine_restarts{instance="a"}': "0x60 1x60",
        'headway:num_requests_waiting{instance="a"}': "5x120",
        'headway:generation_tokens_total{instance="a"}': "7x120",
        'headway:class_requests_refused_total{instance="a",reason="queue_full"}': "0+10x120",
        'headway:request_success_total{instance="a",finished_reason="stop"}': "0+90x120",
        'headway:num_preemptions_total{instance="a"}': "0+60x120",
        'headway:kv_blocks_free{instance="a"}': "1x120",
        'headway:class_kv_blocks_used{instance="a",service_class="chat"}': "99x120",
        'headway:step_time_measured_to_predicted_ratio_bucket{instance="a",le="1.5"}': "0x120",
        'headway:step_time_measured_to_predicted_ratio_bucket{instance="a",le="2.0"}': "0+60x120",
        'headway:step_time_measured_to_predicted_ratio_bucket{instance="a",le="+Inf"}': "0+60x120",
    }
    well = {
        f'headway:class_objectives_total{{{labels},result="met"}}': "0+80x120",
        'headway:engine_restarts{instance="a"}': "2x120",
        'headway:num_requests_waiting{instance="a"}': "5x120",
        'headway:generation_tokens_total{instance="a"}': "0+90x120",
        'headway:request_success_total{instance="a",finished_reason="stop"}': "0+90x120",
        'headway:step_time_measured_to_predicted_ratio_bucket{instance="a",le="0.9"}': "0x120",
        'headway:step_time_measured_to_predicted_ratio_bucket{instance="a",le="1.1"}': "0+60x120",
        'headway:step_time_measured_to_predicted_ratio_bucket{instance="a",le="+Inf"}': "0+60x120",
    }
    alerts = [rule["alert"] for rule in yaml.safe_load(rules("headway:"))["groups"][0]["rules"]]
    for series, fires in ((ill, True), (well, False)):
        firing = 'count by (alertname) (ALERTS{alertstate="firing"})'
        expected = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in alerts] if fires else []
        case = {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [{"expr": firing, "eval_time": "70m", "exp_samples": expected}],
        }
        (tmp_path / "tests.yml").write_text(
            yaml.safe_dump({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": [case]})
        )
        ran = promtool("test", "rules", str(tmp_path / "tests.yml"))
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_rules_have_no_variables_of_dashboards() -> None:
    text = rules("headway:")
    assert "$__" not in text and "$model" not in text
    assert set(re.findall(r"\$\w+", text)) == {"$labels"}
