"""A change is its flag with another value: it parses, types and applies like the flag itself."""

from __future__ import annotations

import pytest

from headway.changes import applied, change_of, most_needed, parse_changes, typed
from headway.engine.config import EngineConfig
from headway.flags import Needs
from headway.planner.request import PlanRequest
from headway.policy.step.options import SchedulingOptions
from headway.server.settings import ServerSettings

SERVE = (ServerSettings, EngineConfig)


def test_a_change_is_typed_as_its_flag_and_makes_its_value() -> None:
    changes = parse_changes("threads=1,--kv_cache_memory=64M,enable-prefix-caching=false", SERVE)
    assert typed(changes) == "--threads 1 --kv-cache-memory 64M --no-enable-prefix-caching"
    config = applied(EngineConfig(), changes)
    assert (config.num_threads, config.kv_cache_memory, config.enable_prefix_caching) == (1, 64 * 2**20, False)
    assert applied(ServerSettings(), changes) == ServerSettings()  # none of them is its own


def test_the_last_change_of_a_field_counts() -> None:
    changes = parse_changes("max-num-seqs=8,block-size=32,max-num-seqs=4", (SchedulingOptions,))
    assert typed(changes) == "--max-num-seqs 4 --block-size 32"
    assert applied(SchedulingOptions(), changes).max_num_seqs == 4


@pytest.mark.parametrize(
    ("field", "value", "typed_as", "where", "needs"),
    [
        ("quantization", "int8", "--quantization int8", "Deployment", Needs.RESTART),
        ("concurrency", 4, "--concurrency 4", "Load", Needs.LOAD),
        ("hardware", "H200", "--hardware H200", "Deployment", Needs.HARDWARE),
        ("price_per_hour", None, "", "Objectives and price", Needs.RESTART),
    ],
)
def test_a_change_knows_where_it_applies_and_what_it_needs(
    field: str, value: object, typed_as: str, where: str, needs: Needs
) -> None:
    change = change_of(PlanRequest, field, value)
    assert (change.typed, change.where, change.needs) == (typed_as, where, needs)


def test_together_changes_need_what_the_hardest_of_them_needs() -> None:
    changes = [change_of(PlanRequest, name, 2) for name in ("max_num_seqs", "count", "concurrency")]
    assert most_needed(changes) is Needs.HARDWARE and most_needed(changes[:1]) is Needs.RESTART
    assert change_of(ServerSettings, "tenants", None).needs is Needs.RELOAD


@pytest.mark.parametrize(("text", "says"), [("max-num-seq=4", "did you mean max-num-seqs?"), ("port=-1", "at least 0")])
def test_what_is_no_change_is_one_line(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("?", r"\?")):
        parse_changes(text, SERVE)
