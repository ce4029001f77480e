"""The benchmark of the gateway, at a load that says nothing but that it works."""

from __future__ import annotations

import argparse
import os

import pytest

from benchmarks import gateway


@pytest.mark.slow
def test_every_contestant_is_measured_in_every_round(capsys: pytest.CaptureFixture[str]) -> None:
    cores = sorted(os.sched_getaffinity(0))
    arguments = argparse.Namespace(rate=40.0, seconds=0.5, rounds=1, streams=4, litellm="", old=None)
    try:
        results = gateway.run(arguments, (cores[0], cores[-1]))
    finally:
        os.sched_setaffinity(0, set(cores))
    assert {gateway.DIRECT, gateway.GATEWAY} <= results["rate"].keys()
    assert all(each["failed"] == 0 for of_load in results.values() for each in of_load.values())
    assert results["streams"][gateway.GATEWAY]["chunks_a_core_second"] > 0
    gateway.show(results)
    assert "rate, headway: adds" in capsys.readouterr().out
