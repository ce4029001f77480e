"""The ramp that autoscalers are compared on, and what is counted of their replicas."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest

from benchmarks import autoscale
from headway.gateway.deployed.file import read_deploy_file
from headway.load.workload.traces import read_mooncake
from tests.calibration.machines import a_machine


def test_a_ramp_rises_stays_and_falls(tmp_path: Path) -> None:
    arguments = autoscale.parse([])
    times = autoscale.arrivals(arguments, 1)
    ends = 2 * arguments.hold + 2 * arguments.climb + arguments.plateau
    assert times == sorted(times) and times[0] > 0 and times[-1] < ends
    first = [at for at in times if at < arguments.hold]
    begins = arguments.hold + arguments.climb
    many = [at for at in times if begins <= at < begins + arguments.plateau]
    assert 0.4 < len(first) / (arguments.least * arguments.hold) < 1.8
    assert 0.8 < len(many) / (arguments.peak * arguments.plateau) < 1.2
    autoscale.trace(arguments, 1, tmp_path / "ramp.jsonl")
    assert read_mooncake(tmp_path / "ramp.jsonl").rows == len(times)


def test_replica_seconds_are_those_of_the_run() -> None:
    counts = [(0.0, 1), (10.0, 2), (20.0, 3), (30.0, 1), (40.0, 1)]
    watched = autoscale.Watched(psutil.Process(os.getpid()), "name", 0.5, counts)
    assert watched.between(10.0, 35.0) == (10 * 2 + 10 * 3 + 5 * 1, 3, 1)


def test_a_slowed_machine_is_slower_by_the_share() -> None:
    whole = a_machine()
    half = autoscale.slowed(whole, 0.5)
    assert half.hardware.bytes_per_s == whole.hardware.bytes_per_s / 2
    assert half.efficiency.step_s == 2 * whole.efficiency.step_s
    assert half.efficiency.request_s == whole.efficiency.request_s
    assert type(half).from_json(half.to_json()) == half


def test_all_contestants_run_the_same_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = autoscale.parse([])
    monkeypatch.setattr(autoscale, "write_weights", lambda shape, folder: tmp_path / shape)
    autoscale.command(autoscale.DEPLOY, "ramp", 1, arguments, tmp_path)
    (ours,) = read_deploy_file(str(tmp_path / "deploy.toml")).deployments
    theirs = json.loads(autoscale.command(autoscale.SERVE, "ramp", 1, arguments, tmp_path)[-1])
    assert list(ours.flags) == theirs["flags"] and ours.model == theirs["model"] and ours.name == theirs["name"]
    rule = ours.rule
    assert (rule.most, rule.choices, rule.down_after_s) == (theirs["most"], theirs["target"], theirs["down"])


def test_the_table_has_medians() -> None:
    keys = ("met", "p50", "p99", "seconds", "most", "last", "refused", "lost")
    rounds = {"one": [dict.fromkeys(keys, 1.0), dict.fromkeys(keys, 3.0)]}
    assert autoscale.table(rounds).splitlines()[-1] == f"| one |{' 2 |' * len(autoscale.TITLES)}"
