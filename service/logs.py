"""Logging of the service: one line an event, for people on a terminal, as JSON otherwise.

Libraries do not own logging: every module writes to its stdlib logger, and this is where those
lines get their form.
"""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import Processor

from headrace.service.settings import Log

__all__ = ["configure_logs"]


def configure_logs(settings: Log, *, run: str) -> None:
    """Send the lines of all loggers to stderr, from `log.level` on."""
    human = settings.format == "human" or (settings.format == "auto" and sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        lambda logger, name, event: {**event, "run": run},
    ]
    final: list[Processor] = (
        [structlog.dev.ConsoleRenderer()]
        if human
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.level.upper())
    # uvicorn tells of a failed start with a traceback; the CLI says it in one sentence.
    uvicorn = logging.getLogger("uvicorn.error")
    uvicorn.setLevel(max(logging.WARNING, logging.getLevelName(settings.level.upper())))
    uvicorn.addFilter(lambda record: "lifespan" not in record.pathname)
