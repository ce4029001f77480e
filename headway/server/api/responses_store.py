"""Answers of /v1/responses, kept so that later requests may go on from them. They are lost with the process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from headway.server.errors import ApiError
from headway.server.generation import Generation

MOST_RESPONSES, MOST_BYTES = 4096, 64 << 20


@dataclass(frozen=True, slots=True)
class Kept:
    """An answer and what it follows.

    Args:
        tenant: whose it is; nobody else finds it.
        body: the response object, as JSON.
        input_items: the items of its request.
        messages: the whole conversation, its answer included, as messages of a chat completion in JSON.
    """

    tenant: str
    body: bytes
    input_items: bytes
    messages: bytes

    @property
    def size(self) -> int:
        return len(self.body) + len(self.input_items) + len(self.messages)


class ResponseStore:
    """Keeps the latest answers, within a number and a size; and which answers are under way."""

    def __init__(self, most: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES) -> None:
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._bytes, self._most, self._most_bytes = 0, most, most_bytes
        self._under_way: dict[str, Generation] = {}

    @contextmanager
    def under_way(self, name: str, generation: Generation) -> Iterator[None]:
        """An answer is under way within it, so it may be cancelled."""
        self._under_way[name] = generation
        try:
            yield
        finally:
            del self._under_way[name]

    def keep(self, name: str, kept: Kept) -> None:
        """Keep an answer. Older ones are given up for it; one that is larger than all may be is not kept."""
        if kept.size > self._most_bytes:
            return
        self._kept[name] = kept
        self._bytes += kept.size
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.size

    def find(self, name: str, tenant: str) -> Kept:
        """An answer. Raises ApiError 404."""
        kept = self._kept.get(name)
        if kept is None or kept.tenant != tenant:
            raise _unknown(name)
        return kept

    def delete(self, name: str, tenant: str) -> None:
        """Give an answer up. Raises ApiError 404."""
        self._bytes -= self.find(name, tenant).size
        del self._kept[name]

    def cancel(self, name: str, tenant: str) -> None:
        """End an answer that is under way.

        Raises:
            ApiError: 404 where there is no such answer, 400 where it has ended.
        """
        generation = self._under_way.get(name)
        if generation is not None and generation.terms.tenant == tenant:
            generation.abort(ApiError(499, "the response was cancelled", code="cancelled", kind="cancelled"))
            return
        self.find(name, tenant)
        raise ApiError(400, f"response {name} has ended; only one that is under way can be cancelled")


def page_of(items: list[dict[str, Any]], after: str | None, limit: int, newest_first: bool) -> bytes:
    """A list object with some of the items. Raises ApiError 400 where `after` is none of them."""
    items = items[::-1] if newest_first else items
    if after is not None:
        at = next((number for number, item in enumerate(items) if item.get("id") == after), None)
        if at is None:
            raise ApiError(400, f"after is {after[:60]!r}, which is no item of this response", param="after")
        items = items[at + 1 :]
    page = items[:limit]
    return msgspec.json.encode(
        {
            "object": "list",
            "data": page,
            "first_id": page[0].get("id") if page else None,
            "last_id": page[-1].get("id") if page else None,
            "has_more": len(items) > limit,
        }
    )


def _unknown(name: str) -> ApiError:
    return ApiError(
        404,
        f"there is no response {name[:100]!r}; the latest ones are kept, unless store is false, until the server ends",
        code="response_not_found",
    )
