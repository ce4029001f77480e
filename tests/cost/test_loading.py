"""Loading: each stage by hand on a machine with round numbers, what each depends on, and bad input."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cost.loading import Loading, loading
from tests.cost.machines import MACHINE

STAGES = tuple(each.name for each in fields(Loading))
JOINED = replace(MACHINE, host_bytes_per_s=4e9)
sizes = st.integers(0, 10**12)
times = st.floats(0, 1e4)


def test_each_stage_by_hand():
    """20 GB, of which each of two devices gets half; links give 85 % of 4 GB/s, the devices' memory 10 GB/s."""
    stages = loading(20 * 10**9, 10 * 10**9, JOINED, storage_bytes_per_s=2e9)
    assert stages.storage_s == pytest.approx(10.0)
    assert stages.deserialize_s == pytest.approx(2.0)
    assert stages.transfer_s == pytest.approx(10 / 3.4)
    assert stages.layout_s == pytest.approx(2.0)  # read and written
    assert stages.seconds == pytest.approx(14 + 10 / 3.4) and stages.least_s == pytest.approx(10.0)


def test_storage_is_a_drive_of_document_000_unless_it_is_given():
    """Model Loading 1: 3.5 to 7 GB/s."""
    rate = 1e12 / loading(10**12, 0, MACHINE).storage_s
    assert 3.5e9 <= rate <= 7e9


def changed(before: Loading, after: Loading) -> set[str]:
    return {name for name in STAGES if getattr(before, name) != pytest.approx(getattr(after, name))}


def test_what_each_stage_depends_on():
    def at(checkpoint: int = 10**9, device: int = 10**9, machine=JOINED, storage: float = 1e9) -> Loading:
        return loading(checkpoint, device, machine, storage)

    assert changed(at(), at(storage=2e9)) == {"storage_s"}
    assert changed(at(), at(checkpoint=2 * 10**9)) == {"storage_s", "deserialize_s"}
    assert changed(at(), at(device=5 * 10**8)) == {"transfer_s", "layout_s"}
    assert changed(at(), at(machine=replace(JOINED, host_bytes_per_s=8e9))) == {"transfer_s"}
    assert changed(at(), at(machine=replace(JOINED, bytes_per_s=2e10))) == {"layout_s"}
    assert changed(at(), at(machine=replace(JOINED, flops_per_s={"fp32": 1.0}))) == set()


def test_nothing_is_sent_to_a_host():
    assert MACHINE.host_bytes_per_s is None
    stages = loading(10**9, 10**9, MACHINE)
    assert stages.transfer_s == 0 and min(stages.storage_s, stages.deserialize_s, stages.layout_s) > 0


@given(storage=times, deserialize=times, transfer=times, layout=times)
def test_overlap_saves_at_most_all_but_the_longest_stage(storage, deserialize, transfer, layout):
    stages = Loading(storage, deserialize, transfer, layout)
    ordered = sorted((storage, deserialize, transfer, layout))
    assert stages.least_s == ordered[-1]
    assert stages.seconds == pytest.approx(ordered[-1] + sum(ordered[:-1]))
    assert stages.least_s <= stages.seconds <= 4 * stages.least_s


@given(checkpoint=sizes, device=sizes, times=st.integers(1, 9))
def test_time_is_proportional_to_the_size(checkpoint, device, times):
    once, often = loading(checkpoint, device, JOINED), loading(times * checkpoint, times * device, JOINED)
    assert [getattr(often, name) for name in STAGES] == pytest.approx([times * getattr(once, name) for name in STAGES])
