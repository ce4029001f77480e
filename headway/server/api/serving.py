"""How a request for the engine comes in and is answered, whichever its route: its terms, its place, and its end."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response

from headway.policy.admission.queue_bound import Place
from headway.server.api.answers import Shaped
from headway.server.api.fields import Body
from headway.server.api.request_body import check_body
from headway.server.api.schemas import RequestBody
from headway.server.classes import Terms, terms_of
from headway.server.edge.edge import ACCESS, IGNORED
from headway.server.edge.streaming import EventStream, unless_gone
from headway.server.errors import bad_request
from headway.server.generation import clock
from headway.server.service import Service

B = TypeVar("B", bound=Body)
# What of a schema is not kept, in the scope of a request; and how much of it the header tells.
RELAXED, MOST_RELAXED = "headway.relaxed", 500


# Makes the answer, or what will make its stream, of a request that was let in.
Make = Callable[[Terms, Place], Coroutine[Any, Any, Shaped | Response]]


async def read(service: Service, request: Request, model: type[B]) -> B:
    """The checked body of a request. Raises ApiError."""
    return check_body(model, await service.bodies.read(request))


async def read_unless_full(service: Service, request: Request, model: type[B]) -> B:
    """The checked body of a request for the engine. Raises ApiError, before the body is read if nothing can come in."""
    service.refuse_if_full(request.scope[ACCESS].tenant)
    return await read(service, request, model)


async def serve(
    service: Service, request: Request, body: RequestBody, choices: Callable[[], int], make: Make
) -> Response:
    """Let a request in that has so many choices, and answer it.

    Raises:
        ApiError: it is refused, or failed.
        ClientGone: the client went away.
    """
    service.check_model(body.model)
    if body.priority and not service.settings.priority_allowed:
        message = f"priority is {body.priority}; that needs a server with --scheduling-policy priority"
        raise bad_request(message, "priority")
    scope = request.scope
    with service.counting_refusals():
        terms = terms_of(service.classes.table, scope[ACCESS], body, request.headers, scope[IGNORED])
    with service.counting_refusals(terms.service.name):
        place = service.admit(choices(), terms.service, terms.tenant)
    service.begin()
    streams = False
    try:
        answer = await unless_gone(request.receive, make(terms, place))
        if not isinstance(answer, Response):
            streams = True
            answer = EventStream(answer.events, service.settings, partial(_end, service, answer))
        if left_out := scope.get(RELAXED):
            answer.headers["x-headway-relaxed"] = left_out[:MOST_RELAXED].encode("ascii", "replace").decode()
        if service.quotas is not None:
            answer.headers.update(service.quotas.headers(terms.tenant))
        return answer
    finally:
        if not streams:
            place.close(clock())
            service.end()


def _end(service: Service, answer: Shaped) -> None:
    answer.generation.release()
    service.end()
