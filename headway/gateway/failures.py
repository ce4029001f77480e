"""What is a backend's fault, and what the client is told of it."""

from __future__ import annotations

import msgspec

from headway.gateway.asked import Api
from headway.gateway.events import ABSENT, Part, decode_part
from headway.gateway.member import Member
from headway.gateway.upstream import UpstreamFailed
from headway.server.edge.streaming import event
from headway.server.errors import ApiError, anthropic_error

# Answers of a backend that cannot serve this request now, while another one may.
BUSY = (429, 502, 503, 504)
# Codes of a 503 by which a class refuses what would be late.
LATE = ("deadline_unreachable", "queue_timeout")
_CODES = dict.fromkeys(("timeout", "down"), (504, "backend_timeout")) | {"connect": (502, "backend_unreachable")}


class _Coded(msgspec.Struct):
    code: str | None = None


def part_of(body: bytes) -> Part | None:
    """What an answer says; None where it is no part of an API."""
    try:
        return decode_part(body)
    except (msgspec.MsgspecError, RecursionError):
        return None


def is_json(body: bytes) -> bool:
    """Whether it is JSON at all."""
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True


def is_fault(status: int, body: bytes) -> bool:
    """Whether a backend that answers like this is at fault. One that has no room, or no time, is not."""
    if status != 503:
        return status >= 500
    part = part_of(body)
    if part is None or part.error is ABSENT:
        return True
    try:
        return msgspec.json.decode(part.error, type=_Coded).code not in LATE
    except msgspec.MsgspecError:
        return True


def error_of(member: Member, failure: UpstreamFailed, status: int = 502) -> ApiError:
    """What the client is told of a backend's failure."""
    status, code = _CODES.get(failure.kind, (status, "backend_failed"))
    return ApiError(status, f"backend {member.entry.name}: {failure}", code=code, kind="backend_error")


def error_event(api: Api, error: ApiError) -> bytes:
    """The last event of a stream that has failed, as clients of the API expect it."""
    if api.streams == "messages":
        return b"event: error\n" + event(msgspec.json.encode(anthropic_error(error)))
    if api.streams == "responses":
        told = {"type": "error", "code": error.code, "message": error.message, "param": None}
        return b"event: error\n" + event(msgspec.json.encode(told))
    return event(msgspec.json.encode(error.body()))
