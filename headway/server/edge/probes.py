"""Answers load balancers' plain questions whether the server is well, at a tenth of what another request costs.

They must be answered in time whatever else is going on, and a crowd of them must not become work itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from starlette.responses import Response

from headway.server.edge.http_head import request_id, written
from headway.server.errors import ApiError, json_response

MAX_PROBE = 1024
# Whoever sends other headers than these may mean something by them, and is answered as on any other route.
_PROBE = re.compile(
    rb"GET /(?:health|ping) HTTP/1\.1\r\n"
    rb"(?i:(?:host|user-agent|accept|accept-encoding|cache-control|connection): ?[!-~][ -~]*\r\n)+\r\n"
)
_HOST = re.compile(rb"\nhost:", re.IGNORECASE)
_CLOSES = re.compile(rb"\nconnection:[^\r]*close", re.IGNORECASE)


def health(check: Callable[[], object]) -> Response:
    """The answer that the server is ready, or the error that `check` raises."""
    try:
        check()
    except ApiError as error:
        return error.response()
    return json_response({"status": "ready"})


class ProbeAnswer(NamedTuple):
    """The bytes that are sent, and whether the connection ends with them."""

    data: bytes
    ends: bool


class Probes:
    """Answers bytes that are one whole probe.

    Args:
        check: raises ApiError where the server is not ready.
        headers: headers that every answer has.
    """

    def __init__(self, check: Callable[[], object], headers: Callable[[], list[tuple[bytes, bytes]]]) -> None:
        self._check, self._headers = check, headers

    def answer(self, data: bytes, ends: bool = False) -> ProbeAnswer | None:
        """The answer; None where this is not one whole probe.

        Args:
            ends: the connection ends, even if the client does not ask for that.
        """
        if len(data) > MAX_PROBE or not _PROBE.fullmatch(data) or len(_HOST.findall(data)) != 1:
            return None
        answer = health(self._check)
        answer.headers["x-request-id"] = request_id(b"")
        if ends := ends or _CLOSES.search(data) is not None:
            answer.headers["connection"] = "close"
        return ProbeAnswer(written(answer, self._headers()), ends)
