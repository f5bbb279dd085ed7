"""What people and clients ask the service: status, limits, policy, health."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from headrace.service.pipeline import Pipeline

__all__ = ["router"]

router = APIRouter()


def _pipeline(request: Request) -> Pipeline:
    pipeline: Pipeline = request.app.state.pipeline
    return pipeline


@router.get("/v1/status")
async def status(request: Request) -> dict[str, Any]:
    """The books, and in one sentence what the next step waits for."""
    return _pipeline(request).status()


@router.get("/v1/limits")
async def limits(request: Request) -> dict[str, Any]:
    """What a post must keep to; `keys` is the run's schema once it is pinned."""
    return _pipeline(request).limits()


@router.get("/v1/policy")
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


@router.get("/healthz")
async def healthz() -> Response:
    """204: the process answers."""
    return Response(status_code=204)


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """204: posts are accepted. 503: starting, stopping or failed."""
    return Response(status_code=204 if _pipeline(request).ready else 503)
