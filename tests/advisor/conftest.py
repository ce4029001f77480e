"""What the tests of the advisor share with those of live servers."""

from __future__ import annotations

from tests.live.conftest import served

__all__ = ["served"]
