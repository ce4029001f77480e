"""One short question to a backend, on a connection of its own."""

from __future__ import annotations

import asyncio

from headway.gateway.member import Member
from headway.gateway.upstream import UpstreamFailed

MOST_BYTES = 4 * 2**20


class _Question:
    """Reads a short answer."""

    def __init__(self) -> None:
        self.status, self.body = 0, bytearray()
        self.done: asyncio.Future[UpstreamFailed | None] = asyncio.get_running_loop().create_future()

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status

    def on_piece(self, data: bytes) -> None:
        if len(self.body) < MOST_BYTES:
            self.body += data

    def on_end(self, failure: UpstreamFailed | None) -> None:
        if not self.done.done():
            self.done.set_result(failure)


async def get(member: Member, path: str) -> tuple[int, bytes]:
    """What a backend answers on a connection of its own. Raises UpstreamFailed."""
    entry, timeout_s = member.entry, member.breaker.rule.timeout_s
    lines = [f"GET {entry.prefix}{path} HTTP/1.1", f"host: {entry.host}", "accept: */*", "connection: close"]
    if entry.key:
        lines.append(f"authorization: Bearer {entry.key}")
    question = _Question()
    try:
        async with asyncio.timeout(timeout_s):
            connection = await member.pool.connect()
            try:
                connection.ask("\r\n".join([*lines, "", ""]).encode(), question, timeout_s)
                failure = await question.done
            finally:
                connection.drop()
    except TimeoutError:
        raise UpstreamFailed("timeout", f"no answer within {timeout_s:g} s") from None
    if failure is not None:
        raise failure
    return question.status, bytes(question.body)
