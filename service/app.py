"""`create_app(settings)`: wires routes to one Pipeline; no logic."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from headrace.service.auth import Guard
from headrace.service.pipeline import Pipeline
from headrace.service.refusals import Refusals
from headrace.service.routes import control
from headrace.service.routes.datums import post_datums
from headrace.service.routes.problems import on_http_error, on_invalid_query
from headrace.service.settings import Settings

PROBLEMS: dict[int | str, dict[str, Any]] = {
    422: {"description": "errors of the request", "content": {"application/problem+json": {}}}
}

__all__ = ["create_app"]


def create_app(settings: Settings, *, discard: bool = False) -> FastAPI:
    """The service as an ASGI application; its lifespan opens and closes the run."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.refusals = Refusals()
        try:
            app.state.guard = Guard(settings)
            pipeline = Pipeline.open(settings, discard=discard)
        except Exception as error:
            app.state.start_error = error
            raise
        app.state.pipeline = pipeline
        try:
            yield
        finally:
            await pipeline.close()
            app.state.refusals.close()

    app = FastAPI(
        title="headrace", lifespan=lifespan, docs_url=None, redoc_url=None, responses=PROBLEMS
    )
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid_query)
    app.add_route("/v1/datums", post_datums, methods=["POST"])
    app.include_router(control.router)
    return app
