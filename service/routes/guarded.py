"""The guard in front of routes, and what a refusal becomes: counted, logged, answered.

    plain route     identity = admit(request, "rollout", changes_state=True)   raises Refused
    FastAPI route   APIRouter(route_class=guarded("viewer"))                   answers by itself

A FastAPI dependency would come too late: FastAPI reads and parses a route's body before it calls
dependencies, and a stranger's body is not to be read.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from headrace.schemas.errors import Refused
from headrace.service.auth import Guard, Identity, Need
from headrace.service.routes.problems import has_body, note, problem

__all__ = ["admit", "guarded", "refuse"]

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
READS = frozenset(("GET", "HEAD"))


def admit(request: Request, role: Need, *, changes_state: bool) -> Identity:
    """Whose request it is; `request.state.identity` keeps it. Raises what `Guard.check` raises."""
    guard: Guard = request.app.state.guard
    client = request.client.host if request.client is not None else None
    identity = guard.identify(request.headers, client_host=client)
    request.state.identity = identity  # before `allow`: its refusals count for this token
    guard.allow(identity, request.headers, role=role, changes_state=changes_state)
    return identity


def refuse(request: Request, refused: Refused, *, close: bool) -> Response:
    """Count and log a refusal, and answer it; `close` where a body was left unread."""
    note(request, refused.code, str(refused))
    return problem(refused, close=close)


def guarded(role: Need) -> type[APIRoute]:
    """The class of routes that `role` may call."""

    class Guarded(APIRoute):
        def get_route_handler(self) -> Handler:
            handle = super().get_route_handler()
            changes_state = not READS.issuperset(self.methods or ())

            async def answer(request: Request) -> Response:
                admitted = False
                try:
                    admit(request, role, changes_state=changes_state)
                    admitted = True
                    return await handle(request)
                except Refused as refused:
                    return refuse(request, refused, close=not admitted and has_body(request))

            return answer

    return Guarded
