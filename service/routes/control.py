"""What people and clients ask the service: status, limits, policy, health.

Each route stands on the router of those who may call it; who that is for a token of which role is
the table of docs/security.md. The health routes are open and say nothing but their status.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from headrace.service.body import MAX_ID_CHARS
from headrace.service.pipeline import Pipeline
from headrace.service.refusals import Refusals
from headrace.service.routes.guarded import guarded

__all__ = ["router"]

PROBLEM: dict[str, Any] = {"description": "why not", "content": {"application/problem+json": {}}}

for_actors = APIRouter(route_class=guarded("rollout"))
for_trainers = APIRouter(route_class=guarded("trainer"))
for_any_role = APIRouter(route_class=guarded("any"))
for_viewers = APIRouter(route_class=guarded("viewer"))
for_all = APIRouter()


def _pipeline(request: Request) -> Pipeline:
    pipeline: Pipeline = request.app.state.pipeline
    return pipeline


@for_viewers.get("/v1/status")
async def status(request: Request) -> dict[str, Any]:
    """The books, in one sentence what the next step waits for, and refusals by code and token."""
    refusals: Refusals = request.app.state.refusals
    return _pipeline(request).status() | {"refused": refusals.counts()}


@for_any_role.get("/v1/limits")
async def limits(request: Request) -> dict[str, Any]:
    """What a post must keep to; `keys` is the run's schema once it is pinned."""
    return _pipeline(request).limits()


@for_any_role.get("/v1/policy")
async def policy(
    request: Request,
    newer_than: Annotated[int, Query(ge=-1)] = -1,
    wait: Annotated[float, Query(ge=0, le=60, description="seconds")] = 0,
) -> dict[str, Any]:
    """The newest policy version and where its weights are; waits up to `wait` for one above
    `newer_than`.
    """
    newest = await _pipeline(request).policy(newer_than=newer_than, wait_s=wait)
    return {"version": newest.version, "uri": newest.uri}


class Groups(BaseModel):
    """How many groups are about to be started."""

    model_config = ConfigDict(extra="forbid")
    groups: int = Field(ge=1, le=1_000_000)


class GroupEnd(BaseModel):
    """A group ends smaller than was promised."""

    model_config = ConfigDict(extra="forbid")
    group_id: str = Field(min_length=1, max_length=MAX_ID_CHARS)
    size: int = Field(ge=0, le=2**31 - 1, description="members that it ends with")


@for_actors.post("/v1/admission", responses={429: PROBLEM})
async def admission(request: Request, wanted: Groups) -> dict[str, Any]:
    """Reserve credits for groups that are about to be started; they expire."""
    return _pipeline(request).reserve(wanted.groups, request.state.identity.name)


@for_actors.post("/v1/groups/close", responses={404: PROBLEM, 409: PROBLEM})
async def close_group(request: Request, end: GroupEnd) -> dict[str, str]:
    """A rollout failed: the group ends with `size` members. Answers with the group's state."""
    state = _pipeline(request).close_group(end.group_id, end.size, request.state.identity.name)
    return {"group_id": end.group_id, "state": state}


@for_trainers.post("/v1/flush", status_code=204)
async def flush(request: Request) -> Response:
    """Plan what is complete, once a step is due, though it be less than a batch."""
    _pipeline(request).flush()
    return Response(status_code=204)


@for_all.get("/healthz", status_code=204)
async def healthz() -> Response:
    """204: the process answers."""
    return Response(status_code=204)


@for_all.get("/readyz", status_code=204, responses={503: {"description": "not serving"}})
async def readyz(request: Request) -> Response:
    """204: posts are accepted. 503: starting, stopping or failed."""
    return Response(status_code=204 if _pipeline(request).ready else 503)


router = APIRouter()
for part in (for_actors, for_trainers, for_any_role, for_viewers, for_all):
    router.include_router(part)
