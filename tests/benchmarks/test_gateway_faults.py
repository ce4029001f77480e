"""Worlds in which the gateway's backends fail: they end, and what would be wrong with one is noticed."""

from __future__ import annotations

import pytest

from benchmarks import gateway_faults
from benchmarks.gateway_faults import FAULTS, Violation, live
from headway.gateway.events import EventReader


def test_nothing_is_lost_whatever_backends_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_faults, "EVERY_S", 3.0)
    world = live(6, 1200)
    assert sum(world.ended.values()) == 1200 and world.ended["whole"] > 800
    assert len(world.episodes.begun) > len(FAULTS) / 2 and sum(world.episodes.attempts.values()) > 20


def test_all_that_wait_for_a_frozen_backend_get_their_answers_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are more than may be sent again otherwise."""
    monkeypatch.setattr(gateway_faults, "EVERY_S", 20.0)
    monkeypatch.setattr(gateway_faults, "FAULTS", ("frozen",))
    world = live(5, 1500)
    assert world.episodes.attempts["frozen"] > 60 and not {name for name in world.ended if name.startswith("50")}


def test_a_stream_that_breaks_off_without_a_word_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_faults, "EVERY_S", 1.0)
    monkeypatch.setattr(gateway_faults, "FAULTS", ("ended",))
    monkeypatch.setattr(EventReader, "is_complete", True)
    with pytest.raises(Violation, match=r"seed 5: .*ended with 200"):
        live(5, 600)
