"""Errors as `application/problem+json` (RFC 9457): type, title, status, detail, and our `code`.

Every refusal is also noted, to be counted and logged (refusals.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from headrace.schemas.errors import FieldError, InvalidDatums, Refused, Unauthorized
from headrace.service.refusals import Refusals, shown

__all__ = ["has_body", "note", "on_http_error", "on_invalid_query", "problem"]


def note(request: Request, code: str, detail: str) -> None:
    """Count and log a refusal of this request, under the token that `admit` found."""
    refusals: Refusals = request.app.state.refusals
    identity = getattr(request.state, "identity", None)
    refusals.note(
        code,
        detail,
        identity.name if identity is not None else "",
        client=request.client.host if request.client is not None else None,
    )


def has_body(request: Request) -> bool:
    """A body was announced: an answer that leaves it unread closes the connection."""
    headers = request.headers
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def problem(refused: Refused, *, close: bool = False) -> JSONResponse:
    """The answer to a refused request; `close` ends the connection, for a body that was left
    unread.
    """
    findings = refused.errors if isinstance(refused, InvalidDatums) else []
    headers: dict[str, str] = {}
    if refused.retry_after is not None:
        headers["Retry-After"] = str(refused.retry_after)
    if isinstance(refused, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if close:
        headers["Connection"] = "close"
    return _document(refused.status, refused.code, str(refused), findings, headers)


async def on_http_error(request: Request, error: Exception) -> Response:
    """404 and 405 in the same form; a body is left unread."""
    assert isinstance(error, HTTPException)
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    note(request, code, f"{request.method} {shown(request.url.path)}")
    headers = dict(error.headers or {})
    if has_body(request):
        headers["Connection"] = "close"
    return _document(error.status_code, code, str(error.detail), [], headers)


async def on_invalid_query(request: Request, error: Exception) -> Response:
    """422 where a query parameter is wrong."""
    assert isinstance(error, RequestValidationError)
    findings = [
        FieldError(
            index=None,
            field=".".join(str(part) for part in found["loc"][1:]),
            code="query",
            got=repr(found.get("input"))[:200],
            want=str(found["msg"]),
        )
        for found in error.errors()
    ]
    note(request, "invalid", str(findings[0]))
    return _document(422, "invalid", str(findings[0]), findings, {})


def _document(
    status: int, code: str, detail: str, findings: Sequence[FieldError], headers: Mapping[str, str]
) -> JSONResponse:
    content: dict[str, Any] = {
        "type": f"urn:headrace:{code}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "code": code,
        "detail": detail,
    }
    if findings:
        content["errors"] = [finding.to_dict() for finding in findings]
    return JSONResponse(
        content, status_code=status, headers=dict(headers), media_type="application/problem+json"
    )
