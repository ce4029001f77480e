"""What backends store: responses, files and batches. Each is at one backend, to which all requests for it go."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
from starlette.datastructures import QueryParams

from headway.gateway.asked import OF_BATCHES
from headway.gateway.member import Member
from headway.gateway.question import get
from headway.gateway.upstream import UpstreamFailed
from headway.server.edge.http_head import is_newest_first
from headway.server.errors import ApiError, bad_request, not_found, unavailable

# Objects of which the gateway knows where they are; backends are asked for others, for so many at a time.
REMEMBERED, ASKED_AT_ONCE = 100_000, 4
# The most objects of one backend that are listed, and how many it is asked for at a time.
MOST_LISTED, PAGE = 10_000, 100
WORDS = {"responses": "response", "files": "file", "batches": "batch"}
IS_ID = re.compile(r"[\w-]{1,200}")
STORED = re.compile(rf"/v1/(responses|files|batches)/({IS_ID.pattern})(?:/cancel|/input_items|/content)?")
_MODEL = re.compile(rb'"model"\s*:\s*"((?:[^"\\]|\\.){1,200})"')


class _Object(msgspec.Struct):
    """Ids of an object that is stored, and of those that came with it."""

    id: str
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: float = 0.0
    purpose: str | None = None


class _Page(msgspec.Struct):
    data: list[msgspec.Raw]
    has_more: bool = False


class _Home(NamedTuple):
    backend: str
    tenant: str


class Homes:
    """Which backend has what.

    Args:
        members: gives the backends, by name.
        has_tenants: whether tenants see only what is their own.
    """

    def __init__(self, members: Callable[[], Mapping[str, Member]], has_tenants: bool) -> None:
        self._members, self._has_tenants = members, has_tenants
        self._homes: OrderedDict[str, _Home] = OrderedDict()
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE)

    def remember(self, object_id: str, member: Member, tenant: str) -> None:
        """Note which backend has an object, and whose it is."""
        self._homes[object_id] = _Home(member.entry.name, tenant)
        if len(self._homes) > REMEMBERED:
            self._homes.popitem(last=False)

    def note(self, answer: bytes, member: Member, tenant: str) -> None:
        """Note the ids in an answer that is a file or a batch."""
        try:
            found = msgspec.json.decode(answer, type=_Object)
        except (msgspec.MsgspecError, RecursionError):
            return
        for object_id in (found.id, found.output_file_id, found.error_file_id):
            if object_id:
                self.remember(object_id, member, tenant)

    async def of(self, kind: str, object_id: str, tenant: str) -> Member | None:
        """The backend that has an object; None where no backend has it, or it is another tenant's.

        Raises:
            ApiError: 410 where its backend is not in the file any more, 503 where one that may have it cannot be asked.
        """
        home, word = self._homes.get(object_id), WORDS[kind]
        if home is None:
            return await self._asked(kind, object_id)
        if self._has_tenants and home.tenant != tenant:
            return None
        member = self._members().get(home.backend)
        if member is None:
            raise ApiError(410, f"{word} {object_id} was at backend {home.backend}, which is gone", code="backend_gone")
        return member

    def not_found(self, kind: str, object_id: str) -> ApiError:
        word = WORDS[kind]
        return not_found(f"no {word} {object_id} is known here", f"{word}_not_found")

    async def _asked(self, kind: str, object_id: str) -> Member | None:
        """Ask all backends: the gateway may have been started after the object was stored, or another one stored it."""
        members = self._storing(kind)
        async with self._asking:
            tries = [_answer(each, f"/v1/{kind}/{object_id}") for each in members]
            answers = dict(zip(members, await asyncio.gather(*tries), strict=True))
        for member, answer in answers.items():
            if answer is not None and answer[0] == 200:
                return member
        silent = [each.entry.name for each, answer in answers.items() if answer is None or answer[0] >= 500]
        if silent:
            raise _silent(silent)
        return None

    def _storing(self, kind: str) -> list[Member]:
        members = [each for each in self._members().values() if not each.is_leaving]
        return [each for each in members if each.entry.batches] if kind in OF_BATCHES else members

    async def listed(self, kind: str, tenant: str, query: QueryParams) -> bytes:
        """The files or batches of all backends, as one page of OpenAI's API. Raises ApiError."""
        most = 10_000 if kind == "files" else 100
        text = query.get("limit", str(most if kind == "files" else 20))
        if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= most):
            raise bad_request(f"limit is {text[:60]!r}; it must be from 1 to {most}", "limit")
        newest_first = is_newest_first(query)
        members = self._storing(kind)
        if not members:
            raise no_store(kind)
        purpose = query.get("purpose")
        async with self._asking:
            answers = await asyncio.gather(*[_all_of(each, kind) for each in members])
        found: list[tuple[float, str, msgspec.Raw]] = []
        for member, objects in zip(members, answers, strict=True):
            for raw in objects:
                each = msgspec.json.decode(raw, type=_Object)
                known = self._homes.get(each.id)
                if self._has_tenants and (known is None or known.tenant != tenant):
                    continue
                if known is None:
                    self.remember(each.id, member, tenant)
                if purpose is None or each.purpose == purpose:
                    found.append((each.created_at, each.id, raw))
        found.sort(key=lambda each: each[0], reverse=True)  # of equal ones, those of a backend stay in its order
        if not newest_first:
            found.reverse()
        ids, after = [each[1] for each in found], query.get("after")
        if after is not None and after not in ids:
            raise bad_request(f"after is {after[:60]!r}, which is not in the list", "after")
        begin = 0 if after is None else ids.index(after) + 1
        end = min(len(ids), begin + int(text[:9]))
        shown = ids[begin:end]
        ends = {"first_id": shown[0] if shown else None, "last_id": shown[-1] if shown else None}
        page = [each[2] for each in found[begin:end]]
        return msgspec.json.encode({"object": "list", "data": page, **ends, "has_more": end < len(ids)})


async def _answer(member: Member, path: str) -> tuple[int, bytes] | None:
    """What a backend says; None where it does not."""
    try:
        return await get(member, path)
    except UpstreamFailed:
        return None


async def _all_of(member: Member, kind: str) -> list[msgspec.Raw]:
    """All files or batches of a backend. Raises ApiError 503 where it does not tell them."""
    found: list[msgspec.Raw] = []
    after = ""
    while True:
        answer = await _answer(member, f"/v1/{kind}?limit={PAGE}{after}")
        try:
            if answer is None or answer[0] != 200:
                raise _silent([member.entry.name])
            page = msgspec.json.decode(answer[1], type=_Page)
            found += page.data
            if not (page.has_more and page.data) or len(found) >= MOST_LISTED:
                return found
            after = f"&after={msgspec.json.decode(found[-1], type=_Object).id}"
        except msgspec.MsgspecError:
            raise _silent([member.entry.name]) from None


def _silent(names: list[str]) -> ApiError:
    return unavailable(f"cannot ask backend {', '.join(names[:20])}, which may have it", "no_backend", 1)


def no_store(kind: str) -> ApiError:
    """The answer where no backend keeps files."""
    return not_found(f"no backend here has {kind}; one that has gets batches = true")


def model_of_upload(raw: bytes) -> str | None:
    """The model that the first request of an uploaded file names; None where there is none."""
    found = _MODEL.search(raw, 0, 2**20)
    if found is None:
        return None
    try:
        return msgspec.json.decode(b'"%b"' % found[1], type=str)
    except msgspec.MsgspecError:
        return None
