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

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status = status

    def on_piece(self, data: bytes) -> None:
        if len(self.body) < MOST_BYTES:
            self.body += data

    def on_end(self, failure: UpstreamFailed | None) -> None:
        if not self.done.done():
            self.done.set_result(failure)


async def get(member: Member, path: str) -> tuple[int, bytes]:
    """The status and the body of what a backend answers. Raises UpstreamFailed."""
    return await _ask(member, "GET", path, b"accept: */*\r\n\r\n")


async def post(member: Member, path: str, content: bytes) -> tuple[int, bytes]:
    """The same for a question that has JSON with it."""
    head = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content)
    return await _ask(member, "POST", path, head + content)


async def _ask(member: Member, method: str, path: str, rest: bytes) -> tuple[int, bytes]:
    timeout_s = member.breaker.rule.timeout_s
    request = f"{method} {member.entry.prefix}{path} HTTP/1.1\r\nconnection: close\r\n".encode() + member.head + rest
    question = _Question()
    try:
        async with asyncio.timeout(timeout_s):
            connection = await member.pool.connect(is_kept=False)
            try:
                connection.ask(request, question, timeout_s)
                failure = await question.done
            finally:
                connection.drop()
    except TimeoutError:
        raise UpstreamFailed("timeout", f"no answer within {timeout_s:g} s") from None
    if failure is not None:
        raise failure
    return question.status, bytes(question.body)
