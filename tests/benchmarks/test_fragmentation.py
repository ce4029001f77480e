"""Block tables in runs: every block of the pool once, and consecutive within a run."""

from __future__ import annotations

import pytest
import torch

from benchmarks.fragmentation import tables


@pytest.mark.parametrize("run", [1, 4, 32])
def test_tables_have_every_block_once_in_runs(run: int) -> None:
    found = tables(3, 32, run)
    assert found.shape == (3, 32)
    assert sorted(found.flatten().tolist()) == list(range(96))
    starts = found.view(-1, run)
    assert torch.equal(starts, starts[:, :1] + torch.arange(run, dtype=torch.int32))
